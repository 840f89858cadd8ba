"""The witness against independent computations: speculators' model, and a simulated engine.

speculators' forward is teacher-forced: at TTT step k it embeds token t+1+k. A chain of drafts is
what it computes on a row whose tokens after t+1 *are* those drafts, so every step of every chain
can be compared, not only drafts that happen to match.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from drafters import Drafter, open_verifier, rounded
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from eagle3.acceptance import Acceptance, walk
from eagle3.export import WEIGHTS
from eagle3.published import Published
from eagle3.replay import Replay

NUM_DRAFTED = 4
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "attention_factor": 2.0,  # so large that leaving it out changes drafts
}
GEOMETRIES = {
    "grouped heads": {},
    "one head for all": {"num_key_value_heads": 1},
    "multi-head, narrow": {"num_key_value_heads": 4, "head_dim": 8},
    "multi-head, wide": {"num_key_value_heads": 4, "head_dim": 64},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm, norm_output": {"fc_norm": True, "norm_output": True},
    "norm_output, residual": {"norm_output": True, "norm_before_residual": True},
    "steep rope": {"rope_theta": 50.0},
    "yarn": {"rope_scaling": YARN, "max_position_embeddings": 256},
    "epsilon that matters": {"rms_norm_eps": 0.3},
    "two aux states, no map": {"aux_layer_ids": (1, 3), "draft_vocab_size": 512},
}


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small are slower on several threads, on a busy machine ten times."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def open_replay(drafter: Drafter, directory: Path, dtype: torch.dtype = torch.float32) -> Replay:
    published = Published.open(directory, drafter.verifier)
    return Replay(published, drafter.verifier.embed_tokens(), dtype)


def speculators_drafts(
    drafter: Drafter, input_ids: torch.Tensor, aux: torch.Tensor, positions: torch.Tensor
) -> list[list[int]]:
    """Target ids drafted at each position, ``[A][K]``.

    Each position gets its own copy of the row as one document of a pack, and the pack is run
    again after each step with the drafts of that step written into it.
    """
    num_rows, length = len(positions), len(input_ids) - 1
    rows = input_ids.repeat(num_rows, 1)
    documents = torch.arange(num_rows).repeat_interleave(length)
    places = torch.arange(num_rows) * length + positions
    drafts = []
    for step in range(NUM_DRAFTED):
        with torch.no_grad():
            steps = drafter.model(
                hidden_states=aux[:-1].flatten(1).repeat(num_rows, 1)[None],
                input_ids=rows[:, 1:].reshape(1, -1),
                document_ids=documents[None],
                ttt_steps=step + 1,
            )
        drafts.append(drafter.vocab_map.target_ids[steps[step][0, places]])
        # t+2+step is after t+1: step 0 of t never sees it.
        rows[torch.arange(num_rows), positions + 2 + step] = drafts[-1]
    return torch.stack(drafts, dim=1).tolist()


@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_chain_is_speculators(tiny_verifier_dir, tmp_path, name):
    drafter = Drafter.random(open_verifier(tiny_verifier_dir), **GEOMETRIES[name])
    directory = drafter.export(tmp_path / "drafter")
    rounded(drafter.model)
    replay = open_replay(drafter, directory)

    generator = torch.Generator().manual_seed(1)
    num_tokens, num_aux = 24, len(drafter.wiring.aux_layer_ids)
    input_ids = torch.randint(0, 512, (num_tokens,), generator=generator)
    # States of unequal size: an fc that normed them wrongly must show.
    scale = torch.linspace(0.5, 20, num_tokens)[:, None, None]
    aux = torch.randn(num_tokens, num_aux, 64, generator=generator) * scale
    positions = torch.tensor([0, 3, 7, 12, num_tokens - NUM_DRAFTED - 2])
    found = replay.draft(input_ids, aux, positions, NUM_DRAFTED)
    expected = speculators_drafts(drafter, input_ids, aux, positions)
    assert found.tolist() == expected
    assert len({tuple(row) for row in expected}) > 1  # not one constant token


def test_blocks_of_positions_do_not_see_each_other(tiny_verifier_dir, tmp_path, monkeypatch):
    drafter = Drafter.random(open_verifier(tiny_verifier_dir))
    directory = drafter.export(tmp_path / "drafter")
    replay = open_replay(drafter, directory)
    input_ids, aux = torch.randint(0, 512, (30,)), torch.randn(30, 3, 64)
    positions = torch.arange(28)
    whole = replay.draft(input_ids, aux, positions, 3)
    monkeypatch.setattr("eagle3.replay._DRAFTS_AT_ONCE", 5)
    assert torch.equal(replay.draft(input_ids, aux, positions, 3), whole)
    assert torch.equal(replay.draft(input_ids[:12], aux[:12], positions[:10], 3), whole[:10])


def test_top_five_begin_with_the_draft(tiny_verifier_dir, tmp_path):
    drafter = Drafter.random(open_verifier(tiny_verifier_dir))
    replay = open_replay(drafter, drafter.export(tmp_path / "drafter"))
    input_ids, aux = torch.randint(0, 512, (30,)), torch.randn(30, 3, 64)
    ids, logits = replay.top(input_ids, aux, 17, 3, 5)
    assert torch.equal(ids[:, 0], replay.draft(input_ids, aux, torch.tensor([17]), 3)[0])
    assert ids.shape == logits.shape == (3, 5) and bool((logits.diff(dim=1) <= 0).all())
    assert all(len(set(step)) == 5 for step in ids.tolist())


def test_a_drafter_with_its_own_embedding_reads_that(tiny_verifier_dir, tmp_path):
    drafter = Drafter.random(open_verifier(tiny_verifier_dir))
    directory = drafter.export(tmp_path / "drafter")
    own = torch.randn(512, 64).bfloat16()
    tensors = {**load_file(directory / WEIGHTS), "embed_tokens.weight": own}
    save_file(tensors, directory / WEIGHTS)
    input_ids, aux = torch.randint(0, 512, (30,)), torch.randn(30, 3, 64)
    replay = open_replay(drafter, directory)
    found = replay.draft(input_ids, aux, torch.arange(28), 3)
    del tensors["embed_tokens.weight"]
    save_file(tensors, directory / WEIGHTS)
    published = Published.open(directory, drafter.verifier)
    expected = Replay(published, own, torch.float32).draft(input_ids, aux, torch.arange(28), 3)
    assert torch.equal(found, expected)
    verifiers = open_replay(drafter, directory).draft(input_ids, aux, torch.arange(28), 3)
    assert not torch.equal(found, verifiers)


def test_answer_says_which_drafts_match(tiny_verifier_dir, tmp_path):
    """A row whose answer holds some of the drafter's own drafts, by hand."""
    drafter = Drafter.random(open_verifier(tiny_verifier_dir))
    directory = drafter.export(tmp_path / "drafter")
    replay = open_replay(drafter, directory)
    input_ids, aux = torch.randint(0, 512, (12,)), torch.randn(12, 3, 64)
    start, num_answer = 5, 4  # answer tokens 5..8, tokens 9..11 beyond
    first = replay.draft(input_ids, aux, torch.tensor([start - 1]), 3)[0]
    input_ids[start + 1 : start + 3] = first[:2]
    input_ids[start + 3] = (first[2] + 1) % 512
    replayed = replay.answer(
        input_ids, aux, answer_start=start, num_answer_tokens=num_answer, num_draft_tokens=3
    )
    assert replayed.drafts.shape == replayed.matches.shape == (num_answer, 3)
    assert replayed.matches[0].tolist() == [True, True, False]
    for i in range(num_answer):
        for k in range(3):
            token = start + i + 1 + k
            named = token < 12 and replayed.drafts[i, k] == input_ids[token]
            assert bool(replayed.matches[i, k]) == bool(named)


def test_nothing_matches_past_the_end(tiny_verifier_dir, tmp_path, monkeypatch):
    drafter = Drafter.random(open_verifier(tiny_verifier_dir))
    directory = drafter.export(tmp_path / "drafter")
    replay = open_replay(drafter, directory)
    monkeypatch.setattr(Replay, "draft", lambda *_args: torch.full((3, 2), 7))
    row = torch.full((6,), 7)  # every draft names the token every known place holds
    matches = replay.answer(
        row, torch.zeros(6, 3, 64), answer_start=3, num_answer_tokens=3, num_draft_tokens=2
    ).matches
    assert matches.tolist() == [[True, True], [True, False], [False, False]]


def test_bfloat16_rounds_but_computes_the_same(tiny_verifier_dir, tmp_path):
    drafter = Drafter.random(open_verifier(tiny_verifier_dir))
    directory = drafter.export(tmp_path / "drafter")
    input_ids, aux = torch.randint(0, 512, (200,)), torch.randn(200, 3, 64)
    positions = torch.arange(190)
    wide = open_replay(drafter, directory).draft(input_ids, aux, positions, 3)
    narrow = open_replay(drafter, directory, torch.bfloat16).draft(input_ids, aux, positions, 3)
    assert (wide[:, 0] == narrow[:, 0]).float().mean() > 0.85


def simulate(matches: np.ndarray, num_answer: int) -> Acceptance:
    """The engine's loop in plain words, on explicit tokens.

    The answer is 0, 1, 2, ...; a draft after token i that matches at k names i+1+k, else -1.
    """
    num_drafted = matches.shape[1]
    accepted_at, num_drafts = [0] * num_drafted, 0
    emitted = [0]  # the prefill emits the first token
    while len(emitted) < num_answer:
        last = emitted[-1]
        drafted = [last + 1 + k if matches[last][k] else -1 for k in range(num_drafted)]
        num_drafts += 1
        verified = []
        for k, token in enumerate(drafted):
            if token != last + 1 + k:
                break
            verified.append(token)
            accepted_at[k] += 1
        emitted += verified
        emitted.append(emitted[-1] + 1)  # the verifier's own
    return Acceptance(num_drafts, tuple(accepted_at))


@given(
    num_answer=st.integers(1, 12),
    num_drafted=st.integers(1, 5),
    past_end=st.booleans(),
    bits=st.randoms(use_true_random=False),
    share=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
)
def test_walk_is_the_engines_loop(num_answer, num_drafted, past_end, bits, share):
    matches = np.array(
        [[bits.random() < share for _ in range(num_drafted)] for _ in range(num_answer)]
    )
    if not past_end:
        for i in range(num_answer):
            matches[i, max(num_answer - 1 - i, 0) :] = False
    walked = walk(matches)
    assert walked == simulate(matches, num_answer)
    assert list(walked.accepted_per_position) == sorted(walked.accepted_per_position, reverse=True)
    if not past_end and num_answer > 1:
        emitted = 1 + walked.num_drafts + sum(walked.accepted_per_position)
        assert num_answer <= emitted <= num_answer + 1  # a full run emits one past the end
