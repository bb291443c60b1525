"""Steps whose loss or gradient is not finite: they leave no bit behind, and nothing else changes.

The reference is a run that never saw the bad batch but drew its random numbers.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn, optim

from models import make_batches
from pairs import in_pairs
from poison import (
    POISONS,
    SKIP,
    BufferNet,
    as_batch,
    assert_same,
    batches_with,
    check_bad_changes_no_bit,
    fp16,
    poisoned_loss,
    run,
    run_without,
    state_of,
    trainer_of,
)
from test_parity import OPTIMIZERS
from torchfast import Plan, Trainer
from torchfast._core.compare import differences
from torchfast.precision.skipping import SkippableUpdate

# The first step is bad, when there is no state yet, and two in a row later; every kind occurs.
STEPS = ["NaN input", None, None, "NaN gradient", "infinite loss", None, "NaN loss only", None]


# --- a skipped step leaves nothing behind ---------------------------------------------------------


@in_pairs(OPTIMIZERS, ("accumulate", (1, 3)), ("clip", (None, 0.5)), ["AdamW fused", "AdamW"])
def test_a_bad_batch_is_as_if_it_had_never_been(name, accumulate, clip):
    groups = batches_with(STEPS, accumulate=accumulate)
    options = {"accumulate": accumulate, "max_grad_norm": clip}
    ours = trainer_of(OPTIMIZERS[name], SKIP, **options)
    reference = trainer_of(OPTIMIZERS[name], Plan(), **options)
    run(ours, groups)
    run_without(reference, groups)
    assert_same(state_of(reference), state_of(ours))
    assert ours.num_skipped == 4
    assert ours.num_steps == len(STEPS)
    assert int(ours.model.seen) == 4 * accumulate * 6


@in_pairs(OPTIMIZERS, ("accumulate", (1, 3)), ("clip", (None, 0.5)), ["AdamW fused", "AdamW"])
def test_without_a_bad_batch_nothing_changes(name, accumulate, clip):
    groups = batches_with([None] * 4, accumulate=accumulate)
    options = {"accumulate": accumulate, "max_grad_norm": clip}
    ours = trainer_of(OPTIMIZERS[name], SKIP, **options)
    reference = trainer_of(OPTIMIZERS[name], Plan(), **options)
    assert torch.equal(torch.stack(run(ours, groups)), torch.stack(run(reference, groups)))
    assert_same(state_of(reference), state_of(ours))
    assert ours.num_skipped == 0


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("name", ["SGD", "SGD momentum", "AdamW", "AdamW fused", "RMSprop"])
def test_each_kind_of_poison_changes_no_bit(name, poison):
    trainer = trainer_of(OPTIMIZERS[name], SKIP, max_grad_norm=1.0)
    check_bad_changes_no_bit(trainer, *batches_with([None, poison, None]))


@pytest.mark.parametrize("poison", POISONS)
def test_without_the_guard_it_would(poison):
    """The control, also of the poisons: a plain plan takes the batch."""
    trainer = trainer_of(OPTIMIZERS["AdamW"], Plan())
    good, bad = batches_with([None, poison])
    run(trainer, [good])
    before = state_of(trainer)
    run(trainer, [bad])
    assert differences(before["parameters"], state_of(trainer)["parameters"])
    is_finite = all(p.isfinite().all() for p in trainer.model.parameters())
    assert is_finite == (poison == "NaN loss only")
    assert trainer.num_skipped == 0


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_bad_micro_batch_is_enough(place):
    trainer = trainer_of(OPTIMIZERS["AdamW"], SKIP, accumulate=3)
    (group,) = batches_with([None], accumulate=3)
    for poison in POISONS:
        before = state_of(trainer)
        bad = list(group)
        bad[place] = (*group[place][:2], poison)
        run(trainer, [bad])
        assert_same(before, state_of(trainer))
    assert trainer.num_skipped == len(POISONS)


def test_weights_that_sum_to_zero_are_skipped():
    """0 / 0 arises in the division, after the backward."""

    def masked(model, batch):
        inputs, targets, mask = batch
        losses = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
        return (losses * mask).sum(), {}, mask.sum()

    trainer = trainer_of(OPTIMIZERS["AdamW"], SKIP, loss_fn=masked)
    inputs, targets = make_batches(1)[0]
    trainer.step((inputs, targets, torch.ones(6)))
    before = state_of(trainer)
    trainer.step((inputs, targets, torch.zeros(6)))
    assert_same(before, state_of(trainer))


def test_a_sum_of_losses_may_overflow_where_none_does():
    def halves(model, batch):
        loss = model(batch).sum() * 0 + 60000.0
        return loss.half(), {}, torch.tensor(1.0)

    trainer = Trainer(
        nn.Linear(2, 2), partial(optim.SGD, lr=0.1, weight_decay=0.1), halves, SKIP, accumulate=2
    )
    before = state_of(trainer)
    loss = run(trainer, [[torch.ones(1, 2)] * 2])[0]
    assert loss.isinf()
    assert trainer.num_skipped == 0
    assert differences(before, state_of(trainer))


# --- gradients of every kind ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SparseAdam", "SGD"])
def test_sparse_gradients_are_judged(name):
    def loss_fn(model, batch):
        ids, factor = batch
        return (model(ids) * factor).square().mean()

    make = {"SparseAdam": partial(optim.SparseAdam, lr=0.01), "SGD": partial(optim.SGD, lr=0.1)}
    batches = [(torch.randint(50, (6,)), 1.0) for _ in range(4)]
    bad = (batches[0][0], torch.inf)

    def train(plan, batches):
        trainer = trainer_of(
            make[name], plan, net=lambda: nn.Embedding(50, 4, sparse=True), loss_fn=loss_fn
        )
        for batch in batches:
            trainer.step(batch)
        return trainer

    ours = train(SKIP, [bad, *batches[:2], bad, *batches[2:]])
    assert ours.num_skipped == 2
    assert_same(state_of(train(Plan(), batches)), state_of(ours))


def test_a_sparse_gradient_alone_may_be_bad():
    """The loss is finite, so that only the values of the sparse gradient can tell."""
    model = nn.Embedding(5, 2, sparse=True)
    model.weight.register_hook(lambda g: g * torch.nan)
    trainer = Trainer(model, partial(optim.SGD, lr=0.1), lambda m, b: m(b).sum(), SKIP)
    before = state_of(trainer)
    trainer.step(torch.tensor([1, 2]))
    assert_same(before, state_of(trainer))
    assert trainer.num_skipped == 1


def test_complex_and_double_and_half_gradients_are_judged():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(
                torch.ones(3, dtype=dtype)
                for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
            )

        def forward(self, factors):
            terms = zip(self.weights, factors, strict=True)
            return sum((w.abs().float() * f).nan_to_num(0).sum() for w, f in terms)

    for bad in (None, 0, 1, 2, 3):
        model = Mixed()
        if bad is not None:
            model.weights[bad].register_hook(lambda g: g * torch.inf)
        trainer = Trainer(model, partial(optim.SGD, lr=0.1), lambda m, b: m(b), SKIP)
        before = state_of(trainer)
        trainer.step((1.0, 2.0, 3.0, 4.0))
        assert trainer.num_skipped == (bad is not None)
        assert bool(differences(before, state_of(trainer))) == (bad is None)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_muon_is_guarded(clip):
    def train(plan, groups):
        trainer = trainer_of(
            partial(optim.Muon, lr=0.01), plan, net=lambda: nn.Linear(8, 4, bias=False)
        )
        run(trainer, groups)
        return trainer

    groups = batches_with([None, "NaN input", None])
    assert_same(state_of(train(Plan(), [groups[0], groups[2]])), state_of(train(SKIP, groups)))


def test_a_parameter_outside_of_the_optimizer_spoils_the_norm():
    """Its NaN reaches the others through the clipping alone."""

    def train(plan):
        torch.manual_seed(0)
        model = BufferNet()
        model.first.bias.register_hook(lambda g: g * torch.nan)
        head = model.last.parameters()
        trainer = Trainer(model, optim.SGD(head, lr=0.1), poisoned_loss, plan, max_grad_norm=1.0)
        before = state_of(trainer)
        run(trainer, batches_with([None]))
        return before, state_of(trainer), trainer

    before, after, trainer = train(SKIP)
    assert_same(before, after)
    assert trainer.num_skipped == 1
    assert trainer.metrics["grad_norm"].isnan()
    assert differences(before, train(Plan())[1])


def test_an_optimizer_of_unknown_state_is_judged_on_the_host():
    class Counting(optim.SGD):
        def step(self, closure=None):
            self.calls = getattr(self, "calls", 0) + 1
            return super().step(closure)

    Counting.__module__ = "somewhere.else"
    trainer = trainer_of(partial(Counting, lr=0.1), SKIP)
    good, bad = batches_with([None, "NaN input"])
    run(trainer, [good])
    before = state_of(trainer)
    run(trainer, [bad, bad])
    assert trainer.optimizer.calls == 1
    assert_same(before, state_of(trainer))
    (decision,) = trainer.report().stepped_aside
    assert decision.lever == "nonfinite"
    assert "reads one flag" in decision.detail


@pytest.mark.parametrize("has_gradient", [True, False])
@pytest.mark.parametrize(("place", "said"), [("meta", "reads one flag"), ("cpu", "undone on the")])
def test_state_elsewhere_than_its_parameter_is_told_of_before_the_first_gradient(
    place, said, has_gradient
):
    """As on CUDA, where the counter of a plain Adagrad is on the host from the beginning."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2) if has_gradient else None
    optimizer = optim.Adagrad([parameter], lr=0.1)
    optimizer.state[parameter]["step"] = optimizer.state[parameter]["step"].to(place)
    decision = SkippableUpdate(optimizer).decision("nonfinite")
    assert said in decision.detail
    assert decision.outcome == ("stepped aside" if place == "meta" else "applied")


# --- the two halves -------------------------------------------------------------------------------


def test_gradients_are_judged_as_they_are_at_the_update():
    trainer = trainer_of(OPTIMIZERS["AdamW"], SKIP)
    good, bad = (as_batch(g) for g in batches_with([None, "NaN gradient"]))
    trainer.forward_backward(good)
    before = state_of(trainer)
    trainer.model.last.bias.grad[1] = torch.nan  # spoilt between the halves
    trainer.update()
    assert_same(before["parameters"], state_of(trainer)["parameters"])
    assert trainer.num_skipped == 1
    trainer.forward_backward(bad)
    for parameter in trainer.model.parameters():
        parameter.grad.nan_to_num_()  # mended between the halves
    trainer.update()
    assert trainer.num_skipped == 1
    assert differences(before["parameters"], state_of(trainer)["parameters"])
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_a_loss_that_is_not_finite_cannot_be_mended():
    trainer = trainer_of(OPTIMIZERS["AdamW"], SKIP)
    before = state_of(trainer)
    trainer.forward_backward(as_batch(batches_with(["NaN input"])[0]))
    for parameter in trainer.model.parameters():
        parameter.grad.nan_to_num_()
    trainer.update()
    assert_same(before["parameters"], state_of(trainer)["parameters"])
    assert_same(before["buffers"], state_of(trainer)["buffers"])


@pytest.mark.parametrize("plan", [SKIP, fp16("skip")], ids=["fp32", "fp16"])
def test_a_half_that_is_never_applied_leaves_no_nan(plan):
    trainer = trainer_of(OPTIMIZERS["AdamW"], plan)
    bad, good = (as_batch(g) for g in batches_with(["NaN input", None]))
    trainer.forward_backward(bad)
    trainer.forward_backward(good)  # starts over
    trainer.update()
    assert trainer.num_skipped == 0
    assert all(b.isfinite().all() for b in trainer.model.buffers())
    assert int(trainer.model.seen) == 6


def test_a_half_that_is_never_applied_counts_for_buffers_as_in_a_plain_loop():
    trainer = trainer_of(OPTIMIZERS["AdamW"], SKIP)
    first, second = (as_batch(g) for g in batches_with([None, None]))
    trainer.forward_backward(first)
    trainer.forward_backward(second)
    trainer.update()
    assert int(trainer.model.seen) == 12


def test_an_update_without_a_first_half_is_judged_by_its_gradients():
    trainer = trainer_of(OPTIMIZERS["SGD"], SKIP)
    before = state_of(trainer)
    for value in (torch.nan, 1.0):
        for parameter in trainer.model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        trainer.update()
        assert bool(differences(before, state_of(trainer))) == (value == 1.0)


def test_what_is_returned_is_honest():
    trainer = trainer_of(OPTIMIZERS["SGD"], SKIP, max_grad_norm=1.0)
    (bad,) = batches_with(["NaN input"])
    assert run(trainer, [bad])[0].isnan()
    assert trainer.metrics["grad_norm"].isnan()
