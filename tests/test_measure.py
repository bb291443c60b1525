"""Interleaved timing finds planted differences, invents none, and ends in time."""

from __future__ import annotations

import gc
import math
import random
from contextlib import contextmanager

import pytest
import torch

from torchfast._core import measure as measuring
from torchfast._core.device import drain
from torchfast._core.measure import MOST_ROUNDS, measure, ratio_of

CPU = torch.device("cpu")


class Machine:
    """A clock that only work moves, at a speed that drifts."""

    def __init__(self, seed=0, noise=0.0, drift=0.0, stalls=0.0):
        self.now = 0.0
        self.random = random.Random(seed)
        self.noise, self.drift, self.stalls = noise, drift, stalls
        self.pending = 0.0
        self.log = []

    def clock(self):
        return self.now

    def work(self, name, seconds):
        """Return work that is queued, and done when the device is waited for."""

        def run():
            speed = 1.0 + self.drift * self.now
            factor = math.exp(self.random.gauss(0.0, self.noise))
            if self.random.random() < self.stalls:
                factor *= 1.0 + self.random.expovariate(1.0)
            self.pending += seconds * speed * factor
            self.log.append(name)

        return run

    def synchronize(self):
        self.now += self.pending + 1e-6
        self.pending = 0.0

    def measure(self, seconds, budget_s=60.0, **options):
        works = {name: self.work(name, s) for name, s in seconds.items()}
        works |= options.pop("works", {})
        return measure(
            works,
            reference=next(iter(works)),
            device=CPU,
            budget_s=budget_s,
            clock=self.clock,
            synchronize=self.synchronize,
            **options,
        )


def verdicts(measurement):
    return {n: measurement.ratio(n).verdict for n in measurement.units}


def test_planted_differences_are_found():
    machine = Machine(noise=0.002)
    measurement = machine.measure({"as it is": 0.01, "3% more": 0.0103, "3% less": 0.0097})
    assert verdicts(measurement) == {
        "as it is": "no difference",
        "3% more": "slower",
        "3% less": "faster",
    }
    assert measurement.ended_by == "told"
    assert measurement.ratio("3% more").ratio == pytest.approx(1.03, abs=0.003)
    timing = measurement.timing("as it is")
    assert timing.low_ms <= timing.median_ms <= timing.high_ms
    assert timing.median_ms == pytest.approx(10.0, rel=0.01)


def test_a_drift_of_the_machine_is_no_difference():
    # Medians of one after the other would differ by far more than 2 %.
    measurement = Machine(noise=0.001, drift=0.2).measure({"a": 0.01, "b": 0.01})
    assert verdicts(measurement)["b"] == "no difference"
    first, last = measurement.rounds[0]["a"], measurement.rounds[-1]["a"]
    assert last > 1.05 * first


def test_the_same_code_twice_is_hardly_ever_told_apart():
    wrong = told = 0
    for seed in range(60):
        machine = Machine(seed, noise=0.02, stalls=0.02)
        verdict = verdicts(machine.measure({"a": 0.01, "b": 0.01}, seed=seed))["b"]
        wrong += verdict in ("faster", "slower")
        told += verdict == "no difference"
    assert wrong <= 1
    assert told >= 50


def test_a_slowdown_is_hardly_ever_missed():
    found = 0
    for seed in range(30):
        machine = Machine(seed, noise=0.02, stalls=0.02)
        found += verdicts(machine.measure({"a": 0.01, "b": 0.0104}, seed=seed))["b"] == "slower"
    assert found >= 28


def test_noise_larger_than_the_difference_is_not_told():
    machine = Machine(seed=3, noise=0.2)
    measurement = machine.measure({"a": 0.3, "b": 0.303}, budget_s=10.0)
    assert verdicts(measurement)["b"] == "cannot tell"
    assert measurement.ended_by == "budget"


@pytest.mark.parametrize("budget_s", [0.5, 3.0, 30.0])
def test_it_ends_within_its_budget(budget_s):
    machine = Machine(noise=0.3)  # so noisy that nothing is ever told
    measurement = machine.measure({"a": 0.05, "b": 0.06, "c": 0.05}, budget_s=budget_s)
    assert measurement.elapsed_s <= budget_s * 1.1
    assert len(measurement.rounds) >= (0 if budget_s == 0.5 else 8)


def test_one_slow_warm_up_is_over_budget_by_a_unit_and_nothing_is_said():
    machine = Machine()
    measurement = machine.measure({"a": 5.0, "b": 5.0}, budget_s=1.0)
    assert machine.now < 11.0
    assert measurement.ended_by == "budget"
    assert measurement.timing("a") is None
    assert measurement.ratio("b").verdict == "cannot tell"


@pytest.mark.parametrize("budget_s", [0.01, 1.0, 20.0, 300.0])
def test_so_many_rounds_as_are_asked_for_are_made_whatever_the_budget_is(budget_s):
    machine = Machine(noise=0.3)
    measurement = machine.measure({"a": 1.0, "b": 1.0}, budget_s=budget_s, least_rounds=8)
    whole = [r for r in measurement.rounds if len(r) == 2]
    # A round takes about two seconds, and the warm-up two of each.
    assert (len(whole) == 8) == (budget_s <= 20.0)
    assert measurement.ended_by == ("budget" if budget_s <= 20.0 else "rounds")
    assert measurement.ratio("b").low > 0.0  # enough for an interval


def test_it_never_goes_on_for_ever():
    machine = Machine(noise=0.5)
    measurement = machine.measure({"a": 0.001, "b": 0.001}, budget_s=1e6)
    assert len(measurement.rounds) == MOST_ROUNDS
    assert measurement.ended_by == "rounds"


def test_every_way_has_its_turn_in_every_round_in_another_order():
    machine = Machine()
    entered = []

    @contextmanager
    def around(name):
        entered.append(name)
        yield
        entered.append("left")

    measurement = machine.measure({"a": 0.1, "b": 0.1, "c": 0.1}, around=around)
    assert entered[1::2] == ["left"] * (len(entered) // 2)
    turns = entered[::2][3:]  # after the warm-up
    orders = [tuple(turns[i : i + 3]) for i in range(0, len(turns), 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) > 1
    assert len(orders) == len(measurement.rounds)


def test_what_it_takes_to_put_a_way_in_force_is_not_timed():
    machine = Machine()

    @contextmanager
    def around(name):
        machine.now += 1.0 if name == "b" else 0.0
        yield

    measurement = machine.measure({"a": 0.1, "b": 0.1}, around=around, budget_s=200.0)
    assert measurement.ratio("b").ratio == pytest.approx(1.0, abs=0.01)


def test_short_units_are_gathered_into_blocks_and_long_ones_stand_alone():
    machine = Machine()
    measurement = machine.measure({"short": 1e-5, "long": 0.4})
    assert measurement.units["short"] >= 1000
    assert measurement.units["long"] == 1
    # The wait for the device, 1 µs at each end of a block, is lost in it.
    assert measurement.timing("short").median_ms == pytest.approx(0.01, rel=1e-3)


def test_blocks_become_longer_where_waiting_takes_longer():
    quick, slow = Machine(), Machine()

    def wait():
        slow.now += slow.pending + 2e-4
        slow.pending = 0.0

    slow.synchronize = wait
    units = [m.measure({"a": 1e-3}).units["a"] for m in (quick, slow)]
    assert units[1] > 5 * units[0]


def test_a_stopwatch_of_its_own_says_the_times_and_the_clock_keeps_the_budget():
    machine = Machine()
    blocks = []

    def stopwatch(work, units):
        # Half of each unit is preparation, which the stopwatch leaves out.
        started = machine.now
        for _ in range(units):
            work()
        machine.synchronize()
        blocks.append(units)
        return (machine.now - started) / 2

    seconds = {"a": 0.01, "b": 0.012}
    measurement = machine.measure(seconds, stopwatch=stopwatch, budget_s=1.0)
    assert measurement.timing("a").median_ms == pytest.approx(5.0, rel=0.01)
    assert measurement.ratio("b").verdict == "slower"
    assert measurement.elapsed_s < 1.1
    # Blocks are sized by what a unit takes with its preparation.
    by_clock = Machine().measure(seconds, budget_s=1.0)
    assert measurement.units == by_clock.units
    assert blocks[:6] == [1] * 6


def test_a_way_that_raises_is_left_out_and_the_others_go_on():
    machine = Machine()
    calls = []

    def breaks():
        calls.append(1)
        machine.pending += 0.1
        if len(calls) > 6:
            raise MemoryError("out of memory\nand more")

    measurement = machine.measure({"a": 0.1, "c": 0.09}, works={"b": breaks})
    assert measurement.failed == {"b": "MemoryError: out of memory"}
    assert len(calls) == 7
    assert verdicts(measurement)["c"] == "faster"
    assert len(measurement.rounds) >= 8


def test_an_error_of_the_reference_is_raised():
    def breaks():
        raise KeyError("a")

    with pytest.raises(KeyError):
        measure({"a": breaks}, reference="a", device=CPU, budget_s=1.0)


def test_few_rounds_tell_only_what_is_plain():
    assert ratio_of([1.0, 1.0, 1.0], [2.0, 2.02, 1.98], 0.02).verdict == "faster"
    assert ratio_of([1.0, 1.0, 1.0], [1.03, 1.0, 1.06], 0.02).verdict == "cannot tell"
    assert ratio_of([1.0, 1.0], [2.0, 2.0], 0.02).verdict == "cannot tell"
    assert ratio_of([1.0] * 7, [1.0] * 7, 0.02).verdict == "no difference"


def test_one_stalled_block_among_many_changes_nothing():
    reference = [1.0 + 0.001 * i for i in range(18)]
    times = [0.95 * t for t in reference]
    times[5] *= 10
    result = ratio_of(times, reference, 0.02)
    assert result.verdict == "faster"
    assert result.ratio == pytest.approx(0.95)


def test_the_interval_covers_as_often_as_it_says():
    # Exact: the probability that the median lies outside of the ranks.
    for count in (8, 12, 18, 27, 40):
        rank = measuring._rank(count)
        outside = 2 * sum(math.comb(count, k) for k in range(rank + 1)) / 2**count
        assert outside <= 0.01
        wider = 2 * sum(math.comb(count, k) for k in range(rank + 2)) / 2**count
        assert wider > 0.01


def test_garbage_is_not_collected_in_a_block_and_collection_is_on_again():
    states = []
    machine = Machine()

    def work():
        machine.pending += 0.1
        states.append(gc.isenabled())

    machine.measure({}, works={"a": work})
    assert not any(states[3:])
    assert gc.isenabled()
    gc.disable()
    try:
        machine.measure({}, works={"a": work})
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_global_generators_are_left_alone():
    before = random.getstate(), torch.get_rng_state()
    Machine().measure({"a": 0.1, "b": 0.1})
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"reference": "c"}, ValueError, "reference must be one of"),
        ({"budget_s": 0}, ValueError, "budget_s must be > 0"),
        ({"smallest": "x"}, TypeError, "smallest must be a number"),
        ({"works": {"a": 1}}, TypeError, "must be callable"),
    ],
)
def test_bad_arguments_are_named(options, error, words):
    arguments = {"works": {"a": lambda: None}, "reference": "a", "device": CPU, "budget_s": 1.0}
    arguments |= options
    with pytest.raises(error, match=words):
        measure(arguments.pop("works"), **arguments)


def test_real_work_is_told_apart_by_the_real_clock():
    x = torch.ones(192, 192)
    works = {"one": lambda: x @ x, "three": lambda: x @ x @ x @ x}
    measurement = measure(works, reference="one", device=CPU, budget_s=3.0)
    assert measurement.ratio("three").verdict == "slower"
    assert measurement.elapsed_s < 6.0


def test_the_device_that_works_is_waited_for_and_not_the_current_one(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    drain(torch.device("cuda:1"))
    drain(CPU)
    assert waited == [torch.device("cuda:1")]
