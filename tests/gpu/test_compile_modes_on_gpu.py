"""Modes, kernels of one's own and caches of compiled steps, on a real device."""

from __future__ import annotations

import gc
import json
import logging
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity

from benchmarks import compile_cost
from benchmarks.workloads.gpt import GPT, GPTSize
from benchmarks.workloads.resnet import ResNet, ResNetSize
from benchmarks.workloads.tokens import next_token_loss
from gpu.compile_jobs import (
    FAST,
    SIZE,
    STEPS,
    WARM_UP,
    assert_captured,
    image_loss,
    nothing_compiled,
    text,
    trained_on_gpu,
)
from gpu.graph_jobs import on_gpu
from torchfast import CompileOptions, MicroBatches
from torchfast.compiler import mode_search
from torchfast.compiler.candidates import ModeChoice

CUDA = ProfilerActivity.CUDA


@pytest.fixture(autouse=True)
def _nothing_compiled_is_left():
    with nothing_compiled():
        yield


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own first one
def test_reduce_overhead_without_a_graph_keeps_the_losses():
    """Its own graphs write each step's loss over that of the step before."""
    plan = FAST.replace(compile=CompileOptions(mode="reduce-overhead"), cuda_graph=False)
    trainer, plain = trained_on_gpu(plan), trained_on_gpu(FAST.replace(compile=False))
    batches = on_gpu(text(STEPS))
    losses = [trainer.step(batch) for batch in batches]
    expected = [plain.step(batch) for batch in batches]
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=0.02, atol=0)
    assert len({float(loss) for loss in losses}) == STEPS
    assert "replays" not in trainer.report().counters


class Judged(nn.Module):
    """Whose output is the loss, as models from elsewhere have it."""

    def forward(self, x, targets):
        return F.cross_entropy(x, targets)


class Judging(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.judge = nn.Linear(64, 10), Judged()

    def forward(self, x, targets):
        return self.judge(self.linear(x), targets)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own first one
def test_what_evaluations_return_can_be_read_after_others_and_gradients_stay():
    options = CompileOptions(mode="reduce-overhead", regions=("linear", "judge"))
    plans = (FAST.replace(compile=c, cuda_graph=False) for c in (options, False))
    made = partial(trained_on_gpu, make=Judging, loss_fn=lambda model, batch: model(*batch))
    trainer, plain = map(made, plans)
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, 32, 64, generator=generator)
    batches = on_gpu([(draw(), torch.arange(32) % 10) for _ in range(STEPS)])
    read = []
    for each in (trainer, plain):
        for batch in batches:
            each.forward_backward(batch)
            with torch.no_grad():
                kept = [each._step.compute_loss(other).loss for other in batches]
            each.update()
        read.append(torch.stack(kept))
    torch.testing.assert_close(*read, rtol=0.02, atol=0)


class Routed(nn.Module):
    """Asks the device in its middle, so that no graph can hold it whole."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.last = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))

    def forward(self, x):
        x = self.first(x)
        if x.abs().mean().item() > 1e3:
            x = x / 2
        return self.last(x)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own first one
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_cannot_be_captured_whole_is_captured_by_pieces(accumulate):
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, 32, 64, generator=generator)
    singles = on_gpu([(draw(), torch.arange(32) % 10) for _ in range(STEPS * accumulate)])
    groups = [singles[n : n + accumulate] for n in range(0, len(singles), accumulate)]
    batches = [MicroBatches(group) if accumulate > 1 else group[0] for group in groups]
    made = partial(trained_on_gpu, make=Routed, loss_fn=image_loss, accumulate=accumulate)
    whole = made(FAST)
    pieces = made(FAST.replace(compile=CompileOptions(mode="reduce-overhead"), cuda_graph=False))
    plain = made(FAST.replace(compile=False, cuda_graph=False))
    losses = [torch.stack([t.step(b) for b in batches]) for t in (whole, pieces, plain)]
    torch.testing.assert_close(losses[0], losses[2], rtol=0.02, atol=0)
    torch.testing.assert_close(losses[1], losses[2], rtol=0.02, atol=0)
    assert whole.report().counters["replays"] == 0
    with torch.profiler.profile(activities=[CUDA], acc_events=True) as trace:
        pieces.step(batches[0])
    launched = [e.name for e in trace.events() if e.name.startswith("cudaGraphLaunch")]
    assert len(launched) >= 4 * accumulate  # both sides of the question, forward and backward


def test_auto_times_replays_where_a_graph_holds_the_step(monkeypatch, caplog):
    def choices(device, *, has_blocks, outer_graph):
        assert outer_graph
        return [ModeChoice("eager", None, None), ModeChoice("whole: default", "default", "whole")]

    def pools():
        return {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}

    monkeypatch.setattr(mode_search, "mode_choices", choices)
    before = pools() | {(0, 0)}
    plan = FAST.replace(compile=CompileOptions(mode="auto", budget_s=120.0))
    trainer = trained_on_gpu(plan)
    batches = on_gpu(text(STEPS))
    with caplog.at_level(logging.INFO, logger="torchfast.compiled_loss"):
        trainer.forward_backward(batches[0])  # decides, and captures no step yet
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "timed as replays of a CUDA graph" in said
    assert "timed launched" not in said
    trainer._step.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    assert pools() <= before  # nothing is left of what was captured to be timed
    plain = trained_on_gpu(FAST.replace(compile=False))
    plain.forward_backward(batches[0])
    losses = [torch.stack([t.step(batch) for batch in batches]) for t in (trainer, plain)]
    torch.testing.assert_close(*losses, rtol=0.02, atol=0)
    assert trainer.report().counters["replays"] == STEPS - WARM_UP


def routed():
    at = (SIZE.vocabulary, SIZE.batch, SIZE.context)
    return GPT(GPTSize(6, 512, 8, *at, lr=1e-3, experts=32))


def deep():
    return ResNet(ResNetSize((3, 4, 6, 3), width=32, classes=100, lr=1e-3))


def images(count):
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(32, 3, 96, 96, generator=generator),
            torch.randint(0, 100, (32,), generator=generator),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("kind", ["routed", "deep"])
def test_auto_takes_no_rounding_for_an_error(monkeypatch, tmp_path, kind):
    """Experts get other tokens, and the first gradients of a deep ResNet are rounding."""
    make, loss_fn, batches = {
        "routed": (routed, next_token_loss, lambda: on_gpu(text(STEPS))),
        "deep": (deep, image_loss, lambda: on_gpu(images(STEPS))),
    }[kind]

    def choices(device, *, has_blocks, outer_graph):
        assert has_blocks
        return [ModeChoice("eager", None, None), ModeChoice("blocks: default", "default", "blocks")]

    monkeypatch.setattr(mode_search, "mode_choices", choices)
    options = CompileOptions(mode="auto", budget_s=200.0, cache=tmp_path)
    trainer = trained_on_gpu(FAST.replace(compile=options), make, loss_fn)
    for batch in batches():
        trainer.step(batch)
    trainer.close()
    (file,) = (f for f in tmp_path.rglob("*.json") if '"candidates"' in f.read_text())
    receipt = json.loads(file.read_text())
    (found,) = (c for c in receipt["candidates"] if c["name"] == "blocks: default")
    assert found["status"] == "measured", found
    assert found["is_replayed"]
    assert found["gradient_error"] > 0.05, found  # more than the table allows
    assert any("rounding alone" in note for note in receipt["notes"])


def test_reduce_overhead_within_a_graph_leaves_graphs_to_the_step():
    plan = FAST.replace(compile=CompileOptions(mode="reduce-overhead"))
    trainer = trained_on_gpu(plan)
    for batch in on_gpu(text(STEPS)):
        trainer.step(batch)
    assert_captured(trainer.report(), STEPS)
    details = [d.detail for d in trainer.report().decisions if d.lever == "compile"]
    assert any("'reduce-overhead' makes graphs of its own" in detail for detail in details)


def test_flex_attention_and_a_triton_kernel_stay_in_one_graph():
    pytest.importorskip("triton")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from gpu.compiled_kernels import squared_relu

    length, window = 256, 64

    def mask(_batch, _head, query, key):
        return (query >= key) & (query - key < window)

    block_mask = create_block_mask(mask, None, None, length, length, device="cuda")

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(64, 192, bias=False)
            self.out = nn.Linear(64, 64, bias=False)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
            mixed = flex_attention(q, k, v, block_mask=block_mask)
            return x + self.out(squared_relu(mixed.transpose(1, 2).flatten(2).contiguous()))

    class Plain(Attention):
        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
            at = torch.arange(length, device=x.device)
            seen = mask(None, None, at[:, None], at[None, :])
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            return x + self.out(F.relu(mixed.transpose(1, 2).flatten(2)).square())

    def loss_fn(model, batch):
        inputs, targets = batch
        return F.mse_loss(model(inputs), targets)

    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, 2, length, 64, generator=generator)
    batches = on_gpu([(draw(), draw()) for _ in range(STEPS)])
    plan = FAST.replace(compile=CompileOptions(regions="whole", fullgraph=True))
    trainer = trained_on_gpu(plan, Attention, loss_fn)
    plain = trained_on_gpu(FAST.replace(compile=False), Plain, loss_fn)
    losses = [torch.stack([t.step(batch) for batch in batches]) for t in (trainer, plain)]
    torch.testing.assert_close(*losses, rtol=0.02, atol=0)
    assert_captured(trainer.report(), STEPS)
    assert trainer.report().counters["compile_graphs"] == 1


def test_a_second_process_compiles_nothing_that_is_in_the_folder(tmp_path):
    out = tmp_path / "figures.json"
    figures = compile_cost.main(
        ["--size", "smoke", "--device", "cuda", "--sections", "warm", "--out", str(out)]
    )
    section = figures["sections"]["warm"]
    assert section["status"] == "ran", section
    cold, warm = section["rows"]
    assert cold["form"] == warm["form"] == "captured, compiled"
    assert cold["compile"].get("cache_autograd_hits", 0) == 0
    assert section["summary"]["proved"], (cold, warm)
