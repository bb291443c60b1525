"""Gradients that are there before a step: of another kind of step, of the loop, of half a step."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_

from models import DropoutNet, make_batches, mean_loss
from tape import Twins, counts, reasons, without_check
from torchfast import CUDAGraphStep, MicroBatches
from torchfast._core.compare import differences
from torchfast.graphs import engine, entries
from torchfast.graphs.gradients import Gradients, GradientsBefore

pytestmark = pytest.mark.usefixtures("tape")

FUSED = partial(optim.AdamW, lr=0.01, fused=True)
BEHIND = partial(optim.AdamW, lr=0.01, foreach=True)  # its update runs after the graph


# --- what other kinds of steps leave to an update behind the graph --------------------------------


class TwoTasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.heads = nn.ModuleDict({"a": nn.Linear(16, 4), "b": nn.Linear(16, 4)})


def task_loss(model, batch):
    inputs, targets, task = batch
    logits = model.heads[task](torch.tanh(model.body(inputs)))
    return nn.functional.cross_entropy(logits, targets)


def of_tasks(order, count=30):
    batches = make_batches(count)
    return [(*batch, order[i % len(order)]) for i, batch in enumerate(batches)]


@pytest.mark.parametrize("order", ["ab", "aab", "aaabbb"])
@pytest.mark.parametrize("make", [FUSED, BEHIND])
def test_a_head_that_a_step_does_not_use_is_not_updated(make, order):
    twins = Twins(TwoTasks, make, task_loss, clip=0.5)
    twins.run(of_tasks(order), gradients=False)
    assert twins.counts == (2, 26, 4, 2)


def test_without_the_guard_it_is_updated_by_what_another_kind_of_step_has_left(monkeypatch):
    monkeypatch.setattr(engine, "none_left", lambda optimizers: [])
    twins = Twins(TwoTasks, BEHIND, task_loss, clip=0.5)
    with pytest.raises(AssertionError, match="at step"):
        twins.run(of_tasks("ab"), gradients=False)


@pytest.mark.parametrize("make", [FUSED, BEHIND])
def test_a_layer_that_freezes_and_thaws_keeps_no_gradient(make):
    twins = Twins(DropoutNet, make, clip=0.5)
    for number, batch in enumerate(make_batches(24)):
        frozen = number // 2 % 2 == 1
        twins.both(lambda model, _, on=not frozen: model.layers[0].requires_grad_(on))
        twins.step(batch)
        twins.check(gradients=False)
    assert twins.counts[:2] == (2, 20)


def test_gradients_of_an_eager_half_are_none_of_the_next_step():
    twins = Twins(TwoTasks, BEHIND, task_loss)
    for number, batch in enumerate(of_tasks("a", 12)):
        if number in (6, 9):
            twins.captured.forward_backward(MicroBatches([(*batch[:2], "b")]))
        twins.step(batch)
        twins.check(gradients=False)
    assert twins.counts == (1, 9, 3, 1)


# --- bare steps that use what was there -----------------------------------------------------------


class Pairs:
    """A bare step beside the same function run eagerly."""

    def __init__(self, make_step, *, make=FUSED, **options):
        self.models = [DropoutNet().eval()]
        self.models.append(copy.deepcopy(self.models[0]))
        self.optimizers = [make(m.parameters()) for m in self.models]
        self.steps = [make_step(*pair) for pair in zip(self.models, self.optimizers, strict=True)]
        self.captured = CUDAGraphStep(
            self.steps[1], state=[self.models[1], self.optimizers[1]], **options
        )

    def step(self, *inputs):
        self.steps[0](*inputs)
        self.captured(*inputs)

    def both(self, event):
        for pair in zip(self.models, self.optimizers, strict=True):
            event(*pair)

    def differences(self):
        return differences(*(m.state_dict() for m in self.models)) + differences(
            *(o.state_dict() for o in self.optimizers)
        )


def accumulating(model, optimizer, *, set_to_none):
    """The usual way to accumulate: the loop says when to update."""

    def step(batch, is_last):
        (mean_loss(model, batch) / 2).backward()
        if is_last:
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    return step


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_that_is_told_when_to_update_is_right(set_to_none, size, check):
    pair = Pairs(partial(accumulating, set_to_none=set_to_none), check=check)
    for number, batch in enumerate(make_batches(36)):
        pair.step(batch, number % size == size - 1)
        assert not pair.differences(), number
    if set_to_none:
        told = " ".join(reasons(pair.captured))
        assert "gradients" in told
        assert size == 3 or "zero_grad(set_to_none=False) keeps them" in told
        assert counts(pair.captured)[0] == 0
    else:
        assert counts(pair.captured) == (2, 32, 4, 2)


def test_a_step_without_gradients_to_add_to_is_not_captured_for_ever(tape):
    pair = Pairs(partial(accumulating, set_to_none=True))
    for number, batch in enumerate(make_batches(80)):
        pair.step(batch, number % 2 == 1)
    (backend,) = tape
    assert backend.num_captures <= 2 * entries._PATIENCE


def test_without_the_guard_half_of_the_gradients_are_lost(monkeypatch):
    compared = GradientsBefore.compared

    def forgetful(self):
        found = compared(self)
        return found._replace(let_go=[], gone=[], anew=found.anew + found.let_go + found.gone)

    monkeypatch.setattr(GradientsBefore, "compared", forgetful)
    pair = Pairs(partial(accumulating, set_to_none=True), check=False)
    for number, batch in enumerate(make_batches(36)):
        pair.step(batch, number % 2 == 1)
    assert pair.differences()


def updating(model, optimizer, *, zero):
    """An update alone, of gradients that the loop makes."""

    def step():
        optimizer.step()
        if zero is not None:
            optimizer.zero_grad(set_to_none=zero)

    return step


def loop_of_updates(pair, zero, count=30):
    for batch in make_batches(count):
        pair.both(lambda model, _, batch=batch: mean_loss(model, batch).backward())
        pair.step()
        if zero is not None:
            pair.both(lambda _, optimizer: optimizer.zero_grad(set_to_none=zero))


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_an_update_alone_reads_the_gradients_that_are_there(inside, set_to_none, check):
    pair = Pairs(partial(updating, zero=set_to_none if inside else None), check=check)
    loop_of_updates(pair, None if inside else set_to_none)
    assert not pair.differences()
    if not set_to_none:
        assert counts(pair.captured) == (1, 27, 3, 1)


def test_without_the_guard_an_update_alone_reads_what_is_gone(monkeypatch):
    monkeypatch.setattr(GradientsBefore, "compared", lambda self: Gradients([], [], [], [], [], []))
    pair = Pairs(partial(updating, zero=None), check=False)
    loop_of_updates(pair, True)
    assert pair.differences()


def at_both_ends(model, optimizer):
    def step(batch):
        optimizer.zero_grad()
        mean_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def at_the_end(model, optimizer):
    def step(batch):
        mean_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("make_step", [at_both_ends, at_the_end])
def test_a_step_that_leaves_no_gradient_may_find_one_of_the_loops(make_step, monkeypatch):
    without_check(monkeypatch)
    pair = Pairs(make_step)
    batches = make_batches(40)
    for number, batch in enumerate(batches):
        if number in (16, 31):
            pair.both(lambda model, _: mean_loss(model, batches[0]).backward())
        pair.step(batch)
        assert not pair.differences(), number
    assert counts(pair.captured)[1] >= 13
