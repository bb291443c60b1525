"""What is left of an offloaded optimizer, or of its update, that failed: nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from offloading import host_apart
from torchfast.memory import OffloadedOptimizer

SGD = partial(torch.optim.SGD, lr=0.5)


@pytest.fixture
def device(monkeypatch):
    with host_apart(monkeypatch) as device:
        yield device


def placed(device, *sizes):
    return [nn.Parameter(device.place(torch.ones(size))) for size in sizes]


def hooks(parameter):
    return len(parameter._post_accumulate_grad_hooks or ())


def test_a_module_is_no_parameters():
    with pytest.raises(TypeError, match=r"got the module Linear; write model\.parameters\(\)"):
        OffloadedOptimizer(nn.Linear(2, 2), torch.optim.SGD)


def test_a_group_that_is_refused_leaves_no_hook_and_no_memory(device):
    def refuse(group):
        raise ValueError("not this one")

    with device:
        first, second = placed(device, 4, 3)
        optimizer = OffloadedOptimizer([first], SGD, overlap=True)
        optimizer._inner.add_param_group = refuse
        with pytest.raises(ValueError, match="not this one"):
            optimizer.add_param_group({"params": [second]})
    assert (hooks(first), hooks(second)) == (1, 0)
    assert [*optimizer._update.gradients] == [first]


@pytest.mark.parametrize("stage", ["made", "checked", "added"])
def test_an_optimizer_that_is_refused_leaves_no_hook(device, stage):
    def make(parameters):
        if stage == "made":
            raise ValueError("no such optimizer")
        return "no optimizer"

    with device:
        (parameter,) = placed(device, 4)
        given = [{"params": [parameter]}, {"params": ["no tensor"]}] if stage == "added" else None
        with pytest.raises((TypeError, ValueError)):
            OffloadedOptimizer(given or [parameter], make, overlap=True)
    assert hooks(parameter) == 0


def test_a_parameter_that_is_left_out_is_not_copied(device):
    with device:
        first, second = placed(device, 4, 3)
        optimizer = OffloadedOptimizer([first, second], lambda p: SGD(p[:1]), overlap=True)
    assert (hooks(first), hooks(second)) == (1, 0)
    assert [*optimizer._update.gradients] == [first]


def test_what_an_update_that_failed_has_made_is_not_gone_on_from(device):
    """The copies were written already; the parameters on the device were not."""

    def fail(*_):
        raise KeyboardInterrupt

    with device:
        (parameter,) = placed(device, 4)
        optimizer = OffloadedOptimizer([parameter], SGD)
        for number in range(3):
            parameter.grad = parameter.detach() * 0.0 + 1.0
            if number == 1:
                hook = optimizer._inner.register_step_post_hook(fail)
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
                hook.remove()
            else:
                optimizer.step()
    with _disable_current_modes():
        assert torch.equal(device.read(parameter.detach()), torch.zeros(4))  # of two updates
