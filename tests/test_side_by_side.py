"""Commands side by side: each on a GPU and cores of its own, in time, and gone when it is over."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import sys
import time

import pytest

from benchmarks import many_gpus, side_by_side
from benchmarks.rank_arms import groups
from benchmarks.side_by_side import Job, read, run, shares

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="cores are shared out on Linux only"
)


def listed(tmp_path, text):
    path = tmp_path / "list.txt"
    path.write_text(text)
    return path


def test_a_list_is_read(tmp_path):
    path = listed(tmp_path, "# all of it\n\n20 one echo 1\n1.5 two echo '2  3'\n")
    one, two = Job(20.0, "one", "echo 1"), Job(1.5, "two", "echo '2  3'")
    assert read(path) == [one, two]
    assert read(path, ["two"]) == [two]


@pytest.mark.parametrize(
    ("text", "only", "message"),
    [
        ("one echo 1\n", None, r"list\.txt:1: expected SECONDS NAME COMMAND, got 'one echo 1'"),
        ("3 one\n", None, "expected SECONDS NAME COMMAND, got '3 one'"),
        ("3 one a\n3 one b\n", None, r"list\.txt:2: a second 'one'; give it a name of its own"),
        ("3 one a\n", ["two"], "has no 'two'; it has one"),
    ],
)
def test_a_bad_list_is_refused(tmp_path, text, only, message):
    with pytest.raises(SystemExit, match=message):
        read(listed(tmp_path, text), only)


def test_each_has_a_gpu_and_cores_of_its_own(tmp_path):
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.sched_getaffinity(0))"
    say = f'PYTHONPATH=. PYTHON -c "{code}"'
    jobs = [Job(1.0, name, f"{say}; sleep 1") for name in ("one", "two", "three")]
    started = time.monotonic()
    queue = run(jobs, 2, 60.0, tmp_path)
    elapsed = time.monotonic() - started
    assert queue.codes == {"one": 0, "two": 0, "three": 0}
    assert queue.left == []
    said = [(tmp_path / f"{job.name}.txt").read_text() for job in jobs]
    assert {text[0] for text in said} == {"0", "1"}
    mine = os.sched_getaffinity(0)
    for text in said:
        own = eval(text[2:])
        assert own <= mine
        assert len(own) == max(1, len(mine) // 2)
    if len(mine) >= 2:
        assert len(set(said[:2])) == 2
    assert elapsed < 3 * 1.0 + 5.0


@pytest.mark.parametrize(
    ("gpu", "card"), [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), (None, "cpu")]
)
def test_files_are_named_by_the_card_of_the_host(tmp_path, monkeypatch, gpu, card):
    monkeypatch.setattr(side_by_side.results, "gpu", lambda: gpu)
    command = "echo results/x_CARD.json results/y_2xCARD.json"
    run([Job(1.0, "one", command)], 1, 60.0, tmp_path)
    said = (tmp_path / "one.txt").read_text()
    assert said == f"results/x_{card}.json results/y_2x{card}.json\n"


def test_what_does_not_fit_into_the_time_is_left(tmp_path, capsys):
    path = listed(tmp_path, "500 long true\n1 short true\n")
    logs = tmp_path / "logs"
    assert (
        side_by_side.main([str(path), "--limit-s", "20", "--logs", str(logs), "--gpus", "1"]) == 1
    )
    said = capsys.readouterr().out
    assert "short" in said
    assert "no time was left for long" in said
    assert [file.name for file in logs.iterdir()] == ["short.txt"]


def test_one_that_fails_is_told_of_and_the_next_runs(tmp_path, capsys):
    path = listed(tmp_path, "1 bad exit 3\n1 good true\n")
    assert side_by_side.main([str(path), "--logs", str(tmp_path / "logs"), "--gpus", "1"]) == 1
    said = capsys.readouterr().out
    assert "bad                          on GPU 0: exit status 3" in said
    assert "good                         on GPU 0: exit status 0" in said


def test_one_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(side_by_side, "GRACE_S", 0.5)
    monkeypatch.setattr(side_by_side, "ENDING_S", 0.5)
    stubborn = "sh -c 'trap \"\" TERM; sleep 50 & echo $!; wait'"
    queue = run([Job(0.2, "stubborn", stubborn), Job(1.0, "next", "true")], 1, 60.0, tmp_path)
    assert queue.codes["next"] == 0
    assert queue.codes["stubborn"] < 0
    child = int((tmp_path / "stubborn.txt").read_text())
    until = time.monotonic() + 5.0
    while is_running(child) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_running(child)


def test_one_that_is_ended_has_time_to_write_what_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr(side_by_side, "GRACE_S", 3.0)
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3));"
        "print('begun', flush=True)\n"
        "try: time.sleep(50)\n"
        "finally: time.sleep(0.5); print('kept', flush=True)"
    )
    (tmp_path / "slow.py").write_text(code)
    # The shell waits for it, and is ended itself.
    jobs = [Job(0.2, "slow", f"true; PYTHON {shlex.quote(str(tmp_path / 'slow.py'))}; true")]
    started = time.monotonic()
    run(jobs, 1, 60.0, tmp_path)
    assert (tmp_path / "slow.txt").read_text().split() == ["begun", "kept"]
    assert time.monotonic() - started < 3.0 + side_by_side.ENDING_S


def test_a_command_that_takes_two_gpus_sees_both(tmp_path, capsys):
    path = listed(tmp_path, "1 one echo $CUDA_VISIBLE_DEVICES\n1 two echo $CUDA_VISIBLE_DEVICES\n")
    words = [str(path), "--logs", str(tmp_path / "logs"), "--gpus", "2", "--each", "2"]
    assert side_by_side.main(words) == 0
    assert "one                          on GPU 0,1: exit status 0" in capsys.readouterr().out
    assert [(tmp_path / "logs" / f"{n}.txt").read_text() for n in ("one", "two")] == ["0,1\n"] * 2
    jobs = [Job(1.0, name, "echo $CUDA_VISIBLE_DEVICES; sleep 0.5") for name in ("a", "b")]
    run(jobs, 4, 60.0, tmp_path, each=2)
    assert {(tmp_path / f"{name}.txt").read_text() for name in ("a", "b")} == {"0,1\n", "2,3\n"}
    with pytest.raises(SystemExit, match="--each 3: there are 2 GPUs; take 1 to 2"):
        side_by_side.main([*words[:-1], "3"])


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_list_of_all_figures_is_what_its_programs_take(gpus, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, *args, **options):
        raise _ParsedError(parse(parser, *args, **options))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    name, file = ("one_gpu.txt", r"\w+_CARD") if gpus == 1 else ("two_gpus.txt", "many_gpus_2xCARD")
    jobs = read(side_by_side.results.ROOT / "benchmarks" / name)
    for job in jobs:
        python, *words = shlex.split(job.command)
        assert python == "PYTHON"
        program = words[1] if words[0] == "-m" else words[0]
        path = program.replace(".", "/") + ".py" if words[0] == "-m" else program
        assert (side_by_side.results.ROOT / path).exists()
        assert re.fullmatch(f"benchmarks/results/{file}.json", words[words.index("--out") + 1])
        assert job.command.count("CARD") == 1
        monkeypatch.setattr("sys.argv", words[1:] if words[0] == "-m" else words)
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        with pytest.raises(_ParsedError) as parsed:  # or it refuses what it does not know
            module.main()
        asked = parsed.value.args[0]
        if path == "benchmarks/many_gpus.py":
            assert asked.limit_s < job.seconds < 600
            assert set(asked.workloads) <= set(many_gpus.WORKLOADS)
            named = [arm.name for group in groups() for arm in group]
            assert all(any(word in name for name in named) for word in asked.arms)
        if path == "benchmarks/yardstick.py":
            assert job.seconds > asked.cold_start_limit_s or len(asked.methods) > 2
        assert job.seconds < 560.0  # or it would never be taken


class _ParsedError(Exception):
    """What a program was called with, before it does anything."""


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_cores_are_shared_out():
    assert shares(list(range(8)), 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert shares([3, 5, 7], 2) == [[3], [5]]
    assert shares([4], 2) == [[4], [4]]
