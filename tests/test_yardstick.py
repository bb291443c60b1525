"""The harness of the benchmarks: real processes, real methods, and methods that go wrong."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

import strange_methods
import warm_python
from benchmarks import process, results, yardstick
from benchmarks.methods import METHODS, NAIVE, TUNED
from benchmarks.workloads import workload
from benchmarks.yardstick import Measurement, Settings

QUICK = Settings(device="cpu", size="smoke", rounds=2, block_s=0.02, cold_start_limit_s=90)


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """Each method's process is a fork of one that has imported what they need.

    To be spawned takes each some seconds. That they can be is seen where Ctrl-C ends the program.
    The server is that of the sweeps: there is one for all of a process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.preloaded"])
    monkeypatch.setattr(process, "multiprocessing", SimpleNamespace(get_context=lambda _: context))


def measured(methods, name="mlp", settings=QUICK, slowdowns=None):
    return Measurement(workload(name, "smoke"), settings, slowdowns or {}).run(methods)["methods"]


def peers():
    return [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                not importlib.util.find_spec(package), reason=f"{package} is not installed"
            ),
        )
        for name, package in [
            ("Lightning", "lightning"),
            ("Accelerate", "accelerate"),
            ("transformers Trainer", "transformers"),
        ]
    ]


def test_every_method_computes_what_the_naive_loop_computes():
    ours = [m for name, m in METHODS.items() if name.startswith("torchfast")]
    load = workload("gpt-small", "smoke")
    own = [NAIVE, TUNED, *(m for m in ours if m.obstacle(load, on_cuda=False) is None)]
    assert len(own) == 2 + len(ours) - 1  # of all but the one for the shortest step
    found = measured(own, "gpt-small")
    assert set(found) == {method.name for method in own}
    for name, method in found.items():
        assert method["status"] == "ran", (name, method)
        assert method["trains"], name
        assert method["losses"] == pytest.approx(found["naive"]["losses"], rel=1e-3), name
        assert len(method["blocks_ms"]) == len(method["reference_blocks_ms"]) == QUICK.rounds
        best = zip(method["best_ms"], method["blocks_ms"], strict=True)
        assert all(0 < burst <= block for burst, block in best)
        assert 0 < method["host_ms"] <= method["median_ms"] * 1.01
        assert method["device_ms"] is method["num_kernels"] is method["peak_bytes"] is None
    assert found["tuned"]["blocks_ms"] == found["tuned"]["reference_blocks_ms"]


def test_steps_that_are_given_together_compute_what_the_naive_loop_computes():
    found = measured([NAIVE, TUNED, METHODS["torchfast fast, unrolled"]])
    unrolled = found["torchfast fast, unrolled"]
    assert unrolled["status"] == "ran", unrolled
    assert unrolled["trains"]
    assert unrolled["losses"] == pytest.approx(found["naive"]["losses"], rel=1e-3)


def test_a_method_that_compiles_computes_the_same_and_starts_late():
    found = measured([NAIVE, TUNED, METHODS["compile default"]])  # few kernels to build
    compiled = found["compile default"]
    assert compiled["status"] == "ran", compiled
    assert compiled["trains"]
    assert compiled["losses"] == pytest.approx(found["naive"]["losses"], rel=1e-3)
    # On a busy machine the steps of "tuned" can take longer warm than they took cold.
    assert found["compile default"]["cold_start_s"] > found["tuned"]["cold_start_s"] >= 0


@pytest.mark.parametrize("name", peers())
def test_every_peer_computes_what_the_naive_loop_computes(name):
    found = measured([NAIVE, TUNED, METHODS[name]], "gpt-small")
    assert found[name]["status"] == "ran", found[name]
    assert found[name]["trains"]
    assert found[name]["losses"] == pytest.approx(found["naive"]["losses"], rel=1e-3)


def test_the_loader_of_the_input_bound_workload_serves_every_loop():
    found = measured([NAIVE, TUNED, METHODS["torchfast exact"]], "resnet50-input-bound")
    losses = [method["losses"] for method in found.values()]
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-3)] * 2
    assert "compile default" not in found


def test_a_method_that_goes_wrong_is_a_result_and_the_others_go_on():
    strange = [
        strange_methods.RAISES,
        strange_methods.DIES,
        strange_methods.STOPS,
        strange_methods.DIES_LATE,
        strange_methods.FORGETS,
        strange_methods.NEEDS_MUCH,
    ]
    registry = {method.name: method for method in [TUNED, *strange]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.yardstick.METHODS", registry)
        found = measured([TUNED, *strange])
    reasons = {name: method.get("reason") for name, method in found.items()}
    assert reasons["raises"] == "RuntimeError: no such kernel"
    assert reasons["dies"] == f"its process ended with {-signal.SIGKILL}"
    assert reasons["dies late"] == f"its process ended with {-signal.SIGKILL}"
    assert reasons["stops"] == "RuntimeError: the loop ended by itself"
    assert found["needs much"]["status"] == "left out"
    assert reasons["needs much"] == "the package no_such_package is not installed"
    assert found["tuned"]["trains"] is True
    assert found["forgets"]["status"] == "ran"
    assert found["forgets"]["trains"] is False


def test_a_method_that_hangs_is_given_up():
    settings = Settings(device="cpu", size="smoke", rounds=1, block_s=0.01, cold_start_limit_s=4)
    registry = {"tuned": TUNED, "hangs": strange_methods.HANGS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.yardstick.METHODS", registry)
        found = measured([TUNED, strange_methods.HANGS], settings=settings)
    assert found["hangs"] == {"status": "failed", "reason": "not done in 4 s"}
    assert found["tuned"]["status"] == "ran"


def test_a_reference_that_fails_ends_the_run(monkeypatch):
    monkeypatch.setattr("benchmarks.yardstick.TUNED", strange_methods.RAISES)
    with pytest.raises(process.MethodFailed, match="no such kernel"):
        measured([strange_methods.RAISES])


def test_a_planted_slowdown_slows_down():
    settings = Settings(device="cpu", size="smoke", rounds=6, block_s=0.05)
    found = measured([TUNED, METHODS["torchfast exact"]], "gpt-small", settings)
    slowed = measured(
        [TUNED, METHODS["torchfast exact"]], "gpt-small", settings, {"torchfast exact": 1.0}
    )
    assert slowed["torchfast exact"]["trains"]
    # Other work on the machine only ever adds time, so the best bursts tell.
    before, after = (
        min(result["torchfast exact"]["best_ms"]) / min(result["tuned"]["best_ms"])
        for result in (found, slowed)
    )
    assert after > 1.3 * before  # twice, but for the noise of two busy cores


def test_ctrl_c_leaves_no_process(tmp_path):
    command = [sys.executable, "benchmarks/yardstick.py", "--workloads", "mlp", "--rounds", "10000"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.Popen(
        [*command, "--device", "cpu", "--methods", "tuned", "naive"],
        cwd=results.ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    children = f"/proc/{run.pid}/task/{run.pid}/children"
    deadline = time.monotonic() + 120
    started = []
    while len(started) < 2:  # the tracker of multiprocessing, and a method in its start
        assert time.monotonic() < deadline
        time.sleep(0.1)
        with open(children) as file:
            started = [int(pid) for pid in file.read().split()]
    status = None
    while status is None:  # Python loses an interrupt that comes while it forks
        assert time.monotonic() < deadline
        run.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            status = run.wait(20)
    assert status != 0
    deadline = time.monotonic() + 20
    while alive := [pid for pid in started if _is_running(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# The program, but for its processes, which are forks. They are spawned where Ctrl-C ends them.
PROGRAM = """
import multiprocessing
from contextlib import suppress
from types import SimpleNamespace
from benchmarks import process, yardstick

process.multiprocessing = SimpleNamespace(get_context=lambda _: multiprocessing.get_context("fork"))
yardstick.main()
"""


def test_a_run_is_taken_up_where_it_ended(tmp_path):
    out = tmp_path / "result.json"
    command = [
        *(PROGRAM, "--device", "cpu", "--size", "smoke"),
        *("--methods", "tuned", "--rounds", "2", "--block-s", "0.01", "--out", str(out)),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TORCHFAST_COMMIT": "abc",
    }

    def run(*arguments, **changes):
        return warm_python.run(
            *command, *arguments, cwd=results.ROOT, env={**environment, **changes}
        )

    assert run("--workloads", "mlp").returncode == 0
    first = json.loads(out.read_text())["workloads"]
    second = run("--workloads", "mlp", "dlrm")
    assert second.returncode == 0, second.stderr
    assert "mlp: measured already" in second.stdout
    both = json.loads(out.read_text())["workloads"]
    assert list(both) == ["mlp", "dlrm"]
    assert both["mlp"] == first["mlp"]
    for changed in (
        run("--workloads", "lstm", "--rounds", "3"),
        run("--workloads", "lstm", "--rounds", "3", "--any-commit"),
        run("--workloads", "lstm", "--slow-down", "naive=0.1"),
        run("--workloads", "lstm", TORCHFAST_COMMIT="another"),
    ):
        assert changed.returncode != 0
        assert "remove the file or write to another" in changed.stderr
    assert json.loads(out.read_text())["workloads"] == both
    more = run("--any-commit", "--workloads", "mlp", "--methods", "naive", TORCHFAST_COMMIT="other")
    assert more.returncode == 0, more.stderr
    whole = json.loads(out.read_text())
    assert [run["commit"] for run in whole["runs"]] == ["abc", "abc", "other"]
    assert whole["workloads"]["dlrm"] == both["dlrm"]
    methods = whole["workloads"]["mlp"]["methods"]
    assert list(methods) == ["naive", "tuned"]
    assert methods["tuned"] == first["mlp"]["methods"]["tuned"]
    assert (methods["tuned"]["run"], methods["naive"]["run"]) == (0, 2)
    again = run("--any-commit", "--again", "--workloads", "mlp", "--methods", "naive")
    assert again.returncode == 0, again.stderr
    anew = json.loads(out.read_text())["workloads"]["mlp"]["methods"]
    assert anew["tuned"] == methods["tuned"]
    assert anew["naive"]["blocks_ms"] != methods["naive"]["blocks_ms"]
    assert (anew["tuned"]["run"], anew["naive"]["run"]) == (0, 3)
    # It was measured beside a reference of its own.
    assert methods["naive"]["reference_blocks_ms"] != methods["tuned"]["blocks_ms"]


@pytest.mark.parametrize(("turns", "kept"), [(13, True), (6, False)])
def test_a_run_that_is_ended_in_the_middle_keeps_what_has_had_its_rounds(
    turns, kept, tmp_path, monkeypatch
):
    """Of two methods: after 13 turns each has had six, and after 6 turns three, too few."""
    out = tmp_path / "result.json"
    words = ["yardstick.py", "--device", "cpu", "--size", "smoke", "--workloads", "mlp"]
    words += ["--methods", "naive", "tuned", "--rounds", "100", "--block-s", "0.01"]
    monkeypatch.setattr("sys.argv", [*words, "--out", str(out)])
    monkeypatch.setattr(yardstick, "steady_layout", lambda: None)
    monkeypatch.setattr(yardstick.signal, "signal", lambda *_: None)
    turn, done = Measurement._turn, []

    def ended(self, process, block):
        if block.bursts > 1:  # neither a probe nor a look at what is free
            done.append(process)
            if len(done) > turns:
                sys.exit(128 + signal.SIGTERM)
        return turn(self, process, block)

    monkeypatch.setattr(Measurement, "_turn", ended)
    with pytest.raises(SystemExit) as error:
        yardstick.main()
    assert error.value.code == 128 + signal.SIGTERM
    assert not any(process.alive for process in done)
    assert out.exists() is kept
    if kept:
        methods = json.loads(out.read_text())["workloads"]["mlp"]["methods"]
        assert {name: len(m["best_ms"]) for name, m in methods.items()} == {"naive": 6, "tuned": 6}
        assert methods["naive"]["reference_blocks_ms"] == methods["tuned"]["blocks_ms"]
        assert methods["naive"]["trains"]
        assert methods["naive"]["num_kernels"] is None


# -- Parts -----------------------------------------------------------------------------------------


def test_memory_that_is_full_measures_in_groups(monkeypatch):
    """Methods on a device that holds a few of them at their peaks."""
    measurement = Measurement(workload("mlp", "smoke"), QUICK, {})
    groups = []

    class Fake:
        def __init__(self, method):
            self.method, self.alive = method, True

        def stop(self):
            self.alive = False

    def free():
        # What keeps graphs keeps its peak; the others hold a little between their turns.
        held = sum(10 if "compile" in f.method.name else 2 for f in live if f.alive)
        return 45 - held

    def warm_up(processes):
        assert free() - 10 * len(processes) >= 0, "no room to start in"
        live.extend(processes)
        measurement._peak_bytes, measurement._free_bytes = 10, free()
        return processes

    def turn(process, block):
        assert free() - 8 >= 0, "no room for a turn"
        measurement._free_bytes = free()
        return {"ms": 1.0}

    live = []
    monkeypatch.setattr(measurement, "spawn", lambda methods: [Fake(m) for m in methods])
    monkeypatch.setattr(measurement, "warm_up", warm_up)
    monkeypatch.setattr(measurement, "_turn", turn)

    def measure(group):
        for fake in group:
            turn(fake, None)
        groups.append([fake.method for fake in group])

    monkeypatch.setattr(measurement, "measure", measure)
    monkeypatch.setattr(measurement, "result", dict)
    nine = [method for name, method in METHODS.items() if "hand" not in name][:9]
    measurement.run(nine)
    assert all(group[0] is TUNED and len(group) >= 2 for group in groups)
    others = [method for group in groups for method in group[1:]]
    fitting = [m for m in nine if m is not TUNED and m.name not in measurement.figures]
    assert others == fitting
    assert len(groups) > 1
