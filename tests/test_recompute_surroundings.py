"""The second run of a block finds what the first one found around it, or says what changed."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from functools import partial
from types import FunctionType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from recomputed import copied_buffers, train
from torchfast import Recompute
from torchfast._core import rng
from torchfast._core.compare import differences
from torchfast.memory import attention_backends, second_run, written_buffers
from torchfast.memory.attention import attention_state


def square(model, batch):
    return model(batch).square().mean()


def assert_same_bits(model, what, loss_fn=square, width=8):
    """Train a copy as it is, and the model with recompute, and compare all they are."""
    torch.manual_seed(0)
    batch = torch.randn(4, 6, width, requires_grad=True)
    expected = train(copy.deepcopy(model), loss_fn, batch)
    with Recompute(model, what):
        assert differences(expected, train(model, loss_fn, batch)) == []


# --- arguments -----------------------------------------------------------------------------------


class SelfOrCross(nn.Module):
    """Asks whether two of its arguments are the same tensor, as attention does."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, query, others):
        key = others["key"]
        return torch.tanh(self.line(query if query is key else query + key))


class OfBlocks(nn.Module):
    def __init__(self, make, call):
        super().__init__()
        self.blocks, self.call = nn.ModuleList(make() for _ in range(3)), call

    def forward(self, x):
        for block in self.blocks:
            x = self.call(block, x)
        return x


def attend_to_itself(block, x):
    return block(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("what", ["blocks", "selective"])
@pytest.mark.parametrize("kind", ["containers", "attention"])
def test_an_argument_that_stands_in_two_places_is_one_tensor(kind, what):
    torch.manual_seed(1)
    if kind == "containers":
        model = OfBlocks(SelfOrCross, lambda block, x: block(x, {"key": x}))
    else:
        model = OfBlocks(lambda: nn.MultiheadAttention(8, 2, batch_first=True), attend_to_itself)
    assert_same_bits(model, what)


def test_such_an_argument_is_given_to_hooks_once():
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    model = OfBlocks(SelfOrCross, lambda block, x: block(x, {"key": x}))
    with Recompute(model), torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    assert len(packed) == 3


# --- buffers -------------------------------------------------------------------------------------


class Centred(nn.Module):
    """Writes to its averages past the count of writes, as codebooks do."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8, dtype=dtype))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        mean = 0.9 * self.mean.float() + 0.1 * (x.detach().flatten(0, -2).mean(0) + 1)
        self.mean.data.copy_(mean)
        return x + torch.tanh(self.line(x - self.mean.float())) * self.scale


@pytest.mark.parametrize("what", ["blocks", "selective"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_buffer_that_is_written_to_by_its_data(what, dtype):
    torch.manual_seed(1)
    assert_same_bits(nn.Sequential(Centred(dtype), Centred(dtype), Centred(dtype)), what)


def test_only_buffers_that_are_written_to_are_kept_in_later_calls(monkeypatch):
    """But for small ones, which somebody may write to for the first time."""
    monkeypatch.setattr(written_buffers, "_SMALL", 0)
    model = nn.Sequential(Centred(), Centred())
    with Recompute(model):
        square(model, torch.ones(2, 8)).backward()
        copied = copied_buffers(monkeypatch)
        square(model, torch.ones(2, 8))
    assert len(copied) == 2
    assert {tensor.data_ptr() for tensor in copied} < {b.data_ptr() for b in model.buffers()}


def test_nothing_is_read_in_later_calls_nor_while_a_graph_is_captured(monkeypatch):
    model = nn.Sequential(Centred(), Centred())
    plain = copy.deepcopy(model)
    reads, read = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self) or read(self))
    with Recompute(model):
        for is_captured, num_reads in ((True, 0), (False, 2), (False, 2)):
            batch = torch.randn(4, 8)
            for one in (plain, model):
                with monkeypatch.context() as patch:
                    patch.setattr(written_buffers, "is_capturing", partial(bool, is_captured))
                    square(one, batch).backward()
            assert len(reads) == num_reads
    assert differences(plain.state_dict(), model.state_dict()) == []
    found = [[p.grad for p in one.parameters()] for one in (plain, model)]
    assert all(map(torch.equal, *found))


# --- attention -----------------------------------------------------------------------------------


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts, self.seen = nn.Linear(8, 24), []

    def forward(self, x):
        self.seen.append(attention_state())
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.parts(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + mixed.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("what", ["blocks", "selective"])
@pytest.mark.parametrize("names", [("math",), ("math", "flash"), ("flash", "math")])
def test_attention_takes_the_back_end_that_it_took(what, names):
    def loss_fn(model, batch):
        with attention_backends(*names):
            return square(model, batch)

    torch.manual_seed(1)
    before = attention_state()
    model = nn.Sequential(Attends(), Attends(), Attends())
    assert_same_bits(model, what, loss_fn)
    assert attention_state() == before
    assert {state for block in model for state in block.seen} == {model[0].seen[0]}


# --- the mode ------------------------------------------------------------------------------------


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.line(x) + (torch.randn_like(x) if self.training else 0.0))


@pytest.mark.parametrize("what", ["blocks", "selective"])
def test_eval_between_forward_and_backward(what):
    model = nn.Sequential(Noisy(), Noisy(), Noisy())
    with Recompute(model, what):
        square(model, torch.ones(2, 8)).backward()
        loss = square(model, torch.ones(2, 8))
        model.eval()
        with pytest.raises(RuntimeError, match="Noisy was put in eval mode between its forward"):
            loss.backward()
        model.train()
        square(model, torch.ones(2, 8)).backward()
        loss = square(model, torch.ones(2, 8))
        model.eval().train()
        loss.backward()


# --- random numbers ------------------------------------------------------------------------------


class DrawsItself(nn.Module):
    """Draws from a generator of its own, which its part draws from as well."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.generator = torch.Generator().manual_seed(3)
        self.drop = Drops(self.generator)

    def forward(self, x):
        noise = torch.randn(x.shape, generator=self.generator)
        return self.drop(torch.tanh(self.line(x) + noise))


class DrawsFromMany(nn.Module):
    """Holds it in a list."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.many = [torch.Generator().manual_seed(3)]

    @property
    def generator(self):
        return self.many[0]

    def forward(self, x):
        return torch.tanh(self.line(x) + torch.randn(x.shape, generator=self.many[0]))


class Drops(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.source = generator

    def forward(self, x):
        return x * (torch.rand(x.shape, generator=self.source) > 0.3)


class DrawsFromArgument(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x, generator):
        return torch.tanh(self.line(x) + torch.randn(x.shape, generator=generator))


@pytest.mark.parametrize("what", ["blocks", "selective"])
@pytest.mark.parametrize("make", [DrawsItself, DrawsFromMany, DrawsFromArgument])
def test_generators_of_a_block_and_of_its_arguments(make, what):
    torch.manual_seed(1)
    generators = {}

    def model_of(is_plain):
        model = copy.deepcopy(template)
        generators[is_plain] = (
            [block.generator for block in model.blocks]
            if make is not DrawsFromArgument
            else [torch.Generator().manual_seed(5)]
        )
        if make is DrawsFromArgument:
            (given,) = generators[is_plain]
            model.call = lambda block, x: block(x, given)
        return model

    template = OfBlocks(make, lambda block, x: block(x))
    batch = torch.randn(4, 8, requires_grad=True)
    expected = train(model_of(True), square, batch)
    model = model_of(False)
    with Recompute(model, what):
        assert differences(expected, train(model, square, batch)) == []
    for one, other in zip(generators[True], generators[False], strict=True):
        assert torch.equal(one.get_state(), other.get_state())


class Mixes(nn.Module):
    """Scales by a number that is no tensor, and draws it of Python or NumPy."""

    def __init__(self, draw):
        super().__init__()
        self.up, self.down, self.draw = nn.Linear(8, 8), nn.Linear(8, 8), draw

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x) * self.draw()))


class MixesByItself(Mixes):
    def __init__(self, make):
        super().__init__(lambda: float(self.generator.uniform(0.5, 2.0)))
        self.generator = make(3)


DRAWS = {
    "Python": lambda: Mixes(lambda: random.uniform(0.5, 2.0)),
    "NumPy": lambda: Mixes(lambda: float(np.random.uniform(0.5, 2.0))),
    "Python's of its own": lambda: MixesByItself(random.Random),
    "NumPy's of its own": lambda: MixesByItself(np.random.default_rng),
    "RandomState": lambda: MixesByItself(np.random.RandomState),
}


@pytest.mark.parametrize("what", ["blocks", "selective"])
@pytest.mark.parametrize("kind", DRAWS)
def test_numbers_of_python_and_numpy_are_drawn_again(kind, what):
    """They change no shape, so nobody would notice another gradient."""
    batch = torch.randn(4, 8, requires_grad=True)
    found = []
    for is_plain in (True, False):
        rng.seed_everything(1)
        model = OfBlocks(DRAWS[kind], lambda block, x: block(x))
        with nullcontext() if is_plain else Recompute(model, what):
            found.append(train(model, square, batch))
        found[-1]["next"] = random.random(), np.random.rand()
    assert differences(*found) == []


def coin(p):
    return random.random() < p


class SkipsSomehow(nn.Module):
    """Leaves its branch out by a rate that is zero at first, when it draws nothing."""

    def __init__(self):
        super().__init__()
        self.line, self.p = nn.Linear(8, 8), 0.0

    def forward(self, x):
        return x if self.p > 0 and self.is_left_out() else x + torch.tanh(self.line(x))


class Skips(SkipsSomehow):
    def is_left_out(self):
        return random.random() < self.p


class SkipsByNumPy(SkipsSomehow):
    def is_left_out(self):
        return bool(np.random.rand() < self.p)


class SkipsByFunction(SkipsSomehow):
    def is_left_out(self):
        return any(coin(self.p) for _ in range(1))


class SkipsByAttribute(SkipsSomehow):
    def __init__(self):
        super().__init__()
        self.flip = lambda: coin(self.p)

    def is_left_out(self):
        return self.flip()


class SkipsByImport(SkipsSomehow):
    def is_left_out(self):
        import random as others

        return others.random() < self.p


@pytest.mark.parametrize("what", ["blocks", "selective"])
@pytest.mark.parametrize(
    "make", [Skips, SkipsByNumPy, SkipsByFunction, SkipsByAttribute, SkipsByImport]
)
def test_numbers_that_are_first_drawn_in_a_later_call_are_drawn_again(make, what):
    batch = torch.randn(4, 8, requires_grad=True)
    found = []
    for is_plain in (True, False):
        rng.seed_everything(2)
        model = OfBlocks(make, lambda block, x: block(x))
        seen = []

        def loss_fn(model, batch, seen=seen):
            for block in model.blocks:
                block.p = 0.5 if seen else 0.0
            seen.append(None)
            return square(model, batch)

        with nullcontext() if is_plain else Recompute(model, what):
            found.append(train(model, loss_fn, batch, steps=6))
        found[-1]["next"] = random.random(), np.random.rand()
    assert differences(*found) == []


class Proxy:
    """Of what is there in some contexts only, as web servers have them."""

    def __getattribute__(self, name):
        raise RuntimeError("working outside of context")


def asks_proxy(self):
    return PROXY.is_on  # noqa: F821


class NamesProxy(SkipsSomehow):
    # With globals of its own, or who collects tests would ask the proxy.
    is_left_out = FunctionType(asks_proxy.__code__, {"PROXY": Proxy()})


def test_code_that_names_what_cannot_be_asked_is_run_as_ever():
    model = nn.Sequential(NamesProxy(), NamesProxy())
    with Recompute(model):
        square(model, torch.ones(2, 8)).backward()


def test_only_blocks_with_a_generator_of_their_own_note_it(monkeypatch):
    noted = []

    class Noted(rng.DrawnFrom):
        def __init__(self, *devices, generators=()):
            noted.append(len(generators))
            super().__init__(*devices, generators=generators)

    monkeypatch.setattr(second_run, "DrawnFrom", Noted)
    for model in (nn.Sequential(Noisy(), Noisy()), nn.Sequential(DrawsItself(), DrawsItself())):
        with Recompute(model):
            model(torch.ones(2, 8))
    assert noted == [0, 0, 1, 1]
