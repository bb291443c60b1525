"""Phases: who is told of them, what they cost when nobody listens, and that they change nothing."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import threading
import timeit

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from models import DropoutNet, make_batches, mean_loss
from torchfast import MicroBatches, PrefetchingLoader, Trainer, phase
from torchfast._core import phases
from torchfast._core.compare import differences


class Listener:
    """Is told of phases, and keeps the order."""

    def __init__(self):
        self.told = []

    def begin(self, name):
        self.told.append(f"+{name}")
        return name

    def end(self, begun):
        self.told.append(f"-{begun}")


@pytest.fixture
def listener():
    found = Listener()
    phases.start_recording(found)
    yield found
    phases.stop_recording(found)


def make_trainer(plan="exact", **options):
    torch.manual_seed(0)
    model = DropoutNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Trainer(model, optimizer, mean_loss, plan, **options)


def annotations(prof, tmp_path):
    """Return the names and spans of torchfast's annotations in the trace, by start."""
    path = tmp_path / "trace.json"
    prof.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    found = [e for e in events if e.get("name", "").startswith("torchfast.") and "dur" in e]
    assert {e["cat"] for e in found} <= {"user_annotation"}
    return sorted(((e["ts"], e["ts"] + e["dur"], e["name"]) for e in found), key=lambda f: f[0])


# --- what is told ---------------------------------------------------------------------------------


def test_a_profile_of_a_step_shows_its_phases_in_order(tmp_path):
    trainer = make_trainer(max_grad_norm=1.0)
    (batch,) = make_batches(1)
    trainer.step(batch)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        trainer.step(batch)
    found = annotations(prof, tmp_path)
    assert [name for *_, name in found] == [
        "torchfast.forward",
        "torchfast.backward",
        "torchfast.update",
    ]
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(found)), "they overlap"


def test_what_a_phase_holds_lies_within_it(tmp_path):
    trainer = make_trainer(max_grad_norm=1.0)
    (batch,) = make_batches(1)
    trainer.step(batch)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        trainer.step(batch)
    spans = {name: (start, stop) for start, stop, name in annotations(prof, tmp_path)}
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    def inside(name, span):
        start, stop = spans[f"torchfast.{span}"]
        mine = [e for e in events if e.get("cat") == "cpu_op" and e["name"].startswith(name)]
        assert mine, f"no {name} in the trace"
        return all(start <= e["ts"] <= stop for e in mine)

    assert inside("aten::addmm", "forward")
    assert inside("aten::_foreach_norm", "update")  # clipping
    assert not inside("aten::_foreach_norm", "backward")


def test_each_micro_batch_has_its_own_phases(listener):
    trainer = make_trainer(accumulate=3)
    trainer.step(MicroBatches(make_batches(3)))
    both = ["+forward", "-forward", "+backward", "-backward"]
    assert listener.told == [*both * 3, "+update", "-update"]


def test_the_halves_of_a_step_have_the_same_phases(listener):
    trainer = make_trainer()
    trainer.forward_backward(make_batches(1)[0])
    assert listener.told == ["+forward", "-forward", "+backward", "-backward"]
    trainer.update()
    assert listener.told[4:] == ["+update", "-update"]


def test_a_loader_names_its_waits_with_and_without_groups(listener):
    with PrefetchingLoader(make_batches(4), "cpu", accumulate=2) as loader:
        assert len(list(loader)) == 2
    assert listener.told == ["+data_wait", "-data_wait"] * 5  # four batches, and the end


def test_a_copy_in_the_step_is_named(listener):
    class Elsewhere:
        """Moves itself, so it has to be asked."""

        def __init__(self, batch):
            self.batch = batch

        def to(self, device):
            return self

    def loss_fn(model, wrapped):
        return mean_loss(model, wrapped.batch)

    torch.manual_seed(0)
    model = DropoutNet()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
    trainer.step(Elsewhere(make_batches(1)[0]))
    assert listener.told[:4] == ["+h2d", "-h2d", "+forward", "-forward"]


def test_a_phase_ends_with_the_error_that_ends_its_body(listener):
    with pytest.raises(ZeroDivisionError), phase("mine"):
        raise ZeroDivisionError
    assert listener.told == ["+mine", "-mine"]


def test_an_error_passes_where_nobody_listens():
    with pytest.raises(ZeroDivisionError), phase("mine"):
        raise ZeroDivisionError


def test_other_threads_are_not_told_of(listener):
    def work():
        with phase("elsewhere"):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert listener.told == []


def test_who_no_longer_listens_is_not_told():
    found = Listener()
    phases.start_recording(found)
    phases.stop_recording(Listener())  # another, who was never told
    with phase("first"):
        pass
    phases.stop_recording(found)
    with phase("second"):
        pass
    assert found.told == ["+first", "-first"]
    assert phases._recorders == {}


def test_what_goes_on_beside_the_step_is_for_profilers_only(listener, tmp_path):
    with profile(activities=[ProfilerActivity.CPU]) as prof, phases.annotation("beside"):
        torch.ones(3).sum()
    assert listener.told == []
    assert [name for *_, name in annotations(prof, tmp_path)] == ["torchfast.beside"]


# --- Nsight Systems -------------------------------------------------------------------------------


@pytest.fixture
def nvtx(monkeypatch):
    told = []
    monkeypatch.setattr(phases, "_UNDER_NSIGHT", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: told.append(f"+{name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("-"))
    return told


def test_nsight_is_told_by_ranges(nvtx):
    with phase("mine"), phases.annotation("beside"):
        pass
    assert nvtx == ["+torchfast.mine", "+torchfast.beside", "-", "-"]


def test_nsight_is_told_once_where_the_profiler_is_on_too(nvtx):
    with profile(activities=[ProfilerActivity.CPU]), phase("mine"):
        pass
    assert nvtx == []


def test_ranges_are_closed_though_the_profiler_ends_within(nvtx, tmp_path):
    prof = profile(activities=[ProfilerActivity.CPU])
    with phase("outer"):
        with prof:
            pass
        with phase("inner"):
            pass
    assert nvtx == ["+torchfast.outer", "+torchfast.inner", "-", "-"]


@pytest.mark.parametrize(
    ("environment", "is_built", "expected"),
    [
        ({}, True, False),
        ({"NSYS_PROFILING_SESSION_ID": ""}, True, False),
        ({"NSYS_PROFILING_SESSION_ID": "7"}, True, True),
        ({"NVTX_INJECTION64_PATH": "/opt/libToolsInjection64.so"}, True, True),
        ({"NSYS_PROFILING_SESSION_ID": "7"}, False, False),
    ],
)
def test_nsight_is_known_by_its_environment(environment, is_built, expected, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
    assert phases.is_nsight_here(environment) is expected


# --- what it costs --------------------------------------------------------------------------------


class Empty:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def nanoseconds(statement, **names):
    """Return what a statement takes, as the least of many runs: the rest is the machine's noise."""
    timer = timeit.Timer(statement, globals=names)
    return min(timer.repeat(repeat=25, number=4000)) / 4000 * 1e9


def ratios(statement, **names):
    """Return what ``with`` of the statement takes over one of an object that does nothing."""
    found = []
    for _ in range(5):
        empty = nanoseconds("with nothing: pass", nothing=Empty())
        found.append(nanoseconds(f"with {statement}: pass", **names) / empty)
    return statistics.median(found)


def test_it_is_free_where_nobody_listens():
    assert ratios("phase('forward')", phase=phase) < 3


def test_the_measure_of_cost_sees_what_is_not_free():
    assert ratios("annotation('forward')", annotation=record_function) > 6


# --- it changes nothing ---------------------------------------------------------------------------


def test_a_step_computes_the_same_while_it_is_looked_at(listener):
    batches = make_batches(4)

    def losses(trainer):
        torch.manual_seed(1)
        return [trainer.step(batch) for batch in batches]

    phases.stop_recording(listener)
    plain = make_trainer(max_grad_norm=0.5)
    expected = losses(plain)
    phases.start_recording(listener)
    seen = make_trainer(max_grad_norm=0.5)
    with profile(activities=[ProfilerActivity.CPU]):
        found = losses(seen)
    assert listener.told
    assert not differences(expected, found)
    assert not differences(plain.state_dict(), seen.state_dict())


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        with phase("mine"):
            x = self.linear(x)
        with phase("yours"):
            return x.sin()


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_function_is_not_broken_by_a_phase_nor_compiled_again(listener):
    phases.stop_recording(listener)
    model, x = Named(), torch.randn(2, 4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        expected = compiled(x)
        phases.start_recording(listener)
        assert torch.equal(compiled(x), expected)
        with profile(activities=[ProfilerActivity.CPU]):
            assert torch.equal(compiled(x), expected)
    assert torch.equal(model(x), expected)
    assert listener.told == ["+mine", "-mine", "+yours", "-yours"]  # of the eager one


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_phase_is_harmless_to_what_is_compiled_while_somebody_listens(listener):
    compiled = torch.compile(Named(), backend="eager", fullgraph=True)
    with profile(activities=[ProfilerActivity.CPU]):
        compiled(torch.randn(2, 4))
    assert listener.told == []


def test_the_environment_of_nsight_does_no_harm_where_there_is_none():
    code = (
        "import os; os.environ.update(NSYS_PROFILING_SESSION_ID='1')\nfrom torchfast import phase"
    )
    body = f"{code}\nwith phase('mine'): print('fine')"
    found = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=True)
    assert found.stdout == "fine\n"
