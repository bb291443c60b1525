"""What the check of replays takes for noise: steps that end elsewhere each time, by themselves."""

from __future__ import annotations

import itertools

import pytest
import torch

from torchfast.graphs.named_state import NamedState
from torchfast.graphs.replay_check import find_mismatch

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("room")


def judged_runs(replays, eager_runs):
    """Judge runs of two steps that add to a vector, each as far off as is given for it."""
    values = torch.ones(8).double()
    errors = {True: iter(replays), False: iter(eager_runs)}

    def run(is_replay):
        for error in errors[is_replay]:
            for _ in range(2):
                with torch.no_grad():
                    values.add_(1.0 + error)
                yield values.sum()

    replayed, eager = run(True), run(False)
    return find_mismatch(
        NamedState([values]), CPU, replay=lambda: next(replayed), eager=lambda: next(eager)
    )


@pytest.mark.parametrize(
    ("replays", "eager_runs"),
    [
        ((0, 0), (1, 0, 0, 0, 0)),  # an eager run is off, others are as the replays
        ((0, 0), (1, 2, 1, 0, 2)),
        ((1, 0), (0, 0, 0, 0, 0)),  # a replay is off, the other one is as all eager runs
    ],
)
def test_noise_that_comes_now_and_then_is_no_error(replays, eager_runs):
    replays, eager_runs = ([5e-8 * n for n in runs] for runs in (replays, eager_runs))
    assert judged_runs(replays, eager_runs) is None


@pytest.mark.parametrize("size", [5e-8, 1e-4, 1e-2])
@pytest.mark.parametrize(
    "replays",
    [
        (0, 0, 1),
        (0, 0, *7 * [0], 3),  # the last one that is asked for
    ],
)
def test_noise_of_any_size_is_no_error_if_replays_have_it_too(size, replays):
    replays, eager_runs = ([size * n for n in runs] for runs in (replays, (1, 2, 3, 2, 4)))
    assert judged_runs(replays, eager_runs) is None


@pytest.mark.parametrize(
    ("size", "replays", "eager_runs", "detail"),
    [
        (5e-8, 10 * (0,), (1, 2, 3, 4, 5), "replays do not differ"),  # as a counter changes a step
        (1e-4, 10 * (0,), (1, 0, 0, 0, 0), "replays do not differ"),  # too much for rounding
        # A counter beside noise that is far less.
        (1e-4, (0, 0, *8 * (1e-3,)), (1, 0, 1, 0, 0), "and replays differ by 6.7e-08 there"),
        (1e-4, (100, 100, 101, *7 * (100,)), (1, 0, 0, 0, 0), "eager steps among themselves"),
        (5e-8, (1, 1), (0, 0, 0, 0, 0), "eager steps among themselves 0.0"),
        (1e-4, (1, 0), (0, 0, 0, 0, 0), "eager steps among themselves 0.0"),
        (5e-8, (100, 99), (0, 0, 0, 0, 0), "eager steps among themselves 0.0"),
    ],
)
def test_what_is_no_noise_is_an_error(size, replays, eager_runs, detail):
    replays, eager_runs = ([size * n for n in runs] for runs in (replays, eager_runs))
    assert detail in judged_runs(replays, eager_runs).detail


OUTPUT = "output"


def judged_tensors(replays, eager_runs, num_tensors=8):
    """Judge runs of two steps; each is given how far it is off in which tensors, or its output."""
    tensors = [torch.ones(8).double() for _ in range(num_tensors)]
    errors = {"replay": iter(replays), "eager": iter(eager_runs)}
    now, count = {}, itertools.count()

    def step(kind):
        if next(count) % 2 == 0:
            now.update(dict.fromkeys([*range(num_tensors), OUTPUT], 0.0))
            now.update(next(errors[kind]))
        with torch.no_grad():
            for place, tensor in enumerate(tensors):
                tensor.add_(1.0 + now[place])
        return torch.tensor(1.0 + now[OUTPUT]).double()

    found = find_mismatch(
        NamedState(tensors), CPU, replay=lambda: step("replay"), eager=lambda: step("eager")
    )
    if found is None:
        return None
    place = found.place - 2  # behind one output of each step
    return (OUTPUT if place < 0 else place), found.detail


# The last tensor moves most, the fourth little, in replays and eager steps.
NOISY = [{**dict.fromkeys(range(7), 1e-3 * n), 7: 1e-2 * n, 3: 1e-5 * n} for n in (0, 1, 2, 1, 3)]
NOISY_REPLAYS = (3 * NOISY)[1:11]


def but(runs, changed):
    """Return the runs, some of which are off by other amounts in some tensors."""
    return [{**run, **changed.get(number, {})} for number, run in enumerate(runs)]


def little_in(runs, places, error=1e-5):
    """Return the runs, in which some tensors move little."""
    return [{**run, **dict.fromkeys(places, error * (n % 3))} for n, run in enumerate(runs)]


@pytest.mark.parametrize(
    ("places", "amount"),
    [
        ((3,), 5e-3),
        ((3,), 1.8e-2),
        ((2, 3), 5e-3),
    ],
)
def test_what_rounds_the_other_way_in_a_few_tensors_of_one_eager_run_is_no_error(places, amount):
    replays = little_in(NOISY_REPLAYS, places)
    eager_runs = but(little_in(NOISY, places), {1: dict.fromkeys(places, amount)})
    assert judged_tensors(replays, eager_runs) is None


@pytest.mark.parametrize(
    ("places", "amount", "least"),
    [
        ((3,), 4e-2, 1e-5),  # more than a rounding
        ((1, 3, 5), 5e-3, 1e-5),  # more than a few of the tensors
        ((3,), 5e-3, 0.0),  # noise moves all
        ((OUTPUT,), 5e-3, 1e-5),  # the loss is a sum
    ],
)
@pytest.mark.parametrize("num_quiet", [0, 24])  # which are no measure of a few
def test_what_no_replay_does_is_an_error(places, amount, least, num_quiet):
    quiet = range(8, 8 + num_quiet)
    replays, eager_runs = (
        little_in(little_in(runs, quiet, 1e-9), places, least) for runs in (NOISY_REPLAYS, NOISY)
    )
    eager_runs = but(eager_runs, {1: dict.fromkeys(places, amount)})
    place, detail = judged_tensors(replays, eager_runs, 8 + num_quiet)
    assert "depends on something that is not named" in detail
    assert place in places


@pytest.mark.parametrize(
    ("wrong", "amount", "is_error"),
    [
        ((0,), 5e-3, False),  # as eager steps in all runs but the first
        ((0, 3, 6, 8, 9), 5e-3, False),  # in three of the first five, but for the second
        ((0,), 6e-2, True),  # more than a rounding
        (range(0, 10, 2), 5e-3, True),  # half of the runs
        (range(10), 5e-3, True),
    ],
)
def test_a_replay_may_be_off_by_a_rounding_that_others_do_not_have(wrong, amount, is_error):
    everywhere = range(8)
    replays = little_in(NOISY_REPLAYS, everywhere)
    off = {n: {3: amount + replays[n][3]} for n in wrong}
    found = judged_tensors(but(replays, off), little_in(NOISY, everywhere))
    assert (found is not None) == is_error
    if is_error:
        assert found[0] == 3
        assert "eager steps among themselves" in found[1]


def test_a_replay_that_is_off_is_an_error_where_eager_steps_differ_by_rounding_of_float32():
    eager_runs = [dict.fromkeys(range(8), 1e-7 * n) for n in range(5)]
    replays = [{3: 5e-3}, {}, *(8 * [dict.fromkeys(range(8), 2e-7)])]
    place, detail = judged_tensors(replays, eager_runs)
    assert "eager steps among themselves" in detail
    assert place == 3
