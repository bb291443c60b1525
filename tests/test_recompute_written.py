"""What a forward writes to is written once, and the second run of a block finds what the first did.

Beside what stands in ``test_recompute_surroundings.py``: state that is read where it is written,
that has another shape behind the first call, or that is not there before it.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from convolutional import Leaves, Net
from recomputed import Operations, copied_buffers, image_loss, images, train
from torchfast import Recompute
from torchfast._core.compare import differences
from torchfast.memory import written_buffers

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


# --- parts that are put there later --------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.parts = nn.Linear(8, 8), nn.ModuleDict({"norm": nn.BatchNorm1d(8)})

    def forward(self, x):
        return torch.relu(self.parts["norm"](self.line(x)))


class Averages(nn.Module):
    """Counts where somebody has told it to, which norms do not."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x):
        x = self.line(x)
        if hasattr(self, "mean"):
            self.mean.data.lerp_(x.detach().mean(0), 0.1)
            x = x - self.mean
        return torch.tanh(x)


def with_other_norms(model):
    for block in model:
        block.parts["norm"] = nn.BatchNorm1d(8, momentum=0.3)


def with_averages(model):
    for block in model:
        block.register_buffer("mean", torch.zeros(8))


@BOTH
@pytest.mark.parametrize(
    ("make", "change"), [(Normed, with_other_norms), (Averages, with_averages)]
)
def test_parts_that_a_block_gets_later_are_looked_at_too(make, change, what):
    """As norms that are made to agree over ranks, or averages that a program begins to keep."""
    model, batch = three(make), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    train(plain, square, batch)
    change(plain)
    expected = train(plain, square, batch)
    with Recompute(model, what):
        train(model, square, batch)
        change(model)
        assert differences(expected, train(model, square, batch)) == []


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


# --- state that is no buffer at the first call, or no buffer at all ------------------------------


class Averages(nn.Module):
    """Subtracts an average of what it has seen, which each forward moves."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def mean_of(self, x):
        raise NotImplementedError

    def forward(self, x):
        mean = self.mean_of(x.detach().flatten(0, -2).mean(0) + 1)
        return x + torch.tanh(self.line(x - mean)) * self.frozen


class Filled(Averages):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)

    def mean_of(self, seen):
        self.mean = seen if self.mean is None else torch.lerp(self.mean, seen, 0.1)
        return 2 * self.mean if self.mean is seen else self.mean.clone()


class Registered(Averages):
    def mean_of(self, seen):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", seen)
            return 2 * seen
        self.mean.lerp_(seen, 0.1)
        return self.mean.clone()


class FrozenParameter(Averages):
    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(8), requires_grad=False)

    def mean_of(self, seen):
        self.mean.lerp_(seen, 0.1)
        return self.mean.clone()


class FrozenByItsData(FrozenParameter):
    def mean_of(self, seen):
        self.mean.data.lerp_(seen, 0.1)
        return self.mean.clone()


class FrozenWeight(Averages):
    """Of a layer that is noted as it comes out, and left out of the second run."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Linear(8, 8, bias=False).requires_grad_(False)

    def mean_of(self, seen):
        self.mean.weight.mul_(0.9)
        return self.mean(seen)


def features():
    return torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()


@BOTH
@pytest.mark.parametrize(
    "make", [Filled, Registered, FrozenParameter, FrozenByItsData, FrozenWeight]
)
def test_state_that_is_no_buffer_at_the_first_call(make, what):
    assert_same_bits(three(make), what, features())


@pytest.mark.parametrize("make", [Filled, Registered, FrozenParameter])
def test_such_state_in_a_first_call_that_is_captured(make, monkeypatch):
    model = three(make)
    plain = copy.deepcopy(model)
    with Recompute(model):
        for is_captured in (True, False, False):
            monkeypatch.setattr(written_buffers, "is_capturing", partial(bool, is_captured))
            for one in (plain, model):
                square(one, features()).backward()
    assert differences(plain.state_dict(), model.state_dict()) == []
    found = [[p.grad for p in one.parameters() if p.requires_grad] for one in (plain, model)]
    assert all(map(torch.equal, *found))


def test_parameters_stay_the_same_objects():
    model = three(FrozenParameter)
    parameters = list(model.parameters())
    with Recompute(model):
        for _ in range(2):
            square(model, features()).backward()
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))


def test_frozen_parameters_that_nobody_writes_to_are_copied_in_the_first_call_alone(monkeypatch):
    model = three(FrozenParameter)
    copied = copied_buffers(monkeypatch)
    expected = {block.frozen.data_ptr() for block in model}
    with Recompute(model):
        square(model, features()).backward()
        assert expected <= {tensor.data_ptr() for tensor in copied}
        copied.clear()
        square(model, features()).backward()
    assert copied
    assert not expected & {tensor.data_ptr() for tensor in copied}


def test_the_statistics_of_a_block_are_copied_together():
    """Nine buffers in two dtypes: two launches at the start of a forward, two of a second run."""
    model = Net(Leaves)
    with Recompute(model):
        for _ in range(2):
            model.zero_grad()
            loss = image_loss(model, images())
            with Operations() as second:
                loss.backward()
        with Operations() as first:
            image_loss(model, images())
    num_blocks = len(model.blocks)
    assert first.counts["_foreach_copy_"] == second.counts["_foreach_copy_"] == 2 * num_blocks
    assert first.counts["clone"] == second.counts["clone"] == 0


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(3.0).expand(2, 3),
        torch.arange(6).view(2, 3)[:, ::2],
        torch.tensor(3),
        torch.zeros(0),
        torch.arange(4.0).to(torch.bfloat16),
        torch.view_as_complex(torch.arange(4.0).view(2, 2)),
        torch.view_as_complex(torch.arange(4.0).view(2, 2)).conj().imag,
        torch.tensor([True, False]),
        torch.arange(4.0).to(torch.float8_e4m3fn),
        nn.Parameter(torch.arange(3.0)),
    ],
    ids=lambda value: f"{value.dtype}-{tuple(value.shape)}".removeprefix("torch."),
)
def test_a_copy_is_what_a_clone_is(value):
    others = [torch.ones(2), torch.ones(2, dtype=torch.int64), None]
    copies = written_buffers._copies([value.detach(), *others])
    expected = value.detach().clone()
    assert [copies[1].dtype, copies[2].dtype, copies[3]] == [torch.float32, torch.int64, None]
    (copy, *_) = copies
    assert differences(expected, copy) == []
    assert (copy.stride(), copy.dtype) == (expected.stride(), expected.dtype)
    assert (
        copy.untyped_storage().data_ptr() != value.untyped_storage().data_ptr() or not value.numel()
    )


class Scripted(nn.Module):
    """Has a part in TorchScript, with a norm and a frozen layer."""

    def __init__(self):
        super().__init__()
        frozen = nn.Linear(8, 8).requires_grad_(False)
        self.line = nn.Linear(8, 8)
        self.part = torch.jit.script(nn.Sequential(nn.BatchNorm1d(6), frozen))

    def forward(self, x):
        return torch.tanh(self.part(self.line(x)))


@BOTH
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_part_of_a_block_in_torch_script(what):
    plain, model = three(Scripted), three(Scripted)  # a copy would not be of the same parameters
    with Recompute(model, what):
        for _ in range(3):
            for one in (plain, model):
                square(one, features()).backward()
    assert differences(plain.state_dict(), model.state_dict()) == []
    found = [[p.grad for p in one.parameters() if p.requires_grad] for one in (plain, model)]
    assert all(map(torch.equal, *found))
