"""Percentiles of what the parts of a step take, and the table of them."""

from __future__ import annotations

import math

import pytest

from torchfast import PhaseTimes, StepTimes


def test_percentiles_are_values_that_were_measured():
    times = PhaseTimes.of("forward", [float(n) for n in range(100, 0, -1)])
    assert (times.p50_ms, times.p90_ms, times.p99_ms) == (50.0, 90.0, 99.0)
    assert times.num_samples == 100


@pytest.mark.parametrize("num", [1, 2, 3, 7])
def test_percentiles_of_a_few_are_within_them(num):
    times = PhaseTimes.of("forward", [float(n) for n in range(num)])
    assert times.p50_ms == math.ceil(num / 2) - 1
    assert times.p99_ms == num - 1


def test_a_table_has_a_row_for_each_phase_and_tells_the_source():
    rows = (
        PhaseTimes.of("step", [1.0, 2.0]),
        PhaseTimes.of("forward", [0.5], "from warm-up"),
    )
    head, step, forward = str(StepTimes(phases=rows)).splitlines()
    assert head.split() == ["ms", "a", "step", "p50", "p90", "p99", "samples"]
    assert step.split() == ["step", "1.000", "2.000", "2.000", "2"]
    assert forward.split() == ["forward", "0.500", "0.500", "0.500", "1", "from", "warm-up"]
    assert str(StepTimes()) == "no step was timed"


def test_a_phase_that_was_not_seen_is_named_with_those_that_were():
    with pytest.raises(KeyError, match=r"no phase 'forwards' was timed; there are \['step'\]"):
        StepTimes(phases=(PhaseTimes.of("step", [1.0]),))["forwards"]
