"""What a batch costs the host: no call of the system, no stream that is made, no more memory."""

from __future__ import annotations

import multiprocessing
import os
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from simulated_device import Prompt, numbered, simulated
from torchfast import PrefetchingLoader
from torchfast.data import stager, transport
from torchfast.data.layout import LARGE_BYTES, lay_out
from torchfast.data.process import this_process
from torchfast.data.stager import Fetching
from torchfast.data.statistics import Counters
from torchfast.data.transport import CUDATransport, Slot


@pytest.fixture
def device(monkeypatch):
    with simulated(monkeypatch) as device:
        yield device


# -- Forks -----------------------------------------------------------------------------------------


def test_a_batch_makes_no_call_of_the_system(device, monkeypatch):
    device.kind = Prompt
    calls = []
    loader = PrefetchingLoader(iter(numbered(30)), "cpu", background=True)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    number = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: calls.append(1) or number)
    for _ in range(20):
        next(batches)
    assert loader._feed._thread is not None
    assert calls == []
    monkeypatch.undo()
    loader.close()


def in_a_fork(found):
    """Run a function in a fork and return what it returned."""

    def child(pipe):
        pipe.send(found())
        pipe.close()

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
    process.start()
    assert ours.poll(20)
    result = ours.recv()
    process.join(20)
    return result


def test_a_process_is_known_from_its_fork_and_from_the_fork_of_that():
    parent = this_process()
    assert parent.is_here
    assert parent.pid == os.getpid()
    assert this_process() is parent

    def seen(*before):
        own = this_process()
        known = [process.is_here for process in (*before, own)], own.pid == os.getpid()
        return known, (in_a_fork(lambda: seen(*before, own)) if len(before) < 2 else None)

    assert in_a_fork(lambda: seen(parent)) == (
        ([False, True], True),
        (([False, False, True], True), None),
    )
    assert parent.is_here
    assert this_process() is parent


# -- New memory for old ----------------------------------------------------------------------------


class Stream:
    """Notes what is allocated while it is entered."""

    entered: ClassVar = []

    def __init__(self, device=None, *, stream_id=0, **_):
        self.stream_id = stream_id
        self.device_index = self.device_type = 0

    def __enter__(self):
        self.entered.append(self.stream_id)
        return self

    def __exit__(self, *_):
        self.entered.append(-1)

    def __eq__(self, other):
        return self.stream_id == other.stream_id

    __hash__ = None

    def wait_stream(self, other):
        pass


class Event:
    def record(self, stream=None):
        pass

    wait = record


@pytest.fixture
def cuda(monkeypatch):
    """A transport over streams and events that do nothing, and which stream is the current one."""
    now = SimpleNamespace(stream=Stream(stream_id=7))
    monkeypatch.setattr(Stream, "entered", [])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: now.stream)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentStream", lambda _: (now.stream.stream_id, 0, 1), raising=False
    )
    now.transport = CUDATransport(torch.device("cpu", 0))
    # Where something is allocated, and on which stream.
    allocate = torch.empty_like
    now.allocated = []

    def empty_like(block):
        now.allocated.append(Stream.entered[-1] if Stream.entered else -1)
        return allocate(block)

    monkeypatch.setattr(transport.torch, "empty_like", empty_like)
    return now


def received(cuda):
    slot = Slot(ready=Event(), free=Event())
    slot.home = cuda.stream
    slot.blocks = [torch.empty(size, dtype=torch.uint8) for size in (0, 40, 30)]
    cuda.transport.receive(slot)
    return slot


def test_new_memory_is_of_the_same_size_and_of_the_stream_that_received(cuda):
    slot = received(cuda)
    given = slot.blocks
    cuda.transport.renew(slot)
    assert [block.numel() for block in slot.blocks] == [0, 40, 30]
    assert slot.home is slot.stream
    own = {block.data_ptr() for block in given[1:]}
    assert own.isdisjoint(block.data_ptr() for block in slot.blocks)
    assert slot.blocks[0] is given[0]  # nobody was given it
    assert cuda.allocated == [-1, -1]
    assert Stream.entered == []  # it is the current one


def test_on_another_stream_than_the_current_one_it_is_entered(cuda):
    slot = received(cuda)
    cuda.stream = Stream(stream_id=9)
    cuda.transport.renew(slot)
    assert cuda.allocated == [7, 7]
    assert Stream.entered == [7, -1]
    assert slot.home.stream_id == 7


def test_a_batch_is_received_on_the_stream_that_is_current_then(cuda):
    first = received(cuda)
    cuda.stream = Stream(stream_id=9)
    second = received(cuda)
    assert (first.stream.stream_id, second.stream.stream_id) == (7, 9)
    cuda.transport.renew(second)
    assert Stream.entered == []
    cuda.transport.renew(first)
    assert Stream.entered == [7, -1]


KINDS = {
    "empty and large": [(0, False), (LARGE_BYTES, False)],
    "empty": [(0, False), (0, False)],
    "empty, where it is": [(0, True), (8, True)],
    "small": [(3, False), (LARGE_BYTES, True)],
}


@pytest.mark.parametrize("case", KINDS)
def test_a_block_in_which_a_tensor_lies_has_bytes(case):
    # Whoever makes an empty tensor larger would else share it with the next batch.
    kinds = [((torch.uint8, torch.Size([size]), (1,)), direct) for size, direct in KINDS[case]]
    layout = lay_out(kinds)
    assert all(layout.block_bytes[place.block] > 0 for place in layout.places)
    assert layout.num_bytes == sum(size for size, _ in KINDS[case])


def test_where_no_tensor_is_small_the_pack_has_no_bytes():
    kind = torch.uint8, torch.Size([LARGE_BYTES]), (1,)
    assert lay_out([(kind, False), (kind, True)]).block_bytes == (0, LARGE_BYTES, LARGE_BYTES)
    assert lay_out([]).block_bytes == (0,)


def test_empty_tensors_go_through(device):
    batches = [{"x": torch.zeros(0, 3), "y": torch.full((2, 20_000), i)} for i in range(9)]
    for reuse in (True, False):
        with PrefetchingLoader(batches, "cpu", reuse=reuse, background=True) as loader:
            for batch in loader:
                assert batch["x"].shape == (0, 3)


# -- The clock -------------------------------------------------------------------------------------


def test_time_runs_between_batches_of_an_iteration_and_not_before_the_first_of_all():
    counters = Counters()
    counters.begin(0.0)
    for now in (10.0, 11.0, 14.0):
        counters.handed_out(now, 5)
    assert counters.snapshot().elapsed_s == 4
    counters.begin(100.0)
    assert counters.snapshot().elapsed_s == 4  # what is between two iterations is not counted
    counters.handed_out(102.0, 5)
    assert counters.snapshot().elapsed_s == 6
    counters.begin(200.0)
    counters.begin(300.0)  # nothing came
    counters.handed_out(301.0, 5)
    statistics = counters.snapshot()
    assert (statistics.elapsed_s, statistics.num_batches, statistics.num_bytes) == (7, 5, 25)


def test_fewer_batches_are_timed_once_there_are_many():
    timed = [number for number in range(1, 1025) if transport._is_timed(number)]
    assert timed[:17] == [*range(16, 257, 16), 320]
    assert len(timed) == 16 + (1024 - 256) // 64


def test_what_took_no_time_leaves_what_is_owed_as_it_was_counted():
    swift, slow = stager.SWIFT_S / 2, stager.SWIFT_S * 3
    fetching = Fetching(where="thread", is_lazy=True)
    fetching.note_time(swift)
    assert (fetching.behind_s, fetching.hiccups_s) == (0.0, 0.0)
    fetching.note_time(slow)
    owed, hiccups = fetching.behind_s, fetching.hiccups_s
    assert owed > 0
    assert hiccups > 0
    fetching.note_time(swift)  # which pays some of it off
    assert fetching.behind_s < owed
    assert fetching.hiccups_s < hiccups
