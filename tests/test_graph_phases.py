"""What phases take inside of replays: read when the device is through, and never of two replays."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from tape import taped
from torchfast import CUDAGraphStep, phase
from torchfast.graphs.moments import EVERY, PhaseMoments


class Device:
    """Passes moments when it is told to, as a stream does some time after a launch."""

    def __init__(self):
        self.captured, self.coming, self.now = [], [], 0.0

    def moment(self):
        return Moment(self)

    def launch(self):
        """A replay: from now on its moments are still to come."""
        for moment in self.captured:
            moment.at = None
        self.coming = list(self.captured)

    def go_on(self, moments=None, ms=2.0):
        for moment in self.coming[:moments]:
            self.now += ms
            moment.at = self.now
        del self.coming[:moments]


class Moment:
    def __init__(self, device):
        self.device, self.at = device, None

    def record(self):
        self.device.captured.append(self)

    def has_passed(self):
        return self.at is not None

    def ms_since(self, earlier):
        return None if self.at is None or earlier.at is None else self.at - earlier.at


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def times():
    return deque(maxlen=8)


@pytest.fixture
def moments(device, times):
    moments = PhaseMoments(device.moment, times)
    with moments.noting():
        for _ in range(2):
            with phase("forward"), phase("mine"), phase("forward"):
                pass
        with phase("update"):
            pass
    with phase("later"):
        pass
    return moments


def replay(moments, device):
    moments.before_replay()
    device.launch()
    moments.replayed()


def test_a_phase_that_comes_again_is_added_up(moments, device, times):
    replay(moments, device)
    device.go_on()
    moments.read()
    # Within "forward" begins and ends "mine", and the inner "forward" is a part of the outer.
    assert list(times) == [{"mine": 4.0, "forward": 12.0, "update": 2.0}]


def test_what_the_device_is_not_through_with_is_not_read(moments, device, times):
    replay(moments, device)
    device.go_on(moments=9)
    moments.read()
    assert not times
    device.go_on()
    moments.read()
    assert len(times) == 1


def test_a_replay_is_read_once(moments, device, times):
    moments.read()  # before there is one
    replay(moments, device)
    device.go_on()
    moments.read()
    moments.read()
    assert len(times) == 1


def test_one_in_some_is_read_before_the_next_is_launched(moments, device, times):
    for number in range(3 * EVERY + 1):
        replay(moments, device)
        device.go_on(ms=float(number + 1))
    assert [found["update"] for found in times] == [EVERY - 1.0, 2 * EVERY - 1.0, 3 * EVERY - 1.0]


def test_a_host_that_is_ahead_reads_when_it_can(moments, device, times):
    for _ in range(2 * EVERY):
        replay(moments, device)
    assert not times
    device.go_on()
    moments.before_replay()
    assert len(times) == 1


def test_times_of_two_replays_are_not_told(moments, device, times):
    """Whatever a device says of events that are recorded anew."""
    replay(moments, device)
    device.go_on()
    first = device.captured[0]
    first.at = None
    moments.read()
    assert not times
    first.at = device.now + 1.0
    moments.read()
    assert not times


def test_a_step_of_ones_own(monkeypatch):
    weight = torch.zeros(8)

    def fn(x):
        with phase("mine"):
            weight.add_(x)
        return weight.sum()

    with taped(monkeypatch):
        step = CUDAGraphStep(fn, state=[weight], time_phases=True, warm_up_steps=1)
        for _ in range(2 * EVERY):
            step(torch.ones(8))
        found = step.phase_times()
        plain = CUDAGraphStep(fn, state=[weight], warm_up_steps=1)
        for _ in range(2 * EVERY):
            plain(torch.ones(8))
    assert step.report().counters["captures"] == 1
    # One in sixteen, those of the check among them, and the last.
    assert [list(each) for each in found] == [["mine"]] * 3
    assert all(each["mine"] > 0.0 for each in found)
    assert plain.phase_times() == []
    assert weight[0] == 4 * EVERY
