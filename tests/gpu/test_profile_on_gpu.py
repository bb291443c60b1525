"""Profiles of a real device: phases against CUDA events, idle time against the trace, faults."""

from __future__ import annotations

import gc
import gzip
import json
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchfast import Plan, Trainer, profile
from torchfast.profiling.ceilings import measure_ceilings
from torchfast.profiling.verdict import largest_gaps

STEPS, WARMUP = 4, 4


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.second(F.gelu(self.first(x)))


def large(dtype=torch.bfloat16):
    """Work of some ten milliseconds a phase, so that the host is far ahead."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(2048) for _ in range(8)]).to("cuda", dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, optimizer, torch.randn(8192, 2048, device="cuda", dtype=dtype)


def kinds(report):
    return {finding.kind for finding in report.findings}


def raw_events(folder):
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        return json.load(file)["traceEvents"]


def test_phases_agree_with_cuda_events_within_2_percent(tmp_path):
    model, optimizer, inputs = large()
    marks = []

    def mark():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    with profile(tmp_path, steps=STEPS, warmup=WARMUP, lines=False) as profiling:
        for batch in profiling.iterate([inputs] * 100):
            events = [mark()]
            loss = model(batch).square().mean()
            events.append(mark())
            loss.backward()
            events.append(mark())
            optimizer.step()
            events.append(mark())
            optimizer.zero_grad()
            marks.append(events)
    torch.cuda.synchronize()
    measured = marks[WARMUP : WARMUP + STEPS]
    by_events = {
        phase: sum(events[i].elapsed_time(events[i + 1]) for events in measured)
        for i, phase in enumerate(("forward", "backward", "update"))
    }

    phases = {p.phase: p for p in profiling.report.figures.phases}

    for phase, by_event_ms in by_events.items():
        assert phases[phase].elapsed_us / 1e3 == pytest.approx(by_event_ms, rel=0.02), phase


def test_idle_is_the_window_less_the_union_of_the_trace(tmp_path):
    model, optimizer, inputs = large()
    with profile(tmp_path, steps=STEPS, warmup=WARMUP, lines=False, memory=False) as profiling:
        for batch in profiling.iterate([inputs] * 100):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            torch.cuda._sleep(1_000_000)

    figures = profiling.report.figures

    work = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in raw_events(tmp_path)
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    busy, reached = 0.0, work[0][0]
    for start, end in work:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    window = reached - work[0][0]
    assert figures.window_us == pytest.approx(window, rel=1e-3)
    assert figures.busy_us == pytest.approx(busy, rel=1e-3)
    assert figures.idle_us == pytest.approx(window - busy, rel=1e-2, abs=5.0)
    assert figures.idle_by_cause.get("sync", 0.0) > 0.0


def test_every_kernel_has_its_launch(tmp_path):
    model, optimizer, inputs = large()
    with profile(tmp_path, steps=STEPS, warmup=WARMUP, lines=False) as profiling:
        for batch in profiling.iterate([inputs] * 100):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    report = profiling.report

    assert {p.phase for p in report.figures.phases} == {"forward", "backward", "update"}
    assert all(each.call is not None for each in report.figures.launched)
    # Forward, gradients to the inputs and to the weights are products of the same size.
    by_phase = {
        p: sum(
            1
            for e in report.figures.launched
            if e.phase == p
            and e.work.kind == "kernel"  # some products fill a workspace first
            and any(s.name in ("aten::mm", "aten::addmm") for s in e.stack)
        )
        for p in ("forward", "backward")
    }
    assert by_phase["backward"] >= 1.8 * by_phase["forward"] > 0


def test_bf16_products_use_tensor_cores_and_float32_does_not(tmp_path):
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        model, optimizer, inputs = large(dtype)
        with profile(tmp_path / str(dtype), steps=2, warmup=3, lines=False) as profiling:
            for batch in profiling.iterate([inputs] * 100):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found[dtype] = profiling.report

    bf16, fp32 = found[torch.bfloat16], found[torch.float32]
    assert bf16.figures.tensor_core_us > 0.95 * bf16.figures.arithmetic_us > 0
    assert fp32.figures.no_tensor_core_us > 0.95 * fp32.figures.arithmetic_us > 0
    assert "fp32-matmul" in kinds(fp32)
    assert "fp32-matmul" not in kinds(bf16)
    assert fp32.verdict.name == "compute-bound"
    assert bf16.verdict.name in ("fine", "compute-bound", "bandwidth-bound")


def test_a_replay_is_one_phase_and_few_launches(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(64) for _ in range(8)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    trainer = Trainer(model, optimizer, lambda m, b: m(b).square().mean(), plan="exact")
    batches = [torch.randn(32, 64) for _ in range(60)]

    report = trainer.profile(batches, steps=6, warmup=20, folder=tmp_path, lines=False)

    assert "replay" in {p.phase for p in report.figures.phases}
    assert report.figures.num_kernels > 5 * report.figures.num_launches


def test_eager_small_steps_are_launch_bound(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(64) for _ in range(24)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False, fused=False)
    trainer = Trainer(
        model, optimizer, lambda m, b: m(b).square().mean(), plan=Plan(cuda_graph=False)
    )
    batches = [torch.randn(32, 64) for _ in range(60)]

    report = trainer.profile(batches, steps=6, warmup=5, folder=tmp_path, lines=False)

    assert report.verdict.name == "launch-bound"
    assert "tiny-kernels" in kinds(report)


def test_a_wait_is_found_with_its_line(tmp_path):
    model = nn.Sequential(*[Block(512) for _ in range(4)]).cuda()
    inputs = torch.randn(256, 512, device="cuda")

    def loop(batch):
        for block in model:
            batch = block(batch)
            batch.sum().item()  # four times a step

    with profile(tmp_path, steps=STEPS, warmup=WARMUP) as profiling:
        for batch in profiling.iterate([inputs] * 100):
            loop(batch)
    line = loop.__code__.co_firstlineno + 3

    report = profiling.report

    (wait,) = [f for f in report.findings if f.kind == "host-sync"]
    assert wait.figure == pytest.approx(4.0)
    assert wait.line is not None
    assert wait.line.endswith(f"test_profile_on_gpu.py:{line}")
    assert report.verdict.name in ("sync-bound", "launch-bound")


def test_gaps_have_the_line_that_the_host_was_at(tmp_path):
    model, optimizer, inputs = large()

    def loop(batch):
        loss = model(batch).square().mean()
        loss.backward()
        loss.item()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()

    with profile(tmp_path, steps=STEPS, warmup=WARMUP) as profiling:
        for batch in profiling.iterate([inputs] * 100):
            loop(batch)
    line = loop.__code__.co_firstlineno + 4

    report = profiling.report

    longest = largest_gaps(report.figures, STEPS)
    assert {gap.cause for gap in longest} == {"python"}
    assert all(gap.line.endswith(f"test_profile_on_gpu.py:{line}") for gap in longest)
    by_line = report.to_dict()["idle_by_line"][0]
    assert (by_line["cause"], by_line["line"]) == ("python", longest[0].line)
    assert by_line["ms"] > 19


def test_a_mask_is_told_from_other_waits(tmp_path):
    inputs = torch.randn(4096, 512, device="cuda")
    with profile(tmp_path, steps=STEPS, warmup=WARMUP) as profiling:
        for batch in profiling.iterate([inputs] * 100):
            for _ in range(4):
                batch[batch > 0].sum()

    assert "boolean-mask" in kinds(profiling.report)


def test_pageable_copies_and_hidden_ones(tmp_path):
    model, optimizer, inputs = large()
    side = torch.cuda.Stream()
    pinned = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(pinned, device="cuda")
    pageable = torch.empty(8 << 20, dtype=torch.uint8)
    with profile(tmp_path, steps=STEPS, warmup=WARMUP) as profiling:
        for batch in profiling.iterate([inputs] * 100):
            pageable.to("cuda")
            with torch.cuda.stream(side):
                target.copy_(pinned, non_blocking=True)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    report = profiling.report

    copies = {c.name: c for c in report.figures.copies if "HtoD" in c.name}
    (loud,) = [c for name, c in copies.items() if "Pageable" in name]
    (quiet,) = [c for name, c in copies.items() if "Pinned" in name]
    assert loud.num_bytes == STEPS * pageable.numel()
    assert quiet.num_bytes == STEPS * pinned.numel()
    assert quiet.hidden_us > 0.5 * quiet.total_us
    (finding,) = [f for f in report.findings if f.kind == "pageable-copies"]
    assert finding.figure == pytest.approx(pageable.numel())
    assert finding.line is not None
    assert "test_profile_on_gpu.py" in finding.line


def test_casts_are_found(tmp_path):
    inputs = torch.randn(64 << 20, device="cuda")
    with profile(tmp_path, steps=STEPS, warmup=WARMUP) as profiling:
        for batch in profiling.iterate([inputs] * 100):
            batch.to(torch.bfloat16).to(torch.float32).add_(1.0)

    assert profiling.report.figures.cast_us > 0.4 * profiling.report.figures.kernel_us
    assert "dtype-casts" in kinds(profiling.report)


def test_memory_and_roofline(tmp_path):
    gc.collect()  # models of other tests would be found, too
    model, optimizer, inputs = large()
    with profile(tmp_path, steps=2, warmup=3, lines=False, ceilings=True) as profiling:
        for batch in profiling.iterate([inputs] * 100):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    report = profiling.report

    use = report.memory[0]
    assert use.device == "cuda:0"
    assert sum(use.at_peak.values()) == use.peak_bytes
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    state = sum(
        value.numel() * value.element_size()
        for each in optimizer.state.values()
        for value in each.values()
        if value.is_cuda
    )
    assert use.least["parameters"] == use.most["parameters"] == pytest.approx(weights, rel=0.02)
    assert use.least["optimizer state"] == pytest.approx(state, rel=0.02)
    assert use.least["gradients"] == 0
    assert use.most["gradients"] == pytest.approx(weights, rel=0.02)
    assert use.most["inputs"] == pytest.approx(inputs.numel() * inputs.element_size(), rel=0.02)
    assert use.at_peak["activations"] > 0
    assert report.ceilings is not None
    rows = [row for row in report.roofline if row.dtype == "bfloat16"]
    assert rows
    assert all(0.1 < row.of_ceiling < 1.5 for row in rows[:3])


def test_ceilings_are_plausible():
    before = torch.backends.cuda.matmul.fp32_precision

    ceilings = measure_ceilings()

    assert torch.backends.cuda.matmul.fp32_precision == before
    assert ceilings.flops["bfloat16"] > 2 * ceilings.flops["float32"] > 1e12
    assert ceilings.bytes_a_second > 1e11
    has_float8 = torch.cuda.get_device_capability() >= (8, 9)
    for name in ("float8_e4m3fn", "float8_e5m2"):
        assert (name in ceilings.flops) == has_float8
        if has_float8:
            assert ceilings.flops[name] > 1.2 * ceilings.flops["bfloat16"]
