"""What the rule of the comparison finds how often, on made-up machines."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from benchmark_results import Noise
from benchmarks import compare
from benchmarks.result_file import MIN_ROUNDS, Round

VERDICTS = ("slower", "faster", "no difference", "cannot tell")
DEVICE_BOUND = {"noise": 0.003, "busy": 0.0}
LAUNCH_BOUND = {"noise": 0.005, "busy": 0.2}
LAUNCH_BOUND_BUSY = {"noise": 0.005, "busy": 0.4}


def rounds_of(noise, num_rounds, factor=1.0):
    """Return the rounds of a run, by two processes of its own."""
    reference, own = noise.turns(noise.process(), factor * noise.process(), num_rounds)
    return [Round(o, r, o, r) for o, r in zip(own, reference, strict=True)]


def found_by(noise, other, num_rounds, factor=1.0, figure=compare.relative_floor):
    """Return how often each verdict comes, in parts of one."""
    number = 300
    found = []
    for _ in range(number):
        runs = rounds_of(noise, num_rounds), rounds_of(other, num_rounds, factor)
        found.append(compare.verdict_of(compare.bounds_of(*runs, figure), 0.03))
    return {verdict: found.count(verdict) / number for verdict in VERDICTS}


@pytest.mark.parametrize(
    ("machine", "bias", "num_rounds", "same", "wrong", "found"),
    [
        (DEVICE_BOUND, 0.0, 20, 1.0, 0.0, 1.0),
        (LAUNCH_BOUND, 0.002, 20, 0.99, 0.0, 0.97),
        (LAUNCH_BOUND_BUSY, 0.002, 20, 0.97, 0.0, 0.94),
        (LAUNCH_BOUND_BUSY, 0.002, 30, 0.99, 0.0, 0.97),
        (DEVICE_BOUND, 0.005, 30, 0.96, 0.04, 0.9),
        (LAUNCH_BOUND, 0.005, 30, 0.96, 0.04, 0.9),
        (LAUNCH_BOUND_BUSY, 0.005, 30, 0.96, 0.04, 0.9),
        # The most at which one process a method is enough.
        (DEVICE_BOUND, 0.003, 30, 0.99, 0.01, 0.98),
        (LAUNCH_BOUND, 0.003, 30, 0.99, 0.01, 0.97),
        (LAUNCH_BOUND_BUSY, 0.003, 30, 0.98, 0.01, 0.97),
    ],
)
def test_the_rates_of_the_docstring(machine, bias, num_rounds, same, wrong, found):
    noise = Noise(7, bias=bias, **machine)
    of_same = found_by(noise, noise, num_rounds)
    assert of_same["no difference"] >= same
    assert of_same["slower"] + of_same["faster"] <= wrong
    assert found_by(noise, noise, num_rounds, 1.03)["slower"] >= found


def test_a_busier_machine_is_no_slowdown():
    quiet, busy = Noise(1, noise=0.005, busy=0.0), Noise(2, noise=0.005, busy=0.4)
    found = found_by(quiet, busy, 30)
    assert found["no difference"] >= 0.98
    assert found["slower"] == 0.0


@pytest.mark.parametrize("num_rounds", [MIN_ROUNDS, 10, 20])
@pytest.mark.parametrize("machine", [DEVICE_BOUND, LAUNCH_BOUND, LAUNCH_BOUND_BUSY])
def test_the_bounds_hold_the_true_change_as_often_as_they_claim(machine, num_rounds):
    noise = Noise(3, bias=compare.PROCESS_BIAS, **machine)
    held = 0
    for _ in range(400):
        bounds = compare.bounds_of(rounds_of(noise, num_rounds), rounds_of(noise, num_rounds, 1.2))
        held += bounds.low <= 1.2 <= bounds.high
    # 95 % of 400, less two standard deviations of the count.
    assert held >= 371


def test_the_bounds_are_no_wider_than_they_need_be(monkeypatch):
    monkeypatch.setattr(compare, "PROCESS_BIAS", 0.0)
    noise = Noise(4, bias=0.0, **DEVICE_BOUND)
    held = 0
    for _ in range(400):
        bounds = compare.bounds_of(rounds_of(noise, 20), rounds_of(noise, 20))
        held += bounds.low <= 1.0 <= bounds.high
    assert 368 <= held <= 392


def test_the_lowest_quarter_errs_less_than_other_floors():
    def error(level, machine, num_rounds=20):
        noise = Noise(5, bias=0.0, **machine)
        figures = [
            math.log(level([r.best_ms for r in run]) / level([r.reference_best_ms for r in run]))
            for run in (rounds_of(noise, num_rounds) for _ in range(300))
        ]
        return math.sqrt(statistics.fmean(figure**2 for figure in figures))

    for machine in (DEVICE_BOUND, LAUNCH_BOUND, LAUNCH_BOUND_BUSY):
        assert error(min, machine) > 1.3 * error(compare._lowest, machine)
    assert error(compare._lowest, LAUNCH_BOUND_BUSY) < 0.5 * error(
        statistics.median, LAUNCH_BOUND_BUSY
    )


def test_what_scatters_more_has_a_lower_floor():
    draw = random.Random(0)
    floor = compare._lowest([draw.gauss(1, 0.01) for _ in range(20_000)])
    assert floor == pytest.approx(1 - 1.3 * 0.01, abs=0.0006)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(3, 3.182), (4, 2.776), (9, 2.262), (19, 2.093), (29, 2.045)]
)
def test_the_quantiles_of_student_are_those_of_the_tables(freedom, quantile):
    assert compare._student(freedom) == pytest.approx(quantile, rel=0.01)


def test_noise_is_rarely_noted():
    noise = Noise(6, **LAUNCH_BOUND_BUSY)
    assert found_by(noise, noise, 20, figure=compare.stalls)["slower"] <= 0.02
