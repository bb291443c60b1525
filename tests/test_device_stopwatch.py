"""What work takes on a device: the host launches it while the device sleeps."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from torchfast._core import device_stopwatch
from torchfast._core.device_stopwatch import DeviceStopwatch

KEPT = device_stopwatch._NUM_KEPT


@pytest.fixture
def machine(monkeypatch):
    """A host whose clock only launches move, and a device that notes where it sleeps, and how long.

    A block takes the device 4 ms.
    """
    current = [0]
    machine = SimpleNamespace(now_s=0.0, seen=[], slept_s=[])

    @contextmanager
    def device(where):
        before, current[0] = current[0], where.index
        yield
        current[0] = before

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            machine.seen.append(("event", current[0]))

        def elapsed_time(self, end):
            return 4.0

    def sleep(cycles):
        machine.seen.append(("sleep", current[0]))
        machine.slept_s.append(cycles / 2e9)

    def launch(seconds):
        def work():
            machine.now_s += seconds

        return work

    machine.launch = launch
    clock = SimpleNamespace(perf_counter=lambda: machine.now_s)
    monkeypatch.setattr(device_stopwatch, "time", clock)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda where: None)
    return machine


def test_the_device_of_the_model_sleeps_and_is_timed(machine):
    stopwatch = DeviceStopwatch(torch.device("cuda", 1))
    for _ in range(2):  # the first does not know yet how long to sleep
        assert stopwatch(machine.launch(1e-3), 2) == 4e-3
    assert [what for what, _ in machine.seen] == ["event", "event", "sleep", "event", "event"]
    assert {where for _, where in machine.seen} == {1}


def test_it_sleeps_as_long_as_the_slowest_way_takes_to_launch_and_half_as_long_again(machine):
    stopwatch = DeviceStopwatch(torch.device("cuda", 0))
    for seconds in (1e-3, 3e-3, 2e-3):
        stopwatch(machine.launch(seconds), 4)
    stopwatch(machine.launch(1e-3), 10)
    assert machine.slept_s == pytest.approx([1.5 * 4 * 1e-3, 1.5 * 4 * 3e-3, 1.5 * 10 * 3e-3])


def test_a_launch_that_waits_is_not_waited_for_much_longer_and_is_forgotten(machine):
    stopwatch = DeviceStopwatch(torch.device("cuda", 0))
    stopwatch(machine.launch(60.0), 1)
    for _ in range(KEPT + 1):
        stopwatch(machine.launch(1e-3), 1)
    assert machine.slept_s == pytest.approx([0.25] * KEPT + [1.5e-3])
