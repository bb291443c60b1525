"""On streams that are late nobody reads too early, and no memory is given out while it is read."""

from __future__ import annotations

import copy
import pickle
import threading
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from simulated_streams import SimulatedDevice
from torchfast import ParallelBranches
from torchfast.graphs import parallel_branches


@pytest.fixture
def device(monkeypatch):
    device = SimulatedDevice()
    monkeypatch.setattr(parallel_branches, "streams_for", lambda _: device)
    yield device
    device.end()


def late(device, function):
    """Let the device be late before a function."""

    def call(*args):
        device.current().sleep(0.03)
        return function(*args)

    return call


def read(device, value):
    """Return what is in memory when the current stream has come to here."""
    device.main.synchronize()
    return device.raw(value).clone()


def run_late(device, branches):
    """Let main be late with the input, and the branches with the outputs."""
    with device:
        device.main.sleep(0.15)
        x = torch.ones(4) * 2
        outputs = branches([late(device, partial(torch.mul, other=k)) for k in range(5)], x)
        total = outputs[0] + outputs[1] + outputs[2] + outputs[3] + outputs[4]
    return read(device, total)


def test_branches_wait_for_what_comes_before_and_what_follows_waits_for_them(device):
    branches = ParallelBranches(3)
    for _ in range(3):
        assert torch.equal(run_late(device, branches), torch.full((4,), 20.0))


def test_without_a_fork_it_is_wrong(device, monkeypatch):
    monkeypatch.setattr(device, "fork", lambda current, streams: None)
    held = threading.Event()
    with device:
        device.main.enqueue(held.wait)
        x = torch.ones(4) * 2
        outputs = ParallelBranches(3)([partial(torch.mul, other=k) for k in range(1, 4)], x)
        for stream in device.streams[1:]:
            stream.synchronize()  # with a fork it would wait for what is held
        held.set()
        total = outputs[0] + outputs[1] + outputs[2]
    assert not torch.equal(read(device, total), torch.full((4,), 12.0))


def test_without_a_join_it_is_wrong(device, monkeypatch):
    monkeypatch.setattr(device, "join", lambda current, streams: None)
    held = threading.Event()

    def branch(x, factor):
        device.current().enqueue(held.wait)
        return x * factor

    with device:
        x = torch.ones(4) * 2
        outputs = ParallelBranches(3)([partial(branch, factor=k) for k in range(1, 4)], x)
        total = outputs[0] + outputs[1] + outputs[2]
    wrong = read(device, total)  # with a join it would wait for what is held
    held.set()
    assert not torch.equal(wrong, torch.full((4,), 12.0))


def test_branches_take_the_streams_in_turn_and_the_same_in_each_step(device):
    branches, seen = ParallelBranches(3), []
    note = [lambda: seen.append(device.current())] * 5
    branches(note[:2])
    assert len(device.streams) == 1 + 2
    branches(note)
    branches(note)
    first, second, third = device.streams[1:]
    assert seen == [first, second] + [first, second, third, first, second] * 2
    assert device.current() is device.main


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_branches_need_no_stream(device, count):
    branches, seen = ParallelBranches(3), []
    branches([lambda: seen.append(device.current())] * count)
    assert seen == [device.main] * count
    assert device.streams == [device.main]


def test_one_stream_turns_it_off(device):
    seen = []
    ParallelBranches(1)([lambda: seen.append(device.current())] * 3)
    assert seen == [device.main] * 3


def test_an_error_comes_out_with_the_streams_joined(device):
    written = torch.zeros(3)

    def slow():
        device.current().sleep()
        written.fill_(1.0)

    with device:
        with pytest.raises(ZeroDivisionError):
            ParallelBranches(2)([slow, lambda: 1 / 0, lambda: written.fill_(2.0)])
        assert device.current() is device.main
        copied = written + 0.0
    assert torch.equal(read(device, copied), torch.ones(3))  # the last one did not run


def test_the_first_error_comes_out_when_nobody_can_wait_any_more(device, monkeypatch):
    def broken(current, streams):
        raise RuntimeError("stream capture was invalidated")

    monkeypatch.setattr(device, "join", broken)
    with pytest.raises(ZeroDivisionError) as caught:
        ParallelBranches(2)([lambda: 1 / 0, abs])
    assert caught.value.__cause__ is None
    with pytest.raises(RuntimeError, match="invalidated"):
        ParallelBranches(2)([list, dict])


def test_branches_in_branches(device):
    branches = ParallelBranches(3)
    inner_streams = []

    def inner(x, k):
        inner_streams.append((device.stack[-2], device.current()))
        device.current().sleep(0.02)
        return x * k

    def outer(x):
        device.current().sleep(0.02)
        y = x + 1.0
        first, second, third = branches([partial(inner, k=float(k)) for k in range(3)], y)
        total = first + second + third
        del first, second, third
        return total * 2.0

    for _ in range(3):
        with device:
            outputs = branches([outer] * 4, torch.ones(4))
            total = outputs[0] + outputs[1] + outputs[2] + outputs[3]
        assert torch.equal(read(device, total), torch.full((4,), 48.0))
    assert all(outside is not inside for outside, inside in inner_streams)


def test_a_copy_is_a_new_one_without_streams(device):
    branches = ParallelBranches(3)
    model = nn.Linear(2, 2)
    model.branches = branches
    with device:
        branches([torch.sin, torch.cos], torch.ones(2))
    assert branches._streams
    for other in (
        copy.copy(branches),
        copy.deepcopy(model).branches,
        pickle.loads(pickle.dumps(branches)),
    ):
        assert (other.num_streams, other._streams) == (3, {})
    assert repr(branches) == "ParallelBranches(num_streams=3)"
    assert [*model.state_dict()] == ["weight", "bias"]


# -- Memory ----------------------------------------------------------------------------------------


def output_is_kept(device):
    """Let a late main read an output; drop it; use its stream as a backward would."""
    streams = []

    def branch(x):
        streams.append(device.current())
        return x * 2.0

    with device:
        outputs = ParallelBranches(2)([branch, branch], torch.ones(4))
        device.main.sleep()
        result = outputs[0] + 0.0
        del outputs
        with device.on(streams[0]):
            other = torch.ones(4) * 7.0
            del other
    return torch.equal(read(device, result), torch.full((4,), 2.0))


def input_is_kept(device, call):
    """Let a late side stream read an input once more, as a backward would; drop it; use main."""
    streams, results = [], []

    def branch(x):
        streams.append(device.current())
        return x * 2.0

    with device:
        holder = [torch.ones(4) * 3.0]
        call(branch, holder[0])
        with device.on(streams[0]):
            streams[0].sleep()
            results.append(holder[0] + 0.0)
        holder.clear()
        other = torch.ones(4) * 7.0
        del other
        device.join(device.main, streams)
    return torch.equal(read(device, results[0]), torch.full((4,), 3.0))


def given(branch, x):
    ParallelBranches(2)([branch, branch], x)


def mapped(branch, x):
    ParallelBranches(2).map(branch, [x, x])


def in_containers(branch, x):
    ParallelBranches(2).map(lambda item: branch(item["x"][0].x), [{"x": (Named(x),)}] * 2)


def in_closures(branch, x):
    ParallelBranches(2)([lambda: branch(x), lambda: branch(x)])


def in_partials(branch, x):
    ParallelBranches(2)([partial(branch, x), partial(branch, x=x)])


class Named(NamedTuple):
    x: torch.Tensor


WAYS = [given, mapped, in_containers, in_closures, in_partials]


def test_memory_of_outputs_is_not_given_out_while_they_are_read(device):
    assert output_is_kept(device)


@pytest.mark.parametrize("way", WAYS)
def test_memory_of_inputs_is_not_given_out_while_they_are_read(device, way):
    assert input_is_kept(device, way)


def test_without_recording_memory_is_overwritten(device, monkeypatch):
    monkeypatch.setattr(device, "record", lambda tensor, stream: None)
    assert not output_is_kept(device)
    assert device.num_reused > 0
    for way in WAYS:
        assert not input_is_kept(device, way)


def test_memory_is_used_again_in_the_end(device):
    branches = ParallelBranches(2)
    with device:
        for _ in range(30):
            outputs = branches([torch.sin, torch.cos], torch.ones(64) * 1.0)
            device.main.synchronize()
            del outputs
    assert device.num_reused > 40


class Noting:
    """A device without any work, that notes what it is asked for."""

    def __init__(self):
        self.num_made, self.calls = 0, []
        self.stack = ["main"]

    def new(self):
        self.num_made += 1
        return f"side {self.num_made - 1}"

    def current(self):
        return self.stack[-1]

    on = SimulatedDevice.on

    def fork(self, current, streams):
        self.calls.append(("fork", current, *streams))

    def join(self, current, streams):
        self.calls.append(("join", current, *streams))

    def record(self, tensor, stream):
        self.calls.append(("record", tuple(tensor.shape), stream))

    def taken(self):
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def noting(monkeypatch):
    noting = Noting()
    monkeypatch.setattr(parallel_branches, "streams_for", lambda _: noting)
    return noting


def test_what_is_shared_is_recorded_once_for_each_stream(noting):
    x = torch.ones(2)
    ParallelBranches(2)([lambda x: x[:1]] * 4, x)
    assert noting.taken() == [
        ("fork", "main", "side 0", "side 1"),
        ("join", "main", "side 0", "side 1"),
        ("record", (2,), "side 0"),
        ("record", (2,), "side 1"),
        *[("record", (1,), "main")] * 4,
    ]


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
def test_all_memory_of_tensors_of_other_kinds_is_recorded(noting):
    dense = torch.eye(3)
    kinds = [
        (TwoTensor(torch.ones(1), torch.ones(1)), [(1,), (1,)]),
        (dense.to_sparse(), [(2, 3), (3,)]),
        (dense.to_sparse_csr(), [(4,), (3,), (3,)]),
        (dense.to_sparse_csc(), [(4,), (3,), (3,)]),
        (nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]), [(3,), (2,)]),
    ]
    for value, shapes in kinds:
        ParallelBranches(2)([lambda v: v, lambda v: None], value)
        calls = noting.taken()
        assert [call[1] for call in calls if (call[0], call[-1]) == ("record", "main")] == shapes


def test_in_the_backward_main_waits_for_each_branch_before_the_next(noting):
    x = torch.ones(2, requires_grad=True)
    outputs = ParallelBranches(2)([lambda x: {"y": x * 2.0, "n": 1}] * 4, x)
    noting.taken()
    (outputs[0]["y"] + outputs[1]["y"] + outputs[2]["y"] + outputs[3]["y"]).sum().backward()
    assert noting.taken() == [("join", "main", f"side {k}") for k in (1, 0, 1)]
    assert torch.equal(x.grad, torch.full((2,), 8.0))


def test_there_is_nothing_to_order_without_a_graph(noting):
    with torch.no_grad():
        outputs = ParallelBranches(2)([torch.sin, torch.cos], torch.ones(2, requires_grad=True))
    assert all(output.grad_fn is None for output in outputs)


def test_the_device_is_that_of_the_tensors():
    on_cpu, on_meta = torch.ones(1), torch.ones(1, device="meta")
    assert parallel_branches._device_of([[on_cpu], [on_meta]]).type == "meta"
    assert parallel_branches._device_of([[on_cpu], []]).type == "cpu"
    assert parallel_branches.streams_for(torch.device("cpu")) is None
    if not torch.cuda.is_initialized():
        assert parallel_branches._device_of([[], []]).type == "cpu"
