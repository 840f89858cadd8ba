"""Predictions made up from which drafts are right."""

from __future__ import annotations

import numpy as np

from eagle3.predict import Prediction


def made_up(matches: list[np.ndarray], num_beyond: int = 0) -> Prediction:
    """Answers of a prompt of two tokens each, by which drafts are right.

    Answer token i is token 100 + i; a wrong draft is 1.
    """
    tokens, position, answer, drafts, truth = [], [], [], [], []
    for index, answer_matches in enumerate(matches):
        num_tokens, num_drafted = answer_matches.shape
        row = np.array([5, 6, *(100 + np.arange(num_tokens + num_beyond))])
        named = np.arange(num_tokens)[:, None] + 1 + np.arange(num_drafted)  # of the answer
        known = named < num_tokens + num_beyond
        there = np.where(known, 100 + named, -1)
        tokens.append(row)
        position.append(1 + np.arange(num_tokens))
        answer.append(np.full(num_tokens, index))
        truth.append(there)
        drafts.append(np.where(answer_matches & known, there, 1))
    return Prediction(
        tokens=tuple(tokens),
        ends=np.array([2 + len(m) for m in matches]),
        sources=tuple("test" for _ in matches),
        answer=np.concatenate(answer),
        position=np.concatenate(position),
        drafts=np.concatenate(drafts),
        truth=np.concatenate(truth),
    )


def random_matches(seed: int, num_answers: int, num_drafted: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 12, num_answers)
    return [rng.random((n, num_drafted)) < 0.6 for n in lengths]
