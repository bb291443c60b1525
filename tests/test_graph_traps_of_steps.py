"""More of the traps that train wrong without an error, by their numbers in the project's list.

Those of casts, generators, static memory, the host, scaling, groups and failed captures; as in
test_graph_traps.py, with the guards taken away one by one.
"""

from __future__ import annotations

import copy
import random
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel

from models import DropoutNet, make_batches, mean_loss
from poison import POISONS, SKIP, BufferNet, as_batch, batches_with, fp16, poisoned_loss
from tape import CPU, TapeBackend, Twins, counts, drifts, reasons, without_check
from torchfast import MicroBatches, Plan, TrainStep
from torchfast._core.compare import differences
from torchfast._core.rng import seed_everything
from torchfast.graphs import CUDAGraphStep, engine
from torchfast.graphs.host_facts import HostFacts
from torchfast.graphs.outputs import StaticOutputs
from torchfast.graphs.signature import Call
from torchfast.graphs.static_inputs import StaticInputs
from torchfast.graphs.watch import StateWatch

pytestmark = pytest.mark.usefixtures("tape")

ADAMW = partial(optim.AdamW, lr=0.01, fused=True)


def tensors_only(monkeypatch):
    describe = engine.describe

    def forgetful(*inputs):
        call = describe(*inputs)
        return Call(tuple(p for p in call.key if p[0] is torch.Tensor), call.tensors)

    monkeypatch.setattr(engine, "describe", forgetful)


# --- 11: autocast ---------------------------------------------------------------------------------


def test_11_a_step_inside_the_users_autocast_is_captured_and_exact():
    models = [nn.Linear(8, 4)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [ADAMW(m.parameters()) for m in models]

    def step_of(model, optimizer):
        def fn(batch):
            optimizer.zero_grad()
            loss = mean_loss(model, batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return fn

    plain, own = map(step_of, models, optimizers)
    step = CUDAGraphStep(own, state=[models[1], optimizers[1]])
    for batch in make_batches(8):
        with torch.autocast("cpu", torch.bfloat16):
            expected = plain(batch)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(step(batch), expected)
    assert not differences(models[0].state_dict(), models[1].state_dict())
    assert reasons(step) == []
    assert counts(step) == (1, 5, 3, 1)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_11_the_plans_own_autocast_is_exact_in_a_graph(accumulate):
    trainers = []
    for cuda_graph in (False, True):
        torch.manual_seed(0)
        plan = Plan(precision="bf16", cuda_graph=cuda_graph)
        trainers.append(TrainStep(BufferNet(), ADAMW, mean_loss, plan, accumulate=accumulate))
        torch.manual_seed(1)
        batches = make_batches(8 * accumulate)
        for start in range(0, len(batches), accumulate):
            trainers[-1](MicroBatches(batches[start : start + accumulate]))
    states = [{**t.state_dict(), "plan": None} for t in trainers]
    assert not differences(*states)
    assert counts(trainers[1]) == (1, 5, 3, 1)


# --- 12: generators -------------------------------------------------------------------------------


# Where nobody looks for state: in a container of so many that it is data.
HIDDEN = torch.Generator()
AMONG_MANY = [HIDDEN] * 1000


@pytest.mark.parametrize("planted", [False, True], ids=["guarded", "planted"])
def test_12_masks_of_a_generator_do_not_repeat(planted):
    HIDDEN.manual_seed(0)
    step = CUDAGraphStep(
        lambda x: x * torch.rand(4, generator=AMONG_MANY[0]),
        state=[] if planted else [HIDDEN],
        check=not planted,
        device="cpu",
    )
    masks = {tuple(step(torch.ones(4)).tolist()) for _ in range(10)}
    assert (len(masks) == 10) != planted
    assert counts(step) == (1, 7, 3, 1)


# --- 13 and 14: static memory ---------------------------------------------------------------------


def test_13_a_batch_may_be_overwritten_after_its_step():
    twins = Twins(DropoutNet, ADAMW)
    for batch in make_batches(12):
        twins.step(batch)
        twins.check()
        batch[0].fill_(torch.nan)
    assert twins.counts == (1, 9, 3, 1)


@pytest.mark.parametrize("planted", [False, True], ids=["guarded", "planted"])
def test_14_losses_are_safe_to_keep(planted, monkeypatch):
    if planted:
        monkeypatch.setattr(StaticOutputs, "cloned", lambda self: self._outputs)
        without_check(monkeypatch)
    twins = Twins(DropoutNet, ADAMW)
    kept = [twins.captured(batch) for batch in make_batches(4)]
    values = [float(loss) for loss in kept]
    for batch in make_batches(4, seed=1):
        twins.captured(batch)
    assert ([float(loss) for loss in kept] == values) != planted


# --- 15, 21, 22: the host -------------------------------------------------------------------------


@pytest.mark.parametrize("planted", [False, True], ids=["guarded", "planted"])
def test_15_values_in_a_batch_are_not_frozen(planted, monkeypatch):
    if planted:
        tensors_only(monkeypatch)

    def scaled(model, batch):
        return mean_loss(model, batch[:2]) * batch[2]

    twins = Twins(DropoutNet, ADAMW, scaled)
    batches = [(*b, 0.5 + (i % 2)) for i, b in enumerate(make_batches(12))]
    assert drifts(twins, batches) == planted
    assert planted or twins.counts == (2, 8, 4, 2)


def test_15_an_average_whose_first_step_is_another_is_not_frozen():
    torch.manual_seed(0)
    models = [nn.Linear(8, 4)]
    models.append(copy.deepcopy(models[0]))
    averages = [AveragedModel(m) for m in models]
    step = CUDAGraphStep(averages[1].update_parameters, state=[models[1], averages[1]])
    for _ in range(8):
        for m in models:
            with torch.no_grad():
                m.weight.add_(1.0)
        averages[0].update_parameters(models[0])
        step(models[1])
        assert not differences(averages[0].state_dict(), averages[1].state_dict())
    assert reasons(step)


@pytest.mark.parametrize("planted", [False, True], ids=["guarded", "planted"])
def test_21_random_numbers_of_the_host_are_not_frozen(planted, monkeypatch):
    if planted:
        monkeypatch.setattr(HostFacts, "draws", lambda self, noted: None)
        without_check(monkeypatch)
    twins = Twins(DropoutNet, ADAMW, lambda m, b: mean_loss(m, b) * random.random())
    for batch in make_batches(12):
        twins.step(batch)
    assert bool(twins.differences()) == planted
    assert (twins.counts[1] > 0) == planted


class Halving(optim.Optimizer):
    """Halves its rate at each step, by a counter in Python."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                p.sub_(p.grad, alpha=group["lr"] * 0.5 ** state["count"])


@pytest.mark.parametrize("planted", [False, True], ids=["guarded", "planted"])
def test_22_a_counter_in_an_optimizer_of_the_users_own_is_not_frozen(planted, monkeypatch):
    if planted:
        monkeypatch.setattr(HostFacts, "changes", lambda self: None)
        monkeypatch.setattr(StateWatch, "moved", lambda self: None)
        without_check(monkeypatch)
    twins = Twins(DropoutNet, Halving, bare=True)
    for batch in make_batches(12):
        twins.step(batch)
    assert bool(twins.differences()) == planted
    assert (twins.counts[1] > 0) == planted


def test_22_a_counter_where_nobody_looks_is_found_by_the_check(monkeypatch):
    monkeypatch.setattr(HostFacts, "changes", lambda self: None)
    monkeypatch.setattr(StateWatch, "moved", lambda self: None)
    twins = Twins(DropoutNet, Halving, bare=True)
    twins.run(make_batches(12))
    assert twins.counts[1] == 0
    assert "2 replays and 2 eager steps" in reasons(twins.captured)[-1]


# --- 18, 19, 24: scaling, groups, poison ----------------------------------------------------------


def pair_of(plan, *, batches, **options):
    """A trainer without a graph and one with, run alike; return the latter, and what differs."""
    states = []
    for cuda_graph in (False, True):
        torch.manual_seed(0)
        trainer = TrainStep(
            BufferNet(), ADAMW, poisoned_loss, plan.replace(cuda_graph=cuda_graph), **options
        )
        torch.manual_seed(1)
        losses = [trainer(batch) for batch in batches]
        norms = trainer.metrics.get("grad_norm", torch.zeros(()))
        states.append([losses, norms, {**trainer.state_dict(), "plan": None}, trainer.num_skipped])
    return trainer, differences(*states)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("poison", [None, *POISONS])
def test_18_a_scaled_step_is_exact_in_a_graph(poison, clip):
    groups = batches_with([*[None] * 6, None, *[None] * 3])
    bad = as_batch(batches_with([poison])[0])
    batches = [*map(as_batch, groups[:6]), *[bad] * 4, *map(as_batch, groups[6:])]
    trainer, found = pair_of(fp16("propagate"), batches=batches, max_grad_norm=clip)
    assert found == []
    skipped = 0 if poison in (None, "infinite loss", "NaN loss only") else 4
    if poison not in ("infinite loss", "NaN loss only"):
        assert trainer.num_skipped == skipped
    assert counts(trainer)[1] > 0


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("poison", POISONS)
def test_24_a_poisoned_batch_leaves_no_trace_in_a_graph(poison, accumulate):
    entries = [*[None] * 4, *[poison] * 4, *[None] * 4]
    batches = [as_batch(g) for g in batches_with(entries, accumulate=accumulate)]
    trainer, found = pair_of(SKIP, batches=batches, max_grad_norm=0.1, accumulate=accumulate)
    assert found == []
    assert trainer.num_skipped == 4
    assert counts(trainer) == (2, 4 + 1 + 3, 3 + 1, 2) if poison else True


@pytest.mark.parametrize("planted", [False, True], ids=["guarded", "planted"])
def test_19_a_short_group_is_divided_by_its_own_size(planted, monkeypatch):
    twins = Twins(DropoutNet, ADAMW, accumulate=3, clip=0.1)
    if planted:
        describe = engine.describe
        fill = StaticInputs.fill

        def short(self, tensors):
            fill(self, [*tensors, *self._tensors[len(tensors) :]])

        monkeypatch.setattr(StaticInputs, "fill", short)
        monkeypatch.setattr(engine, "describe", lambda *i: Call((), describe(*i).tensors))
        without_check(monkeypatch)
    wrong = False
    batches = make_batches(22)
    for start in range(0, 21, 3):
        twins.step(*batches[start : start + 3])
    twins.step(*batches[21:])
    wrong = bool(twins.differences())
    twins.step(*batches[20:22])
    wrong = wrong or bool(twins.differences())
    assert wrong == planted


# --- 20: what a failed capture leaves current ----------------------------------------------------


def test_20_a_failed_capture_leaves_its_stream(tape):
    seed_everything(0)
    step = CUDAGraphStep(lambda x: x * float(x.sum()), device="cpu")
    for _ in range(6):
        assert step(torch.ones(2)).tolist() == [2.0, 2.0]
    assert [backend.on_side_stream for backend in tape] == [0]
    assert TapeBackend(CPU).capture(lambda: torch.ones(1), [])[1].tolist() == [1.0]


# --- 23: hooks ------------------------------------------------------------------------------------


def test_23_hooks_do_not_run_in_a_replay_and_that_is_reported():
    twins = Twins(BufferNet, ADAMW)
    calls = []
    twins.model.first.register_forward_hook(lambda *_: calls.append(1))
    for batch in make_batches(8):
        twins.step(batch)
    twins.check()
    assert twins.counts == (1, 5, 3, 1)
    assert "hook" in str(twins.captured.report())
