"""Moments of a device's queue: of the stream that is the current one, which is seldom asked for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from torchfast._core.reading import Marks, StepClock


class Event:
    def __init__(self, **_):
        self.stream = None

    def record(self, stream):
        self.stream = stream


@pytest.fixture
def cuda(monkeypatch):
    """Streams of a device that is not there; ``asked`` are those that were made an object of."""
    now = SimpleNamespace(number=7, asked=[])

    def current_stream(device):
        now.asked.append(now.number)
        return SimpleNamespace(stream_id=now.number, device=device)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentStream", lambda _: (now.number, 0, 1), raising=False
    )
    return now


def test_a_stream_that_stays_is_asked_for_once(cuda):
    marks = Marks(torch.device("cuda", 0))
    streams = [marks.now().stream for _ in range(3)]
    assert streams[0] is streams[1] is streams[2]
    assert cuda.asked == [7]


def test_a_moment_is_of_the_stream_that_is_the_current_one(cuda):
    marks = Marks(torch.device("cuda", 0))
    seen = []
    for cuda.number in (7, 9, 7):
        seen.append(marks.now().stream.stream_id)
    assert seen == [7, 9, 7]


def test_of_a_device_without_a_number_the_stream_is_asked_for_each_time(cuda):
    clock = StepClock(torch.device("cuda"))
    for _ in range(3):
        clock.start()
    assert len(cuda.asked) == 3
