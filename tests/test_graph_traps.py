"""The traps of CUDA graphs that train wrong without an error, each with its guard taken away.

The numbers are those of the project's list. Each test trains beside the plain loop; each negative
control plants one guard away and must see other numbers, which is what makes the test mean
something.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler as schedulers

from models import BatchNormNet, DropoutNet, make_batches, mean_loss
from tape import TapeGraph, Twins, counts, drifts, reasons, without_check
from torchfast._core.compare import differences
from torchfast.graphs import CUDAGraphStep, entries
from torchfast.graphs.engine import GraphEngine
from torchfast.graphs.host_facts import HostFacts
from torchfast.graphs.learning_rates import LearningRates
from torchfast.graphs.saved_named_state import SavedNamedState
from torchfast.graphs.static_inputs import StaticInputs
from torchfast.graphs.watch import Glance, StateWatch

pytestmark = pytest.mark.usefixtures("tape")

ADAMW = partial(optim.AdamW, lr=0.01, fused=True)
SGD = partial(optim.SGD, lr=0.1, momentum=0.9, fused=True)


def no_rates_filled(monkeypatch):
    monkeypatch.setattr(LearningRates, "fill", lambda self: None)


def nothing_frozen(monkeypatch):
    monkeypatch.setattr(StateWatch, "frozen", lambda self: [])


def no_moves(monkeypatch):
    monkeypatch.setattr(StateWatch, "moved", lambda self: None)


def nothing_noticed(monkeypatch):
    no_moves(monkeypatch)
    nothing_frozen(monkeypatch)  # its groups are other dicts, which it sees too


def no_modes(monkeypatch):
    monkeypatch.setattr(StateWatch, "mode", lambda self: ())


def no_glance(monkeypatch):
    monkeypatch.setattr(Glance, "is_as_it_was", lambda self: True)


def no_inputs(monkeypatch):
    fill, filled = StaticInputs.fill, set()

    def once(self, tensors):
        if self not in filled:
            filled.add(self)
            fill(self, tensors)

    monkeypatch.setattr(StaticInputs, "fill", once)


def nothing_put_back(monkeypatch):
    monkeypatch.setattr(SavedNamedState, "put_back", lambda self: None)


def replayed_twice(monkeypatch):
    replay = TapeGraph.replay

    def twice(self):
        replay(self)
        replay(self)

    monkeypatch.setattr(TapeGraph, "replay", twice)


def captured_batch_dropped(monkeypatch):
    """Take what the capture returned for the step, as if it had computed something."""
    replay = GraphEngine.replay

    def skips_first(self, ready):
        if ready.entry.num_replays == 0:
            ready.entry.num_replays += 1
            return ready.entry.outputs.cloned()
        return replay(self, ready)

    monkeypatch.setattr(GraphEngine, "replay", skips_first)


def one_tensor_for_all_groups(monkeypatch):
    fill = LearningRates.fill

    def shared(self):
        fill(self)
        self._tensors = self._tensors[-1:] * len(self._tensors)

    monkeypatch.setattr(LearningRates, "fill", shared)


def set_in_all(name, factor):
    def event(_, optimizer):
        for group in optimizer.param_groups:
            group[name] = group[name] * factor

    return event


def load_own_state(model, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def load_a_copy(model, optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        for value in entry.values():
            if value.dim():
                value.mul_(0.5)
    optimizer.load_state_dict(state)


def assign_parameters(model, _):
    # Parameters whose memory is another: p.data, as load_state_dict(assign=True) of tensors
    # that optimizers go on updating.
    for p in model.parameters():
        p.data = p.data.clone()


def two_groups(make):
    def build(params):
        params = list(params)
        return make([{"params": params[:2]}, {"params": params[2:], "lr": 0.003}])

    return build


def two_lambdas(optimizer):
    return schedulers.LambdaLR(optimizer, [lambda s: 1 / (1 + s), lambda s: 1.1**s])


CYCLE = partial(schedulers.OneCycleLR, max_lr=0.02, total_steps=40)
COSINE = partial(schedulers.CosineAnnealingLR, T_max=9)

# Trap: what is trained, what happens before step 7, and which guard stands against it.
TRAPS = {
    "1 a learning rate is frozen": ({"scheduler": COSINE}, None, no_rates_filled),
    "1 betas that cycle are frozen": ({"scheduler": CYCLE}, None, nothing_frozen),
    "1 weight decay is frozen": ({}, set_in_all("weight_decay", 9.0), nothing_frozen),
    "2 the user sets a rate": ({}, set_in_all("lr", 0.3), no_rates_filled),
    "3 two groups share one rate": (
        {"optimizer": two_groups(ADAMW), "scheduler": two_lambdas},
        None,
        one_tensor_for_all_groups,
    ),
    "4 optimizer state is loaded": ({}, load_a_copy, nothing_noticed),
    "4 parameters are replaced": ({}, assign_parameters, no_moves),
    "8 the check leaves its traces": ({"net": BatchNormNet}, None, nothing_put_back),
    "9 the captured batch is lost": ({}, None, captured_batch_dropped),
    "9 the captured batch counts twice": ({}, None, replayed_twice),
    "13 the batch is not copied in": ({}, None, no_inputs),
    "23 eval() after the capture": ({}, lambda model, _: model.eval(), no_modes),
    "23 requires_grad_() after the capture": (
        {},
        lambda model, _: model.layers[0].requires_grad_(False),
        no_modes,
    ),
    "1 at a glance, weight decay": ({}, set_in_all("weight_decay", 9.0), no_glance),
    "4 at a glance, loaded state": ({}, load_a_copy, no_glance),
    "4 at a glance, other parameters": ({}, assign_parameters, no_glance),
    "23 at a glance, eval()": ({}, lambda model, _: model.eval(), no_glance),
    "23 at a glance, requires_grad_()": (
        {},
        lambda model, _: model.layers[0].requires_grad_(False),
        no_glance,
    ),
}
UNCHECKED = (replayed_twice, captured_batch_dropped, no_inputs, one_tensor_for_all_groups)


@pytest.mark.parametrize("name", TRAPS)
def test_trap(name):
    options, event, _ = TRAPS[name]
    twins = Twins(**{"net": DropoutNet, "optimizer": ADAMW, **options})
    assert not drifts(twins, make_batches(12), event)


@pytest.mark.parametrize("name", TRAPS)
def test_trap_without_its_guard(name, monkeypatch):
    options, event, plant = TRAPS[name]
    twins = Twins(**{"net": DropoutNet, "optimizer": ADAMW, **options})
    plant(monkeypatch)  # after the trials of forms at construction, which need the guards too
    if plant in UNCHECKED:
        without_check(monkeypatch)
    assert drifts(twins, make_batches(12), event)


# --- 5: what a state shows ----------------------------------------------------------------------


@pytest.mark.parametrize("planted", [False, True], ids=["guarded", "planted"])
def test_5_a_state_keeps_the_learning_rate_it_was_taken_with(planted, monkeypatch):
    if planted:  # the device tensor stands in the groups for good

        def stays(self):
            for group, tensor in zip(self.groups, self._tensors, strict=True):
                group["lr"] = tensor

        monkeypatch.setattr(LearningRates, "on_device", lambda self, **_: _Entering(stays, self))
    twins = Twins(DropoutNet, ADAMW)
    for batch in make_batches(6):
        twins.step(batch)
    state = twins.own.state_dict()["param_groups"][0]
    kept = [type(state["lr"]) is float, twins.own.param_groups[0]["lr"] == 0.01]
    assert all(kept) != planted


class _Entering:
    def __init__(self, fn, *args):
        self.fn, self.args = fn, args

    def __enter__(self):
        self.fn(*self.args)

    def __exit__(self, *_):
        return None


def test_5_loading_its_own_state_is_exact():
    twins = Twins(DropoutNet, ADAMW)
    assert not drifts(twins, make_batches(12), load_own_state)
    assert reasons(twins.captured) == []


# --- 6: state that the captured step would make ---------------------------------------------------


def grow(twins):
    twins.both(
        lambda model, optimizer: optimizer.add_param_group(
            {"params": list(model.layers[3].parameters())}
        )
    )


@pytest.mark.parametrize("planted", [False, True], ids=["guarded", "planted"])
def test_6_the_first_step_of_momentum_is_not_captured(planted, monkeypatch):
    if planted:
        monkeypatch.setattr(HostFacts, "changes", lambda self: None)
        monkeypatch.setattr(StateWatch, "moved", lambda self: None)
        without_check(monkeypatch)

    def first_layer(params):
        return SGD(list(params)[:2])

    twins = Twins(DropoutNet, first_layer, bare=True)
    # Its zero_grad leaves the other layer's gradients, so nothing may add to them.
    twins.both(lambda model, _: model.layers[3].requires_grad_(False))
    twins.run(make_batches(3))
    twins.both(lambda model, _: model.layers[3].requires_grad_(True))
    grow(twins)
    monkeypatch.setattr(entries, "_WARM_UP_OF_OTHERS", 0)
    wrong = drifts(twins, make_batches(9, seed=1))
    assert wrong == planted


# --- 7: gradients ---------------------------------------------------------------------------------


def updates_every(count, *, check, planted, monkeypatch):
    """Steps that only add to gradients, with an update of the user's own; True if they drift."""
    if planted:
        monkeypatch.setattr(GraphEngine, "_notice_changes", lambda self: None)
    models = [DropoutNet().eval()]
    models.append(copy.deepcopy(models[0]))
    optimizers = [optim.SGD(m.parameters(), lr=0.1) for m in models]
    step = CUDAGraphStep(
        lambda b: mean_loss(models[1], b).backward(), state=[models[1]], check=check
    )
    for number, batch in enumerate(make_batches(24)):
        mean_loss(models[0], batch).backward()
        step(batch)
        if number % count == count - 1:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    assert count == 2 or counts(step)[1] > 12  # every second step is too often for a graph
    return bool(differences(models[0].state_dict(), models[1].state_dict()))


@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("count", [2, 12])
def test_7_gradients_that_a_step_adds_to_may_be_set_to_none(count, check, monkeypatch):
    assert not updates_every(count, check=check, planted=False, monkeypatch=monkeypatch)


def test_7_gradients_that_a_step_adds_to_without_the_guard(monkeypatch):
    assert updates_every(12, check=False, planted=True, monkeypatch=monkeypatch)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_7_a_step_that_clears_its_gradients_may_find_any(set_to_none):
    models = [DropoutNet()]
    models.append(copy.deepcopy(models[0]))
    optimizers = [ADAMW(m.parameters()) for m in models]

    def step_of(model, optimizer):
        def fn(batch):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = mean_loss(model, batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return fn

    plain, own = map(step_of, models, optimizers)
    step = CUDAGraphStep(own, state=[models[1], optimizers[1]])
    for number, batch in enumerate(make_batches(30)):
        torch.manual_seed(number)
        expected = plain(batch)
        torch.manual_seed(number)
        assert torch.equal(step(batch), expected)
        if number in (6, 19):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
        if number in (9, 22):
            for p in (*models[0].parameters(), *models[1].parameters()):
                p.grad = torch.ones_like(p)
    assert not differences(models[0].state_dict(), models[1].state_dict())
    assert counts(step)[1] > 3
