"""The records of fit: what each holds, and the log and the progress that they go to."""

from __future__ import annotations

import json
import time
from functools import partial

import numpy as np
import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler as schedulers

from fitting import BATCHES, EmptyFrom, fit, make_trainer, training
from models import loss_and_metrics, mean_loss
from torchfast import MicroBatches
from torchfast.reporting import read_jsonl

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
        "phases",
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


def test_the_learning_rate_of_a_record_is_its_steps():
    trainer = make_trainer(lr_scheduler=partial(schedulers.StepLR, step_size=1, gamma=0.5))
    start = trainer.optimizer.param_groups[0]["lr"]
    result = fit(trainer=trainer, steps=3, log_every=1)
    assert [r["lr"] for r in result.history] == [start, start / 2, start / 4]


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


class Otherwise(optim.Optimizer):
    """Calls its rate otherwise than torch's do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"eta": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["eta"])


def test_an_optimizer_without_a_learning_rate_of_that_name_is_fitted():
    trainer = make_trainer(optimizer=lambda parameters: Otherwise(parameters))
    result = fit(trainer=trainer, steps=3, progress="plain")
    assert len(result.history) == 3
    assert all("lr" not in record for record in result.history)
