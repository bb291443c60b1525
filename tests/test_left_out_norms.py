"""What blocks do around batch norms that a second run leaves out, beside calling them."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from convolutional import Counted, Functional, Leaves, Net
from recomputed import as_if_compiled, image_loss, images, noted_layers, train, with_and_without
from torchfast import Recompute, RecomputeOptions
from torchfast._core.compare import differences

SHARES = pytest.mark.parametrize("share", [0.5, 1.0])


@pytest.fixture
def nothing_is_compiled(monkeypatch):
    """Calls are looked at only as long as nothing has been compiled in the process."""
    as_if_compiled(monkeypatch)


def selective(share):
    return RecomputeOptions(selective=True, share=share)


# --- the statistics -------------------------------------------------------------------------------


class ReadsMean(Leaves):
    def activated(self, x, number):
        y = self.relu(x)
        return y * torch.sigmoid(self.norm1.running_mean)[:, None, None] if number == 1 else y


class ReadsCount(Leaves):
    def activated(self, x, number):
        y = self.relu(x)
        return y * (1.0 / self.norm1.num_batches_tracked) if number == 1 else y


class NormalizesAgain(Leaves):
    def forward(self, x):
        y, norm = self.relu(self.norm1(self.conv1(x))), self.norm1
        z = F.batch_norm(self.conv1(x * 0.5), norm.running_mean, norm.running_var, training=False)
        y = self.relu(self.norm2(self.conv2(y)))
        return self.ends(self.norm3(self.conv3(y + z)), x)


class SwitchesMode(Leaves):
    def forward(self, x):
        y = self.relu(self.norm1(self.conv1(x)))
        self.norm1.eval()
        z = self.norm1(self.conv1(x * 0.5))
        self.norm1.train()
        y = self.relu(self.norm2(self.conv2(y)))
        return self.ends(self.norm3(self.conv3(y + z)), x)


class OneNorm(Leaves):
    """Calls one norm twice, which averages over all batches."""

    def __init__(self):
        super().__init__(norm=partial(nn.BatchNorm2d, momentum=None))
        self.norm2 = self.norm1

    def activated(self, x, number):
        return self.relu(x) * (1.0 + self.norm1.running_var.mean())


@SHARES
@pytest.mark.parametrize(
    "block",
    [ReadsMean, ReadsCount, NormalizesAgain, SwitchesMode, OneNorm],
    ids=lambda b: b.__name__,
)
def test_statistics_are_those_behind_the_norm(nothing_is_compiled, block, share):
    make = partial(Net, block)
    results = with_and_without(make, selective(share), image_loss, images, steps=5)
    assert differences(*results) == []


@SHARES
def test_hooks_see_the_statistics_behind_the_norm(nothing_is_compiled, share):
    """As where synthetic images are drawn to the statistics of a network."""

    class Hooked(Net):
        def __init__(self):
            super().__init__(Functional)
            self.terms = []
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.register_forward_hook(self.compare)

        def compare(self, module, args, out):
            term = (args[0].mean((0, 2, 3)) - module.running_mean).square().sum()
            if torch._C._current_graph_task_id() == -1:
                self.terms.append(term)

    def loss_fn(model, batch):
        model.terms.clear()
        return image_loss(model, batch) + 0.1 * sum(model.terms)

    results = with_and_without(Hooked, selective(share), loss_fn, images, steps=5)
    assert differences(*results) == []


# --- what is taken out of a second run ------------------------------------------------------------


class Stores(Functional):
    def forward(self, x):
        self.seen = self.norm1(self.conv1(x))
        y = F.relu(self.seen)
        y = F.relu(self.norm2(self.conv2(y)))
        return self.ends(self.norm3(self.conv3(y)), x)


@SHARES
@pytest.mark.parametrize("when", ["behind the backward", "behind the update"])
@pytest.mark.parametrize("who", ["a hook", "the block"])
def test_what_somebody_keeps_of_a_second_run_is_right_later(nothing_is_compiled, who, when, share):
    def trained(what):
        torch.manual_seed(0)
        model, store, found = Net(Stores), {}, []
        for name, module in model.named_modules():
            if isinstance(module, nn.BatchNorm2d):
                module.register_forward_hook(
                    lambda module, args, out, name=name: store.__setitem__(name, out)
                )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recompute = None if what is None else Recompute(model, what)
        for seed in range(4):
            optimizer.zero_grad()
            image_loss(model, images(seed=seed)).backward()
            if when == "behind the update":
                optimizer.step()
            taken = store.values() if who == "a hook" else [b.seen for b in model.blocks]
            found += [float(tensor.detach().abs().mean()) for tensor in taken]
            if when == "behind the backward":
                optimizer.step()
        if recompute is not None:
            recompute.close()
        return {"found": torch.tensor(found), "state": copy.deepcopy(model.state_dict())}

    assert differences(trained(None), trained(selective(share))) == []


@SHARES
def test_what_is_computed_late_leaves_the_statistics_of_later_forwards_alone(
    nothing_is_compiled, share
):
    def loss_fn(model, batch):
        kept = model.kept = []
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d) and not module._forward_hooks:
                module.register_forward_hook(lambda module, args, out: kept.append(out))
        # Two forwards in front of one backward.
        return image_loss(model, batch) + image_loss(model, images(seed=7))

    make = partial(Net, Functional)
    results = with_and_without(make, selective(share), loss_fn, images, steps=4)
    assert differences(*results) == []


# --- others that read, in later calls -------------------------------------------------------------


class ViewBefore(Counted, Leaves):
    """A view of a norm's result that was made before a ReLU in place."""

    def activated(self, x, number):
        if number == 1 and self.num_calls > 2:
            view = x[:, :4]
            self.relu(x)
            return torch.cat((view, x[:, 4:]), 1)
        return self.relu(x)


class OtherReLU(Counted, Functional):
    """Another ReLU of the same shape, which saves nothing, comes first."""

    def activated(self, x, number):
        if number == 1 and self.num_calls > 2:
            mask = F.relu(torch.linspace(-1, 1, x.numel()).view(x.shape))
            return F.relu(x) + mask
        return F.relu(x)


class Watched(Functional):
    """How much of it is zero is noted in each third run, counted in the module."""

    def __init__(self):
        super().__init__()
        self.num_runs = 0

    def activated(self, x, number):
        if number == 1:
            self.num_runs += 1
            if self.num_runs % 3 == 0:
                with torch.no_grad():
                    self.part = (F.relu(x) == 0).float().mean()
        return F.relu(x)


class EndsInNorm(Leaves):
    def ends(self, y, x):
        return y


def test_a_norm_that_nobody_is_seen_to_read_is_not_left_out(nothing_is_compiled):
    model = Net(EndsInNorm)
    with Recompute(model, selective(0.6)) as recompute:
        image_loss(model, images())
        assert "2 of 2 norms" in recompute.decisions()[0].detail


@SHARES
@pytest.mark.parametrize("block", [ViewBefore, OtherReLU, Watched], ids=lambda b: b.__name__)
def test_bits(nothing_is_compiled, block, share):
    make = partial(Net, block)
    results = with_and_without(make, selective(share), image_loss, images, steps=6)
    assert differences(*results) == []


class CompiledSum(Functional):
    """A compiled function, of which no module knows, reads what a norm returns."""

    summed = staticmethod(torch.compile(lambda y, x: torch.relu(y + x), backend="aot_eager"))

    def ends(self, y, x):
        return self.summed(y, x)


class CompiledReLU(Functional):
    doubled = staticmethod(torch.compile(lambda y: torch.relu(y) * 2.0, backend="aot_eager"))

    def activated(self, x, number):
        return self.doubled(x) if number == 1 else F.relu(x)


class CompiledBeside(CompiledReLU):
    """A ReLU reads it, too."""

    def activated(self, x, number):
        return F.relu(x) + self.doubled(x)


@pytest.mark.parametrize(
    "block", [CompiledSum, CompiledReLU, CompiledBeside], ids=lambda b: b.__name__
)
def test_compiled_functions_in_a_block(monkeypatch, block):
    def trained(what):
        torch.manual_seed(0)
        model = Net(block)
        with nullcontext() if what is None else Recompute(model, what):
            return train(model, image_loss, images(), steps=4)

    expected = trained(None)
    torch.compiler.reset()
    # As in a process in which nothing has been compiled before: other tests have.
    frames = torch._dynamo.convert_frame
    before = frames.FRAME_COUNTER
    as_if_compiled(monkeypatch, lambda: before < frames.FRAME_COUNTER)
    # What stands for a norm's result is not what the function is compiled for.
    _, computed = noted_layers(monkeypatch)
    assert differences(expected, trained("selective")) == []
    assert computed == []
    assert before < frames.FRAME_COUNTER
