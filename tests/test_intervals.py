"""Intervals cover what they claim to, and pair what was measured on the same prompts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.intervals import Counts, Interval, difference_interval, length_interval


def counts(num_drafts: list[int], accepted: list[list[int]]) -> Counts:
    return Counts(np.array(num_drafts, float), np.array(accepted, float))


def test_counts_are_vllms_figures():
    two = counts([10, 30], [[5, 1], [20, 10]])
    assert two.acceptance_length == pytest.approx(1 + 36 / 40)
    assert two.per_position == pytest.approx([25 / 40, 11 / 40])


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=20),
    st.integers(1, 3),
)
def test_interval_holds_the_figure_and_is_one_point_where_prompts_agree(prompts, times):
    measured = counts([n for n, _ in prompts], [[min(n, a)] for n, a in prompts])
    low, high = length_interval(measured)
    assert low - 1e-9 <= measured.acceptance_length <= high + 1e-9 or len(prompts) < 8
    same = counts([7] * len(prompts), [[times]] * len(prompts))
    assert length_interval(same) == pytest.approx((1 + times / 7, 1 + times / 7))


def test_covers_the_truth_as_often_as_it_says():
    """200 experiments of 40 prompts: the true length is outside in about one of twenty."""
    rng = np.random.default_rng(1)
    is_covered = []
    for _ in range(200):
        chance = rng.beta(4, 6, 40)  # prompts differ, as real ones do
        measured = counts([30] * 40, rng.binomial(30, chance)[:, None])
        low, high = length_interval(measured)
        is_covered.append(low <= 1 + 4 / 10 <= high)
    assert 0.90 <= np.mean(is_covered) <= 0.99


def test_a_difference_leaves_out_what_the_prompts_vary_by():
    rng = np.random.default_rng(0)
    accepted = rng.integers(0, 30, (30, 1))
    ours = counts([30] * 30, accepted)
    theirs = counts([30] * 30, np.minimum(accepted + 1, 30))
    assert difference_interval(ours, ours) == (0, 0)
    low, high = difference_interval(theirs, ours)
    assert 0.02 < low <= high < 0.04  # 1/30 a draft
    wide = length_interval(ours)
    assert wide.high - wide.low > 5 * (high - low)


def test_distance():
    assert Interval(1.0, 2.0).distance(Interval(2.0, 3.0)) == 0
    assert Interval(1.0, 2.0).distance(Interval(2.5, 3.0)) == 0.5
    assert Interval(2.5, 3.0).distance(Interval(1.0, 2.0)) == 0.5
    assert Interval(1.0, 3.0).distance(Interval(2.0, 2.1)) == 0
