"""The planner: what it says that is kept is kept, and what fits is chosen."""

from __future__ import annotations

import array
import copy
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from recomputed import GPT, GPTBlock, kept_with, make, token_loss, tokens
from tape import TapeGraph
from torchfast import (
    CUDAGraphOptions,
    RecomputeChoice,
    RecomputeOptions,
    RecomputePlan,
    plan_recompute,
)
from torchfast._core.compare import differences
from torchfast.memory.kept_results import Result, choose_kept
from torchfast.memory.recompute import block_forwards
from torchfast.memory.recompute_plan import fixed_bytes
from torchfast.memory.recompute_times import peak_rises


@pytest.mark.parametrize("name", ["gpt", "gpt with dropout", "llama", "vit", "resnet"])
def test_what_is_said_is_what_is_kept(name):
    if name in ("llama", "vit"):
        pytest.importorskip("transformers")
    model, loss_fn, batch = make(name)
    plan = plan_recompute(model.train(), loss_fn, batch, memory_gb=1.0, repeats=1)
    names = [choice.name for choice in plan.choices]
    assert sorted(names) == [
        "blocks", "blocks, one of 2", "none", "selective", "selective, one of 2",
    ]  # fmt: skip
    for choice in plan.choices:
        kept = kept_with(choice.recompute, model, loss_fn, batch)
        assert choice.saved_bytes == pytest.approx(kept, rel=0.1), choice.name
        # It is exact, but for what tensors of the host's own take.
        assert abs(choice.saved_bytes - kept) <= 1024, choice.name


def test_the_model_is_as_it_was():
    model, loss_fn, batch = make("resnet")
    model.eval()
    loss_fn(model, batch).backward()
    before = copy.deepcopy(model.state_dict())
    gradients = [p.grad for p in model.parameters()]
    rng = torch.get_rng_state()
    attributes = [dict(vars(module)) for module in model.modules()]
    plan_recompute(model, loss_fn, batch, memory_gb=1.0, repeats=1)
    assert differences(before, dict(model.state_dict())) == []
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(rng, torch.get_rng_state())
    assert not any(module.training for module in model.modules())
    assert [dict(vars(module)) for module in model.modules()] == attributes


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

    clock: array.array[float]  # not watched by graphs: a step that counts is not captured
    fits = True

    def forward(self, x):
        self.clock[0] += 1.0
        if not self.fits and "forward" not in vars(self) and _get_current_dispatch_mode():
            raise torch.OutOfMemoryError("a block that keeps everything")
        return super().forward(x)


@pytest.fixture
def host_bound(tape, monkeypatch):
    """A model whose blocks cost the host a second each, on a tape with 10,000 calls in one."""
    clock = array.array("d", [0.0])
    monkeypatch.setattr("torchfast.memory.recompute_times.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("torchfast._core.reading.time.perf_counter", lambda: clock[0])
    played, play = [], TapeGraph.replay

    def replay(graph):
        clock[0] += 1e-4 * len(graph.tape.calls)
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


def plan_of(memory_bytes, fixed=100):
    choices = [
        RecomputeChoice(name=name, recompute=recompute, saved_bytes=saved, step_ms=ms,
                        fits=fixed + saved <= memory_bytes)
        for name, recompute, saved, ms in [
            ("none", False, 1000, 10.0), ("selective", "selective", 500, 11.0),
            ("blocks", "blocks", 100, 13.0),
        ]
    ]  # fmt: skip
    return RecomputePlan(choices=tuple(choices), fixed_bytes=fixed, memory_bytes=memory_bytes)


@pytest.mark.parametrize(
    ("memory", "name"), [(1100, "none"), (1099, "selective"), (599, "blocks"), (199, None)]
)
def test_the_fastest_that_fits_is_chosen(memory, name):
    plan = plan_of(memory)
    assert (plan.choice.name if plan.choice else None) == name
    text = str(plan)
    assert ("<- chosen" in text) == (name is not None)
    assert ("nothing fits: blocks needs" in text) == (name is None)


def test_the_memory_decides_on_a_real_model():
    model, loss_fn, batch = make("gpt")
    roomy = plan_recompute(model, loss_fn, batch, memory_gb=1.0, repeats=1)
    least = min(roomy.choices, key=lambda choice: choice.saved_bytes)
    tight = (roomy.fixed_bytes + least.saved_bytes) / 1e9
    assert roomy.choice.name == "none" or roomy.choice.step_ms <= roomy.choices[0].step_ms
    found = plan_recompute(model, loss_fn, batch, memory_gb=tight, repeats=1)
    assert found.choice.recompute == "blocks"
    assert plan_recompute(model, loss_fn, batch, memory_gb=1e-6, repeats=1).choice is None


def test_the_peak_decides_where_a_device_tells_it(monkeypatch):
    """Temporary results, such as the gradient of logits, are saved by nobody."""
    model, loss_fn, batch = make("gpt")
    roomy = plan_recompute(model, loss_fn, batch, memory_gb=1.0, repeats=1)
    assert all(choice.needed_bytes is None for choice in roomy.choices)
    assert "peak GiB" not in str(roomy)
    gradients = sum(p.nbytes for p in model.parameters())
    # In the order of the ways: none, selective by two, selective, blocks by two, blocks.
    rises = [5 * 10**6, None, 3 * 10**6, 2 * 10**6, 10**6]
    monkeypatch.setattr("torchfast.memory.recompute_plan.peak_rises", lambda *_: rises)
    needed = roomy.fixed_bytes - gradients + 2 * 10**6
    found = plan_recompute(model, loss_fn, batch, memory_gb=needed / 1e9, repeats=1)
    needs = {choice.name: choice.needed_bytes for choice in found.choices}
    assert needs["blocks, one of 2"] == needed
    assert needs["none"] == needed + 3 * 10**6
    assert needs["selective, one of 2"] is None  # not told
    fits = {choice.name for choice in found.choices if choice.fits}
    assert fits == {"selective, one of 2", "blocks, one of 2", "blocks"}
    assert "peak GiB" in str(found)
    assert f" {needed / 2**30:>10.4f}" in str(found)
    rises[1:] = [None] + [10**9] * 3
    tight = plan_recompute(model, loss_fn, batch, memory_gb=1e-6, repeats=1)
    assert tight.choice is None
    assert "nothing fits: selective, one of 2 needs" in str(tight)  # by what is saved


@pytest.mark.parametrize(("device_gb", "fits"), [(0.9, True), (1.0, False), (1.1, False)])
def test_what_has_run_out_of_memory_fits_into_a_larger_device_only(monkeypatch, device_gb, fits):
    """By what is saved it would fit: what ran out is what nobody saves."""
    model, loss_fn, batch = make("gpt")
    rises = [math.inf, *[10**6] * 4]
    planning = "torchfast.memory.recompute_plan"
    monkeypatch.setattr(f"{planning}.peak_rises", lambda *_: rises)
    monkeypatch.setattr(f"{planning}.device_bytes", lambda _: int(device_gb * 1e9))
    found = plan_recompute(model, loss_fn, batch, memory_gb=1.0, repeats=1)
    (none,) = [choice for choice in found.choices if choice.name == "none"]
    assert (none.fits, none.needed_bytes) == (fits, None)
    assert (found.choice.name == "none") == fits
    needed = found.fixed_bytes - sum(p.nbytes for p in model.parameters()) + 2 * 10**9
    rises[1:] = [2 * 10**9, *[3 * 10**9] * 3]
    text = str(plan_recompute(model, loss_fn, batch, memory_gb=1.0, repeats=1))
    asked = f"nothing fits: selective, one of 2 needs {needed / 2**30:.4f} GiB"
    assert (asked in text) != fits
    rises[:] = [math.inf] * 5
    text = str(plan_recompute(model, loss_fn, batch, memory_gb=1.0, repeats=1))
    assert ("nothing fits: all ran out of memory" in text) != fits


def test_the_peak_is_that_of_a_steady_step(monkeypatch):
    """Without the gradients of the one before, and in each way as it is then."""
    model = GPT(layers=2)
    kinds = [[], block_forwards([("blocks.0", model.blocks[0])], RecomputeOptions())]
    seen = []

    def step(batch):
        seen.append("forward" in vars(model.blocks[0]))
        if batch == "too large" and not seen[-1]:
            raise torch.OutOfMemoryError("no")
        model.zero_grad(set_to_none=True)
        token_loss(model, tokens()).backward()

    def allocated(device):
        assert all(p.grad is None for p in model.parameters())
        return 100

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: seen.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100 + 10 * len(seen))
    device = torch.device("cuda", 0)
    assert peak_rises(step, "small", model, kinds, device) == [30, 60]
    assert seen == [False, "reset", False, True, "reset", True]
    seen.clear()
    assert peak_rises(step, "too large", model, kinds, device) == [math.inf, 40]
    assert "forward" not in vars(model.blocks[0])
    assert peak_rises(step, "small", model, kinds, torch.device("cpu")) == [None, None]


def test_what_is_there_besides():
    model = nn.Linear(10, 10, bias=False)
    model.register_buffer("table", torch.zeros(5))
    assert fixed_bytes(model, None) == 400 + 20 + 400
    adam = torch.optim.Adam(model.parameters())
    assert fixed_bytes(model, adam) == 820 + 800  # not there yet
    model(torch.ones(1, 10)).sum().backward()
    adam.step()
    assert fixed_bytes(model, adam) == 820 + 800 + 4  # and the counter of its steps
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert fixed_bytes(model, sgd) == 820 + 400
    model.weight.requires_grad_(False)
    assert fixed_bytes(model, None) == 420


def test_results_are_kept_by_what_they_cost():
    attention = Result("attention", 100, 1.0)
    cheap, dear = Result("product", 100, 1e3), Result("product", 100, 1e6)
    useless = Result("product", 1, 1e9, is_needed=False)
    results = [cheap, attention, dear, useless]
    assert choose_kept(results, 1000, 0, 0.2).kept == (False, True, True, False)
    assert choose_kept(results, 1000, 0, 1.0).kept == (True, True, True, False)
    assert choose_kept(results, 1000, 150, 0.2).kept == (False, False, False, False)


def test_autocast_keeps_less():
    model = GPT()
    plain = plan_recompute(model, token_loss, tokens(), memory_gb=1.0, repeats=1)
    half = plan_recompute(
        model, token_loss, tokens(), memory_gb=1.0, repeats=1, autocast=torch.bfloat16
    )

    def blocks(plan):
        return next(c for c in plan.choices if c.name == "none").saved_bytes

    assert blocks(half) < blocks(plain)


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ValueError, match="no blocks of the model repeat"):
        plan_recompute(nn.Linear(2, 2), token_loss, tokens(), memory_gb=1.0)
    with pytest.raises(ValueError, match="memory_gb must be > 0"):
        plan_recompute(GPT(), token_loss, tokens(), memory_gb=0)
    with pytest.raises(TypeError, match="loss_fn must be callable"):
        plan_recompute(GPT(), None, tokens(), memory_gb=1)
