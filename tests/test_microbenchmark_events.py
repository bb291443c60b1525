"""The stopwatch of events, on a device that is made up."""

from __future__ import annotations

import pytest
import torch

from torchfast.profiling import microbenchmark


class MadeUpDevice:
    """A queue of what the host asked for, which a wait carries out: a clock of its own."""

    def __init__(self, monkeypatch, l2_bytes):
        self.queue, self.log, self.now = [], [], 0.0
        properties = type("Properties", (), {"L2_cache_size": l2_bytes})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: MadeUpEvent(self))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.wait())
        monkeypatch.setattr(microbenchmark.torch, "empty", self.empty)

    def empty(self, num_bytes, **_):
        buffer = MadeUpBuffer()
        buffer.num_bytes, buffer.device = num_bytes, self
        return buffer

    def launch(self, name, ms):
        self.queue.append((name, ms))

    def wait(self):
        for what, ms in self.queue:
            if isinstance(what, MadeUpEvent):
                what.at = self.now
            self.log.append("event" if isinstance(what, MadeUpEvent) else what)
            self.now += ms
        self.queue = []


class MadeUpBuffer:
    def zero_(self):
        self.device.launch("flush", 30.0)


class MadeUpEvent:
    def __init__(self, device):
        self.device, self.at = device, None

    def record(self):
        self.at = None
        self.device.launch(self, 0.0)

    def elapsed_time(self, end):
        return end.at - self.at  # fails where nobody has waited


@pytest.mark.parametrize(("l2_bytes", "flushed"), [(50, 100), (0, 128 * 2**20)])
def test_each_call_stands_between_two_events_behind_a_flush(monkeypatch, l2_bytes, flushed):
    device = MadeUpDevice(monkeypatch, l2_bytes)
    stopwatch = microbenchmark._EventStopwatch(torch.device("cuda", 0), flush_l2=True)
    assert stopwatch._buffer.num_bytes == flushed
    for _ in range(2):  # the events are used again
        device.log = []
        seconds = stopwatch(lambda: device.launch("work", 2.0), 3)
        assert seconds == pytest.approx(0.006)
        assert device.log == ["flush", "event", "work", "event"] * 3
    assert len(stopwatch._events) == 3


def test_without_the_flush_a_block_stands_between_two_events(monkeypatch):
    device = MadeUpDevice(monkeypatch, 50)
    stopwatch = microbenchmark._EventStopwatch(torch.device("cuda", 0), flush_l2=False)
    assert stopwatch(lambda: device.launch("work", 2.0), 3) == pytest.approx(0.006)
    assert device.log == ["event", "work", "work", "work", "event"]
