"""The planner's times: of steps as they will run, launched in a row or replayed."""

from __future__ import annotations

import array
import copy
from contextvars import ContextVar

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from recomputed import GPT, GPTBlock, token_loss, tokens
from tape import TapeGraph
from torchfast import CUDAGraphOptions, plan_recompute
from torchfast._core.compare import differences


def test_each_choice_is_timed_as_it_runs(monkeypatch):
    """Turn by turn, by steps that really recompute: here each block's run takes a second."""
    clock, standing = [0.0], []
    monkeypatch.setattr("torchfast.memory.recompute_times.time.perf_counter", lambda: clock[0])

    class Slow(GPTBlock):
        def forward(self, x):
            clock[0] += 1.0
            if torch._C._current_graph_task_id() == -1:
                standing.append("forward" in vars(self))
            return super().forward(x)

    model = GPT(layers=4, block=Slow)
    plan = plan_recompute(model, token_loss, tokens(), memory_gb=1.0, repeats=2)
    seconds = {choice.name: choice.step_ms / 1e3 for choice in plan.choices}
    assert seconds == {
        "none": 4, "selective, one of 4": 5, "blocks, one of 4": 5, "selective, one of 2": 6,
        "blocks, one of 2": 6, "selective": 8, "blocks": 8,
    }  # fmt: skip
    assert list(seconds.values()) == sorted(seconds.values())
    assert plan.is_eager
    assert "times are of eager steps" in str(plan)
    assert all(choice.is_measured for choice in plan.choices)
    # What stood in the way in each step, behind the one that counts: none is first in each turn,
    # and once more behind the first one, to tell how many steps are a turn.
    steps = [tuple(standing[n : n + 4]) for n in range(4, len(standing), 4)]
    turn = [False, *[True] * 6]
    turn_of_two = [is_recomputed for is_recomputed in turn for _ in range(2)]
    assert [any(step) for step in steps] == [*turn, False, *turn_of_two * 2]


@pytest.mark.parametrize(("step_s", "steps"), [(0.05, 4), (0.001, 8), (0.3, 2)])
def test_the_steps_of_a_turn_follow_one_another_without_a_wait(monkeypatch, step_s, steps):
    clock, done = [0.0], []
    monkeypatch.setattr("torchfast.memory.recompute_times.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("torchfast.memory.recompute_times.wait", lambda device: done.append("wait"))

    class Slow(GPTBlock):
        def forward(self, x):
            if torch._C._current_graph_task_id() == -1:  # what runs again costs nothing here
                clock[0] += step_s / 4
                done.append("block")
            return super().forward(x)

    plan = plan_recompute(GPT(4, block=Slow), token_loss, tokens(), memory_gb=1.0, repeats=2)
    assert all(choice.step_ms == pytest.approx(step_s * 1e3) for choice in plan.choices)
    # All take the same: what is simplest comes first, and then what keeps least.
    first, *others = plan.choices
    assert first.name == "none"
    assert [c.saved_bytes for c in others] == sorted(c.saved_bytes for c in others)
    turn = ["wait", *["block"] * 4 * steps, "wait"]
    assert done[-14 * len(turn) :] == turn * 14


def test_a_choice_that_does_not_fit_into_the_device_is_estimated(monkeypatch):
    clock = array.array("d", [0.0])
    monkeypatch.setattr("torchfast.memory.recompute_times.time.perf_counter", lambda: clock[0])
    # The blocks' own times are taken by another clock.
    monkeypatch.setattr("torchfast._core.reading.time.perf_counter", lambda: clock[0])

    class Large(GPTBlock):
        def forward(self, x):
            clock[0] += 1.0
            if "forward" not in vars(self) and torch.is_grad_enabled():
                raise torch.OutOfMemoryError("a block that keeps everything")
            return super().forward(x)

    model = GPT(layers=4, block=Large)
    plan = plan_recompute(model, token_loss, tokens(), memory_gb=1.0, repeats=1)
    found = {choice.name: (choice.is_measured, choice.step_ms / 1e3) for choice in plan.choices}
    assert found["blocks"] == (True, 8)
    assert found["none"] == (False, 4)
    assert not found["blocks, one of 2"][0]
    assert str(plan).count("time estimated") == 5

    # Where to wait for the device takes long, both are as if nobody waited for each step.
    def wait(device):
        clock[0] += 10.0

    monkeypatch.setattr("torchfast.memory.recompute_times.wait", wait)
    plan = plan_recompute(model, token_loss, tokens(), memory_gb=1.0, repeats=1)
    found = {choice.name: choice.step_ms / 1e3 for choice in plan.choices}
    assert found["none"] < found["blocks"] < 20


# -- Where a graph will hold the step --------------------------------------------------------------


class HostBound(GPTBlock):
    """Costs the host a second, and the device nothing that anybody would notice."""

    clock: ContextVar[float]  # not watched by graphs: a step that counts is not captured
    fits = True

    def forward(self, x):
        self.clock.set(self.clock.get() + 1.0)
        if not self.fits and "forward" not in vars(self) and _get_current_dispatch_mode():
            raise torch.OutOfMemoryError("a block that keeps everything")
        return super().forward(x)


@pytest.fixture
def host_bound(tape, monkeypatch):
    """A model whose blocks cost the host a second each, on a tape with 10,000 calls in one."""
    clock = ContextVar("clock", default=0.0)
    monkeypatch.setattr("torchfast.memory.recompute_times.time.perf_counter", clock.get)
    monkeypatch.setattr("torchfast._core.reading.time.perf_counter", clock.get)
    played, play = [], TapeGraph.replay

    def replay(graph):
        clock.set(clock.get() + 1e-4 * len(graph.tape.calls))
        played.append(len(graph.tape.calls))
        play(graph)

    monkeypatch.setattr(TapeGraph, "replay", replay)
    monkeypatch.setattr(HostBound, "clock", clock, raising=False)
    return GPT(layers=4, dropout=0.1, block=HostBound), played


def costs(plan):
    plain = next(choice.step_ms for choice in plan.choices if choice.recompute is False)
    return {choice.name: choice.step_ms / plain for choice in plan.choices}


def test_where_a_graph_will_hold_the_step_its_replays_are_timed(host_bound):
    model, played = host_bound
    batch, options = tokens(), {"memory_gb": 1.0, "repeats": 2}
    launched = plan_recompute(model, token_loss, batch, **options)
    assert not played
    assert launched.is_eager
    assert costs(launched)["selective"] == pytest.approx(2.0)
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = plan_recompute(model, token_loss, batch, **options, cuda_graph=True)
    assert not found.is_eager
    assert "times are of replays of CUDA graphs" in str(found)
    assert all(choice.is_measured for choice in found.choices)
    # Each way by a graph of its own that holds what it recomputes, and none of the host's time.
    by_way = played[:7]
    # Behind each capture, to warm up, one that tells how many are a turn, and two turns of these.
    steps = round(2000 / by_way[0])
    assert steps == 7
    turns = [way for way in by_way for _ in range(steps)]
    assert played == [*by_way * 2, by_way[0], *turns * 2]
    expected = [calls / 10 for calls in sorted(by_way)]
    assert [choice.step_ms for choice in found.choices] == pytest.approx(expected)
    assert by_way[0] == min(by_way)
    assert 1.0 < costs(found)["selective"] < costs(found)["blocks"] < 1.9
    assert [c.saved_bytes for c in sorted(found.choices, key=lambda c: c.name)] == [
        c.saved_bytes for c in sorted(launched.choices, key=lambda c: c.name)
    ]
    # And the model is as it was.
    assert differences(before, (model.state_dict(), torch.get_rng_state())) == []
    assert all(p.grad is None for p in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_does_not_fit_beside_graphs_is_estimated_in_their_measure(host_bound, monkeypatch):
    model, played = host_bound
    monkeypatch.setattr(HostBound, "fits", False)
    found = plan_recompute(
        model, token_loss, tokens(), memory_gb=1.0, repeats=1, cuda_graph=CUDAGraphOptions()
    )
    ways = {choice.name: choice for choice in found.choices}
    assert not found.is_eager
    assert {name for name, choice in ways.items() if choice.is_measured} == {"blocks", "selective"}
    # Half of a launched step's time were forwards, and so it is taken to be in a replay.
    assert ways["none"].step_ms == pytest.approx(ways["blocks"].step_ms / 2)
    # Each way that fits behind its capture, to warm up and in a turn; one more tells its length.
    assert len(played) == 2 * 2 + 1 + 2 * round(2000 / played[0])


def test_a_step_that_cannot_be_captured_is_timed_as_it_will_run(host_bound, caplog):
    model, played = host_bound

    def asking(model, batch):
        loss = token_loss(model, batch)
        return loss if float(loss.detach()) > -1 else -loss

    found = plan_recompute(model, asking, tokens(), memory_gb=1.0, repeats=1, cuda_graph=True)
    assert found.is_eager
    assert not played
    assert costs(found)["blocks"] == pytest.approx(2.0)
    assert "times eager steps, since the step could not be captured" in caplog.text
    assert "the host waits" in caplog.text


def test_without_graphs_on_a_device_its_steps_are_timed():
    found = plan_recompute(GPT(), token_loss, tokens(), memory_gb=1.0, repeats=1, cuda_graph=True)
    assert found.is_eager
    with pytest.raises(TypeError, match="cuda_graph must be True or False"):
        plan_recompute(GPT(), token_loss, tokens(), memory_gb=1.0, cuda_graph="yes")
