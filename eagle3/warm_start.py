"""Where training starts: at an existing drafter, whose draft vocabulary is kept, or afresh.

03 takes the map of ``vocab.warm_start_from`` instead of choosing one and notes its hash and that
of the weights; 04 takes the weights. The head stays the verifier's own rows, as in every run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .config import Config
from .drafter import start_at_last_aux_state, start_queries_as_keys
from .errors import ConfigError
from .files import sampled_sha256
from .published import Published, require_servable
from .script import log
from .verifier import Verifier
from .vocab import VocabMap

_HEAD = "lm_head.weight"
# Part of the map, not of the weights; a drafter may carry the verifier's embedding along.
_NOT_WEIGHTS = ("d2t", "t2d", "embed_tokens.weight", _HEAD)


def map_of(config: Config, verifier: Verifier) -> tuple[VocabMap, dict[str, str]]:
    """The draft vocabulary of the drafter to start from, and the hash of each of its files.

    Raises:
        ConfigError: no EAGLE-3 drafter, or one of another draft vocabulary size.
        GateError: an engine would not serve it as it is.
    """
    directory = config.vocab.warm_start_from
    published = _open(directory, verifier)
    size = config.vocab.draft_vocab_size
    if (published.draft_vocab_size, published.vocab_size) != (size, verifier.vocab_size):
        raise _differs("vocab.draft_vocab_size", size, published.draft_vocab_size, directory)
    tensors = published.load()
    ids = torch.arange(size) + tensors.get("d2t", 0)
    hashes = {path.name: sampled_sha256(path) for path in {p for p, _ in published.places.values()}}
    return VocabMap.from_target_ids(ids.tolist(), verifier.vocab_size), hashes


def start(drafter: Any, config: Config, verifier: Verifier) -> None:
    """Give a fresh ``Eagle3DraftModel`` the weights training starts from.

    Raises:
        ConfigError: as ``load_weights``.
    """
    if config.vocab.warm_start_from:
        load_weights(drafter, config, verifier)
    else:
        start_at_last_aux_state(drafter)
        start_queries_as_keys(drafter)


def load_weights(drafter: Any, config: Config, verifier: Verifier) -> None:
    """Put the weights of the drafter to start from into a fresh ``Eagle3DraftModel``.

    Raises:
        ConfigError: its geometry or its aux layers are not the config's.
    """
    directory = config.vocab.warm_start_from
    published = _open(directory, verifier)
    if published.aux_layer_ids != config.capture.aux_layer_ids:
        ids = list(config.capture.aux_layer_ids)
        raise _differs("capture.aux_layer_ids", ids, list(published.aux_layer_ids), directory)
    theirs = published.drafter.fingerprint()
    for key, ours in config.drafter.fingerprint().items():
        if theirs[key] != ours:
            raise _differs(f"drafter.{key}", ours, theirs[key], directory)
    tensors = published.load()
    head, rows = tensors[_HEAD].float(), drafter.lm_head.weight
    num_other = int((head - rows).abs().amax(1).gt(1e-2 * rows.abs().max()).sum())
    if num_other:
        log(
            "the drafter has a head of its own; the verifier's rows are put in its place",
            rows_that_differ=f"{num_other}/{len(rows)}",
        )
    weights = {name: t.float() for name, t in tensors.items() if name not in _NOT_WEIGHTS}
    _, unexpected = drafter.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    log("warm start", drafter=directory, tensors=len(weights))


def _open(directory: Path, verifier: Verifier) -> Published:
    published = Published.open(directory, verifier)
    require_servable(directory, published.findings)
    return published


def _differs(key: str, expected: Any, found: Any, directory: Path) -> ConfigError:
    return ConfigError(
        "the drafter to start from is another kind than the config describes",
        where=f"vocab.warm_start_from: {directory}",
        expected=f"{key} {expected}",
        found=found,
        fix=f"set {key} to the drafter's, or vocab.warm_start_from to null",
    )
