"""The draft vocabulary map: round trips, choice, what is refused, and 03 as it is run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from eagle3.artifact import open_artifact
from eagle3.config_file import load_config
from eagle3.errors import EXIT_DONE, ConfigError, StaleInputError
from eagle3.rows import TokenRows
from eagle3.script import Invocation
from eagle3.stage import Stage
from eagle3.verifier import Verifier
from eagle3.vocab import TokenCounts, VocabMap, choose, coverage, forced_ids

ROOT = Path(__file__).resolve().parent.parent
VOCAB_SIZE = 40
COUNTS = st.lists(st.integers(0, 5), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE).map(torch.tensor)
FORCED = st.lists(st.integers(0, VOCAB_SIZE - 1), unique=True, max_size=5)


@given(st.sets(st.integers(0, VOCAB_SIZE - 1), min_size=1))
def test_ids_go_to_draft_and_back(target_ids):
    vocab_map = VocabMap.from_target_ids(list(target_ids), VOCAB_SIZE)
    every_target = torch.arange(VOCAB_SIZE)
    draft_ids = vocab_map.draft_ids(every_target)
    inside = draft_ids >= 0
    assert inside.tolist() == vocab_map.t2d.tolist() == [i in target_ids for i in range(VOCAB_SIZE)]
    assert torch.equal(draft_ids[inside] + vocab_map.d2t[draft_ids[inside]], every_target[inside])
    assert vocab_map.draft_ids(vocab_map.target_ids).tolist() == list(range(len(target_ids)))
    assert (draft_ids[~inside] == -1).all()


@given(counts=COUNTS, forced=FORCED, size=st.integers(5, VOCAB_SIZE))
def test_forced_first_then_the_most_frequent_ties_by_lower_id(counts, forced, size):
    vocab_map, num_filled = choose(counts, size, forced)
    chosen = vocab_map.target_ids.tolist()
    rest = [i for i in sorted(range(VOCAB_SIZE), key=lambda i: (-counts[i], i)) if i not in forced]
    expected = [*forced, *rest[: size - len(forced)]]
    assert chosen == sorted(expected)
    assert num_filled == sum(int(counts[i]) == 0 and i not in forced for i in chosen)


@given(counts=COUNTS, forced=FORCED)
def test_coverage_grows_to_one_with_the_size(counts, forced):
    shares = [coverage(counts, choose(counts, n, forced)[0]) for n in range(5, VOCAB_SIZE + 1)]
    if counts.sum() == 0:
        assert set(shares) == {None}
    else:
        assert shares == sorted(shares) and shares[-1] == 1


def test_fewer_distinct_tokens_than_asked_are_filled_with_the_lowest_ids():
    counts = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
    counts[[30, 31]] = 7
    vocab_map, num_filled = choose(counts, 6, [20])
    assert vocab_map.target_ids.tolist() == [0, 1, 2, 20, 30, 31] and num_filled == 3


def test_the_full_vocabulary_is_the_identity():
    vocab_map, _ = choose(torch.ones(VOCAB_SIZE, dtype=torch.int64), VOCAB_SIZE, [3])
    assert not vocab_map.d2t.any() and vocab_map.t2d.all()


@pytest.mark.parametrize("size", [1, VOCAB_SIZE + 1])
def test_a_size_below_the_forced_or_above_the_verifiers_is_a_config_error(size):
    with pytest.raises(ConfigError) as error:
        choose(torch.ones(VOCAB_SIZE), size, [1, 2])
    assert error.value.where == "vocab.draft_vocab_size"


def test_the_digest_is_of_the_ids_and_survives_the_file(tmp_path):
    vocab_map = VocabMap.from_target_ids([9, 2, 5], VOCAB_SIZE)
    vocab_map.save(tmp_path / "map.safetensors")
    loaded = VocabMap.load(tmp_path / "map.safetensors")
    assert torch.equal(loaded.d2t, vocab_map.d2t) and torch.equal(loaded.t2d, vocab_map.t2d)
    assert loaded.digest == vocab_map.digest
    assert loaded.digest != VocabMap.from_target_ids([9, 2, 6], VOCAB_SIZE).digest


def absolute_ids(d2t, t2d):
    return d2t + torch.arange(len(d2t)), t2d


def decreasing(d2t, t2d):
    return d2t.flip(0), t2d


def negative(d2t, t2d):
    return d2t - 10, t2d


def other_mask(d2t, t2d):
    return d2t, t2d.roll(1)


def beyond_the_vocabulary(d2t, t2d):
    return d2t + VOCAB_SIZE, t2d


def another_dtype(d2t, t2d):
    return d2t.int(), t2d


@pytest.mark.parametrize(
    "damage",
    [absolute_ids, decreasing, negative, other_mask, beyond_the_vocabulary, another_dtype],
)
def test_what_is_not_a_map_is_refused(tmp_path, damage):
    good = VocabMap.from_target_ids([2, 5, 9], VOCAB_SIZE)
    d2t, t2d = damage(good.d2t, good.t2d)
    save_file({"d2t": d2t, "t2d": t2d}, tmp_path / "map.safetensors")
    with pytest.raises(StaleInputError):
        VocabMap.load(tmp_path / "map.safetensors")


def test_forced_tokens_are_one_token_each(write_config):
    verifier = Verifier.open(load_config(write_config()).verifier)
    start = verifier.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert forced_ids(verifier, ["<|im_start|>"]) == [*verifier.end_of_turn_ids, start]
    with pytest.raises(ConfigError) as error:
        forced_ids(verifier, ["<|no_such_token|>"])
    assert "<|no_such_token|>" in error.value.where


def publish_data(config_path: Path) -> TokenCounts:
    """A 01 artifact with two training rows and a validation row; what its counts should be."""
    config = load_config(config_path)
    invocation = Invocation("01_prepare_data.py", config_path, (), check=False, redo=False)
    with Stage(config, "01_data", invocation) as stage:
        rows = TokenRows.from_lists(
            [([5, 6, 7, 7], [0, 1, 1, 1]), ([5, 8], [0, 1]), ([5, 9], [0, 1])],
            source_ids=[0, 1, 0],
            is_validation=[False, False, True],
            sources=[source.name for source in config.data.sources],
        )
        counts = TokenCounts.of(rows, stage.verifier.vocab_size)
        counts.save(stage.directory / "token_counts.safetensors")
        stage.commit(files=["token_counts.safetensors"], counts={})
    return counts


def test_counts_are_of_supervised_training_tokens(write_config):
    counts = publish_data(write_config()).counts
    assert counts[0].nonzero().flatten().tolist() == [6, 7] and counts[0, 7] == 2
    assert counts[1].nonzero().flatten().tolist() == [8]


def test_03_publishes_a_map_that_opens_again(write_config):
    path = write_config({"vocab.draft_vocab_size": 5})
    publish_data(path)
    command = [sys.executable, str(ROOT / "03_build_vocab_map.py"), str(path)]
    for said in ("done", "already done"):
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == EXIT_DONE and said in run.stdout, run.stdout + run.stderr
    invocation = Invocation("03_build_vocab_map.py", path, (), check=False, redo=False)
    artifact = open_artifact(load_config(path), "03_vocab", invocation)
    vocab_map = VocabMap.load(artifact.path("vocab_map.safetensors"))
    verifier = Verifier.open(load_config(path).verifier)
    forced = forced_ids(verifier, ["<|im_end|>", "<|im_start|>"])
    assert vocab_map.target_ids.tolist() == sorted({*forced, 6, 7, 8})
    results = json.loads((artifact.directory / "manifest.json").read_text())["results"]
    assert results["vocab_map"] == vocab_map.digest
    assert results["coverage"] == {
        "overall": 1.0,
        "sources": {"chitchat": 1.0, "chatterbot": 1.0},
    }
    assert np.frombuffer((artifact.path("coverage.png")).read_bytes()[:4], "u1")[1:].tobytes() == (
        b"PNG"
    )
