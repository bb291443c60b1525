"""The state of a step: exact resumes, and states that do not fit."""

from __future__ import annotations

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers

from models import DropoutNet, make_batches, mean_loss
from stepping import ADAMW, FP16, SGD, grouped, make_trainer, roundtrip
from torchfast import Plan, StateMismatchError, Trainer
from torchfast._core.compare import differences
from torchfast.testing import plain_step


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
        "num_epochs",
        "model",
        "optimizer",
        "lr_scheduler",
        "scaler",
        "rng",
    }
    assert (state["format"], state["plan"], state["lr_scheduler"]) == (
        1,
        '{"cuda_graph": true}',
        None,
    )


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


def test_a_scheduler_of_another_kind_changes_nothing():
    saver = make_trainer(lr_scheduler=partial(schedulers.CosineAnnealingLR, T_max=3))
    saver.step(make_batches(1)[0])
    for kind in (
        partial(schedulers.LambdaLR, lr_lambda=lambda step: 1.0),
        partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=9),
    ):
        loader = make_trainer(lr_scheduler=kind)
        before = copy.deepcopy(loader.state_dict())
        with pytest.raises(StateMismatchError, match="another kind of scheduler"):
            loader.load_state_dict(saver.state_dict())
        assert not differences(before, loader.state_dict())


# --- what only the optimizer holds ---------------------------------------------------------------


class Scaled:
    """A loss with a parameter of its own, which is not the model's."""

    def __init__(self):
        self.scale = nn.Parameter(torch.ones(()))

    def __call__(self, model, batch):
        return mean_loss(model, batch) * self.scale.exp() - self.scale

    def trainer(self):
        torch.manual_seed(0)
        model = DropoutNet()
        return Trainer(model, optim.Adam([*model.parameters(), self.scale], 0.05), self)


def test_a_parameter_of_the_loss_is_resumed_and_reported():
    batches = make_batches(6)
    whole, before, after = Scaled(), Scaled(), Scaled()
    with whole.trainer() as trainer:
        for batch in batches:
            trainer.step(batch)
        number = len([*trainer.model.parameters()])
        assert "holds 1 parameters that are not the model's (of shape ())" in str(trainer.report())
    with before.trainer() as trainer:
        for batch in batches[:3]:
            trainer.step(batch)
        saved = roundtrip(trainer.state_dict())
    assert saved["parameters_of_others"] == {str(number): before.scale.detach()}
    with after.trainer() as trainer:
        trainer.load_state_dict(saved)
        for batch in batches[3:]:
            trainer.step(batch)
        assert "parameters_of_others" not in make_trainer().state_dict()
    assert before.scale != whole.scale != 1.0
    assert torch.equal(after.scale, whole.scale)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["parameters_of_others"].pop("4"), "missing '4'"),
        (
            lambda state: state["parameters_of_others"].update({"4": torch.ones(2)}),
            r"'4' has shape \(2,\), expected \(\)",
        ),
        (lambda state: state["parameters_of_others"].update({"9": torch.ones(())}), "unexpected"),
    ],
)
def test_other_parameters_of_the_loss_are_refused(change, message):
    loss = Scaled()
    with loss.trainer() as trainer:
        trainer.step(make_batches(1)[0])
        state = roundtrip(trainer.state_dict())
        trainer.step(make_batches(1)[0])
        held = copy.deepcopy(trainer.model.state_dict())
        change(state)
        with pytest.raises(StateMismatchError, match=message):
            trainer.load_state_dict(state)
        assert differences(held, trainer.model.state_dict()) == []


def test_a_state_without_other_parameters_leaves_them_and_says_so():
    loss = Scaled()
    with loss.trainer() as trainer:
        trainer.step(make_batches(1)[0])
        state = roundtrip(trainer.state_dict())
        del state["parameters_of_others"]
        trainer.step(make_batches(1)[0])
        kept = loss.scale.detach().clone()
        with pytest.warns(UserWarning, match="no values of 1 parameters that the optimizer holds"):
            trainer.load_state_dict(state)
        assert torch.equal(loss.scale, kept)
        assert differences(state["model"], trainer.model.state_dict()) == []
