"""The second run of a call: what it guarantees, case by case, beside the call without it."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from recomputed import Counted, Live
from torchfast import Recompute, RecomputeOptions
from torchfast._core import rng
from torchfast.memory.second_run import TwiceRun


def twice(function):
    def call(*args, **kwargs):
        def again(_, *args, **kwargs):
            function(*args, **kwargs)

        return TwiceRun(again, args, kwargs).first(function, args, kwargs)

    return call


def gradients(function, *shapes, create_graph=False):
    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    out = function(*inputs)
    return [out, *torch.autograd.grad(out.square().sum(), inputs, create_graph=create_graph)]


def dropped(x, y):
    hidden = F.dropout(torch.tanh(x @ y), 0.5)
    return F.gelu(hidden) * torch.rand(())


def parted(x, y):
    """A part of its graph is dropped while it runs."""
    torch.exp(x * y).sum()
    return torch.sigmoid(x) * torch.tanh(y)


def with_gradient_within(x, y):
    energy = (torch.sin(x) * y).sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return torch.tanh(force) + x.cos()


def with_freed_gradient_within(x, y):
    z = torch.sin(x)
    (slope,) = torch.autograd.grad(z.cos().sum(), x)
    return x.cos() * slope + y.exp()


def in_containers(x, y):
    return twice(lambda pair, *, more: torch.tanh(pair[0]) * pair[1]["y"] + more[0])(
        (x, {"y": y}), more=[2.0]
    )


@pytest.mark.parametrize(
    "function", [dropped, parted, with_gradient_within, with_freed_gradient_within, in_containers]
)
def test_gradients(function):
    shapes = (4, 4), (4, 4)
    expected, expected_rng = gradients(function, *shapes), torch.get_rng_state()
    found = gradients(twice(function), *shapes)
    assert all(map(torch.equal, expected, found))
    assert torch.equal(expected_rng, torch.get_rng_state())


def test_a_second_backward_computes_again_and_gives_the_same():
    runs = []

    def function(x):
        runs.append(1)
        return torch.tanh(x).exp()

    x = torch.randn(4, requires_grad=True)
    out = twice(function)(x).sum()
    (first,) = torch.autograd.grad(out, x, retain_graph=True)
    (second,) = torch.autograd.grad(out, x)
    assert torch.equal(first, second)
    assert len(runs) == 3
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, x)


def test_a_backward_in_parts_computes_again_once():
    runs = []

    def function(x, y):
        runs.append(1)
        return torch.tanh(x) * torch.exp(y)

    x, y = (torch.randn(4, requires_grad=True) for _ in range(2))
    out = twice(function)(x, y).sum()
    expected = torch.autograd.grad((torch.tanh(x) * torch.exp(y)).sum(), (x, y))
    (by_x,) = torch.autograd.grad(out, x, retain_graph=True)
    (by_y,) = torch.autograd.grad(out, y)
    assert all(map(torch.equal, expected, (by_x, by_y)))
    assert len(runs) <= 3


class Twice(torch.autograd.Function):
    """Asks twice for what it saved."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[1] * grad, ctx.saved_tensors[0] * grad


def test_a_function_that_asks_twice():
    def function(x, y):
        return Twice.apply(torch.tanh(x), y)

    expected, found = (gradients(f, (4,), (4,)) for f in (function, twice(function)))
    assert all(map(torch.equal, expected, found))


def test_it_ends_as_soon_as_nothing_is_missing():
    ends = []

    def function(x):
        out = torch.tanh(x).exp()
        ends.append(1)
        return out + 1

    x = torch.randn(4, requires_grad=True)
    twice(function)(x).sum().backward()
    assert len(ends) == 1


def test_a_block_that_catches_everything_does_not_catch_the_end():
    caught = []

    def function(x):
        try:
            return torch.tanh(x)
        except Exception as error:
            caught.append(error)
            return torch.zeros(4)

    x = torch.randn(4, requires_grad=True)
    twice(function)(x).sum().backward()
    assert not caught


@pytest.mark.parametrize(
    ("again", "message"),
    [
        (lambda x: torch.tanh(x[:2]).exp(), r"saved tensor 0 was torch.float32 of shape \(4,\)"),
        (lambda x: torch.tanh(x.double()).exp(), "and is torch.float64 of shape"),
        (lambda x: x + 1, "it saved 0 tensors instead of 2"),
    ],
)
def test_another_second_run_is_an_error(again, message):
    functions = iter([lambda x: torch.tanh(x).exp(), again])

    def function(x):
        return next(functions)(x)

    x = torch.randn(4, requires_grad=True)
    out = twice(function)(x)
    with pytest.raises(RuntimeError, match=message):
        out.sum().backward()


@pytest.mark.parametrize("requires_grad", [True, False])
def test_an_input_that_is_overwritten(requires_grad):
    x, y = torch.randn(4, requires_grad=True), torch.randn(4)
    middle = x * 1 if requires_grad else y
    out = twice(lambda a, b: torch.tanh(a) * b)(middle, x)
    with torch.no_grad():
        middle.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation .* shape \(4,\)"):
        out.sum().backward()


def test_autocast_and_the_device_context_are_as_they_were():
    seen = []

    def function(x, weight):
        made = torch.ones(())
        seen.append((made.device, torch.is_autocast_enabled("cpu"), (x @ weight).dtype))
        return torch.tanh(x @ weight).float() * 2

    x, weight = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        out = twice(function)(x, weight)
    out.sum().backward()
    assert seen[0] == seen[1]
    assert seen[1] == (torch.device("meta"), True, torch.bfloat16)
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        out = twice(lambda *a: torch.autocast("cpu", enabled=False)(function)(*a))(x, weight)
    out.sum().backward()
    assert seen[2] == seen[3]


def test_the_generators_of_all_devices_are_set_back(monkeypatch):
    states = {torch.device("cuda", index): index for index in range(3)}
    seen = []
    monkeypatch.setattr(rng, "device_rng_state", states.__getitem__)
    monkeypatch.setattr(rng, "set_device_rng_state", states.__setitem__)
    with FakeTensorMode():
        x, y, z = (torch.empty(2, device=device) for device in ("cuda:0", "cpu", "cuda:1"))
        call = TwiceRun(print, (x, [y, z, x]), {}, torch.device("cuda", 2))
    for device in states:
        states[device] += 10
    with call._drawn.again():
        seen = [*states.values()]
    assert seen == [0, 1, 2]
    assert [*states.values()] == [10, 11, 12]


def test_a_cast_of_the_second_run_is_not_cached_beyond_it():
    x, weight = (torch.randn(4, 4, requires_grad=True) for _ in range(2))

    def product():
        with torch.autocast("cpu", torch.bfloat16):
            return twice(lambda a: torch.tanh(a @ weight))(x)

    product().float().sum().backward()
    with torch.no_grad():
        weight.add_(1)
    assert torch.equal(product(), torch.tanh(x.bfloat16() @ weight.bfloat16()))


def test_hooks_around_get_the_inputs_and_nothing_else():
    packed = []

    def pack(tensor):
        assert not torch.is_grad_enabled()
        packed.append(tuple(tensor.shape))
        return tensor.detach().numpy().copy(), tensor.requires_grad

    def unpack(kept):
        return torch.from_numpy(kept[0])

    def function(x, y):
        return torch.tanh(x) @ torch.exp(y)

    expected = gradients(function, (3, 4), (4, 2))
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        torch.manual_seed(0)
        x, y = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
        out = twice(function)(x, y)
    assert packed == [(3, 4), (4, 2)]
    found = torch.autograd.grad(out.square().sum(), (x, y))
    assert all(map(torch.equal, expected[1:], found))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(Counted() for _ in range(2))
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        for block in self.inner:
            x = self.drop(block(torch.sin(x)))
        return torch.cos(x)


@pytest.mark.parametrize("selective", [False, True])
def test_blocks_within_blocks(selective):
    def trained(what):
        torch.manual_seed(0)
        model = nn.Sequential(Outer(), Outer())
        found = []
        recompute = None if what is None else Recompute(model, what)
        for _ in range(2):
            with Live() as live:
                loss = model(torch.ones(64, 4)).square().sum()
            kept = live.live_bytes([*model.parameters(), loss])
            loss.backward()
            found = [kept, loss.detach(), *(p.grad.clone() for p in model.parameters())]
        if recompute is not None:
            recompute.close()
        return found

    plain = trained(None)
    inner = trained(RecomputeOptions(regions=(Counted,), selective=selective))
    both = trained(RecomputeOptions(regions=(Outer, Counted), selective=selective))
    assert all(map(torch.equal, plain[1:], inner[1:]))
    assert all(map(torch.equal, plain[1:], both[1:]))
    if not selective:
        assert both[0] < inner[0] < plain[0]


def test_the_values_of_a_second_run_go_one_by_one():
    """A kept graph holds nothing after its backward."""
    x = torch.randn(1000, requires_grad=True)
    out = twice(lambda t: torch.tanh(t).exp().sin())(x).sum()
    gc.collect()
    gc.disable()
    try:
        with Live() as live:
            out.backward(retain_graph=True)
        assert live.live_bytes([x, x.grad]) == 0
    finally:
        gc.enable()


def writes_to_its_input(x):
    return torch.tanh(x.exp_())


def drops_an_output(x):
    torch.exp(x)
    return torch.tanh(x)


@pytest.mark.parametrize("function", [writes_to_its_input, drops_an_output])
@pytest.mark.parametrize("has_backward", [False, True])
def test_nothing_goes_round_in_a_circle(function, has_backward):
    """What holds itself, torch's side included, no collector finds."""
    if has_backward and function is writes_to_its_input:
        pytest.skip("an error, as without recompute")
    leaf = torch.randn(1000, requires_grad=True)
    with Live() as live:
        out = twice(function)(leaf * 1)
        if has_backward:
            out.sum().backward()
    del out
    gc.collect()
    assert live.live_bytes([leaf, *([leaf.grad] if has_backward else [])]) == 0


class Leaky(nn.Module):
    """Its operator is given a tensor to fill, which autograd saves before it is filled."""

    def __init__(self, *behind):
        super().__init__()
        self.linear, self.behind = nn.Linear(4, 4), nn.Sequential(*behind)

    def forward(self, x):
        return x + self.behind(F.rrelu(self.linear(x), training=self.training))


class Aside(nn.Module):
    """Its graph does not hang together with what it returns."""

    def __init__(self):
        super().__init__()
        self.linear, self.leaky = nn.Linear(4, 4), nn.RReLU()

    def forward(self, x):
        self.seen = self.leaky(self.linear(x))
        return SimpleNamespace(value=x + self.seen)


class Values(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(x).value


LEAKY = [
    Leaky(),
    Leaky(nn.Linear(4, 4)),
    Leaky(nn.Dropout(0.5)),
    nn.Sequential(nn.Linear(4, 4), nn.RReLU(inplace=True)),
    nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.RReLU()),
    Values(Aside()),
]


@pytest.mark.parametrize("what", ["blocks", "selective", (Aside,)])
@pytest.mark.parametrize("block", LEAKY)
def test_what_an_operator_fills_is_filled_before_the_run_ends(what, block):
    if what == (Aside,) and not isinstance(block, Values):
        what = "blocks"

    def trained(recompute):
        torch.manual_seed(0)
        model = nn.Sequential(*(copy.deepcopy(block) for _ in range(3)))
        found = []
        with Recompute(model, what) if recompute else nullcontext():
            for _ in range(3):
                model.zero_grad()
                loss = model(torch.randn(2, 4)).square().sum()
                loss.backward()
                found += [loss.detach(), *(p.grad for p in model.parameters())]
        return found

    assert all(map(torch.equal, trained(recompute=True), trained(recompute=False)))


def test_a_block_that_writes_to_its_input_behind_such_an_operator_is_an_error():
    """It has put itself in the input's place in the graph by then, where a copy is kept of that."""
    leaky = Leaky()
    leaky.forward = lambda x: x.add_(F.rrelu(leaky.linear(x * 1.0), training=True))
    model = nn.Sequential(nn.Linear(4, 4), leaky)
    copies = torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda saved: saved)
    with Recompute(model, ("1",)), copies:
        loss = model(torch.randn(2, 4)).square().sum()
        with pytest.raises(RuntimeError, match="leaf Variable"):
            loss.backward()
