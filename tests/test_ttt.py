"""The training step against speculators' own forward: same loss, same gradients."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from speculators.losses import compound_loss, exp_loss_decay, resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig, core
from transformers import LlamaConfig

from eagle3.batches import Row, collate
from eagle3.contract import supervised_positions
from eagle3.losses import LOSSES
from eagle3.plan import plan_epoch
from eagle3.ttt import TTTStep

HIDDEN, VOCAB, DRAFT_VOCAB, NUM_AUX = 32, 97, 53, 3


def build(num_kv_heads: int = 4, **flags: bool) -> Eagle3DraftModel:
    """A random drafter whose attention is 4 x 16 = 64 wide on a hidden size of 32."""
    torch.manual_seed(0)
    layer = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        head_dim=16,
        rms_norm_eps=1e-5,
    )
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=DRAFT_VOCAB, **flags
    )
    model = Eagle3DraftModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if "norm" in name else 1.5 / parameter.shape[-1] ** 0.5
            offset = 1.0 if "norm" in name else 0.0
            parameter.copy_(offset + spread * torch.randn_like(parameter))
            parameter.requires_grad_(name not in core_frozen())
        target_ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
        model.d2t.copy_(target_ids - torch.arange(DRAFT_VOCAB))
        model.t2d.zero_()[target_ids] = True
    return model


def core_frozen() -> tuple[str, ...]:
    return ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight")


def random_rows(lengths=(9, 23, 5, 14)) -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    rows = []
    for n in lengths:
        mask = torch.zeros(n, dtype=torch.bool)
        mask[n // 3 :] = True
        if n > 20:  # two turns
            mask[n // 2 : n // 2 + 3] = False
        rows.append(
            Row(
                torch.randint(0, VOCAB, (n,), generator=generator),
                mask,
                torch.randn(n, NUM_AUX, HIDDEN, generator=generator),
                torch.randn(n, HIDDEN, generator=generator),
            )
        )
    return rows


def theirs(model, rows: list[Row], loss: str, ttt_steps: int, decay: float, monkeypatch):
    """speculators' forward on the packed rows, its per-step mask replaced by the aligned one."""
    shifted = [r.input_ids[1:] for r in rows]
    documents = torch.cat([torch.full((len(s),), i) for i, s in enumerate(shifted)])
    valid = []
    for k in range(ttt_steps):
        flags = [torch.zeros(len(s), dtype=torch.bool) for s in shifted]
        for flag, row in zip(flags, rows, strict=True):
            flag[supervised_positions(row.loss_mask.tolist(), k)] = True
        valid.append(torch.cat(flags)[None])
    losses = resolve_loss_config(loss, "eager")

    def aligned(logits, targets, loss_mask, prev_correct, k, step_decay, loss_config=None):
        end = logits.shape[1] - k
        value, _ = compound_loss(
            logits[:, :end],
            targets[:, k:],
            valid[k][:, :end],
            torch.full((1, end), k),
            loss_config=losses,
            decay_fn=partial(exp_loss_decay, gamma=step_decay),
        )
        return value, {}

    monkeypatch.setattr(core, "compute_metrics", aligned)
    _, value, _ = model(
        torch.cat([r.aux_hidden_states[:-1].flatten(1) for r in rows])[None],
        torch.cat(shifted)[None],
        documents[None],
        position_ids=torch.cat([torch.arange(1, len(s) + 1) for s in shifted])[None],
        verifier_last_hidden_states=torch.cat([r.last_hidden_states[1:] for r in rows])[None],
        ttt_steps=ttt_steps,
        ttt_step_loss_decay=decay,
    )
    return value


@pytest.mark.parametrize("ttt_steps", [1, 3, 7])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"norm_before_fc": True},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_residual": True},
    ],
    ids=["plain", "norm_before_fc", "eagle3.1", "norm_before_residual"],
)
@pytest.mark.parametrize("loss", LOSSES)
def test_step_equals_speculators(loss, ttt_steps, num_kv_heads, flags, monkeypatch):
    model, rows = build(num_kv_heads, **flags), random_rows()
    model.lm_head.weight.requires_grad_(False)
    expected = theirs(model, rows, loss, ttt_steps, 0.8, monkeypatch)
    expected.backward()
    expected_gradients = {
        name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad
    }
    model.zero_grad()
    result = TTTStep(model, loss=loss, ttt_step_loss_decay=0.8)(collate(rows, ttt_steps))
    result.loss.backward()
    # speculators divides by the count plus 1e-5
    assert torch.allclose(result.loss, expected, rtol=2e-6)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            difference = (parameter.grad - expected_gradients[name]).norm()
            assert difference <= 2e-5 * expected_gradients[name].norm() + 1e-9, name


def test_head_gets_no_gradient():
    model = build()
    TTTStep(model, loss="kl_div", ttt_step_loss_decay=1.0)(
        collate(random_rows(), 3)
    ).loss.backward()
    assert model.lm_head.weight.grad is None and model.fc.weight.grad is not None


def test_rows_do_not_see_each_other():
    """A row's loss is the same alone and in a batch with padding."""
    model, rows = build(), random_rows((23, 9))
    step = TTTStep(model, loss="kl_div", ttt_step_loss_decay=1.0)
    alone = [step(collate([row], 3), with_matches=True) for row in rows]
    together = step(collate(rows, 3), with_matches=True)
    counts = [collate([row], 3).valid.sum(1) for row in rows]
    expected = sum(r.loss_per_ttt_step * n for r, n in zip(alone, counts, strict=True))
    assert torch.allclose(together.loss_per_ttt_step, expected / sum(counts), rtol=1e-5)
    assert torch.equal(together.matches, torch.cat([r.matches for r in alone], dim=1))


def test_wrong_alignment_would_show():
    """The comparison can fail: a mask shifted by one gives another loss."""
    model, rows = build(), random_rows()
    step = TTTStep(model, loss="kl_div", ttt_step_loss_decay=1.0)
    shifted = [
        Row(r.input_ids, r.loss_mask.roll(1), r.aux_hidden_states, r.last_hidden_states)
        for r in rows
    ]
    assert abs(step(collate(rows, 3)).loss - step(collate(shifted, 3)).loss) > 1e-3


@given(
    st.lists(st.booleans(), min_size=3, max_size=24).filter(
        lambda mask: supervised_positions(mask, 0)
    ),
    st.integers(1, 7),
)
def test_collate_supervises_what_the_contract_says(mask, ttt_steps):
    n = len(mask)
    row = Row(
        torch.arange(100, 100 + n),
        torch.tensor(mask),
        torch.zeros(n, 1, 2),
        torch.arange(n).float()[:, None].expand(n, 2),
    )
    batch = collate([row], ttt_steps)
    for k in range(ttt_steps):
        positions = supervised_positions(mask, k)
        chosen = batch.valid[k]
        assert batch.supervised[chosen].tolist() == positions
        # position t embeds t+1+k, is judged by the state of t+1+k and names token t+2+k
        embedded = batch.input_ids[batch.supervised][batch.target_index[k][chosen]]
        assert embedded.tolist() == [101 + t + k for t in positions]
        assert batch.next_token_ids[k][chosen].tolist() == [102 + t + k for t in positions]
        states = batch.last_hidden_states[batch.target_index[k][chosen]]
        assert states[:, 0].tolist() == [t + 1 + k for t in positions]
    assert sum(batch.answer_lengths) == len(batch.supervised)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=200), st.integers(0, 5))
def test_epoch_plan_holds_every_row_once(lengths, seed):
    plan = plan_epoch(range(len(lengths)), np.array(lengths), 512, seed)
    assert sorted(row for batch in plan for row in batch) == list(range(len(lengths)))
    assert all(len(b) == 1 or sum(lengths[r] for r in b) <= 512 for b in plan)
    assert plan == plan_epoch(range(len(lengths)), np.array(lengths), 512, seed)
