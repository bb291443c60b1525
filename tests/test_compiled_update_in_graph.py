"""`CompileOptions(update="auto")` in a step that a graph holds: both ways are timed as replays."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import optim

from models import DropoutNet, make_batches, mean_loss
from tape import TapeBackend, TapeGraph, Twins, counts
from test_compiled_update import Asking, Signs
from test_compiled_update_auto import AUTO, measured_as, told
from torchfast.compiled_update import CompiledUpdate
from torchfast.graphs import graphed_update
from torchfast.graphs.backend import RoomMadeError
from torchfast.graphs.trials import captured_alone

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def run_close(twins, batches):
    """Run steps, each of which ends close to that of the plain loop."""
    for batch in batches:
        twins.step(batch)
        assert [d for d in twins.differences(gradients=False) if not d.distance < 1e-5] == []


def update_graphs(twins):
    return twins.captured.report().counters["update_graphs"]


def test_measured_before_a_capture(tape, monkeypatch):
    measured_as(monkeypatch, 0.5)
    twins = Twins(DropoutNet, partial(optim.RMSprop, lr=0.01), plan=AUTO.replace(cuda_graph=True))
    for batch in make_batches(8):
        twins.step(batch)
        assert [d for d in twins.differences() if not d.distance < 1e-5] == []
    assert counts(twins.captured)[:2] == (1, 5)
    # The update runs behind the graph here, launched kernel by kernel.
    assert told(twins.captured).detail.endswith("0.500 of the time as it is (0.500 to 0.500)")


def in_graph_as(monkeypatch, in_graph):
    """Let updates be captured by themselves in another way."""
    monkeypatch.setattr(graphed_update, "captured_alone", in_graph)


@pytest.mark.parametrize("compiled_ms", [0.5, 2.0])
def test_timed_as_replays_where_a_graph_will_hold_the_update(tape, monkeypatch, compiled_ms):
    timed, live, on_side_stream = [], [], []
    measured_as(monkeypatch, compiled_ms, timed=timed)

    @contextmanager
    def captured(work, device):
        def noting():
            on_side_stream.append(tape[-1].on_side_stream > 0)
            return work()

        with captured_alone(noting, device) as replay:
            live.append(replay)
            yield replay
            live.remove(replay)

    in_graph_as(monkeypatch, captured)
    twins = Twins(DropoutNet, partial(Signs, lr=0.01), plan=AUTO.replace(cuda_graph=True))
    run_close(twins, make_batches(8))
    assert [type(way.__self__) for way in timed] == [TapeGraph] * 2
    assert not live
    assert [way.__self__.tape for way in timed] == [None, None]  # reset
    assert on_side_stream == [True] * 4  # before each capture, and in it
    assert counts(twins.captured)[:2] == (1, 5)
    assert told(twins.captured).detail.endswith(" in a graph")
    assert told(twins.captured).outcome == ("applied" if compiled_ms < 1 else "left alone")


@pytest.mark.parametrize("which", [0, 1])
def test_what_no_graph_holds_is_timed_as_it_is_launched(tape, monkeypatch, which):
    begun, ended = [], []
    measured_as(monkeypatch, 0.5)

    @contextmanager
    def captured(work, device):
        begun.append(work)
        if len(begun) > which:
            work()  # what a capture does before it fails
            raise RuntimeError("operation not permitted when stream is capturing")
        try:
            yield work
        finally:
            ended.append(work)

    in_graph_as(monkeypatch, captured)
    twins = Twins(DropoutNet, partial(Signs, lr=0.01), plan=AUTO.replace(cuda_graph=True))
    run_close(twins, make_batches(8))
    assert ended == begun[:which]
    detail = told(twins.captured).detail
    assert detail.endswith("launched kernel by kernel, since no graph held it (RuntimeError)")


def asking(model, batch):
    loss = mean_loss(model, batch)
    return loss + 0.0 * loss.item()


class Replacing(Signs):
    """One that makes its state anew at each update."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for state in self.state.values():
            state["mean"] = state["mean"].clone()


@pytest.mark.parametrize("compiled_ms", [0.5, 2.0])
@pytest.mark.parametrize(("make", "loss_fn"), [(Signs, asking), (Replacing, mean_loss)])
def test_measured_again_if_no_graph_holds_the_update(tape, monkeypatch, make, loss_fn, compiled_ms):
    seen, timed = [], []
    measured_as(monkeypatch, compiled_ms, seen, timed)
    plan = AUTO.replace(cuda_graph=True)
    twins = Twins(DropoutNet, partial(make, lr=0.01), loss_fn, plan=plan)
    run_close(twins, make_batches(8))
    assert counts(twins.captured)[:2] == (0, 0)
    assert len(seen) == 2  # and not at each step
    are_replays = [isinstance(getattr(way, "__self__", None), TapeGraph) for way in timed]
    assert are_replays == [True, True, False, False]
    assert told(twins.captured).detail.endswith(
        "of the time as it is " + f"({compiled_ms:.3f} to {compiled_ms:.3f})"
    )
    assert told(twins.captured).outcome == ("applied" if compiled_ms < 1 else "left alone")
    assert (update_graphs(twins) > 0) or compiled_ms > 1


def asking_if_small(model, batch):
    loss = mean_loss(model, batch)
    return loss if len(batch[0]) > 2 else loss + 0.0 * loss.item()


def small(batch):
    return tuple(t[:2].contiguous() for t in batch)


def another_entry(_, optimizer):
    """Have the graphs captured anew."""
    for group in optimizer.param_groups:
        group["extra"] = group.get("extra", 0) + 1


@pytest.mark.parametrize("small_is_next", [True, False])
def test_a_kind_that_no_graph_holds_beside_one_that_is_captured_changes_nothing(
    tape, monkeypatch, small_is_next
):
    """Not while that one is captured anew either, in which nothing could be measured."""
    seen, ways = [], []
    measured_as(monkeypatch, 0.5, seen)
    run_compiled = CompiledUpdate._run_compiled

    def noting(self):
        ways.append(any(backend.tape is not None for backend in tape))
        return run_compiled(self)

    monkeypatch.setattr(CompiledUpdate, "_run_compiled", noting)
    plan = AUTO.replace(cuda_graph=True)
    twins = Twins(DropoutNet, partial(Signs, lr=0.01), asking_if_small, plan=plan)
    batches = iter(make_batches(80))

    def steps(number, form):
        run_close(twins, [form(next(batches)) for _ in range(number)])

    steps(14, tuple)
    steps(5, small)
    assert counts(twins.captured)[0] == 1
    for _ in range(2):
        twins.both(another_entry)
        if small_is_next:
            steps(2, small)
        before = ways.count(True)
        steps(14, tuple)
        assert ways.count(True) == before + 1  # what is captured anew is compiled
        steps(2, small)
    assert len(seen) == 1
    assert told(twins.captured).detail.endswith(" in a graph")


def test_what_is_forgotten_is_counted_and_may_come_later(tape, monkeypatch):
    """Values that are not finite put the second measurement off; it is not begun anew for that."""
    seen = []
    measured_as(monkeypatch, 2.0, seen)
    plan = AUTO.replace(cuda_graph=True, nonfinite="skip")
    twins = Twins(DropoutNet, partial(Signs, lr=0.01), asking, plan=plan)
    batches = make_batches(10)
    trainer = twins.captured
    for batch in batches[:2]:
        trainer(batch)
    assert len(seen) == 1
    for x, y in batches[2:5]:
        trainer((x * torch.nan, y))
    for batch in batches[5:]:
        trainer(batch)
    assert len(seen) == 2
    assert told(trainer).outcome == "left alone"
    assert "given up" not in told(trainer).detail
    assert update_graphs(twins) == 2


def test_what_cannot_be_compiled_is_not_tried_again(tape, monkeypatch):
    tried = []
    found_out = CompiledUpdate._found_out
    monkeypatch.setattr(
        CompiledUpdate, "_found_out", lambda self, *a: tried.append(1) or found_out(self, *a)
    )
    plan = AUTO.replace(cuda_graph=True)
    twins = Twins(DropoutNet, partial(Asking, lr=0.01), plan=plan)
    twins.run(make_batches(8))  # bit for bit
    assert len(tried) == 1
    assert told(twins.captured).outcome == "stepped aside"


def test_a_capture_that_made_room_is_tried_again(tape, monkeypatch):
    measured_as(monkeypatch, 0.5)
    capture, failed = TapeBackend.capture, []

    def full(self, body, generators):
        if not failed:
            failed.append(1)
            raise RoomMadeError
        return capture(self, body, generators)

    monkeypatch.setattr(TapeBackend, "capture", full)
    twins = Twins(DropoutNet, partial(Signs, lr=0.01), plan=AUTO.replace(cuda_graph=True))
    for batch in make_batches(8):
        twins.step(batch)
    assert failed
    assert told(twins.captured).detail.endswith(" in a graph")


def test_a_graph_that_runs_out_of_memory_ends_the_measurement(tape, monkeypatch):
    def captured(work, device):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    in_graph_as(monkeypatch, captured)
    twins = Twins(DropoutNet, partial(Signs, lr=0.01), plan=AUTO.replace(cuda_graph=True))
    twins.run(make_batches(6))  # bit for bit
    assert told(twins.captured).outcome == "left alone"
    assert "memory ran out" in told(twins.captured).detail
