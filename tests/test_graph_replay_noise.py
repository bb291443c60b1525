"""What the check of replays takes for noise: steps that end elsewhere each time, by themselves."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn, optim

from torchfast._core.rounding import disturb
from torchfast.graphs import replay_check
from torchfast.graphs.named_state import NamedState
from torchfast.graphs.replay_check import find_mismatch

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("room")


def with_disturbed(replays, disturbed):
    """Return replays in the order in which they run: two are before the disturbed ones."""
    return [*replays[:2], *disturbed, *replays[2:]]


def judged_runs(replays, eager_runs):
    """Judge runs of two steps that add to a vector, each as far off as is given for it."""
    values = torch.ones(8).double()
    replays = with_disturbed(replays, 4 * [replays[1]])
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


def judged_tensors(replays, eager_runs, disturbed=4 * ({},)):
    """Judge runs of two steps; each is given how far it is off in which tensors, or its output.

    Disturbed replays are as the second one elsewhere.
    """
    tensors = [torch.ones(8).double() for _ in range(8)]
    errors = {
        "replay": iter(with_disturbed(replays, [{**replays[1], **run} for run in disturbed])),
        "eager": iter(eager_runs),
    }
    now, count = {}, itertools.count()

    def step(kind):
        if next(count) % 2 == 0:
            now.update(dict.fromkeys([*range(8), OUTPUT], 0.0))
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


def bases(noisy):
    """Return replays and eager runs."""
    return (NOISY_REPLAYS, NOISY) if noisy else (10 * [{}], 5 * [{}])


def turned(amount, places=(3,), at=2):
    """Return disturbed replays; one of them is off in some tensors."""
    return but(4 * [{}], {at: dict.fromkeys(places, amount)})


@pytest.mark.parametrize("error", [0.0, 1e-5])  # of replays there
@pytest.mark.parametrize("noisy", [True, False])  # elsewhere
@pytest.mark.parametrize(
    ("places", "amount", "rounded", "runs"),
    [
        ((3,), 5e-3, 5e-3, [0]),
        ((3,), 1.5e-2, 4e-3, [0]),  # some times what rounding was seen to make
        ((2, 3, 4, 6), 5e-3, 1e-2, [0, 1, 2, 4]),  # all but one
        ((*range(8), OUTPUT), 5e-3, 5e-3, [0, 3]),
    ],
)
def test_what_eager_runs_round_the_other_way_is_no_error(
    error, noisy, places, amount, rounded, runs
):
    replays, eager_runs = (little_in(base, places, error) for base in bases(noisy))
    eager_runs = but(eager_runs, {n: dict.fromkeys(places, amount) for n in runs})
    assert judged_tensors(replays, eager_runs, turned(rounded, places)) is None


@pytest.mark.parametrize("noisy", [True, False])
@pytest.mark.parametrize(
    ("places", "amount", "rounded", "runs"),
    [
        ((3,), 4e-2, 4e-2, [0]),  # more than a rounding
        ((3,), 5e-3, 1e-3, [0]),  # more than rounding makes of it
        ((3,), 5e-3, 0.0, [0]),
        ((3,), 5e-3, 5e-3, range(5)),  # as something that is drawn or counted in each run
        ((OUTPUT,), 5e-3, 1e-3, [0]),
    ],
)
def test_what_no_replay_does_is_an_error(noisy, places, amount, rounded, runs):
    replays, eager_runs = (little_in(base, places) for base in bases(noisy))
    far = {n: dict.fromkeys(places, amount * (1 + n % 3)) for n in runs}
    place, detail = judged_tensors(replays, but(eager_runs, far), turned(rounded, places))
    assert "depends on something that is not named" in detail
    assert place in places


def test_what_rounding_makes_of_one_tensor_says_nothing_of_another():
    replays = 10 * [{}]
    eager_runs = but(5 * [{}], {0: {3: 5e-3, 4: 5e-3}})
    assert judged_tensors(replays, eager_runs, turned(5e-3, (3, 4))) is None
    place, _ = judged_tensors(replays, eager_runs, turned(5e-3, (3, 5)))
    assert place == 4


@pytest.mark.parametrize("noisy", [True, False])
@pytest.mark.parametrize(
    ("wrong", "amount", "rounded", "is_error"),
    [
        ((0,), 5e-3, 2e-3, False),  # as eager steps in all runs but the first
        ((0, 3, 6, 8, 9), 5e-3, 2e-3, False),  # in three of the first five, but for the second
        ((0,), 6e-2, 6e-2, True),  # more than a rounding
        ((0,), 5e-3, 1e-3, True),  # more than rounding makes of it
        (range(0, 10, 2), 5e-3, 2e-3, True),  # half of the runs
        (range(10), 5e-3, 2e-3, True),
    ],
)
def test_a_replay_may_be_off_by_what_rounding_makes_and_others_do_not_have(
    noisy, wrong, amount, rounded, is_error
):
    replays, eager_runs = (little_in(base, range(8)) for base in bases(noisy))
    off = {n: {3: amount + replays[n].get(3, 0.0)} for n in wrong}
    replays = but(replays, off)
    found = judged_tensors(replays, eager_runs, turned(rounded + replays[1].get(3, 0.0)))
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


@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_what_is_counted_is_in_no_eager_run_as_it_is_in_replays(noise):
    everywhere = (*range(8), OUTPUT)
    replays = [dict.fromkeys(everywhere, noise * (n % 3) / 2) for n in range(10)]
    eager_runs = [dict.fromkeys(everywhere, 1.8e-3 * (n + 1)) for n in range(5)]
    disturbed = turned(5e-3, everywhere)
    assert judged_tensors(replays, eager_runs, disturbed) is not None
    # Nor is it where each run ends as the replays in one of the tensors.
    for place, run in enumerate(eager_runs):
        run[place] = 0.0
    assert judged_tensors(replays, eager_runs, disturbed) is not None


def test_a_run_that_ends_as_the_replays_is_near_them_everywhere():
    eager_runs = [{3: 5e-3, 5: 5e-6}, {3: 5e-3}, {5: 5e-6}, {3: 5e-3}, {3: 5e-3}]
    assert judged_tensors(10 * [{}], eager_runs, turned(5e-3)) is not None
    assert judged_tensors(10 * [{}], but(eager_runs, {2: {5: 0.0}}), turned(5e-3)) is None


def test_no_more_replays_run_than_are_needed():
    eager_runs = but(5 * [{}], {0: {3: 5e-3}})
    assert judged_tensors(2 * [{}], eager_runs, [{3: 5e-3}]) is None


def test_what_is_not_finite_measures_nothing():
    eager_runs = but(5 * [{}], {0: {3: 5e-3}})
    for far in (math.inf, math.nan):
        assert judged_tensors(10 * [{}], eager_runs, turned(far)) is not None


class Trained:
    """A network in bfloat16 with a teacher; steps of it are the same each time.

    As atomics do, an eager run may begin with parameters that are another rounding off.
    """

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.teacher = nn.Linear(32, 32).requires_grad_(False)
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.inputs = torch.randn(64, 16)
        self.count = itertools.count()
        self.step()  # makes the momentum

    def step(self, scale=1.0):
        with torch.autocast("cpu", torch.bfloat16):
            loss = (scale * self.model(self.inputs)).float().square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def rounded(self):
        """One run in five is off: its first step."""
        if next(self.count) % 10 == 0:
            disturb(self.model.parameters(), seed=7)
        return self.step()

    def taught(self):
        """One run in five moves the teacher."""
        if next(self.count) % 10 == 0:
            with torch.no_grad():
                self.teacher.weight.mul_(1.001)
        return self.step()

    def drawn(self):
        return self.step(scale=1.0 + 1e-2 * (next(self.count) + 1))

    def found(self, eager):
        state = NamedState([self.model, self.teacher, self.optimizer])
        before = [t.clone() for t in state.everything()]
        found = find_mismatch(state, CPU, replay=self.step, eager=eager)
        assert all(map(torch.equal, before, state.everything()))
        return found


def test_rounding_is_told_from_what_a_step_depends_on():
    trained = Trained()
    assert trained.found(trained.rounded) is None
    assert "do not differ" in trained.found(trained.taught).detail
    assert "do not differ" in trained.found(trained.drawn).detail


def test_rounding_is_not_told_where_nothing_is_disturbed(monkeypatch):
    for name in ("disturb", "take_back"):
        monkeypatch.setattr(replay_check, name, lambda *_, **__: None)
    trained = Trained()
    assert "do not differ" in trained.found(trained.rounded).detail


ADAMW = partial(optim.AdamW, lr=1e-3)


def found_in_bfloat16(make_step, *others, make_optimizer=ADAMW):
    """Judge steps, which get their count, of a model whose weights are in bfloat16."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(3))).bfloat16()
    optimizer = make_optimizer(model.parameters())
    inputs = torch.randn(64, 128).bfloat16()

    def plain():
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step, count = make_step(model, optimizer, plain), itertools.count(1)
    for _ in range(11):
        step(next(count))
    captured = next(count)
    return find_mismatch(
        NamedState([model, optimizer, *others]),
        CPU,
        replay=lambda: step(captured),
        eager=lambda: step(next(count)),
    )


@pytest.mark.parametrize(("base", "warm_up"), [(1e-3, 10_000), (1e-5, 100)])
def test_a_learning_rate_that_a_graph_holds_is_found_in_bfloat16(base, warm_up):
    def make_step(_model, optimizer, plain):
        def step(count):
            optimizer.param_groups[0]["lr"] = base * count / warm_up
            return plain()

        return step

    assert found_in_bfloat16(make_step) is not None


@pytest.mark.parametrize("weight", [0.1, 0.03])
def test_a_teacher_that_a_graph_leaves_is_found_in_bfloat16(weight):
    teacher = nn.Linear(128, 128, bias=False).bfloat16().requires_grad_(False)

    def make_step(model, _optimizer, plain):
        teacher.load_state_dict(model[0].state_dict())

        def step(count):
            loss = plain()
            if count % 4 == 0:
                teacher.weight.lerp_(model[0].weight.detach(), weight)
            return loss

        return step

    assert found_in_bfloat16(make_step, teacher) is not None


def test_weights_that_a_graph_leaves_are_found_in_bfloat16():
    """That they were moved to measure rounding is no measure of it."""

    def make_step(model, _optimizer, plain):
        def step(count):
            loss = plain()
            if count % 4 == 2:  # behind the second step of a run
                with torch.no_grad():
                    model[0].weight.mul_(1 - 2.0**-7)
            return loss

        return step

    found = found_in_bfloat16(make_step, make_optimizer=partial(optim.SGD, lr=0.01))
    assert found.detail.endswith("farthest in 0.weight")


def test_a_first_replay_that_is_a_batch_late_is_found():
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    inputs, targets, kept = torch.randn(64, 32), torch.randn(64, 32), [torch.zeros(64, 32)]

    def step(is_replay):
        target = kept[0] if is_replay else targets
        kept[0] = targets
        optimizer.zero_grad()
        (model(inputs) - target).square().mean().backward()
        optimizer.step()

    found = find_mismatch(
        NamedState([model, optimizer]), CPU, replay=lambda: step(True), eager=lambda: step(False)
    )
    assert "eager steps among themselves 0.0" in found.detail
