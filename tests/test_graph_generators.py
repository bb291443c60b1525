"""Generators that the modules of a step hold in attributes: their numbers go on in replays."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn, optim

from both_ways import trained
from models import DropoutNet, mean_loss
from tape import counts, reasons
from torchfast._core.compare import differences

pytestmark = pytest.mark.usefixtures("tape")

SGD = partial(optim.SGD, lr=0.05)
STEPS, CHANGED_AT = 16, 8


class Masked(nn.Module):
    """Leaves out some of what it is given, by a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return x * (torch.rand(x.shape, generator=self.generator) > 0.3)


class MaskedByOneOfMany(nn.Module):
    """Holds it in a list."""

    def __init__(self):
        super().__init__()
        self.many = [torch.Generator().manual_seed(3)]

    @property
    def generator(self):
        return self.many[0]

    def forward(self, x):
        return x * (torch.rand(x.shape, generator=self.many[0]) > 0.3)


class MaskedNet(DropoutNet):
    mask_kind = Masked

    def __init__(self):
        super().__init__()
        self.mask = self.mask_kind()

    def forward(self, x):
        return super().forward(self.mask(x))


class OtherNet(MaskedNet):
    mask_kind = MaskedByOneOfMany


def both_ways(change=lambda mask: None, net=MaskedNet):
    ends = []
    for is_captured in (False, True):
        masks = []

        def before(number, masks=masks):
            if number == CHANGED_AT:
                change(masks[0])

        step, left = trained(
            mean_loss,
            STEPS,
            SGD,
            net=net,
            cuda_graph=is_captured,
            started=lambda step, masks=masks: masks.append(step.model.mask),
            before=before,
        )
        ends.append([*left, masks[0].generator.get_state()])
    return step, differences(*ends)


@pytest.mark.parametrize("net", [MaskedNet, OtherNet])
def test_masks_of_a_generator_that_a_module_holds_go_on_in_replays(net):
    step, found = both_ways(net=net)
    assert found == []
    assert counts(step) == (1, STEPS - 3, 3, 1), reasons(step)


CHANGES = {
    "seeded anew": lambda mask: mask.generator.manual_seed(7),
    "set back": lambda mask: mask.generator.set_state(torch.Generator().manual_seed(3).get_state()),
    "replaced": lambda mask: setattr(mask, "generator", torch.Generator().manual_seed(7)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_generator_that_is_changed_between_two_steps(name):
    step, found = both_ways(CHANGES[name])
    assert found == []
    assert counts(step)[0] == 1, reasons(step)


def test_the_masks_do_depend_on_the_generator():
    """The negative control: what the tests above compare is not the same for any generator."""
    ends = [
        trained(
            mean_loss,
            STEPS,
            SGD,
            net=MaskedNet,
            cuda_graph=False,
            started=lambda step, seed=seed: step.model.mask.generator.manual_seed(seed),
        )[1]
        for seed in (3, 4)
    ]
    assert differences(*ends) != []
