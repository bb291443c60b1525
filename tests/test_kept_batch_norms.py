"""Batch norms that a ReLU alone reads, or nobody in time, are left out of the second run."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from convolutional import Counted, Functional, Leaves, Net, Shortcut
from recomputed import (
    Live,
    as_if_compiled,
    image_loss,
    images,
    make,
    noted_layers,
    with_and_without,
)
from torchfast import Recompute, RecomputeOptions
from torchfast._core.compare import differences
from torchfast.memory.kept_calls import KeptPlaces


class NotInPlace(Leaves):
    def __init__(self):
        super().__init__(inplace=False)


class FunctionalInPlace(Leaves):
    def activated(self, x, number):
        return F.relu(x, inplace=True) if number == 1 else x.relu_()


class OtherName(Leaves):
    """What a ReLU in place returns is let go of: its input is the same."""

    def activated(self, x, number):
        if number == 1:
            self.relu(x)
        else:
            F.relu(x, inplace=True)
        return x


class WithoutWeights(Leaves):
    def __init__(self):
        super().__init__(norm=partial(nn.BatchNorm2d, affine=False))


class WithoutStatistics(Leaves):
    def __init__(self):
        super().__init__(norm=partial(nn.BatchNorm2d, track_running_stats=False))


class Averaged(Leaves):
    def __init__(self):
        super().__init__(norm=partial(nn.BatchNorm2d, momentum=None))


class Frozen(Leaves):
    """Norms whose statistics and weights stay as they are."""

    def __init__(self):
        super().__init__()
        for norm in (self.norm1, self.norm3):
            norm.requires_grad_(False)
            norm.eval()
            norm.train = lambda mode=True, norm=norm: norm


class Ending(Leaves):
    """Ends in a norm and a ReLU, without a sum."""

    def ends(self, y, x):
        return self.relu(y)


class ReadTwice(Leaves):
    """Two read the first norm, and two ReLUs the second."""

    def activated(self, x, number):
        return F.relu(x) + (x * 0.5 if number == 1 else F.relu(-x))

    def ends(self, y, x):
        return y + x


class Direct(Leaves):
    """A convolution reads the second norm, and saves it last of all."""

    def activated(self, x, number):
        return self.relu(x) if number == 1 else x

    def forward(self, x):
        y = self.activated(self.norm1(self.conv1(x)), 1)
        return self.conv3(self.activated(self.norm2(self.conv2(y)), 2)) + x


class Written(Leaves):
    """The block writes to what a norm and a ReLU have returned."""

    def activated(self, x, number):
        if number == 1:
            x *= 0.5
            return torch.relu(x)
        x = torch.relu(x) + 0.0
        x += 1.0
        return x


class Changing(Counted, Leaves):
    """ReLUs alone read the norms in the first two calls; in later ones others do as well."""

    def activated(self, x, number):
        match self.num_calls % 5:
            case 3:
                return torch.tanh(x)
            case 4:
                x.add_(1.0)
                return self.relu(x)
            case 0:
                return F.relu(x, inplace=True) + x.sum() * 1e-3
        return self.relu(x) if self.num_calls % 2 else self.relu(x.flip(0))

    def ends(self, y, x):
        if self.num_calls % 3 == 0:
            y.mul_(0.5)
            return torch.tanh(self.relu(y) * y) + x
        return super().ends(y, x)


BLOCKS = [
    Leaves, NotInPlace, Functional, FunctionalInPlace, OtherName, Shortcut, WithoutWeights,
    WithoutStatistics, Averaged, Frozen, Ending, ReadTwice, Direct, Written, Changing,
]  # fmt: skip


def autocast_loss(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return image_loss(model, batch)


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """Calls are looked at only as long as nothing has been compiled in the process."""
    as_if_compiled(monkeypatch)


@pytest.mark.parametrize("loss_fn", [image_loss, autocast_loss])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("share", [0.35, 0.5, 1.0])
def test_bits(block, loss_fn, share):
    options = RecomputeOptions(selective=True, share=share)
    results = with_and_without(partial(Net, block), options, loss_fn, images, steps=7)
    assert differences(*results) == []


@pytest.mark.parametrize("block", [Leaves, Functional, Shortcut])
def test_bits_once_something_is_compiled(block, monkeypatch):
    as_if_compiled(monkeypatch, lambda: True)
    results = with_and_without(partial(Net, block), "selective", image_loss, images, steps=4)
    assert differences(*results) == []


@pytest.fixture
def norms_in_backward(monkeypatch):
    """Note the batch norms that run in a backward, as far as something waits for them."""
    ran, forward = [], nn.BatchNorm2d.forward

    def noted(self, x):
        out = forward(self, x)  # where a second run may end, before anything is computed
        ran.append(self)
        return out

    monkeypatch.setattr(nn.BatchNorm2d, "forward", noted)

    def run(model, loss_fn, batch, steps=2):
        names = {module: name for name, module in model.named_modules()}
        for _ in range(steps):
            loss_fn(model, batch).backward()
        loss = loss_fn(model, batch)
        ran.clear()
        loss.backward()
        return [names[module] for module in ran]

    return run


@pytest.mark.parametrize(
    ("block", "again"),
    [
        (Leaves, ["norm3"]),
        (NotInPlace, ["norm3"]),
        (Functional, ["norm3"]),
        (FunctionalInPlace, ["norm3"]),
        (OtherName, ["norm3"]),
        (Shortcut, ["norm3", "norm4"]),
        (WithoutWeights, ["norm3"]),
        (Frozen, ["norm3"]),
        (Ending, ["norm3"]),
    ],
)
def test_only_the_last_block_computes_a_norm_again(norms_in_backward, block, again):
    """Nobody keeps what it returns, so its ReLU waits for what is added."""
    torch.manual_seed(0)
    model = Net(block)
    with Recompute(model, RecomputeOptions(selective=True, share=0.6)) as recompute:
        names = norms_in_backward(model, image_loss, images())
        detail = recompute.decisions()[0].detail
    assert names == [f"blocks.2.{name}" for name in again]
    assert ("4 of 4 norms" if block is Shortcut else "3 of 3 norms") in detail


@pytest.fixture
def computed(monkeypatch):
    """Note what was left out and is computed after all."""
    return noted_layers(monkeypatch)[1]


@pytest.mark.parametrize(
    ("block", "norm", "kept"),
    [
        (ReadTwice, "norm1", "1 of 1 norms"),
        (Written, "norm1", "2 of 2 norms"),
        (Direct, "norm2", "1 of 1 norms"),
    ],
)
def test_what_others_read_is_not_left_out(norms_in_backward, computed, block, norm, kept):
    torch.manual_seed(0)
    model = Net(block)
    with Recompute(model, RecomputeOptions(selective=True, share=0.6)) as recompute:
        names = norms_in_backward(model, image_loss, images())
        assert kept in recompute.decisions()[0].detail
    assert {f"blocks.{number}.{norm}" for number in range(3)} <= set(names)
    assert computed == []


def test_nothing_that_is_left_out_is_computed_later(computed):
    torch.manual_seed(0)
    model, batch = Net(Shortcut), images()
    with Recompute(model, "selective"):
        for _ in range(3):
            image_loss(model, batch).backward()
    assert computed == []


@pytest.mark.parametrize("block", [Leaves, OtherName, FunctionalInPlace])
def test_a_norm_that_is_not_left_out_is_activated(monkeypatch, block):
    places = KeptPlaces.of

    def without_norms(*args):
        return dataclasses.replace(places(*args), norms={})

    monkeypatch.setattr(KeptPlaces, "of", without_norms)
    results = with_and_without(partial(Net, block), "selective", image_loss, images, steps=4)
    assert differences(*results) == []


@pytest.mark.parametrize("block", [Leaves, Functional])
def test_half_of_the_memory_is_kept(block):
    def kept(what):
        torch.manual_seed(0)
        model = Net(partial(block, width=64, inner=16) if block is Leaves else block)
        model.stem = nn.Conv2d(3, model.blocks[0].conv1.in_channels, 3, padding=1)
        model.head = nn.Linear(model.blocks[0].conv1.in_channels, 50)
        recompute = None if what is None else Recompute(model, what)
        for _ in range(2):
            loss = image_loss(model, images())
            loss.backward()
        with Live() as live:
            loss = image_loss(model, images())
        found = live.live_bytes([*model.parameters(), *model.buffers(), loss])
        if recompute is not None:
            recompute.close()
        return found

    # The stem's and the head's, which both keep, are among it.
    assert kept("selective") <= 0.5 * kept(None)


def test_gradients_of_gradients_and_a_backward_within_the_forward():
    class Force(Leaves):
        def forward(self, x):
            out = super().forward(x)
            (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            return out + 0.1 * torch.tanh(slope)

    def gradients(block, what):
        torch.manual_seed(0)
        model = Net(block)
        batch = images()
        batch[0].requires_grad_()
        recompute = None if what is None else Recompute(model, what)
        for _ in range(2):
            loss = image_loss(model, batch)
            (first,) = torch.autograd.grad(loss, batch[0], create_graph=True)
            second = torch.autograd.grad(first.square().sum(), [*model.parameters()])
        if recompute is not None:
            recompute.close()
        return [first, *second]

    for block in (Leaves, Force):
        found = gradients(block, None), gradients(block, "selective")
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kind", ["ResNet", "RegNet"])
def test_outside_models(norms_in_backward, kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_sizes": [16, 32], "depths": [3, 3], "num_labels": 50}
    config = getattr(transformers, f"{kind}Config")(
        embedding_size=16, **sizes, **({"groups_width": 8} if kind == "RegNet" else {})
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForImageClassification")(config)
    batch = images(size=32)
    build = partial(copy.deepcopy, model)
    assert differences(*with_and_without(build, "selective", image_loss, lambda: batch)) == []
    # So small that what norms save of each channel is not little.
    with Recompute(model, RecomputeOptions(selective=True, share=0.6)):
        selective = norms_in_backward(model, image_loss, batch)
    with Recompute(model, "blocks"):
        blocks = norms_in_backward(model, image_loss, batch)
    # Both are fewer than there are; of a pyramid of blocks each stage begins with another one.
    assert len(selective) < len(blocks) / 2


def test_the_report_counts_the_norms():
    model, loss_fn, batch = make("resnet")
    with Recompute(model, "selective") as recompute:
        loss_fn(model, batch)
        assert "keeps 0 of 3 convolutions, 3 of 3 norms" in recompute.decisions()[0].detail
