"""Attention whose inputs are kept: what leads to them does not run again."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.workloads.llama import SIZES, Llama
from recomputed import (
    GPT,
    Live,
    RotaryBlock,
    as_if_compiled,
    live_bytes,
    make_or_skip,
    noted_layers,
    token_loss,
    tokens,
    train,
    with_and_without_selective,
)
from torchfast import Recompute, RecomputeOptions, plan_recompute
from torchfast._core.compare import differences
from torchfast.memory.deferred import Deferred
from torchfast.memory.kept_results import Result, choose_kept
from torchfast.memory.noted_call import NotedCall

EVERYTHING = RecomputeOptions(selective=True, share=1.0)


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    """Whatever other tests have compiled in this process."""
    as_if_compiled(monkeypatch)


def autocast_loss(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return token_loss(model, batch)


def made(name):
    if name == "benchmark":
        torch.manual_seed(0)
        return Llama(SIZES["smoke"])
    return make_or_skip(name)[0]


MODELS = ["benchmark", "llama", "qwen2", "mistral", "phi3"]


@pytest.mark.parametrize("loss_fn", [token_loss, autocast_loss])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_models(name, loss_fn, share):
    expected = train(made(name), loss_fn, tokens())
    model = made(name)
    with Recompute(model, RecomputeOptions(selective=True, share=share)) as recompute:
        found = train(model, loss_fn, tokens())
        assert "with its inputs" in str(recompute._kinds[0].choice)
    assert differences(expected, found) == []


class Ran(TorchDispatchMode):
    """Notes the operations that really run, and those that wait."""

    def __init__(self):
        super().__init__()
        self.ran, self.waited = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = any(type(leaf) is Deferred for leaf in tree_leaves((args, kwargs)))
        (self.waited if waits else self.ran)[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def in_backward(monkeypatch):
    """Count what a backward runs: operations, layers, and what is computed after all."""
    layers, computed = noted_layers(monkeypatch)

    def count(model, loss_fn):
        loss_fn(model, tokens()).backward()  # the first call is measured
        loss = loss_fn(model, tokens())
        layers.clear()
        with Ran() as ran:
            loss.backward()
        names = {module: name for name, module in model.named_modules()}
        return ran, {names[layer].rpartition(".")[2] for layer in layers}, len(computed)

    return count


@pytest.mark.parametrize("loss_fn", [token_loss, autocast_loss])
@pytest.mark.parametrize("name", [*MODELS[:4], "own"])
def test_what_leads_to_attention_does_not_run_again(in_backward, name, loss_fn):
    feeders = {"query", "key", "value", "q_proj", "k_proj", "v_proj"}
    counts = []
    for what in ("blocks", EVERYTHING):
        torch.manual_seed(0)
        model = GPT(block=RotaryBlock) if name == "own" else made(name)
        with Recompute(model, what):
            counts.append(in_backward(model, loss_fn))
    (whole, whole_layers, _), (ran, layers, num_computed) = counts
    assert len(whole_layers & feeders) == 3
    assert not layers & feeders
    assert num_computed == 0
    # The backward of a rotation has a few of these too, so it is compared with what always runs.
    for name_of_op in ("aten::cat", "aten::neg", "aten::mul"):
        assert whole.ran[name_of_op] - ran.ran[name_of_op] >= ran.waited[name_of_op]
    assert ran.waited["aten::mul"] >= 2 * 4


def test_it_takes_what_the_products_take_and_the_planner_says_so():
    torch.manual_seed(0)
    model, batch = GPT(block=RotaryBlock), tokens()
    plan = plan_recompute(model, token_loss, batch, memory_gb=1.0, repeats=1)
    said = {choice.recompute: choice.saved_bytes for choice in plan.choices}

    def held(what):
        with Recompute(model, what) as recompute:
            live_bytes(model, token_loss, batch)
            return live_bytes(model, token_loss, batch), recompute._kinds[0].choice

    (nothing, _), (something, choice) = held("blocks"), held("selective")
    assert something - nothing == 3 * choice.kept_bytes
    assert said["selective"] - said["blocks"] == 3 * choice.kept_bytes
    (inputs,) = (r for r in choice.results if r.kind == "inputs")
    products = [choice.results[number] for number in inputs.spares]
    assert len(products) == 3
    assert inputs.size_bytes == sum(product.size_bytes for product in products)
    assert choice.kept[-1]
    assert not any(choice.kept[number] for number in inputs.spares)


def test_the_share_holds():
    for share in (0.3, 0.4, 0.5):
        torch.manual_seed(0)
        model, batch = GPT(block=RotaryBlock), tokens()
        with Recompute(model, RecomputeOptions(selective=True, share=share)) as recompute:
            token_loss(model, batch).backward()
            choice = recompute._kinds[0].choice
            with Live() as live:
                loss = token_loss(model, batch)
            held = live.live_bytes([*model.parameters(), batch, loss])
        input_bytes = 4 * 16 * 32 * 4
        assert choice.kept_bytes + input_bytes <= share * choice.plain_bytes
        assert held >= 3 * choice.kept_bytes


class Fused(RotaryBlock):
    """One layer for all three; the pairs of a rotation are complex numbers."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout=dropout)
        self.query = nn.Linear(32, 96)

    def attended(self, h):
        q, k, v = (self.heads_of(part) for part in self.query(h).chunk(3, dim=-1))
        return self.mixed(*self.turned(q, k), v)

    def turned(self, q, k):
        turns = torch.polar(torch.ones_like(self.cos), self.cos)[: q.shape[-2]]

        def turned(x):
            pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)

        return turned(q), turned(k)


class Masked(RotaryBlock):
    """With a mask of its own, keys and values repeated, and half of each head turned."""

    def turned(self, q, k):
        half = self.head_width // 2
        cos, sin = self.cos[: q.shape[-2], : half // 2], self.sin[: q.shape[-2], : half // 2]
        return tuple(
            torch.cat((rotated, x[..., half:]), -1)
            for x in (q, k)
            for rotated in [torch.roll(x[..., :half], 1, -1) * cos.repeat(1, 2) + sin.repeat(1, 2)]
        )

    def mixed(self, q, k, v):
        mask = torch.zeros(q.shape[-2], q.shape[-2]).fill_diagonal_(-0.5)
        k, v = (
            x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape[0], -1, *x.shape[2:])
            for x in (k, v)
        )
        mixed = F.scaled_dot_product_attention(
            q, key=k, value=v, attn_mask=mask.to(q.dtype), dropout_p=self.p * self.training
        )
        return mixed.transpose(1, 2).flatten(2)


class Double(RotaryBlock):
    """Everything before attention in float32, which autocast casts."""

    def turned(self, q, k):
        q, k = super().turned(q.float(), k.float())
        return q * 1.5, k


class Changing(RotaryBlock):
    """Only in the first call does nothing else look at what leads to attention."""

    NUM = 12

    def __init__(self, dropout=0.0):
        super().__init__(dropout=dropout)
        self.num_calls, self.seen = -1, []

    def attended(self, h):
        if torch._C._current_graph_task_id() == -1:
            self.num_calls += 1
        kind = self.num_calls % self.NUM
        q, k, v = (layer(h) for layer in (self.query, self.key, self.value))
        if kind == 1:
            q.mul_(0.5)
        if kind == 2:
            v = self.drop(v)
        before = q
        q, k, v = map(self.heads_of, (q, k, v))
        more = 0.0
        if kind == 3:
            v.add_(1.0)
        q, k = self.turned(q, k)
        if kind == 4:
            more = k.exp().mean()
        if kind == 5:
            more = k.detach().sum().item()
        if kind == 6:
            seen = q.view_as(q)
            q.add_(0.25)
            more = seen.sin().mean()
        if kind == 7:
            more = self.up(before).mean()
        if kind == 8:
            q, k, v = (x[:, :, :8] for x in (q, k, v))
        if kind == 9:
            with torch.inference_mode():
                more = q.sum().item()
        if kind == 10:
            self.seen.append(k)
            more = float(k.detach().float().numpy().sum())
        if kind == 11:
            q = F.layer_norm(q, q.shape[-1:])
        mixed = self.mixed(q, k, v)
        if kind == 8:
            mixed = torch.cat((mixed, mixed), 1)
        return mixed * 1.5 + more


@pytest.mark.parametrize("loss_fn", [token_loss, autocast_loss])
@pytest.mark.parametrize("block", [RotaryBlock, Fused, Masked, Double, Changing])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_bits(block, loss_fn, share):
    steps = Changing.NUM + 1 if block is Changing else 4
    plain, selective = with_and_without_selective(block, loss_fn, share, steps=steps)
    assert differences(plain, selective) == []
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("when", [0, 1, 2])
def test_something_is_compiled_in_the_process(monkeypatch, when):
    """Before the first call, or after it: then attention is seen by a dispatch mode."""
    torch.manual_seed(0)
    expected = train(GPT(block=RotaryBlock, dropout=0.2), autocast_loss, tokens())
    torch.manual_seed(0)
    model, num_calls = GPT(block=RotaryBlock, dropout=0.2), []
    as_if_compiled(monkeypatch, lambda: len(num_calls) > when)

    def loss_fn(model, batch):
        num_calls.append(1)
        return autocast_loss(model, batch)

    with Recompute(model, EVERYTHING):
        assert differences(expected, train(model, loss_fn, tokens())) == []
        loss = loss_fn(model, tokens())
        with Ran() as ran:
            loss.backward()
    # The compiler would have to look at what waits.
    assert not ran.waited["aten::mul"]


def test_attention_that_is_not_the_one_of_the_first_run_gets_plain_tensors(monkeypatch):
    """Which kernel computes it depends on what it gets."""
    torch.manual_seed(0)
    model, fits = GPT(block=RotaryBlock), NotedCall.fits
    token_loss(model, tokens()).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    monkeypatch.setattr(NotedCall, "fits", lambda self, t, x: x.dim() == 3 and fits(self, t, x))
    with Recompute(model, EVERYTHING):
        for _ in range(2):
            model.zero_grad()
            loss = token_loss(model, tokens())
            with Ran() as ran:
                loss.backward()
    assert differences(expected, {n: p.grad for n, p in model.named_parameters()}) == []
    assert ran.waited["aten::mul"]
    assert not [name for name in ran.waited if "scaled_dot_product" in name]
    assert [name for name in ran.ran if "scaled_dot_product" in name and "backward" not in name]


class Saving(RotaryBlock):
    def turned(self, q, k):
        return q.exp(), k


class Drawing(RotaryBlock):
    def turned(self, q, k):
        return F.dropout(q, 0.5), k.cos()


class Writing(RotaryBlock):
    def turned(self, q, k):
        return q.mul_(0.5), k * 2


class Reading(RotaryBlock):
    def turned(self, q, k):
        return q * k.detach().mean().item(), k * 2


class Shared(RotaryBlock):
    def mixed(self, q, k, v):
        return super().mixed(q, k, v) * k.mean()


class ForNothing(RotaryBlock):
    def turned(self, q, k):
        return q, k


class NotOfLayers(RotaryBlock):
    def turned(self, q, k):
        return q * 2, k.new_ones(k.shape)


@pytest.mark.parametrize(
    "block", [Saving, Drawing, Writing, Reading, Shared, ForNothing, NotOfLayers]
)
def test_where_something_else_looks_it_is_not_offered(block):
    model = GPT(block=block)
    with Recompute(model, EVERYTHING) as recompute:
        for _ in range(2):
            token_loss(model, tokens()).backward()
        kinds = [result.kind for result in recompute._kinds[0].choice.results]
    assert "inputs" not in kinds
    assert "attention" in kinds


def test_a_second_backward():
    torch.manual_seed(0)
    model = GPT(block=RotaryBlock)

    def gradients():
        loss = token_loss(model, tokens())
        parameters = list(model.parameters())
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        return [*first, *torch.autograd.grad(loss, parameters)]

    expected = gradients()
    with Recompute(model, EVERYTHING):
        for _ in range(2):
            assert all(map(torch.equal, gradients(), expected))


class Otherwise(RotaryBlock):
    """Turns less in its second run."""

    is_other = False

    def turned(self, q, k):
        if self.is_other and torch._C._current_graph_task_id() != -1:
            return q * 2, k
        return super().turned(q, k)


def test_a_second_run_that_computes_something_else_is_an_error():
    model = GPT(block=Otherwise)
    with Recompute(model, EVERYTHING):
        token_loss(model, tokens()).backward()
        Otherwise.is_other = True
        try:
            with pytest.raises(RuntimeError, match="computed something else when it ran again"):
                token_loss(model, tokens()).backward()
        finally:
            Otherwise.is_other = False


class WritingLater(RotaryBlock):
    is_written = False

    def mixed(self, q, k, v):
        mixed = super().mixed(q, k, v)
        if self.is_written:
            q.detach().mul_(2)
        return mixed


@pytest.mark.parametrize("what", [None, EVERYTHING])
def test_inputs_that_are_written_to_are_an_error_as_without(monkeypatch, what):
    model = GPT(block=WritingLater)
    recompute = None if what is None else Recompute(model, what)
    token_loss(model, tokens()).backward()
    monkeypatch.setattr(WritingLater, "is_written", True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        token_loss(model, tokens()).backward()
    if recompute is not None:
        recompute.close()


def test_the_choice_between_products_and_inputs():
    attention = Result("attention", 10, 10.0)
    product = Result("product", 10, 1e4)
    inputs = Result("inputs", 10, 3e4, needs=0, spares=(1,))
    assert choose_kept([attention, product, inputs], 100, 10, 0.5).kept == (True, False, True)
    assert choose_kept([attention, product, inputs], 100, 10, 0.2).kept == (True, False, False)
    # Not without attention, which came with it.
    wide = attention._replace(size_bytes=50)
    assert choose_kept([wide, product, inputs], 100, 10, 0.5).kept == (False, True, False)
    # In place of a product that was taken before, as far as there is room for the rest.
    larger = Result("inputs", 15, 1.1e4, needs=0, spares=(1,))
    assert choose_kept([attention, product, larger], 100, 10, 0.35).kept == (True, False, True)
    assert choose_kept([attention, product, larger], 100, 10, 0.34).kept == (True, True, False)
    # What it adds is worth less than another product, though all of it is worth more.
    other = Result("product", 10, 800.0)
    results = [attention, product._replace(flops=1e3), other, larger._replace(flops=1.3e3)]
    assert choose_kept(results, 100, 10, 0.4).kept == (True, True, True, False)
