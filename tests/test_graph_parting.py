"""Where the update cannot be captured, forward and backward are, and strict says so."""

from __future__ import annotations

import itertools
import queue
import random
from functools import partial

import pytest
import torch
from torch import optim

from models import DropoutNet, make_batches, mean_loss
from tape import Twins, reasons
from torchfast import CaptureError, CUDAGraphOptions, Plan
from torchfast.graphs import replay_check
from torchfast.graphs.graphed_update import GraphedUpdate

pytestmark = pytest.mark.usefixtures("tape")

ADAMW = partial(optim.AdamW, lr=0.01, fused=True)
STRICT = Plan(cuda_graph=CUDAGraphOptions(on_failure="raise"))


def first_weight(optimizer):
    return optimizer.param_groups[0]["params"][0]


def shrink_if_large(optimizer, *_):
    with torch.no_grad():
        if first_weight(optimizer).abs().sum().item() > 0.1:
            first_weight(optimizer).mul_(0.99)


def pre_hook(parameters):
    optimizer = ADAMW(parameters)
    optimizer.register_step_pre_hook(shrink_if_large)
    return optimizer


def post_hook(parameters):
    optimizer = ADAMW(parameters)
    optimizer.register_step_post_hook(shrink_if_large)
    return optimizer


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("make", [pre_hook, post_hook])
def test_a_hook_of_the_optimizer_that_waits_leaves_forward_and_backward_captured(make, clip):
    twins = Twins(DropoutNet, make, clip=clip)
    twins.run(make_batches(20), gradients=False)
    # Three steps and the one that failed, three more to warm up, and the graph until the update.
    assert twins.counts == (1, 13, 7, 1)
    (reason,) = reasons(twins.captured)
    assert reason.startswith(
        "the update runs after the graph from now on: it could not be captured"
    )
    assert "the host waits for the device" in reason
    assert "in shrink_if_large" in reason


def test_without_the_second_try_every_step_is_eager(monkeypatch):
    monkeypatch.setattr(GraphedUpdate, "_part", lambda *_: None)
    twins = Twins(DropoutNet, post_hook)
    for batch in make_batches(12):
        twins.step(batch)
    assert twins.counts == (0, 0, 12, 0)


class Hidden:
    """Counts where nobody can look: in a queue of the standard library."""

    def __init__(self):
        self._latest = queue.SimpleQueue()
        self._latest.put(0)

    def __next__(self):
        number = self._latest.get()
        self._latest.put(number + 1)
        return number


def scaling(factors):
    """Build an optimizer whose hook scales a weight, each time by another factor that comes."""

    def make(parameters):
        optimizer = ADAMW(parameters)
        comes = factors()

        def scale(optimizer, *_):
            with torch.no_grad():
                first_weight(optimizer).mul_(1.0 + 0.01 * next(comes))

        optimizer.register_step_post_hook(scale)
        return optimizer

    return make


def shuffled(model, batch):
    """Return another loss each time, by what nobody can watch."""
    return mean_loss(model, batch) * (1.0 + 0.01 * next(SHUFFLED))


SHUFFLED = Hidden()


@pytest.mark.parametrize("clip", [None, 0.5])
def test_an_update_that_a_graph_gets_wrong_is_parted_from_it(clip):
    """Only the check sees it: the hook counts in a queue, which nobody can look into."""
    twins = Twins(DropoutNet, scaling(Hidden), clip=clip)
    for batch in make_batches(20):
        twins.step(batch)
    assert twins.counts == (1, 13, 7, 2)
    (reason,) = reasons(twins.captured)
    assert reason.startswith(
        "the update runs after the graph from now on: in a graph it computes something else: "
        "eager steps from the same state end"
    )


def test_without_the_word_on_where_it_begins_every_step_is_eager(monkeypatch):
    judge = replay_check.Mismatch
    monkeypatch.setattr(replay_check, "Mismatch", lambda detail, **_: judge(detail, False))
    twins = Twins(DropoutNet, scaling(Hidden))
    for batch in make_batches(12):
        twins.step(batch)
    assert twins.counts[:3] == (0, 0, 12)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_an_update_that_draws_from_an_iterator_is_parted_before_it_is_captured(clip):
    """Nothing has been drawn too much, so what is trained is right from the start."""
    twins = Twins(DropoutNet, scaling(itertools.count), clip=clip)
    twins.run(make_batches(20), gradients=False)
    assert twins.counts == (1, 13, 7, 1)
    (reason,) = reasons(twins.captured)
    assert "could not be captured: the update draws from an iterator (itertools.count)" in reason


def every_other(parameters):
    """Build an optimizer whose hook shrinks a weight at every other step, by a number."""
    optimizer = ADAMW(parameters)
    is_due = [True]

    def shrink(optimizer, *_):
        is_due[0] = not is_due[0]
        if is_due[0]:
            with torch.no_grad():
                first_weight(optimizer).mul_(0.9)

    optimizer.register_step_post_hook(shrink)
    return optimizer


def test_a_hook_of_the_optimizer_that_counts_leaves_forward_and_backward_captured():
    twins = Twins(DropoutNet, every_other)
    twins.run(make_batches(20), gradients=False)
    assert twins.counts == (1, 13, 7, 1)
    (reason,) = reasons(twins.captured)
    assert "it could not be captured: the step changes what no replay changes" in reason
    assert "'is_due' in the closure of every_other" in reason


def test_a_loss_that_a_graph_gets_wrong_is_not_tried_again():
    twins = Twins(DropoutNet, ADAMW, shuffled)
    for batch in make_batches(12):
        twins.step(batch)
    assert twins.counts[:3] == (0, 0, 12)
    assert "after the graph" not in reasons(twins.captured)[0]


def test_strict_raises_where_a_graph_gets_the_update_wrong():
    twins = Twins(DropoutNet, scaling(Hidden), plan=STRICT)
    batches = make_batches(6)
    for batch in batches[:3]:
        twins.step(batch)
    with pytest.raises(CaptureError, match="and replays do not differ"):
        twins.step(batches[3])


def reads(model, batch):
    loss = mean_loss(model, batch)
    return loss * (2.0 if loss.item() > 1.0 else 1.0)


def draws(model, batch):
    return mean_loss(model, batch) * random.random()


@pytest.mark.parametrize("loss_fn", [reads, draws])
def test_what_fails_before_the_update_is_not_tried_again(loss_fn):
    twins = Twins(DropoutNet, ADAMW, loss_fn)
    twins.run(make_batches(12), gradients=False)
    assert twins.counts == (0, 0, 12, 0)
    assert "after the graph" not in reasons(twins.captured)[0]


def test_strict_raises_where_the_update_cannot_be_captured():
    twins = Twins(DropoutNet, post_hook, plan=STRICT)
    batches = make_batches(6)
    for batch in batches[:3]:
        twins.step(batch)
    before = {name: value.clone() for name, value in twins.model.state_dict().items()}
    with pytest.raises(CaptureError, match="the host waits for the device"):
        twins.step(batches[3])
    assert all(torch.equal(value, before[n]) for n, value in twins.model.state_dict().items())


def test_strict_raises_where_changes_come_too_often():
    twins = Twins(DropoutNet, ADAMW, plan=STRICT)

    def change(_, optimizer):
        optimizer.param_groups[0]["weight_decay"] *= 0.9

    batches = make_batches(20)
    for batch in batches[:6]:
        twins.step(batch)
    twins.both(change)
    twins.step(batches[6])
    twins.both(change)
    with pytest.raises(CaptureError, match="runs eagerly from now on: a hyperparameter"):
        twins.step(batches[7])
    captured = twins.captured
    for batch in batches[8:]:  # whoever goes on gets what there would be otherwise
        captured(batch)
    assert captured.report().to_dict()["counters"]["graphs"] == 1
    assert any("the update runs after the graph" in reason for reason in reasons(captured))
