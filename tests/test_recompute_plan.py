"""The planner: what it says that is kept is kept, and what fits is chosen."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from recomputed import GPT, kept_with, make, token_loss, tokens
from torchfast import (
    RecomputeChoice,
    RecomputeOptions,
    RecomputePlan,
    plan_recompute,
)
from torchfast._core.compare import differences
from torchfast.memory.block_costs import CostMeter
from torchfast.memory.kept_results import Result, choose_kept
from torchfast.memory.recompute import block_forwards
from torchfast.memory.recompute_plan import fixed_bytes
from torchfast.memory.recompute_times import peak_rises


@pytest.mark.parametrize("name", ["gpt", "gpt with dropout", "llama", "vit", "resnet"])
def test_what_is_said_is_what_is_kept(name):
    if name in ("llama", "vit"):
        pytest.importorskip("transformers")
    model, loss_fn, batch = make(name)
    plan = plan_recompute(model.train(), loss_fn, batch, memory_gb=1.0, repeats=1)
    names = [choice.name for choice in plan.choices]
    assert sorted(names) == [
        "blocks", "blocks, one of 2", "none", "selective", "selective, one of 2",
    ]  # fmt: skip
    for choice in plan.choices:
        kept = kept_with(choice.recompute, model, loss_fn, batch)
        assert choice.saved_bytes == pytest.approx(kept, rel=0.1), choice.name
        # It is exact, but for what tensors of the host's own take.
        assert abs(choice.saved_bytes - kept) <= 1024, choice.name


class OnTheBatch(nn.Module):
    """Its first block is given the batch itself, or a view of it."""

    def __init__(self, block, view):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head, self.view = nn.Linear(64, 3), view

    def forward(self, x):
        x = x.flatten(1) if self.view else x
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class PreNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class NoNorm(PreNorm):
    def forward(self, x):
        return x + self.down(self.up(x))


class PostNorm(PreNorm):
    def forward(self, x):
        return self.norm(x + self.down(F.gelu(self.up(x))))


class OneLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return F.gelu(self.layer(x))


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("block", [PreNorm, NoNorm, PostNorm, OneLayer])
def test_a_block_that_is_given_the_batch_tells_little_of_the_others(block, view):
    torch.manual_seed(0)
    model = OnTheBatch(block, view)
    batch = torch.randn(512, 64), torch.randint(3, (512,))
    loss_fn = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    plan = plan_recompute(model, loss_fn, batch, memory_gb=1.0, repeats=1)
    for choice in plan.choices:
        kept = kept_with(choice.recompute, model, loss_fn, batch)
        # A block that ends in a norm keeps its statistics, of which the planner does not know.
        statistics = 4 * 2 * 512 * 4 if block is PostNorm else 0
        assert abs(choice.saved_bytes - kept) <= statistics + 1024, choice.name


def test_the_model_is_as_it_was():
    model, loss_fn, batch = make("resnet")
    model.eval()
    loss_fn(model, batch).backward()
    before = copy.deepcopy(model.state_dict())
    gradients = [p.grad for p in model.parameters()]
    rng = torch.get_rng_state()
    attributes = [dict(vars(module)) for module in model.modules()]
    plan_recompute(model, loss_fn, batch, memory_gb=1.0, repeats=1)
    assert differences(before, dict(model.state_dict())) == []
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(rng, torch.get_rng_state())
    assert not any(module.training for module in model.modules())
    assert [dict(vars(module)) for module in model.modules()] == attributes


def plan_of(memory_bytes, fixed=100):
    choices = [
        RecomputeChoice(name=name, recompute=recompute, saved_bytes=saved, step_ms=ms,
                        fits=fixed + saved <= memory_bytes)
        for name, recompute, saved, ms in [
            ("none", False, 1000, 10.0), ("selective", "selective", 500, 11.0),
            ("blocks", "blocks", 100, 13.0),
        ]
    ]  # fmt: skip
    return RecomputePlan(choices=tuple(choices), fixed_bytes=fixed, memory_bytes=memory_bytes)


@pytest.mark.parametrize(
    ("memory", "name"), [(1100, "none"), (1099, "selective"), (599, "blocks"), (199, None)]
)
def test_the_fastest_that_fits_is_chosen(memory, name):
    plan = plan_of(memory)
    assert (plan.choice.name if plan.choice else None) == name
    text = str(plan)
    assert ("<- chosen" in text) == (name is not None)
    assert ("nothing fits: blocks needs" in text) == (name is None)


def test_the_memory_decides_on_a_real_model():
    model, loss_fn, batch = make("gpt")
    roomy = plan_recompute(model, loss_fn, batch, memory_gb=1.0, repeats=1)
    least = min(roomy.choices, key=lambda choice: choice.saved_bytes)
    tight = (roomy.fixed_bytes + least.saved_bytes) / 1e9
    assert plan_recompute(model, loss_fn, batch, memory_gb=math.inf, repeats=1).choice is not None
    assert roomy.choice.name == "none" or roomy.choice.step_ms <= roomy.choices[0].step_ms
    found = plan_recompute(model, loss_fn, batch, memory_gb=tight, repeats=1)
    assert found.choice.recompute == "blocks"
    assert plan_recompute(model, loss_fn, batch, memory_gb=1e-6, repeats=1).choice is None


def test_the_peak_decides_where_a_device_tells_it(monkeypatch):
    """Temporary results, such as the gradient of logits, are saved by nobody."""
    model, loss_fn, batch = make("gpt")
    roomy = plan_recompute(model, loss_fn, batch, memory_gb=1.0, repeats=1)
    assert all(choice.needed_bytes is None for choice in roomy.choices)
    assert "peak GiB" not in str(roomy)
    gradients = sum(p.nbytes for p in model.parameters())
    # In the order of the ways: none, selective by two, selective, blocks by two, blocks.
    rises = [5 * 10**6, None, 3 * 10**6, 2 * 10**6, 10**6]
    monkeypatch.setattr("torchfast.memory.recompute_plan.peak_rises", lambda *_: rises)
    needed = roomy.fixed_bytes - gradients + 2 * 10**6
    found = plan_recompute(model, loss_fn, batch, memory_gb=needed / 1e9, repeats=1)
    needs = {choice.name: choice.needed_bytes for choice in found.choices}
    assert needs["blocks, one of 2"] == needed
    assert needs["none"] == needed + 3 * 10**6
    assert needs["selective, one of 2"] is None  # not told
    fits = {choice.name for choice in found.choices if choice.fits}
    assert fits == {"selective, one of 2", "blocks, one of 2", "blocks"}
    assert "peak GiB" in str(found)
    assert f" {needed / 2**30:>10.4f}" in str(found)
    rises[1:] = [None] + [10**9] * 3
    tight = plan_recompute(model, loss_fn, batch, memory_gb=1e-6, repeats=1)
    assert tight.choice is None
    assert "nothing fits: selective, one of 2 needs" in str(tight)  # by what is saved


@pytest.mark.parametrize(("device_gb", "fits"), [(0.9, True), (1.0, False), (1.1, False)])
def test_what_has_run_out_of_memory_fits_into_a_larger_device_only(monkeypatch, device_gb, fits):
    """By what is saved it would fit: what ran out is what nobody saves."""
    model, loss_fn, batch = make("gpt")
    rises = [math.inf, *[10**6] * 4]
    planning = "torchfast.memory.recompute_plan"
    monkeypatch.setattr(f"{planning}.peak_rises", lambda *_: rises)
    monkeypatch.setattr(f"{planning}.device_bytes", lambda _: int(device_gb * 1e9))
    found = plan_recompute(model, loss_fn, batch, memory_gb=1.0, repeats=1)
    (none,) = [choice for choice in found.choices if choice.name == "none"]
    assert (none.fits, none.needed_bytes) == (fits, None)
    assert (found.choice.name == "none") == fits
    needed = found.fixed_bytes - sum(p.nbytes for p in model.parameters()) + 2 * 10**9
    rises[1:] = [2 * 10**9, *[3 * 10**9] * 3]
    text = str(plan_recompute(model, loss_fn, batch, memory_gb=1.0, repeats=1))
    asked = f"nothing fits: selective, one of 2 needs {needed / 2**30:.4f} GiB"
    assert (asked in text) != fits
    rises[:] = [math.inf] * 5
    text = str(plan_recompute(model, loss_fn, batch, memory_gb=1.0, repeats=1))
    assert ("nothing fits: all ran out of memory" in text) != fits


def test_the_peak_is_that_of_a_steady_step(monkeypatch):
    """Without the gradients of the one before, and in each way as it is then."""
    model = GPT(layers=2)
    kinds = [[], block_forwards([("blocks.0", model.blocks[0])], RecomputeOptions())]
    seen = []

    def step(batch):
        seen.append("forward" in vars(model.blocks[0]))
        if batch == "too large" and not seen[-1]:
            raise torch.OutOfMemoryError("no")
        model.zero_grad(set_to_none=True)
        token_loss(model, tokens()).backward()

    def allocated(device):
        assert all(p.grad is None for p in model.parameters())
        return 100

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: seen.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100 + 10 * len(seen))
    device = torch.device("cuda", 0)
    assert peak_rises(step, "small", model, kinds, device) == [30, 60]
    assert seen == [False, "reset", False, True, "reset", True]
    seen.clear()
    assert peak_rises(step, "too large", model, kinds, device) == [math.inf, 40]
    assert "forward" not in vars(model.blocks[0])
    assert peak_rises(step, "small", model, kinds, torch.device("cpu")) == [None, None]


def test_what_is_there_besides():
    model = nn.Linear(10, 10, bias=False)
    model.register_buffer("table", torch.zeros(5))
    assert fixed_bytes(model, None) == 400 + 20 + 400
    adam = torch.optim.Adam(model.parameters())
    assert fixed_bytes(model, adam) == 820 + 800  # not there yet
    model(torch.ones(1, 10)).sum().backward()
    adam.step()
    assert fixed_bytes(model, adam) == 820 + 800 + 4  # and the counter of its steps
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert fixed_bytes(model, sgd) == 820 + 400
    model.weight.requires_grad_(False)
    assert fixed_bytes(model, None) == 420


class Dense(nn.Module):
    """Each block is called with all that came before it."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, *earlier):
            return F.gelu(self.layer(sum(earlier)))

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(6))

    def forward(self, x):
        found = [x]
        for block in self.blocks:
            found.append(block(*found))
        return found[-1]


def test_calls_with_more_tensors_are_no_better_ones(monkeypatch):
    looked = []
    run = CostMeter.run
    monkeypatch.setattr(CostMeter, "run", lambda self, *args: looked.append(1) or run(self, *args))
    loss_fn = lambda model, x: model(x).square().mean()  # noqa: E731
    plan_recompute(Dense(), loss_fn, torch.randn(4, 8), memory_gb=1.0, repeats=1)
    in_the_probe = len(looked) - 3  # of the ways that are selective
    assert in_the_probe == 1


def test_the_state_of_an_optimizer_that_nobody_knows_is_guessed():
    class Own(torch.optim.AdamW):
        def step(self, closure=None):
            raise AssertionError("it may do anything")

    model = nn.Linear(10, 10, bias=False)
    assert fixed_bytes(model, Own(model.parameters())) == 800 + 800
    # One that cannot do without a closure is torch's, and guessed all the same.


def test_what_makes_the_optimizer_will_do():
    model, loss_fn, batch = make("gpt")
    make_optimizer = partial(torch.optim.AdamW, lr=1e-3)
    plan = plan_recompute(model, loss_fn, batch, memory_gb=1.0, repeats=1, optimizer=make_optimizer)
    assert plan.fixed_bytes == fixed_bytes(model, make_optimizer(model.parameters()))
    assert plan.fixed_bytes > fixed_bytes(model, None)


def test_modules_that_are_named_are_planned_for():
    model, loss_fn, batch = make("gpt")
    plan = plan_recompute(
        model, loss_fn, batch, memory_gb=1.0, repeats=1, regions=("blocks.0", "blocks.1")
    )
    assert {choice.name: choice.recompute for choice in plan.choices} == {
        "none": False,
        "selective": RecomputeOptions(regions=("blocks.0", "blocks.1"), selective=True),
        "selective, one of 2": RecomputeOptions(
            regions=("blocks.0", "blocks.1"), selective=True, every=2
        ),
        "blocks": RecomputeOptions(regions=("blocks.0", "blocks.1")),
        "blocks, one of 2": RecomputeOptions(regions=("blocks.0", "blocks.1"), every=2),
    }
    for choice in plan.choices:
        kept = kept_with(choice.recompute, model, loss_fn, batch)
        assert abs(choice.saved_bytes - kept) <= 1024, choice.name


def test_results_are_kept_by_what_they_cost():
    attention = Result("attention", 100, 1.0)
    cheap, dear = Result("product", 100, 1e3), Result("product", 100, 1e6)
    useless = Result("product", 1, 1e9, is_needed=False)
    results = [cheap, attention, dear, useless]
    assert choose_kept(results, 1000, 0, 0.2).kept == (False, True, True, False)
    assert choose_kept(results, 1000, 0, 1.0).kept == (True, True, True, False)
    assert choose_kept(results, 1000, 150, 0.2).kept == (False, False, False, False)


def test_autocast_keeps_less():
    model = GPT()
    plain = plan_recompute(model, token_loss, tokens(), memory_gb=1.0, repeats=1)
    half = plan_recompute(
        model, token_loss, tokens(), memory_gb=1.0, repeats=1, autocast=torch.bfloat16
    )

    def blocks(plan):
        return next(c for c in plan.choices if c.name == "none").saved_bytes

    assert blocks(half) < blocks(plain)


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ValueError, match="no blocks of the model repeat"):
        plan_recompute(nn.Linear(2, 2), token_loss, tokens(), memory_gb=1.0)
    with pytest.raises(ValueError, match="memory_gb must be > 0"):
        plan_recompute(GPT(), token_loss, tokens(), memory_gb=0)
    with pytest.raises(TypeError, match="loss_fn must be callable"):
        plan_recompute(GPT(), None, tokens(), memory_gb=1)
    recurrent = nn.Sequential(nn.LSTM(4, 4))
    with pytest.raises(ValueError, match=r"name modules instead: regions=\('0',\)"):
        plan_recompute(recurrent, token_loss, tokens(), memory_gb=1)
    for wrong in ("adam", partial(list)):
        with pytest.raises(TypeError, match="optimizer must be an Optimizer, a call"):
            plan_recompute(GPT(), token_loss, tokens(), memory_gb=1, optimizer=wrong)
    for wrong in ("bf16", torch.int64):
        with pytest.raises(TypeError, match="autocast must be a dtype such as"):
            plan_recompute(GPT(), token_loss, tokens(), memory_gb=1, autocast=wrong)
