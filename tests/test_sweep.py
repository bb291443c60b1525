"""The sweep over outside models: whatever one of them does, the others and the file are safe."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import signal
import statistics
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import warm_python
from benchmarks import sweep as runner
from benchmarks import sweep_model
from benchmarks.outside_models import MODELS, OutsideModel
from torchfast._core.decisions import Decision, Report

ROOT = Path(__file__).parent.parent
CALLS = itertools.count()

# --- toys: functions of this module, so that another process can import them --------------------


def build():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))


def batch(generator):
    return torch.randn(6, 4, generator=generator)


def loss_fn(model, batch):
    return model(batch).square().mean()


def hang():
    time.sleep(60)


def refuse():
    raise ValueError("no such size\nand a second line")


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def leave():
    os._exit(3)


def lack():
    raise ModuleNotFoundError("No module named 'timm'", name="timm")


def loss_that_grows(model, batch):
    """Differ from call to call, so the plan, which comes second, computes something else."""
    return loss_fn(model, batch) * (1 + next(CALLS))


def loss_under_autocast(model, batch):
    factor = 1.2 if torch.is_autocast_enabled("cpu") else 1.0
    return loss_fn(model, batch) * factor


def loss_that_fails(at_call, model, batch):
    if next(CALLS) == at_call:
        raise RuntimeError("enough")
    return loss_fn(model, batch)


def infinite_loss(model, batch):
    return loss_fn(model, batch) / 0.0


def loss_that_looks(model, batch):
    """Break the graph, after the model and before the loss."""
    y = model(batch)
    if y.isnan().any():  # data-dependent
        raise ValueError("nothing is learnt from this")
    return y.square().mean()


def slow_batch(generator, folder):
    """Tell the test where we are, then take long."""
    Path(folder, "started").write_text(str(os.getpid()))
    time.sleep(60)


GOOD = OutsideModel(build, batch, loss_fn)
BF16 = '{"precision": "bf16"}'
COMPILED = '{"compile": {"backend": "aot_eager"}}'


def swept(outside, plan="exact", **options):
    return runner.sweep({"toy": outside}, plan, **options)["toy"]


# --- one model ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("plan", "exact"), [("exact", True), (BF16, False)])
def test_a_good_model_runs_and_holds_parity(plan, exact):
    record = swept(GOOD, plan)
    assert record["status"] == "ran"
    assert (record["parity"]["held"], record["parity"]["exact"]) == (True, exact)
    assert (record["parity"]["loss_error"] == 0) is exact
    assert record["form"] == "eager"
    gains = [eager_ms / plan_ms for eager_ms, plan_ms in record["pairs_ms"]]
    is_close = abs(statistics.median(gains[: sweep_model.NUM_PAIRS]) - 1) < sweep_model.CLOSE
    assert len(gains) == sweep_model.NUM_PAIRS + is_close * sweep_model.MORE_PAIRS
    assert record["gain_quartiles"][0] <= record["gain"] <= record["gain_quartiles"][1]
    assert "host_waits" not in record


@pytest.mark.parametrize(("factor", "num_pairs"), [(0.85, 10), (0.95, 50), (1.05, 50), (1.2, 10)])
def test_more_pairs_are_taken_where_the_two_are_close(monkeypatch, factor, num_pairs):
    times = {"eager": 10.0, "plan": 10.0 / factor}
    monkeypatch.setattr(sweep_model, "block_ms", lambda step, count, drain: times[step])
    found = sweep_model.compare("eager", "plan", lambda: None)
    assert len(found["pairs_ms"]) == num_pairs
    assert found["gain"] == pytest.approx(factor)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (refuse, "ValueError: no such size"),
        (crash, f"crashed with signal {signal.SIGSEGV:d}"),
        (leave, "ended with exit code 3"),
        (lack, "needs the package timm"),
    ],
)
def test_a_model_that_fails_is_recorded_and_the_next_one_runs(build, reason, capsys):
    models = {"bad": OutsideModel(build, batch, loss_fn), "good": GOOD}
    records = runner.sweep(models, "exact")
    assert (records["bad"]["status"], records["bad"]["reason"]) == ("failed", reason)
    assert records["good"]["status"] == "ran"
    assert f"failed: {reason}" in capsys.readouterr().out
    assert runner.summary(records).startswith("ran 1 of 2; parity held 1; median gain ")
    assert runner.summary(records).endswith("captured, compiled 0, captured 0, compiled 0, eager 1")


def test_a_model_that_hangs_is_killed_after_the_limit():
    begun = time.monotonic()
    record = swept(OutsideModel(hang, batch, loss_fn), limit_s=1)
    assert (record["status"], record["reason"]) == ("failed", "not done in 1 s")
    assert 1 <= record["wall_s"] < 5
    assert time.monotonic() - begun < 40
    assert not multiprocessing.active_children()


def test_what_was_found_before_a_failure_is_kept():
    # What parity takes: a group of two batches a step, the last of one, in each of two loops.
    calls = 2 * (2 * sweep_model.PARITY_STEPS - 1)
    record = swept(OutsideModel(build, batch, partial(loss_that_fails, calls)))
    assert record["status"] == "failed"
    assert record["parity"]["held"]
    assert "gain" not in record


@pytest.mark.parametrize(
    ("loss_fn", "plan", "size"),
    [(loss_that_grows, "exact", None), (loss_under_autocast, BF16, 0.2)],
)
def test_a_plan_that_computes_something_else_does_not_hold_parity(loss_fn, plan, size, capsys):
    record = swept(OutsideModel(build, batch, loss_fn), plan)
    assert record["status"] == "ran"
    assert record["parity"]["held"] is False
    assert record["parity"]["exact"] is False
    assert "parity NOT held" in capsys.readouterr().out
    assert "parity held 0" in runner.summary({"toy": record})
    if size is None:
        assert f"step 1 of {sweep_model.PARITY_STEPS}: loss" in record["parity"]["reason"]
    else:
        assert record["parity"]["loss_error"] == pytest.approx(size, rel=0.1)


def test_losses_that_are_not_finite_prove_nothing():
    record = swept(OutsideModel(build, batch, infinite_loss))
    assert record["status"] == "failed"
    assert "not finite" in record["reason"]


@pytest.mark.parametrize(
    ("graphs", "aside", "replays", "expected"),
    [
        (None, "", 0, "eager"),
        (0, "", 0, "eager"),  # asked for, and nothing came of it
        (0, "", 7, "captured"),
        (3, "", 0, "compiled"),
        (3, "", 7, "captured, compiled"),
        (3, "the update of A is not in the graph: b", 7, "captured, compiled, update after"),
        (None, "the update of A is not in the graph: b", 7, "captured, update after"),
        (None, "the update of A is not in the graph: b", 0, "eager"),
        (None, "steps of 3x4 run eagerly: no", 7, "captured"),
        (3, "the step is faster without: 2 ms compiled, 1 ms captured as it is", 7, "captured"),
        (3, "the step is faster without: 2 ms compiled, 1 ms as it is", 0, "eager"),
        (3, "the step runs compiled, which is faster: 1 ms compiled", 7, "compiled"),
    ],
)
def test_the_form_is_told_from_what_was_done(graphs, aside, replays, expected):
    decision = Decision(lever="cuda_graph", outcome="stepped aside", detail=aside)
    counts = {} if graphs is None else {"compile_graphs": graphs}
    counters = {"replays": replays, **counts}
    report = Report(title="", decisions=(decision,), counters=counters)
    assert sweep_model.form(report) == expected


def test_what_was_compiled_is_recorded_and_printed(capsys):
    record = swept(OutsideModel(build, batch, loss_that_looks), COMPILED)
    assert record["form"] == "compiled"
    assert record["parity"]["held"]
    for found in (record["compile"], record["parity"]["compile"]):
        assert found["graphs"] > 0
        assert found["graph_breaks"] == 1
        assert found["recompiles"] == 0
        assert found["s"] > 0
    out = capsys.readouterr().out
    assert re.search(r"  compiled            .*  \d graphs in [\d.]+ s, 1 graph breaks\n", out)
    assert runner.summary({"toy": record}).endswith("captured 0, compiled 1, eager 0")


def test_nothing_is_said_of_a_compiler_that_was_not_asked(capsys):
    record = swept(GOOD)
    assert "compile" not in record
    assert "compile" not in record["parity"]
    assert " graphs in " not in capsys.readouterr().out


# --- interrupted ----------------------------------------------------------------------------------

SCRIPT = """
import signal, sys
from functools import partial
from pathlib import Path
from benchmarks import sweep
from benchmarks.outside_models import OutsideModel
import test_sweep as toys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    slow = partial(toys.slow_batch, folder=sys.argv[-1])
    sweep.MODELS = {"good": toys.GOOD, "slow": OutsideModel(toys.build, slow, toys.loss_fn)}
    sys.argv[1:] = ["--plan", "exact", "--device", "cpu", "--out", sys.argv[-1] + "/out.json"]
    sweep.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_leaves_a_valid_file_and_no_orphan(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    started = tmp_path / "started"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    errors = tmp_path / "errors"
    with open(os.devnull, "w") as nowhere, errors.open("w") as file:
        process = warm_python.Process(
            script,
            tmp_path,
            env={**os.environ, "PYTHONPATH": paths},
            stdout=nowhere,
            stderr=file,
            start_new_session=True,
        )
    try:
        _wait_until(lambda: started.exists() and started.read_text(), limit_s=60)
        child = int(started.read_text())
        os.killpg(process.pid, number)
        process.wait(30)
    finally:
        process.kill()
    err = errors.read_text()
    if number == signal.SIGINT:
        assert process.returncode == 1
        assert err.endswith("interrupted; what was measured is kept\n")
    else:
        assert process.returncode == 128 + number, err
    models = json.loads((tmp_path / "out.json").read_text())["models"]
    assert {name: record["status"] for name, record in models.items()} == {"good": "ran"}
    _wait_until(lambda: not Path(f"/proc/{child}").exists(), limit_s=5)


def _wait_until(condition, limit_s):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# --- the registry -------------------------------------------------------------------------------


def test_the_registry_is_broad_and_makes_the_same_batches_from_a_seed():
    packages = [name.split()[0] for name in MODELS]
    assert len(MODELS) >= 40
    assert min(packages.count("timm"), packages.count("transformers")) >= 20
    for outside in MODELS.values():
        first, second = (outside.batch(torch.Generator().manual_seed(0)) for _ in range(2))
        assert repr(first) == repr(second)
