"""What docs/training.md counts on paper, held to torch's own counter and to the step itself."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.full_size import count, empty_batch
from benchmarks.train_cost import muon_flops, step_flops
from eagle3.batches import Batch, Row, collate
from eagle3.config_file import load_config
from eagle3.optimizers import make_optimizers
from eagle3.ttt import TTTStep
from tests.conftest import ROOT
from tests.drafters import Drafter, open_verifier


@pytest.fixture(scope="module")
def verifier(tiny_verifier_dir):
    return open_verifier(tiny_verifier_dir)


def batch_of(drafter: Drafter, ttt_steps: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    hidden, num_aux = drafter.section.hidden_size, len(drafter.wiring.aux_layer_ids)
    rows = []
    for n in (37, 12, 60):
        mask = torch.arange(n) >= n // 3
        states = torch.randn(n, num_aux + 1, hidden, generator=generator)
        ids = torch.randint(0, drafter.verifier.vocab_size, (n,), generator=generator)
        rows.append(Row(ids, mask, states[:, :-1], states[:, -1]))
    return collate(rows, ttt_steps)


@pytest.mark.parametrize("ttt_steps", [1, 4])
@pytest.mark.parametrize("flags", [{}, {"norm_before_fc": True}, {"fc_norm": True}], ids=str)
@pytest.mark.parametrize("num_key_value_heads", [2, 4])
def test_formula_counts_what_torch_counts(verifier, num_key_value_heads, flags, ttt_steps):
    drafter = Drafter.random(verifier, num_key_value_heads=num_key_value_heads, **flags)
    batch = batch_of(drafter, ttt_steps)
    step = TTTStep(drafter.model, loss="kl_div", ttt_step_loss_decay=1.0)
    with FlopCounterMode(display=False) as counter:
        loss = step(batch).loss
        forward_flops = counter.get_total_flops()
        loss.backward()
    parts = step_flops(drafter.section, len(drafter.vocab_map.d2t), batch).values()
    assert sum(part.forward for part in parts) == forward_flops
    assert sum(part.backward for part in parts) == counter.get_total_flops() - forward_flops


def test_muon_counts_what_torch_counts(write_config):
    config = load_config(write_config({"train.optimizer": "muon"}))
    drafter = config.drafter
    hidden, inner = drafter.hidden_size, drafter.intermediate_size
    q = drafter.num_attention_heads * drafter.head_dim
    k = drafter.num_key_value_heads * drafter.head_dim
    shapes = [(q, 2 * hidden), (k, 2 * hidden), (k, 2 * hidden), (hidden, q), (hidden, 3 * hidden)]
    shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
    matrices = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    norm = torch.nn.Parameter(torch.ones(hidden))
    with FlopCounterMode(display=False) as counter:
        for muon in make_optimizers(config.train, [*matrices, norm])[:-1]:
            muon.step()
    assert muon_flops(config) == counter.get_total_flops()


def test_full_size_step_costs_what_the_formula_says_and_waits_for_no_value():
    config = load_config(ROOT / "configs" / "kimi_k25_int4.yaml", ["train.batch_tokens=2048"])
    batch = empty_batch(config)
    counting, num_trained = count(config, batch)
    parts = step_flops(config.drafter, config.vocab.draft_vocab_size, batch).values()
    assert counting.flops == sum(part.forward + part.backward for part in parts)
    # float32 weights, gradients and two moments cannot be less than what was alive
    assert counting.peak_bytes > 16 * num_trained


def test_what_is_kept_for_the_backward_pass_does_not_grow_with_steps_times_vocabulary(verifier):
    def kept_bytes(draft_vocab_size: int, ttt_steps: int) -> int:
        drafter = Drafter.random(verifier, draft_vocab_size=draft_vocab_size)
        step = TTTStep(drafter.model, loss="kl_div", ttt_step_loss_decay=1.0)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes), id):
            step(batch_of(drafter, ttt_steps))
        return sum(kept)

    steps_add = [kept_bytes(size, 7) - kept_bytes(size, 1) for size in (32, 448)]
    assert steps_add[0] == steps_add[1] > 0
