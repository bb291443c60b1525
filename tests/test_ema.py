"""Averaged weights: torch's AveragedModel, bit for bit, whatever is trained and in whatever way.

Most of it runs on tape (see tape.py), in lockstep with a plain loop and torch's own average; for
each guard there is a test that takes it away and sees the average drift.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import optim

from averages import AveragedTwins, comparable, reference, weights_of
from models import BatchNormNet, DropoutNet, make_batches
from pairs import in_pairs
from poison import SKIP, batches_with, fp16, run, run_without, trainer_of
from stepping import make_trainer
from tape import without_check
from test_graph_parity import HALF, NETS, SCHEDULERS, WHOLE, two_groups
from torchfast import EMAOptions, Plan
from torchfast._core.compare import differences
from torchfast.ema import WeightAverage

OPTIMIZERS = WHOLE | HALF
ADAMW = partial(optim.AdamW, lr=0.01, fused=True)
SGD = partial(optim.SGD, lr=0.1, momentum=0.9)
WARM = EMAOptions(decay=0.9, warm_up=True)


# --- beside torch's own average -------------------------------------------------------------------


@pytest.mark.usefixtures("tape")
@in_pairs(OPTIMIZERS, ("accumulate", (1, 4)), ("clip", (None, 0.1)), ["AdamW fused", "AdamW"])
def test_every_optimizer_is_averaged_exactly(name, accumulate, clip):
    twins = AveragedTwins(DropoutNet, OPTIMIZERS[name], accumulate=accumulate, clip=clip)
    twins.run(make_batches(12 * accumulate), accumulate)
    assert twins.twins.counts == (1, 9, 3, 1)


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("ema", [0.9, WARM, EMAOptions(decay=0.9, use_buffers=True)], ids=repr)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", ["AdamW fused", "AdamW"])
def test_every_model_is_averaged_exactly(name, net, ema):
    def trained(params):
        return OPTIMIZERS[name]([p for p in params if p.requires_grad])

    twins = AveragedTwins(NETS[net], trained, ema=ema, clip=0.1)
    twins.run(make_batches(12))
    assert twins.twins.counts == (1, 9, 3, 1)


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.5, 0.9999])
@pytest.mark.parametrize("warm_up", [False, True])
def test_every_decay_is_exact(decay, warm_up):
    twins = AveragedTwins(DropoutNet, ADAMW, ema=EMAOptions(decay=decay, warm_up=warm_up))
    twins.run(make_batches(14))


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedules_and_groups_are_averaged_exactly(scheduler):
    twins = AveragedTwins(DropoutNet, two_groups(ADAMW), scheduler=SCHEDULERS[scheduler], ema=WARM)
    twins.run(make_batches(14))
    assert twins.twins.counts == (1, 11, 3, 1)


@pytest.mark.usefixtures("tape")
def test_shapes_that_alternate_share_one_average():
    twins = AveragedTwins(BatchNormNet, ADAMW)
    twins.run([*make_batches(3), *make_batches(2, size=3, seed=1)] * 4)
    assert twins.twins.counts[0] == 2


@pytest.mark.usefixtures("tape")
def test_an_update_that_moves_out_of_the_graph_takes_the_average_along():
    cycle = partial(optim.lr_scheduler.OneCycleLR, max_lr=0.02, total_steps=40)
    twins = AveragedTwins(DropoutNet, ADAMW, scheduler=cycle)
    twins.run(make_batches(16))
    assert "the update runs after the graph" in str(twins.twins.captured.report())


@pytest.mark.parametrize("plan", ["eager", "exact", Plan(optimizer="fused"), SKIP], ids=str)
@pytest.mark.parametrize("ema", [0.9, WARM], ids=repr)
def test_without_graphs_it_is_exact_too(plan, ema):
    trainer = make_trainer(SGD, plan=plan, net=BatchNormNet, ema=ema)
    expected = reference(trainer.model, ema)
    for batch in make_batches(6):
        trainer.step(batch)
        expected.update_parameters(trainer.model)
        assert not differences(*comparable(expected, trainer.ema_model, use_buffers=False))


def test_the_halves_average_as_a_step_does():
    whole, halves = (make_trainer(SGD, ema=0.9) for _ in range(2))
    for batch in make_batches(4):
        torch.manual_seed(1)
        whole.step(batch)
        torch.manual_seed(1)
        before = copy.deepcopy(weights_of(halves.ema_model))
        halves.forward_backward(batch)  # a half that is never applied moves nothing
        assert not differences(before, weights_of(halves.ema_model))
        torch.manual_seed(1)
        halves.forward_backward(batch)
        halves.update()
        assert not differences(weights_of(whole.ema_model), weights_of(halves.ema_model))


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("name", ["AdamW fused", "AdamW"])
def test_halves_between_replays_are_averaged_too(name):
    trainer = make_trainer(OPTIMIZERS[name], net=BatchNormNet, ema=0.9)
    expected = reference(trainer.model, 0.9)
    for number, batch in enumerate(make_batches(14)):
        if number % 5 == 4:
            trainer.forward_backward(batch)
            trainer.update()
        else:
            trainer.step(batch)
        expected.update_parameters(trainer.model)
        assert not differences(*comparable(expected, trainer.ema_model, use_buffers=False))
    assert trainer.report().counters["replays"] > 5


# --- the guards, each of which can fail -----------------------------------------------------------


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("planted", [False, True], ids=["guarded", "planted"])
def test_the_check_of_replays_puts_the_average_back(planted, monkeypatch):
    """It runs four steps, which would move an average that is not named."""
    if planted:
        monkeypatch.setattr(WeightAverage, "named", [], raising=False)
        monkeypatch.setattr(WeightAverage, "__setattr__", without_named)
    assert AveragedTwins(DropoutNet, ADAMW).drifts(make_batches(8)) == planted


def without_named(self, name, value):
    if name != "named":
        object.__setattr__(self, name, value)


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("planted", [False, True], ids=["guarded", "planted"])
def test_the_first_update_copies(planted, monkeypatch):
    if planted:
        monkeypatch.setattr(WeightAverage, "after_update", lambda self: None)
    assert AveragedTwins(DropoutNet, ADAMW).drifts(make_batches(8)) == planted


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("planted", [False, True], ids=["guarded", "planted"])
def test_a_decay_that_grows_is_not_frozen(planted, monkeypatch):
    if planted:
        without_check(monkeypatch)
        grow = WeightAverage._weight
        monkeypatch.setattr(WeightAverage, "_weight", lambda self, flag: frozen(grow, self, flag))
    twins = AveragedTwins(DropoutNet, ADAMW, ema=EMAOptions(decay=0.99, warm_up=True))
    assert twins.drifts(make_batches(10)) == planted


def frozen(grow, average, flag):
    """As a loop does that computes the decay on the host."""
    return torch.full((), known(grow, average, flag), dtype=torch.float64)


def known(grow, average, flag):
    average.planted = getattr(average, "planted", 0) + 1
    n = average.planted - 1
    return 1.0 if n == 0 else 1 - min(0.99, (1 + n) / (10 + n))


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("planted", [False, True], ids=["guarded", "planted"])
def test_a_state_loaded_beside_a_graph_is_averaged_on(planted, monkeypatch):
    """With the state assigned and not copied, replays would go on with the old average."""
    other = make_trainer(ADAMW, ema=0.9)
    for batch in make_batches(5, seed=3):
        other.step(batch)
    state = copy.deepcopy(other.state_dict())
    expected, trainer = (make_trainer(ADAMW, ema=0.9, plan=p) for p in ("eager", "exact"))
    for t in (expected, trainer):
        if planted and t is trainer:
            monkeypatch.setattr(WeightAverage, "load_state_dict", assigned)
            monkeypatch.setattr(WeightAverage, "follow", lambda self: None)
        for number, batch in enumerate(make_batches(10)):
            if number == 6:
                t.load_state_dict(state)
            t.step(batch)
    assert trainer.report().counters["captures"] == 1
    found = differences(weights_of(expected.ema_model), weights_of(trainer.ema_model))
    assert bool(found) == planted


def assigned(self, state):
    self.model.load_state_dict(state["ema_model"], assign=True)
    self._num_averaged.fill_(state["ema"]["num_averaged"])


# --- updates that are skipped ---------------------------------------------------------------------

STEPS = ["NaN input", None, None, "NaN gradient", "infinite loss", None, "NaN loss only", None]


@pytest.mark.parametrize("plan", [SKIP, fp16("skip"), fp16("propagate")], ids=str)
@pytest.mark.parametrize("ema", [0.9, WARM, EMAOptions(decay=0.9, use_buffers=True)], ids=repr)
@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "SGD dampened"])
def test_a_skipped_update_leaves_the_average(name, ema, plan):
    trainer = trainer_of(OPTIMIZERS[name], plan, ema=ema)
    good, bad, more = batches_with([None, "NaN gradient", None])
    run(trainer, [good])
    before = copy.deepcopy(trainer._step._average.state_dict())
    run(trainer, [bad])
    assert not differences(before, trainer._step._average.state_dict())
    assert trainer.num_skipped == 1
    run(trainer, [more])
    assert differences(before, trainer._step._average.state_dict())


@pytest.mark.parametrize("ema", [0.9, WARM], ids=repr)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_bad_batches_are_as_if_they_had_never_been(accumulate, ema):
    """The first is bad too: the average begins with the first update that is done."""
    groups = batches_with(STEPS, accumulate=accumulate)
    ours = trainer_of(ADAMW, SKIP, ema=ema, accumulate=accumulate)
    clean = trainer_of(ADAMW, Plan(), ema=ema, accumulate=accumulate)
    run(ours, groups)
    run_without(clean, groups)
    assert not differences(weights_of(clean.ema_model), weights_of(ours.ema_model))
    assert ours.state_dict()["ema"]["num_averaged"] == len(STEPS) - 4


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("planted", [False, True], ids=["guarded", "planted"])
@pytest.mark.parametrize("plan", [SKIP, fp16("skip"), fp16("propagate")], ids=str)
def test_in_a_graph_the_device_decides(plan, planted, monkeypatch):
    if planted:
        update = WeightAverage.update
        monkeypatch.setattr(WeightAverage, "update", lambda self, flag: update(self, flag * 0))
    ours = trainer_of(ADAMW, plan.replace(cuda_graph=True), ema=0.9)
    plain = trainer_of(ADAMW, plan)
    expected = reference(plain.model, 0.9)
    torch.manual_seed(1)
    kinds = [0, 0, 0, 0, 0, 1, 0, 1, 1, 0, 0]  # replays: the poison is data, and kept by its value
    batches = [(*batch, None) for batch in make_batches(len(kinds))]
    for kind, (inputs, targets, _) in zip(kinds, batches, strict=True):
        batch = (inputs * torch.nan if kind else inputs, targets, None)
        state = torch.get_rng_state()
        plain.step(batch)
        torch.set_rng_state(state)
        ours.step(batch)
        if not kind:
            expected.update_parameters(plain.model)
    counters = ours.report().counters
    assert (counters["replays"], counters["skipped"]) == (8, 3)
    assert not differences(weights_of(plain.model), weights_of(ours.model))
    found = differences(*comparable(expected, ours.ema_model, use_buffers=False))
    assert bool(found) == planted
