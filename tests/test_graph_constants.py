"""Constants that a step copies from the host, for a device that is meta here."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from torchfast import CaptureError
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
    with constants.recording():
        assert x.to("meta") is x
        assert torch.as_tensor(x, device="meta").device == META
        assert torch.tensor([1.0, 2.0]).to(torch.float64).tolist() == [1.0, 2.0]
        assert torch.tensor(2).item() == 2
        x.copy_(x)
        x[0] = 1.0
        assert x[0, None][..., :].shape == (1,)
        assert x[torch.tensor(1)].shape == ()
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
    several = constants.of_steps(2)
    with constants.recording():
        copied(3.0)
    with several.standing_in():  # of what a step copies now
        copied(3.0, 3.0)


def test_inputs_of_the_step_are_no_constants():
    constants, x = HostConstants(META), torch.ones(2)
    with constants.recording([x]):
        assert x.to("meta").device == META
        x.to("meta", torch.float64)
        (x + 1).to("meta")
    assert [value.on_host.tolist() for value in constants._values] == [[2.0, 2.0]]


OLD = torch.ones(1000)
ARRAY = np.ones(1000)


def changed_by_a_view():
    mask = torch.zeros(1000)
    mask.view(10, 100).copy_(OLD.view(10, 100))
    return mask


def shared_with_an_array():
    mask = torch.zeros(1000)
    mask.numpy()[:] = ARRAY
    return mask


OF_ITS_OWN = {
    "zeros": lambda: torch.zeros(1000),
    "a mask": lambda: torch.tril(torch.ones(40, 40)) * 2 + 1,
    "of a list": lambda: torch.tensor([[1.0] * 100] * 10),
    "out of small ones": lambda: torch.cat([torch.tensor([1.0] * 250)] * 4),
    "small": lambda: OLD[:256],
}
OF_OTHERS = {
    "a tensor": lambda: OLD,
    "part of it": lambda: OLD[:257],
    "made of it": lambda: OLD * 2,
    "mixed with it": lambda: torch.zeros(1000) + OLD,
    "written over": lambda: torch.zeros(1000).copy_(OLD),
    "written over by a view": changed_by_a_view,
    "an array": lambda: torch.tensor(ARRAY),
    "an array's memory": lambda: torch.from_numpy(ARRAY),
    "memory shared with an array": shared_with_an_array,
    "a long list": lambda: torch.tensor([1.0] * 257),
}


@pytest.mark.parametrize("name", OF_ITS_OWN)
def test_what_a_step_makes_itself_or_is_small_is_taken(name):
    constants, make = HostConstants(META), OF_ITS_OWN[name]
    with constants.recording():
        make().to("meta")
    with constants.standing_in():
        assert make().to("meta").device == META


@pytest.mark.parametrize("name", OF_OTHERS)
def test_of_what_is_large_a_change_would_not_be_noticed(name):
    make = OF_OTHERS[name]
    for vouched_for in (False, True):
        constants = HostConstants(META, vouched_for=vouched_for)
        with constants.recording():
            make().to("meta")
        refused = pytest.raises(CaptureError, match=r"copies (1,000|257) numbers .* too many")
        with nullcontext() if vouched_for else refused, constants.standing_in():
            make().to("meta")
