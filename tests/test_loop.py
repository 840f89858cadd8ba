"""The training loop on synthetic shards: exact resume, checkpoints, validation."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3.acceptance import Acceptance, walk
from eagle3.batches import RowReader, collate
from eagle3.checkpoints import KEPT_CHECKPOINTS
from eagle3.config import TrainSection
from eagle3.errors import ConfigError, GateError, Interrupted, StaleInputError
from eagle3.loop import Trainer, trained_state
from eagle3.optimizers import make_optimizers, step_all
from eagle3.plan import plan_epoch, trainable_rows
from eagle3.rows import TokenRows
from eagle3.script import stop_flag
from eagle3.shards import Shard, ShardBuffer
from eagle3.ttt import TTTStep
from eagle3.validation import validate
from tests.test_ttt import HIDDEN, NUM_AUX, VOCAB, build

SECTION = TrainSection(
    loss="lk_hybrid",
    ttt_steps=3,
    ttt_step_loss_decay=0.9,
    num_epochs=2,
    batch_tokens=64,
    optimizer="adamw",
    learning_rate=1e-2,
    warmup_share=0.1,
    weight_decay=0.0,
    max_grad_norm=1.0,
    mixed_precision="bf16",
    seed=3,
    validations_per_epoch=1,
    patience_validations=None,
    trackers=(),
    log_every_steps=2,
    checkpoint_every_steps=3,
)


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> RowReader:
    """40 rows in two shards, the last eight for validation."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(6, 30, 40)
    made = [(rng.integers(0, VOCAB, n), np.arange(n) >= n // 3) for n in lengths]
    rows = TokenRows.from_lists(
        made, source_ids=[0] * 40, is_validation=[i >= 32 for i in range(40)], sources=["made"]
    )
    directory = tmp_path_factory.mktemp("shards")
    shards = []
    for number, row_ids in enumerate((range(25), range(25, 40))):
        buffer = ShardBuffer.allocate(
            row_ids,
            [int(lengths[i]) for i in row_ids],
            num_aux=NUM_AUX,
            hidden_size=HIDDEN,
            dtype=torch.bfloat16,
        )
        ids = torch.from_numpy(np.concatenate([made[i][0] for i in row_ids])).int()
        generator = torch.Generator().manual_seed(number)
        states = [
            torch.randn(len(ids), HIDDEN, generator=generator).bfloat16()
            for _ in range(NUM_AUX + 1)
        ]
        order = torch.randperm(len(ids), generator=generator)  # written by position, in any order
        buffer.put(order, ids[order], [s[order] for s in states])
        path = directory / f"shard-{number:05d}.safetensors"
        buffer.publish(path)
        shards.append(Shard.open(path))
    return RowReader(rows, shards)


def trainer(reader: RowReader, directory: Path, **changes) -> Trainer:
    directory.mkdir(exist_ok=True)
    section = SECTION.model_copy(update=changes)
    model = build()
    step = TTTStep(model, loss=SECTION.loss, ttt_step_loss_decay=0.9)
    row_ids, dropped = trainable_rows(reader.rows)
    assert dropped == {"validation": 8, "nothing_supervised": 0}
    validation = plan_epoch(range(32, 40), reader.rows.lengths, 64, 0)
    return Trainer(section, step, reader, [row_ids], validation, directory)


def final(run: Trainer) -> tuple:
    metrics = [json.loads(s) for s in (run.directory / "metrics.jsonl").read_text().splitlines()]
    for line in metrics:
        for measured in ("tokens_per_s", "waiting_share"):
            line.pop(measured, None)
    optimizers = [optimizer.state_dict() for optimizer in run.optimizers]
    return trained_state(run.step), optimizers, metrics, run.best


@pytest.fixture(scope="module")
def undisturbed(reader, tmp_path_factory):
    run = trainer(reader, tmp_path_factory.mktemp("undisturbed"))
    run.run()
    return final(run), run


@pytest.fixture(scope="module")
def undisturbed_by_muon(reader, tmp_path_factory):
    run = trainer(reader, tmp_path_factory.mktemp("undisturbed"), optimizer="muon")
    run.run()
    return final(run)


@pytest.mark.parametrize(
    ("stop_at", "optimizer"), [(1, "adamw"), (4, "adamw"), (5, "adamw"), (8, "adamw"), (4, "muon")]
)
def test_stopped_and_resumed_equals_undisturbed(
    reader, tmp_path, undisturbed, undisturbed_by_muon, stop_at, optimizer, monkeypatch
):
    """Bit for bit: weights, optimizers, metrics, best; a stop finishes the step and saves it."""
    stopped = trainer(reader, tmp_path / "run", optimizer=optimizer)
    train_step = stopped._train_step

    def and_stop(batch):
        if stopped.done_steps + 1 == stop_at:
            stop_flag.signal_name = "SIGTERM"
        return train_step(batch)

    monkeypatch.setattr(stopped, "_train_step", and_stop)
    with pytest.raises(Interrupted):
        stopped.run()
    stop_flag.signal_name = None
    resumed = trainer(reader, tmp_path / "run", optimizer=optimizer)
    resumed.run()
    assert resumed.done_steps == len(resumed.plan) > stop_at
    expected = undisturbed_by_muon if optimizer == "muon" else undisturbed[0]
    weights, optimizers, metrics, best = final(resumed)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected[0].items())
    assert str(optimizers) == str(expected[1])
    assert best == expected[3]
    # A window of the log that a stop cuts in two is shorter, so those means may differ.
    assert [m for m in metrics if m["kind"] == "validation"] == [
        m for m in expected[2] if m["kind"] == "validation"
    ]


def test_training_learns_and_keeps_what_it_should(undisturbed):
    (_, _, metrics, best), run = undisturbed
    train = [line for line in metrics if line["kind"] == "train"]
    assert train[-1]["loss"] < train[0]["loss"]
    validation = [line for line in metrics if line["kind"] == "validation"]
    assert len(validation) == SECTION.num_epochs
    assert best["acceptance_length"] == max(v["acceptance_length"] for v in validation)
    names = sorted(path.name for path in (run.directory / "checkpoints").iterdir())
    assert len(names) == KEPT_CHECKPOINTS + 1 and "best.pt" in names
    frozen = build()
    assert torch.equal(run.step.drafter.lm_head.weight, frozen.lm_head.weight)
    assert not torch.equal(run.step.drafter.fc.weight, frozen.fc.weight)


def test_stops_early_where_nothing_gets_better(reader, tmp_path):
    """With a rate that changes nothing: the first validation is the best, two more end it; run
    again it stays ended."""
    still = {
        "learning_rate": 1e-12,
        "validations_per_epoch": 3,
        "patience_validations": 2,
    }
    run = trainer(reader, tmp_path / "run", **still)
    run.run()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    validated = [line["step"] for line in lines if line["kind"] == "validation"]
    assert len(validated) == 3 and run.done_steps == validated[-1] < len(run.plan)
    assert run.best["step"] == validated[0]
    again = trainer(reader, tmp_path / "run", **still)
    again.run()
    assert (again.done_steps, again.best) == (run.done_steps, run.best)


def test_loss_not_finite_saves_the_batch_and_keeps_the_last_good_checkpoint(reader, tmp_path):
    run = trainer(reader, tmp_path / "run", checkpoint_every_steps=1, log_every_steps=100)
    poisoned = run._train_step

    def poison(batch):
        if run.done_steps == 3:
            with torch.no_grad():
                run.step.drafter.fc.weight.fill_(float("nan"))
        poisoned(batch)

    run._train_step = poison
    with pytest.raises(GateError, match="loss of step 4 is not finite") as caught:
        run.run()
    saved = torch.load(caught.value.where, weights_only=True)
    assert sorted(saved) == sorted(run.plan[3])
    for row_id, row in saved.items():
        assert torch.equal(row["input_ids"], reader[row_id].input_ids)
    latest = run.checkpoints.latest()
    assert latest == run.checkpoints.of_step(3) and latest.name in caught.value.found
    state = torch.load(latest, weights_only=True)
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


def test_muon_steps_along_the_orthogonalised_momentum_of_matrices_and_adamw_on_norms():
    """The first step's direction has singular values near 1: Newton-Schulz leaves 0.7 to 1.2."""
    generator = torch.Generator().manual_seed(0)
    matrix, norm = (
        torch.nn.Parameter(torch.randn(*size, generator=generator)) for size in [(24, 16), (16,)]
    )
    frozen = torch.nn.Parameter(torch.zeros(8, 8), requires_grad=False)
    section = SECTION.model_copy(update={"optimizer": "muon", "learning_rate": 0.01})
    muon, adamw = make_optimizers(section, [matrix, norm, frozen])
    before = [matrix.detach().clone(), norm.detach().clone()]
    for parameter in (matrix, norm):
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    for optimizer in (muon, adamw):
        optimizer.step()
    step = (before[0] - matrix.detach()) / (0.01 * 0.2 * 24**0.5)  # AdamW's size: 0.2 rms
    assert 0.6 < torch.linalg.svdvals(step).min() <= torch.linalg.svdvals(step).max() < 1.3
    assert torch.allclose(before[1] - norm.detach(), 0.04 * norm.grad.sign(), rtol=1e-3)
    assert not frozen.any()


def test_optimizers_stepped_together_step_as_each_alone():
    sizes = [(96, 64), (64, 96), (64, 64), (64,)]
    section = SECTION.model_copy(update={"optimizer": "muon", "learning_rate": 0.01})
    found = []
    for together in (True, False):
        generator = torch.Generator().manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(*size, generator=generator)) for size in sizes]
        optimizers = make_optimizers(section, weights)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            if together:
                step_all(optimizers)
            else:
                for optimizer in optimizers:
                    optimizer.step()
        found.append(weights)
    assert len(optimizers) == len(sizes)  # one Muon a matrix, and AdamW
    for ours, alone in zip(*found, strict=True):
        assert torch.allclose(ours, alone, atol=1e-5)


def test_a_failing_step_is_not_swallowed():
    class Broken:
        def step(self):
            raise RuntimeError("no step")

    with pytest.raises(RuntimeError, match="no step"):
        step_all([Broken(), Broken()])


def test_a_line_says_what_an_operator_asks(undisturbed):
    (_, _, metrics, _), run = undisturbed
    line = [line for line in metrics if line["kind"] == "train" and line["step"] == 4][0]
    assert 1 <= line["acceptance_length"] <= 4 and len(line["acceptance_per_position"]) == 3
    decayed = [loss * 0.9**k for k, loss in enumerate(line["loss_per_ttt_step"])]
    assert line["loss"] == pytest.approx(sum(decayed))
    raw = json.loads(run.metrics.path.read_text().splitlines()[0])
    assert 0 <= raw["waiting_share"] <= 1 and raw["tokens_per_s"] > 0
    assert (run.directory / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_trackers_get_every_line(reader, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trainer(reader, tmp_path / "run", trackers=("tensorboard",))
    run.run()
    events = EventAccumulator(str(next((tmp_path / "run").rglob("events.out*")).parent))
    events.Reload()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    shown = {e.step: e.value for e in events.Scalars("train/loss")}
    assert shown == pytest.approx({m["step"]: m["loss"] for m in lines if m["kind"] == "train"})
    assert "validation/acceptance_per_position_2" in events.Tags()["scalars"]


def test_tracker_not_installed_is_named(reader, tmp_path):
    with pytest.raises(ConfigError, match="not installed") as caught:
        trainer(reader, tmp_path / "run", trackers=("trackio",))
    assert caught.value.found == "trackio"


def test_validation_walks_each_answer(reader):
    """Against walking every answer on its own."""
    model = build()
    step = TTTStep(model, loss="kl_div", ttt_step_loss_decay=1.0)
    found = validate(step, reader, plan_epoch(range(32, 40), reader.rows.lengths, 64, 0), 3)
    expected = Acceptance(0, (0, 0, 0))
    for row_id in range(32, 40):
        matches = step(collate([reader[row_id]], 3), with_matches=True).matches.T
        expected += walk(np.concatenate([matches.numpy(), np.zeros((1, 3), dtype=bool)]))
    assert found.acceptance == expected


def test_truncated_shard_is_named(reader, tmp_path):
    whole = reader._place[0][0].path.read_bytes()
    path = tmp_path / "shard-00007.safetensors"
    path.write_bytes(whole[: len(whole) - 100])
    with pytest.raises(StaleInputError, match="cannot be read") as caught:
        Shard.open(path)
    assert "shard-00007" in caught.value.where


def test_swapped_tokens_are_found(reader):
    rows = reader.rows
    other = TokenRows(
        (rows.input_ids + 1) % VOCAB,
        rows.loss_mask,
        rows.row_offsets,
        rows.source_ids,
        rows.is_validation,
        rows.sources,
    )
    with pytest.raises(StaleInputError, match="other tokens"):
        RowReader(other, [shard for shard, _ in reader._place.values()])


def test_unfilled_or_infinite_states_are_not_published(tmp_path):
    buffer = ShardBuffer.allocate([5], [3], num_aux=1, hidden_size=2, dtype=torch.float32)
    path = tmp_path / "shard-00000.safetensors"
    ids, state = torch.zeros(2, dtype=torch.int32), torch.ones(2, 2)
    buffer.put(torch.tensor([0, 2]), ids, [state, state])
    with pytest.raises(ValueError, match="1 of 3 positions"):
        buffer.publish(path)
    buffer.put(torch.tensor([1, 2]), ids, [state, state * float("inf")])
    with pytest.raises(GateError, match="last_hidden_states of row 5"):
        buffer.publish(path)
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_goes_on(reader, tmp_path, undisturbed):
    """torch.load itself takes most changed bits for weights."""
    run = trainer(reader, tmp_path / "run")
    run.run()
    last = run.checkpoints.latest()
    whole = last.read_bytes()
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(whole), 20):
        changed = (
            whole[:place] + bytes([whole[place] ^ (1 << rng.integers(8))]) + whole[place + 1 :]
        )
        last.write_bytes(changed)
        try:
            state = run.checkpoints.load(last)
        except StaleInputError as error:
            assert error.where == str(last) and f"remove {last}" in error.fix
        else:  # padding of the archive
            last.write_bytes(whole)
            assert str(state) == str(run.checkpoints.load(last))
    last.write_bytes(whole[:-100])
    with pytest.raises(StaleInputError):
        trainer(reader, tmp_path / "run").run()
    last.unlink()
    (run.directory / "metrics.jsonl").write_text("what a kill left")
    again = trainer(reader, tmp_path / "run")
    again.run()
    (weights, _, metrics, best), expected = final(again), undisturbed[0]
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected[0].items())
    assert metrics == expected[2] and best == expected[3]
