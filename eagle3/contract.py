"""The wiring contract: what every stage must agree on for a drafter to accept when served.

Written at capture, completed when the drafter and its vocabulary are bound, carried into the
exported config, compared at every boundary.

Alignment, on tokens ``P0 P1 A2 A3 E4`` (prompt, answer, end of turn; loss mask ``0 0 1 1 1``):
the drafter at position t sees the verifier's state of t and the embedding of token t+1, and
predicts token t+2. A served drafter is only asked once token t+1 is the assistant's, so position
t counts where tokens t+1 and t+2 are both in the mask; at TTT step k (from 0), where tokens t+1
to t+2+k all are:

>>> supervised_positions([0, 0, 1, 1, 1], ttt_step=0)
[1, 2]
>>> supervised_positions([0, 0, 1, 1, 1], ttt_step=1)
[1]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .config import Config, DrafterSection
from .errors import ConfigError, StaleInputError
from .verifier import Verifier

LAYER_CONVENTION = "state entering layer k (transformers hidden_states[k])"
LAST_STATE = "output of the last layer, before the final norm"
ALIGNMENT = "position t: state of t, embedding of token t+1, predicts token t+2"


def supervised_positions(loss_mask: Sequence[int], ttt_step: int) -> list[int]:
    """Positions trained at a TTT step: tokens t+1 to t+2+ttt_step are all in the mask.

    The plain statement of the rule; the trainer computes the same on tensors
    (``batches.collate``) and a property test holds them equal.
    """
    last = len(loss_mask) - 2 - ttt_step
    return [t for t in range(last) if all(loss_mask[t + 1 : t + 3 + ttt_step])]


@dataclass(frozen=True)
class Wiring:
    """The contract. The last two fields are None until 04 binds them."""

    aux_layer_ids: tuple[int, ...]
    num_verifier_layers: int
    layer_convention: str
    last_state: str
    hidden_size: int
    dtype: str
    alignment: str
    vocab_map: str | None = None
    drafter: dict[str, Any] | None = None

    @classmethod
    def at_capture(cls, config: Config, verifier: Verifier) -> Wiring:
        """The part that capture decides.

        Raises:
            ConfigError: a layer id the verifier does not have, or another hidden size.
        """
        ids = config.capture.aux_layer_ids
        if ids[-1] >= verifier.num_layers:
            raise ConfigError(
                "an aux layer id is out of range",
                where="capture.aux_layer_ids",
                expected=f"ids from 1 to {verifier.num_layers - 1}, the state entering that layer "
                f"(the last state, id {verifier.num_layers}, is always captured besides)",
                found=list(ids),
                fix="correct capture.aux_layer_ids",
            )
        if config.drafter.hidden_size != verifier.hidden_size:
            raise ConfigError(
                "the drafter shares the verifier's embedding, so their hidden sizes must agree",
                where="drafter.hidden_size",
                expected=verifier.hidden_size,
                found=config.drafter.hidden_size,
                fix="correct drafter.hidden_size",
            )
        return cls(
            aux_layer_ids=tuple(ids),
            num_verifier_layers=verifier.num_layers,
            layer_convention=LAYER_CONVENTION,
            last_state=LAST_STATE,
            hidden_size=verifier.hidden_size,
            dtype=config.verifier.dtype,
            alignment=ALIGNMENT,
        )

    def bind(self, *, vocab_map: str, drafter: DrafterSection) -> Wiring:
        """The whole contract, once the vocabulary map (by hash) and the geometry are fixed."""
        return replace(self, vocab_map=vocab_map, drafter=drafter.fingerprint())

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "aux_layer_ids": list(self.aux_layer_ids)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Wiring:
        return cls(**{**value, "aux_layer_ids": tuple(value["aux_layer_ids"])})

    def require_equal(self, found: Wiring, *, where: Any, fix: str) -> None:
        """Refuse an artifact wired otherwise.

        Raises:
            StaleInputError: naming the first field that differs.
        """
        for field, expected in self.to_json().items():
            value = found.to_json()[field]
            if value != expected:
                raise StaleInputError(
                    f"two stages disagree on the wiring contract: {field}",
                    where=where,
                    expected=expected,
                    found=value,
                    fix=fix,
                )
