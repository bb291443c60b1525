"""`CompileOptions(update=True)`: the compiled update trains the same model, or runs as it is."""

from __future__ import annotations

import copy
import logging
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler as schedulers

from models import BatchNormNet, DropoutNet, make_batches
from stepping import grouped, make_trainer
from tape import Twins, counts
from torchfast import (
    CompileError,
    CompileOptions,
    CUDAGraphOptions,
    EMAOptions,
    Plan,
    PrecisionOptions,
)
from torchfast._core.compare import differences
from torchfast.graphs import LearningRates

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

# Of the model next to nothing is compiled: this is about the update.
OPTIONS = partial(CompileOptions, backend="eager", regions=(torch.nn.Linear,), update=True)
COMPILED = Plan(compile=OPTIONS())
CLOSE = 1e-5
OPTIMIZERS = {
    "ASGD": partial(optim.ASGD, lr=0.05),
    "Adadelta": partial(optim.Adadelta, lr=1.0),
    "Adagrad": partial(optim.Adagrad, lr=0.05),
    "AdamW": partial(optim.AdamW, lr=0.01, weight_decay=0.1, amsgrad=True),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "RMSprop": partial(optim.RMSprop, lr=0.005, momentum=0.9, centered=True),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD momentum": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
}
ADAMW = OPTIMIZERS["AdamW"]
# Before a normalisation a bias has no gradient but rounding, of which Adam makes whole updates.
SGD = OPTIMIZERS["SGD momentum"]


class Signs(optim.Optimizer):
    """An optimizer of a user's own, which a graph can hold."""

    is_capturable = True

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].mul_(0.9).add_(p.grad)
                p.sub_(state["mean"].sign() * group["lr"])


class Asking(Signs):
    """One that asks the host in its middle, behind its first write."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * self.param_groups[0]["lr"])
            if float(p.sum()) > 0:
                p.mul_(0.99)


class Slowing(Signs):
    """One that lowers its own learning rate, in place if that is a tensor."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= 0.9
            for p in group["params"]:
                p.sub_(p.grad * group["lr"])


def two_groups(make):
    def build(params):
        params = list(params)
        biases = [p for p in params if p.dim() < 2]
        return make(
            [{"params": [p for p in params if p.dim() > 1]}, {"params": biases, "lr": 0.003}]
        )

    return build


def told(step):
    """Return what the report says of the update."""
    found = [d for d in step.report().decisions if d.lever == "compile"]
    return [d for d in found if "the update of" in d.detail]


def graphs(step):
    return step.report().counters["update_graphs"]


def far(twins):
    """Return what is farther from the plain loop than rounding; what has another form is too.

    Of what is larger than one, such as a momentum of centered RMSprop, rounding is a part.
    """
    state = twins.optimizer.state_dict()["state"]
    sizes = {
        f"optimizer.state.{number}.{name}": max(1.0, value.abs().max().item())
        for number, of_parameter in state.items()
        for name, value in of_parameter.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    return [d for d in twins.differences() if not d.distance < CLOSE * sizes.get(d.key, 1.0)]


def twins_of(make, count=6, accumulate=1, **options):
    """Train both ways, compared after each step."""
    options.setdefault("plan", COMPILED)
    twins = Twins(DropoutNet, make, accumulate=accumulate, **options)
    batches = make_batches(count * accumulate)
    for start in range(0, len(batches), accumulate):
        twins.step(*batches[start : start + accumulate])
        assert far(twins) == []
    return twins


# -- The same model --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_update_trains_the_same(name):
    twins = twins_of(
        two_groups(OPTIMIZERS[name]),
        accumulate=2,
        clip=0.5,
        scheduler=lambda o: schedulers.LambdaLR(o, [lambda s: 1 / (1 + s), lambda s: 0.5**s]),
    )
    assert graphs(twins.captured) == 1  # whatever the learning rates have been
    (decision,) = told(twins.captured)
    assert decision.outcome == "applied"
    assert "compiled in" in decision.detail
    assert all(type(group["lr"]) is float for group in twins.own.param_groups)


def test_without_rates_as_tensors_a_schedule_would_compile_again(monkeypatch):
    monkeypatch.setattr(LearningRates, "on_device", lambda _: nullcontext())
    twins = twins_of(ADAMW, scheduler=partial(schedulers.StepLR, step_size=1))
    assert graphs(twins.captured) > 1


def test_a_rate_set_by_hand_takes_effect_at_once():
    twins = twins_of(SGD, count=3)
    for rate in (0.5, 0.0, 0.02):
        twins.both(lambda _, optimizer, rate=rate: optimizer.param_groups[0].update(lr=rate))
        twins.step(make_batches(1)[0])
        assert far(twins) == []
    assert graphs(twins.captured) == 1


def test_a_decay_set_by_hand_compiles_again_and_takes_effect():
    twins = twins_of(ADAMW, count=3)
    twins.both(lambda _, optimizer: optimizer.param_groups[0].update(weight_decay=0.9))
    for batch in make_batches(2):
        twins.step(batch)
        assert far(twins) == []
    assert graphs(twins.captured) == 2


def test_parameters_that_begin_to_train_later_are_updated():
    twins = Twins(DropoutNet, ADAMW, plan=COMPILED)
    twins.both(lambda model, _: model.layers[0].requires_grad_(False))
    for number, batch in enumerate(make_batches(6)):
        if number == 3:
            twins.both(lambda model, _: model.layers[0].requires_grad_(True))
        twins.step(batch)
        assert far(twins) == []


def test_the_average_follows():
    trainers = [
        make_trainer(SGD, plan=plan, net=BatchNormNet, ema=EMAOptions(decay=0.5))
        for plan in (COMPILED, "eager")
    ]
    for batch in make_batches(5):
        for trainer in trainers:
            trainer.step(batch)
    own, plain = (trainer.ema_model.state_dict() for trainer in trainers)
    assert [d for d in differences(plain, own) if not d.distance < CLOSE] == []
    assert graphs(trainers[0]) == 1


def test_both_halves_by_hand():
    trainers = [make_trainer(SGD, plan=p, net=BatchNormNet) for p in (COMPILED, "eager")]
    for batch in make_batches(4):
        for trainer in trainers:
            trainer.forward_backward(batch)
            trainer.update()
    own, plain = (trainer.model.state_dict() for trainer in trainers)
    assert [d for d in differences(plain, own) if not d.distance < CLOSE] == []
    assert graphs(trainers[0]) == 1


# -- Updates that are called off -------------------------------------------------------------------


@pytest.mark.parametrize("make", [ADAMW, OPTIMIZERS["SGD"]], ids=["AdamW", "SGD"])
def test_a_step_that_is_not_finite_is_skipped(make):
    trainer = make_trainer(make, plan=COMPILED.replace(nonfinite="skip"), net=BatchNormNet)
    batches = make_batches(6)
    for batch in batches[:3]:
        trainer.step(batch)
    before = copy.deepcopy([trainer.model.state_dict(), trainer.optimizer.state_dict()])
    trainer.step((batches[3][0] * torch.nan, batches[3][1]))
    assert trainer.num_skipped == 1
    assert not differences(before, [trainer.model.state_dict(), trainer.optimizer.state_dict()])
    trainer.step(batches[4])
    assert trainer.num_skipped == 1
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    assert differences(before[0], trainer.model.state_dict())
    assert graphs(trainer) == 1


def test_fp16_scales_and_skips():
    precision = PrecisionOptions(format="fp16", init_scale=2.0**40)
    trainers = [
        make_trainer(SGD, plan=Plan(precision=precision, compile=c), net=BatchNormNet)
        for c in (OPTIONS(), False)
    ]
    for batch in make_batches(3) * 14:
        for trainer in trainers:
            trainer.step(batch)
    own, plain = trainers
    assert own.num_skipped == plain.num_skipped > 0
    assert graphs(own) == 1
    found = differences(plain.model.state_dict(), own.model.state_dict())
    assert [d for d in found if not d.distance < 1e-2] == []


# -- What is not compiled --------------------------------------------------------------------------


def test_a_fused_update_stays_as_it_is():
    twins = Twins(DropoutNet, partial(optim.AdamW, lr=0.01, fused=True), plan=COMPILED)
    twins.run(make_batches(3))  # bit for bit
    (decision,) = told(twins.captured)
    assert decision.outcome == "left alone"
    assert "it is fused" in decision.detail


def test_without_it_nothing_is_said():
    trainer = make_trainer(ADAMW, plan=Plan(compile=OPTIONS(update=False)))
    assert told(trainer) == []
    assert "update_graphs" not in trainer.report().counters


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (partial(optim.Adafactor, lr=0.01), "an if, while or assert on the value of a tensor"),
        (
            partial(Asking, lr=0.01),
            f"on the value of a tensor: which way to go is known only when "
            f"the numbers are, at {__file__}:",
        ),
        (partial(Slowing, lr=0.01), "changes the learning rate"),
        (partial(optim.AdamW, lr=0.01, foreach=True), "foreach=True takes no"),
    ],
    ids=["Adafactor", "asking", "slowing", "foreach"],
)
def test_what_cannot_be_compiled_runs_as_it_is_and_once(make, cause, caplog):
    with caplog.at_level(logging.WARNING, "torchfast.compiled_update"):
        twins = Twins(DropoutNet, make, plan=COMPILED, clip=0.5)
        twins.run(make_batches(5))  # bit for bit: nothing of an update ran twice
    (decision,) = told(twins.captured)
    assert decision.outcome == "stepped aside"
    assert cause in decision.detail
    assert len(caplog.records) == 1
    assert cause in caplog.text


def test_on_failure_raise_raises_before_anything_is_updated():
    plan = Plan(compile=OPTIONS(on_failure="raise"))
    trainer = make_trainer(partial(Asking, lr=0.01), plan=plan)
    batches = make_batches(2)
    trainer.step(batches[0])
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(CompileError, match="the update of Asking cannot be compiled"):
        trainer.step(batches[1])
    assert not differences(before, trainer.model.state_dict())


def test_a_step_that_somebody_replaced_is_called():
    trainer = make_trainer(ADAMW, plan=COMPILED)
    optimizer, calls = trainer.optimizer, []
    own = optimizer.step
    optimizer.step = lambda: (calls.append(1), own())
    for batch in make_batches(3):
        trainer.step(batch)
    assert len(calls) == 3
    assert "replaced by another function" in told(trainer)[0].detail


def test_beside_other_ranks_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    twins = Twins(DropoutNet, ADAMW, plan=COMPILED)
    twins.run(make_batches(3))
    assert "there are other ranks" in told(twins.captured)[0].detail


def test_a_compiler_that_is_off_for_now_is_asked_again():
    twins = Twins(DropoutNet, ADAMW, plan=COMPILED)
    with torch.compiler.set_stance("force_eager"):
        twins.run(make_batches(3))  # bit for bit
        (decision,) = told(twins.captured)
        assert decision.outcome == "stepped aside"
        assert "set_stance('force_eager') is in force" in decision.detail
    for batch in make_batches(2):
        twins.step(batch)
        assert far(twins) == []
    assert graphs(twins.captured) == 1


def test_a_schedule_that_cycles_momentum_ends_at_the_limit_and_goes_on():
    cycle = partial(schedulers.OneCycleLR, max_lr=0.02, total_steps=40)
    twins = twins_of(ADAMW, count=14, scheduler=cycle)
    (decision,) = told(twins.captured)
    assert decision.outcome == "applied" or "cycle_momentum=False" in decision.detail


# -- In a captured step, on tape -------------------------------------------------------------------


def test_a_compiled_update_is_in_the_graph(tape):
    plan = COMPILED.replace(cuda_graph=True)
    twins = twins_of(partial(Signs, lr=0.01), count=0, plan=plan)
    for batch in make_batches(10):
        twins.step(batch)
        assert [d for d in twins.differences(gradients=False) if not d.distance < CLOSE] == []
    assert counts(twins.captured) == (1, 7, 3, 1)
    assert graphs(twins.captured) == 1
    (decision,) = told(twins.captured)
    assert decision.outcome == "applied"


def test_a_compiled_update_runs_behind_a_graph(tape):
    plan = COMPILED.replace(cuda_graph=True)
    twins = twins_of(OPTIMIZERS["RMSprop"], count=9, plan=plan, clip=0.5)
    assert counts(twins.captured)[:2] == (1, 6)
    assert graphs(twins.captured) == 1


def test_accumulated_steps_with_halves_between(tape):
    plan = COMPILED.replace(cuda_graph=True)
    trainer = make_trainer(partial(Signs, lr=0.01), plan=plan, net=BatchNormNet, accumulate=2)
    plain = make_trainer(partial(Signs, lr=0.01), plan="eager", net=BatchNormNet, accumulate=2)
    for number, group in enumerate(grouped(make_batches(16), 2)):
        for each in (trainer, plain):
            if number == 5:
                each.forward_backward(group)
                each.update()
            else:
                each.step(group)
    found = differences(plain.model.state_dict(), trainer.model.state_dict())
    assert [d for d in found if not d.distance < CLOSE] == []
    assert graphs(trainer) == 1


def test_one_warm_up_step_is_too_few(tape):
    plan = COMPILED.replace(cuda_graph=CUDAGraphOptions(warm_up_steps=1))
    twins = twins_of(partial(Signs, lr=0.01), count=0, plan=plan)
    for batch in make_batches(4):
        twins.step(batch)
    assert counts(twins.captured)[2] == 2
    assert graphs(twins.captured) == 1
