"""The timer of fit's steps: what it measures, that it waits for nothing, and what it costs."""

from __future__ import annotations

import threading

import pytest
import torch

from torchfast import phase
from torchfast._core import phases
from torchfast._core.phases import CAPTURE, REPLAY
from torchfast._core.step_times import PhaseTimes
from torchfast.profiling import step_timer
from torchfast.profiling.step_timer import EVERY, MOST_PENDING, NUM_FIRST, StepTimer

CPU = torch.device("cpu")


class Event:
    """A moment of the device below."""

    def __init__(self):
        self.at = None


class SimulatedQueue:
    """Stands in for `Marks` on a device that is behind: a moment has passed when it is let.

    Time is told: `spend` enqueues work of so many milliseconds.
    """

    def __init__(self):
        self.at_ms = 0.0
        self.passed_ms = -1.0
        self.num_made = 0
        self.spare = []
        self.is_capturing = False

    def spend(self, ms):
        self.at_ms += ms

    def let_pass(self):
        self.passed_ms = self.at_ms

    def now(self):
        assert not self.is_capturing, "an event in a capture can never be asked"
        if not self.spare:
            self.num_made += 1
            self.spare.append(Event())
        event = self.spare.pop()
        event.at = self.at_ms
        return event

    def has_passed(self, event):
        return event.at <= self.passed_ms

    def between_ms(self, before, after):
        assert self.has_passed(before), "the host would have to wait"
        assert self.has_passed(after), "the host would have to wait"
        return after.at - before.at

    def give_back(self, events):
        for event in events:
            assert event not in self.spare, "given back twice"
            self.spare.append(event)


@pytest.fixture
def queue():
    return SimulatedQueue()


@pytest.fixture
def timer(queue):
    found = StepTimer(CPU, queue)
    with found.session():
        yield found
    assert phases._recorders == {}


# What an engine gives, by identity: a phase of the user's that is called so is another.
OF_GRAPHS = {"replay": REPLAY, "capture": CAPTURE}


def run_step(timer, queue, **spent):
    """Run a step whose phases take what is told; ``between`` is in none of them."""
    timer.begin_step()
    for name, ms in spent.items():
        if name == "between":
            queue.spend(ms)
            continue
        with phase(OF_GRAPHS.get(name, name)):
            queue.spend(ms)
    timer.end_step()


def skip_first(timer, queue):
    run_step(timer, queue)


def percentiles(timer, name):
    found = timer.times()[name]
    return found.p50_ms, found.p90_ms, found.p99_ms


# --- what is measured -----------------------------------------------------------------------------


def test_phases_and_what_is_in_none(timer, queue):
    skip_first(timer, queue)
    for ms in (1.0, 2.0, 9.0):
        run_step(timer, queue, data_wait=ms, forward=3.0, between=0.5, backward=6.0, update=1.0)
    queue.let_pass()
    assert percentiles(timer, "data_wait") == (2.0, 9.0, 9.0)
    assert percentiles(timer, "forward") == (3.0, 3.0, 3.0)
    assert percentiles(timer, "other") == (0.5, 0.5, 0.5)
    assert [row.name for row in timer.times().phases] == [
        "data_wait",
        "forward",
        "backward",
        "update",
        "other",
    ]
    assert {row.source for row in timer.times().phases} == {"measured"}


def test_a_phase_that_comes_again_in_a_step_is_added_up(timer, queue):
    skip_first(timer, queue)
    timer.begin_step()
    for _ in range(3):
        with phase("forward"):
            queue.spend(2.0)
        with phase("backward"):
            queue.spend(4.0)
    timer.end_step()
    queue.let_pass()
    assert timer.times()["forward"].p50_ms == 6.0
    assert timer.times()["backward"].p50_ms == 12.0
    assert timer.times()["other"].p50_ms == 0.0


def test_a_phase_within_another_is_told_and_not_counted_twice(timer, queue):
    skip_first(timer, queue)
    timer.begin_step()
    with phase("forward"):
        queue.spend(1.0)
        with phase("attention"), phase("attention"):
            queue.spend(2.0)
    queue.spend(0.25)
    timer.end_step()
    queue.let_pass()
    assert timer.times()["forward"].p50_ms == 3.0
    assert timer.times()["attention"].p50_ms == 2.0
    assert timer.times()["other"].p50_ms == 0.25


def test_a_phase_that_some_steps_lack_took_no_time_in_them(timer, queue):
    skip_first(timer, queue)
    run_step(timer, queue, forward=1.0, mine=5.0)
    run_step(timer, queue, forward=1.0)
    run_step(timer, queue, forward=1.0)
    queue.let_pass()
    assert percentiles(timer, "mine") == (0.0, 5.0, 5.0)
    assert timer.times()["data_wait"].p50_ms == 0.0  # the batch lay ready


def test_a_phase_that_outlives_its_step_leaves_the_rest_right(timer, queue):
    skip_first(timer, queue)
    timer.begin_step()
    left_open = phase("mine")
    left_open.__enter__()
    with phase("forward"):
        queue.spend(2.0)
    timer.end_step()
    timer.begin_step()
    with phase("forward"):
        queue.spend(4.0)
        left_open.__exit__(None, None, None)
    timer.end_step()
    queue.let_pass()
    assert percentiles(timer, "forward") == (2.0, 4.0, 4.0)
    assert percentiles(timer, "other") == (0.0, 0.0, 0.0)
    assert "mine" not in timer.times().to_dict()


def test_copies_beside_the_step_are_labelled(timer, queue):
    skip_first(timer, queue)
    run_step(timer, queue, forward=2.0)
    queue.let_pass()
    timer.note_copies([0.5, 0.7])
    found = timer.times()["h2d"]
    assert (found.p50_ms, found.p99_ms, found.source) == (0.5, 0.7, "copy stream")
    run_step(timer, queue, h2d=1.0, forward=2.0)  # in the step itself
    queue.let_pass()
    assert timer.times()["h2d"].source == "measured"


def test_whole_steps_come_first(timer, queue):
    skip_first(timer, queue)
    timer.note_steps([3.0, 4.0])
    run_step(timer, queue, forward=2.0, mine=1.0)
    queue.let_pass()
    assert [r.name for r in timer.times().phases] == [
        "step",
        "data_wait",
        "forward",
        "mine",
        "other",
    ]
    assert timer.times()["step"].p50_ms == 3.0


# --- when it is read ------------------------------------------------------------------------------


def test_nothing_is_read_before_the_device_has_passed_it(timer, queue):
    skip_first(timer, queue)
    for _ in range(2):
        run_step(timer, queue, forward=2.0)  # `between_ms` fails where the host would wait
    assert not timer.times()
    queue.let_pass()
    run_step(timer, queue, forward=100.0)
    assert timer.times()["forward"].num_samples == 2
    assert timer.times()["forward"].p99_ms == 2.0


def test_a_phase_on_a_stream_that_nobody_waits_for_is_waited_for_by_nobody(timer, queue):
    skip_first(timer, queue)
    timer.begin_step()
    part = timer.begin("mine")
    timer.end(part)
    part.stop.at = 50.0  # behind all that the step has enqueued
    timer.end_step()
    queue.let_pass()
    assert not timer.times()
    queue.passed_ms = 50.0
    assert timer.times()["mine"].p50_ms == 50.0


def test_a_host_far_ahead_leaves_no_heap_of_events(timer, queue):
    for _ in range(200):
        run_step(timer, queue, forward=1.0, backward=1.0)
    assert len(timer._pending) == MOST_PENDING
    assert queue.num_made == MOST_PENDING * 6


def test_events_are_used_again(timer, queue):
    for _ in range(200):
        run_step(timer, queue, forward=1.0, backward=1.0)
        queue.let_pass()
    assert queue.num_made == 6
    timer.times()
    assert len(queue.spare) == 6


# --- which steps ----------------------------------------------------------------------------------


def sampled(timer, queue, num_steps):
    """Return which of so many steps are taken apart, counted from 1."""
    found = []
    for number in range(1, num_steps + 1):
        timer.begin_step()
        if timer._sample is not None:
            found.append(number)
        queue.spend(1e6)  # so long that no sampling is dear
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


def test_where_sampling_is_dear_it_is_rare(timer, queue, monkeypatch):
    now = [0.0]

    def perf_counter():
        now[0] += 5e-6  # so between two there are 5 µs: what a mark takes
        return now[0]

    monkeypatch.setattr(step_timer.time, "perf_counter", perf_counter)
    spent_ms = 4 * 5e-3  # of two moments for the step, and two for its phase
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


# --- names of the user's --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["step", "other", "capture", "replay"])
def test_a_name_that_the_table_has_is_told_apart(timer, queue, name):
    skip_first(timer, queue)
    timer.begin_step()
    # Made here: a literal may be the same object.
    with phase("".join(name)), phase("forward"):
        queue.spend(2.0)
    timer.end_step()
    timer.note_steps([5.0])
    queue.let_pass()
    found = timer.times()
    assert found[f"{name} (yours)"].p50_ms == 2.0
    assert found["forward"].source == "measured"
    assert found["step"].p50_ms == 5.0
    assert "replay" not in found.to_dict()


# --- for log records ------------------------------------------------------------------------------


def test_a_record_is_told_the_same_without_sorting_it_each_time(timer, queue, monkeypatch):
    skip_first(timer, queue)
    run_step(timer, queue, forward=2.0)
    timer.note_steps([5.0])
    queue.let_pass()
    timer._take_up()
    assert timer.recent_times() == timer.times()
    made = []
    of = PhaseTimes.of
    monkeypatch.setattr(PhaseTimes, "of", lambda *args: made.append(args[0]) or of(*args))
    assert timer.recent_times()["forward"].p50_ms == 2.0
    assert made == []
    run_step(timer, queue, forward=4.0)
    queue.let_pass()
    timer._take_up()
    assert timer.recent_times()["forward"].num_samples == 2
    assert "forward" in made


def test_another_thread_reads_and_takes_nothing_up(timer, queue):
    skip_first(timer, queue)
    run_step(timer, queue, forward=2.0)
    queue.let_pass()
    pending = len(timer._pending)
    assert pending
    thread = threading.Thread(target=timer.times)
    thread.start()
    thread.join()
    assert len(timer._pending) == pending
    timer.times()
    assert not timer._pending
