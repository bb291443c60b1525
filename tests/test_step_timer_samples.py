"""Which steps the timer of fit takes apart, and what it tells of steps that are graphs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from simulated_queue import CPU, SimulatedQueue, percentiles, run_step, skip_first, timed
from torchfast import phase
from torchfast._core import phases
from torchfast._core.phases import CAPTURE, REPLAY
from torchfast.profiling import step_timer
from torchfast.profiling.step_timer import EVERY, NUM_FIRST, StepTimer


@pytest.fixture
def queue():
    return SimulatedQueue()


@pytest.fixture
def timer(queue):
    with timed(queue) as timer:
        yield timer


# --- which steps ----------------------------------------------------------------------------------


def sampled(timer, queue, num_steps):
    """Return which of so many steps are taken apart, counted from 1."""
    found = []
    for number in range(1, num_steps + 1):
        timer.begin_step()
        if timer._sample is not None:
            found.append(number)
        queue.spend(1.0)
        timer.end_step()
        queue.let_pass()
    return found


def test_the_first_steps_but_one_are_taken_apart_and_then_one_in_so_many(timer, queue):
    found = sampled(timer, queue, NUM_FIRST + 2 * EVERY)
    assert found == [*range(2, NUM_FIRST + 1), NUM_FIRST + EVERY, NUM_FIRST + 2 * EVERY]


def test_first_steps_give_way_to_later_ones(timer, queue):
    for number in range(1, NUM_FIRST + 20 * EVERY + 1):
        run_step(timer, queue, forward=100.0 if number <= NUM_FIRST else 1.0)
        queue.let_pass()
        found = timer.times()
        if number == NUM_FIRST:
            assert found["forward"].num_samples == NUM_FIRST - 1
            assert found["forward"].p50_ms == 100.0
        if number == NUM_FIRST + 5 * EVERY:
            assert (found["forward"].p50_ms, found["forward"].p99_ms) == (1.0, 100.0)
            assert found["forward"].num_samples == NUM_FIRST - 1
    assert found["forward"].p99_ms == 1.0
    assert found["forward"].num_samples == 20


def test_each_session_begins_with_first_steps(timer, queue):
    sampled(timer, queue, 50)
    with timer.session():
        assert sampled(timer, queue, NUM_FIRST) == list(range(2, NUM_FIRST + 1))


def test_each_of_several_steps_in_a_replay_is_its_part(timer, queue):
    looked_at = []
    for group in range(16):
        timer.begin_step()
        if timer._sample is not None:
            looked_at.append(group)
        with phase(REPLAY):
            queue.spend(12.0)
        queue.spend(4.0)
        timer.end_step(num_steps=8)
        queue.let_pass()
    found = timer.times()
    assert (found["replay"].p50_ms, found["other"].p50_ms) == (1.5, 0.5)
    assert {8 * (b - a) for a, b in pairwise(looked_at)} == {EVERY + 8}  # at most one in so many


def test_where_sampling_is_dear_it_is_rare(timer, queue, monkeypatch):
    now = [0.0]

    def perf_counter():
        now[0] += 5e-6  # so between two there are 5 µs: what a mark takes
        return now[0]

    monkeypatch.setattr(step_timer.time, "perf_counter", perf_counter)
    # Of two moments for the step, two for its phase, of asking in vain, and of reading it.
    spent_ms = 6 * 5e-3
    for number in range(2000):
        timer.begin_step()
        with phase(REPLAY):
            queue.spend(0.1)
        timer.end_step()
        queue.let_pass()
        if number == NUM_FIRST:
            timer._replays.clear()
    steps = 2000 - NUM_FIRST
    cost_ms = len(timer._replays) * spent_ms
    assert 0 < cost_ms <= step_timer.BUDGET * steps * 0.1
    assert timer._every == pytest.approx(spent_ms / (step_timer.BUDGET * 0.1), abs=1)


@pytest.mark.parametrize("dear", ["has_passed", "between_ms"])
def test_where_reading_is_dear_sampling_is_rare(timer, queue, monkeypatch, dear):
    now = [0.0]
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(queue, "between_ms", lambda before, after: after.at - before.at)
    cheap = getattr(queue, dear)

    def read(*marks):
        now[0] += 40e-6
        return cheap(*marks)

    monkeypatch.setattr(queue, dear, read)
    for _ in range(4 * EVERY):
        run_step(timer, queue, forward=1.0)
        queue.let_pass()
    # Two times are read; asked is in vain once, of the step, and then of it and of all moments.
    spent_ms = {"has_passed": 6, "between_ms": 2}[dear] * 40e-3
    assert timer._every == pytest.approx(spent_ms / step_timer.BUDGET, abs=1)


def test_a_device_that_is_behind_is_asked_for_one_moment_a_step(timer, queue, monkeypatch):
    asked = []
    has_passed = queue.has_passed
    monkeypatch.setattr(queue, "has_passed", lambda m: asked.append(m) or has_passed(m))
    skip_first(timer, queue)
    for _ in range(NUM_FIRST - 1):
        run_step(timer, queue, forward=1.0)
    asked.clear()
    for _ in range(5):
        run_step(timer, queue, forward=1.0)
    assert asked == [timer._pending[0].stop] * 5


def test_one_interruption_does_not_make_sampling_rare(timer, queue, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: now[0])

    def interrupted():
        now[0] += 1.0
        return SimulatedQueue.now(queue)

    for number in range(1, NUM_FIRST + 1):
        timer.begin_step()
        queue.spend(1.0)
        with monkeypatch.context() as patch:
            if number == NUM_FIRST:
                patch.setattr(queue, "now", interrupted)
            timer.end_step()
        queue.let_pass()
    timer.times()
    assert max(timer._costs) == 1e3  # in steps
    assert timer._every == EVERY


def test_a_step_that_is_not_sampled_is_not_told_of(timer, queue):
    run_step(timer, queue, forward=1.0)  # the very first
    assert queue.num_made == 0


def test_a_step_without_a_batch_is_forgotten(timer, queue):
    skip_first(timer, queue)
    timer.begin_step()
    with phase("data_wait"):
        queue.spend(100.0)
    timer.cancel_step()
    assert phases._recorders == {}
    assert len(queue.spare) == queue.num_made
    run_step(timer, queue, data_wait=1.0)
    queue.let_pass()
    assert percentiles(timer, "data_wait") == (1.0, 1.0, 1.0)


def test_an_error_ends_the_listening():
    queue = SimulatedQueue()
    timer = StepTimer(CPU, queue)

    def train():
        with timer.session():
            skip_first(timer, queue)
            timer.begin_step()
            with phase("forward"):
                raise RuntimeError("in the forward")

    with pytest.raises(RuntimeError, match="in the forward"):
        train()
    assert phases._recorders == {}
    assert len(queue.spare) == queue.num_made


# --- graphs ---------------------------------------------------------------------------------------


def test_replays_are_told_with_the_split_of_the_warm_up(timer, queue):
    skip_first(timer, queue)
    for _ in range(2):
        run_step(timer, queue, data_wait=0.5, forward=3.0, backward=6.0, update=2.0)
    timer.begin_step()
    with phase(CAPTURE):
        for name in ("forward", REPLAY):  # of the capture, and of the check that follows it
            with phase(name):
                queue.spend(1000.0)
    timer.end_step()
    for _ in range(3):
        run_step(timer, queue, data_wait=0.25, replay=4.0, between=0.125)
    queue.let_pass()
    times = timer.times()
    assert [(r.name, r.p99_ms, r.source, r.num_samples) for r in times.phases] == [
        ("data_wait", 0.25, "measured", 3),
        ("replay", 4.0, "measured", 3),
        ("forward", 3.0, "from warm-up", 2),
        ("backward", 6.0, "from warm-up", 2),
        ("update", 2.0, "from warm-up", 2),
        ("other", 0.125, "measured", 3),
    ]


def test_an_update_outside_of_the_graph_is_measured(timer, queue):
    skip_first(timer, queue)
    run_step(timer, queue, forward=3.0, backward=6.0, update=2.0)
    run_step(timer, queue, replay=4.0, update=1.0)
    queue.let_pass()
    found = timer.times()["update"]
    assert (found.p50_ms, found.source) == (1.0, "measured")
    assert timer.times()["forward"].source == "from warm-up"


def test_steps_that_are_eager_again_are_told_as_eager(timer, queue):
    skip_first(timer, queue)
    run_step(timer, queue, replay=4.0)
    for _ in range(20 * EVERY):
        run_step(timer, queue, forward=3.0)
        queue.let_pass()
    assert "replay" not in timer.times().to_dict()
    assert timer.times()["forward"].source == "measured"


def test_nothing_is_recorded_in_a_capture_of_somebody_else(timer, queue):
    skip_first(timer, queue)
    timer.begin_step()
    queue.is_capturing = True
    with phase("forward"):  # `now` fails in a capture
        queue.spend(1.0)
    queue.is_capturing = False
    timer.end_step()
    queue.let_pass()
    assert not timer.times()
    assert len(queue.spare) == queue.num_made
