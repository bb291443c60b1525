"""`CompileOptions(update="auto", cache=...)`: a second run begins with what the first measured."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import optim

from models import DropoutNet, make_batches
from tape import TapeBackend, Twins
from test_compiled_update import Signs
from test_compiled_update_auto import ADAMW, OPTIONS, measured_as, told
from torchfast import Plan
from torchfast._core.fingerprint import optimizer_fingerprint

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def trained(folder, make=ADAMW, **options):
    twins = Twins(DropoutNet, make, plan=Plan(compile=OPTIONS(cache=folder, **options)))
    for batch in make_batches(3):
        twins.step(batch)
        assert [d for d in twins.differences() if not d.distance < 1e-5] == []
    return told(twins.captured)


@pytest.mark.parametrize(("compiled_ms", "outcome"), [(0.5, "applied"), (2.0, "left alone")])
def test_a_second_run_measures_nothing(monkeypatch, tmp_path, compiled_ms, outcome):
    seen = []
    measured_as(monkeypatch, compiled_ms, seen)
    first, second = trained(tmp_path), trained(tmp_path)
    assert len(seen) == 1
    assert first.outcome == second.outcome == outcome
    assert "from its receipt" not in first.detail
    assert "from its receipt" in second.detail


@pytest.mark.parametrize(
    "other",
    [
        {"make": partial(optim.AdamW, lr=0.01, weight_decay=0.5)},
        {"make": partial(optim.NAdam, lr=0.01)},
        {"backend": "aot_eager"},
        {"budget_s": 2.0},
    ],
)
def test_another_update_is_measured(monkeypatch, tmp_path, other):
    seen = []
    measured_as(monkeypatch, 2.0, seen)
    trained(tmp_path)
    trained(tmp_path, **other)
    assert len(seen) == 2


def test_a_damaged_receipt_is_measured_again(monkeypatch, tmp_path):
    seen = []
    measured_as(monkeypatch, 2.0, seen)
    trained(tmp_path)
    (path,) = tmp_path.glob("receipt-*.json")
    path.write_text(path.read_text().replace("compiled it was", "compiled it was not"))
    trained(tmp_path)
    assert len(seen) == 2


def test_what_was_not_measured_is_not_remembered(monkeypatch, tmp_path):
    def no_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patched:
        patched.setattr("torchfast.update_trial._objection", no_memory)
        assert "memory ran out" in trained(tmp_path).detail
    measured_as(monkeypatch, 0.5)
    assert "it takes 0.500" in trained(tmp_path).detail


def test_time_that_did_not_suffice_is_said_and_not_remembered(monkeypatch, tmp_path):
    assert "not measured, as 1e-09 s did not suffice" in trained(tmp_path, budget_s=1e-9).detail
    assert [*tmp_path.glob("receipt-*.json")] == []


def test_a_fingerprint_tells_updates_apart():
    def of(change=lambda _: None, make=ADAMW, size=3):
        optimizer = make([torch.ones(size, requires_grad=True)])
        change(optimizer.param_groups[0])
        return optimizer_fingerprint(optimizer)

    def with_gradient(group):
        group["params"][0].grad = torch.ones(3)

    assert of() == of() == of(lambda group: group.update(lr=0.5))
    others = [
        of(size=4),
        of(with_gradient),
        of(lambda group: group.update(lr=torch.tensor(0.01))),
        of(lambda group: group.update(betas=(0.5, 0.9))),
        of(make=partial(optim.Adam, lr=0.01)),
    ]
    assert len({of(), *others}) == 6


def test_what_was_measured_without_a_graph_is_measured_again_for_one(tape, monkeypatch, tmp_path):
    seen = []
    measured_as(monkeypatch, 0.5, seen)
    plan = Plan(compile=OPTIONS(cache=tmp_path))
    found = []
    for cuda_graph in (False, True, False, True):
        # A rate that is a tensor either way, or the optimizer itself would tell which it is.
        twins = Twins(
            DropoutNet,
            lambda params: Signs(params, lr=torch.tensor(0.01)),
            plan=plan.replace(cuda_graph=cuda_graph),
        )
        for batch in make_batches(3):
            twins.step(batch)
        found.append((len(seen), " in a graph" in told(twins.captured).detail))
    assert found == [(1, False), (2, True), (2, False), (2, True)]


def test_what_was_not_timed_as_it_is_to_run_is_not_remembered(tape, monkeypatch, tmp_path):
    seen = []
    measured_as(monkeypatch, 0.5, seen)
    capture, failed = TapeBackend.capture, []

    def failing(self, body, generators):
        if not failed:
            failed.append(1)
            raise RuntimeError("the driver is busy")
        return capture(self, body, generators)

    monkeypatch.setattr(TapeBackend, "capture", failing)
    plan = Plan(compile=OPTIONS(cache=tmp_path), cuda_graph=True)
    found = []
    for _ in range(2):
        twins = Twins(DropoutNet, partial(Signs, lr=0.01), plan=plan)
        for batch in make_batches(3):
            twins.step(batch)
        found.append("since no graph held it" in told(twins.captured).detail)
    assert found == [True, False]
    assert len(seen) == 2
