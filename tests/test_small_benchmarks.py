"""The benchmarks of one lever each run without a GPU, and write what they print."""

from __future__ import annotations

import json
import sys
import time
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from benchmarks import (
    compare_check,
    compile_tables,
    compiled_update,
    figures,
    first_replay,
    fragmentation,
    graph_events,
    offload,
    offload_training,
    offload_update,
    profiling_tables,
    recompute,
    results,
    slow_to_fast,
    step_host,
    tables,
    yardstick,
)
from benchmarks.methods import METHODS
from benchmarks.result_rows import ResultRows
from benchmarks.workloads import workload
from torchfast.memory.recompute import chosen_blocks


def test_recompute(run_benchmark):
    rows, printed = run_benchmark(recompute, "--block-s", "0.01")
    names = {"GPT-2 small", "GPT-2 medium", "Llama", "ViT", "bottlenecks", "ResNet-50"}
    ways = {(name, way) for name in names for way in (False, "selective", "blocks")}
    ways |= {("ResNet-50", "stages"), ("ResNet-50", "early stages")}
    assert {(row["name"], row["recompute"]) for row in rows} == ways
    assert all(row["same_bits"] and row["ms"] > 0 for row in rows)
    # The planner chooses among blocks.
    foretold = {row["recompute"] for row in rows if row["planned_bytes"] and row["planned_cost"]}
    assert foretold == {False, "selective", "blocks"}
    assert "OTHER" not in printed


def test_the_stages_of_a_resnet_are_recomputed_as_wholes():
    case = recompute.CASES["smoke"]["ResNet-50"]
    ways = recompute.ways_of(case)
    assert list(ways) == [*recompute.WAYS, "stages", "early stages"]
    blocks = chosen_blocks(case.build(), ways["stages"])
    assert [path for path, _ in blocks] == ["blocks.0", "blocks.1"]
    blocks = chosen_blocks(case.build(), ways["early stages"])
    assert [path for path, _ in blocks] == ["blocks.0", "blocks.1.0", "blocks.1.1"]


def test_a_run_is_looked_at_early_and_at_its_end():
    assert fragmentation.marked(5000)[:2] == [50, 100]
    assert fragmentation.marked(5000)[-1] == 5000
    assert fragmentation.marked(1) == [1]


def test_recompute_measures_what_is_asked_for_beside_what_there_is(run_benchmark, tmp_path):
    short = ("--block-s", "0.01")
    rows, printed = run_benchmark(recompute, "--models", "ViT", "Llama", "--limit-s", "-1", *short)
    assert rows == []
    assert "left out" in printed
    left_out = [f"{name}, eager: no time was left" for name in ("ViT", "Llama")]
    assert json.loads((tmp_path / "figures.json").read_text())["left_out"] == left_out

    rows, _ = run_benchmark(recompute, "--models", "ViT", *short)
    assert {row["name"] for row in rows} == {"ViT"}
    rows, _ = run_benchmark(recompute, "--models", "Llama", *short)
    assert [row["name"] for row in rows] == ["ViT"] * 3 + ["Llama"] * 3
    assert rows[0]["run"]["command"] != rows[-1]["run"]["command"]
    # What has been measured is missing no longer, and a run without time takes nothing away.
    again, _ = run_benchmark(recompute, "--models", "ViT", "GPT-2 small", "--limit-s", "-1", *short)
    assert again == rows
    left_out = json.loads((tmp_path / "figures.json").read_text())["left_out"]
    assert left_out == ["GPT-2 small, eager: no time was left"]
    # Other settings, and the figures could not be held against each other.
    with pytest.raises(SystemExit, match="was measured with settings"):
        run_benchmark(recompute, "--models", "ViT", "--block-s", "0.02")


def test_rows_that_do_not_say_their_run_keep_that_of_their_file(monkeypatch, tmp_path):
    out = tmp_path / "figures.json"
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # however pytest was called
    monkeypatch.setattr("sys.argv", ["first.py"])
    results.write(out, {"settings": {}, "rows": [{"name": "a"}]})
    monkeypatch.setattr("sys.argv", ["second.py"])
    ResultRows(out, ("name",), {}).add({"name": "b"})
    found = json.loads(out.read_text())
    ran = {row["name"]: row["run"]["command"].split()[-1] for row in found["rows"]}
    assert ran == {"a": "first.py", "b": "second.py"}
    assert tables.runs(found, "recompute") == [row["run"] for row in found["rows"]]


def test_runs_side_by_side_lose_no_row_of_each_other(tmp_path):
    out = tmp_path / "figures.json"
    one, other = (ResultRows(out, ("name", "mode"), {}) for _ in range(2))
    one.add({"name": "a", "mode": "eager"})
    other.leave_out("c", "eager", "no time was left")
    other.add({"name": "b", "mode": "eager"})
    one.add({"name": "c", "mode": "eager"})
    other.leave_out("a", "eager", "no time was left")

    found = json.loads(out.read_text())

    assert [row["name"] for row in found["rows"]] == ["a", "b", "c"]
    assert found["left_out"] == []


def test_rows_of_another_machine_stand_in_no_file_with_ours(run_benchmark, tmp_path, monkeypatch):
    run_benchmark(offload)
    here = results.machine()
    monkeypatch.setattr(results, "machine", lambda: {**here, "commit": "another"})
    run_benchmark(offload)
    monkeypatch.setattr(results, "machine", lambda: {**here, "gpu": "another"})
    with pytest.raises(SystemExit, match="was measured with machine"):
        run_benchmark(offload)


def test_offload(run_benchmark):
    rows, printed = run_benchmark(offload)
    assert [row["arm"] for row in rows] == list(offload.ARMS)
    assert all(row["same_bits"] and row["ms"] > 0 for row in rows)
    assert "OTHER" not in printed


def test_offloaded_updates(run_benchmark):
    rows, printed = run_benchmark(offload_update, "--block-s", "0.01", "--accumulate", "1", "2")
    arms = [(row["accumulate"], row["arm"]) for row in rows]
    assert arms == [(number, name) for number in (1, 2) for name in offload_update.ARMS]
    assert all(row["ms"] > 0 and row["update_ms"] > 0 for row in rows)
    for row in rows:
        assert ("overlap" in row["arm"]) == (row["waiting_ratio"] is not None)
    # There is nothing on the host that an update on the device is held against.
    # Nor is the first there that changes gradients, or the first that does not, against itself.
    assert [row["same_bits"] for row in rows] == [None, None, True, True, None, True] * 2
    assert "OTHER" not in printed
    few = ("--block-s", "0.01", "--accumulate", "3", "--arms", "host, overlap")
    more, _ = run_benchmark(offload_update, *few)
    assert more[:12] == rows
    assert [(row["accumulate"], row["arm"], row["same_bits"]) for row in more[12:]] == [
        (3, "host, overlap", None)
    ]


def test_updates_for_which_no_time_is_left_are_named(run_benchmark, tmp_path):
    few = ("--block-s", "0.01", "--arms", "device")
    rows, _ = run_benchmark(offload_update, *few)
    again, printed = run_benchmark(offload_update, "--block-s", "0.01", "--limit-s", "-1")
    assert again == rows
    assert "left out: host, 1: no time was left" in printed
    left_out = json.loads((tmp_path / "figures.json").read_text())["left_out"]
    names = [name for name in offload_update.ARMS if name != "device"]
    assert left_out == [f"{name}, 1: no time was left" for name in names]


@pytest.mark.parametrize(("benchmark", "kind"), [(offload_update, "Training"), (offload, "Way")])
def test_of_an_arm_that_was_measured_nothing_is_left(run_benchmark, monkeypatch, benchmark, kind):
    living = weakref.WeakSet()
    most = []

    class Watched(getattr(benchmark, kind)):
        def __init__(self, *args):
            living.add(self)
            most.append(len(living))
            super().__init__(*args)

    monkeypatch.setattr(benchmark, kind, Watched)
    run_benchmark(benchmark, "--block-s", "0.01")
    assert max(most) == 2


def test_slow_to_fast(run_benchmark):
    rows, printed = run_benchmark(slow_to_fast)
    assert [row["stage"] for row in rows] == [stage.name for stage in slow_to_fast.STAGES]
    assert all(row["ms"] > 0 and row["utilisation"] is None for row in rows)
    waits = [row["host_waits"] for row in rows]
    # A mask waits on the way back, too; behind the last read nothing waits.
    assert waits[0] == waits[1] > waits[2] == 1
    assert waits[3:] == [0, 0, 0]
    assert "fast" in printed
    table = profiling_tables.slow_to_fast({"rows": rows})
    assert len(table) == 2 + len(rows)


def test_compiled_update(run_benchmark):
    rows, printed = run_benchmark(
        compiled_update, "--block-s", "0.01", "--workloads", "mlp", "--optimizers", "RMSprop"
    )

    plain, compiled, auto = rows
    assert [row["update"] for row in rows] == ["False", "True", "auto"]
    assert all(len(row["turns_ms"]) == 2 and row["ms"] > 0 for row in rows)
    assert (plain["update_graphs"], compiled["update_graphs"]) == (0, 1)
    assert plain["told"] == []
    assert plain["apart"] == 0
    assert "compiled in" in compiled["told"][0]
    assert compiled["told"][0] in printed
    assert "of the time as it is" in auto["told"][0] or "runs as it is" in auto["told"][0]
    assert 0 < compiled["apart"] < 1e-3
    assert not any(row["is_captured"] for row in rows)  # there is no GPU

    table = compile_tables.compiled_update({"rows": rows})
    assert len(table) == 3
    assert f"{plain['ms'] - compiled['ms']:.2f}" in table[-1]
    assert ("| compiled |" in table[-1]) == (
        "of the time as it is" in auto["told"][0] and "runs as it is" not in auto["told"][0]
    )


def test_offload_in_training(run_benchmark, tmp_path):
    rows, printed = run_benchmark(
        offload_training, "--block-s", "0.01", "--arms", "plain", "recompute"
    )
    assert [row["arm"] for row in rows] == ["plain", "recompute"]
    assert all(row["same_bits"] and row["ms"] > 0 and len(row["turns_ms"]) == 2 for row in rows)
    assert rows[0]["turns_ms"] != rows[1]["turns_ms"]
    assert "OTHER" not in printed
    there = ["--arms", "plain", "offload", "--block-s", "0.01"]
    again, _ = run_benchmark(offload_training, "--limit-s", "-1", *there)
    assert again == rows
    left_out = json.loads((tmp_path / "figures.json").read_text())["left_out"]
    assert left_out == ["offload, eager: no time was left"]


def test_training_with_its_update_on_the_host_is_not_held_to_the_bits_of_the_device(run_benchmark):
    options = ("--block-s", "0.01", "--arms", "plain", "offload optimizer", "offload parameters")
    rows, printed = run_benchmark(offload_training, *options)
    assert [row["same_bits"] for row in rows] == [True, None, None]
    # Here the device is the host.
    assert [row["loss_difference"] for row in rows] == [0.0] * 3
    assert "to 0.0e+00" in printed


def test_what_goes_to_the_host_for_an_update_is_sent(monkeypatch):
    """Gradients of all parameters, or of those that are there."""
    host, device = torch.ones(3), torch.empty(5, device="meta")
    arm = SimpleNamespace(is_cuda=True, activation_bytes=50, name="offload optimizer")
    arm.step = SimpleNamespace(model=SimpleNamespace(parameters=lambda: iter([device, device])))
    sent = partial(offload_training.Training._sent, arm)
    assert sent() == 50 + 2 * 5 * 4
    arm.step.model = SimpleNamespace(parameters=lambda: iter([host, device]))
    arm.name = "offload parameters"
    assert sent() == 50 + 3 * 4
    arm.name = "offload"
    assert sent() == 50


def test_parameters_on_the_host_are_not_trained_in_a_graph():
    args = SimpleNamespace(size="smoke", arms=["offload parameters"], bus=None)
    found = list(offload_training.measured("graph", args, time.monotonic() + 60.0))
    assert found == [{"arm": "offload parameters", "left_out": "no graph can hold it"}]


@pytest.mark.parametrize("name", ["offload auto", "offload auto, 10%"])
@pytest.mark.parametrize(("saved", "allowed"), [(10**9, 10**9), (10**12, 5 * 10**9), (0, None)])
def test_what_the_bus_allows_is_no_more_than_is_saved(saved, allowed, name):
    losses = [torch.ones(())]
    figures = {"times_ms": [1.0], "peak_bytes": None, "mode": "eager"}
    figures |= {"losses": losses, "norms": losses}
    plain = SimpleNamespace(name="plain", sent_bytes=0, **figures)
    arm = SimpleNamespace(name=name, sent_bytes=10**9, **figures)
    found = offload_training.row(arm, plain, 50e9, (0.1, 0.2), saved)
    assert found["allowed_bytes"] == allowed
    assert found["of_allowed"] == (None if allowed is None else 10**9 / allowed)


@pytest.mark.parametrize("benchmark", [graph_events, first_replay])
def test_benchmarks_of_graphs_say_what_they_need(run_benchmark, capsys, benchmark):
    with pytest.raises(SystemExit):
        run_benchmark(benchmark)
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


def test_steps_given_together_are_enqueued_by_one_call():
    made = []
    arm = step_host.Calls(step_host.TOGETHER_PART, lambda: made.append(None), "cpu")
    arm.turn(100)
    assert len(made) == 100 // step_host.TOGETHER
    step_host.Calls("step", lambda: made.append(None), "cpu").turn(100)
    assert len(made) == 100 // step_host.TOGETHER + 100


def test_a_trace_and_a_burst_hold_whole_launches_of_steps_that_are_given_together(monkeypatch):
    """A trace of five steps, of which one launches eight, would count eight as five."""
    asked = {}

    class Fake:
        alive = True

        def __init__(self, method):
            self.method = method

        def send(self, request):
            asked.setdefault(self.method.name, []).append(request)

        def answer(self, *_):
            times = {"ms": 0.3, "host_ms": 0.1, "best_ms": 0.3}
            return {**times, **dict.fromkeys(figures.TRACED)}

    names = ["tuned", "torchfast fast, unrolled"]
    measurement = yardstick.Measurement(workload("mlp", "smoke"), yardstick.Settings(rounds=1), {})
    measurement._warm_ups = dict.fromkeys(names)
    monkeypatch.setattr(figures, "summary", lambda *_: {})
    measurement.measure([Fake(METHODS[name]) for name in names])
    measurement.close()
    for name, at_once in zip(names, (1, 8), strict=True):
        probe, block, trace = asked[name]
        assert probe.burst_steps == 2 * at_once
        assert block.burst_steps % at_once == 0
        assert block.bursts * block.burst_steps > 100
        assert trace.steps == (8 if at_once == 8 else 5)


def test_step_host(run_benchmark):
    threads = torch.get_num_threads()
    rows, printed = run_benchmark(step_host)
    torch.set_num_threads(threads)
    assert rows[0]["part"] == "step"
    assert {"a glance at the state", "cloning the outputs"} <= {row["part"] for row in rows}
    parts = [row["part"] for row in rows[1:4]]
    assert parts == ["steps of 8, per step", "fit, per step", "fit of 8, per step"]
    assert rows[3]["median_us"] < rows[2]["median_us"]
    assert all(0 < row["least_us"] <= row["median_us"] for row in rows)
    assert "describing the batch" in printed
