"""The step: what it returns, its halves, its optimizer and scheduler, its state, its end."""

from __future__ import annotations

import copy
import io
import random
from functools import partial

import numpy as np
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
from torchfast import (
    ClosedError,
    MicroBatches,
    Plan,
    PrecisionOptions,
    StateMismatchError,
    Trainer,
    TrainStep,
)
from torchfast._core.compare import differences
from torchfast.testing import plain_step

ADAMW = partial(optim.AdamW, lr=0.01)
SGD = partial(optim.SGD, lr=0.1, momentum=0.9)
FP16 = Plan(precision=PrecisionOptions(format="fp16", init_scale=256.0))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models of a few hundred parameters: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_trainer(optimizer=ADAMW, loss_fn=mean_loss, plan="exact", *, net=DropoutNet, **options):
    torch.manual_seed(0)
    return Trainer(net(), optimizer, loss_fn, plan, **options)


def grouped(batches, size):
    return [MicroBatches(batches[i : i + size]) for i in range(0, len(batches), size)]


def roundtrip(state):
    """Through a file, as a resumed run gets it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


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


# --- optimizer and scheduler --------------------------------------------------------------------


def test_num_steps_counts_updates():
    trainer = make_trainer(accumulate=2)
    assert trainer.num_steps == trainer.num_skipped == 0
    for group in grouped(make_batches(5), 2):
        trainer.step(group)
    assert trainer.num_steps == 3
    trainer.forward_backward(MicroBatches(make_batches(1)))
    assert trainer.num_steps == 3
    trainer.update()
    assert trainer.num_steps == 4


def test_what_was_given_is_the_same_object():
    model = DropoutNet()
    optimizer = ADAMW(model.parameters())
    scheduler = schedulers.StepLR(optimizer, 2)
    trainer = Trainer(model, optimizer, mean_loss, "fast", lr_scheduler=scheduler)
    assert trainer.model is model
    assert trainer.optimizer is optimizer
    assert trainer.lr_scheduler is scheduler


def test_an_optimizer_factory_gets_the_parameters():
    seen = []

    def make(parameters):
        seen.extend(parameters)
        return SGD(seen)

    trainer = make_trainer(make)
    assert all(a is b for a, b in zip(seen, trainer.model.parameters(), strict=True))
    assert isinstance(trainer.optimizer, optim.SGD)
    trainer.step(make_batches(1)[0])


def test_a_scheduler_is_stepped_once_after_each_update():
    trainer = make_trainer(SGD, accumulate=2, lr_scheduler=partial(schedulers.StepLR, step_size=2))
    rates = []
    for group in grouped(make_batches(8), 2):
        trainer.step(group)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.01, 0.01, 0.001])
    assert trainer.lr_scheduler.last_epoch == 4


def test_without_a_scheduler_the_users_own_takes_effect():
    trainer = make_trainer(SGD)
    assert trainer.lr_scheduler is None
    mine = schedulers.StepLR(trainer.optimizer, 1)
    for batch in make_batches(2):
        trainer.step(batch)
        mine.step()
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_a_plateau_scheduler_is_left_to_fit():
    trainer = make_trainer(lr_scheduler=partial(schedulers.ReduceLROnPlateau, patience=0))
    trainer.step(make_batches(1)[0])
    assert trainer.lr_scheduler.last_epoch == 0


def test_any_object_with_step_will_do_as_a_scheduler():
    class Counter:
        calls = 0

        def step(self):
            self.calls += 1

    counter = Counter()
    trainer = make_trainer(lr_scheduler=counter)
    for batch in make_batches(2):
        trainer.step(batch)
    assert counter.calls == 2
    make_trainer(lr_scheduler=Counter()).load_state_dict(roundtrip(trainer.state_dict()))


@pytest.mark.parametrize("plan", ["eager", "exact", "fast", FP16], ids=str)
def test_parameter_groups_show_python_floats(plan):
    trainer = make_trainer(plan=plan, lr_scheduler=partial(schedulers.StepLR, step_size=1))
    given = ADAMW(DropoutNet().parameters()).param_groups[0]
    for batch in make_batches(2):
        trainer.step(batch)
    (group,) = trainer.optimizer.param_groups
    assert type(group["lr"]) is float
    assert group.keys() - {"initial_lr"} == given.keys()
    for key in given.keys() - {"params", "lr", "foreach", "fused", "capturable"}:
        assert group[key] == given[key]


@pytest.mark.parametrize("plan", ["exact", "fast"])
def test_a_learning_rate_set_by_hand_takes_effect(plan):
    trainer = make_trainer(partial(optim.SGD, lr=0.1), plan=plan, net=lambda: nn.Linear(8, 4))
    batches = make_batches(2)
    trainer.step(batches[0])
    trainer.optimizer.param_groups[0]["lr"] = 0.5
    before = trainer.model.weight.detach().clone()
    trainer.step(batches[1])
    expected = before - 0.5 * trainer.model.weight.grad
    torch.testing.assert_close(trainer.model.weight.detach(), expected)


def test_a_group_added_later_is_trained():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    trainer = Trainer(model, SGD(model[0].parameters()), mean_loss, "fast")
    batches = make_batches(3)
    trainer.step(batches[0])
    trainer.optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.2})
    before = model[1].weight.detach().clone()
    trainer.step(batches[1])
    assert not torch.equal(model[1].weight, before)
    roundtrip(trainer.state_dict())
    trainer.close()


def test_a_parameter_outside_the_optimizer_is_reported():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    trainer = Trainer(model, SGD(model[0].parameters()), mean_loss)
    assert "2 trainable parameters are not in the optimizer (1.weight, 1.bias)" in str(
        trainer.report()
    )


# --- close --------------------------------------------------------------------------------------


def test_close_puts_the_optimizer_and_the_layout_back():
    torch.manual_seed(0)
    model = BatchNormNet()
    model.conv.weight.data = torch.randn(4, 1, 3, 3)
    wide = nn.Conv2d(3, 5, 3)
    model.add_module("wide", wide)
    optimizer = ADAMW(model.parameters())
    given = copy.deepcopy(optimizer.state_dict()["param_groups"])
    trainer = Trainer(model, optimizer, mean_loss, "fast")
    assert optimizer.param_groups[0]["fused"] is True
    assert wide.weight.is_contiguous(memory_format=torch.channels_last)
    trainer.step(make_batches(1)[0])
    trainer.close()
    assert optimizer.state_dict()["param_groups"] == given
    assert wide.weight.is_contiguous()
    assert optimizer.state[model.head.weight]["exp_avg"].is_contiguous()
    plain_step(model, optimizer, mean_loss, make_batches(1))


@pytest.mark.parametrize("plan", ["exact", "fast"])
def test_a_second_close_does_nothing(plan):
    trainer = make_trainer(plan=plan)
    trainer.step(make_batches(1)[0])
    trainer.close()
    state = copy.deepcopy(trainer.state_dict())
    trainer.close()
    assert not differences(state, trainer.state_dict())


def test_a_closed_step_refuses_to_train():
    trainer = make_trainer()
    batch = make_batches(1)[0]
    state = trainer.state_dict()
    trainer.close()
    for call in (
        lambda: trainer.step(batch),
        lambda: trainer.forward_backward(batch),
        trainer.update,
        lambda: trainer.load_state_dict(state),
        lambda: trainer.fit([batch], steps=1, progress="off"),
    ):
        with pytest.raises(ClosedError, match="was closed; build a new Trainer"):
            call()
    assert trainer.num_steps == 0


def test_a_trainer_is_a_context_that_closes_also_on_an_error():
    with make_trainer(plan="fast") as trainer:
        assert trainer.optimizer.param_groups[0]["fused"] is True
    assert not trainer.optimizer.param_groups[0]["fused"]
    with pytest.raises(ZeroDivisionError), make_trainer() as trainer:
        raise ZeroDivisionError
    with pytest.raises(ClosedError):
        trainer.update()


def test_the_optimizer_goes_on_without_us_after_close():
    trainer = make_trainer(plan="fast")
    trainer.step(make_batches(1)[0])
    trainer.close()
    trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())
    assert not trainer.optimizer.param_groups[0]["fused"]


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
    assert text == "Trainer(DropoutNet, AdamW, plan=Plan(), accumulate=2, device='cpu')"
    step = TrainStep(DropoutNet(), ADAMW, mean_loss)
    assert repr(step).startswith("TrainStep(DropoutNet, AdamW, plan=Plan()")


# --- state --------------------------------------------------------------------------------------


def noisy_loss(model, batch):
    """Draws from every host generator, so that a resume that forgets one is found."""
    noise = random.random() + float(np.random.rand())
    return mean_loss(model, batch) * (1 + 0.1 * noise)


RESUMED = {
    "exact": {"plan": "exact", "max_grad_norm": 0.5},
    "fast": {"plan": "fast"},
    "fp16": {"plan": FP16},
    "accumulate": {"accumulate": 2},
    "SGD": {"optimizer": SGD, "lr_scheduler": partial(schedulers.CosineAnnealingLR, T_max=6)},
}


@pytest.mark.parametrize("name", RESUMED)
def test_resume_at_every_step_is_exact(name):
    options = {"loss_fn": noisy_loss, "net": DropoutNet, **RESUMED[name]}
    batches = make_batches(6)
    if "accumulate" in options:
        batches = grouped(batches, 2)

    def run(trainer, batches):
        return [trainer.step(batch) for batch in batches]

    first = make_trainer(**options)
    random.seed(0)
    np.random.seed(0)
    saved, losses = [roundtrip(first.state_dict())], []
    for batch in batches:
        losses += run(first, [batch])
        saved.append(roundtrip(first.state_dict()))
    for k, state in enumerate(saved):
        resumed = make_trainer(**options)
        random.seed(k + 100)
        resumed.load_state_dict(state)
        assert resumed.num_steps == k
        again = run(resumed, batches[k:])
        assert all(torch.equal(a, b) for a, b in zip(losses[k:], again, strict=True))
        assert not differences(saved[-1], resumed.state_dict())


SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda s: 1 / (1 + s)),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3]),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.02, total_steps=20),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.001, 0.01, step_size_up=3),
    "warm restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o,
        [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 2), schedulers.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_resumes(name):
    batches = make_batches(5)
    first = make_trainer(lr_scheduler=SCHEDULERS[name])
    for batch in batches[:2]:
        first.step(batch)
    state = roundtrip(first.state_dict())
    resumed = make_trainer(lr_scheduler=SCHEDULERS[name])
    resumed.load_state_dict(state)
    rates = []
    for trainer in (first, resumed):
        torch.manual_seed(5)
        rates.append([])
        for batch in batches[2:]:
            trainer.step(batch)
            rates[-1].append(trainer.optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]
    assert not differences(first.state_dict(), resumed.state_dict())


def test_two_trainers_that_load_one_state_share_nothing():
    first = make_trainer(lr_scheduler=SCHEDULERS["SequentialLR"])
    batches = make_batches(3)
    first.step(batches[0])
    state = first.state_dict()
    kept = copy.deepcopy(state)
    second, third = (make_trainer(lr_scheduler=SCHEDULERS["SequentialLR"]) for _ in range(2))
    second.load_state_dict(state)
    third.load_state_dict(state)
    for batch in batches:
        second.step(batch)
    torch.set_rng_state(kept["rng"]["torch"])
    assert not differences(kept, third.state_dict())
    assert not differences(kept, first.state_dict())


def test_a_state_has_its_parts_and_no_more():
    state = make_trainer().state_dict()
    assert set(state) == {
        "format",
        "plan",
        "num_steps",
        "model",
        "optimizer",
        "lr_scheduler",
        "scaler",
        "rng",
    }
    assert (state["format"], state["plan"], state["lr_scheduler"]) == (1, "{}", None)


class Wide(nn.Module):
    def __init__(self, names, size=2):
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(size)))

    def forward(self, batch):
        return sum(p.sum() for p in self.parameters()) * batch[0].mean()


def wide(names, size=2):
    return Trainer(Wide(names, size), ADAMW, lambda model, batch: model(batch))


def changed(key, value):
    def change(state):
        state[key] = value(state[key]) if callable(value) else value

    return change


def without_model_key(state):
    del state["model"]["layers.0.bias"]


def with_more_groups(state):
    state["optimizer"]["param_groups"] *= 2


def with_transposed_moments(state):
    entry = state["optimizer"]["state"][0]
    entry["exp_avg"] = torch.ones(16 * 8 + 1)


def with_strange_moments(state):
    state["optimizer"]["state"][3]["exp_avg"] = torch.ones(16, 4)


MISFITS = {
    "a newer format": (changed("format", 2), r"format 2, this version reads up to 1; upgrade"),
    "a format that is no number": (changed("format", "x"), r"format x"),
    "no scheduler": (
        changed("lr_scheduler", None),
        r"saved without an lr_scheduler, this trainer has one; build the trainer as it was",
    ),
    "no model": (lambda state: state.pop("model"), r"state lacks \['model'\]; load what"),
    "no rng and no plan": (
        lambda state: (state.pop("rng"), state.pop("plan")),
        r"state lacks \['rng', 'plan'\]",
    ),
    "a missing key": (
        without_model_key,
        r"does not fit DropoutNet \(1 keys\): missing 'layers.0.bias'$",
    ),
    "an unexpected key": (
        lambda state: state["model"].update(extra=torch.ones(1)),
        r"\(1 keys\): unexpected 'extra'$",
    ),
    "another shape": (
        lambda state: state["model"].update({"layers.0.bias": torch.ones(17)}),
        r"'layers.0.bias' has shape \(17,\), expected \(16,\)",
    ),
    "another number of groups": (
        with_more_groups,
        r"groups of sizes \[4, 4\], AdamW has \[4\]; build the optimizer as it was",
    ),
    "moments of another shape": (
        with_transposed_moments,
        r"'exp_avg' of parameter 0 has shape \(129,\), the parameter has \(16, 8\)",
    ),
    "moments in another order": (
        with_strange_moments,
        r"'exp_avg' of parameter 3 has shape \(16, 4\), the parameter has \(4,\)",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_state_that_does_not_fit_changes_nothing(name):
    change, message = MISFITS[name]
    options = {"lr_scheduler": partial(schedulers.StepLR, step_size=1)}
    batches = make_batches(2)
    saver, loader = make_trainer(**options), make_trainer(**options)
    saver.step(batches[0])
    saver.step(batches[1])
    loader.step(batches[1])
    state = copy.deepcopy(saver.state_dict())
    change(state)
    before = copy.deepcopy(loader.state_dict())
    with pytest.raises(StateMismatchError, match=message):
        loader.load_state_dict(state)
    assert not differences(before, loader.state_dict())
    loader.load_state_dict(saver.state_dict())


def test_the_state_of_another_kind_of_optimizer_changes_nothing():
    saver, loader = make_trainer(SGD), make_trainer(ADAMW)
    before = copy.deepcopy(loader.state_dict())
    with pytest.raises(StateMismatchError, match="AdamW"):
        loader.load_state_dict(saver.state_dict())
    assert not differences(before, loader.state_dict())


def test_the_state_of_an_older_torch_loads_as_torch_loads_it():
    trainer = make_trainer()
    state = copy.deepcopy(trainer.state_dict())
    del state["optimizer"]["param_groups"][0]["decoupled_weight_decay"]  # torch 2.5 had none
    trainer.load_state_dict(state)
    assert trainer.optimizer.param_groups[0]["decoupled_weight_decay"] is True


def test_a_state_without_a_scheduler_is_all_that_a_trainer_without_one_takes():
    saver = make_trainer(lr_scheduler=partial(schedulers.StepLR, step_size=1))
    with pytest.raises(StateMismatchError, match=r"saved with an lr_scheduler, .* has none"):
        make_trainer().load_state_dict(saver.state_dict())


def test_a_state_is_a_mapping():
    with pytest.raises(TypeError, match=r"mapping that state_dict\(\) returned, got list"):
        make_trainer().load_state_dict([])


def test_at_most_ten_keys_are_listed_and_all_are_counted():
    old, new = (wide([f"{prefix}{i:02}" for i in range(12)]) for prefix in ("old", "new"))
    with pytest.raises(StateMismatchError) as caught:
        new.load_state_dict(old.state_dict())
    text = str(caught.value)
    assert "does not fit Wide (24 keys)" in text
    assert text.count("missing") + text.count("unexpected") == 10
    assert text.endswith("; missing 'new09' and 14 more")


def test_wrong_shapes_are_listed_too():
    old, new = wide("abcdefghijkl", 3), wide("abcdefghijkl", 2)
    with pytest.raises(StateMismatchError) as caught:
        new.load_state_dict(old.state_dict())
    assert str(caught.value).count("has shape (3,), expected (2,)") == 10
    assert str(caught.value).endswith("and 2 more")


@pytest.mark.parametrize("optimizer", [ADAMW, SGD, partial(optim.NAdam, lr=0.01)])
def test_a_state_saved_under_fast_loads_into_a_plain_loop_and_back(optimizer):
    batches = make_batches(6)
    fast = make_trainer(optimizer, plan="fast")
    for batch in batches[:2]:
        fast.step(batch)
    state = roundtrip(fast.state_dict())

    model = DropoutNet()
    model.load_state_dict(state["model"])
    plain = optimizer(model.parameters())
    given = {k: v for k, v in plain.param_groups[0].items() if k != "params"}
    plain.load_state_dict(state["optimizer"])
    assert {k: v for k, v in plain.param_groups[0].items() if k != "params"} == given
    for batch in batches[2:4]:
        plain_step(model, plain, mean_loss, [batch])

    fast.load_state_dict(
        {**state, "model": model.state_dict(), "optimizer": roundtrip(plain.state_dict())}
    )
    assert bool(fast.optimizer.param_groups[0].get("fused")) is ("NAdam" not in str(optimizer))
    for batch in batches[4:]:
        fast.step(batch)
    assert all(torch.isfinite(p).all() for p in fast.model.parameters())
    steps = [s["step"] for s in fast.optimizer.state.values() if "step" in s]
    assert all(float(step) == 6 for step in steps)


def test_plans_exchange_states():
    exact, fast = make_trainer(plan="exact"), make_trainer(plan="fast")
    exact.step(make_batches(1)[0])
    fast.load_state_dict(roundtrip(exact.state_dict()))
    assert fast.plan == Plan.preset("fast")
    exact.load_state_dict(roundtrip(fast.state_dict()))
    fp16 = make_trainer(plan=FP16)
    fp16.load_state_dict(exact.state_dict())
    exact.load_state_dict(fp16.state_dict())
    assert exact.num_steps == 1


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
