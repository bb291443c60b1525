"""Selective recompute keeps results where they are made, and sees nothing else of the block."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

from recomputed import (
    GPT,
    GPTBlock,
    Live,
    as_if_compiled,
    image_loss,
    make,
    token_loss,
    tokens,
    train,
    with_and_without_selective,
)
from torchfast import Recompute, RecomputeOptions
from torchfast._core.compare import differences
from torchfast._core.rng import DrawnFrom
from torchfast.memory.caller_mode import draws
from torchfast.memory.kept_results import KeptResults, op_class
from torchfast.memory.noted_call import NotedCall

EVERYTHING = RecomputeOptions(selective=True, share=1.0)


@pytest.fixture(params=[False, True], ids=["nothing compiled", "something compiled"])
def has_compiled(request, monkeypatch):
    """Whether attention is seen by a dispatch mode, since a function mode is the compiler's too."""
    as_if_compiled(monkeypatch, lambda: request.param)
    return request.param


class Ran(TorchDispatchMode):
    """Notes the expensive operations that really run."""

    def __init__(self):
        super().__init__()
        self.kinds = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if kind := op_class(func):
            self.kinds.append(kind)
        return func(*args, **(kwargs or {}))


def ran_in_backward(model, loss_fn, batch):
    loss_fn(model, batch).backward()  # the first call is measured
    loss = loss_fn(model, batch)
    with Ran() as ran:
        loss.backward()
    return ran.kinds


def autocast_loss(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return token_loss(model, batch)


class Entered(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Shared(nn.Module):
    """One layer, called twice; one behind a view, one with a frozen weight, one without a bias."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.one = nn.Linear(32, 32)
        self.two, self.frozen = nn.Linear(32, 32, bias=False), nn.Linear(32, 32)
        self.frozen.weight.requires_grad_(False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        y = self.one(torch.tanh(self.drop(self.one(x))))
        y = self.two(y.transpose(0, 1)).transpose(0, 1)
        return x + torch.sin(self.frozen(torch.exp(-y.square())))


class Square(nn.Module):
    """Its input and its weight have the same number of elements, and no cast tells them apart."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.line, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        half = x[0, :8].repeat(4, 1)
        return x + torch.tanh(self.last(torch.tanh(self.line(half)))).mean()


class Crossed(nn.Module):
    """Layers read what lies in another order, and copy it when autocast has cast it."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.one, self.two = nn.Linear(32, 48), nn.Linear(32, 48, bias=False)
        self.last = nn.Linear(48, 32)

    def forward(self, x):
        y = torch.tanh(self.one(x.float().transpose(0, 1)) * self.two(x.float().transpose(0, 1)))
        return x + torch.sin(self.last(y.float().transpose(0, 1)))


class Remade(nn.Module):
    """Layers whose weights are made of other parameters before each call."""

    def __init__(self, dropout=0.0):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.one = nn.utils.weight_norm(nn.Linear(32, 48))
            self.two = nn.utils.spectral_norm(nn.Linear(48, 48))
        self.three = prune.random_unstructured(nn.Linear(48, 32), "weight", 0.5)

    def forward(self, x):
        return x + torch.sin(self.three(torch.tanh(self.two(torch.tanh(self.one(torch.cos(x)))))))


class Inferring(nn.Module):
    """Computes something in inference mode, where torch counts no writes."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        with torch.inference_mode():
            y = self.one(x)[:, None]
            y = F.scaled_dot_product_attention(y, y, y)[:, 0]
            scale = self.drop(y @ y.mT).mean().item()
        return x + torch.sin(self.two(torch.tanh(self.one(self.drop(x)) * scale)))


class Force(nn.Module):
    """Takes gradients of what layers and attention return, twice."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.one, self.two, self.last = (nn.Linear(32, 32) for _ in range(3))
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        for _ in range(2):
            y = torch.tanh(self.drop(self.one(self.norm(x))))[:, None]
            with sdpa_kernel(SDPBackend.MATH):  # which has second derivatives
                y = self.two(F.scaled_dot_product_attention(y, y, y)[:, 0])
            energy = (torch.sin(y) + x.square()).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            x = x + torch.sin(self.last(force))
        return x


class Written(nn.Module):
    """Writes to what a layer returned."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return x + torch.sin(self.two(F.relu(self.one(x), inplace=True)))


class WrittenProduct(nn.Module):
    """Writes to what a product of more than two dimensions returned, which counts for itself."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.line = nn.Linear(32, 32)

    def forward(self, x):
        y = x @ self.line.weight
        z = torch.sin(y.mul_(2))
        return x + torch.exp(-(z @ z.mT).relu_()).sum(-1, keepdim=True) + self.line(z)


class Sometimes(nn.Module):
    """Runs otherwise in every second call."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
        self.num_calls = 0

    def forward(self, x):
        if torch._C._current_graph_task_id() == -1:
            self.num_calls += 1
        if self.num_calls % 2:
            return x + torch.sin(self.two(torch.tanh(self.one(x))))
        return x + torch.sin(self.one(torch.tanh(self.two(self.two(x)))))


class Patched(GPTBlock):
    """A leaf has a forward of its own, another one is called with a keyword."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout=dropout)
        own = self.up.forward
        self.up.forward = lambda x: own(x) * 2

    def forward(self, x):
        return x + self.down(input=F.gelu(self.up(self.out(self.norm1(x)))))


class Between(nn.Module):
    """Products before its first leaf, behind its last one, and under a mode of its own."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.line, self.drop = nn.Linear(32, 32), nn.Dropout(dropout)

    def forward(self, x):
        y = torch.tanh(torch.exp(-(x @ x.mT)) @ x)
        with Entered():
            y = self.drop(self.line(y))
            y = torch.sin(y @ y.mT) @ y
        return x + F.scaled_dot_product_attention(y[:, None], x[:, None], x[:, None])[:, 0].sin()


class Masked(GPTBlock):
    """Attention with a mask, by keyword, with dropout, twice in a row, its result written to."""

    def forward(self, x):
        batch, length, width = x.shape
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        h = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = h.permute(2, 0, 3, 1, 4)
        one = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        p = self.drop.p if self.training else 0.0
        two = F.scaled_dot_product_attention(query=one, key=k, value=v.contiguous(), dropout_p=p)
        two *= 0.5
        x = x + self.drop(self.out(two.transpose(1, 2).reshape(x.shape)))
        y = x.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(self.norm2(x)[:, None], x[:, None], x[:, None], None, p)
        return x + self.down(F.gelu(self.up(y[:, 0])))


class Grouped(GPTBlock):
    """Queries in float32, which autocast casts to what looks like the result; fewer keys."""

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        q, k, v = q.float().sin(), k[:, :2].float().sin(), v[:, :2]
        mixed = F.scaled_dot_product_attention(q, k.to(v.dtype), v, enable_gqa=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class Alone(GPTBlock):
    """One call of attention in each stretch, the second one with dropout."""

    def forward(self, x):
        y = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]
        h = self.out(self.drop(y))[:, None]
        p = self.drop.p if self.training else 0.0
        y = F.scaled_dot_product_attention(h, h, h, dropout_p=p, scale=0.3)[:, 0]
        return x + self.drop(self.down(F.gelu(self.up(y))))


@pytest.mark.parametrize("loss_fn", [token_loss, autocast_loss])
@pytest.mark.parametrize(
    "block",
    [
        *(GPTBlock, Between, Masked, Alone, Shared, Square, Crossed, Remade, Inferring, Force),
        *(Written, WrittenProduct, Sometimes, Patched, Grouped),
    ],
)
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_bits(has_compiled, block, loss_fn, share):
    plain, selective = with_and_without_selective(block, loss_fn, share, steps=4)
    assert differences(plain, selective) == []
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("loss_fn", [token_loss, autocast_loss])
def test_what_is_kept_does_not_run_again(has_compiled, loss_fn):
    counts = []
    for what in ("blocks", EVERYTHING):
        model, _, batch = make("gpt")
        with Recompute(model, what):
            kinds = ran_in_backward(model, loss_fn, batch)
        counts.append((kinds.count("attention"), kinds.count("product")))
    # Of the products of each block, the last is never waited for.
    assert counts[0][0] - counts[1][0] == 3
    assert counts[0][1] - counts[1][1] == 3 * 3


def test_convolutions_do_not_run_again():
    model, _, batch = make("resnet")
    with Recompute(model, EVERYTHING):
        assert ran_in_backward(model, image_loss, batch).count("convolution") == 0


def test_nothing_but_attention_is_looked_for(has_compiled, monkeypatch):
    """The products are those of layers, whose calls are left out."""
    seen = []
    keeping = KeptResults.keeping

    def noted(self):
        seen.append(self._choice)
        return keeping(self)

    monkeypatch.setattr(KeptResults, "keeping", noted)
    model, loss_fn, batch = make("gpt")
    with Recompute(model, EVERYTHING):
        for _ in range(2):
            loss_fn(model, batch).backward()
    # The first block's first call is measured.
    assert seen == ([(True,)] * 5 if has_compiled else [])


def test_casts_are_made_again_and_not_kept():
    def kept(share):
        model, _, batch = make("gpt")
        with Recompute(model, RecomputeOptions(selective=True, share=share)) as recompute:
            autocast_loss(model, batch).backward()
            with Live() as live:
                loss = autocast_loss(model, batch)
            held = live.live_bytes([*model.parameters(), batch, loss])
            return held, recompute._kinds[0].choice.kept_bytes

    (nothing, _), (something, said) = kept(0.0), kept(1.0)
    assert something - nothing == 3 * said


def test_the_leaves_are_as_they_were():
    model, loss_fn, batch = make("gpt")
    with Recompute(model, EVERYTHING):
        for _ in range(2):
            loss = loss_fn(model, batch)
            inner = [m for b in model.blocks for m in b.modules() if m is not b]
            assert not any("forward" in vars(module) for module in inner)
            loss.backward()
            assert not any("forward" in vars(module) for module in inner)


def test_an_error_within_leaves_nothing_behind():
    model, _, batch = make("gpt")
    depth = torch._C._len_torch_dispatch_stack()
    with Recompute(model, EVERYTHING):
        token_loss(model, batch).backward()
        model.blocks[1].out.weight.data = torch.ones(3, 3)
        with pytest.raises(RuntimeError, match="shape"):
            token_loss(model, batch)
    assert torch._C._len_torch_dispatch_stack() == depth
    assert "forward" not in vars(model.blocks[1].out)


class UnderModes(GPTBlock):
    """Enters modes that end in another stretch than they begin in."""

    def forward(self, x):
        batch, length, width = x.shape
        with Entered():
            parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        with Entered():
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(x.shape)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


def test_modes_that_the_block_enters_itself(has_compiled):
    torch.manual_seed(0)
    model = GPT(block=UnderModes, dropout=0.2)
    expected = train(copy.deepcopy(model), token_loss, tokens())
    with Recompute(model, EVERYTHING):
        assert differences(expected, train(model, token_loss, tokens())) == []
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("is_module", [False, True])
def test_leaves_that_the_compiler_looks_at_are_left_alone(is_module):
    class Partly(GPTBlock):
        def __init__(self, dropout=0.0):
            super().__init__(dropout=dropout)
            if is_module:
                self.up.compile(backend=counting)
            else:
                self.mlp = torch.compile(self.mixed, backend=counting)

        def mixed(self, x):
            return self.down(F.gelu(self.up(x)))

        def forward(self, x):
            return x + (self.mixed if is_module else self.mlp)(torch.sin(self.out(self.norm2(x))))

    compiled = []

    def counting(graph, _):
        if "linear" in graph.code:
            compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.manual_seed(0)
    expected = train(GPT(block=Partly), token_loss, tokens())
    num_compiled = len(compiled)
    torch.manual_seed(0)
    model = GPT(block=Partly)
    with Recompute(model, EVERYTHING):
        assert differences(expected, train(model, token_loss, tokens())) == []
    assert len(compiled) <= 2 * num_compiled


def test_what_draws_and_is_left_out_leaves_the_generator_behind_it():
    """As attention with dropout does on a GPU; on a CPU it is computed in parts."""

    class Second:
        position = 0

        def give(self, tensors):
            assert tensors == []

    x = torch.ones(3)
    torch.rand(2)
    behind = DrawnFrom()
    expected = torch.rand(4)
    call = NotedCall([x], x + 1, 0, [], keeps=True, drawn=behind)
    torch.manual_seed(1)
    assert call.fits(Second(), x)
    assert torch.equal(call.given(Second(), [x]), x + 1)
    assert torch.equal(torch.rand(4), expected)
    assert draws((x, x, x, None, 0.1), {})
    assert draws((x, x, x), {"dropout_p": 0.1})
    assert not draws((x, x, x), {"is_causal": True})
