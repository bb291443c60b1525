"""What a forward writes to is written once, and the second run of a block finds what the first did.

Beside what stands in ``test_recompute_surroundings.py``: state that is read where it is written,
that has another shape behind the first call, or that is not there before it.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from recomputed import train
from torchfast import Recompute
from torchfast._core.compare import differences

BOTH = pytest.mark.parametrize("what", ["blocks", "selective"])


def square(model, batch):
    return model(batch).square().mean()


def assert_same_bits(model, what, batch):
    """Train a copy as it is, and the model with recompute, and compare all they are."""
    expected = train(copy.deepcopy(model), square, batch)
    with Recompute(model, what):
        assert differences(expected, train(model, square, batch)) == []


def three(make):
    torch.manual_seed(1)
    return nn.Sequential(*(make() for _ in range(3)))


# --- statistics of norms -------------------------------------------------------------------------


class Folded(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x):
        return self.relu(self.bn(self.conv(x)))


def trained_for(qconfig):
    """Return blocks that torch has made ready for quantization, whose convolutions read norms."""
    names = [[f"{n}.conv", f"{n}.bn", f"{n}.relu"] for n in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization is to move to torchao
        quantization = pytest.importorskip("torch.ao.quantization")
        model = quantization.fuse_modules_qat(three(Folded), names)
        model.qconfig = quantization.get_default_qat_qconfig(qconfig)
        return quantization.prepare_qat(model)


class Renorm(nn.BatchNorm2d):
    """Normalizes by its averages, and lets gradients go as batches do."""

    def forward(self, x):
        mean, std = self.running_mean[:, None, None], self.running_var[:, None, None].sqrt()
        shift = (x.detach().mean((0, 2, 3), keepdim=True) - mean) / std
        return super().forward(x) / std + shift


class Shifted(nn.Module):
    """Asks its norm for what it keeps, in front of the norm and behind it."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        before = self.norm.running_mean[:, None, None] * (1 + self.norm.num_batches_tracked)
        y = self.norm(self.conv(x) * before.add(1))
        return torch.tanh(y + self.norm.running_var[:, None, None])


def pixels():
    return torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(0))


@BOTH
@pytest.mark.parametrize("make", [Renorm, Shifted])
def test_statistics_that_a_forward_computes_with(make, what):
    def block():
        parts = [nn.Conv2d(4, 4, 3, padding=1), Renorm(4), nn.Tanh()]
        return nn.Sequential(*parts) if make is Renorm else Shifted()

    assert_same_bits(three(block), what, pixels())


@pytest.mark.parametrize("qconfig", ["qnnpack", "x86"])
def test_training_for_quantization(qconfig):
    """A convolution reads its norm; the observers of "x86" have another shape behind a call."""
    assert_same_bits(trained_for(qconfig), "blocks", pixels())


def test_a_norm_that_trains_only_later():
    """Torch does not count what its kernels write to statistics."""
    model = three(Shifted)
    plain = copy.deepcopy(model)
    with Recompute(model):
        for is_training in (False, True, True, False, True):
            for one in (plain, model):
                for block in one:
                    block.norm.train(is_training)
                one.zero_grad()
                square(one, pixels()).backward()
            assert differences(plain.state_dict(), model.state_dict()) == []
            found = [[p.grad for p in one.parameters()] for one in (plain, model)]
            assert all(map(torch.equal, *found))
