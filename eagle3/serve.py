"""Measured vLLM runs, and whether drafting changed what the verifier says.

Greedy answers with a drafter and without must be the same tokens. In bfloat16 they need not be:
a verifier step over four tokens rounds otherwise than four steps over one, and two tokens whose
logits are within that rounding may swap. So a difference is explained only if both tokens are
near the top where they first part; after it the answers are free to differ.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .acceptance import Acceptance
from .capture import VerifierHead, capture_rows
from .contract import Wiring
from .engine import Engine, Sampling
from .files import write_json
from .progress import Progress
from .script import log, stop_flag
from .shards import Shard

# The first request pays for lazy initialisation.
_WARM_UP = Sampling(temperature=0, max_new_tokens=8)


@dataclass(frozen=True)
class ServedRun:
    """One prompt set, served once.

    Attributes:
        answers: emitted token ids in the order of the prompts, end of turn included if it came.
        seconds: from the first request to the last answer, the engine already warm.
        acceptance: of this run alone; None without a drafter.
    """

    answers: tuple[tuple[int, ...], ...]
    seconds: float
    acceptance: Acceptance | None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens a second, prefill included."""
        return self.num_tokens / self.seconds

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> ServedRun:
        value = json.loads(path.read_text(encoding="utf-8"))
        counted = value["acceptance"]
        acceptance = counted and Acceptance(
            counted["num_drafts"], tuple(counted["accepted_per_position"])
        )
        return cls(tuple(map(tuple, value["answers"])), value["seconds"], acceptance)


def serve(
    engine: Engine,
    name: str,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    num_speculative_tokens: int,
) -> ServedRun:
    """Answer a prompt set and measure it.

    Args:
        name: of the set, for the progress line.
        num_speculative_tokens: the engine's; 0 without a drafter.

    Raises:
        Interrupted: a stop signal arrived; nothing is kept of the set.
    """
    for _ in engine.generate(prompts[:1], _WARM_UP):
        pass
    before = engine.acceptance(num_speculative_tokens) if num_speculative_tokens else None
    answers: list[tuple[int, ...]] = [()] * len(prompts)
    progress = Progress(len(prompts), "answers")
    start_s = time.monotonic()
    # Closed on a stop, so that the engine aborts what is still running.
    with closing(engine.generate(prompts, sampling)) as completions:
        for completion in completions:
            answers[completion.index] = completion.token_ids
            progress.advance(1, set=name)
            stop_flag.raise_if_set()
    seconds = time.monotonic() - start_s
    progress.close()
    counted = before and engine.acceptance(num_speculative_tokens) - before
    return ServedRun(tuple(answers), seconds, counted)


def serve_sets(
    engine: Engine,
    prompts: dict[str, list[list[int]]],
    paths: dict[str, Path],
    max_new_tokens: int,
    num_speculative_tokens: int,
) -> None:
    """Serve the sets not served yet, greedily, each to its own file: a set is a unit of work."""
    sampling = Sampling(temperature=0, max_new_tokens=max_new_tokens)
    for name, path in missing(paths).items():
        stop_flag.raise_if_set()
        run = serve(engine, name, prompts[name], sampling, num_speculative_tokens)
        run.save(path)
        length = run.acceptance and run.acceptance.acceptance_length
        log(path.stem, tokens=run.num_tokens, tokens_per_s=run.tokens_per_s, acceptance=length)


def missing(paths: dict[str, Path]) -> dict[str, Path]:
    """Those not measured yet; files are published whole, so one that is there is finished."""
    return {name: path for name, path in paths.items() if not path.is_file()}


def capture_served(
    engine: Engine,
    wiring: Wiring,
    head: VerifierHead,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    path: Path,
    num_beyond: int,
) -> None:
    """Capture the states of what was served: row i is prompt i, answer i, and what the verifier
    would go on with, at most ``num_beyond`` tokens.

    vLLM counts drafts accepted past an answer's end (it cuts the answer afterwards), so the
    prediction needs to know what would have been accepted there.

    Args:
        engine: without a drafter.
    """
    answered = [[*p, *answer] for p, answer in zip(prompts, answers, strict=True)]
    beyond: list[tuple[int, ...]] = [()] * len(answered)
    for completion in engine.generate(answered, Sampling(0, num_beyond)):
        beyond[completion.index] = completion.token_ids
    rows = [[*row, *more] for row, more in zip(answered, beyond, strict=True)]
    capture_rows(engine, wiring, head, rows, path)


@dataclass(frozen=True)
class Lossless:
    """Greedy answers with the drafter against those without.

    Attributes:
        compared: prompts.
        equal: answers with the same tokens throughout.
        near_ties: answers that part where both tokens are within rounding of the top logit.
        unexplained: all others.
        examples: the first few that part: prompt index, answer position, both tokens, how far
            below the top logit each is.
    """

    compared: int = 0
    equal: int = 0
    near_ties: int = 0
    unexplained: int = 0
    examples: tuple[dict[str, Any], ...] = ()

    def __add__(self, other: Lossless) -> Lossless:
        return Lossless(
            self.compared + other.compared,
            self.equal + other.equal,
            self.near_ties + other.near_ties,
            self.unexplained + other.unexplained,
            (*self.examples, *other.examples)[:8],
        )


def compare(
    name: str,
    prompts: Sequence[Sequence[int]],
    drafted: ServedRun,
    plain: ServedRun,
    states: Shard,
    head: VerifierHead,
) -> Lossless:
    """Compare a set's answers token by token.

    Args:
        drafted, plain: served with and without the drafter.
        states: row i is prompt i followed by its drafted answer.
        head: the verifier's; its near-tie tolerance is ``capture.NEAR_TIE``.
    """
    total = Lossless()
    pairs = zip(drafted.answers, plain.answers, strict=True)
    for index, (ours, theirs) in enumerate(pairs):
        if ours == theirs:
            total += Lossless(compared=1, equal=1)
            continue
        place = first_difference(ours, theirs)
        tokens = [answer[place] for answer in (ours, theirs) if place < len(answer)]
        last_states = states.row(index).last_hidden_states
        # The state before an answer's token ``place`` is that of the token it follows.
        logits = head.logits(last_states[len(prompts[index]) + place - 1][None])[0]
        # One answer being the other's beginning is no swap: nothing explains it.
        is_tie = len(tokens) == 2 and all(head.is_near_tie(logits, token) for token in tokens)
        example = {
            "set": name,
            "prompt": index,
            "answer_position": place,
            "tokens": tokens,
            "below_top_logit": [round((logits.max() - logits[t]).item(), 4) for t in tokens],
            "explained": is_tie,
        }
        total += Lossless(1, 0, int(is_tie), int(not is_tie), (example,))
    return total


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """First index at which two different answers differ.

    >>> first_difference([5, 7, 9], [5, 8])
    1
    """
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
