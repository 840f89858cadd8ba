"""Measured vLLM runs: a prompt set served with the drafter, without it, and its states captured."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

from .acceptance import Acceptance
from .capture import VerifierHead, capture_rows, read_record, record_path
from .config import Config
from .contract import Wiring
from .drafts import RecordedDrafts, emitted_answers
from .engine import Engine, Sampling, Step
from .files import write_text
from .progress import Progress
from .script import log, stop_flag
from .verifier import Verifier

_WARM_UP_TOKENS = 8  # the first request pays for lazy initialisation, of the sampler too


@dataclass(frozen=True)
class PromptSet:
    """Prompts, how they are answered, and where what is measured of them lies.

    Attributes:
        prompts: token ids with the generation prompt.
        sampling: temperature 0 is greedy.
        directory: holds ``served_<name>.json`` and so on.
    """

    name: str
    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    directory: Path

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature == 0

    @property
    def served_path(self) -> Path:
        """Answers, steps and counters with the drafter."""
        return self.directory / f"served_{self.name}.json"

    @property
    def drafts_path(self) -> Path:
        """What vLLM's drafter drafted."""
        return self.directory / f"drafts_{self.name}.safetensors"

    @property
    def baseline_path(self) -> Path:
        """Answers and steps without the drafter."""
        return self.directory / f"baseline_{self.name}.json"

    @property
    def states_path(self) -> Path:
        """The verifier's states of prompts and served answers."""
        return self.directory / f"states_{self.name}.safetensors"

    @property
    def paths(self) -> list[Path]:
        """Every file there is of it once measured."""
        record = record_path(self.states_path)
        paths = [self.served_path, self.drafts_path, self.states_path, record]
        return [*paths, self.baseline_path] if self.is_greedy else paths


@dataclass(frozen=True)
class ServedRun:
    """One prompt set, served once.

    Attributes:
        answers: emitted token ids in the order of the prompts, end of turn included if it came.
        seconds: from the first request to the last answer, the engine already warm.
        acceptance: vLLM's counters of this run alone; None without a drafter.
        steps: of the engine, in order.
    """

    answers: tuple[tuple[int, ...], ...]
    seconds: float
    acceptance: Acceptance | None
    steps: tuple[Step, ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens a second, prefill included."""
        return self.num_tokens / self.seconds

    def save(self, path: Path) -> None:
        value = {**asdict(self), "steps": [astuple(step) for step in self.steps]}
        write_text(path, json.dumps(value) + "\n")

    @classmethod
    def load(cls, path: Path) -> ServedRun:
        value = json.loads(path.read_text(encoding="utf-8"))
        counted = value["acceptance"]
        acceptance = counted and Acceptance(
            counted["num_drafts"], tuple(counted["accepted_per_position"])
        )
        steps = tuple(Step(*step) for step in value["steps"])
        return cls(tuple(map(tuple, value["answers"])), value["seconds"], acceptance, steps)


def serve(
    engine: Engine,
    prompt_set: PromptSet,
    concurrency: int,
    num_speculative_tokens: int,
) -> ServedRun:
    """Answer a prompt set and measure it; with a drafter, record what it drafts.

    Args:
        concurrency: requests served together.
        num_speculative_tokens: the engine's; 0 without a drafter.

    Raises:
        Interrupted: a stop signal arrived; nothing is kept of the set.
    """
    prompts = prompt_set.prompts
    warm_up = replace(prompt_set.sampling, max_new_tokens=_WARM_UP_TOKENS)
    for _ in engine.generate(prompts[:2], warm_up):
        pass
    if num_speculative_tokens:
        engine.rpc("drafts_begin")
        before = engine.acceptance(num_speculative_tokens)
    answers: list[tuple[int, ...]] = [()] * len(prompts)
    steps: list[Step] = []
    progress = Progress(len(prompts), "answers")
    start_s = time.monotonic()
    # Closed on a stop, so that the engine aborts what is still running.
    with closing(
        engine.generate(prompts, prompt_set.sampling, concurrency=concurrency, steps=steps)
    ) as completions:
        for completion in completions:
            answers[completion.index] = completion.token_ids
            progress.advance(1, set=prompt_set.name)
            stop_flag.raise_if_set()
    seconds = time.monotonic() - start_s
    progress.close()
    counted = None
    if num_speculative_tokens:
        engine.rpc("drafts_publish", str(prompt_set.drafts_path))
        counted = engine.acceptance(num_speculative_tokens) - before
    return ServedRun(tuple(answers), seconds, counted, tuple(steps))


def serve_with(
    config: Config, verifier: Verifier, drafter: Path, sets: Sequence[PromptSet]
) -> None:
    """Serve what is not served yet with a drafter; an engine is started only if there is any."""
    if all(each.served_path.is_file() for each in sets):
        return
    num_drafted, concurrency = config.verify.num_speculative_tokens, config.verify.concurrency
    engine = Engine(
        config,
        verifier,
        drafter=drafter,
        num_speculative_tokens=num_drafted,
        max_num_seqs=concurrency,
    )
    with closing(engine):
        serve_sets(engine, sets, concurrency, num_drafted)


def serve_without(
    config: Config,
    verifier: Verifier,
    head: VerifierHead,
    aux_layer_ids: tuple[int, ...],
    sets: Sequence[PromptSet],
) -> None:
    """Serve the greedy sets without a drafter, and capture what was served with it."""
    if all(path.is_file() for each in sets for path in each.paths):
        return
    concurrency = config.verify.concurrency
    wiring = replace(Wiring.at_capture(config, verifier), aux_layer_ids=aux_layer_ids)
    with closing(Engine(config, verifier, max_num_seqs=concurrency)) as engine:
        serve_sets(engine, [each for each in sets if each.is_greedy], concurrency, 0)
        capture_served(engine, wiring, head, sets)


def serve_sets(
    engine: Engine,
    sets: Sequence[PromptSet],
    concurrency: int,
    num_speculative_tokens: int,
) -> None:
    """Serve the sets not served yet, each to its own file: a set is a unit of work.

    Args:
        num_speculative_tokens: the engine's; 0 without a drafter.
    """
    for prompt_set in sets:
        path = prompt_set.served_path if num_speculative_tokens else prompt_set.baseline_path
        if path.is_file():  # published whole: one that is there is finished
            continue
        stop_flag.raise_if_set()
        run = serve(engine, prompt_set, concurrency, num_speculative_tokens)
        run.save(path)
        length = run.acceptance and run.acceptance.acceptance_length
        log(path.stem, tokens=run.num_tokens, tokens_per_s=run.tokens_per_s, acceptance=length)


def capture_served(
    engine: Engine, wiring: Wiring, head: VerifierHead, sets: Sequence[PromptSet]
) -> None:
    """Capture the verifier's states of what was served: row i is prompt i, answer i, and what the
    engine emitted beyond its end.

    vLLM counts drafts accepted past an answer's end (it cuts the answer afterwards), so the
    prediction needs to know what was emitted there.

    Args:
        engine: without a drafter.
    """
    for prompt_set in sets:
        if read_record(prompt_set.states_path, range(len(prompt_set.prompts))):
            continue
        stop_flag.raise_if_set()
        answers = ServedRun.load(prompt_set.served_path).answers
        emitted = emitted_answers(RecordedDrafts.load(prompt_set.drafts_path), answers)
        pairs = zip(prompt_set.prompts, emitted, strict=True)
        rows = [[*prompt, *answer.token_ids] for prompt, answer in pairs]
        capture_rows(engine, wiring, head, rows, prompt_set.states_path)
