"""When drafting pays, from steps whose times are known."""

from __future__ import annotations

import pytest

from eagle3.engine import Step
from eagle3.step_times import break_even, decode_seconds


def steps(num_running: int, seconds: list[float], is_prefill: bool = False) -> list[Step]:
    return [Step(num_running, is_prefill, num_running, each) for each in seconds]


def test_medians_of_decoding_steps_only():
    run = steps(8, [9.0] * 9, is_prefill=True) + steps(8, [0.1] * 5 + [0.2, 5.0]) + steps(3, [1.0])
    assert decode_seconds(run) == {8: 0.1}  # one step says nothing of three requests


def test_breaks_even_where_tokens_a_second_are_equal():
    with_drafter = steps(1, [0.09] * 5) + steps(8, [0.30] * 5) + steps(4, [1.0] * 5)
    without = steps(1, [0.06] * 5) + steps(8, [0.10] * 5)
    one, eight = break_even(with_drafter, without, 1.8)
    assert (one["concurrency"], eight["concurrency"]) == (1, 8)  # 4 was measured on one side only
    assert one["break_even_length"] == pytest.approx(1.5)
    assert eight["break_even_length"] == pytest.approx(3.0)
    assert one["times_faster"] == pytest.approx(1.2) and eight["times_faster"] == pytest.approx(0.6)
    for row in (one, eight):  # at that length a step yields as many tokens a second as without
        tokens_per_s = row["break_even_length"] / row["step_s_with"]
        assert tokens_per_s == pytest.approx(1 / row["step_s_without"])
