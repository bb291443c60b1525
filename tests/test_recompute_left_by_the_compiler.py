"""A block that the compiler has to leave runs again as where nobody compiles.

Torch's checkpoint, which the compiler understands, puts back neither a generator of the block's own
nor what an object held that it was called with: that is the negative control.
"""

from __future__ import annotations

import copy
import weakref
from contextlib import ExitStack, nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recomputed import train
from torchfast import Recompute
from torchfast.compiler import CompiledModule

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def branch(self, x):
        return self.second(torch.relu(self.first(x)))


class IntoADictionary(Layers):
    """The batch goes from block to block in one dictionary."""

    def forward(self, held):
        torch._dynamo.graph_break()
        held["x"] = held["x"] + self.branch(held["x"])
        return held


class OwnGenerator(Layers):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, held):
        torch._dynamo.graph_break()
        x = held["x"]
        kept = torch.rand(x.shape, generator=self.generator, dtype=x.dtype) > 0.3
        return {"x": x + self.branch(x * kept)}


class WithAGenerator(Layers):
    """It is called with one."""

    def forward(self, held):
        torch._dynamo.graph_break()
        x, generator = held["x"], held["generator"]
        kept = torch.rand(x.shape, generator=generator, dtype=x.dtype) > 0.3
        return {"x": x + self.branch(x * kept), "generator": generator}


class Net(nn.Module):
    def __init__(self, block, has_stem):
        super().__init__()
        self.stem = nn.Linear(8, 8) if has_stem else nn.Identity()
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.generator = torch.Generator().manual_seed(4)

    def forward(self, x):
        held = {"x": self.stem(x), "generator": self.generator}
        for layer in self.layers:
            held = layer(held)
        return held["x"]


def square(model, batch):
    return model(batch).square().mean()


def trained(block, what=None, *, regions=None, has_stem=True):
    torch.manual_seed(0)
    model = Net(block, has_stem).double()
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if what is None:
        return train(model, square, x)
    with Recompute(model, what), CompiledModule(model, backend="aot_eager", regions=regions):
        return train(model, square, x)


@pytest.mark.parametrize("regions", ["whole", "blocks"])
@pytest.mark.parametrize("what", ["blocks", "selective"])
@pytest.mark.parametrize("block", [IntoADictionary, OwnGenerator, WithAGenerator])
def test_it_computes_what_it_computed(block, what, regions):
    expected = trained(block)
    found = trained(block, what, regions=regions)
    for part in ("losses", "grads", "state"):
        torch.testing.assert_close(found[part], expected[part], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("what", ["blocks", "selective"])
def test_what_needs_no_gradient_may_come_first(what):
    expected = trained(IntoADictionary, has_stem=False)
    found = trained(IntoADictionary, what, regions="whole", has_stem=False)
    torch.testing.assert_close(found["grads"], expected["grads"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("what", ["blocks", "selective"])
def test_a_backward_within_a_compiled_function(what):
    """There the compiler would take the second run, and not the first one, for its own."""

    class Products(Layers):
        def forward(self, x):
            torch._dynamo.graph_break()
            return x + self.second(self.first(x))

    def step(model, x):
        square(model, x).backward()

    def gradients(recomputes):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), *(Products() for _ in range(3))).double()
        x = torch.randn(8, 8, dtype=torch.float64)
        with Recompute(model, what) if recomputes else nullcontext():
            for _ in range(3):
                model.zero_grad()
                torch.compile(step, backend="aot_eager")(model, x)
        return [p.grad for p in model.parameters()]

    torch.testing.assert_close(gradients(True), gradients(False), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["debug", "preserve_rng_state", "function", "early_stop"])
def test_an_argument_may_be_called_as_one_of_torchs_checkpoint(name):
    class Named(Layers):
        def forward(self, x, **factors):
            torch._dynamo.graph_break()
            return x + self.branch(x) * (1 + factors.get(name, 0.0))

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Named() for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x, **{name: 2.0})
            return x

    for what in ("blocks", "selective"):
        model = Calls().double()
        x = torch.randn(4, 8, dtype=torch.float64)
        expected = train(copy.deepcopy(model), square, x)
        with Recompute(model, what), CompiledModule(model, backend="aot_eager", regions="whole"):
            found = train(model, square, x)
        torch.testing.assert_close(found["grads"], expected["grads"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recomputes", [True, False])
def test_what_it_computes_again_is_not_kept(recomputes):
    torch.manual_seed(0)
    model, inner = Net(OwnGenerator, has_stem=True), []
    for layer in model.layers:
        layer.second.register_forward_pre_hook(lambda _, args: inner.append(weakref.ref(args[0])))
    with ExitStack() as stack:
        if recomputes:
            stack.enter_context(Recompute(model, "blocks"))
            stack.enter_context(CompiledModule(model, backend="aot_eager"))
        loss = model(torch.randn(4, 8)).sum()
        assert [each() is None for each in inner] == [recomputes] * 3
        loss.backward()
    assert len(inner) == (6 if recomputes else 3)


@pytest.mark.parametrize("block", [IntoADictionary, OwnGenerator])
def test_torch_alone_computes_another_gradient(block):
    def gradients(run):
        torch.manual_seed(0)
        layer, stem = block().double(), nn.Linear(8, 8).double()
        held = run(layer, {"x": stem(torch.ones(4, 8, dtype=torch.float64))})
        held["x"].square().mean().backward()
        return layer.first.weight.grad

    expected = gradients(lambda layer, held: layer(held))
    found = gradients(lambda layer, held: checkpoint(layer, held, use_reentrant=False))
    assert not torch.allclose(found, expected)
