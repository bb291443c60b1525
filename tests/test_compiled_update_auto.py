"""`CompileOptions(update="auto")`: measured on the real state, which it leaves as it was."""

from __future__ import annotations

import copy
import weakref
from functools import partial

import pytest
import torch
from torch import nn, optim

from models import DropoutNet, make_batches
from stepping import make_trainer
from tape import Twins
from torchfast import CompileError, CompileOptions, Plan, compiled_update, update_trial
from torchfast._core.compare import differences
from torchfast._core.measure import Measurement
from torchfast.compiler import OneGraph
from torchfast.update_trial import try_update

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

OPTIONS = partial(
    CompileOptions, backend="eager", regions=(nn.Linear,), update="auto", budget_s=1.0
)
AUTO = Plan(compile=OPTIONS())
ADAMW = partial(optim.AdamW, lr=0.01)
CPU = torch.device("cpu")


def measured_as(monkeypatch, compiled_ms, seen=None, timed=None):
    """Let timing say that the update as it is takes 1 ms, and the compiled one so many."""

    def measure(works, *, reference, device, budget_s):
        if timed is not None:
            timed.extend(works.values())
        for work in works.values():
            for _ in range(3):  # as the real one does, which changes what it runs on
                work()
        if seen is not None:
            seen.append((sorted(works), reference, device, budget_s))
        times = {"eager": 1.0, "compiled": compiled_ms}
        return Measurement(
            reference=reference,
            rounds=(times,) * 8,
            units={"eager": 3, "compiled": 3},
            failed={},
            smallest=0.02,
            elapsed_s=0.1,
            ended_by="told",
        )

    monkeypatch.setattr(update_trial, "measure", measure)


def told(step):
    found = [d for d in step.report().decisions if d.lever == "compile"]
    (decision,) = [d for d in found if "the update of" in d.detail]
    return decision


def test_what_is_faster_is_kept(monkeypatch):
    seen = []
    measured_as(monkeypatch, 0.5, seen)
    twins = Twins(DropoutNet, ADAMW, plan=AUTO)
    assert told(twins.captured).detail == "the update of AdamW: measured at the second update"
    twins.run(make_batches(1))
    for batch in make_batches(4):
        twins.step(batch)
        assert [d for d in twins.differences() if not d.distance < 1e-5] == []
    assert seen == [(["compiled", "eager"], "eager", CPU, 1.0)]  # once
    assert told(twins.captured).outcome == "applied"
    assert "it takes 0.500 of the time as it is" in told(twins.captured).detail
    assert twins.captured.report().counters["update_graphs"] == 1


@pytest.mark.parametrize("compiled_ms", [1.0, 2.0])
def test_what_is_not_faster_is_not_kept_and_nothing_has_changed(monkeypatch, compiled_ms):
    measured_as(monkeypatch, compiled_ms)
    twins = Twins(DropoutNet, ADAMW, plan=AUTO, clip=0.5)
    twins.run(make_batches(5))  # bit for bit, as nothing was measured
    assert told(twins.captured).outcome == "left alone"
    assert "not faster beyond the noise" in told(twins.captured).detail
    assert all(type(group["lr"]) is float for group in twins.own.param_groups)


@pytest.mark.parametrize("is_real", [True, False])
def test_a_measurement_leaves_every_bit(monkeypatch, is_real):
    if not is_real:
        measured_as(monkeypatch, 0.5)
    model = DropoutNet()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()

    def state():
        gradients = [p.grad for p in model.parameters()]
        return [model.state_dict(), optimizer.state_dict(), gradients, torch.get_rng_state()]

    before, held = copy.deepcopy(state()), [*optimizer.state.values()]

    def noisy():
        torch.rand(3)
        optimizer.param_groups[0]["lr"] *= 1.01
        optimizer.step()

    found = try_update(
        optimizer,
        eager=noisy,
        compiled=lambda: noisy() is None,
        why_failed=lambda: None,
        device=CPU,
        budget_s=0.3,
    )
    assert found.is_better is not None
    assert not differences(before, state())
    assert all(a is b for a, b in zip(held, optimizer.state.values(), strict=True))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda model, _: model.layers[0].bias.add_(1e-4),
        lambda model, _: model.layers[0].bias.fill_(torch.nan),
        lambda model, o: o.state[model.layers[0].weight]["exp_avg"].mul_(1.01),
        lambda model, o: o.state[model.layers[0].weight]["step"].add_(1),
    ],
    ids=["parameter", "nan", "moment", "step"],
)
def test_what_computes_something_else_is_not_kept(monkeypatch, spoil):
    measured_as(monkeypatch, 0.1)
    run = OneGraph.__call__
    models = []

    def spoilt(self, optimizer):
        has_run = run(self, optimizer)
        with torch.no_grad():
            spoil(models[0], optimizer)
        return has_run

    monkeypatch.setattr(OneGraph, "__call__", spoilt)
    twins = Twins(DropoutNet, ADAMW, plan=AUTO)
    models.append(twins.model)
    twins.run(make_batches(4))  # bit for bit
    assert told(twins.captured).outcome == "left alone"
    assert "compiled it computes something else" in told(twins.captured).detail


def test_a_small_rate_hides_nothing(monkeypatch):
    """Against the parameters a wrong update of such a rate would be a rounding error."""
    measured_as(monkeypatch, 0.1)
    model = nn.Linear(8, 8, dtype=torch.float64)
    optimizer = optim.SGD(model.parameters(), lr=1e-9)
    for p in model.parameters():
        p.grad = torch.randn_like(p)

    def off():
        for p in model.parameters():
            p.grad.mul_(1.1)
        optimizer.step()
        return True

    found = try_update(
        optimizer,
        eager=optimizer.step,
        compiled=off,
        why_failed=lambda: None,
        device=CPU,
        budget_s=0.3,
    )
    assert not found.is_better
    assert "something else" in found.why


def test_gradients_that_are_not_finite_put_it_off(monkeypatch):
    measured_as(monkeypatch, 0.5)
    trainer = make_trainer(ADAMW, plan=AUTO.replace(nonfinite="skip"))
    batches = make_batches(5)
    trainer.step(batches[0])
    trainer.step((batches[1][0] * torch.nan, batches[1][1]))
    assert "measured at the next update, as before the gradients, or what" in told(trainer).detail
    for batch in batches[2:]:
        trainer.step(batch)
    assert "it takes 0.500" in told(trainer).detail
    assert trainer.num_skipped == 1


def test_what_is_never_finite_is_given_up(monkeypatch):
    """An expected value is not finite where a parameter that no gradient reaches is not."""
    monkeypatch.setattr(compiled_update, "_MOST_TRIALS", 2)
    trials = []
    monkeypatch.setattr(
        update_trial, "try_update", lambda *a, **k: (trials.append(1), try_update(*a, **k))[1]
    )
    twins = Twins(DropoutNet, ADAMW, plan=AUTO)
    twins.both(lambda model, _: model.register_parameter("idle", nn.Parameter(torch.ones(2))))
    twins.both(lambda model, o: o.add_param_group({"params": [model.idle]}))
    with torch.no_grad():
        twins.both(lambda model, _: model.idle.fill_(torch.inf))
    twins.run(make_batches(5))  # bit for bit
    assert len(trials) == 2
    assert told(twins.captured).outcome == "left alone"
    assert "given up after 2 trials, as the gradients, or what" in told(twins.captured).detail


class Failing:
    """An update that runs out of memory at one of its calls, half way through."""

    def __init__(self, update, model, at):
        self.update, self.model, self.at, self.calls = update, model, at, 0

    def __call__(self):
        self.calls += 1
        if self.calls == self.at:
            buffer = torch.zeros(8)
            self.buffer = weakref.ref(buffer)
            with torch.no_grad():
                next(self.model.parameters()).add_(1)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.update() is None


@pytest.mark.parametrize(("which", "at"), [("eager", 1), ("compiled", 1), ("eager", 3)])
def test_where_memory_runs_out_all_is_put_back_and_nothing_held(monkeypatch, which, at):
    measured_as(monkeypatch, 0.5)
    model = DropoutNet()
    optimizer = ADAMW(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    ways = {n: Failing(optimizer.step, model, at * (n == which)) for n in ("eager", "compiled")}
    found = try_update(optimizer, **ways, why_failed=lambda: None, device=CPU, budget_s=0.3)
    assert found.is_better is False
    assert "memory ran out" in found.why
    assert not differences(before, [model.state_dict(), optimizer.state_dict()])
    assert ways[which].buffer() is None


def test_a_step_in_which_measuring_runs_out_of_memory_is_a_step(monkeypatch):
    def no_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(update_trial, "_objection", no_memory)
    twins = Twins(DropoutNet, ADAMW, plan=Plan(compile=OPTIONS(on_failure="raise")))
    twins.run(make_batches(4))  # bit for bit
    assert told(twins.captured).outcome == "left alone"
    assert "memory ran out" in told(twins.captured).detail


@pytest.mark.parametrize("begins", [1, 2])
def test_state_that_comes_later_puts_it_off(monkeypatch, begins):
    measured_as(monkeypatch, 0.5)
    twins = Twins(DropoutNet, ADAMW, plan=AUTO)
    twins.both(lambda model, _: model.layers[0].requires_grad_(False))
    for number, batch in enumerate(make_batches(5)):
        if number == begins:
            twins.both(lambda model, _: model.layers[0].requires_grad_(True))
        twins.step(batch)
        assert [d for d in twins.differences() if not d.distance < 1e-5] == []
    assert "it takes 0.500" in told(twins.captured).detail


class Counting(optim.SGD):
    """Counts its updates in an attribute, and takes smaller ones."""

    def __init__(self, params, first=0):
        super().__init__(params, lr=0.1, momentum=0.9)
        self.count = first

    @torch.no_grad()
    def step(self, closure=None):
        counted = self.count
        if isinstance(counted, list):
            counted.append(0)
            counted = len(counted)
        else:
            self.count = counted = counted + 1
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad * self.param_groups[0]["lr"] / counted)


def test_a_measurement_counts_no_updates(monkeypatch):
    measured_as(monkeypatch, 2.0)
    twins = Twins(DropoutNet, partial(Counting), plan=AUTO)
    twins.run(make_batches(4))  # bit for bit
    assert [o.count for o in (twins.own, twins.optimizer)] == [4, 4]
    detail = told(twins.captured).detail
    # The compiler of torch 2.11 cannot set an attribute of an optimizer.
    assert "not faster beyond the noise" in detail or "Attempted setattr" in detail


def test_what_could_not_be_put_back_is_not_measured(monkeypatch):
    measured_as(monkeypatch, 0.5)
    twins = Twins(DropoutNet, lambda params: Counting(params, []), plan=AUTO)
    twins.run(make_batches(4))  # bit for bit
    assert told(twins.captured).outcome == "left alone"
    assert "'count' of the optimizer could not be put back" in told(twins.captured).detail


def test_a_compiler_that_is_off_is_not_measured(monkeypatch):
    measured_as(monkeypatch, 0.5)
    trainer = make_trainer(ADAMW, plan=AUTO)
    with torch.compiler.set_stance("force_eager"):
        for batch in make_batches(3):
            trainer.step(batch)
        assert told(trainer).outcome == "stepped aside"
    trainer.step(make_batches(1)[0])
    assert "it takes 0.500" in told(trainer).detail


def test_what_cannot_be_compiled_is_said():
    make = partial(optim.Adafactor, lr=0.01)
    twins = Twins(DropoutNet, make, plan=AUTO)
    twins.run(make_batches(4))
    assert told(twins.captured).outcome == "stepped aside"
    plan = Plan(compile=OPTIONS(on_failure="raise"))
    trainer = make_trainer(make, plan=plan)
    trainer.step(make_batches(1)[0])
    with pytest.raises(CompileError, match="the update of Adafactor cannot be compiled"):
        trainer.step(make_batches(1)[0])


def test_what_runs_compiled_only_once_is_not_kept(monkeypatch):
    """It would be the faster one by far."""
    model = DropoutNet()
    optimizer = ADAMW(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    runs = []

    def compiled():
        runs.append(1)
        return len(runs) == 1 and optimizer.step() is None

    found = try_update(
        optimizer,
        eager=optimizer.step,
        compiled=compiled,
        why_failed=lambda: "a guard failed",
        device=CPU,
        budget_s=0.3,
    )
    assert found.is_better is False
    assert found.why == "compiled it failed: CompileError: a guard failed"


def test_measuring_does_not_wait_where_lines_that_wait_are_looked_for(monkeypatch):
    measured_as(monkeypatch, 0.5)
    trainer = make_trainer(ADAMW, plan=AUTO.replace(sync_guard="raise"))
    for batch in make_batches(4):
        trainer.step(batch)
    assert trainer.report().counters["host_syncs"] == 0


def test_really_measured_and_compiled_by_inductor():
    net = partial(nn.Linear, 8, 4)
    trainer = make_trainer(ADAMW, plan=Plan(compile=OPTIONS(backend="inductor")), net=net)
    plain = make_trainer(ADAMW, plan="eager", net=net)
    for batch in make_batches(4):
        for each in (trainer, plain):
            torch.manual_seed(7)
            each.step(batch)
    found = differences(plain.optimizer.state_dict(), trainer.optimizer.state_dict())
    assert [d for d in found if not d.distance < 1e-5] == []
    assert told(trainer).outcome in ("applied", "left alone")
    assert "of the time as it is" in told(trainer).detail
