"""Norms that nobody but linear layers reads are left out of the second run, and nothing else is."""

from __future__ import annotations

import copy
import ctypes

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from recomputed import (
    GPT,
    GPTBlock,
    Live,
    token_loss,
    tokens,
    train,
    with_and_without_selective,
)
from torchfast import Recompute, RecomputeOptions
from torchfast._core.compare import differences
from torchfast.memory.deferred import Deferred, Like
from torchfast.memory.noted_call import NotedCall
from torchfast.memory.saved_tensor import Saved

EVERYTHING = RecomputeOptions(selective=True, share=1.0)


def autocast_loss(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return token_loss(model, batch)


@pytest.fixture
def norms_in_backward(monkeypatch):
    """Count the norms that run in a backward."""
    ran, forward = [], nn.LayerNorm.forward

    def counted(self, x):
        ran.append(1)
        return forward(self, x)

    monkeypatch.setattr(nn.LayerNorm, "forward", counted)

    def count(model, loss_fn, batch):
        loss_fn(model, batch).backward()
        loss = loss_fn(model, batch)
        ran.clear()
        loss.backward()
        return len(ran)

    return count


class Separate(nn.Module):
    """Three layers read one norm, as in a Llama."""

    def __init__(self, dropout=0.0, norm=nn.LayerNorm):
        super().__init__()
        self.norm1, self.norm2 = norm(32), norm(32)
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.last = nn.Linear(32, 32)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (layer(h)[:, None] for layer in (self.q, self.k, self.v))
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v)[:, 0]))
        return x + torch.tanh(self.last(self.norm2(x)))


class WithoutWeights(Separate):
    def __init__(self, dropout=0.0):
        super().__init__(dropout, lambda width: nn.LayerNorm(width, elementwise_affine=False))


class Gated(Separate):
    """Layers alone read the norm in the first call; in later ones others do as well."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout)
        self.num_calls = 0

    def forward(self, x):
        if torch._C._current_graph_task_id() == -1:
            self.num_calls += 1
        h = self.norm1(x)
        y = self.q(h) + self.k(h)
        match self.num_calls % 4:
            case 1:
                y = y * 2
            case 2:
                y = y + h
            case 3:
                y = y + self.v(h.transpose(0, 1)).transpose(0, 1) * torch.tanh(h)
            case 0:
                y = y + self.k(h[..., :32].roll(1, 1)) + Scaled.apply(h)
        return x + torch.sin(y)


class Scaled(torch.autograd.Function):
    """Saves what it gets, and reads it where torch's own modes do not see it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Halves(nn.Module):
    """Two layers read parts of a norm that look alike."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
        self.num_calls = 0

    def forward(self, x):
        if torch._C._current_graph_task_id() == -1:
            self.num_calls += 1
        h = self.norm(x)
        if self.num_calls == 1:
            return x + torch.sin(self.one(h) * self.two(h))
        low, high = h[:2], h[2:]
        return x + torch.sin(self.one(low) * self.two(high)).repeat(2, 1, 1)


@pytest.mark.parametrize("loss_fn", [token_loss, autocast_loss])
@pytest.mark.parametrize("block", [GPTBlock, Separate, WithoutWeights, Gated, Halves])
@pytest.mark.parametrize("share", [0.35, 0.5, 1.0])
def test_bits(block, loss_fn, share):
    plain, selective = with_and_without_selective(block, loss_fn, share, steps=6)
    assert differences(plain, selective) == []


@pytest.mark.parametrize("loss_fn", [token_loss, autocast_loss])
@pytest.mark.parametrize("block", [GPTBlock, Separate, WithoutWeights])
def test_norms_do_not_run_again(norms_in_backward, block, loss_fn):
    counts = []
    for what in ("blocks", EVERYTHING):
        torch.manual_seed(0)
        model = GPT(block=block)
        with Recompute(model, what):
            counts.append(norms_in_backward(model, loss_fn, tokens()))
    assert counts == [6, 0]


def test_layers_that_run_again_take_what_is_kept_of_the_norm(norms_in_backward):
    """Whatever the share: a norm that is kept does not run, be its readers kept or not."""
    was_fed = False
    for share in (0.3, 0.35, 0.4, 0.5, 0.6):
        torch.manual_seed(0)
        model = GPT(block=Separate)
        options = RecomputeOptions(selective=True, share=share)
        with Recompute(model, options) as recompute:
            num_run = norms_in_backward(model, autocast_loss, tokens())
            choice = recompute._kinds[0].choice
        kinds = {"norm": [], "product": [], "attention": []}
        for result, kept in zip(choice.results, choice.kept, strict=True):
            kinds[result.kind].append(kept)
        assert num_run == 3 * kinds["norm"].count(False)
        was_fed |= kinds["norm"][0] and not all(kinds["product"][:3])
    assert was_fed


def test_what_is_kept_is_once_what_all_readers_see():
    def held(share):
        torch.manual_seed(0)
        model, batch = GPT(block=Separate), tokens()
        options = RecomputeOptions(selective=True, share=share)
        with Recompute(model, options) as recompute:
            autocast_loss(model, batch).backward()
            with Live() as live:
                loss = autocast_loss(model, batch)
            kept = live.live_bytes([*model.parameters(), batch, loss])
            return kept, recompute._kinds[0].choice

    (nothing, _), (something, choice) = held(0.0), held(1.0)
    norms = [result for result in choice.results if result.kind == "norm"]
    assert len(norms) == 2
    numel = 4 * 16 * 32
    # Half of its width, and two statistics for each token.
    assert {norm.size_bytes for norm in norms} == {numel * 2 + 4 * 16 * 2 * 4}
    assert something - nothing == 3 * choice.kept_bytes


class Reused(nn.Module):
    """Writes to a norm's result when the layer has read it."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.line = nn.LayerNorm(32), nn.Linear(32, 32)
        self.is_written = False

    def forward(self, x):
        h = self.norm(x)
        y = self.line(h)
        if self.is_written:
            h.mul_(0.5)
        return x + torch.sin(y)


def test_a_kept_tensor_that_is_written_to_is_an_error_as_without():
    model = GPT(block=Reused)
    for what in (None, EVERYTHING):
        recompute = None if what is None else Recompute(model, what)
        for block in model.blocks:
            block.is_written = False
        token_loss(model, tokens()).backward()
        for block in model.blocks:
            block.is_written = True
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            token_loss(model, tokens()).backward()
        if recompute is not None:
            recompute.close()


class ReusedBetween(Reused):
    """Writes to it between one layer and another."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.other = nn.Linear(32, 32)

    def forward(self, x):
        h = self.norm(x)
        y = self.line(h)
        if self.is_written:
            h.mul_(0.5)
        return x + torch.sin(y * self.other(h))


@pytest.mark.parametrize("kind", [Reused, ReusedBetween])
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_what_is_not_kept_itself_may_be_written_to(kind, share):
    """Under autocast the layer keeps a cast of it."""
    results = []
    for what in (None, RecomputeOptions(selective=True, share=share)):
        torch.manual_seed(0)
        model = GPT(block=kind)
        recompute = None if what is None else Recompute(model, what)
        autocast_loss(model, tokens()).backward()
        for block in model.blocks:
            block.is_written = True
        results.append(train(model, autocast_loss, tokens()))
        if recompute is not None:
            recompute.close()
    assert differences(*results) == []


def test_a_deferred_tensor_is_computed_once_when_somebody_looks():
    made = []

    def compute():
        made.append(1)
        return torch.arange(6.0).view(2, 3)

    def deferred():
        return Deferred(compute, Like.of(torch.empty(2, 3)), requires_grad=True)

    tensor = deferred()
    assert (tensor.shape, tensor.dtype, tensor.requires_grad) == ((2, 3), torch.float32, True)
    assert not made
    assert torch.equal((tensor + 1).detach(), torch.arange(1.0, 7.0).view(2, 3))
    assert torch.equal(tensor.view(6)[1:3].detach(), torch.tensor([1.0, 2.0]))
    assert made == [1]
    (tensor.exp().sum() + (deferred() @ torch.ones(3)).sum()).backward()
    torch.testing.assert_close(tensor.grad, torch.arange(6.0).view(2, 3).exp())
    assert torch.equal(torch.zeros(2, 3).copy_(deferred()).detach(), compute())


def test_what_reads_the_memory_of_a_deferred_tensor_finds_it():
    def deferred():
        like = Like.of(torch.empty(2, 3))
        return Deferred(lambda: torch.arange(6.0).view(2, 3), like, requires_grad=True).detach()

    expected = torch.arange(6.0).view(2, 3)
    tensor = deferred()
    memory = (ctypes.c_float * 6).from_address(tensor.data_ptr())
    assert [*memory] == expected.flatten().tolist()
    assert deferred().untyped_storage().nbytes() == 24
    assert deferred().tolist() == expected.tolist()
    assert (deferred().numpy() == expected.numpy()).all()
    assert torch.equal(torch.from_dlpack(deferred()), expected)
    copied = copy.deepcopy(deferred())
    assert type(copied) is torch.Tensor
    assert torch.equal(copied, expected)


class LookedAt(nn.Module):
    """Looks at its norm in later calls, where autocast is off."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.line = nn.LayerNorm(32), nn.Linear(32, 32)
        self.is_looked_at = False

    def forward(self, x):
        h = self.norm(x)
        y = self.line(h)
        if self.is_looked_at:
            with torch.autocast("cpu", enabled=False):
                y = y + torch.tanh(h)
        return x + torch.sin(y)


def test_a_norm_that_is_computed_after_all_is_computed_under_its_own_autocast(monkeypatch):
    found, forward = [], nn.LayerNorm.forward

    def noted(self, x):
        found.append(torch.is_autocast_enabled("cpu"))
        return forward(self, x)

    monkeypatch.setattr(nn.LayerNorm, "forward", noted)
    model = GPT(block=LookedAt)
    with Recompute(model, EVERYTHING):
        autocast_loss(model, tokens()).backward()
        for block in model.blocks:
            block.is_looked_at = True
        autocast_loss(model, tokens()).backward()
    # In two forwards of three blocks, and for who looks in the backward of the second one.
    assert all(found)
    assert len(found) == 3 + 3 + 3


@pytest.mark.parametrize("num_parameters", [1, 2])
def test_statistics_are_not_taken_for_a_cast_of_the_weight(num_parameters):
    """As many tokens as the norm is wide, in bf16: on a GPU the statistics are float32."""

    class Second:
        def give(self, tensors):
            self.given = tensors

    x = torch.randn(2, 4, 8, dtype=torch.bfloat16)
    sources = [x, *(torch.ones(8, dtype=torch.bfloat16) for _ in range(num_parameters))]
    statistic = torch.randn(2, 4, 1)
    saved, second = Saved(statistic), Second()
    call = NotedCall(sources, x * 2, 0, [(saved, statistic)], keeps=True)
    call.given(second, sources)
    assert second.given == [None]
    assert torch.equal(saved.kept, statistic)
