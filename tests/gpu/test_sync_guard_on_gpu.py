"""SyncGuard on CUDA: each wait at its line, in eager, compiled and warm-up steps; else silence."""

from __future__ import annotations

import inspect
import statistics
import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch._dynamo.variables import streams as compiled_streams

from benchmarks.paired_steps import cost_against
from benchmarks.watching_within import guard_within, passed_calls
from gpu.syncs import forbid_syncs
from gpu.test_syncs import CASES, Net, loss_fn, make_batch
from host_waits import (
    BELOW,
    KINDS,
    branch,
    invert,
    marked,
    read_item,
    select,
    to_host,
    to_numpy,
    write_selected,
)
from torchfast import CUDAGraphOptions, HostSyncError, Plan, SyncGuard, Trainer

# np.asarray of a tensor on the device is an error, not a wait.
ON_CUDA = [function for function in KINDS if function is not to_numpy]


# Whether torch.compile has operators for waits for streams and events: 2.11 does not.
TAKES_WAITS_INTO_GRAPHS = hasattr(compiled_streams, "synchronize_event")


# A name that was bound before any guard goes past it.
early_tensor = torch.tensor


def batch():
    return torch.arange(12.0, device="cuda").reshape(3, 4) - 4


def here():
    return inspect.currentframe().f_back.f_lineno


def kind_of(function):
    return marked(function)[1]


def places(guard):
    return [(s.line, s.kind, s.count) for s in guard.report().syncs]


def has_waited(compiled):
    """Whether torch itself sees a call wait."""
    said = ""
    forbid_syncs(True)
    try:
        compiled(batch().requires_grad_())
    except RuntimeError as error:
        said = str(error)
    finally:
        forbid_syncs(False)
    assert "synchronizing CUDA operation" in said or not said
    return bool(said)


@pytest.mark.parametrize("function", ON_CUDA, ids=lambda f: f.__name__)
def test_each_kind_is_found_at_its_line(function):
    without = function(batch())
    with SyncGuard() as guard:
        results = [function(batch()) for _ in range(3)]
    assert places(guard) == [(marked(function)[0], kind_of(function), 3)]
    assert all(torch.equal(result, without) for result in results)
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.parametrize("function", ON_CUDA, ids=lambda f: f.__name__)
def test_each_kind_is_raised_at_its_line(function):
    match = rf"{kind_of(function)} .*:{marked(function)[0]}, in {function.__name__}"
    with pytest.raises(HostSyncError, match=match), SyncGuard("raise"):
        function(batch())
    assert torch.ones(3, device="cuda").sum().item() == 3  # the device is in order


@pytest.mark.parametrize("function", ON_CUDA, ids=lambda f: f.__name__)
def test_each_kind_is_found_in_a_compiled_function(function, fresh_dynamo):
    stats = torch._dynamo.utils.counters
    # What waits within a graph is told of where the graph runs under autograd, as in training.
    trains = function in (invert, to_host, write_selected)

    def graphs():
        torch._dynamo.reset()
        stats.clear()
        compiled = torch.compile(function, backend="aot_eager")
        result = compiled(batch().requires_grad_(trains)).detach()
        return result, stats["stats"]["unique_graphs"], len(stats["graph_break"]), compiled

    without = graphs()
    waits = without[2] > 0 or has_waited(without[3])
    assert waits or trains
    with SyncGuard() as guard:
        under = graphs()
    assert torch.equal(under[0], without[0])
    assert under[1:3] == without[1:3]
    found = guard.report().syncs
    # The compiler leaves out a check or a copy whose result nobody needs.
    assert {s.function for s in found} == ({function.__name__} if waits else set())
    if without[2]:  # the line runs in Python, behind a graph break
        assert marked(function)[0] in {s.line for s in found}


@pytest.mark.parametrize("function", [read_item, select, branch], ids=lambda f: f.__name__)
def test_a_wait_beside_kernels_of_inductor_is_found(function, fresh_dynamo):
    compiled = torch.compile(function)
    with SyncGuard() as guard:
        for _ in range(3):
            compiled(batch())
    line, kind = marked(function)
    assert (line, kind, 3) in places(guard)


@pytest.mark.parametrize("function", ON_CUDA, ids=lambda f: f.__name__)
def test_warm_up_steps_before_a_capture_are_watched_and_replays_are_silent(function):
    calls = []

    def reads_at_first(model, x):
        calls.append(len(calls))
        if len(calls) <= 2:
            function(x)
        return model(x).square().mean()

    plan = Plan(cuda_graph=CUDAGraphOptions(warm_up_steps=3), sync_guard="record")
    optimizer = partial(optim.AdamW, lr=1e-3, fused=True)
    with Trainer(nn.Linear(4, 2).cuda(), optimizer, reads_at_first, plan) as trainer:
        for _ in range(10):
            trainer.step(batch())
        assert trainer.report().counters["replays"] > 0
        found = [s for s in trainer.sync_report.syncs if s.function == function.__name__]
        assert [(s.line, s.kind, s.count) for s in found] == [
            (marked(function)[0], kind_of(function), 2)
        ]


@pytest.mark.parametrize("name", ["eager", "exact", "fast", "fp16"])
def test_steady_steps_are_silent(name):
    plan, optimizer = CASES[name]
    plan = Plan.of(plan).replace(sync_guard="record")
    with Trainer(Net().cuda(), optimizer, loss_fn, plan, max_grad_norm=1.0) as trainer:
        data = make_batch()
        for _ in range(8):
            trainer.step(data)
        before = trainer.sync_report
        for _ in range(30):
            trainer.step(data)
        assert trainer.sync_report.count == before.count, str(trainer.sync_report)


def test_a_wait_is_timed():
    x = torch.ones(3, device="cuda")
    torch.cuda.synchronize()
    with SyncGuard() as guard:
        torch.cuda._sleep(100_000_000)  # some 50 ms
        line = here() + 1
        x.sum().item()
    (sync,) = guard.report().syncs
    assert (sync.line, sync.num_timed) == (line, 1)
    assert 10 < sync.total_ms < 1000


def test_copies():
    pinned, pageable = torch.ones(8).pin_memory(), torch.ones(8)
    x = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    with SyncGuard() as guard:
        first = here()
        pageable.to("cuda")
        pageable.cuda(non_blocking=True)
        x.copy_(pageable, non_blocking=True)
        pinned.to("cuda")
        pinned.copy_(x)
        x.to("cpu")
        pageable.copy_(x, non_blocking=True)
        # None of these waits.
        pinned.to("cuda", non_blocking=True)
        x.copy_(pinned, non_blocking=True)
        pinned.copy_(x, non_blocking=True)
        x.to("cpu", non_blocking=True)
        x.to(torch.float64)
    torch.cuda.synchronize()
    assert sorted(places(guard)) == [
        (first + 1, "pageable copy", 1),
        (first + 2, "pageable copy", 1),
        (first + 3, "pageable copy", 1),
        (first + 4, "blocking copy", 1),
        (first + 5, "blocking copy", 1),
        (first + 6, "blocking copy", 1),
        (first + 7, "blocking copy", 1),
    ]


def test_explicit_synchronisation():
    event = torch.cuda.Event()
    event.record()
    with SyncGuard() as guard:
        first = here()
        torch.cuda.synchronize()
        torch.accelerator.synchronize()
        torch.cuda.current_stream().synchronize()
        event.synchronize()
        torch.cuda.current_stream().wait_event(event)  # the device waits, not the host
    assert sorted(places(guard)) == [
        (first + 1, "synchronize", 1),
        (first + 2, "synchronize", 1),
        (first + 3, "stream wait", 1),
        (first + 4, "event wait", 1),
    ]


def test_values_of_the_host_are_copied_from_pageable_memory_and_timed():
    x = torch.ones(2, device="cuda")
    torch.cuda.synchronize()
    with SyncGuard() as guard:
        first = here()
        torch.tensor([1.0, 2.0], device="cuda")
        torch.as_tensor([1.0, 2.0], device="cuda")
        x.new_tensor([1.0, 2.0])
        torch.as_tensor(x, device="cuda")  # it is there
        torch.tensor([1.0, 2.0])
    found = guard.report().syncs
    assert sorted((s.line - first, s.kind, s.count) for s in found) == [
        (1, "pageable copy", 1),
        (2, "pageable copy", 1),
        (3, "pageable copy", 1),
    ]
    assert all(s.num_timed == 1 and s.total_ms > 0 for s in found)


def test_what_only_torchs_check_sees_has_its_line():
    with SyncGuard() as guard:
        line = here() + 1
        early_tensor([1.0, 2.0], device="cuda")
    assert places(guard) == [(line, "other", 1)]
    assert "time unknown" in guard.report().costliest(1)


@pytest.mark.parametrize("function", BELOW, ids=lambda f: f.__name__)
def test_what_is_below_the_calls_is_found_and_timed(function):
    function(batch())  # libraries of linear algebra start with waits of their own
    torch.cuda.synchronize()
    with SyncGuard() as guard:
        function(batch())
    line, kind = marked(function)
    found = [s for s in guard.report().syncs if s.function == function.__name__]
    assert line in {s.line for s in found}
    named = [s for s in found if (s.line, s.kind) == (line, kind)]
    assert named, str(guard.report())
    assert all(s.num_timed == s.count and s.total_ms > 0 for s in named)
    if kind != "linalg":  # the libraries behind linalg have waits of their own
        # Of one wait it is told once: not by the net and by torch's check as well.
        assert {s.kind for s in found if s.line == line} == {kind}


def test_what_reads_numbers_on_the_cpu_only_does_not_wait():
    x = torch.randn(6, 6, device="cuda")
    x.std(), torch.linalg.inv_ex(x), torch.linalg.solve_ex(x, x), torch.multinomial(x.abs(), 2)
    torch.cuda.synchronize()
    with SyncGuard() as guard:
        x.std()
        torch.var(x)
        x.quantile(0.5)
        x.clone().masked_scatter_(x > 0, x)
        F.multilabel_margin_loss(x, torch.zeros(6, 6, dtype=torch.long, device="cuda"))
        torch.multinomial(x.abs(), 1)
        torch.multinomial(x.abs(), 2)
    assert not guard.report(), str(guard.report())


@pytest.mark.parametrize("where", ["compiled", "warm-up"])
@pytest.mark.parametrize("name", ["copy", "synchronize", "stream", "event"])
def test_copies_and_explicit_waits_in_compiled_and_warm_up_steps(where, name, fresh_dynamo):
    pageable, event = torch.ones(3, 4), torch.cuda.Event()

    def wait(x):
        if name == "copy":
            x = x + pageable.to("cuda", non_blocking=True)
        elif name == "synchronize":
            torch.cuda.synchronize()
        elif name == "stream":
            torch.cuda.current_stream().synchronize()
        else:
            event.record()
            event.synchronize()
        return x

    kind = {"copy": "pageable copy", "stream": "stream wait", "event": "event wait"}.get(name, name)
    if where == "compiled":
        compiled = torch.compile(lambda x: torch.relu(wait(torch.relu(x))), backend="aot_eager")
        if name == "event" and not TAKES_WAITS_INTO_GRAPHS:
            with pytest.raises(RuntimeError, match=r"expected event to be a torch\.Event object"):
                compiled(batch())
            return
        compiled(batch())
        torch.cuda.synchronize()
        x, passed = batch(), torch.cuda.Event()
        with SyncGuard() as guard:
            torch.cuda._sleep(200_000_000)  # some 100 ms
            passed.record()
            compiled(x)
            has_waited = passed.query()
        found = guard.report().syncs
        if name == "copy":  # as documented: in a graph, and torch checks none that is non-blocking
            assert not found
            return
        assert {s.kind for s in found} == ({kind} if has_waited else set())
        # Where torch has no operator for it, its graph leaves the wait for a stream out.
        assert has_waited == (name == "synchronize" or TAKES_WAITS_INTO_GRAPHS)
        return
    calls = []

    def waits_at_first(model, x):
        calls.append(len(calls))
        if len(calls) <= 2:
            x = wait(x)
        return model(x).square().mean()

    plan = Plan(cuda_graph=CUDAGraphOptions(warm_up_steps=3), sync_guard="record")
    optimizer = partial(optim.AdamW, lr=1e-3, fused=True)
    with Trainer(nn.Linear(4, 2).cuda(), optimizer, waits_at_first, plan) as trainer:
        for _ in range(10):
            trainer.step(batch())
        found = [s for s in trainer.sync_report.syncs if s.function == "wait"]
        assert [(s.kind, s.count) for s in found] == [(kind, 2)]


def test_an_event_of_torch_is_not_seen():
    """As documented: torch.Event is an immutable type, and torch checks no wait for it."""
    event = torch.Event("cuda")
    event.record()
    with SyncGuard() as guard:
        event.synchronize()
    assert not guard.report()


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.sum().item()  # waits: item


def test_a_wait_on_the_thread_of_a_backward_is_found():
    x = torch.ones(3, device="cuda", requires_grad=True)
    with SyncGuard() as guard:
        Reads.apply(x).sum().backward()
    assert places(guard) == [(marked(Reads)[0], "item", 1)]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norms[1](x))


@pytest.fixture
def host_ms():
    """Return a function that does an eager step and returns what it took the host.

    That is what its threads computed while they filled the queue: other processes on the machine
    and on the device are no part of it. ``more_ms`` of computing can be added.
    """
    blocks = [Block(256) for _ in range(6)]
    model = nn.Sequential(nn.Embedding(512, 256), *blocks, nn.Linear(256, 512)).cuda()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(512, (4, 128), device="cuda")

    def step(more_ms=0.0):
        begin = time.process_time()
        while (time.process_time() - begin) * 1e3 < more_ms:
            pass
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        spent = time.process_time() - begin
        torch.cuda.synchronize()  # which computes while it waits
        return spent * 1e3

    for _ in range(20):
        step()
    return step


def test_reads_of_the_host_pass_no_guard(host_ms):
    # torch's AdamW counts its steps on the host, and reads each counter twice.
    with SyncGuard() as guard, passed_calls() as passed:
        host_ms()
        line = here() + 1
        assert torch.ones(3, device="cuda").sum().item() == 3

    assert "item" not in passed.calls
    assert (line, "item", 1) in places(guard)


def test_an_eager_step_costs_at_most_a_hundredth_more(host_ms, record_property):
    with SyncGuard(), passed_calls() as passed:
        host_ms()
    usual_ms = statistics.median(host_ms() for _ in range(100))
    # What a guard puts in place stays there from the second time on: both ways have that.
    held = guard_within(passed, "cuda").held_ms / usual_ms
    guard = SyncGuard()

    def watched(more_ms=0.0):
        with guard:
            return host_ms(more_ms)

    watched(), watched()
    cost, interval = cost_against(0.01 - held, watched, host_ms, seconds=40)
    record_property("cost", [cost, interval, held])
    assert cost + held < 0.01, (cost, interval, held)
    # One that costs three hundredths is found.
    cost, interval = cost_against(0.01, lambda: watched(0.03 * usual_ms), host_ms, seconds=40)
    record_property("planted", [cost, interval])
    assert interval[0] > 0.01, (cost, interval)
    guard.close()
