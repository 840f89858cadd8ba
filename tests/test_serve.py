"""Served runs: what vLLM counts is what the replay predicts, and answers do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import Drafter, open_verifier

from eagle3.acceptance import Acceptance
from eagle3.capture import NEAR_TIE, VerifierHead
from eagle3.config_file import load_config
from eagle3.engine import Sampling
from eagle3.predict import predict, served_answers
from eagle3.replay import Replay
from eagle3.serve import ServedRun, capture_served, compare, serve, serve_sets
from eagle3.shards import Shard, ShardBuffer

NUM_DRAFTED, MAX_NEW_TOKENS, NUM_PROMPTS = 3, 40, 12


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = range(8, 8 + NUM_PROMPTS)
    return [torch.randint(2, 512, (n,), generator=generator).tolist() for n in lengths]


def train_briefly(directory: Path, prompts: list[list[int]], **changes: Any) -> Drafter:
    """A drafter that is right often and wrong often on the verifier's greedy answers."""
    from speculators.losses import resolve_loss_config
    from transformers import LlamaForCausalLM

    verifier = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    last_states = []
    verifier.model.norm.register_forward_pre_hook(lambda _, args: last_states.append(args[0]))
    rows = []
    for prompt in prompts:
        with torch.no_grad():
            ids = verifier.generate(
                torch.tensor([prompt]), max_new_tokens=MAX_NEW_TOKENS, do_sample=False
            )
            states = verifier(ids, output_hidden_states=True).hidden_states
        rows.append((ids, torch.cat([states[k] for k in (1, 2, 3)], -1), last_states[-1]))
    emitted = sorted({int(i) for ids, _, _ in rows for i in ids[0]})
    drafter = Drafter.random(open_verifier(directory), target_ids=emitted, **changes)

    trainable = [p for p in drafter.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-3)
    loss_config = resolve_loss_config("kl_div", "eager")
    for step in range(60):
        ids, aux, last = rows[step % (len(rows) // 2)]  # the other half is never seen
        _, loss, _ = drafter.model(
            hidden_states=aux[:, :-1],
            input_ids=ids[:, 1:],
            document_ids=torch.zeros(1, ids.shape[1] - 1, dtype=torch.long),
            loss_mask=torch.ones(1, ids.shape[1] - 1, dtype=torch.bool),
            verifier_last_hidden_states=last[:, 1:],
            ttt_steps=NUM_DRAFTED,
            loss_config=loss_config,
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter


GEOMETRIES = {
    # Attention 256 wide on a hidden size of 64, grouped heads.
    "wide": {"head_dim": 64},
    "flags": {
        "head_dim": 32,
        "num_key_value_heads": 4,
        "norm_before_residual": True,
        "fc_norm": True,
        "norm_output": True,
    },
}


@pytest.fixture(scope="module")
def trained(tiny_verifier_dir) -> dict[str, Drafter]:
    """Both drafters, before an engine takes this process's threads.

    Tensors this small are twenty times slower on two threads.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    drafters = {
        name: train_briefly(tiny_verifier_dir, make_prompts(), **changes)
        for name, changes in GEOMETRIES.items()
    }
    torch.set_num_threads(num_threads)
    return drafters


@pytest.mark.slow
@pytest.mark.parametrize("name", GEOMETRIES)
def test_vllm_counts_what_replay_predicts(trained, write_config, tmp_path, name):
    """The whole of 06 on a float32 verifier, where there are no near ties: equal to the count."""
    from eagle3.engine import Engine

    prompts = make_prompts()
    drafter = trained[name]
    directory = drafter.export(tmp_path / "drafter")
    config = load_config(write_config())
    verifier = drafter.verifier

    engine = Engine(
        config,
        verifier,
        drafter=directory,
        num_speculative_tokens=NUM_DRAFTED,
        max_num_seqs=config.verify.concurrency,
    )
    greedy = Sampling(0, MAX_NEW_TOKENS)
    with_drafter = serve(engine, "test", prompts, greedy, NUM_DRAFTED)
    again = serve(engine, "test", prompts, greedy, NUM_DRAFTED)
    engine.close()
    assert again.acceptance == with_drafter.acceptance  # counters are differences
    assert again.answers == with_drafter.answers

    head = VerifierHead(verifier, "float32")
    engine = Engine(config, verifier, max_num_seqs=config.verify.concurrency)
    paths = {"test": tmp_path / "baseline.json"}
    serve_sets(engine, {"test": prompts}, paths, MAX_NEW_TOKENS, 0)
    shard = tmp_path / "states.safetensors"
    capture_served(engine, drafter.wiring, head, prompts, with_drafter.answers, shard, NUM_DRAFTED)
    engine.close()
    baseline = ServedRun.load(paths["test"])

    states = Shard.open(shard)
    lossless = compare("test", prompts, with_drafter, baseline, states, head)
    assert (lossless.equal, lossless.unexplained) == (NUM_PROMPTS, 0)

    replay = Replay(directory, verifier.embed_tokens(), torch.float32)
    answers = served_answers(states, prompts, with_drafter.answers)
    predicted = predict("test", replay, answers, NUM_PROMPTS, NUM_DRAFTED)
    assert predicted.acceptance == with_drafter.acceptance
    # Neither perfect nor hopeless, at every draft position: else equality would say little.
    shares = predicted.acceptance.per_position
    assert 0.02 < shares[2] < shares[1] < shares[0] < 0.98, shares


def test_run_round_trips(tmp_path):
    for acceptance in (None, Acceptance(5, (3, 1))):
        run = ServedRun(((1, 2), (3,)), 1.5, acceptance)
        run.save(tmp_path / "run.json")
        assert ServedRun.load(tmp_path / "run.json") == run
    assert run.tokens_per_s == 2.0


@pytest.fixture
def head(tiny_verifier_dir) -> VerifierHead:
    return VerifierHead(open_verifier(tiny_verifier_dir), "float32")


def states_shard(path: Path, last_states: torch.Tensor) -> Shard:
    """One row of ``len(last_states)`` tokens."""
    num_tokens = len(last_states)
    buffer = ShardBuffer.allocate([0], [num_tokens], num_aux=1, hidden_size=64, dtype=torch.float32)
    aux = torch.zeros(num_tokens, 64)
    buffer.put(torch.arange(num_tokens), torch.zeros(num_tokens).int(), [aux, last_states])
    buffer.publish(path)
    return Shard.open(path)


def tied_state(head: VerifierHead) -> torch.Tensor:
    """A last state ``[64]`` on the border between two tokens: bisected until their logits meet."""
    generator = torch.Generator().manual_seed(0)
    low, high = torch.randn(2, 64, generator=generator)
    low_token = int(head.logits(low[None]).argmax())
    assert int(head.logits(high[None]).argmax()) != low_token
    for _ in range(30):
        middle = (low + high) / 2
        if int(head.logits(middle[None]).argmax()) == low_token:
            low = middle
        else:
            high = middle
    return low


def test_difference_is_explained_only_at_a_near_tie_of_both(tmp_path, head):
    prompt = [5, 6, 7]
    last = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    last[3] = tied_state(head)  # of answer[0]: it decides answer[1], and nothing else does
    states = states_shard(tmp_path / "states.safetensors", last)
    logits = head.logits(last[3][None])[0]
    first, second, third = (int(i) for i in logits.topk(3).indices)
    assert logits[first] - logits[third] > 2 * NEAR_TIE * logits[first].clamp_min(1)

    def compared(ours: tuple[int, ...], theirs: tuple[int, ...]):
        runs = (ServedRun((answer,), 1.0, None) for answer in (ours, theirs))
        return compare("test", [prompt], *runs, states, head)

    assert compared((9, first, 1), (9, first, 1)).equal == 1
    tie = compared((9, first, 1), (9, second, 2))  # what follows a tie may differ
    assert (tie.compared, tie.equal, tie.near_ties, tie.unexplained) == (1, 0, 1, 0)
    assert tie.examples[0]["answer_position"] == 1
    # One token of the two far below the top: an error, whichever run made it.
    assert compared((9, first), (9, third)).unexplained == 1
    assert compared((9, third), (9, first)).unexplained == 1
    # Equal where the tie is, different after it: that state is not tied.
    assert compared((9, first, first), (9, first, second)).unexplained == 1
    assert compared((9,), (9, first)).unexplained == 1  # one stops, the other goes on
    both = tie + compared((9, first), (9, third))
    assert (both.compared, both.near_ties, both.unexplained, len(both.examples)) == (2, 1, 1, 2)
