"""Several steps in one replay train as one after the other, bit for bit (see tape.py)."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from models import (
    BatchNormNet,
    DropoutNet,
    FrozenNet,
    loss_and_metrics,
    make_batches,
    mean_loss,
    weighted_loss,
)
from poison import BufferNet
from poison import fp16 as fp16_plan
from stepping import roundtrip
from tape import CPU, counts
from torchfast import EMAOptions, NonfiniteOptions, Plan, PrefetchingLoader, StepBatches, Trainer
from torchfast._core.rng import get_rng_state, set_rng_state
from torchfast.graphs import LearningRates
from torchfast.graphs.engine import GraphEngine
from unrolling import ADAM, ADAMW, SGD, Both, K, micro, said, two_groups, unrolled

pytestmark = pytest.mark.usefixtures("tape")

SKIP = Plan(nonfinite="skip", cuda_graph=True)
PLANS = {
    "exact": "exact",
    "skip": SKIP,
    "fp16": fp16_plan("propagate").replace(cuda_graph=True),
    "fp16 skip": fp16_plan("skip").replace(cuda_graph=True),
}
SCHEDULERS = {
    "none": None,
    "LambdaLR": lambda o: schedulers.LambdaLR(
        o, [lambda s: 1 / (1 + s), lambda s: 0.5**s][: len(o.param_groups)]
    ),
    "OneCycleLR": partial(schedulers.OneCycleLR, max_lr=0.02, total_steps=60, cycle_momentum=False),
}
NESTED = {
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o,
        [schedulers.LinearLR(o, total_iters=6), schedulers.ExponentialLR(o, 0.9)],
        milestones=[6],
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, total_iters=7), schedulers.ExponentialLR(o, 0.9)]
    ),
    "CosineAnnealingWarmRestarts": partial(schedulers.CosineAnnealingWarmRestarts, T_0=5),
}


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", [ADAMW, SGD, ADAM], ids=["AdamW", "SGD", "Adam"])
def test_all_is_as_one_after_the_other(optimizer, scheduler, accumulate, clip):
    both = Both(
        two_groups(optimizer),
        lr_scheduler=SCHEDULERS[scheduler],
        accumulate=accumulate,
        max_grad_norm=clip,
    )
    batches = make_batches(5 * K * accumulate)
    both.run(micro(batches) if accumulate > 1 else batches)
    assert both.unrolled == (4, 4 * K)
    # Three single steps warm up, the fourth is captured; then four groups are replays.
    assert counts(both.several) == (2, 1 + 4, 3, 2)


@pytest.mark.parametrize("scheduler", NESTED)
def test_schedules_made_of_schedules_are_stepped_ahead(scheduler):
    both = Both(lr_scheduler=NESTED[scheduler])
    both.run(make_batches(5 * K))
    assert both.unrolled == (4, 4 * K)


@pytest.mark.parametrize("ema", [None, 0.9, EMAOptions(decay=0.9, warm_up=True, use_buffers=True)])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("net", [DropoutNet, BatchNormNet, BufferNet])
def test_models_averages_and_scales_are_as_one_after_the_other(net, plan, ema):
    both = Both(
        net=net, plan=PLANS[plan], ema=ema, max_grad_norm=0.1, lr_scheduler=SCHEDULERS["LambdaLR"]
    )
    both.run(make_batches(5 * K))
    assert both.unrolled == (4, 4 * K)
    if ema is not None:
        pairs = [
            itertools.chain(t.ema_model.parameters(), t.ema_model.buffers()) for t in both.trainers
        ]
        assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


@pytest.mark.parametrize("loss_fn", [loss_and_metrics, weighted_loss])
def test_metrics_are_those_of_the_last_step(loss_fn):
    both = Both(loss_fn=loss_fn, accumulate=2, max_grad_norm=0.1)
    both.run(micro(make_batches(6 * K)))
    assert both.unrolled == (2, 2 * K)


def poisoned(batches, *places):
    """Return batches of which those in these places are NaN; their kind stays the same."""
    return [
        (inputs * torch.nan if place in places else inputs, targets)
        for place, (inputs, targets) in enumerate(batches)
    ]


@pytest.mark.parametrize("plan", ["skip", "fp16 skip"])
def test_a_bad_batch_among_several_is_skipped_alone(plan):
    both = Both(net=BufferNet, plan=PLANS[plan], ema=0.9)
    both.run(poisoned(make_batches(5 * K), 9, 10, 17))
    assert both.unrolled == (4, 4 * K)
    assert both.several.num_skipped == 3
    counted = [t.report().to_dict()["counters"]["last skipped steps"] for t in both.trainers]
    assert counted == ["10 11 18", "10 11 18"]


def test_skips_in_a_row_are_counted_over_the_steps_of_a_replay():
    both = Both(plan=SKIP.replace(nonfinite=NonfiniteOptions(stop_after=3)))
    both.run(poisoned(make_batches(4 * K), 10, 11, 12))  # two in one replay and one in the next
    assert both.unrolled == (3, 3 * K)
    for trainer in both.trainers:
        with pytest.raises(RuntimeError, match=r"3 updates in a row .* steps 11, 12, 13"):
            trainer.check_skips()


def test_losses_are_safe_to_keep():
    both = Both()
    batches = make_batches(4 * K)
    both.run(batches[: 2 * K])
    kept = both.losses[1], both.losses[1].clone()
    both.run(batches[2 * K :])
    assert both.unrolled == (3, 3 * K)
    assert torch.equal(*kept)


# --- what changes between groups ------------------------------------------------------------------


def test_a_rate_that_is_set_holds_for_all_steps_that_follow():
    both = Both(two_groups(ADAMW))
    batches = make_batches(6 * K)
    both.run(batches[: 3 * K])

    def set_rates(trainer):
        for number, group in enumerate(trainer.optimizer.param_groups):
            group["lr"] = 0.02 / (1 + number)

    both.both(set_rates)
    both.run(batches[3 * K :])
    assert both.unrolled == (5, 5 * K)
    assert counts(both.several)[3] == 2  # nothing was captured anew


def test_a_hyperparameter_that_is_set_is_captured_anew():
    both = Both()
    batches = make_batches(16 * K)
    both.run(batches[: 12 * K])
    both.both(lambda trainer: trainer.optimizer.param_groups[0].update(weight_decay=0.3))
    both.run(batches[12 * K :])
    assert both.unrolled == (14, 14 * K)  # the single step is captured first
    assert counts(both.several)[3] == 4


def test_a_group_that_is_added_has_a_rate_of_its_own_in_each_step():
    both = Both(
        net=FrozenNet,
        optimizer=lambda params: ADAMW([p for p in params if p.requires_grad]),
        lr_scheduler=partial(schedulers.ExponentialLR, gamma=0.9),
    )
    batches = make_batches(7 * K)
    both.run(batches[: 3 * K])

    def thaw(trainer):
        first = trainer.model.first.requires_grad_(True)
        trainer.optimizer.add_param_group({"params": first.parameters(), "lr": 0.002})

    both.both(thaw)
    both.run(batches[3 * K :])
    assert both.unrolled == (2 + 3, 5 * K)
    assert len(both.several.optimizer.param_groups) == 2


def test_train_and_eval_have_graphs_of_their_own():
    both = Both()
    batches = make_batches(4 * K)
    both.run(batches)
    both.both(lambda trainer: trainer.model.eval())
    both.run(batches)
    both.both(lambda trainer: trainer.model.train())
    both.run(batches)
    assert both.unrolled == (3 + 3 + 4, 10 * K)
    assert counts(both.several)[3] == 4


def test_single_steps_between_and_halves_change_nothing():
    both = Both(max_grad_norm=0.1, lr_scheduler=SCHEDULERS["LambdaLR"])
    batches = make_batches(6 * K)
    both.run(batches[: 3 * K])

    def more(trainer):
        place = both.trainers.index(trainer)
        before = get_rng_state(CPU)
        set_rng_state(both.rng[place], CPU)
        trainer.step(batches[0])
        trainer.forward_backward(batches[1])
        trainer.update()
        both.rng[place] = get_rng_state(CPU)
        set_rng_state(before, CPU)

    both.both(more)
    both.run(batches[3 * K :])
    assert both.unrolled == (5, 5 * K)


def test_a_run_goes_on_from_a_state_saved_between_groups():
    options = {"lr_scheduler": SCHEDULERS["LambdaLR"], "ema": 0.9, "max_grad_norm": 0.1}
    batches = make_batches(8 * K)
    whole, resumed = Both(**options), Both(**options)
    whole.run(batches[: 4 * K])
    saved = roundtrip(whole.several.state_dict())
    rng = whole.rng[1]
    whole.run(batches[4 * K :])
    resumed.run(batches[: 2 * K])  # into a trainer that has graphs
    resumed.both(lambda trainer: trainer.load_state_dict(saved))
    resumed.rng = [rng, rng]
    resumed.run(batches[4 * K :])
    assert torch.equal(whole.losses[1], resumed.losses[1])
    assert resumed.unrolled == (1 + 4, 5 * K)


def test_an_average_that_begins_anew_begins_with_a_single_step():
    both, other = Both(ema=0.5), Both()
    batches = make_batches(6 * K)
    both.run(batches[: 3 * K])
    state = roundtrip(other.single.state_dict())  # which has no average
    both.both(lambda trainer: trainer.load_state_dict(state))
    both.run(batches[3 * K :])
    assert both.unrolled == (4, 4 * K)
    # At the start of the run, and after the state was loaded.
    assert f"{2 * K} one by one (the first update of an average)" in said(both.several)[0][1]


# --- negative controls ----------------------------------------------------------------------------


def one_rate_for_all(monkeypatch):
    monkeypatch.setattr(LearningRates, "another", lambda self: self)


def rates_of_the_single_step(monkeypatch):
    class Nothing:
        def __enter__(self):
            return None

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(LearningRates, "standing_in_for", lambda *_: Nothing())


def the_first_rate_for_all(monkeypatch):
    def ahead(self, rates_of):
        for rates in rates_of:
            rates.fill()
        for _ in rates_of:
            self._scheduler.step()
        return True

    monkeypatch.setattr("torchfast.graphs.unrolled_update._Schedule.steps_ahead", ahead)


@pytest.mark.parametrize(
    "planted", [None, one_rate_for_all, rates_of_the_single_step, the_first_rate_for_all]
)
def test_one_rate_for_all_steps_would_be_seen(planted, monkeypatch):
    if planted is not None:
        planted(monkeypatch)
    both = Both(lr_scheduler=SCHEDULERS["LambdaLR"])
    batches = make_batches(4 * K)
    both.run(batches[:K])
    if planted is None:
        both.run(batches[K:])
    else:
        with pytest.raises(AssertionError, match=r"losses|state"):
            both.run(batches[K:])
    assert both.unrolled[0] > 0


def loss_that_holds_a_buffer():
    """The forward replaces the buffer; the loss reads the tensor that it was at first."""
    places = {}

    def loss_fn(model, batch):
        place = places.setdefault(id(model), model.mean)
        return mean_loss(model, batch) + place.sum() * model.last.weight.sum()

    return loss_fn


@pytest.mark.parametrize("planted", [False, True], ids=["settled", "planted"])
def test_buffers_that_a_step_replaces_are_settled_between_the_steps(planted, monkeypatch):
    if planted:
        monkeypatch.setattr(GraphEngine, "settle", lambda self: None)
    both = Both(net=BufferNet, loss_fn=loss_that_holds_a_buffer())
    batches = make_batches(4 * K)
    both.run(batches[:K])
    if planted:
        with pytest.raises(AssertionError, match="losses"):
            both.run(batches[K:])
    else:
        both.run(batches[K:])
    assert both.unrolled[0] > 0


# --- from a loader --------------------------------------------------------------------------------


def test_a_loader_hands_out_the_batches_of_several_steps():
    batches = make_batches(11)
    trainers = [Trainer(DropoutNet(), ADAMW, loss_and_metrics) for _ in range(2)]
    trainers[1].model.load_state_dict(trainers[0].model.state_dict())
    found = []
    for epoch in range(3):
        torch.manual_seed(epoch)
        single = [trainers[0].step(batch) for batch in trainers[0].prefetch(batches)]
        torch.manual_seed(epoch)
        loader = trainers[1].prefetch(batches, unroll=K)
        several = [trainers[1].steps(group) for group in loader]
        assert [len(losses) for losses in several] == [4, 4, 3]
        assert torch.equal(torch.stack(single), torch.cat(several))
        found.append(unrolled(trainers[1]))
    assert found == [(1, K), (3, 3 * K), (5, 5 * K)]
    assert trainers[0].num_steps == trainers[1].num_steps == 33
    assert "9 one by one (groups of fewer steps than others" in said(trainers[1])[0][1]


def test_a_loader_goes_on_in_the_middle_of_what_it_would_group():
    batches = [torch.tensor(number) for number in range(11)]
    loader = PrefetchingLoader(batches, "cpu", accumulate=2, unroll=2)
    assert len(loader) == 3
    groups = iter(loader)
    assert [[int(b) for b in step] for step in next(groups)] == [[0, 1], [2, 3]]
    state = loader.state_dict()
    again = PrefetchingLoader(batches, "cpu", accumulate=1, unroll=3)
    again.load_state_dict(state)
    left = list(again)
    assert all(type(group) is StepBatches for group in left)
    assert [[int(batch) for batch in group] for group in left] == [[4, 5, 6], [7, 8, 9], [10]]
