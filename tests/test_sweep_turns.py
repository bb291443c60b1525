"""Models of a sweep side by side: whoever times is alone, and waiting costs nobody its limit."""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from benchmarks import preloaded, sweep_model, sweep_processes
from benchmarks import sweep as runner
from benchmarks.outside_models import OutsideModel
from benchmarks.sweep_processes import Order
from benchmarks.turns import Turns
from test_sweep import GOOD, ROOT, batch, build, crash, loss_fn


def noting_loss(folder, name, model, batch):
    """Note when it is called, and take long enough for others to get in between."""
    begun = time.monotonic()
    time.sleep(0.002)
    with Path(folder, name).open("a") as file:
        file.write(f"{begun} {time.monotonic()}\n")
    return loss_fn(model, batch)


def noted(folder, name):
    lines = Path(folder, name).read_text().splitlines()
    return [tuple(map(float, line.split())) for line in lines]


@pytest.fixture
def three(tmp_path):
    return {
        name: OutsideModel(build, batch, partial(noting_loss, str(tmp_path), name))
        for name in ("a", "b", "c")
    }


def timings_of(name, records, folder):
    """Return from when to when a model was timed: in its last calls, two or more a pair."""
    calls = noted(folder, name)
    alone = calls[-2 * len(records[name]["pairs_ms"]) :]
    return alone[0][0], alone[-1][1]


def test_several_run_at_a_time_and_who_times_is_alone(three, tmp_path):
    records = runner.sweep(three, "exact", jobs=3)
    assert list(records) == list(three)
    assert all(record["status"] == "ran" for record in records.values())
    spans = {name: (noted(tmp_path, name)[0][0], noted(tmp_path, name)[-1][1]) for name in three}
    second, _ = sorted(spans.values())[1]
    assert second < min(end for _, end in spans.values()), "they are not at work side by side"
    for name in three:
        begun, ended = timings_of(name, records, tmp_path)
        for other in set(three) - {name}:
            beside = [call for call in noted(tmp_path, other) if begun < call[0] < ended]
            assert not beside, f"{other} worked while {name} was timed"


def test_without_turns_others_work_beside_a_timing(three, tmp_path, monkeypatch):
    """The test above can fail."""
    monkeypatch.setattr(sweep_processes, "_send_record", send_without_turns)
    records = runner.sweep(three, "exact", jobs=3)
    found = 0
    for name in three:
        begun, ended = timings_of(name, records, tmp_path)
        for other in set(three) - {name}:
            found += sum(begun < call[0] < ended for call in noted(tmp_path, other))
    assert found > 0


def send_without_turns(sender, outside, order, folder):
    with sender:
        for part in sweep_model.measure(outside, order.plan, order.device, NoTurns()):
            sender.send(part)
        sender.send({"status": "ran"})


class NoTurns:
    def beside_others(self):
        return nullcontext()

    alone = beside_others


def test_what_a_model_waits_for_others_does_not_count_against_its_limit(tmp_path):
    held = threading.Event()
    turns, told = Turns(tmp_path / "turns"), []

    def hold():
        with turns.alone():
            held.set()
            time.sleep(0.3)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    with Turns(tmp_path / "turns", told.append).beside_others():
        assert told == [True, False]
        with Turns(tmp_path / "turns", told.append).beside_others():
            assert told == [True, False]  # two at a time
    thread.join()

    run = sweep_processes.Run(multiprocessing, "toy", GOOD, Order("exact", "cpu", 0.2), tmp_path)
    assert 0 < run.seconds_left() <= 0.2
    run._take(True)
    time.sleep(0.3)
    run.look()
    assert (run.is_done, run.seconds_left()) == (False, math.inf)
    assert run.own_s < 0.2
    run._take(False)
    assert 0 < run.seconds_left() <= 0.2
    time.sleep(0.3)
    run.look()
    assert run.record["reason"] == "not done in 0.2 s"
    run.stop()


def test_one_that_fails_leaves_the_others_their_turns():
    models = {"bad": OutsideModel(crash, batch, loss_fn), "good": GOOD, "again": GOOD}
    records = runner.sweep(models, "exact", jobs=2)
    assert [record["status"] for record in records.values()] == ["failed", "ran", "ran"]


def test_a_server_whose_forks_cannot_use_the_device_says_that_it_is_slow(capsys):
    context = sweep_processes.start_server("no such device")
    assert context.get_start_method() == "spawn"
    out = capsys.readouterr().out
    assert out.startswith("slow: a fork could not use no such device")
    assert out.count("slow") == 1


def test_what_is_imported_beforehand_leaves_torchao_alone():
    script = (
        "import sys; from benchmarks import preloaded;"
        "print('transformers.modeling_utils' in sys.modules, 'torchao' in sys.modules);"
        "import importlib.util; print(importlib.util.find_spec('torchao') is not None)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    has_transformers = importlib.util.find_spec("transformers") is not None
    has_torchao = importlib.util.find_spec("torchao") is not None
    assert answer.stdout.split() == [str(has_transformers), "False", str(has_torchao)]


def test_a_package_is_hidden_for_a_moment_only():
    assert "cmd" not in sys.modules or sys.modules.pop("cmd")
    with preloaded.hidden("cmd"):
        assert importlib.util.find_spec("cmd") is None
    assert importlib.util.find_spec("cmd") is not None
