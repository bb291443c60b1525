"""What fit tells of several steps in a replay, what it refuses, and faults that tests would see."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from fit_unrolling import (
    BATCHES,
    LAMBDAS,
    SKIP,
    Loader,
    Run,
    assert_same,
    differ,
    poisoned,
    trainer_of,
)
from fitting import fit, training
from models import DropoutNet, mean_loss
from poison import BufferNet
from tape import counts
from torchfast import Plan, PrefetchingLoader, fit_steps
from torchfast import step_loader as fit_loader_of
from torchfast._core.loss import SeveralOutput, StepOutput
from torchfast.fit_steps import DoneStep, FitSteps, Seen
from torchfast.unrolled import UnrolledSteps
from unrolling import K, said, two_groups, unrolled

pytestmark = pytest.mark.usefixtures("tape")

AS_GIVEN = partial(torch.optim.AdamW, lr=0.01)  # its update is not in the graph


# --- callbacks that change something ------------------------------------------------------------


def stepping(scheduler):
    return lambda event: scheduler.step() if event.kind == "step" else None


@pytest.mark.parametrize("make", [LAMBDAS, partial(schedulers.StepLR, step_size=1)])
def test_a_schedule_that_a_callback_steps_is_followed_one_by_one(make, caplog):
    runs = []
    for unroll in (None, K):
        trainer = trainer_of(lr_scheduler=None)
        stepped = stepping(make(trainer.optimizer))
        runs.append(Run(unroll, trainer=trainer, callbacks=[stepped]))
    assert_same(*runs)
    assert unrolled(trainer) == (0, 0)
    assert (
        "one by one (a callback had just changed the model or its optimizer)" in said(trainer)[0][1]
    )
    assert not caplog.records


def test_a_rate_that_a_callback_sets_too_late_is_warned_of_once(caplog):
    def run(unroll, *at):
        trainer = trainer_of(lr_scheduler=None)

        def change(event):
            if event.kind == "step" and event.num_steps in at:
                for group in trainer.optimizer.param_groups:
                    group["lr"] *= 0.5

        return Run(unroll, trainer=trainer, callbacks=[change])

    several = run(K, 14, 18, 30)
    trainer = several.trainer
    (message,) = [record.getMessage() for record in caplog.records]
    assert "changed a learning rate or another setting of the optimizer behind step 14" in message
    assert "when the steps up to 16 were done in the same replay" in message
    assert "holds from step 17 on" in message
    assert unrolled(trainer) == (3, 3 * K)
    assert (
        "one by one (a callback changes the model or its optimizer between steps)"
        in said(trainer)[0][1]
    )
    assert_same(run(None, 16, 18, 30), several)


def clamped(trainer):
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.clamp_(-0.2, 0.2)


def frozen(trainer):
    next(trainer.model.parameters()).requires_grad_(False)


def decayed(trainer):
    trainer.optimizer.param_groups[0]["weight_decay"] = 0.7


class SteeredNet(DropoutNet):
    """What it computes depends on a buffer and on an attribute, for a callback to set."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(4))
        self.scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale + self.shift


def shifted(trainer):
    trainer.model.shift.add_(torch.arange(4.0))


def scaled(trainer):
    trainer.model.scale = 0.5


def replaced(trainer):
    trainer.model.shift = torch.arange(4.0)


CHANGES = {
    "each step": (clamped, range(100)),
    "a parameter or a buffer behind step 14,": (frozen, [14]),
    "a buffer behind step 14,": (shifted, [14]),
    "another setting of the optimizer behind step 14,": (decayed, [14]),
    "a mode behind step 14,": (lambda trainer: trainer.model.eval(), [14]),
    "('scale' of SteeredNet changed) behind step 15 or before,": (scaled, [14]),
    "was replaced) behind step 15 or before,": (replaced, [14]),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_model_that_a_callback_changes_is_followed_or_warned_of(what, caplog):
    """What it changes again and again, one by one; what comes once and too late, from then on."""
    change, at = CHANGES[what]

    def run(unroll, at):
        trainer = trainer_of(net=SteeredNet)

        def note(event):
            if event.kind == "step" and event.num_steps in at:
                change(trainer)

        return Run(unroll, trainer=trainer, callbacks=[note])

    several = run(K, at)
    told = [record.getMessage() for record in caplog.records]
    assert [what in message for message in told] == ([] if len(at) > 1 else [True])
    assert (unrolled(several.trainer)[0] > 0) == bool(told)
    assert_same(run(None, [16] if told else at), several)


@pytest.mark.parametrize("kept", ["a teacher", "a tensor"])
def test_what_the_loss_keeps_and_a_callback_moves_is_followed_one_by_one(kept):
    """A teacher that follows the model, by a callback at each step."""

    def run(unroll):
        teacher, centre = DropoutNet().eval().requires_grad_(False), torch.zeros(4)

        def loss_fn(model, batch):
            found = model(batch[0])
            return mean_loss(lambda _: found, batch) + (found - teacher(batch[0]) - centre).norm()

        trainer = trainer_of(loss_fn=loss_fn)
        teacher.load_state_dict(trainer.model.state_dict())

        def follow(event):
            if event.kind != "step":
                return
            with torch.no_grad():
                if kept == "a tensor":
                    centre.add_(0.1)
                    return
                for own, other in zip(
                    teacher.parameters(), trainer.model.parameters(), strict=True
                ):
                    own.lerp_(other, 0.1)

        return Run(unroll, trainer=trainer, callbacks=[follow])

    one, several = run(None), run(K)
    assert_same(one, several)
    assert unrolled(several.trainer)[0] == 0


class Summing:
    """Sums the losses up beside what its loss function reads."""

    def __init__(self):
        self.total = torch.zeros(())
        with torch.inference_mode():
            self.teacher = nn.Linear(8, 4)

    def loss_fn(self, model, batch):
        return mean_loss(model, batch) + 0.0 * self.teacher.weight.sum()

    def told(self, event):
        if event.kind == "step":
            self.total += event.num_steps


def test_a_sum_that_a_callback_keeps_beside_the_loss_leaves_steps_together():
    """Nor is a teacher in the way that was made under ``inference_mode()``."""

    def run(unroll):
        owner = Summing()
        return Run(unroll, trainer=trainer_of(loss_fn=owner.loss_fn), callbacks=[owner.told])

    one, several = run(None), run(K)
    assert_same(one, several)
    assert unrolled(several.trainer)[0] > 0


@pytest.mark.parametrize("change", [scaled, replaced, shifted])
def test_a_model_that_is_changed_behind_a_group_is_followed(change, caplog):
    """Whatever is captured anew for it, nothing came too late."""

    def run(unroll):
        trainer = trainer_of(net=SteeredNet)

        def note(event):
            if event.kind == "step" and event.num_steps == 16:
                change(trainer)

        return Run(unroll, trainer=trainer, callbacks=[note], epochs=3)

    one, several = run(None), run(K)
    assert_same(one, several)
    assert unrolled(several.trainer)[0] >= 8
    assert not caplog.records


def test_looks_at_what_callbacks_change_are_few(monkeypatch):
    """Two around a step, one where the steps before it were done with it; none where none pays."""
    looks = []
    seen = FitSteps.seen
    monkeypatch.setattr(FitSteps, "seen", lambda self: looks.append(self) or seen(self))
    trainer = Run(K, steps=16, epochs=None).trainer
    replays, together = unrolled(trainer)
    assert (replays, together) == (3, 12)
    assert len(looks) == 2 * (16 - together) + (together + replays)
    looks.clear()
    Run(K, steps=16, epochs=None, make={"optimizer": two_groups(AS_GIVEN)})
    Run(steps=16, epochs=None)
    assert not looks


def test_a_loader_has_no_slots_for_groups_that_will_never_be(monkeypatch):
    made = []
    make = fit_loader_of.step_loader

    def noted(*args, **options):
        made.append(options["unroll"])
        return make(*args, **options)

    monkeypatch.setattr(fit_loader_of, "step_loader", noted)
    several = Run(K, make={"optimizer": two_groups(AS_GIVEN)})
    ((_, detail),) = said(several.trainer)
    assert "the update is not in the graph" in detail
    Run(K)
    assert made == [None, K]


def test_a_rate_that_is_set_now_and_then_between_groups_is_followed(caplog):
    runs = []
    for unroll in (None, K):
        trainer = trainer_of(lr_scheduler=None)

        def change(event, trainer=trainer):
            if event.kind == "step" and event.num_steps == 16:
                trainer.optimizer.param_groups[0]["lr"] = 0.3

        runs.append(Run(unroll, trainer=trainer, callbacks=[change], epochs=3))
    assert_same(*runs)
    assert unrolled(trainer)[0] >= 8
    assert "4 one by one (a callback had just changed the model" in said(trainer)[0][1]
    assert not caplog.records


def test_metrics_that_make_no_tensor_are_told_as_they_are():
    told = [{"a": torch.tensor(1.0)}, {"a": torch.tensor(2), "b": 0.5}, {"b": torch.tensor(3.0)}]
    loss = torch.tensor(0.0)
    output = SeveralOutput.of([StepOutput(loss, metrics, None) for metrics in told])
    assert [output.metrics_of(place) for place in range(3)] == told
    assert [type(values) for values in output.metrics.values()] == [tuple, tuple]
    assert output.metrics_of(1)["a"].dtype == torch.int64


# --- what it says ---------------------------------------------------------------------------------


def test_groups_that_turn_out_to_run_one_by_one_are_told_one_by_one():
    """Of batches of several shapes; each is heard of before the next is done."""
    ragged = [(x[: 6 - n % 2], y[: 6 - n % 2]) for n, (x, y) in enumerate(BATCHES)]
    seen = []

    def note(event):
        if event.kind == "step":
            seen.append((event.num_steps, trainer.num_steps, loader.state_dict()["num_batches"]))

    trainer = trainer_of()
    loader = trainer.prefetch(Loader(ragged), unroll=K)
    several = Run(loader=lambda _: loader, trainer=trainer, epochs=1, callbacks=[note])
    assert seen == [(number, number, number) for number in range(1, 24)]
    assert_same(Run(loader=lambda _: Loader(ragged), epochs=1), several)
    assert "one by one (batches of different shapes" in said(trainer)[0][1]


def test_the_report_accounts_for_every_step():
    trainer = Run(K, evaluate=lambda model: {}, evaluate_every=9).trainer
    ((outcome, detail),) = said(trainer)
    assert outcome == "applied"
    parts = detail.split("; ")
    together = int(parts[0].split()[0])
    alone = [int(part.split()[0]) for part in parts[1:]]
    assert together + sum(alone) == trainer.num_steps == 46
    assert counts(trainer) == (2, 46 - 3 - together + together // K, 3, 2)


def test_a_step_takes_its_part_of_a_replay(monkeypatch):
    now = itertools.count()
    monkeypatch.setattr("torchfast._core.reading.time.perf_counter", lambda: float(next(now)))
    several = Run(K, epochs=1, log_every=1, make={"plan": "exact"})
    whole = {r["step"]: r["step_ms"] for r in training(several.result)}
    assert whole[5]["p50"] == whole[6]["p50"] == whole[7]["p50"] == whole[8]["p50"]
    assert all(r["step_ms"]["p50"] == r["step_ms"]["max"] for r in training(several.result))


def test_items_and_times_of_an_interval_are_those_of_its_steps():
    result = Run(K, epochs=1, log_every=6).result
    for record in training(result):
        steps = 6 if record["step"] % 6 == 0 else record["step"] % 6
        # Six samples a step: so many a second are six over the mean time of a step.
        least, most = (6e3 / record["step_ms"][name] for name in ("max", "p50"))
        assert least <= record["items_per_s"] * 1.001
        assert steps == 1 or record["items_per_s"] < most * steps


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("eager", "there is no graph of a step"),
        (Plan(cuda_graph=True, out_of_memory="split"), "out_of_memory='split'"),
    ],
)
def test_what_is_never_one_replay_is_fit_as_without(plan, why):
    runs = [Run(unroll, make={"plan": plan}) for unroll in (None, K)]
    assert_same(*runs)
    ((_, detail),) = said(runs[1].trainer)
    assert why in detail
    assert unrolled(runs[1].trainer) == (0, 0)


def test_who_asks_for_one_step_at_a_time_reads_nothing_of_several():
    one = Run(1, epochs=1)
    assert_same(Run(epochs=1), one)
    assert said(one.trainer) == []


@pytest.mark.parametrize("unroll", [0, -1, 1.5, "4", True])
def test_a_wrong_number_of_steps_is_refused(unroll):
    with pytest.raises((TypeError, ValueError), match="unroll must be"):
        fit(BATCHES, steps=1, unroll=unroll)


@pytest.mark.parametrize("has", [None, 2])
def test_a_loader_that_holds_another_number_of_steps_is_refused(has):
    trainer = trainer_of()
    loader = trainer.prefetch(BATCHES, unroll=has)
    message = rf"fit was given unroll=4 and a PrefetchingLoader with unroll={has}.*unroll=4\)"
    with pytest.raises(ValueError, match=message):
        fit(loader, trainer=trainer, steps=1, unroll=4)
    assert trainer.num_steps == 0


def test_the_total_is_counted_in_steps(capsys):
    trainer = trainer_of()
    loader = trainer.prefetch(Loader(BATCHES), unroll=K)
    assert (len(loader), loader.steps_in_epoch()) == (6, 23)
    fit(loader, trainer=trainer, epochs=2, log_every=46, progress="plain")
    assert capsys.readouterr().err.startswith("step 46/46 ")


# --- negative controls ----------------------------------------------------------------------------


def the_last_ones_metrics(monkeypatch):
    of = SeveralOutput.metrics_of
    monkeypatch.setattr(SeveralOutput, "metrics_of", lambda self, place: of(self, -1))


def no_cuts(monkeypatch):
    monkeypatch.setattr(fit_steps, "min", lambda *_: math.inf, raising=False)


def told_when_it_is_over(monkeypatch):
    run = FitSteps.run

    def planted(self, taken):
        for done, batch in run(self, taken):
            done.num_behind = 0
            yield done, batch

    monkeypatch.setattr(FitSteps, "run", planted)


def rates_of_the_last(monkeypatch):
    rates = UnrolledSteps.rates
    monkeypatch.setattr(UnrolledSteps, "rates", lambda self, n: rates(self, n)[-1:] * n)


def skips_of_all(monkeypatch):
    monkeypatch.setattr(DoneStep, "num_skipped_behind", 0)


PLANTED = [
    the_last_ones_metrics,
    no_cuts,
    told_when_it_is_over,
    rates_of_the_last,
    skips_of_all,
]


@pytest.mark.parametrize("plant", [None, *PLANTED])
def test_what_would_be_told_wrong_is_seen(plant, monkeypatch):
    options = {
        "make": {"plan": SKIP, "net": BufferNet},
        "loader": lambda trainer: poisoned(),
        "evaluate": lambda model: {"sum": float(sum(p.detach().sum() for p in model.parameters()))},
        "evaluate_every": 7,
    }
    one = Run(**options)
    if plant is not None:
        plant(monkeypatch)
    several = Run(K, **options)
    assert bool(differ(one, several)) == (plant is not None)
    assert unrolled(several.trainer)[0] >= 3


def test_a_position_that_is_not_that_of_the_step_is_seen(monkeypatch):
    monkeypatch.setattr(PrefetchingLoader, "go_to", lambda self, place: None)
    with pytest.raises(AssertionError):
        test_groups_that_turn_out_to_run_one_by_one_are_told_one_by_one()


def test_a_callback_that_nobody_watches_trains_otherwise(monkeypatch):
    monkeypatch.setattr(FitSteps, "seen", lambda self: Seen([], [], [], []))
    runs = []
    for unroll in (None, K):
        trainer = trainer_of(lr_scheduler=None, loss_fn=mean_loss)
        stepped = stepping(schedulers.ExponentialLR(trainer.optimizer, 0.8))
        runs.append(Run(unroll, trainer=trainer, callbacks=[stepped]))
    assert unrolled(trainer)[0] > 0
    assert differ(*runs)
