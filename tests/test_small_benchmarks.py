"""The benchmarks of one lever each run without a GPU, and write what they print."""

from __future__ import annotations

import argparse
import json
import signal

import pytest
import torch

from benchmarks import (
    compare_check,
    first_replay,
    graph_events,
    offload,
    recompute,
    step_host,
    watching,
)


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    def run(benchmark, *more):
        out = tmp_path / "figures.json"
        options = ["--device", "cpu", "--size", "smoke", "--rounds", "2", "--out", str(out)]
        monkeypatch.setattr("sys.argv", ["benchmark.py", *options, *more])
        try:
            benchmark.main()
        finally:
            torch.use_deterministic_algorithms(False)
        return json.loads(out.read_text())["rows"], capsys.readouterr().out

    return run


def test_recompute(run):
    rows, printed = run(recompute)
    assert {row["recompute"] for row in rows} == {False, "selective", "blocks"}
    assert all(row["same_bits"] and row["ms"] > 0 for row in rows)
    assert "OTHER" not in printed


def test_offload(run):
    rows, printed = run(offload)
    assert [row["arm"] for row in rows] == list(offload.ARMS)
    assert all(row["same_bits"] and row["ms"] > 0 for row in rows)
    assert "OTHER" not in printed


def test_watching(run):
    rows, printed = run(watching, "--block-s", "0.01")
    assert [row["arm"] for row in rows] == list(watching.ARMS)
    assert "cost" not in rows[0]
    assert all(row["against"] in watching.ARMS and row["ms"] > 0 for row in rows[1:])
    # One of them is not timed; the others are, in one fit that all turns are of.
    assert ["forward" in row["samples"] for row in rows] == [False, True, True, True]
    assert all(row["steps"] > watching.WARM_UP_STEPS + 2 * row["steps_of_a_turn"] for row in rows)
    assert "as it is" in printed


def test_a_watched_process_that_ends_is_told_of_and_none_is_left(monkeypatch):
    """That is on a device that nobody has; the first waits for its turn meanwhile."""
    made = []

    class Process(watching.Process):
        def __init__(self, watched):
            if watched.arm == "guard":
                raise OSError("no more processes")
            device = "cpu" if watched.arm == "no times" else "nowhere"
            super().__init__(watched._replace(device=device))
            made.append(self)

    monkeypatch.setattr(watching, "Process", Process)
    args = argparse.Namespace(size="smoke", device="cpu", rounds=1, block_s=0.01)
    monkeypatch.setattr(watching, "ARMS", ("no times", "guard"))
    with pytest.raises(OSError, match="no more"):
        watching.measured("eager", args)
    monkeypatch.setattr(watching, "ARMS", ("no times", "as it is"))
    told = r"arm='as it is'.* ended before its turns did, with exit code 1;"
    with pytest.raises(RuntimeError, match=told):
        watching.measured("eager", args)
    assert [each.process.exitcode for each in made] == [-signal.SIGKILL, -signal.SIGKILL, 1]
    with pytest.raises(RuntimeError, match=told):
        made[-1].turn(1)


def test_a_floor_is_not_moved_by_neighbours():
    quiet, disturbed = [1.0, 1.01] * 8, [1.02, 1.5, 1.03, 1.9] * 4
    found = watching.figures(disturbed, quiet)
    assert found["floor"] == pytest.approx(0.02)
    assert found["cost"] > 0.2


@pytest.mark.parametrize("benchmark", [graph_events, first_replay])
def test_benchmarks_of_graphs_say_what_they_need(run, capsys, benchmark):
    with pytest.raises(SystemExit):
        run(benchmark)
    assert "--device is cpu, which has no graphs" in capsys.readouterr().err


def test_compare_check_tells_each_pair_as_it_comes(monkeypatch):
    """The same code again and again, then with a slowdown and without."""
    asked = []

    def measured(name, settings, slowdowns):
        for slowdown in slowdowns:
            asked.append(slowdown)
            yield {"slowdown": slowdown}

    def verdict(before, after, name, settings):
        return {"change": after["slowdown"] - before["slowdown"]}

    monkeypatch.setattr(compare_check, "measured", measured)
    monkeypatch.setattr(compare_check, "verdict", verdict)
    rows = compare_check.check("mlp", None, same=3, planted=1)
    assert next(rows) == {"kind": "same", "change": 0.0}
    assert asked == [0.0, 0.0]
    assert [(row["kind"], row["change"]) for row in rows] == [
        ("same", 0.0),
        ("same", 0.0),
        ("planted", 0.03),
        ("taken away", -0.03),
    ]
    assert asked == [0.0, 0.0, 0.0, 0.0, 0.03, 0.0]


def test_step_host(run):
    threads = torch.get_num_threads()
    rows, printed = run(step_host)
    torch.set_num_threads(threads)
    assert rows[0]["part"] == "step"
    assert {"a glance at the state", "cloning the outputs"} <= {row["part"] for row in rows}
    assert all(0 < row["least_us"] <= row["median_us"] for row in rows)
    assert "describing the batch" in printed
