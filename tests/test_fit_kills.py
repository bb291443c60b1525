"""A fit that is killed, wherever it is, leaves a checkpoint that the same command goes on from."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from faults import fit_job
from torchfast import CheckpointManager
from torchfast._core.compare import differences

JOB = Path(fit_job.__file__)
ROOT = JOB.parents[2]


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, str(JOB), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def steps_of(output):
    return [int(line.split()[1]) for line in output.splitlines() if line.startswith("step ")]


def read_until(process, step):
    for line in process.stdout:
        if line == f"step {step}\n":
            return
    raise AssertionError(process.stderr.read())


def expected_state():
    trainer, loader, options = fit_job.job()
    trainer.fit(loader, **options)
    return trainer.state_dict()


def test_a_run_that_is_killed_again_and_again_ends_where_it_would_have_ended(tmp_path):
    lengths = random.Random(3)
    step = 0
    for _ in range(3):
        job = start(tmp_path / "run", tmp_path / "state.pt")
        step += lengths.randrange(5, 12)
        read_until(job, step)
        job.kill()
        job.communicate(timeout=60)
        assert job.returncode == -signal.SIGKILL
    job = start(tmp_path / "run", tmp_path / "state.pt")
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    # It went on, at most one checkpoint and one that was being written before the kill.
    assert step - 6 < min(steps_of(out)) <= step + 1
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert differences(found, expected_state()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_saves_the_last_step_and_says_so_by_its_exit_code(tmp_path, number):
    job = start(tmp_path / "run")
    read_until(job, 7)
    job.send_signal(number)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 128 + number, err
    last = max([7, *steps_of(out)])
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.steps()[-1] == last
        manager.verify()
    again = start(tmp_path / "run", tmp_path / "state.pt")
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert steps_of(out) == list(range(last + 1, fit_job.STEPS + 1))
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert differences(found, expected_state()) == []


PHASES = ("forward", "backward", "update", "scheduler", "evaluation", "save")


@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_in_the_middle_of_a_step_waits_for_its_end(tmp_path, phase, monkeypatch):
    trainer, loader, options = fit_job.job()
    where = {"now": None}

    def kill_in(name, *_):
        if name == phase and trainer.num_steps >= 5 and where["now"] is None:
            where["now"] = trainer.num_steps
            os.kill(os.getpid(), signal.SIGTERM)

    last = trainer.model[-1]
    last.register_forward_hook(lambda *_: kill_in("forward"))
    last.register_full_backward_hook(lambda *_: kill_in("backward"))
    trainer.optimizer.register_step_pre_hook(lambda *_: kill_in("update"))
    kind = type(trainer.lr_scheduler)
    step = kind.step
    monkeypatch.setattr(kind, "step", lambda *a: (kill_in("scheduler"), step(*a)))
    stage = CheckpointManager.save
    monkeypatch.setattr(
        CheckpointManager, "save", lambda *a, **k: (kill_in("save"), stage(*a, **k))[1]
    )

    def evaluate(model):
        kill_in("evaluation")
        return {"loss": 1.0}

    run = {"checkpoint": tmp_path / "run", "checkpoint_every": 3}
    cut = trainer.fit(loader, evaluate=evaluate, evaluate_every=4, **run, **options)
    assert cut.stopped_by == "SIGTERM"
    assert where["now"] is not None
    monkeypatch.undo()
    other, loader, options = fit_job.job()
    seen = []
    other.fit(loader, callbacks=[lambda e: seen.append((e.kind, e.num_steps))], **run, **options)
    assert min(number for kind, number in seen if kind == "step") == cut.num_steps + 1
    assert differences(other.state_dict(), expected_state()) == []


def test_a_second_signal_ends_it_at_once_and_what_was_saved_is_whole(tmp_path):
    job = start(tmp_path / "run")
    read_until(job, 8)
    os.kill(job.pid, signal.SIGSTOP)  # so that both arrive within one step
    job.send_signal(signal.SIGTERM)
    os.kill(job.pid, signal.SIGCONT)
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=60)
    assert job.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM), err
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.steps()[-1] >= 6
        manager.verify()
    again = start(tmp_path / "run", tmp_path / "state.pt")
    _, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert differences(found, expected_state()) == []
