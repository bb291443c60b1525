"""Step times in fit: records, results and reports have them, and captured steps are told apart."""

from __future__ import annotations

import json
import time

import pytest
import torch

from fitting import BATCHES, fit, make_trainer, training
from models import mean_loss
from tape import TapeBackend
from torchfast import CUDAGraphOptions, Plan, phase
from torchfast._core import phases
from torchfast._core.reading import Marks
from torchfast.profiling import step_timer
from torchfast.profiling.step_timer import NUM_FIRST, StepTimer
from torchfast.reporting import read_jsonl

# --- captured steps -------------------------------------------------------------------------------


@pytest.fixture
def no_marks_in_captures(monkeypatch):
    note, capture = Marks.now, TapeBackend.capture
    inside = []

    def now(self):
        assert not inside, "noted in a capture"
        return note(self)

    def watched_capture(self, body, generators):
        inside.append(body)
        try:
            return capture(self, body, generators)
        finally:
            inside.pop()

    monkeypatch.setattr(Marks, "now", now)
    monkeypatch.setattr(TapeBackend, "capture", watched_capture)


@pytest.mark.usefixtures("tape", "no_marks_in_captures")
def test_a_captured_step_of_fit_is_told_as_replays_and_its_warm_up(monkeypatch):
    monkeypatch.setattr(step_timer, "BUDGET", 1.0)  # on a busy machine a moment is dear
    trainer = make_trainer(max_grad_norm=1.0)
    times = fit(trainer=trainer, steps=40).step_times
    counters = trainer.report().counters
    assert (counters["eager steps"], counters["captures"]) == (3, 1)
    sources = {row.name: (row.source, row.num_samples) for row in times.phases}
    # Eager are the steps 1 to 3, of which the first is not taken apart; the fourth captures.
    in_warm_up = ("from warm-up", 2)
    assert sources["forward"] == sources["backward"] == in_warm_up
    replays = ("measured", NUM_FIRST - 4 + 2)  # those among the first, and two later
    assert sources["replay"] == sources["data_wait"] == sources["other"] == replays
    assert sources["update"] in (in_warm_up, replays)


@pytest.mark.usefixtures("tape", "no_marks_in_captures")
def test_a_graph_that_notes_its_phases_tells_them_in_replays():
    def slow_in_replays(model, batch):
        with phase("mine"):
            _ = torch.linalg.svdvals(torch.randn(200, 200))
        return mean_loss(model, batch)

    plan = Plan(cuda_graph=CUDAGraphOptions(time_phases=True))
    trainer = make_trainer(slow_in_replays, plan=plan, max_grad_norm=1.0)
    times = fit(trainer=trainer, steps=70, log_every=70).step_times
    assert trainer.report().counters["captures"] == 1
    for name in ("forward", "backward", "update", "mine"):
        # One replay in sixteen, and those before a record.
        assert times[name].source == "measured"
        assert 4 <= times[name].num_samples <= 10
    assert 0.0 < times["mine"].p50_ms <= times["forward"].p50_ms  # of the same replays
    assert times["forward"].p50_ms < 3 * times["replay"].p50_ms  # of others


@pytest.mark.usefixtures("no_marks_in_captures", "tape")
def test_the_guard_against_marks_in_captures_can_fail(monkeypatch):
    monkeypatch.setattr(step_timer, "CAPTURE", "another name")
    trainer = make_trainer()
    fit(trainer=trainer, steps=5)
    assert trainer.report().counters["captures"] == 0


# --- in fit ---------------------------------------------------------------------------------------


def test_records_results_and_reports_have_them(tmp_path):
    trainer = make_trainer(max_grad_norm=1.0)
    assert not trainer.report().step_times
    log = tmp_path / "log.jsonl"
    result = fit(trainer=trainer, steps=12, log_every=4, log_path=log)
    names = ["step", "data_wait", "forward", "backward", "update", "other"]
    assert [row.name for row in result.step_times.phases] == names
    assert all(row.p50_ms > 0 for row in result.step_times.phases)
    last = training(result)[-1]["phases"]
    assert list(last) == names
    assert last == result.step_times.to_dict()
    assert [r["phases"]["forward"]["num_samples"] for r in training(result)] == [3, 7, 7]
    assert list(read_jsonl(log))[-1]["phases"] == last
    report = trainer.report()
    assert report.to_dict()["step_times"] == last
    assert "data_wait" in str(report)
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()


def test_the_parts_are_the_step():
    result = fit(steps=200, log_every=50)
    times = result.step_times
    parts = sum(row.p50_ms for row in times.phases if row.name != "step")
    assert 0.3 * times["step"].p50_ms < parts < 2 * times["step"].p50_ms  # on a busy machine
    assert times["step"].num_samples == 200


def test_a_slow_loader_is_seen_and_nothing_else():
    def slow():
        for batch in BATCHES:
            time.sleep(0.02)
            yield batch

    times = fit(slow(), steps=4, log_every=4).step_times
    assert times["data_wait"].p50_ms >= 20
    assert times["other"].p50_ms < times["data_wait"].p50_ms


def test_a_slow_loss_is_seen_and_the_user_s_own_name_for_it():
    def slow_loss(model, batch):
        with phase("thinking"):
            time.sleep(0.02)
        return mean_loss(model, batch)

    times = fit(trainer=make_trainer(slow_loss), steps=4, log_every=4).step_times
    assert times["thinking"].p50_ms >= 20
    assert times["forward"].p50_ms >= times["thinking"].p50_ms
    assert times["update"].p50_ms < times["thinking"].p50_ms


def test_evaluations_are_in_no_phase():
    def slow_evaluation(model):
        with phase("evaluation"):
            time.sleep(0.02)
        return {"loss": 1.0}

    result = fit(steps=8, log_every=8, evaluate=slow_evaluation, evaluate_every=1)
    assert "evaluation" not in result.step_times.to_dict()
    assert result.step_times["other"].p50_ms < 20  # the median: no evaluation is in it


def test_nobody_listens_outside_of_steps():
    listening = []

    def evaluation(model):
        listening.append(bool(phases._recorders))
        return {"loss": 1.0}

    fit(epochs=3, evaluate=evaluation)  # each after the loader was asked for a batch in vain
    assert listening == [False] * 3
    seen = []
    fit(steps=3, callbacks=[lambda event: seen.append(bool(phases._recorders))])
    assert seen
    assert not any(seen)


def test_what_was_measured_goes_on_in_the_next_fit():
    trainer = make_trainer()
    fit(trainer=trainer, steps=4)
    result = fit(trainer=trainer, steps=4)
    assert result.step_times["forward"].num_samples == 6


def test_timing_changes_no_number(monkeypatch):
    timed = fit(trainer=(one := make_trainer()), steps=12, log_every=4)
    monkeypatch.setattr(StepTimer, "begin_step", lambda self: None)
    plain = fit(trainer=(two := make_trainer()), steps=12, log_every=4)
    assert not plain.step_times.to_dict().keys() - {"step"}
    losses = [[r["loss"] for r in training(result)] for result in (timed, plain)]
    assert losses[0] == losses[1]
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)
