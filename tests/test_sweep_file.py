"""The file of a sweep: what a second run keeps, measures again, and refuses."""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time

import pytest
import torch

from benchmarks import sweep as runner


@pytest.fixture
def measured(monkeypatch):
    """The names measured, in order, with nothing run."""
    names = []

    def fake(context, models, order, jobs):
        for name, outside in models.items():
            names.append(outside)
            yield name, {"status": "failed", "reason": "fake"}

    monkeypatch.setattr(runner, "run_all", fake)
    monkeypatch.setattr(runner, "start_server", lambda device: object())
    monkeypatch.setenv("TORCHFAST_COMMIT", "aaa")
    return names


def test_a_second_run_skips_what_the_file_holds(measured, tmp_path):
    out = tmp_path / "deep" / "out.json"
    runner.sweep({"a": 1, "b": 2}, "exact", out=out)
    records = runner.sweep({"b": 2, "c": 3}, "exact", out=out)
    assert measured == [1, 2, 3]
    assert list(records) == ["b", "c"]
    assert list(json.loads(out.read_text())["models"]) == ["a", "b", "c"]
    runner.sweep({"b": 2}, "exact", out=out, fresh=True)
    assert measured == [1, 2, 3, 2]
    assert list(json.loads(out.read_text())["models"]) == ["a", "b", "c"]


@pytest.mark.parametrize("other", ["plan", "device", "commit", "torch"])
def test_what_was_measured_under_other_conditions_is_not_mixed_in(
    measured, monkeypatch, tmp_path, other
):
    out = tmp_path / "out.json"
    runner.sweep({"a": 1, "b": 2}, "exact", out=out)
    conditions = {"plan": "exact", "device": "cpu"}
    if other in conditions:
        conditions[other] = {"plan": "eager", "device": "cuda"}[other]
    elif other == "commit":
        monkeypatch.setenv("TORCHFAST_COMMIT", "bbb")
    else:
        monkeypatch.setattr(torch, "__version__", "9.9")
    with pytest.raises(SystemExit, match="was measured with"):
        runner.sweep({"b": 2}, **conditions, out=out)
    assert measured == [1, 2]
    assert list(json.loads(out.read_text())["models"]) == ["a", "b"]
    # Unless it is to be begun anew, and then that goes on.
    runner.sweep({"b": 2}, **conditions, out=out, replace=True)
    assert list(json.loads(out.read_text())["models"]) == ["b"]
    runner.sweep({"b": 2, "c": 3}, **conditions, out=out, replace=True)
    assert measured == [1, 2, 2, 3]


def commits_in(out):
    models = json.loads(out.read_text())["models"]
    return {name: record["run"]["commit"] for name, record in models.items()}


def test_any_commit_goes_on_with_another_and_each_model_says_of_which_run_it_is(
    measured, monkeypatch, tmp_path
):
    out = tmp_path / "out.json"
    runner.sweep({"a": 1, "b": 2}, "exact", out=out)
    assert commits_in(out) == {"a": "aaa", "b": "aaa"}
    monkeypatch.setenv("TORCHFAST_COMMIT", "bbb")
    runner.sweep({"b": 2, "c": 3}, "exact", out=out, any_commit=True)
    assert measured == [1, 2, 3]
    assert commits_in(out) == {"a": "aaa", "b": "aaa", "c": "bbb"}
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--models", "b", "--fresh"])
    runner.sweep({"b": 2}, "exact", out=out, any_commit=True, fresh=True)
    assert measured == [1, 2, 3, 2]
    assert commits_in(out) == {"a": "aaa", "b": "bbb", "c": "bbb"}
    models = json.loads(out.read_text())["models"]
    assert list(models) == ["a", "b", "c"]
    assert models["b"]["run"]["command"].endswith(" --models b --fresh")
    assert not models["a"]["run"]["command"].endswith("--fresh")
    # Of the commit that wrote last, but not whole.
    with pytest.raises(SystemExit, match="models of other commits too, aaa; go on with --any-"):
        runner.sweep({"a": 1}, "exact", out=out)
    runner.sweep({"a": 1}, "exact", out=out, replace=True)
    assert commits_in(out) == {"a": "bbb"}


def test_any_commit_is_not_any_plan_nor_any_machine(measured, monkeypatch, tmp_path):
    out = tmp_path / "out.json"
    runner.sweep({"a": 1}, "exact", out=out)
    with pytest.raises(SystemExit, match="was measured with settings"):
        runner.sweep({"a": 1}, "eager", out=out, any_commit=True)
    monkeypatch.setattr(torch, "__version__", "9.9")
    with pytest.raises(SystemExit, match="was measured with machine"):
        runner.sweep({"a": 1}, "exact", out=out, any_commit=True)


def test_models_of_a_file_that_does_not_say_so_are_of_its_run(measured, monkeypatch, tmp_path):
    out = tmp_path / "out.json"
    runner.sweep({"a": 1}, "exact", out=out)
    content = json.loads(out.read_text())
    del content["models"]["a"]["run"]
    out.write_text(json.dumps(content | {"date": "2026-01-02"}))
    monkeypatch.setenv("TORCHFAST_COMMIT", "bbb")
    runner.sweep({"b": 2}, "exact", out=out, any_commit=True)
    assert commits_in(out) == {"a": "aaa", "b": "bbb"}
    assert json.loads(out.read_text())["models"]["a"]["run"]["date"] == "2026-01-02"


def test_the_duration_is_that_of_all_runs_or_left_out(measured, monkeypatch, tmp_path):
    out = tmp_path / "out.json"
    clock = itertools.count(step=10)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))

    def duration():
        found = json.loads(out.read_text())
        return found.get("jobs"), found.get("elapsed_s")

    runner.sweep({"a": 1, "b": 2}, "exact", out=out, jobs=3)
    assert duration() == (3, 20)
    runner.sweep({"b": 2}, "exact", out=out, jobs=3, fresh=True)
    assert duration() == (3, 30)
    runner.sweep({"c": 3}, "exact", out=out, jobs=2)
    assert duration() == (None, None)
    runner.sweep({"d": 3}, "exact", out=out, jobs=2)
    assert duration() == (None, None)
    runner.sweep({"a": 1}, "eager", out=out, jobs=2, replace=True)
    assert duration() == (2, 10)


@pytest.mark.parametrize("options", [[], ["--any-commit"]])
def test_the_option_reaches_the_sweep(monkeypatch, options):
    given = {}

    def fake(models, *_, **keywords):
        given.update(keywords)
        return {}

    monkeypatch.setattr(runner, "sweep", fake)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--device", "cpu", *options])
    runner.main()
    assert given["any_commit"] is bool(options)


def test_a_write_that_fails_leaves_the_file_as_it_was(measured, monkeypatch, tmp_path):
    out = tmp_path / "out.json"
    runner.sweep({"a": 1}, "exact", out=out)
    before = out.read_text()

    def torn(path, text):
        with path.open("w") as file:
            file.write(text[:20])
        raise KeyboardInterrupt

    monkeypatch.setattr(type(out), "write_text", torn)
    with pytest.raises(KeyboardInterrupt):
        runner.sweep({"a": 1, "b": 2}, "exact", out=out)
    assert out.read_text() == before
