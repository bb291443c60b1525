"""What only a GPU shows of phases: kernels in them, times that the device agrees with, replays."""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.profiler import ProfilerActivity, profile

from gpu.graph_jobs import copied, state
from gpu.late import SLOW, Late
from gpu.own_process import told_by
from gpu.requirements import requires
from torchfast import CUDAGraphOptions, Plan, Trainer, phase
from torchfast._core.compare import differences
from torchfast.profiling import StepTimer

pytestmark = requires(gpus=1)

SGD = partial(optim.SGD, lr=1e-3)
FUSED = partial(optim.AdamW, lr=1e-3, fused=True)


class Net(nn.Module):
    def __init__(self, width=256, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x


def loss_fn(model, x):
    return model(x).square().mean()


def late_loss(model, x):
    """About 10 ms in the forward and 20 ms in the backward, whatever the device."""
    return Late.apply(model(x), SLOW, 2 * SLOW).square().mean()


def batches(num=8, rows=64, width=256, **options):
    torch.manual_seed(1)
    return [torch.randn(rows, width, **options) for _ in range(num)]


def make_trainer(loss=loss_fn, plan="exact", optimizer=SGD, **net):
    torch.manual_seed(0)
    return Trainer(Net(**net).cuda(), optimizer, loss, plan, max_grad_norm=1.0)


def fit(trainer, loader, **options):
    return trainer.fit(loader, progress="off", **{"log_every": 10, **options})


def trace(prof, path):
    prof.export_chrome_trace(str(path))
    return [e for e in json.loads(path.read_text())["traceEvents"] if "dur" in e]


def spans(events, category):
    """Return name to list of (start, stop), of torchfast's annotations of a category."""
    found = {}
    for event in events:
        if event.get("cat") == category and event["name"].startswith("torchfast."):
            span = event["ts"], event["ts"] + event["dur"]
            found.setdefault(event["name"].removeprefix("torchfast."), []).append(span)
    return found


# --- profiles -------------------------------------------------------------------------------------


def test_a_profile_of_real_steps_shows_phases_and_their_launches(tmp_path):
    trainer = make_trainer(plan="eager")
    loader = batches(pin_memory=True)
    for batch in trainer.prefetch(loader):
        trainer.step(batch)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        for batch in trainer.prefetch(loader):
            trainer.step(batch)
        torch.cuda.synchronize()
    events = trace(prof, tmp_path / "trace.json")
    found = spans(events, "user_annotation")
    assert {"data_wait", "forward", "backward", "update"} <= set(found)
    assert len(found["forward"]) == len(found["backward"]) == len(found["update"]) == len(loader)
    launches = [e["ts"] for e in events if e.get("name", "").startswith("cudaLaunchKernel")]
    for name in ("forward", "update"):
        for start, stop in found[name]:
            assert any(start <= ts <= stop for ts in launches), f"no kernel is launched in {name}"
    # On the device they are shown too, where the kernels were launched by the thread that is in it.
    assert {"forward", "update"} <= set(spans(events, "gpu_user_annotation"))


def test_a_profile_of_replays_shows_them_and_no_phase_within(tmp_path):
    trainer = make_trainer()
    (x,) = batches(1, device="cuda")
    for _ in range(6):
        trainer.step(x)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            trainer.step(x)
        torch.cuda.synchronize()
    found = spans(trace(prof, tmp_path / "trace.json"), "user_annotation")
    assert len(found["replay"]) == 3
    assert not {"forward", "backward", "capture"} & set(found)


# --- times ----------------------------------------------------------------------------------------


def test_times_agree_with_the_profiler_s(tmp_path):
    trainer = make_trainer(late_loss, "eager")
    loader = batches(device="cuda")
    times = fit(trainer, loader, steps=10).step_times
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        for x in loader:
            trainer.step(x)
        torch.cuda.synchronize()
    events = trace(prof, tmp_path / "trace.json")
    kernels = sorted((e["ts"], e["dur"] / 1e3) for e in events if e.get("cat") == "kernel")
    sleeps = [ms for _, ms in kernels if ms > 2]  # the one of the forward, then the backward's
    assert len(sleeps) == 2 * len(loader), "what sleeps is not seen by its length"
    expected = {
        "forward": statistics.median(sleeps[0::2]),
        "backward": statistics.median(sleeps[1::2]),
    }
    for name, ms in expected.items():
        assert times[name].p50_ms == pytest.approx(ms, rel=0.1, abs=0.5), name
        assert times[name].source == "measured"
    assert times["update"].p50_ms < 2
    assert times["data_wait"].p50_ms < 2  # the host is far ahead, and the device waits for nothing


@pytest.mark.parametrize("plan", ["eager", "exact"])
def test_the_parts_are_the_step(plan):
    times = fit(make_trainer(late_loss, plan), batches(device="cuda"), steps=60).step_times
    measured = [row.p50_ms for row in times.phases if row.source == "measured"]
    step_ms = times["step"].p50_ms
    assert sum(measured) - step_ms == pytest.approx(step_ms, rel=0.05)


def test_replays_are_told_with_the_split_of_the_warm_up():
    trainer = make_trainer(late_loss, optimizer=FUSED)
    result = fit(trainer, batches(device="cuda"), steps=60)
    counters = trainer.report().counters
    assert (counters["captures"], counters["replays"]) == (1, 57)
    times = result.step_times
    for name in ("forward", "backward"):
        assert (times[name].source, times[name].num_samples) == ("from warm-up", 2)
    assert times["replay"].source == times["data_wait"].source == "measured"
    assert times["replay"].num_samples >= 3
    split_ms = sum(times[n].p50_ms for n in ("forward", "backward", "update"))
    assert times["replay"].p50_ms == pytest.approx(split_ms, rel=0.1)
    assert times["replay"].p50_ms == pytest.approx(times["step"].p50_ms, rel=0.1)
    last = [r for r in result.history if "phases" in r][-1]["phases"]
    assert last["forward"]["source"] == "from warm-up"
    assert "from warm-up" in str(trainer.report())


@pytest.mark.parametrize("plan", ["eager", "exact"])
def test_a_slow_loader_is_waited_for_by_the_device(plan):
    def slow():
        for x in batches(120, pin_memory=True):
            time.sleep(0.02)
            yield x

    times = fit(make_trainer(plan=plan), slow(), steps=120).step_times
    assert times["data_wait"].p50_ms == pytest.approx(20, rel=0.3)
    assert times["step"].p50_ms == pytest.approx(20, rel=0.3)


NOTED = Plan.preset("exact").replace(cuda_graph=CUDAGraphOptions(time_phases=True))


def test_a_graph_that_notes_its_phases_tells_those_of_replays():
    """Of a device that is the limit at least the last one."""
    trainer = make_trainer(late_loss, NOTED, optimizer=FUSED)
    times = fit(trainer, batches(device="cuda"), steps=40).step_times
    assert trainer.report().counters["captures"] == 1
    parts = [times[name] for name in ("forward", "backward", "update")]
    assert {part.source for part in parts} == {"measured"}
    assert times["backward"].p50_ms == pytest.approx(2 * times["forward"].p50_ms, rel=0.1)
    whole = times["replay"].p50_ms
    assert sum(part.p50_ms for part in parts) == pytest.approx(whole, rel=0.03)


def test_replays_of_a_late_host_are_told_by_the_dozen():
    """And are not what the eager steps of the warm-up took, of which the host was the limit."""
    noted, plain = make_trainer(plan=NOTED, optimizer=FUSED), make_trainer(optimizer=FUSED)
    found = fit(noted, batches(), steps=1000).step_times
    warm_up = fit(plain, batches(), steps=1000).step_times
    for name in ("forward", "backward", "update"):
        assert (found[name].source, warm_up[name].source) == ("measured", "from warm-up")
        assert found[name].num_samples > 12
        assert found[name].p50_ms < warm_up[name].p50_ms


@pytest.mark.usefixtures("deterministic")
def test_noting_phases_in_a_graph_changes_no_bit():
    noted, plain = make_trainer(plan=NOTED, optimizer=FUSED), make_trainer(optimizer=FUSED)
    histories = [[r["loss"] for r in fit(t, batches(), steps=40).history] for t in (noted, plain)]
    assert not differences(
        [copied(state(plain)), histories[1]], [copied(state(noted)), histories[0]]
    )


@pytest.mark.parametrize("plan", ["eager", "exact"])
def test_copies_run_beside_the_step_and_are_told_so(plan):
    loader = batches(64, rows=4096, pin_memory=True)
    found = fit(make_trainer(plan=plan), loader, steps=64).step_times["h2d"]
    assert found.source == "copy stream"
    assert 0 < found.p50_ms < 20  # 4 MiB
    assert found.num_samples >= 2


def test_a_phase_of_the_user_s_own_is_timed():
    def named(model, x):
        with phase("late"):
            y = Late.apply(model(x), SLOW, 0)
        return y.square().mean()

    times = fit(make_trainer(named, "eager"), batches(device="cuda"), steps=8).step_times
    assert 2 < times["late"].p50_ms <= times["forward"].p50_ms + 0.1


# --- it changes nothing ---------------------------------------------------------------------------


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("plan", ["eager", "exact", "fast"])
def test_timing_changes_no_bit(plan, monkeypatch):
    def trained():
        trainer = make_trainer(plan=plan, optimizer=FUSED)
        result = fit(trainer, batches(), steps=40)
        found = copied(state(trainer)), [r["loss"] for r in result.history]
        trainer.close()
        return found

    timed = trained()
    with monkeypatch.context() as patch:
        patch.setattr(StepTimer, "begin_step", lambda self: None)
        plain = trained()
    assert not differences(plain, timed)


def test_a_profiled_capture_computes_the_same(tmp_path):
    plain, seen = make_trainer(), make_trainer()
    loader = batches(device="cuda")
    expected = [plain.step(x) for x in loader]
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        found = [seen.step(x) for x in loader]
    assert not differences(expected, found)
    assert seen.report().counters["captures"] == 1


# --- what it costs --------------------------------------------------------------------------------

# What it may cost is half a per cent; two runs of the same differ by as much.
MOST = 1.01


def ratios_of_cost(plan):
    """Return what steps take that are timed, as parts of what they take without, ten times."""
    trainer = make_trainer(plan=plan, optimizer=FUSED, width=1024, depth=12)
    loader = batches(rows=2048, width=1024, device="cuda")
    fit(trainer, loader, steps=20)

    def seconds():
        torch.cuda.synchronize()
        started = time.perf_counter()
        fit(trainer, loader, steps=200, log_every=100)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    def untimed_seconds():
        nothing = {"begin_step": lambda self: None, "end_step": lambda self: None}
        with mock.patch.multiple(StepTimer, **nothing):
            return seconds()

    ratios = []
    for turn in range(10):
        times = {}
        for timed in (True, False) if turn % 2 else (False, True):
            times[timed] = seconds() if timed else untimed_seconds()
        ratios.append(times[True] / times[False])
    return ratios


@pytest.mark.parametrize("plan", ["eager", "exact"])
def test_timing_costs_next_to_nothing(plan):
    """In a process of its own: where a profiler ran before, torch leaves CUPTI in each launch."""
    ratios = told_by(__file__, plan)
    assert statistics.median(ratios) < MOST, ratios


def test_the_measure_of_cost_sees_a_host_that_waits(monkeypatch):
    """A timer that waits for each step's end loses the queue, which is what must not happen."""
    trainer = make_trainer(plan="eager", optimizer=FUSED)
    loader = batches(device="cuda")
    fit(trainer, loader, steps=20)
    end_step = StepTimer.end_step

    def seconds():
        torch.cuda.synchronize()
        started = time.perf_counter()
        fit(trainer, loader, steps=200, log_every=100)
        return time.perf_counter() - started

    def waiting(self):
        torch.cuda.synchronize()
        end_step(self)

    plain = min(seconds() for _ in range(3))
    monkeypatch.setattr(StepTimer, "end_step", waiting)
    assert min(seconds() for _ in range(3)) > MOST * plain


# --- what the design stands on --------------------------------------------------------------------


def test_timing_events_in_a_graph_are_of_its_latest_replay():
    """So they are read before the next is launched, or not at all."""
    x = torch.zeros(1, device="cuda")
    cycles = [SLOW // 4, SLOW // 2]
    events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        events[0].record()
        for event, num in zip(events[1:], cycles, strict=True):
            torch.cuda._sleep(num)
            x += 1
            event.record()
    graph.replay()
    torch.cuda.synchronize()
    short, long = events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])
    assert long == pytest.approx(2 * short, rel=0.2)


if __name__ == "__main__":
    print(json.dumps(ratios_of_cost(sys.argv[1])))  # noqa: T201
