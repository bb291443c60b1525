"""Captured steps against the plain loop, bit for bit, whatever is trained and whatever happens.

Everything here runs on tape (see tape.py), in lockstep with a loop that imports nothing of
torchfast; a broken guard must turn it red, which test_graph_traps.py shows for each.
"""

from __future__ import annotations

from functools import partial

import pytest
from torch import optim
from torch.optim import lr_scheduler as schedulers

from models import MODELS, BatchNormNet, DropoutNet, counted_loss, make_batches, weighted_loss
from pairs import in_pairs
from poison import BufferNet
from tape import Twins, reasons

pytestmark = pytest.mark.usefixtures("tape")

# Those whose update joins the graph on the CPU, and those that run behind it.
WHOLE = {
    "AdamW fused": partial(optim.AdamW, lr=0.01, fused=True),
    "Adam fused amsgrad": partial(optim.Adam, lr=0.01, fused=True, amsgrad=True),
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD nesterov fused": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True),
}
HALF = {
    "ASGD": partial(optim.ASGD, lr=0.05),
    "Adadelta": partial(optim.Adadelta, lr=1.0),
    "Adafactor": partial(optim.Adafactor, lr=0.01),
    "Adagrad": partial(optim.Adagrad, lr=0.05),
    "Adam": partial(optim.Adam, lr=0.01),
    "AdamW": partial(optim.AdamW, lr=0.01, weight_decay=0.1),
    "AdamW foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "RMSprop": partial(optim.RMSprop, lr=0.005, momentum=0.9, centered=True),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "SGD dampened": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
}
OPTIMIZERS = WHOLE | HALF
NETS = {**MODELS, "buffers": BufferNet}


def two_groups(make):
    """Two parameter groups with learning rates of their own."""

    def build(params):
        params = list(params)
        biases = [p for p in params if p.dim() < 2]
        groups = [{"params": [p for p in params if p.dim() > 1]}, {"params": biases, "lr": 0.003}]
        return make([g for g in groups if g["params"]])

    return build


SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(
        o, [lambda s: 1 / (1 + s), lambda s: 0.5**s][: len(o.param_groups)]
    ),
    "OneCycleLR": partial(schedulers.OneCycleLR, max_lr=0.02, total_steps=20, cycle_momentum=False),
    "CosineAnnealingLR": partial(schedulers.CosineAnnealingLR, T_max=8),
}


@in_pairs(OPTIMIZERS, ("accumulate", (1, 4)), ("clip", (None, 0.1)), ["AdamW fused", "AdamW"])
def test_every_optimizer_is_exact(name, accumulate, clip):
    twins = Twins(DropoutNet, OPTIMIZERS[name], accumulate=accumulate, clip=clip)
    twins.run(make_batches(12 * accumulate), accumulate)
    assert twins.counts == (1, 9, 3, 1)
    is_whole = "can be in the graph, as fused capturable" in str(twins.captured.report())
    assert is_whole == (name in WHOLE)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("name", WHOLE)
def test_a_bare_step_is_exact_where_its_update_can_be_captured(name, accumulate):
    twins = Twins(BufferNet, WHOLE[name], clip=0.1, bare=True)
    twins.run(make_batches(12 * accumulate), accumulate)
    assert twins.counts == (1, 9, 3, 1)


@pytest.mark.parametrize("name", HALF)
def test_a_bare_step_with_any_other_update_is_exact_too(name):
    twins = Twins(DropoutNet, HALF[name], clip=0.1, bare=True)
    twins.run(make_batches(12))
    graphs, replays, eager, _ = twins.counts
    assert replays + eager == 12
    assert graphs or reasons(twins.captured)


@pytest.mark.parametrize("bare", [False, True], ids=["trainer", "bare"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", ["AdamW fused", "SGD nesterov fused", "AdamW"])
def test_every_schedule_is_exact_over_two_groups(name, scheduler, bare):
    twins = Twins(
        DropoutNet, two_groups(OPTIMIZERS[name]), scheduler=SCHEDULERS[scheduler], bare=bare
    )
    twins.run(make_batches(14))
    rates = [group["lr"] for group in twins.own.param_groups]
    assert all(type(rate) is float for rate in rates)
    assert len(set(rates)) == (2 if scheduler != "OneCycleLR" else 1)
    if name in WHOLE or not bare:
        assert twins.counts == (1, 11, 3, 1)


def cycling(name, **options):
    cycle = partial(schedulers.OneCycleLR, max_lr=0.02, total_steps=40)
    twins = Twins(DropoutNet, WHOLE[name], scheduler=cycle, **options)
    twins.run(make_batches(16))
    return twins


@pytest.mark.parametrize("name", ["AdamW fused", "SGD nesterov fused"])
def test_a_schedule_that_cycles_momentum_moves_the_update_out_of_the_graph(name, caplog):
    twins = cycling(name)
    moved = "the update runs after the graph from now on: a hyperparameter"
    assert [reason.startswith(moved) for reason in reasons(twins.captured)] == [True]
    # Steps 1 to 3 warm up, 4 and 5 are captured, 6 gives up; 7 to 9 warm the half graph up.
    shapes = [d.detail for d in twins.captured.report().decisions if "replays" in d.detail][-1]
    assert shapes == "6x8 float32, 6 int64: 7 replays"
    told = [r for r in caplog.records if "hyperparameter" in r.getMessage()]
    assert len(told) == 1


def test_the_report_counts_every_step_when_the_update_has_moved_out():
    assert cycling("AdamW fused").counts == (1, 2 + 7, 4 + 3, 3)


def test_a_bare_step_whose_momentum_cycles_gives_up_after_two_captures():
    twins = cycling("AdamW fused", bare=True)
    assert twins.counts == (0, 2, 14, 2)
    assert len(reasons(twins.captured)) == 1


def test_replays_that_only_checked_a_graph_are_not_told_of():
    (reason,) = reasons(cycling("AdamW fused", bare=True).captured)
    assert " changed, again after 1 replays; keep a value that" in reason


@pytest.mark.parametrize("name", ["AdamW fused", "AdamW"])
def test_reduce_on_plateau_by_hand_is_exact(name):
    plateau = partial(schedulers.ReduceLROnPlateau, factor=0.5, patience=0)
    twins = Twins(DropoutNet, OPTIMIZERS[name])
    own = [plateau(twins.optimizer), plateau(twins.own)]
    for number, batch in enumerate(make_batches(14)):
        twins.step(batch)
        twins.check()
        for scheduler in own:
            scheduler.step(float(number))
    assert twins.own.param_groups[0]["lr"] < 0.001
    assert twins.counts == (1, 11, 3, 1)


@pytest.mark.parametrize("bare", [False, True], ids=["trainer", "bare"])
@pytest.mark.parametrize("net", NETS)
def test_every_model_is_exact(net, bare):
    def trained(params):
        return WHOLE["AdamW fused"]([p for p in params if p.requires_grad])

    twins = Twins(NETS[net], trained, clip=0.1, bare=bare)
    twins.run(make_batches(12))
    assert twins.counts == (1, 9, 3, 1)


@pytest.mark.parametrize("bare", [False, True], ids=["trainer", "bare"])
@pytest.mark.parametrize("name", ["AdamW fused", "AdamW"])
def test_a_ragged_last_batch_gets_a_graph_of_its_own(name, bare):
    twins = Twins(BatchNormNet, OPTIMIZERS[name], clip=0.1, bare=bare)
    epoch = [*make_batches(5), *make_batches(1, size=3, seed=1)]
    twins.run(epoch * 3)
    if name in WHOLE or not bare:
        # Of the small batch the first is run as it is, the second is captured.
        assert twins.counts == (2, 14, 4, 2)


@pytest.mark.parametrize("name", ["AdamW fused", "AdamW"])
def test_a_ragged_last_group_gets_a_graph_of_its_own(name):
    twins = Twins(DropoutNet, OPTIMIZERS[name], accumulate=4, clip=0.1)
    for _ in range(3):
        twins.run(make_batches(18), 4)  # 4, 4, 4, 4, 2
    assert twins.counts == (2, 11, 4, 2)


@pytest.mark.parametrize("loss_fn", [weighted_loss, counted_loss])
@pytest.mark.parametrize("name", ["AdamW fused", "AdamW"])
def test_weighted_groups_are_exact(name, loss_fn):
    twins = Twins(DropoutNet, OPTIMIZERS[name], loss_fn, accumulate=3, clip=0.1)
    twins.run(make_batches(36), 3)
    assert twins.counts == (1, 9, 3, 1)
