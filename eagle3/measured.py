"""A prompt set's measurements put together: served, predicted, and compared draft by draft."""

from __future__ import annotations

from dataclasses import dataclass

from .agreement import Agreement, agree
from .capture import VerifierHead
from .drafts import RecordedDrafts, emitted_answers, served_counts
from .intervals import Counts
from .predict import Prediction, predict, served_answers
from .replay import Replay
from .serve import PromptSet, ServedRun
from .shards import Shard


@dataclass(frozen=True)
class Measured:
    """One prompt set: served with the drafter and without, and predicted on the tokens served.

    Attributes:
        served: with the drafter.
        recorded: acceptance of it prompt by prompt, from the drafts recorded.
        baseline: without; None where answers are sampled.
        predicted: replay of the tokens served, with chains of the drafted tokens served or longer.
        agreement: vLLM's drafts against the replay's.
    """

    served: ServedRun
    recorded: Counts
    baseline: ServedRun | None
    predicted: Prediction
    agreement: Agreement

    @property
    def num_drafted(self) -> int:
        return self.recorded.accepted.shape[1]

    @property
    def matched(self) -> Counts:
        """What the replay says vLLM accepts, on the very tokens served."""
        return self.predicted.first(self.num_drafted).counts

    @property
    def expected(self) -> Counts:
        """What it is predicted to accept: of sampled answers, without the luck of the draw."""
        if self.baseline is not None:
            return self.matched
        return self.predicted.first(self.num_drafted).expected


def put_together(
    prompt_set: PromptSet,
    replay: Replay,
    head: VerifierHead,
    num_drafted: int,
    num_replayed: int,
) -> Measured:
    """Read a set's measurements and replay the very tokens served.

    Args:
        num_drafted: tokens drafted a step when it was served.
        num_replayed: length of the replayed chains, at least as many.
    """
    name, prompts = prompt_set.name, prompt_set.prompts
    served = ServedRun.load(prompt_set.served_path)
    baseline = ServedRun.load(prompt_set.baseline_path) if prompt_set.is_greedy else None
    recorded = RecordedDrafts.load(prompt_set.drafts_path)
    emitted = emitted_answers(recorded, served.answers)
    answers = served_answers(name, Shard.open(prompt_set.states_path), prompts, served.answers)
    temperature = prompt_set.sampling.temperature
    predicted = predict(name, replay, answers, len(prompts), num_replayed, head, temperature)
    return Measured(
        served=served,
        recorded=served_counts(emitted, num_drafted),
        baseline=baseline,
        predicted=predicted,
        agreement=agree(prompt_set, recorded, predicted, replay),
    )
