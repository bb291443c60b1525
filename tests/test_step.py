"""The step: what it returns, its metrics, its halves, what it tells, the batches it takes."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers

from models import (
    BatchNormNet,
    DropoutNet,
    loss_and_metrics,
    make_batches,
    mean_loss,
    split,
    weighted_loss,
)
from stepping import ADAMW, FP16, SGD, grouped, make_trainer
from torchfast import MicroBatches, Plan, Trainer, TrainStep
from torchfast._core.compare import differences

# --- what a step returns ------------------------------------------------------------------------


def test_the_loss_is_a_detached_scalar_that_later_steps_leave_alone():
    trainer = make_trainer()
    losses = [trainer.step(batch) for batch in make_batches(3)]
    values = [float(loss) for loss in losses]
    for batch in make_batches(3, seed=1):
        trainer.step(batch)
    assert [float(loss) for loss in losses] == values
    for loss in losses:
        assert loss.shape == ()
        assert not loss.requires_grad
        assert loss.device == trainer.device


def test_a_loss_of_one_element_comes_back_as_a_scalar():
    trainer = make_trainer(loss_fn=lambda m, b: mean_loss(m, b).reshape(1, 1))
    assert trainer.step(make_batches(1)[0]).shape == ()


def test_the_loss_of_a_group_is_the_mean_over_it():
    batches = make_batches(3)
    model = BatchNormNet().eval()
    expected = torch.stack([mean_loss(model, batch) for batch in batches]).mean()
    trainer = Trainer(model, SGD, mean_loss, accumulate=4)
    torch.testing.assert_close(trainer.step(MicroBatches(batches)), expected.detach())


def test_the_loss_of_a_weighted_group_is_the_mean_over_items():
    batches = make_batches(4, ragged=True)
    model = BatchNormNet().eval()
    whole = [torch.cat(parts) for parts in zip(*map(split, batches), strict=True)]
    expected = mean_loss(copy.deepcopy(model), tuple(whole))
    trainer = Trainer(model, SGD, weighted_loss, accumulate=4)
    torch.testing.assert_close(trainer.step(MicroBatches(batches)), expected.detach())


def test_weighted_gradients_are_those_of_the_whole_batch():
    batches = make_batches(4, ragged=True)
    model = BatchNormNet().eval()
    whole = tuple(torch.cat(parts) for parts in zip(*map(split, batches), strict=True))
    mean_loss(model, whole).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    trainer = Trainer(model, SGD, weighted_loss, accumulate=4)
    trainer.forward_backward(MicroBatches(batches))
    for gradient, parameter in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


# --- metrics ------------------------------------------------------------------------------------


def test_metrics_are_averaged_over_the_group():
    values = iter([1.0, 4.0, torch.tensor(7.0), 8])
    trainer = make_trainer(
        loss_fn=lambda m, b: (mean_loss(m, b), {"value": next(values)}), accumulate=3
    )
    first, second = grouped(make_batches(4), 3)
    trainer.step(first)
    assert float(trainer.metrics["value"]) == 4.0
    trainer.step(second)
    assert float(trainer.metrics["value"]) == 8.0


def test_metrics_of_a_weighted_group_are_averaged_by_weight():
    values = iter([1.0, 5.0])
    sizes = iter([2, torch.tensor(6.0)])
    trainer = make_trainer(
        loss_fn=lambda m, b: (mean_loss(m, b), {"value": next(values)}, next(sizes)), accumulate=2
    )
    trainer.step(MicroBatches(make_batches(2)))
    assert float(trainer.metrics["value"]) == 4.0  # (1 * 2 + 5 * 6) / 8


def test_metrics_that_not_every_micro_batch_has_are_averaged_over_those_that_do():
    found = iter([{"a": 1.0}, {"a": 3.0, "late": 5.0}])
    trainer = make_trainer(loss_fn=lambda m, b: (mean_loss(m, b), next(found)), accumulate=2)
    trainer.step(MicroBatches(make_batches(2)))
    assert {k: float(v) for k, v in trainer.metrics.items()} == {"a": 2.0, "late": 5.0}


def test_metrics_are_detached_and_safe_to_keep():
    trainer = make_trainer(
        loss_fn=lambda m, b: ((loss := mean_loss(m, b)), {"loss": loss}), max_grad_norm=1.0
    )
    first, second = make_batches(2)
    trainer.step(first)
    metrics = trainer.metrics
    values = {k: float(v) for k, v in metrics.items()}
    assert not metrics["loss"].requires_grad
    trainer.step(second)
    assert {k: float(v) for k, v in metrics.items()} == values
    assert trainer.metrics is not metrics


def test_grad_norm_is_the_norm_before_clipping():
    trainer = make_trainer(max_grad_norm=0.01)
    batch = make_batches(1)[0]
    trainer.forward_backward(batch)
    gradients = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    assert "grad_norm" not in trainer.metrics
    trainer.update()
    torch.testing.assert_close(trainer.metrics["grad_norm"], gradients.norm())
    clipped = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    torch.testing.assert_close(clipped.norm(), torch.tensor(0.01), atol=0, rtol=1e-3)


def test_without_clipping_there_is_no_grad_norm():
    trainer = make_trainer(loss_fn=loss_and_metrics)
    trainer.step(make_batches(1)[0])
    assert set(trainer.metrics) == {"accuracy"}


def test_a_metric_named_grad_norm_clashes_with_clipping_only():
    def loss_fn(model, batch):
        return mean_loss(model, batch), {"grad_norm": 1.0}

    batch = make_batches(1)[0]
    with pytest.raises(ValueError, match=r"'grad_norm', which is the name of .* rename it"):
        make_trainer(loss_fn=loss_fn, max_grad_norm=1.0).step(batch)
    trainer = make_trainer(loss_fn=loss_fn)
    trainer.step(batch)
    assert trainer.metrics == {"grad_norm": 1.0}


# --- the halves ---------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["exact", "fast", FP16], ids=["exact", "fast", "fp16"])
@pytest.mark.parametrize("loss_fn", [loss_and_metrics, weighted_loss])
def test_two_halves_are_a_step(plan, loss_fn):
    options = {"loss_fn": loss_fn, "plan": plan, "accumulate": 2, "max_grad_norm": 0.1}
    whole, halves = make_trainer(**options), make_trainer(**options)
    for group in grouped(make_batches(7), 2):
        torch.manual_seed(1)
        expected = whole.step(group)
        torch.manual_seed(1)
        loss = halves.forward_backward(group)
        halves.update()
        assert torch.equal(loss, expected)
        assert not differences(dict(whole.metrics), dict(halves.metrics))
    assert not differences(whole.state_dict(), halves.state_dict())


@pytest.mark.parametrize("plan", ["exact", FP16], ids=["exact", "fp16"])
def test_between_the_halves_the_true_gradient_is_visible(plan):
    model = nn.Linear(8, 4)
    batches = make_batches(2)
    torch.stack([mean_loss(model, batch) for batch in batches]).mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    trainer = Trainer(model, SGD, mean_loss, plan, accumulate=2)
    trainer.forward_backward(MicroBatches(batches))
    close = {"atol": 0, "rtol": 1e-6} if plan == "exact" else {"atol": 2e-3, "rtol": 1e-2}
    for gradient, parameter in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, **close)


@pytest.mark.parametrize("plan", ["exact", FP16], ids=["exact", "fp16"])
def test_a_gradient_changed_between_the_halves_is_the_one_applied(plan):
    model = nn.Linear(8, 4)
    trainer = Trainer(model, partial(optim.SGD, lr=0.5), mean_loss, plan)
    before = model.weight.detach().clone()
    trainer.forward_backward(make_batches(1)[0])
    model.weight.grad.fill_(2.0)
    trainer.update()
    torch.testing.assert_close(model.weight.detach(), before - 1.0)


def test_gradients_do_not_add_up_over_steps():
    trainer = make_trainer(net=lambda: nn.Linear(8, 4), optimizer=partial(optim.SGD, lr=1e-12))
    batch = make_batches(1)[0]
    trainer.step(batch)
    first = trainer.model.weight.grad.clone()
    trainer.step(batch)
    torch.testing.assert_close(trainer.model.weight.grad, first)


def test_fp16_skips_an_update_that_is_not_finite_and_counts_it():
    trainer = make_trainer(net=lambda: nn.Linear(8, 4), plan=FP16)
    good, bad = make_batches(2)
    trainer.step(good)
    before = copy.deepcopy(trainer.state_dict())
    bad[0][0, 0] = float("nan")
    trainer.step(bad)
    after = trainer.state_dict()
    assert (trainer.num_steps, trainer.num_skipped) == (2, 1)
    assert not differences(before["model"], after["model"])
    assert not differences(before["optimizer"]["state"], after["optimizer"]["state"])
    assert after["scaler"]["scaler"]["scale"] == before["scaler"]["scaler"]["scale"] / 2
    trainer.step(good)
    assert differences(before["model"], trainer.model.state_dict())
    assert trainer.num_skipped == 1
    assert trainer.report().to_dict()["counters"] == {"steps": 3, "skipped": 1}


# --- what is told -------------------------------------------------------------------------------


def test_the_report_says_in_words_and_as_a_dict_what_was_done():
    trainer = make_trainer(plan="fast", lr_scheduler=partial(schedulers.StepLR, step_size=1))
    trainer.step(make_batches(1)[0])
    report = trainer.report()
    text = str(report)
    assert text.splitlines()[0] == "plan 'fast' on cpu"
    assert "AdamW runs its fused update" in text
    assert "StepLR is stepped after each update" in text
    assert "steps: 1" in text
    as_dict = report.to_dict()
    assert as_dict["counters"] == {"steps": 1}
    levers = {d["lever"]: d["outcome"] for d in as_dict["decisions"]}
    assert levers["optimizer"] == "applied"
    assert levers["channels_last"] == "left alone"
    assert {d.lever for d in report.stepped_aside} == {
        lever for lever, outcome in levers.items() if outcome == "stepped aside"
    }


def test_the_report_says_why_something_stepped_aside():
    trainer = make_trainer(partial(optim.Rprop, lr=0.01), plan=Plan(optimizer="fused"))
    (decision,) = trainer.report().stepped_aside
    assert decision.lever == "optimizer"
    assert decision.detail == "Rprop runs as given: torch.optim.Rprop has no fused implementation"


def test_repr_names_the_parts():
    text = repr(make_trainer(accumulate=2))
    assert (
        text == "Trainer(DropoutNet, AdamW, plan=Plan(cuda_graph=True), accumulate=2, device='cpu')"
    )
    step = TrainStep(DropoutNet(), ADAMW, mean_loss)
    assert repr(step).startswith("TrainStep(DropoutNet, AdamW, plan=Plan(cuda_graph=True)")


# --- batches ------------------------------------------------------------------------------------


def test_a_group_may_be_shorter_but_not_longer():
    trainer = make_trainer(accumulate=2)
    batches = make_batches(3)
    trainer.step(MicroBatches(batches[:1]))
    with pytest.raises(ValueError, match=r"got 3 micro-batches .* accumulate=2; raise accumulate"):
        trainer.step(MicroBatches(batches))
    assert trainer.num_steps == 1


def test_without_accumulation_a_group_of_one_is_a_batch():
    bare, group = make_trainer(), make_trainer()
    batch = make_batches(1)[0]
    torch.manual_seed(1)
    expected = bare.step(batch)
    torch.manual_seed(1)
    assert torch.equal(group.step(MicroBatches([batch])), expected)


@pytest.mark.parametrize("plan", ["exact", "fast"])
def test_the_layout_of_batches_follows_the_plan(plan):
    seen = []

    def loss_fn(model, image):
        seen.append(image.is_contiguous(memory_format=torch.channels_last))
        return model(image).square().mean()

    trainer = Trainer(nn.Conv2d(3, 4, 3), SGD, loss_fn, plan)
    image = torch.randn(2, 3, 6, 6)
    trainer.step(image)
    trainer.step(*trainer.prefetch([image]))
    assert seen == [plan == "fast"] * 2


def test_a_loss_that_is_a_parameter_is_safe_to_keep():
    class Scalar(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.tensor(1.0))
            self.v = nn.Parameter(torch.ones(3))

        def forward(self, batch):
            return self.p if batch else self.v[1]

    step = TrainStep(Scalar(), partial(optim.SGD, lr=0.1), lambda model, batch: model(batch))
    losses = [step(True), step(True), step(False), step(False)]
    assert [round(float(loss), 3) for loss in losses] == [1.0, 0.9, 1.0, 0.9]


def test_metrics_that_are_buffers_are_safe_to_keep():
    model = DropoutNet()
    model.register_buffer("seen", torch.zeros(()))

    def loss_fn(model, batch):
        model.seen += 1
        return mean_loss(model, batch), {"seen": model.seen}

    step = TrainStep(model, partial(optim.SGD, lr=0.1), loss_fn, accumulate=2)
    step(MicroBatches(make_batches(2)))
    first = step.metrics["seen"]
    step(MicroBatches(make_batches(2)))
    assert (float(first), float(step.metrics["seen"])) == (1.5, 3.5)
