"""What the benchmark of an update on the host times: steps, updates, and updates that wait."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from benchmarks import offload_update
from benchmarks.workloads import workload


def test_an_update_is_not_waited_for_within_a_step_that_is_timed(monkeypatch):
    """Or a copy that began in the backward could not go on beside the update."""
    arm = offload_update.Training("host, overlap", workload("llama", "smoke"), 1, "cpu")
    waits = []
    monkeypatch.setattr(arm, "synchronize", lambda: waits.append(1))
    arm.turn(3)
    assert len(waits) == 2
    assert arm.update_ms() > 0
    assert len(waits) == 2 + 2 * offload_update.FEW
    arm.close()


@pytest.mark.parametrize("name", offload_update.ARMS)
def test_the_time_of_a_step_has_the_backward_and_that_of_an_update_has_not(monkeypatch, name):
    clock = [0.0]
    training = offload_update.Training
    works = (("backward", 4.0, training._forward_backward), ("update", 0.5, training._update))
    done = []

    def taking(what, seconds, work):
        def timed(self):
            clock[0] += seconds
            done.append(what)
            return work(self)

        return timed

    for what, seconds, work in works:
        monkeypatch.setattr(training, work.__name__, taking(what, seconds, work))
    arm = training(name, workload("llama", "smoke"), 1, "cpu")
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    done.clear()
    arm.turn(3)
    assert arm.times_ms == [4500.0]
    assert done == ["backward", "update"] * 3
    assert arm.update_ms() == 500.0
    arm.close()


def test_an_update_waits_for_the_backward_in_turns_of_its_own():
    overlaps = []

    class Watched(offload_update.Training):
        def __init__(self):
            self.device = "cpu"
            self.optimizer = SimpleNamespace(overlap=True)

        def run(self):
            overlaps.append(self.optimizer.overlap)

    training = Watched()
    waiting = offload_update.Waiting(training)
    waiting.turn(2)
    assert overlaps == [False, False]
    assert training.optimizer.overlap
    assert len(waiting.times_ms) == 1
