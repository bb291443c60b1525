"""Recompute on a device: bits, masks within a graph, memory and the planner."""

from __future__ import annotations

import functools
import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpu.requirements import requires
from recomputed import (
    GPT,
    GPTBlock,
    ResNet,
    RotaryBlock,
    as_if_compiled,
    image_loss,
    images,
    kept_with,
    make_or_skip,
    noted_layers,
    token_loss,
    tokens,
)
from torchfast import Plan, Recompute, RecomputeOptions, Trainer, plan_recompute
from torchfast._core.compare import differences

pytestmark = requires(gpus=1)

adamw = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)


class FlashBlock(GPTBlock):
    """Attention draws too."""

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        p = self.drop.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(x.shape)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


NETS = {
    "gpt": (functools.partial(GPT, dropout=0.2), token_loss, tokens),
    "flash": (functools.partial(GPT, dropout=0.2, block=FlashBlock), token_loss, tokens),
    "rotary": (functools.partial(GPT, dropout=0.2, block=RotaryBlock), token_loss, tokens),
    "resnet": (ResNet, image_loss, images),
}


def on_gpu(batch):
    return tuple(t.cuda() for t in batch) if isinstance(batch, tuple) else batch.cuda()


def run(name, plan, *, steps=8):
    net, loss_fn, data = NETS[name]
    torch.manual_seed(0)
    model = net().cuda()
    with Trainer(model, adamw(model.parameters()), loss_fn, plan) as trainer:
        torch.manual_seed(1)
        losses = [trainer.step(on_gpu(data(seed=n))).clone() for n in range(steps)]
        state = {k: v for k, v in trainer.state_dict().items() if k != "plan"}
        return {"losses": losses, "state": state}, trainer.report()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("what", ["blocks", "selective", RecomputeOptions(every=2)])
@pytest.mark.parametrize("name", list(NETS))
def test_bits_eagerly_and_in_a_graph(deterministic, name, what, precision):
    expected, _ = run(name, Plan(precision=precision))
    eager, _ = run(name, Plan(precision=precision, recompute=what))
    assert differences(expected, eager) == []
    captured, report = run(name, Plan(precision=precision, recompute=what, cuda_graph=True))
    assert report.counters["replays"] >= 1, str(report)
    assert differences(expected, captured) == []


@pytest.mark.parametrize(
    "what", ["blocks", "selective", RecomputeOptions(selective=True, share=1.0)]
)
@pytest.mark.parametrize("name", ["gpt", "flash"])
def test_the_generators_go_on_as_without(name, what):
    net, loss_fn, data = NETS[name]
    states = []
    for recompute in (None, what):
        torch.manual_seed(0)
        model = net().cuda().train()
        handle = None if recompute is None else Recompute(model, recompute)
        drawn = []
        for number in range(4):
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_fn(model, on_gpu(data(seed=number)))
            loss.backward()
            drawn += [torch.cuda.get_rng_state(), torch.get_rng_state(), loss.detach()]
        if handle is not None:
            handle.close()
        states.append(drawn)
    assert differences(*states) == []


@pytest.mark.parametrize("what", ["blocks", "selective"])
def test_a_capture_by_hand(deterministic, what):
    """Forward and backward in a graph of the user's own: as eager steps, masks included."""

    def made():
        torch.manual_seed(0)
        return GPT(dropout=0.2).cuda().train()

    batches = [tokens(seed=n).cuda() for n in range(5)]

    def step(model, batch):
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = token_loss(model, batch)
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    model = made()
    torch.cuda.manual_seed(7)
    expected = [step(model, batch) for batch in batches]

    model = made()
    with Recompute(model, what):
        static = batches[0].clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step(model, static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss, gradients = step(model, static)
        torch.cuda.manual_seed(7)
        for batch, (expected_loss, expected_gradients) in zip(batches, expected, strict=True):
            static.copy_(batch)
            graph.replay()
            assert torch.equal(loss, expected_loss)
            assert all(map(torch.equal, gradients, expected_gradients))


class RMSBlock(GPTBlock):
    """As in a Llama."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout=dropout)
        self.norm1, self.norm2 = nn.RMSNorm(32), nn.RMSNorm(32)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_as_many_tokens_as_the_norm_is_wide(deterministic, share):
    """In bf16 the statistics of a norm are float32, and of the size of its weight then."""
    torch.manual_seed(0)
    model = GPT(block=RMSBlock).cuda().bfloat16()
    batch = tokens().cuda()[:2]
    assert batch.numel() == 32

    def gradients():
        model.zero_grad(set_to_none=True)
        model(batch).float().square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients()
    with Recompute(model, RecomputeOptions(selective=True, share=share)):
        for _ in range(2):
            assert all(map(torch.equal, gradients(), expected))


class Ran(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_what_selective_keeps_does_not_run_again(precision):
    torch.manual_seed(0)
    model, batch = GPT().cuda(), tokens().cuda()

    def loss():
        with torch.autocast("cuda", precision, enabled=precision is not None):
            return token_loss(model, batch)

    def counted():
        loss().backward()
        once_more = loss()
        with Ran() as ran:
            once_more.backward()
        forwards = [name for name in ran.names if "backward" not in name]
        norms = sum(name == "aten::native_layer_norm" for name in forwards)
        return norms, sum("_scaled_dot_product" in name for name in forwards)

    with Recompute(model, "blocks"):
        assert counted() == (6, 3)
    with Recompute(model, RecomputeOptions(selective=True, share=1.0)):
        assert counted() == (0, 0)


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_what_leads_to_attention_does_not_run_again(monkeypatch, precision):
    """Float32 goes to another kernel of attention, which repeats keys and values first."""
    as_if_compiled(monkeypatch)
    layers, computed = noted_layers(monkeypatch)
    torch.manual_seed(0)
    model, batch = GPT(block=RotaryBlock).cuda(), tokens().cuda()
    with Recompute(model, RecomputeOptions(selective=True, share=1.0)) as recompute:
        for _ in range(2):
            with torch.autocast("cuda", precision, enabled=precision is not None):
                loss = token_loss(model, batch)
            layers.clear()
            loss.backward()
        choice = recompute._kinds[0].choice
    feeders = {m for b in model.blocks for m in (b.query, b.key, b.value)}
    if precision is not None:
        assert "with its inputs" in str(choice)
    if "with its inputs" in str(choice):
        assert not feeders & set(layers)
    assert not computed


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(256))

    def forward(self, x):
        return F.dropout(x * self.scale, 0.5, self.training).square()


def test_each_replay_draws_a_new_mask_and_the_second_run_the_same():
    """Else a column would get a gradient whose output was dropped, or the other way round."""
    columns = torch.zeros(256, dtype=torch.bool, device="cuda")

    def loss_fn(model, batch):
        out = model(batch)
        columns.copy_((out > 0).any(0))
        return out.sum()

    model = nn.Sequential(Dropping(), Dropping()).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    masks = []
    with Trainer(model, optimizer, loss_fn, Plan(recompute="blocks", cuda_graph=True)) as trainer:
        for _ in range(12):
            before = model[1].scale.detach().clone()
            trainer.step(torch.ones(1, 256, device="cuda"))
            assert torch.equal(model[1].scale.detach() != before, columns)
            masks.append(columns.clone())
        assert trainer.report().counters["replays"] >= 4
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(masks))


@pytest.mark.parametrize(("what", "share"), [("blocks", 0.25), ("selective", 0.5)])
def test_memory_that_the_device_really_holds(what, share):
    class Wide(GPT):
        def __init__(self):
            super().__init__(layers=1)
            self.embed = nn.Embedding(50, 512)
            self.blocks = nn.ModuleList(GPTBlock(512, 8) for _ in range(6))
            self.head = nn.Linear(512, 50)

    def held(recompute):
        torch.manual_seed(0)
        model, batch = Wide().cuda(), tokens(8, 512).cuda()
        handle = None if recompute is None else Recompute(model, recompute)
        for _ in range(2):
            before = torch.cuda.memory_allocated()
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                loss = token_loss(model, batch)
            after = torch.cuda.memory_allocated()
            loss.backward()
            model.zero_grad(set_to_none=True)
        if handle is not None:
            handle.close()
        return after - before

    plain, kept = held(None), held(what)
    head = 8 * 512 * 50 * 4 * 3  # logits and what the loss keeps, which no block does
    assert kept - head <= share * (plain - head), (kept, plain)


def test_the_planner_says_what_the_device_holds():
    torch.manual_seed(0)
    model = GPT(layers=6).cuda()
    batch = tokens(16, 128).cuda()
    optimizer = adamw(model.parameters())
    plan = plan_recompute(model, token_loss, batch, memory_gb=1.0, optimizer=optimizer)
    for choice in plan.choices:
        kept = kept_with(choice.recompute, model, token_loss, batch)
        assert choice.saved_bytes == pytest.approx(kept, rel=0.1), choice.name
        assert choice.step_ms > 0
        assert choice.is_measured
    times = {choice.name: choice.step_ms for choice in plan.choices}
    assert times["none"] <= times["blocks"]


@pytest.mark.parametrize("name", ["gpt with dropout", "llama", "vit", "resnet"])
def test_the_planner_says_what_models_of_all_kinds_keep_in_bf16(name):
    model, loss_fn, batch = make_or_skip(name)
    model, batch = model.cuda().train(), on_gpu(batch)

    def loss_in_bf16(model, batch):
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            return loss_fn(model, batch)

    plan = plan_recompute(model, loss_in_bf16, batch, memory_gb=1.0, repeats=1)
    for choice in plan.choices:
        kept = kept_with(choice.recompute, model, loss_in_bf16, batch)
        assert choice.saved_bytes == pytest.approx(kept, rel=0.1), choice.name


def test_the_peak_that_the_planner_says_is_that_of_training():
    """With logits over a vocabulary, whose gradients are saved by nobody and are what counts."""

    class Wide(GPT):
        def __init__(self):
            super().__init__(layers=1)
            self.embed, self.head = nn.Embedding(16_384, 512), nn.Linear(512, 16_384)
            self.blocks = nn.ModuleList(GPTBlock(512, 8) for _ in range(4))

    def built():
        torch.manual_seed(0)
        return Wide().cuda()

    batch = tokens(8, 512).cuda()
    with Trainer(built(), adamw, token_loss, Plan()) as trainer:
        trainer.step(batch)  # libraries make their workspaces
    del trainer
    gc.collect()
    model = built()
    plan = plan_recompute(
        model, token_loss, batch, memory_gb=80.0, optimizer=adamw(model.parameters()), repeats=1
    )
    del model
    assert len(plan.choices) == 7
    for choice in plan.choices:
        assert choice.needed_bytes > plan.fixed_bytes + choice.saved_bytes
        if choice.name not in ("none", "selective", "blocks"):
            continue
        gc.collect()
        base = torch.cuda.memory_allocated()
        with Trainer(built(), adamw, token_loss, Plan(recompute=choice.recompute)) as trainer:
            for _ in range(2):
                trainer.step(batch)
            torch.cuda.reset_peak_memory_stats()
            trainer.step(batch)
            peak = torch.cuda.max_memory_allocated() - base
        del trainer
        assert choice.needed_bytes == pytest.approx(peak, rel=0.05), choice.name


def test_the_planner_times_replays_where_a_graph_will_hold_the_step():
    torch.manual_seed(0)
    model = GPT(layers=6).cuda()
    batch = tokens(16, 128).cuda()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    launched, replayed = (
        plan_recompute(model, token_loss, batch, memory_gb=1.0, repeats=5, cuda_graph=cuda_graph)
        for cuda_graph in (False, True)
    )
    assert launched.is_eager
    assert not replayed.is_eager
    assert all(choice.is_measured for choice in replayed.choices)
    # Kernels this small are done long before the host has launched the next.
    for choice in replayed.choices:
        eager = next(other for other in launched.choices if other.name == choice.name)
        assert choice.step_ms < eager.step_ms
        assert choice.saved_bytes == eager.saved_bytes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("what", ["blocks", "selective"])
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_compiled_is_close(what, cuda_graph):
    expected, _ = run("resnet", Plan(), steps=6)
    plan = Plan(recompute=what, compile=True, cuda_graph=cuda_graph)
    found, report = run("resnet", plan, steps=6)
    assert not [d for d in report.stepped_aside if d.lever == "recompute"], str(report)
    assert report.counters["compile_graphs"] >= 1
    torch.testing.assert_close(
        torch.stack(found["losses"]), torch.stack(expected["losses"]), rtol=5e-2, atol=5e-2
    )
    tracked = found["state"]["model"]["stages.0.norm1.num_batches_tracked"]
    assert int(tracked) == 6


def test_a_memory_budget_saves_memory():
    def held(**options):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model, batch = GPT(layers=6).cuda(), tokens(16, 256).cuda()
        optimizer = adamw(model.parameters())
        with Trainer(model, optimizer, token_loss, Plan(compile=True, **options)) as trainer:
            for _ in range(3):
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                trainer.step(batch)
            return torch.cuda.max_memory_allocated() - before

    assert held(recompute=0.2) < held()
