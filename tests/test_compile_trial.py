"""Compiled code that no graph can hold is timed beside the plain step; what is slower leaves."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn, optim

from models import make_batches, mean_loss
from tape import Twins, reasons
from torchfast import CompileOptions, Plan, StepBatches
from torchfast.compile_trial import CompileTrial
from torchfast.compiled_loss import CompiledLoss
from torchfast.compiler import CompiledCallable

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

ADAMW = partial(optim.AdamW, lr=0.01, fused=True)
AUTO = Plan(compile=CompileOptions(backend="eager"), cuda_graph=True)


class SkippingNet(nn.Module):
    """Draws a number on the host for each layer, as LayerDrop does."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            if torch.rand([]) < 0.0:
                continue
            x = torch.tanh(layer(x))
        return x


class WholeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.layer(x))


@pytest.fixture
def times(monkeypatch):
    """What steps take by the trial's clock; and that "auto" has compiled, as on a CUDA device."""
    seconds, now = {"compiled": 2.0, "plain": 1.0, "looks": 0}, [0.0]

    def clock(trial):
        is_plain = trial._compiled._compiled._is_suspended
        now[0] += seconds["plain" if is_plain else "compiled"]
        seconds["looks"] += 1
        return now[0]

    monkeypatch.setattr(CompileTrial, "_now", clock)
    monkeypatch.setattr(CompiledLoss, "may_step_aside", property(lambda self: True))
    return seconds


@pytest.fixture
def waiting(tape, monkeypatch):
    """What is compiled waits for the device, which what it was made of does not."""
    call = CompiledCallable.__call__

    def wait_and_call(self, model, batch):
        if not self._is_suspended:
            batch[0].sum().item()
        return call(self, model, batch)

    monkeypatch.setattr(CompiledCallable, "__call__", wait_and_call)


def trained(net, plan=AUTO, steps=50):
    twins = Twins(net, ADAMW, mean_loss, plan=plan)
    twins.run(make_batches(steps))  # bit for bit the plain loop
    return twins.captured


def counted(step):
    return step.report().counters


def test_what_a_graph_holds_without_the_compiler_is_captured_if_that_is_faster(waiting, times):
    step = trained(WholeNet)
    assert counted(step)["graphs"] == 1
    assert counted(step)["replays"] > 20
    assert counted(step)["compile_graphs"] > 0  # what was compiled is told all the same
    (aside,) = (d.detail for d in step.report().stepped_aside if "faster without" in d.detail)
    assert "2e+03 ms compiled, 1e+03 ms captured as it is" in aside
    assert "not captured: the host waits for the device" in aside
    assert times["looks"] == 36
    step.close()


def test_compiled_code_that_is_faster_than_the_graph_stays(waiting, times):
    times["compiled"] = 0.5
    step = trained(WholeNet)
    assert counted(step)["graphs"] == 0
    replays = counted(step)["replays"]
    assert replays > 0  # while it was tried
    assert any("the step runs compiled, which is faster" in reason for reason in reasons(step))
    for batch in make_batches(3):
        step(batch)
    # Nor are several at once.
    assert step.steps(StepBatches(make_batches(2))).shape == (2,)
    assert counted(step)["replays"] == replays
    assert "faster without" not in str(step.report())
    step.close()


@pytest.mark.parametrize(("compiled_s", "stays"), [(2.0, False), (0.5, True)])
def test_without_graphs_code_in_pieces_is_timed(compiled_s, stays, times):
    times["compiled"] = compiled_s
    step = trained(SkippingNet, AUTO.replace(cuda_graph=False))
    assert times["looks"] == 36
    assert ("the step is faster without" in str(step.report())) != stays
    assert ("the step is faster so" in str(step.report())) == stays
    assert step._compiled._compiled._is_suspended != stays
    step.close()


def test_code_that_is_captured_is_not_timed(tape, times):
    step = trained(WholeNet)
    assert counted(step)["graphs"] == 1
    assert times["looks"] == 0
    step.close()


def test_code_in_one_piece_is_not_timed(times):
    trained(WholeNet, AUTO.replace(cuda_graph=False)).close()
    assert times["looks"] == 0


def test_what_somebody_asked_for_is_not_timed(monkeypatch):
    monkeypatch.delattr(CompileTrial, "_now")
    trained(SkippingNet, AUTO.replace(cuda_graph=False)).close()


def test_a_step_that_fails_is_not_counted(times):
    step = Twins(SkippingNet, ADAMW, plan=AUTO.replace(cuda_graph=False)).captured
    batches = make_batches(50)
    for batch in batches:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            step((torch.ones(3, 7), torch.zeros(3, dtype=torch.long)))
        step(batch)
    assert "the step is faster without" in str(step.report())
    step.close()


def test_under_deterministic_algorithms_nothing_is_chosen_by_time(times):
    torch.use_deterministic_algorithms(True)
    try:
        trained(SkippingNet, AUTO.replace(cuda_graph=False)).close()
    finally:
        torch.use_deterministic_algorithms(False)
    assert times["looks"] == 0
