"""Pools, room for experts, and which attention runs, on a CUDA device."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpu.syncs import no_syncs
from torchfast import CUDAGraphStep, MemoryMonitor, Plan, Trainer
from torchfast.memory import ExpertBuffers, MemoryPool, attention_backends, attention_report
from torchfast.memory.sources import CUDAMemory


def test_a_pool_holds_what_is_allocated_in_it_and_nothing_else():
    pool, other = MemoryPool("cache"), MemoryPool("other")
    with pool:
        cache = torch.zeros(3 << 20, device="cuda")
    with other:
        small = torch.zeros(1 << 20, device="cuda")
    outside = torch.zeros(5 << 20, device="cuda")
    statistics = pool.statistics()
    assert statistics.allocated_bytes >= cache.numel() * 4
    assert statistics.reserved_bytes >= statistics.allocated_bytes
    assert statistics.allocated_bytes < cache.numel() * 4 + (1 << 20)
    assert other.statistics().allocated_bytes >= small.numel() * 4
    before = statistics.reserved_bytes
    del cache, outside
    assert pool.statistics().allocated_bytes == 0
    with pool:
        again = torch.zeros(3 << 20, device="cuda")
    assert pool.statistics().reserved_bytes == before
    assert again.sum() == 0
    assert pool.decision.outcome == "applied"


def test_a_monitor_tells_what_pools_hold_and_how_much_is_of_graphs():
    gc.collect()  # graphs of other tests
    torch.cuda.empty_cache()
    source = CUDAMemory(torch.device("cuda", torch.cuda.current_device()))
    before = source.private_bytes()
    pool = MemoryPool("cache")
    monitor = MemoryMonitor("cuda", every=1)
    with pool:
        cache = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda")
    monitor.step()
    held = monitor.to_record()["named_pools"]["cache"]
    assert held["allocated_bytes"] == cache.numel()
    assert held["reserved_bytes"] == pool.statistics().reserved_bytes >= cache.numel()
    private = monitor.to_record()["pools"].get("private")
    assert private is None or private >= held["reserved_bytes"]  # of torch 2.13 and later
    assert source.private_bytes() == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = torch.empty(16 << 20, dtype=torch.uint8, device="cuda").zero_()
    assert source.private_bytes() >= before + kept.numel()
    del pool, cache
    assert "cache" not in monitor.to_record()["named_pools"]


def test_a_pool_steps_aside_in_a_capture():
    pool = MemoryPool("cache")

    def step(x):
        with pool:
            return (x * 2.0).sum()

    with pool:
        pass
    call = CUDAGraphStep(step, state=[], on_failure="raise")
    for k in range(12):
        assert float(call(torch.full((4,), float(k), device="cuda"))) == 8.0 * k


def mixture(buffers, experts, router, tokens):
    gates, chosen = router(tokens).softmax(-1).topk(2)
    rows, places = buffers.dispatch(tokens, chosen)
    outputs = torch.stack([expert(r) for expert, r in zip(experts, rows.unbind(), strict=True)])
    return buffers.combine(outputs, places, gates)


def test_experts_neither_wait_nor_need_other_memory_whatever_the_routing():
    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)).cuda()
    router = nn.Linear(64, 4).cuda()
    buffers = ExpertBuffers(4, 300, 64, device="cuda")

    def step(tokens):
        experts.zero_grad(set_to_none=True)
        router.zero_grad(set_to_none=True)
        loss = mixture(buffers, experts, router, tokens).square().mean()
        loss.backward()
        return loss.detach()

    batches = [torch.randn(512, 64, device="cuda") * (k + 1) for k in range(12)]
    for tokens in batches[:3]:
        step(tokens)
    peak = torch.cuda.max_memory_reserved()
    with no_syncs():
        expected = [step(tokens) for tokens in batches]
    assert torch.cuda.max_memory_reserved() == peak
    call = CUDAGraphStep(step, state=[experts, router], on_failure="raise")
    for tokens, loss in zip(batches, expected, strict=True):
        torch.testing.assert_close(call(tokens), loss)
    assert call.report().counters["replays"] > 0


def ran(q, **options):
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as profiler:
        F.scaled_dot_product_attention(q, q, q, **options)
    names = " ".join(event.name for event in profiler.events())
    for name in ("flash", "efficient", "cudnn"):
        if f"_scaled_dot_product_{name}_attention" in names:
            return name
    return "math"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": True}])
def test_the_report_is_what_runs(dtype, options):
    q = torch.randn(2, 4, 256, 64, device="cuda", dtype=dtype, requires_grad=True)
    if options.get("attn_mask"):
        options = {"attn_mask": torch.randn(256, 256, device="cuda", dtype=dtype)}
    report = attention_report(q, q, q, **options)
    assert report.backend == ran(q, **options)
    if dtype is torch.float32:
        assert "flash" in report.reasons
        # The first of its reasons is told.
        word = "mask" if options.get("attn_mask") is not None else "dtype"
        assert any(word in line.lower() for line in report.reasons["flash"])
    for name in report.usable:
        with attention_backends(name):
            assert attention_report(q, q, q, **options).backend == name == ran(q, **options)


def test_a_mask_is_a_reason_against_flash():
    q = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
    mask = torch.zeros(256, 256, device="cuda", dtype=torch.bfloat16)
    assert any(
        "mask" in line for line in attention_report(q, q, q, attn_mask=mask).reasons["flash"]
    )


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 192)

    def forward(self, x):
        parts = self.layer(x).unflatten(-1, (3, 1, 64)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*parts, is_causal=True)


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "as_given"])
def test_a_report_tells_which_attention_a_model_ran(monkeypatch, precision, cuda_graph):
    # What other tests of this process have compiled would be a reason not to look.
    monkeypatch.setattr("torchfast.memory.attention_watch._has_compiled", lambda: False)
    model = Attending().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan(precision=precision, cuda_graph=cuda_graph)
    with Trainer(model, optimizer, lambda m, x: m(x).square().mean(), plan) as trainer:
        for _ in range(8):
            trainer.step(torch.randn(2, 128, 64, device="cuda"))
        report = trainer.report()
    if cuda_graph:
        assert report.counters["replays"] >= 1
    (detail,) = [d.detail for d in report.decisions if d.lever == "attention"]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    q = torch.randn(2, 1, 128, 64, device="cuda", dtype=dtype, requires_grad=True)
    expected = ran(q, is_causal=True)
    assert f"the first forward ran {expected} once; 1 call of (2, 1, 128, 64) " in detail
    assert f"{str(dtype).removeprefix('torch.')}, causal at " in detail
    assert f": {expected}" in detail
    if precision == "as_given":
        assert expected == "efficient"
        assert "not flash: " in detail
        assert "dtype" in detail.lower()


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_a_report_tells_which_attention_compiled_code_ran(fresh_dynamo, cuda_graph):
    model = Attending().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan(precision="bf16", compile=True, cuda_graph=cuda_graph)
    with Trainer(model, optimizer, lambda m, x: m(x).square().mean(), plan) as trainer:
        for _ in range(8):
            trainer.step(torch.randn(2, 128, 64, device="cuda"))
        report = trainer.report()
    (detail,) = [d.detail for d in report.decisions if d.lever == "attention"]
    q = torch.randn(2, 1, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert f"its compiled parts (1) ran {ran(q, is_causal=True)} once" in detail
