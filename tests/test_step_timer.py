"""The timer of fit's steps: what it measures, that it waits for nothing, and what it costs."""

from __future__ import annotations

import threading

import pytest

from simulated_queue import SimulatedQueue, percentiles, run_step, skip_first, timed
from torchfast import phase
from torchfast._core.phases import REPLAY
from torchfast._core.step_times import PhaseTimes
from torchfast.profiling.step_timer import MOST_PENDING


@pytest.fixture
def queue():
    return SimulatedQueue()


@pytest.fixture
def timer(queue):
    with timed(queue) as timer:
        yield timer


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


@pytest.mark.parametrize("name", ["step", "other", "replay"])
def test_a_phase_of_ones_own_inside_of_a_graph_is_told_apart_too(timer, queue, name):
    skip_first(timer, queue)
    timer.begin_step()
    with phase(REPLAY):
        queue.spend(5.0)
    timer.end_step()
    timer.note_steps([6.0])
    timer.note_replays([{name: 2.0}])
    queue.let_pass()
    rows = timer.times().phases
    found = {row.name: row.p50_ms for row in rows}
    assert len(rows) == len(found)
    assert (found[f"{name} (yours)"], found["step"], found["replay"]) == (2.0, 6.0, 5.0)


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
