"""Offloading on a CUDA device: the same bits, less memory, no waiting host, in a graph too."""

from __future__ import annotations

import gc
import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpu.syncs import forbid_syncs
from torchfast import CUDAGraphStep, Plan, Trainer
from torchfast.memory import ActivationOffload, OffloadedOptimizer

pytestmark = pytest.mark.usefixtures("deterministic")

WIDTH, ROWS, DEPTH = 512, 2048, 8  # an activation of 4 MiB


class Block(nn.Module):
    def __init__(self, width, recompute=False):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.recompute, self.rate = recompute, 0.1

    def inner(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.rate, self.training)

    def forward(self, x):
        if self.recompute:
            draws = self.rate > 0
            return checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=draws)
        return self.inner(x)


def built(recompute=False):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH, recompute) for _ in range(DEPTH))).cuda()


def batch(seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(ROWS, WIDTH, device="cuda", generator=generator)


def trained(model, offload, steps=4, call=None):
    """Return losses and parameters after some steps."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for seed in range(steps):
        x = batch(seed)
        with offload:
            loss = (call or model)(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


class Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("window", [None, 0, 1 << 24])
def test_the_bits_are_those_of_the_plain_step(recompute, window):
    expected = trained(built(recompute), Nothing())
    model = built(recompute)
    offload = ActivationOffload(model, window_bytes=window)
    found = trained(model, offload)
    assert all(map(torch.equal, expected, found))
    assert offload.counters()["offload_sent_bytes"] > 0


def test_memory_is_given_out_again_only_behind_the_copies():
    """With a bus kept busy, and memory of the same sizes asked for all the time."""
    expected = trained(built(), Nothing())
    model = built()
    offload = ActivationOffload(model, window_bytes=0)
    with offload:
        pass
    lane = offload._eager
    for stream in (lane.out, lane.back):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
    assert all(map(torch.equal, expected, trained(model, offload)))


def test_less_memory():
    peaks = []
    for context in (lambda model: Nothing(), lambda model: ActivationOffload(model)):
        model = built()
        offload = context(model)
        trained(model, offload, steps=2)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trained(model, offload, steps=1)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del model, offload
    assert peaks[1] < 0.7 * peaks[0]


def test_a_steady_step_neither_waits_nor_pins():
    model = built()
    offload = ActivationOffload(model)
    trained(model, offload)
    slabs = offload.counters()["offload_host_slabs"]
    x = batch()
    torch.cuda.synchronize()
    forbid_syncs(True)
    try:
        for _ in range(3):
            with offload:
                loss = model(x).square().mean()
            loss.backward()
    finally:
        forbid_syncs(False)
    assert offload.counters()["offload_host_slabs"] == slabs


def test_autocast_and_bf16():
    def call(model):
        def forward(x):
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                return model(x).float()

        return forward

    plain = built()
    expected = trained(plain, Nothing(), call=call(plain))
    model = built()
    offload = ActivationOffload(model)
    assert all(map(torch.equal, expected, trained(model, offload, call=call(model))))


def test_compiled_blocks():
    plain = built()
    for block in plain:
        block.compile(backend="aot_eager")
    expected = trained(plain, Nothing())
    model = built()
    for block in model:
        block.compile(backend="aot_eager")
    offload = ActivationOffload(model)
    assert all(map(torch.equal, expected, trained(model, offload)))
    assert offload.counters()["offload_sent_bytes"] > 0


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_graph_holds_the_copies(recompute, auto):
    def run(offload, graphed):
        model = built(recompute)
        if recompute:  # a capture does not let it look at the state of the generator
            for block in model:
                block.rate = 0.0
        context = offload(model)
        torch.manual_seed(5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad(set_to_none=True)
            with context:
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        call = step
        if graphed:
            call = CUDAGraphStep(step, state=[model, optimizer], on_failure="raise")
        losses = [call(batch(seed)) for seed in range(12)]
        result = [*(loss.clone() for loss in losses), *(p.detach() for p in model.parameters())]
        if graphed:
            assert call.report().counters["replays"] > 0
        return result, context

    expected, _ = run(lambda model: Nothing(), graphed=False)
    found, offload = run(partial(ActivationOffload, auto=auto), graphed=True)
    assert all(map(torch.equal, expected, found))
    assert offload._captured
    assert not auto or offload.choice.is_settled


def test_accumulation_and_a_backward_in_the_context():
    def run(context):
        model = built()
        offload = context(model)
        for seed in range(3):
            with offload:
                (model(batch(seed)).square().mean() / 3).backward()
        return [p.grad for p in model.parameters()]

    assert all(map(torch.equal, run(lambda model: Nothing()), run(ActivationOffload)))


def test_a_dropped_graph_frees_its_memory_behind_its_copies():
    model = built()
    offload = ActivationOffload(model, window_bytes=0)
    trained(model, offload, steps=1)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        with offload:
            loss = model(batch()).square().mean()
        del loss
    expected = trained(built(), Nothing(), steps=1)
    other = built()
    again = ActivationOffload(other, window_bytes=0)
    assert all(map(torch.equal, expected, trained(other, again, steps=1)))
    with offload:
        pass
    del expected, other, again
    gc.collect()
    assert torch.cuda.memory_allocated() < before + 4 * ROWS * WIDTH


def test_a_written_tensor_is_an_error():
    model = built()
    offload = ActivationOffload(model, window_bytes=0)
    with offload:
        x = batch().requires_grad_()
        y = x * 1.0
        z = y.sin().exp().exp()
    y.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_views_of_one_storage_and_other_dtypes():
    def run(offload):
        torch.manual_seed(0)
        weight = torch.randn(WIDTH, 3 * WIDTH, device="cuda", requires_grad=True)
        with offload:
            qkv = batch() @ weight
            q, k, v = (t.reshape(4, ROWS // 4, 8, -1).transpose(1, 2) for t in qkv.split(WIDTH, -1))
            attended = F.scaled_dot_product_attention(q.half(), k.half(), v.half()).float()
            loss = (F.dropout(attended, 0.5) * q).square().mean() + (q > 0).float().mul(q).sum()
        loss.backward()
        return weight.grad

    torch.manual_seed(3)
    expected = run(Nothing())
    offload = ActivationOffload(built(), window_bytes=0)
    torch.manual_seed(3)
    assert torch.equal(expected, run(offload))


def test_memory_stays_pinned_and_of_use_to_nobody_else():
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    offload = ActivationOffload(built(), max_host_bytes=1 << 26)
    model = offload._model
    trained(model, offload)
    counters = offload.counters()
    assert 0 < counters["offload_host_bytes"] <= 1 << 26
    assert offload._eager.pool._slabs[0].is_pinned()


@pytest.mark.parametrize("recompute", [False, True])
def test_what_hides_is_found_and_stays(recompute):
    expected = trained(built(recompute), Nothing(), steps=10)
    model = built(recompute)
    offload = ActivationOffload(model, auto=True)
    assert all(map(torch.equal, expected, trained(model, offload, steps=10)))
    choice = offload.choice
    assert choice.is_settled
    assert choice.is_hidden is not None
    assert 1e9 < choice.out_bytes_per_s < 1e12
    assert 1e9 < choice.back_bytes_per_s < 1e12
    assert 0 <= choice.sent_bytes < choice.saved_bytes
    before = offload.counters()
    x = batch()
    torch.cuda.synchronize()
    forbid_syncs(True)
    try:
        with offload:
            loss = model(x).square().mean()
        loss.backward()
    finally:
        forbid_syncs(False)
    after = offload.counters()
    assert after["offload_sent_bytes"] - before["offload_sent_bytes"] == choice.sent_bytes
    assert after["offload_host_slabs"] == before["offload_host_slabs"]
    assert offload.choice == choice


def test_beside_long_work_all_but_the_last_hides():
    """With work between the blocks that takes much longer than any copy."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            torch.cuda._sleep(20_000_000)
            return x * 1.0

        @staticmethod
        def backward(ctx, gradient):
            torch.cuda._sleep(20_000_000)
            return gradient * 1.0

    def call(model):
        def run(x):
            for block in model:
                x = Slow.apply(block(x))
            return x

        return run

    expected = trained(plain := built(), Nothing(), steps=8, call=call(plain))
    model = built()
    offload = ActivationOffload(model, auto=True)
    assert all(map(torch.equal, expected, trained(model, offload, steps=8, call=call(model))))
    assert offload.choice.is_settled
    assert offload.choice.is_hidden
    assert offload.choice.share > 0.4


def test_more_goes_if_the_step_may_take_longer():
    """With operations that are over long before what they save is on the host."""

    def waves(model, x):
        x = x.repeat(16, 1)
        for block in model:
            x = (x * block.norm.weight).sin()
        return x

    plain = built()
    expected = trained(plain, Nothing(), steps=10, call=partial(waves, plain))
    sent = []
    for max_slowdown in (0.0, 1000.0):  # as long as it likes
        model = built()
        call = partial(waves, model)
        offload = ActivationOffload(model, auto=True, max_slowdown=max_slowdown)
        assert all(map(torch.equal, expected, trained(model, offload, steps=10, call=call)))
        assert offload.choice.is_settled
        before = offload.counters()["offload_sent_bytes"]
        trained(model, offload, steps=1, call=call)
        sent.append(offload.counters()["offload_sent_bytes"] - before)
        assert sent[-1] == offload.choice.sent_bytes
    assert sent[1] > sent[0]
    assert offload.choice.share > 0.6  # all but the last
    assert offload.choice.is_allowed
    assert offload.choice.is_hidden is False


def updated(make, steps=4, **options):
    """Return parameters after some steps of a model, its optimizer and its peak memory."""
    model = built()
    torch.manual_seed(5)
    torch.cuda.reset_peak_memory_stats()
    optimizer = make(model.parameters(), **options)
    for seed in range(steps):
        model(batch(seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [p.detach().cpu() for p in model.parameters()], optimizer


ADAMW = partial(torch.optim.AdamW, lr=1e-3, fused=True)


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 1 << 20}, {"overlap": True}])
def test_an_offloaded_update_is_that_of_the_optimizer_on_the_cpu(options):
    """The gradients are the device's, the update the host's: so it is done there for comparison."""
    model = built()
    copies = [nn.Parameter(p.detach().cpu()) for p in model.parameters()]
    reference = ADAMW(copies)
    torch.manual_seed(5)
    for seed in range(4):
        model(batch(seed)).square().mean().backward()
        for copied, parameter in zip(copies, model.parameters(), strict=True):
            copied.grad = parameter.grad.cpu()
        reference.step()
        with torch.no_grad():
            for copied, parameter in zip(copies, model.parameters(), strict=True):
                parameter.copy_(copied)
        model.zero_grad(set_to_none=True)
    found, optimizer = updated(lambda p, **o: OffloadedOptimizer(p, ADAMW, **o), **options)
    assert all(map(torch.equal, found, (p.detach() for p in copies)))
    state = optimizer.state_dict()["state"][0]
    assert not state["exp_avg"].is_cuda
    assert torch.equal(state["exp_avg"], reference.state_dict()["state"][0]["exp_avg"])


def test_an_offloaded_update_is_close_to_that_on_the_device():
    expected, _ = updated(ADAMW)
    found, optimizer = updated(lambda p: OffloadedOptimizer(p, ADAMW))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert optimizer.decision.outcome == "applied"


@pytest.mark.parametrize(("limit", "expected"), [(None, (5, 0)), (1e9, (5, 0)), (1e-3, (1, 1))])
def test_an_update_that_begins_in_the_backward(limit, expected):
    def run(**options):
        model = built()
        optimizer = OffloadedOptimizer(model.parameters(), ADAMW, **options)
        torch.manual_seed(5)
        for seed in range(6):
            model(batch(seed)).square().mean().backward()
            torch.cuda._sleep(100_000_000)  # it goes on for a while
            if limit is not None:
                nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        optimizer.close()
        return [p.detach().cpu() for p in model.parameters()], optimizer

    found, optimizer = run(overlap=True, bucket_bytes=1 << 16)
    assert all(map(torch.equal, found, run()[0]))
    assert tuple(optimizer.counters().values()) == expected


def test_an_offloaded_update_on_a_side_stream_with_clipping():
    def run(stream):
        model = built()
        optimizer = OffloadedOptimizer(model.parameters(), ADAMW)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.manual_seed(5)
            for seed in range(4):
                model(batch(seed)).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                torch.cuda._sleep(10_000_000)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, run(torch.cuda.current_stream()), run(torch.cuda.Stream())))


def loss_fn(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("offload", ["activations", "optimizer", "all", "auto"])
def test_under_a_plan(graph, offload):
    def run(plan):
        model = built()
        torch.manual_seed(5)
        trainer = Trainer(model, ADAMW, loss_fn, plan=plan, max_grad_norm=0.1)
        losses = [trainer.step(batch(seed)) for seed in range(12)]
        report = trainer.report()
        values = [*losses, *(p.detach().clone() for p in model.parameters())]
        trainer.close()
        return values, report

    on_device = offload in ("activations", "auto")
    expected, _ = run(Plan(offload=None if on_device else "optimizer"))
    found, report = run(Plan(cuda_graph=graph, offload=offload))
    assert all(map(torch.equal, expected, found))
    outcomes = [d.outcome for d in report.decisions if d.lever == "offload"]
    if offload != "auto":  # where no copy hides, it steps aside
        assert outcomes == ["applied"] * (2 if offload == "all" else 1)
    if graph:
        assert report.counters["replays"] > 0
    if offload != "optimizer":
        assert report.counters["offload_sent_bytes"] > 0
