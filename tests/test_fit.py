"""The loop of fit: records, evaluation, callbacks, and ends of every kind.

What signals do is seen from outside: a script of its own trains until a signal reaches it.
"""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import torchfast
from models import (
    BatchNormNet,
    DropoutNet,
    loss_and_metrics,
    make_batches,
    mean_loss,
    split,
    weighted_loss,
)
from torchfast import EmptyEpochError, MicroBatches, Trainer
from torchfast._core.compare import differences
from torchfast._core.reading import Reading
from torchfast._core.rng import get_rng_state, seed_everything
from torchfast.reporting import read_jsonl
from torchfast.testing import plain_step

SGD = partial(optim.SGD, lr=0.1, momentum=0.9)
BATCHES = make_batches(4)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models of a few hundred parameters: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_trainer(loss_fn=mean_loss, *, net=DropoutNet, optimizer=SGD, plan="exact", **options):
    seed_everything(0)
    return Trainer(net(), optimizer, loss_fn, plan, **options)


def fit(loader=BATCHES, *, trainer=None, **options):
    options = {"progress": "off", "log_every": 1, **options}
    return (trainer or make_trainer()).fit(loader, **options)


def training(result):
    return [record for record in result.history if "loss" in record]


def evaluations(result):
    return [record for record in result.history if "evaluation" in record]


class Watched:
    """A loader that notes what happens to it."""

    def __init__(self, batches=BATCHES):
        self.batches = batches
        self.epochs = []
        self.fetched = 0

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        for batch in self.batches:
            self.fetched += 1
            yield batch

    def __len__(self):
        return len(self.batches)


# --- steps and epochs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "steps", "epochs", "stopped_by"),
    [
        ({"steps": 3}, 3, 0, "steps"),
        ({"steps": 4}, 4, 1, "steps"),
        ({"steps": 6}, 6, 1, "steps"),
        ({"epochs": 2}, 8, 2, "epochs"),
        ({"epochs": 2, "steps": 6}, 6, 1, "steps"),
        ({"epochs": 1, "steps": 100}, 4, 1, "epochs"),
    ],
)
def test_a_run_ends_where_it_is_told_to(asked, steps, epochs, stopped_by):
    trainer = make_trainer()
    result = fit(trainer=trainer, **asked)
    assert (result.num_steps, result.num_epochs, result.stopped_by) == (steps, epochs, stopped_by)
    assert trainer.num_steps == len(training(result)) == steps
    assert result.seconds > 0
    assert result.evaluation == {}


@pytest.mark.parametrize("asked", [{"steps": 0}, {"epochs": 0}])
def test_nothing_to_do_is_done_at_once(asked):
    watched = Watched()
    result = fit(watched, **asked)
    assert (result.num_steps, result.history, watched.fetched) == (0, [], 0)
    assert result.stopped_by == next(iter(asked))


def test_no_batch_is_fetched_that_is_not_trained_on():
    watched = Watched()
    fit(watched, steps=6)
    assert watched.fetched == 6


def test_a_second_fit_goes_on_where_the_first_ended():
    trainer = make_trainer()
    assert fit(trainer=trainer, steps=3).num_steps == 3
    result = fit(trainer=trainer, steps=2)
    assert result.num_steps == 2
    assert [record["step"] for record in result.history] == [4, 5]


def test_the_epoch_is_told_to_everyone_once():
    class Holder:
        def __init__(self):
            self.epochs = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

    watched = Watched()
    watched.sampler, watched.dataset = Holder(), Holder()
    fit(watched, epochs=3)
    assert watched.epochs == watched.sampler.epochs == watched.dataset.epochs == [0, 1, 2]


def test_groups_and_a_short_last_group():
    sizes = []

    def loss_fn(model, batch):
        return loss_and_metrics(model, batch)

    trainer = make_trainer(loss_fn, accumulate=3)
    result = fit(
        make_batches(7),
        trainer=trainer,
        epochs=2,
        callbacks=[lambda event: sizes.append(event.kind)],
    )
    assert result.num_steps == 6
    assert result.num_epochs == 2
    assert sizes.count("step") == 6
    assert [record["epoch"] for record in result.history] == [0, 0, 0, 1, 1, 1]


def test_an_iterator_serves_one_epoch():
    assert fit((b for b in BATCHES), epochs=1).num_epochs == 1
    assert fit((b for b in BATCHES), steps=4).num_steps == 4
    with pytest.raises(EmptyEpochError, match="epoch 1 yielded no batch after 4 steps"):
        fit((b for b in BATCHES), steps=5)


class EmptyFrom:
    """Yields nothing from an epoch on."""

    def __init__(self, epoch):
        self.left = epoch

    def __iter__(self):
        self.left -= 1
        return iter(BATCHES if self.left >= 0 else [])


def test_an_empty_epoch_is_an_error():
    with pytest.raises(EmptyEpochError, match="epoch 2 yielded no batch after 8 steps"):
        fit(EmptyFrom(2), epochs=5)


# --- records ------------------------------------------------------------------------------------


def test_what_a_record_holds():
    trainer = make_trainer(loss_and_metrics, max_grad_norm=1.0)
    (record,) = fit(trainer=trainer, steps=2, log_every=2).history
    assert list(record)[:4] == ["step", "epoch", "seconds", "lr"]
    assert set(record) == {
        "step",
        "epoch",
        "seconds",
        "lr",
        "loss",
        "grad_norm",
        "metrics",
        "step_ms",
        "items_per_s",
        "unit",
        "eta_s",
    }
    assert (record["step"], record["epoch"], record["lr"]) == (2, 0, 0.1)
    assert set(record["metrics"]) == {"accuracy"}
    assert set(record["step_ms"]) == {"p50", "p90", "max"}
    assert 0 < record["step_ms"]["p50"] <= record["step_ms"]["p90"] <= record["step_ms"]["max"]
    assert record["unit"] == "samples"
    assert record["eta_s"] == 0
    assert json.loads(json.dumps(record)) == record


def test_a_record_leaves_out_what_there_is_not():
    (record,) = fit(steps=1).history
    assert not {"grad_norm", "metrics", "flops_per_s", "mfu", "memory_bytes"} & set(record)


def test_records_stand_at_their_steps_in_order():
    result = fit(
        epochs=2,
        log_every=2,
        evaluate=BATCHES[:1],
        evaluate_every=3,
    )
    kinds = [(record["step"], "evaluation" in record) for record in result.history]
    assert kinds == [
        (2, False),
        (3, True),
        (4, False),
        (6, False),
        (6, True),
        (8, False),
        (8, True),
    ]
    seconds = [record["seconds"] for record in result.history]
    assert seconds == sorted(seconds)
    assert [record["epoch"] for record in training(result)] == [0, 0, 1, 1]


@pytest.mark.parametrize("log_every", [2, 3])
def test_a_loss_is_the_mean_over_its_interval(log_every):
    losses = []

    def note(event):
        if event.kind == "step":
            losses.append(float(event.loss))

    result = fit(epochs=3, log_every=log_every, callbacks=[note])
    expected = [np.mean(losses[i : i + log_every]) for i in range(0, 13 - log_every, log_every)]
    assert [record["loss"] for record in result.history] == pytest.approx(expected)
    assert len(expected) == 12 // log_every


def test_the_last_record_holds_the_steps_since_the_one_before():
    losses = []
    result = fit(
        steps=5,
        log_every=2,
        evaluate=BATCHES[:1],
        callbacks=[lambda e: losses.append(float(e.loss)) if e.kind == "step" else None],
    )
    assert [record["step"] for record in training(result)] == [2, 4, 5]
    assert training(result)[-1]["loss"] == pytest.approx(losses[-1])
    assert "evaluation" in result.history[-1]


def test_metrics_and_grad_norm_of_a_record_are_those_of_its_step():
    seen = {}

    def note(event):
        if event.kind == "step":
            seen[event.num_steps] = {name: float(v) for name, v in event.metrics.items()}

    trainer = make_trainer(loss_and_metrics, max_grad_norm=0.1)
    for record in fit(trainer=trainer, steps=4, log_every=2, callbacks=[note]).history:
        assert record["grad_norm"] == seen[record["step"]]["grad_norm"]
        assert record["metrics"] == {"accuracy": seen[record["step"]]["accuracy"]}


def test_different_rates_are_a_list():
    def make(parameters):
        first, *rest = parameters
        return optim.SGD([{"params": [first]}, {"params": rest, "lr": 0.3}], lr=0.1)

    (record,) = fit(trainer=make_trainer(optimizer=make), steps=1).history
    assert record["lr"] == [0.1, 0.3]


def test_the_rate_of_items_is_theirs_over_the_time():
    def slow():
        for batch in BATCHES:
            time.sleep(0.02)
            yield batch

    (record,) = fit(slow(), steps=4, log_every=4).history
    assert record["step_ms"]["p50"] >= 20
    assert record["items_per_s"] == pytest.approx(6e3 / record["step_ms"]["p50"], rel=0.5)


def test_the_rate_of_items_is_right_across_an_evaluation():
    def slow():
        for batch in BATCHES * 2:
            time.sleep(0.02)
            yield batch

    result = fit(slow(), steps=8, log_every=8, evaluate=lambda m: {}, evaluate_every=7)
    (record,) = training(result)
    assert record["items_per_s"] <= 6 / 0.02 * 1.05


def test_items_are_counted_as_told():
    counted = []

    def count(batch):
        counted.append(batch)
        return 1000

    trainer = make_trainer(accumulate=2)
    (record,) = fit(trainer=trainer, steps=1, count_items=count, unit="tokens").history
    assert len(counted) == 2
    assert not any(isinstance(batch, MicroBatches) for batch in counted)
    assert record["unit"] == "tokens"
    assert record["items_per_s"] == pytest.approx(2e6 / record["step_ms"]["p50"])


def test_what_cannot_be_counted_has_no_rate():
    trainer = make_trainer(lambda m, b: m(torch.ones(2, 8)).sum())
    (record,) = fit(["text"], trainer=trainer, steps=1).history
    assert "items_per_s" not in record
    assert "step_ms" in record


def test_mfu_needs_both_flops():
    (record,) = fit(steps=1, flops_per_item=1e6).history
    assert record["flops_per_s"] == pytest.approx(record["items_per_s"] * 1e6)
    assert "mfu" not in record
    (record,) = fit(steps=1, flops_per_item=1e6, peak_flops=1e12).history
    assert record["mfu"] == pytest.approx(record["flops_per_s"] / 1e12)
    (record,) = fit(steps=1, peak_flops=1e12).history
    assert not {"flops_per_s", "mfu"} & set(record)


def test_the_time_left_shrinks():
    def slow():
        for batch in BATCHES * 2:
            time.sleep(0.01)
            yield batch

    left = [record["eta_s"] for record in fit(slow(), steps=8).history]
    assert left[0] > 0.05
    assert left[0] > left[3] > left[6] > left[7] == 0


def test_the_time_left_of_epochs_needs_a_length():
    assert all("eta_s" in record for record in fit(epochs=2).history)
    assert not any("eta_s" in record for record in fit(EmptyFrom(9), epochs=2).history)


# --- where records go ---------------------------------------------------------------------------


def test_the_log_reads_back_as_the_history(tmp_path):
    path = tmp_path / "runs" / "log.jsonl"
    trainer = make_trainer(loss_and_metrics, max_grad_norm=1.0)
    result = fit(trainer=trainer, epochs=2, evaluate=BATCHES[:2], log_path=path)
    assert read_jsonl(path) == result.history
    more = fit(trainer=trainer, steps=1, log_path=str(path))
    assert read_jsonl(path) == result.history + more.history


def test_a_loss_that_is_not_finite_is_logged(tmp_path):
    trainer = make_trainer(lambda m, b: mean_loss(m, b) * float("nan"))
    fit(trainer=trainer, steps=1, log_path=tmp_path / "log")
    (record,) = read_jsonl(tmp_path / "log")
    assert np.isnan(record["loss"])


def test_plain_progress_is_a_line_a_record(capsys):
    fit(steps=2, evaluate=lambda model: {"loss": 0.5}, progress="plain", unit="tokens")
    out, err = capsys.readouterr()
    assert out == ""
    first, second, evaluation = err.splitlines()
    assert first.startswith("step 1/2  loss ")
    assert second.startswith("step 2/2  loss ")
    assert "tokens/s" in first
    assert evaluation == "step 2  evaluation: loss 0.5000"


def test_progress_of_a_second_fit_makes_sense(capsys):
    trainer = make_trainer()
    for _ in range(2):
        fit(trainer=trainer, steps=2, progress="plain")
    lines = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert all(int(step) <= int(total) for step, total in (line.split("/") for line in lines))


def test_progress_counts_to_the_nearer_of_both_ends(capsys):
    fit(epochs=2, steps=6, log_every=6, progress="plain")
    fit(epochs=1, steps=6, log_every=4, progress="plain")
    lines = [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["step 6/6", "step 4/4"]


def test_terminal_progress_rewrites_its_line(capsys):
    fit(steps=3, progress="terminal")
    err = capsys.readouterr().err
    assert "\r" in err
    assert "step 3/3" in err
    assert err.endswith("\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize("mode", ["auto", True])
def test_auto_progress_is_plain_without_a_terminal(capsys, mode):
    fit(steps=2, progress=mode)
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize("mode", ["off", False])
def test_silence(capfd, mode):
    fit(steps=3, progress=mode, evaluate=BATCHES)
    assert capfd.readouterr() == ("", "")


# --- evaluation ---------------------------------------------------------------------------------


def test_evaluation_is_the_mean_over_batches():
    trainer = make_trainer(loss_and_metrics)
    values = trainer.evaluate(BATCHES)
    model = trainer.model.eval()
    with torch.no_grad():
        parts = [loss_and_metrics(model, batch) for batch in BATCHES]
    assert values == {
        "loss": pytest.approx(np.mean([float(loss) for loss, _ in parts])),
        "accuracy": pytest.approx(np.mean([float(m["accuracy"]) for _, m in parts])),
    }
    assert all(type(value) is float for value in values.values())


def weighted_accuracy(model, batch):
    loss, _, weight = weighted_loss(model, batch)
    return loss, {"accuracy": loss_and_metrics(model, batch)[1]["accuracy"]}, weight


def test_evaluation_by_weight_is_that_of_all_items_together():
    batches = make_batches(5, ragged=True)
    values = make_trainer(weighted_accuracy).evaluate(batches)
    whole = tuple(torch.cat(parts) for parts in zip(*map(split, batches), strict=True))
    expected = make_trainer(loss_and_metrics).evaluate([whole])
    assert values == pytest.approx(expected)
    assert values != pytest.approx(make_trainer(loss_and_metrics).evaluate(batches))


def test_a_metric_named_loss_does_not_replace_the_loss():
    trainer = make_trainer(lambda m, b: ((loss := mean_loss(m, b)) * 10, {"loss": loss}))
    assert trainer.evaluate(BATCHES)["loss"] == pytest.approx(
        10 * make_trainer().evaluate(BATCHES)["loss"]
    )


def test_a_metric_that_the_first_batch_lacks_is_there():
    found = iter([{}, {"late": 1.0}, {"late": 3.0}])
    trainer = make_trainer(lambda m, b: (mean_loss(m, b), next(found)))
    assert trainer.evaluate(BATCHES[:3])["late"] == 2.0


def test_evaluation_takes_a_prefetched_loader_under_accumulation():
    trainer = make_trainer(accumulate=2)
    expected = trainer.evaluate(BATCHES)
    assert trainer.evaluate(trainer.prefetch(BATCHES)) == pytest.approx(expected)


def test_fit_takes_a_prefetched_loader_under_accumulation():
    trainer = make_trainer(accumulate=2)
    assert fit(trainer.prefetch(BATCHES), trainer=trainer, epochs=1).num_steps == 2


def frozen_norm():
    model = BatchNormNet()
    model.norm.eval()
    return model


@pytest.mark.parametrize("fails", [False, True])
def test_every_module_gets_its_own_mode_back(fails):
    modes = []

    def loss_fn(model, batch):
        modes.append(any(module.training for module in model.modules()))
        if fails and not model.training:
            raise ZeroDivisionError
        return mean_loss(model, batch)

    trainer = make_trainer(loss_fn, net=frozen_norm)
    before = {name: module.training for name, module in trainer.model.named_modules()}
    buffers = copy.deepcopy(dict(trainer.model.named_buffers()))
    if fails:
        with pytest.raises(ZeroDivisionError):
            trainer.evaluate(BATCHES)
    else:
        trainer.evaluate(BATCHES)
    assert modes == [False] * (1 if fails else 4)
    assert {name: module.training for name, module in trainer.model.named_modules()} == before
    assert before["norm"] is False
    assert before["conv"] is True
    assert not differences(buffers, dict(trainer.model.named_buffers()))


def test_evaluation_has_no_gradients():
    def loss_fn(model, batch):
        grads.append(torch.is_grad_enabled())
        return mean_loss(model, batch)

    grads = []
    trainer = make_trainer(loss_fn)
    trainer.step(BATCHES[0])
    kept = [p.grad.clone() for p in trainer.model.parameters()]
    metrics = trainer.metrics
    trainer.evaluate(BATCHES[:1])
    assert grads == [True, False]
    assert all(
        torch.equal(a, p.grad) for a, p in zip(kept, trainer.model.parameters(), strict=True)
    )
    assert trainer.metrics is metrics
    assert torch.is_grad_enabled()


def list_loss(model, batch):
    """A DataLoader's batches of a TensorDataset are lists."""
    return mean_loss(model, tuple(batch))


def drawing_loss(model, batch):
    """Draws from the host's generators in evaluation too."""
    noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
    return list_loss(model, batch) * (1 + 0.1 * noise)


def test_evaluation_leaves_every_generator_alone():
    data = DataLoader(TensorDataset(*BATCHES[0]), batch_size=2, shuffle=True)
    trainer = make_trainer(drawing_loss)
    before = get_rng_state(trainer.device)
    trainer.evaluate(data)
    assert not differences(before, get_rng_state(trainer.device))


def test_a_run_with_evaluation_ends_where_one_without_does():
    def run(**options):
        trainer = make_trainer(drawing_loss)
        train = DataLoader(TensorDataset(*BATCHES[0]), batch_size=2, shuffle=True)
        result = fit(train, trainer=trainer, epochs=3, **options)
        return trainer.state_dict(), [record["loss"] for record in training(result)]

    shuffled = DataLoader(TensorDataset(*BATCHES[1]), batch_size=2, shuffle=True)
    state, losses = run()
    evaluated_state, evaluated_losses = run(evaluate=shuffled, evaluate_every=2)
    assert losses == evaluated_losses
    assert not differences(state, evaluated_state)


@pytest.mark.parametrize(
    ("asked", "at"),
    [
        ({"epochs": 2}, [4, 8]),
        ({"steps": 6}, [4, 6]),
        ({"steps": 7, "evaluate_every": 3}, [3, 6, 7]),
        ({"steps": 6, "evaluate_every": 3}, [3, 6]),
        ({"epochs": 1, "evaluate_every": 100}, [4]),
    ],
)
@pytest.mark.parametrize("by", ["loader", "callable"])
def test_when_evaluation_happens(by, asked, at):
    trainer = make_trainer()
    seen = []

    def evaluate(model):
        assert model is trainer.model
        seen.append(trainer.num_steps)
        return {"loss": float(trainer.num_steps)}

    watched = Watched()
    result = fit(trainer=trainer, evaluate=watched if by == "loader" else evaluate, **asked)
    assert [record["step"] for record in evaluations(result)] == at
    assert result.evaluation == evaluations(result)[-1]["evaluation"]
    if by == "callable":
        assert seen == at
        assert result.evaluation == {"loss": float(at[-1])}
    else:
        assert watched.fetched == 4 * len(at)


def test_the_last_evaluation_is_of_the_last_weights():
    trainer = make_trainer()
    result = fit(trainer=trainer, steps=3, evaluate=BATCHES, evaluate_every=2)
    assert result.evaluation == trainer.evaluate(BATCHES)


def test_a_plateau_scheduler_is_stepped_after_each_evaluation():
    losses = iter([1.0, 1.0, 1.0, 1.0])
    trainer = make_trainer(
        lr_scheduler=lambda o: schedulers.ReduceLROnPlateau(o, patience=0, factor=0.5)
    )
    result = fit(
        trainer=trainer, steps=8, evaluate=lambda model: {"loss": next(losses)}, evaluate_every=2
    )
    assert trainer.lr_scheduler.last_epoch == 4
    rates = [record["lr"] for record in training(result)]
    assert rates == [0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    assert trainer.optimizer.param_groups[0]["lr"] == 0.0125


def test_a_plateau_scheduler_without_evaluation_is_refused_before_a_step():
    trainer = make_trainer(lr_scheduler=lambda o: schedulers.ReduceLROnPlateau(o))
    with pytest.raises(ValueError, match="fit needs evaluate="):
        fit(trainer=trainer, steps=1)
    assert trainer.num_steps == 0


# --- callbacks ----------------------------------------------------------------------------------


def test_every_kind_of_event_in_order():
    events = []
    trainer = make_trainer(loss_and_metrics)
    result = fit(
        trainer=trainer,
        epochs=1,
        log_every=2,
        evaluate=BATCHES[:1],
        evaluate_every=3,
        callbacks=(events.append,),
    )
    kinds = [(event.kind, event.num_steps) for event in events]
    assert kinds == [
        ("step", 1),
        ("step", 2),
        ("log", 2),
        ("step", 3),
        ("evaluate", 3),
        ("step", 4),
        ("log", 4),
        ("epoch", 4),
        ("evaluate", 4),
        ("end", 4),
    ]
    for event in events:
        assert (event.loss is not None) == (event.kind == "step")
        assert (event.record is not None) == (event.kind in ("log", "evaluate"))
        assert set(event.metrics) == {"accuracy"}
        assert event.epoch == 0 or event.num_steps == 4
    assert [e.record for e in events if e.record is not None] == result.history


@pytest.mark.parametrize(
    ("kind", "num_steps"), [("step", 1), ("log", 2), ("evaluate", 3), ("epoch", 4)]
)
def test_a_callback_can_stop_the_run(kind, num_steps):
    events = []

    def stop(event):
        events.append(event.kind)
        if event.kind == kind:
            event.stop()
            event.stop()

    result = fit(epochs=5, log_every=2, evaluate=BATCHES[:1], evaluate_every=3, callbacks=[stop])
    assert (result.num_steps, result.stopped_by) == (num_steps, "callback")
    assert events[-1] == "end"
    assert evaluations(result)[-1]["step"] == num_steps


def test_callbacks_are_called_in_their_order():
    calls = []
    fit(steps=1, callbacks=[lambda e: calls.append(1), lambda e: calls.append(2)])
    assert calls == [1, 2] * (len(calls) // 2)


def test_an_error_of_a_callback_comes_through():
    def fail(event):
        if event.num_steps == 2:
            raise LookupError("mine")

    before = handlers()
    with pytest.raises(LookupError, match="mine"):
        fit(steps=3, callbacks=[fail])
    assert handlers() == before


# --- a loader that fails ------------------------------------------------------------------------


@pytest.mark.parametrize("is_ready", [True, False])
def test_an_error_of_the_loader_comes_through_and_the_log_is_whole(monkeypatch, tmp_path, is_ready):
    # On a GPU readings arrive late; here that is played.
    monkeypatch.setattr(Reading, "is_ready", is_ready)

    class BrokenError(Exception):
        pass

    def load():
        yield from BATCHES[:3]
        raise BrokenError("disk", 3)

    trainer = make_trainer()
    with pytest.raises(BrokenError) as caught:
        fit(load(), trainer=trainer, steps=10, log_path=tmp_path / "log")
    assert type(caught.value) is BrokenError
    assert caught.value.args == ("disk", 3)
    assert caught.traceback[-1].name == "load"
    assert caught.value.__cause__ is None
    assert trainer.num_steps == 3
    assert [record["step"] for record in read_jsonl(tmp_path / "log")] == [1, 2, 3]


def test_an_error_is_not_hidden_by_one_of_the_records_that_wait(monkeypatch):
    def fail(event):
        if event.kind == "log":
            raise LookupError("a callback's")

    def load():
        yield BATCHES[0]
        raise OSError("the loader's")

    monkeypatch.setattr(Reading, "is_ready", False)
    with pytest.raises(OSError, match="the loader's"):
        fit(load(), steps=2, callbacks=[fail])


def test_records_that_arrive_late_are_the_same(monkeypatch):
    def run():
        result = fit(epochs=2, log_every=3, evaluate=BATCHES, evaluate_every=4)
        return [(r["step"], r.get("loss"), r.get("evaluation")) for r in result.history]

    at_once = run()
    monkeypatch.setattr(Reading, "is_ready", False)
    assert run() == at_once


class Failing(IterableDataset):
    def __iter__(self):
        yield from BATCHES[:2]
        raise LookupError("sample 2")


def test_an_error_of_a_worker_comes_through():
    trainer = make_trainer(list_loss)
    loader = DataLoader(Failing(), batch_size=None, num_workers=1)
    with pytest.raises(LookupError, match=r"(?s)in DataLoader worker process 0.*sample 2"):
        fit(loader, trainer=trainer, steps=10)
    assert trainer.num_steps == 2


# --- fit is the loop that one writes ------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("loss_fn", [loss_and_metrics, weighted_loss])
def test_fit_is_a_loop_of_steps_is_the_plain_loop(accumulate, loss_fn):
    batches = make_batches(7, ragged=True)
    schedule = partial(schedulers.CosineAnnealingLR, T_max=9)
    options = {"accumulate": accumulate, "max_grad_norm": 0.5, "lr_scheduler": schedule}

    fitted = make_trainer(loss_fn, **options)
    noted = []
    fit(
        batches,
        trainer=fitted,
        epochs=2,
        evaluate=BATCHES,
        evaluate_every=2,
        callbacks=[lambda e: noted.append(e.loss) if e.kind == "step" else None],
    )

    stepped = make_trainer(loss_fn, **options)
    losses = [stepped.step(batch) for _ in range(2) for batch in stepped.prefetch(batches)]

    seed_everything(0)
    model = DropoutNet()
    optimizer = SGD(model.parameters())
    scheduler = schedule(optimizer)
    plain = [
        plain_step(
            model,
            optimizer,
            loss_fn,
            batches[i : i + accumulate],
            max_grad_norm=0.5,
            lr_scheduler=scheduler,
        )
        for _ in range(2)
        for i in range(0, 7, accumulate)
    ]
    assert len(noted) == len(losses) == len(plain)
    for a, b, c in zip(noted, losses, plain, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(b, c)
    assert not differences(fitted.state_dict(), stepped.state_dict())
    assert not differences(model.state_dict(), fitted.model.state_dict())
    assert not differences(optimizer.state_dict(), fitted.optimizer.state_dict())
    assert not differences(get_rng_state(fitted.device), fitted.state_dict()["rng"])


# --- signals in this process --------------------------------------------------------------------


def handlers():
    return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)


def send_at(step, number=signal.SIGTERM):
    def send(event):
        if (event.kind, event.num_steps) == ("step", step):
            os.kill(os.getpid(), number)

    return send


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_the_step(number):
    before = handlers()
    kinds = []
    result = fit(
        epochs=5,
        evaluate=BATCHES,
        callbacks=[send_at(6, number), lambda e: kinds.append(e.kind)],
    )
    assert (result.num_steps, result.num_epochs) == (6, 1)
    assert result.stopped_by == number.name
    assert kinds[-1] == "end"
    assert [record["step"] for record in training(result)] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in evaluations(result)] == [4]
    assert handlers() == before


def test_a_signal_in_the_last_step_of_an_epoch_starts_no_evaluation():
    evaluated = []
    result = fit(
        epochs=5,
        evaluate=lambda model: evaluated.append(1) or {"loss": 1.0},
        callbacks=[send_at(4)],
    )
    assert (result.num_steps, result.stopped_by) == (4, "SIGTERM")
    assert evaluated == []


def test_handlers_are_ours_only_while_fit_runs():
    def mine(number, frame):
        raise AssertionError

    before = signal.signal(signal.SIGTERM, mine)
    try:
        seen = []
        fit(steps=1, callbacks=[lambda e: seen.append(signal.getsignal(signal.SIGTERM))])
        assert mine not in seen
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handlers_are_put_back_after_an_error():
    before = handlers()
    with pytest.raises(EmptyEpochError):
        fit(EmptyFrom(1), epochs=2)
    assert handlers() == before


def test_a_signal_in_the_last_evaluation_is_told_of():
    def evaluate(model):
        os.kill(os.getpid(), signal.SIGTERM)
        return {"loss": 1.0}

    assert fit(steps=1, evaluate=evaluate).stopped_by == "SIGTERM"


def test_an_evaluation_cut_short_by_a_signal_is_not_recorded():
    def load():
        yield BATCHES[0]
        os.kill(os.getpid(), signal.SIGTERM)
        yield from BATCHES

    result = fit(steps=4, evaluate=load(), evaluate_every=2)
    assert result.stopped_by == "SIGTERM"
    assert evaluations(result) == []


def test_a_loader_of_evaluation_that_dies_of_the_signal_is_no_error():
    def load():
        yield BATCHES[0]
        os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly")

    assert fit(steps=4, evaluate=load(), evaluate_every=2).stopped_by == "SIGINT"


def test_a_training_loader_that_dies_of_the_signal_is_no_error(caplog):
    def load():
        yield BATCHES[0]
        os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly")

    result = fit(load(), steps=4)
    assert (result.num_steps, result.stopped_by) == (1, "SIGINT")
    assert "the loader failed while stopping on SIGINT" in caplog.text


def test_fit_in_a_thread_works_without_handlers():
    before = handlers()
    seen, results = [], []

    def run():
        results.append(fit(steps=3, callbacks=[lambda e: seen.append(handlers())]))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert results[0].num_steps == 3
    assert set(seen) == {before}


# --- signals from outside -----------------------------------------------------------------------

# Imports once, then forks a process for each line it reads: a mode and a folder. Each process leads
# a group of its own, as a job of a shell does, and ends as a script does, not by os._exit.
SCRIPT = """
import json, os, signal, sys, time
# A shell may have started us with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchfast import Trainer

torch.set_num_threads(1)
optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
optimizer.zero_grad(), optimizer.step()  # the first optimizer imports much, once for all
for line in iter(sys.stdin.readline, ""):
    mode, folder = line.split()
    pid = os.fork()
    if pid == 0:
        break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()

os.setsid()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for number, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)

class Endless(IterableDataset):
    def __iter__(self):
        while True:
            time.sleep(0.005)
            yield torch.ones(2, 3)

def blocking():
    for number in range(1000):
        if number == 3:
            print("blocked", flush=True)
            time.sleep(60)
        yield torch.ones(2, 3)

loader = {
    "plain": Endless(),
    "workers": DataLoader(Endless(), batch_size=None, num_workers=2),
    "persistent": DataLoader(Endless(), batch_size=None, num_workers=2, persistent_workers=True),
    "blocking": blocking(),
}[mode]
if mode == "persistent":
    iter(loader)  # its workers start now, before fit has set its handlers
model = torch.nn.Linear(3, 1)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).sum())
before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

def started(event):
    if event.kind == "step" and event.num_steps == 2 and mode != "blocking":
        pids = open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read()
        print("started", pids, flush=True)

result = trainer.fit(
    loader,
    steps=10**6,
    log_every=1,
    log_path=f"{folder}/log.jsonl",
    progress="off",
    callbacks=[started],
)
print(json.dumps({
    "stopped_by": result.stopped_by,
    "num_steps": result.num_steps,
    "trained": trainer.num_steps,
    "restored": before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)),
}), flush=True)
"""


class Job:
    """A process of the script, up to the line that says it is ready."""

    def __init__(self, spawner, folder, mode):
        self.spawner, self.folder = spawner, folder
        print(mode, folder, file=spawner.stdin, flush=True)
        self.pid = int(spawner.stdout.readline())
        # Whatever goes wrong, nothing of it outlives the test.
        self.watchdog = threading.Timer(40, os.killpg, (self.pid, signal.SIGKILL))
        self.watchdog.start()
        out = folder / "out"
        while not (out.exists() and out.read_text().endswith("\n")) and self.watchdog.is_alive():
            time.sleep(0.01)
        self.ready = out.read_text().split()

    def end(self):
        """Wait for the end; return the exit code, the last line it printed and its stderr."""
        try:
            code = int(self.spawner.stdout.readline())
        finally:
            self.watchdog.cancel()
        out = (self.folder / "out").read_text().splitlines()
        return code, out[-1], (self.folder / "err").read_text()

    def logged(self):
        return [record["step"] for record in read_jsonl(self.folder / "log.jsonl")]


@pytest.fixture(scope="module")
def spawner():
    root = str(Path(torchfast.__file__).parents[1])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    ) as process:
        yield process
        process.stdin.close()


def check_clean_end(job, name):
    code, last, err = job.end()
    assert code == 0, err
    told = json.loads(last)
    assert told["stopped_by"] == name
    assert told["restored"] is True
    assert told["num_steps"] == told["trained"] >= 2
    assert job.logged() == list(range(1, told["num_steps"] + 1))
    return err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_from_outside_ends_the_run_between_steps(spawner, tmp_path, number):
    job = Job(spawner, tmp_path, "plain")
    assert job.ready == ["started"]
    os.kill(job.pid, number)
    assert check_clean_end(job, number.name) == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_acts_at_once(spawner, tmp_path, number):
    job = Job(spawner, tmp_path, "blocking")
    assert job.ready == ["blocked"]
    os.kill(job.pid, number)
    time.sleep(0.2)
    assert Path(f"/proc/{job.pid}/status").read_text().split("State:")[1].split()[0] == "S"
    begun = time.monotonic()
    os.kill(job.pid, number)
    code, last, err = job.end()
    assert time.monotonic() - begun < 20
    assert (code, last) == (-number, "blocked")
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    assert job.logged() == [1, 2, 3]


@pytest.mark.parametrize("mode", ["workers", "persistent"])
def test_ctrl_c_reaches_workers_too_and_leaves_no_orphan(spawner, tmp_path, mode):
    job = Job(spawner, tmp_path, mode)
    started, *workers = job.ready
    assert (started, len(workers)) == ("started", 2)
    os.killpg(job.pid, signal.SIGINT)
    check_clean_end(job, "SIGINT")
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def test_a_model_in_eval_mode_is_warned_of_once_and_left_so():
    trainer = make_trainer(net=lambda: DropoutNet().eval())
    with pytest.warns(UserWarning, match=r"DropoutNet is in eval mode.*model.train\(\)") as caught:
        fit(trainer=trainer, epochs=2, evaluate=BATCHES)
    assert len(caught) == 1
    assert not any(module.training for module in trainer.model.modules())


def test_a_callable_that_evaluates_leaves_no_trace():
    def evaluate(model):
        model.eval()
        torch.rand(3), random.random(), np.random.rand()
        return {"loss": 1.0}

    def run(**options):
        trainer = make_trainer(net=frozen_norm)
        fit(trainer=trainer, epochs=2, **options)
        return trainer

    plain, evaluated = run(), run(evaluate=evaluate)
    assert not differences(plain.state_dict(), evaluated.state_dict())
    assert [m.training for m in plain.model.modules()] == [
        m.training for m in evaluated.model.modules()
    ]


def test_the_learning_rate_of_a_record_is_its_steps():
    trainer = make_trainer(lr_scheduler=partial(schedulers.StepLR, step_size=1, gamma=0.5))
    start = trainer.optimizer.param_groups[0]["lr"]
    result = fit(trainer=trainer, steps=3, log_every=1)
    assert [r["lr"] for r in result.history] == [start, start / 2, start / 4]


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        seen = []
        result = fit(
            steps=2,
            callbacks=[lambda event: seen.append(os.kill(os.getpid(), signal.SIGINT))],
        )
        assert (result.num_steps, result.stopped_by) == (2, "steps")
        assert seen
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_closing_evaluation_belongs_to_the_last_epoch():
    events = []
    fit(epochs=2, evaluate=BATCHES, evaluate_every=10_000, callbacks=[events.append])
    assert [e.record["epoch"] for e in events if e.kind == "evaluate"] == [1]
    assert [e.epoch for e in events if e.kind == "end"] == [1]
