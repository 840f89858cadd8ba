"""What the training code does on a few validation rows, on record; and whether the export says so.

04 ends by letting the very code that trained (``batches``, ``ttt``) say, of the weights it
publishes, which positions it supervises, which tokens it pulls towards, and which it drafts. 05
works the same out from the other end: positions from the contract, tokens from the verifier's own
head, drafts by the replay of the exported directory, none of which shares code with training. A
mask shifted by one, states in another order, a target normed twice, RoPE from another width: the
first place where the two part is the error.

Both compute in float32 on the weights as exported, each rounded once, so they are equal but for
the order of sums. As in training, step k goes on with the row's own token, not with a draft.

    row, position  int64 [S]      where: t, drafted from the state of t and the embedding of t+1
    valid          bool  [K, S]   whether it is supervised at TTT step k
    aims           int64 [K, S]   the target id the loss pulls towards, for token t+2+k
    drafts         int64 [K, S]   the target id drafted
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from .batches import RowReader, collate
from .capture import VerifierHead
from .contract import supervised_positions
from .drafter import BORROWED
from .errors import GateError
from .files import write_tensors
from .replay import Replay, best_and_margin
from .rows import TokenRows
from .shards import Shard
from .ttt import TTTStep

TESTIMONY = "testimony.safetensors"
_MOST_TOKENS = 2048  # of all rows together, unless the first is longer
# Share of the best logit within which two tokens may swap: the same sums in another order, on a
# GPU and on a CPU, come to a tenth of it at most.
_NEAR_TIE = 2**-12
_STATES_AT_ONCE = 256  # bounds the verifier's logits


@dataclass(frozen=True)
class Testimony:
    """The file's tensors."""

    row: torch.Tensor
    position: torch.Tensor
    valid: torch.Tensor
    aims: torch.Tensor
    drafts: torch.Tensor

    @classmethod
    def load(cls, path: Path) -> Testimony:
        return cls(**load_file(path))

    def save(self, path: Path) -> None:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        write_tensors(path, {name: tensor.contiguous() for name, tensor in tensors.items()})


def witnesses(rows: TokenRows) -> list[int]:
    """Validation rows that 04 and 05 both look at: the first few with something supervised."""
    chosen, num_tokens = [], 0
    for row_id in np.flatnonzero(rows.is_validation).tolist():
        length = int(rows.lengths[row_id])
        if chosen and num_tokens + length > _MOST_TOKENS:
            break
        if supervised_positions(rows.row(row_id)[1], ttt_step=0):
            chosen.append(row_id)
            num_tokens += length
    return chosen


@torch.no_grad()
def testify(drafter: Any, loss: str, reader: RowReader, ttt_steps: int) -> Testimony:
    """One batch of rows through the training step, in float32.

    Args:
        drafter: speculators' model, trained; its weights are rounded to bfloat16 for good.
    """
    for name, parameter in drafter.named_parameters():
        if name not in BORROWED:
            parameter.copy_(parameter.bfloat16())
    # A step of its own: the trainer's computes in mixed precision.
    step = TTTStep(drafter, loss=loss, ttt_step_loss_decay=1.0)
    row_ids = witnesses(reader.rows)
    batch = collate([reader[row_id] for row_id in row_ids], ttt_steps)
    batch = batch.to(drafter.fc.weight.device)
    result = step(batch, with_matches=True)
    lengths = torch.from_numpy(reader.rows.lengths[row_ids]) - 1  # drafter positions of each row
    begins = lengths.cumsum(0) - lengths
    supervised = batch.supervised.cpu()
    index = torch.searchsorted(begins, supervised, right=True) - 1
    return Testimony(
        row=torch.tensor(row_ids)[index],
        position=supervised - begins[index],
        valid=batch.valid.cpu(),
        aims=step.aims(batch).cpu(),
        drafts=result.drafts.cpu(),
    )


def require_same(
    said: Testimony,
    where: Path,
    rows: TokenRows,
    shards: Iterable[Shard],
    head: VerifierHead,
    replay: Replay,
) -> int:
    """Compare what training said with what the contract, the verifier and the export say.

    Args:
        where: the testimony's file, for the error.
        shards: 02's, of the validation rows.
        head: the verifier's, in float32.
        replay: of the exported drafter, in float32.

    Returns:
        Drafts compared.

    Raises:
        GateError: naming the first row, position and TTT step where they part.
    """
    wanted, num_steps = witnesses(rows), len(said.valid)
    captured = {
        row_id: shard.row(index)
        for shard in shards
        for index, row_id in enumerate(shard.row_ids.tolist())
        if row_id in wanted
    }
    steps = torch.arange(num_steps)[:, None]
    for row_id in wanted:
        here = said.row == row_id
        at, valid = said.position[here], said.valid[:, here]
        for k in range(num_steps):
            expected = supervised_positions(rows.row(row_id)[1], k)
            found = at[valid[k]].tolist()
            if found != expected:
                raise _parted(
                    f"{where}: positions supervised in row {row_id} at TTT step {k}",
                    f"{_span(expected)}, as the loss mask says",
                    f"{_span(found)}: is the mask shifted, or the step's?",
                )
        row = captured[row_id]
        ids, margins = _best_tokens(row.last_hidden_states, head, replay.target_ids)
        decided_by = (at + 1 + steps).clamp_max(len(ids) - 1)  # token t+2+k by the state before it
        _require_equal(
            said.aims[:, here],
            ids[decided_by],
            valid & (margins[decided_by] > _NEAR_TIE),
            at,
            f"{where}: the token aimed at in row {row_id}",
            "argmax(lm_head(norm(last state)))",
            "the last state: which layer's, which token's, normed once",
        )
        ids, margins = replay.draft_along(row.input_ids, row.aux_hidden_states, at, num_steps)
        _require_equal(
            said.drafts[:, here],
            ids.T,
            valid & (margins.T > _NEAR_TIE),
            at,
            f"{where}: the token drafted in row {row_id}",
            "the exported drafter's draft",
            "aux states and their order, RoPE, head_dim, norms, weights, embedding, vocabulary; "
            "where TTT step 0 is right, norm_output and the positions of the chain",
        )
    return int(said.valid.sum())


def _best_tokens(
    last_states: torch.Tensor, head: VerifierHead, target_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the draft vocabulary: the verifier's best token after each state, int64 ``[n]``, and its
    margin."""
    target_ids = target_ids.cpu()
    parts = last_states.split(_STATES_AT_ONCE)
    found = [best_and_margin(head.logits(part)[:, target_ids]) for part in parts]
    best, margins = (torch.cat(each) for each in zip(*found, strict=True))
    return target_ids[best], margins


def _require_equal(
    said: torch.Tensor,
    expected: torch.Tensor,
    counts: torch.Tensor,
    at: torch.Tensor,
    where: str,
    rule: str,
    look_at: str,
) -> None:
    """Two ``[K, S]`` are equal where it counts."""
    differs = counts & (said != expected)
    if not differs.any():
        return
    k, place = differs.nonzero()[0].tolist()
    shares = zip(differs.sum(1).tolist(), counts.sum(1).tolist(), strict=True)
    raise _parted(
        f"{where}, position {int(at[place])}, TTT step {k}",
        f"{rule}, {int(expected[k, place])}",
        f"{int(said[k, place])}; step by step {', '.join(f'{a} of {b}' for a, b in shares)} are "
        f"others. Look at {look_at}",
    )


def _span(positions: Sequence[int]) -> str:
    ends = f", {positions[0]} to {positions[-1]}" if positions else ""
    return f"{len(positions)} positions{ends}"


def _parted(where: str, expected: str, found: str) -> GateError:
    return GateError(
        "training did otherwise than the exported drafter does",
        where=where,
        expected=expected,
        found=found,
        fix="correct what it names, in training or in the export, and redo 04 (04_train.py --redo)",
    )
