"""Memory in a trainer: the allocator's settings as part of a plan, and the monitor of a fit."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from torch import nn, optim

from fitting import fit, make_trainer, training
from models import make_batches, mean_loss
from planting import Planted, PlantedNet
from simulated_device import Prompt
from torchfast import (
    AllocatorChange,
    AllocatorConfig,
    MemoryMonitor,
    MemorySample,
    Plan,
    PlanError,
    SettingChange,
    TrainStep,
)
from torchfast.data import loader as loader_module
from torchfast.data.loader_report import device_tensors

MB = 2**20


def decision_of(trainer, lever):
    found = [d for d in trainer.report().decisions if d.lever == lever]
    return found[0] if found else None


# --- the allocator ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "allocator",
    [
        "variable-shapes",
        AllocatorConfig(expandable_segments=True, max_split_size_mb=64),
        AllocatorConfig(roundup_power2_divisions={256: 2, 512: 4, ">": 8}),
    ],
)
def test_a_plan_goes_through_json(allocator):
    plan = Plan(allocator=allocator)
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).allocator_config == plan.allocator_config
    assert json.loads(plan.to_json()).keys() == {"allocator"}


def test_no_allocator_is_the_default():
    assert Plan().allocator_config is None
    assert Plan().to_json() == "{}"
    assert decision_of(make_trainer(), "allocator") is None


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("variable-shape", PlanError, "did you mean 'variable-shapes'"),
        (64, TypeError, "allocator must be one of"),
    ],
)
def test_bad_values(value, kind, message):
    with pytest.raises(kind, match=message):
        Plan(allocator=value)


def test_bad_json():
    with pytest.raises(PlanError, match="max_split"):
        Plan.from_json('{"allocator": {"text": "max_split_size_mb:1"}}')


def played(monkeypatch, *outcomes):
    """Let the allocator answer so; return the calls, with what was built by then."""
    calls = []

    def apply(config):
        calls.append(config)
        settings = tuple(
            SettingChange(name=f"s{i}", value=1, outcome=outcome, detail="why")
            for i, outcome in enumerate(outcomes)
        )
        return AllocatorChange(settings=settings, in_force="", variable=None, remarks=("and so",))

    monkeypatch.setattr(AllocatorConfig, "apply", apply)
    return calls


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (["in effect"], "applied"),
        (["unchanged"], "applied"),
        (["in effect", "too late"], "stepped aside"),
        (["not here"], "stepped aside"),
        (["in effect", "not here"], "stepped aside"),
    ],
)
def test_the_report_says_what_became_of_it(monkeypatch, caplog, outcomes, expected):
    calls = played(monkeypatch, *outcomes)
    trainer = make_trainer(plan=Plan(allocator="variable-shapes"))
    assert calls == [AllocatorConfig.preset("variable-shapes")]
    found = decision_of(trainer, "allocator")
    assert found.outcome == expected
    assert f"s0=1 {outcomes[0]} (why)" in found.detail
    assert "and so" in found.detail
    assert ("allocator: " in caplog.text) == (expected == "stepped aside")


def test_it_comes_before_anything_is_moved(monkeypatch):
    events = []

    class Moved(nn.Linear):
        def to(self, *args, **kwargs):
            events.append("moved")
            return super().to(*args, **kwargs)

    class Noted(list):
        def append(self, config):
            events.append("allocator")

    monkeypatch.setattr(AllocatorConfig, "apply", lambda self: Noted().append(self) or CHANGE)
    TrainStep(
        Moved(8, 4),
        lambda p: optim.SGD(p, lr=0.1),
        mean_loss,
        Plan(allocator="graphs"),
        device="cpu",
    )
    assert events == ["allocator", "moved"]


CHANGE = AllocatorChange(settings=(), in_force="", variable=None)


def test_what_this_torch_does_not_know_is_an_error_of_the_plan(monkeypatch):
    def refused(self):
        raise ValueError("known to torch 2.15 and later")

    monkeypatch.setattr(AllocatorConfig, "apply", refused)
    with pytest.raises(PlanError, match="the plan's allocator cannot be set here: known to torch"):
        make_trainer(plan=Plan(allocator="graphs"))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has an allocator")
def test_without_an_allocator_it_steps_aside():
    trainer = make_trainer(plan=Plan(allocator="long-runs"))
    assert decision_of(trainer, "allocator").outcome == "stepped aside"
    assert "no allocator for devices" in decision_of(trainer, "allocator").detail


# --- the monitor --------------------------------------------------------------------------------


class Source:
    name = "a device"
    limit_bytes = 10_000 * MB
    noise_bytes = MB
    has_segments = True

    def __init__(self, grows=0):
        self.grows = grows
        self.stopped = 0
        self.steps = []

    def read(self, step):
        self.steps.append(step)
        size = 1000 * MB + step * self.grows
        return MemorySample(
            step=step, allocated_bytes=size, reserved_bytes=2 * size, peak_bytes=2 * size
        )

    def expandable(self):
        return False

    def private_bytes(self):
        return 0

    def pools(self):
        return {}

    def start_trace(self):
        return "not here"

    def live_by_line(self):
        return {}

    def stop_trace(self):
        self.stopped += 1


def watched(source):
    trainer = make_trainer()
    trainer._step.memory.monitor = MemoryMonitor("cpu", every=1, source=source)
    return trainer


def test_a_fit_watches_memory(caplog):
    source = Source(grows=2 * MB)
    trainer = watched(source)
    result = fit(trainer=trainer, steps=24)
    assert source.steps == list(range(1, 25))
    assert source.stopped == 1
    for step, record in enumerate(training(result), 1):
        assert record["memory"]["allocated_bytes"] == (1000 + 2 * step) * MB
    assert training(result)[-1]["memory"]["verdict"] == "leak"
    assert "a device, every 1 steps" in decision_of(trainer, "memory").detail
    assert "the memory of a device at step" in caplog.text
    fit(trainer=trainer, steps=2)  # goes on
    assert source.steps[-1] == 26


def test_the_monitor_is_closed_when_a_fit_fails():
    source = Source()

    def failing(event):
        raise KeyError("stop")

    with pytest.raises(KeyError):
        fit(trainer=watched(source), steps=2, callbacks=[failing])
    assert source.stopped == 1


def test_on_the_cpu_nothing_is_watched():
    trainer = make_trainer()
    [record] = training(fit(trainer=trainer, steps=1))
    assert not {"memory", "out_of_memory"} & set(record)
    assert trainer._step.memory.monitor is None
    assert decision_of(trainer, "memory") is None


def test_records_tell_of_steps_in_parts():
    trainer = make_trainer(
        net=lambda: PlantedNet(nn.Linear(8, 4), Planted(4)), plan=Plan(out_of_memory="split")
    )
    [size] = {len(batch[0]) for batch in make_batches(4)}
    assert size > 4
    first, *_, last = training(fit(trainer=trainer, steps=4))
    assert first["out_of_memory"]["split_steps"] == 1
    assert last["out_of_memory"]["split_steps"] == 4
    assert last["out_of_memory"]["out_of_memory"] == first["out_of_memory"]["out_of_memory"] >= 1


# --- whose the loader's memory is ---------------------------------------------------------------


def test_the_loaders_ring_is_known(monkeypatch):
    transport = Prompt()
    monkeypatch.setattr(loader_module, "transport_for", lambda device: transport)
    trainer = make_trainer()
    loader = trainer.prefetch(make_batches(4), reuse=True)
    assert device_tensors(loader) == []
    for _ in loader:
        pass
    blocks = device_tensors(loader)
    assert len(blocks) >= loader.depth + 1
    assert list(trainer._step.memory._loaders) == [loader]
    loader.close()
    del loader, blocks
    gc.collect()
    assert list(trainer._step.memory._loaders) == []
    transport.end()
