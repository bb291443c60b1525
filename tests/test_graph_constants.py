"""Constants that a step copies from the host, for a device that is meta here."""

from __future__ import annotations

from array import array
from collections import deque
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from torchfast import CaptureError
from torchfast.graphs import constants as constants_module
from torchfast.graphs.constants import HostConstants

META = torch.device("meta")

COPIES = {
    "tensor().to": lambda value, x: torch.tensor(value).to(x.device),
    "to(dtype)": lambda value, x: torch.tensor(value).to(x.device, torch.float64),
    "to(other)": lambda value, x: torch.tensor(value).to(x),
    "to(device=)": lambda value, x: torch.tensor([value]).to(device=x.device),
    "tensor(device=)": lambda value, x: torch.tensor(value, device=x.device),
    "as_tensor(device=)": lambda value, x: torch.as_tensor([value, 1.0], device="meta"),
    "scalar_tensor": lambda value, x: torch.scalar_tensor(value, device=x.device),
    "new_tensor": lambda value, x: x.new_tensor([value]),
    "copy_": lambda value, x: x.copy_(torch.full((8,), value)),
    "setitem": lambda value, x: x.__setitem__(slice(2, 4), torch.full((2,), value)) or x[2:4],
    "index": lambda value, x: x[[int(value * 10), 2]],
    "index among others": lambda value, x: x.view(2, 4)[..., [-int(value * 10) % 4], None],
    "index of a tensor": lambda value, x: x[torch.tensor([int(value * 10)], dtype=torch.int32)],
    "setitem by index": lambda value, x: x.__setitem__([int(value * 10)], 1.0) or x[2:4],
}


def run(copy, value, context):
    with context:
        return copy(value, torch.zeros(8, device="meta"))


@pytest.mark.parametrize("name", COPIES)
def test_a_constant_is_kept_and_stands_in(name):
    constants = HostConstants(META)
    first = run(COPIES[name], 0.5, constants.recording())
    ((value, kept, _),) = constants._values
    assert value.device.type == "cpu"
    assert kept.device == META
    again = run(COPIES[name], 0.5, constants.standing_in())
    plain = COPIES[name](0.5, torch.zeros(8, device="meta"))
    for found in (first, again):
        assert (found.dtype, found.shape, found.device) == (plain.dtype, plain.shape, META)
    assert again is not kept  # the step may write to it


@pytest.mark.parametrize("name", COPIES)
def test_another_value_is_no_constant(name):
    constants = HostConstants(META)
    run(COPIES[name], 0.5, constants.recording())
    with pytest.raises(CaptureError, match="has another value each time; pass it to the step"):
        run(COPIES[name], 0.6, constants.standing_in())


def copied(*values):
    return [torch.tensor(value, device="meta") for value in values]


@pytest.mark.parametrize("num_known", [0, 1])
def test_more_copies_than_before_are_no_constants(num_known):
    constants = HostConstants(META)
    with constants.recording():
        copied(*[0.5] * num_known)
    with pytest.raises(CaptureError), constants.standing_in():
        copied(*[0.5] * (num_known + 1))


def test_what_is_there_or_stays_on_the_host_is_left_alone():
    constants = HostConstants(META)
    x = torch.zeros(3, device="meta")
    copies = constants_module._Copies(META, lambda value, _: value.to("meta"))
    with constants.recording():
        assert x.to("meta") is x
        assert torch.as_tensor(x, device="meta").device == META
        assert torch.tensor([1.0, 2.0]).to(torch.float64).tolist() == [1.0, 2.0]
        assert torch.tensor(2).item() == 2
        x.copy_(x)
        x[0] = 1.0
        assert x[0, None][..., :].shape == (1,)
        assert x[torch.tensor(1)].shape == ()
        on_host = torch.arange(4)
        assert on_host[[0, 1]].device == on_host[torch.tensor([True, False, True, False])].device
        assert copies._index(torch.tensor([True, False])).device.type == "cpu"
        assert copies._index([True, False]) == [True, False]
        assert copies._index([]) == []
        assert (x + x).device == META
        leaf = torch.ones(3, requires_grad=True)
        assert leaf.to("meta").requires_grad
    assert constants._values == []


def test_values_are_compared_by_their_bits():
    constants = HostConstants(META)

    with constants.recording():
        copied(torch.nan, 0.0, 1)
    with constants.standing_in():
        copied(torch.nan, 0.0, 1)
    for wrong in [(torch.nan, -0.0, 1), (torch.nan, 0.0, 1.0)]:
        with pytest.raises(CaptureError), constants.standing_in():
            copied(*wrong)


def test_a_value_that_the_step_changes_afterwards_is_kept_as_it_was():
    constants = HostConstants(META)
    value = torch.ones(2)
    with constants.recording():
        value.to("meta")
        value += 1
    assert isinstance(constants._values[0][0], Tensor)
    assert constants._values[0][0].tolist() == [1.0, 1.0]


def test_several_steps_copy_what_one_copies_each():
    constants = HostConstants(META)
    with constants.recording():
        copied(1.0, 2.0)
    with constants.of_steps(3).standing_in():
        copied(1.0, 2.0, 1.0, 2.0, 1.0, 2.0)
        with pytest.raises(CaptureError, match="another value each time"):
            copied(1.0)
    with constants.standing_in():  # those of one step are left as they are
        copied(1.0, 2.0)


def test_inputs_of_the_step_are_no_constants():
    constants, x = HostConstants(META), torch.ones(2)
    with constants.recording([x]):
        assert x.to("meta").device == META
        x.to("meta", torch.float64)
        (x + 1).to("meta")
    assert [value.on_host.tolist() for value in constants._values] == [[2.0, 2.0]]


OLD, SMALL = torch.ones(1000), torch.ones(4)
ARRAY = np.ones(1000)


def written(mask, write):
    write(mask)
    return mask


def shares(mask):
    mask.numpy()[:] = ARRAY


def shares_by_dlpack(mask):
    np.from_dlpack(mask)[:] = ARRAY


def written_unseen(mask):
    with torch._C.DisableTorchFunction():
        mask.copy_(OLD)


ITS_OWN = {
    "zeros": lambda: torch.zeros(1000),
    "a mask": lambda: torch.tril(torch.ones(40, 40)) * 2 + 1,
    "a mask, written to": lambda: written(torch.zeros(1000), lambda mask: mask[2:4].fill_(1.0)),
    "of a nested list": lambda: torch.tensor([[1.0] * 100] * 10),
    "out of others": lambda: torch.cat([torch.tensor([1.0] * 250), torch.arange(250)]),
    "counted in its own": lambda: torch.zeros(len(torch.ones(3).nonzero())),
    "by name": lambda: torch.tensor(data=[1.0, 2.0]),
    "beside others": lambda: torch.zeros(OLD.shape[0], dtype=OLD.dtype),
    "with a number of its own": lambda: torch.full((2,), torch.tensor(3.0).item()),
}
OF_OTHERS = {
    "a tensor": lambda: SMALL,
    "part of one": lambda: OLD[:8],
    "made of one": lambda: SMALL * 2,
    "its mean": lambda: OLD.mean(),
    "out of parts": lambda: torch.cat(OLD.split(250)),
    "mixed with one": lambda: torch.zeros(4) + SMALL,
    "written over": lambda: torch.zeros(4).copy_(SMALL),
    "written over by a view": lambda: written(
        torch.zeros(4), lambda m: m.view(2, 2).copy_(SMALL.view(2, 2))
    ),
    "written over unseen": lambda: written(torch.zeros(1000), written_unseen),
    "a number read out of one": lambda: torch.tensor(float(SMALL[0])),
    "chosen by one": lambda: torch.tensor(2.0 if SMALL[0] > 0 else 1.0),
    "a list of one": lambda: torch.tensor(SMALL.tolist()),
    "set to its memory": lambda: torch.empty(0).set_(SMALL.untyped_storage(), 0, (4,), (1,)),
    "a number of NumPy's": lambda: torch.tensor(ARRAY.mean()),
    "a small array": lambda: torch.tensor(np.ones(4)),
    "values of NumPy's": lambda: torch.tensor(np.asarray(SMALL, dtype=np.float64).tolist()),
    "counted in one": lambda: torch.zeros(len(SMALL.nonzero())),
    "counted by a mask": lambda: torch.zeros(len(SMALL[SMALL > 0])),
    "written to aside": lambda: written(torch.zeros(4), lambda mask: mask.data.copy_(SMALL)),
    "another memory": lambda: written(torch.zeros(4), lambda mask: setattr(mask, "data", SMALL)),
    "a large array": lambda: torch.tensor(ARRAY),
    "a view of an array": lambda: torch.tensor(ARRAY[:4]),
    "an array's memory": lambda: torch.from_numpy(ARRAY),
    "memory shared with an array": lambda: written(torch.zeros(1000), shares),
    "memory shared by dlpack": lambda: written(torch.zeros(1000), shares_by_dlpack),
    "a long list": lambda: torch.tensor([1.0] * 257),
    "a deque": lambda: torch.tensor(deque([1.0] * 4)),
    "a buffer": lambda: torch.tensor(array("f", [1.0] * 4)),
}


@pytest.mark.parametrize("name", ITS_OWN)
def test_what_a_step_makes_of_plain_numbers_is_taken(name):
    constants, make = HostConstants(META), ITS_OWN[name]
    with constants.recording():
        make().to("meta")
    with constants.standing_in():
        assert make().to("meta").device == META


@pytest.mark.parametrize("name", OF_OTHERS)
def test_of_anything_else_a_change_might_not_be_noticed(name):
    make = OF_OTHERS[name]
    for vouched_for in (False, True):
        constants = HostConstants(META, vouched_for=vouched_for)
        with constants.recording():
            make().to("meta")
        refused = pytest.raises(CaptureError, match="a change might not be noticed")
        with nullcontext() if vouched_for else refused, constants.standing_in():
            make().to("meta")


def test_a_number_that_is_read_out_of_a_tensor_may_be_in_any():
    """Also in one that is copied before it is read, by way of what the step keeps."""
    constants = HostConstants(META)
    with constants.recording():
        torch.tensor(1.0).to("meta")
        assert SMALL[0] > 0
    with pytest.raises(CaptureError, match="might not be noticed"), constants.standing_in():
        torch.tensor(1.0).to("meta")


def test_a_move_keeps_the_order_in_memory():
    constants, image = HostConstants(META), torch.zeros(1, 3, 4, 4)
    for context in (constants.recording, constants.standing_in):
        with context():
            moved = image.clone().to("meta", memory_format=torch.channels_last)
            kept = torch.zeros(1, 3, 4, 4).to("meta")
        assert moved.is_contiguous(memory_format=torch.channels_last)
        assert kept.is_contiguous()
        constants._values = [value._replace(is_noticed=True) for value in constants._values]


def test_another_device_of_the_kind_is_left_alone():
    copies = constants_module._Copies(torch.device("cuda", 0), lambda value, _: value)
    places = {"cuda": True, "cuda:0": True, "cuda:1": False, "cpu": False, 0: True, 1: False}
    if not torch.cuda.is_available():  # or torch takes a number for another kind
        places = {place: ours for place, ours in places.items() if isinstance(place, str)}
    assert {place: copies._is_ours(place) for place in places} == places
    assert not copies._is_ours(None)
