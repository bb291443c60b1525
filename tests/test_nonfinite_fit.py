"""When too much was skipped: fit stops, late but surely; a loop of one's own asks."""

from __future__ import annotations

import logging
import math

import pytest

import torchfast.records
from poison import POISONS, SKIP, as_batch, batches_with, run, trainer_of
from stepping import roundtrip
from test_parity import OPTIMIZERS
from torchfast import MicroBatches, NonFiniteError, NonfiniteOptions, Plan, TorchFastError
from torchfast._core.reading import Reading

BAD = "NaN input"


def stop_after(limit):
    return Plan(nonfinite=NonfiniteOptions(stop_after=limit))


def batches(pattern):
    return [as_batch(group) for group in batches_with(pattern)]


def fit(trainer, pattern, **options):
    options = {"progress": "off", "log_every": 1, "epochs": 1, **options}
    return trainer.fit(batches(pattern), **options)


@pytest.fixture
def late(monkeypatch):
    """Readings arrive at the fifth time of asking, as from a device that is behind."""

    def is_ready(self):
        self.asked = getattr(self, "asked", 0) + 1
        return self.asked >= 5

    monkeypatch.setattr(Reading, "is_ready", property(is_ready))


# --- fit ------------------------------------------------------------------------------------------


def test_fit_stops_after_so_many_in_a_row(caplog):
    trainer = trainer_of(OPTIMIZERS["AdamW"], stop_after(3))
    with caplog.at_level(logging.WARNING):
        result = fit(trainer, [None, None, *[BAD] * 60])
    assert result.stopped_by == "nonfinite"
    assert 5 <= result.num_steps <= 5 + torchfast.records.SkipWatch.EVERY
    (record,) = caplog.records
    found = record.getMessage()
    assert found.startswith("too many updates were skipped: ")
    assert f"{result.num_steps - 2} in a row (stop_after=3)" in found
    assert f"last at steps {', '.join(map(str, range(3, result.num_steps + 1)[-8:]))};" in found
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_it_stops_with_late_readings_too(late):
    trainer = trainer_of(OPTIMIZERS["AdamW"], stop_after(3))
    result = fit(trainer, [None, None, *[BAD] * 60])
    assert result.stopped_by == "nonfinite"
    assert 5 < result.num_steps < 40


@pytest.mark.parametrize("length", [2, 3])
@pytest.mark.parametrize("before", [0, 5, 6, 7, 8, 9])
def test_a_run_counts_though_a_good_step_has_ended_it(late, before, length):
    """Whether it stops does not depend on when the device is read."""
    trainer = trainer_of(OPTIMIZERS["AdamW"], stop_after(3))
    result = fit(trainer, [*[None] * before, *[BAD] * length, *[None] * 30])
    assert result.stopped_by == ("nonfinite" if length == 3 else "epochs")
    assert trainer.num_skipped == length


def test_a_run_at_the_very_end_is_told_of():
    trainer = trainer_of(OPTIMIZERS["AdamW"], stop_after(2))
    result = fit(trainer, [None, BAD, BAD])
    assert (result.stopped_by, result.num_steps) == ("nonfinite", 3)


@pytest.mark.parametrize("plan", [Plan(), SKIP], ids=["propagate", "skip"])
def test_without_stop_after_it_goes_on(plan, caplog):
    result = fit(trainer_of(OPTIMIZERS["AdamW"], plan), [BAD] * 30)
    assert (result.stopped_by, result.num_steps) == ("epochs", 30)
    assert caplog.records == []


def test_single_skips_never_stop_it():
    result = fit(trainer_of(OPTIMIZERS["AdamW"], stop_after(2)), [None, BAD] * 20)
    assert result.stopped_by == "epochs"


def test_a_run_across_two_calls_of_fit_is_one():
    trainer = trainer_of(OPTIMIZERS["AdamW"], stop_after(4))
    assert fit(trainer, [None, BAD, BAD]).stopped_by == "epochs"
    assert fit(trainer, [BAD, BAD, None]).stopped_by == "nonfinite"
    # What stopped one call does not stop the next.
    assert fit(trainer, [None] * 20).stopped_by == "epochs"


def test_a_run_across_a_resume_is_one():
    first = trainer_of(OPTIMIZERS["AdamW"], stop_after(4))
    fit(first, [None, BAD, BAD])
    second = trainer_of(OPTIMIZERS["AdamW"], stop_after(4))
    second.load_state_dict(roundtrip(first.state_dict()))
    assert fit(second, [BAD, BAD]).stopped_by == "nonfinite"


def test_records_say_how_many_were_skipped():
    trainer = trainer_of(OPTIMIZERS["AdamW"], SKIP)
    result = fit(trainer, [None, BAD, None, "NaN gradient", None])
    assert [record["skipped"] for record in result.history] == [0, 1, 1, 2, 2]
    assert math.isnan(result.history[1]["loss"])
    assert "skipped" not in fit(trainer_of(OPTIMIZERS["AdamW"], Plan()), [None]).history[0]


def test_step_numbers_lead_to_the_batches():
    """Steps are counted from 1, over all epochs, as in the records."""
    trainer = trainer_of(OPTIMIZERS["AdamW"], SKIP)
    pattern = [None, None, BAD, None]
    seen = []

    def callback(event):
        if event.kind == "step" and bool(event.loss.isnan()):
            seen.append((event.num_steps, event.epoch))

    fit(trainer, pattern, epochs=3, callbacks=[callback])
    steps = trainer.report().to_dict()["counters"]["last skipped steps"]
    assert steps == "3 7 11"
    assert [((s - 1) // 4, (s - 1) % 4) for s in (3, 7, 11)] == [(0, 2), (1, 2), (2, 2)]
    assert seen == [(3, 0), (7, 1), (11, 2)]


def test_it_stops_under_accumulation():
    trainer = trainer_of(OPTIMIZERS["AdamW"], stop_after(2), accumulate=2)
    group = batches_with([BAD], accumulate=2)[0]
    result = trainer.fit(group * 20, epochs=1, progress="off")
    assert result.stopped_by == "nonfinite"
    assert trainer.num_skipped == result.num_steps


# --- a loop of one's own --------------------------------------------------------------------------


@pytest.mark.parametrize("poison", POISONS)
def test_check_skips_raises_after_so_many_in_a_row(poison):
    trainer = trainer_of(OPTIMIZERS["AdamW"], stop_after(2))
    for batch in batches([None, poison, None, poison]):
        trainer.step(batch)
        trainer.check_skips()
    trainer.step(batches([poison])[0])
    with pytest.raises(NonFiniteError, match=r"^2 updates in a row .*stop_after=2.* 2, 4, 5; "):
        trainer.check_skips()
    trainer.check_skips()  # since the last call there was nothing
    trainer.step(batches([poison])[0])
    with pytest.raises(RuntimeError, match=r"^3 updates in a row"):
        trainer.check_skips()
    assert issubclass(NonFiniteError, TorchFastError)


def test_check_skips_finds_a_run_that_is_over():
    trainer = trainer_of(OPTIMIZERS["AdamW"], stop_after(2))
    run(trainer, batches_with([BAD, BAD, None, None]))
    with pytest.raises(NonFiniteError):
        trainer.check_skips()


@pytest.mark.parametrize("plan", [Plan(), SKIP], ids=["propagate", "skip"])
def test_check_skips_has_nothing_to_raise_without_a_limit(plan):
    trainer = trainer_of(OPTIMIZERS["AdamW"], plan)
    run(trainer, batches_with([BAD] * 5))
    trainer.check_skips()


def test_a_group_is_one_step():
    trainer = trainer_of(OPTIMIZERS["AdamW"], stop_after(2), accumulate=3)
    (group,) = batches_with([BAD], accumulate=3)
    trainer.step(MicroBatches(group))
    trainer.check_skips()
    assert trainer.num_skipped == 1
