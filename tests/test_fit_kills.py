"""A fit that is killed, wherever it is, leaves a checkpoint that the same command goes on from."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

import warm_python
from faults import fit_job
from torchfast import CheckpointManager
from torchfast._core.compare import differences

JOB = Path(fit_job.__file__)


class Job:
    """The job as a process of its own, and the steps that it told of."""

    def __init__(self, *arguments):
        self.steps = []
        self.process = warm_python.Process(JOB, *arguments)
        self.lines = []

    def read_until(self, step):
        while not self.steps or self.steps[-1] < step:
            assert self._read_line(), self.lines

    def end(self):
        """Read what it still had to say; return its exit code."""
        while self._read_line():
            pass
        self.process.stdout.close()
        return self.process.wait(timeout=60)

    def _read_line(self):
        line = self.process.stdout.readline()
        self.lines.append(line)
        if line.startswith("step "):
            self.steps.append(int(line.split()[1]))
        return line


def expected_state():
    trainer, loader, options = fit_job.job()
    trainer.fit(loader, **options)
    return trainer.state_dict()


def finished(folder, output):
    """Run the same command to its end; return the steps that it did."""
    job = Job(folder, output)
    assert job.end() == 0, job.lines
    return job.steps


def test_a_run_that_is_killed_again_and_again_ends_where_it_would_have_ended(tmp_path):
    lengths = random.Random(3)
    run, output = tmp_path / "run", tmp_path / "state.pt"
    last = 0
    for _ in range(3):
        job = Job(run)
        job.read_until(last + lengths.randrange(2, 7))
        job.process.kill()
        assert job.end() == -signal.SIGKILL
        # It went on at most one checkpoint, and one that was being written, before the kill.
        assert last - 6 < job.steps[0] <= last + 1
        last = job.steps[-1]
    assert last - 6 < finished(run, output)[0] <= last + 1
    found = torch.load(output, weights_only=True)
    assert differences(found, expected_state()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_saves_the_last_step_and_says_so_by_its_exit_code(tmp_path, number):
    run, output = tmp_path / "run", tmp_path / "state.pt"
    job = Job(run)
    job.read_until(7)
    job.process.send_signal(number)
    assert job.end() == 128 + number, job.lines
    last = job.steps[-1]
    with CheckpointManager(run) as manager:
        assert manager.steps()[-1] == last
        manager.verify()
    assert finished(run, output) == list(range(last + 1, fit_job.STEPS + 1))
    found = torch.load(output, weights_only=True)
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


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (signal.SIGTERM, signal.SIGTERM, -signal.SIGTERM),
        # A scheduler's warning, and then its word: that is not asking twice.
        (signal.SIGUSR1, signal.SIGTERM, 128 + signal.SIGTERM),
    ],
)
def test_a_second_signal_ends_it_at_once_and_what_was_saved_is_whole(tmp_path, first, second, code):
    run, output = tmp_path / "run", tmp_path / "state.pt"
    job = Job(run)
    job.read_until(8)
    os.kill(job.process.pid, signal.SIGSTOP)  # so that both arrive within one step
    job.process.send_signal(first)
    os.kill(job.process.pid, signal.SIGCONT)
    job.process.send_signal(second)
    assert job.end() in (code, 128 + first)  # the first may have been heard alone
    with CheckpointManager(run) as manager:
        assert manager.steps()[-1] >= 3
        manager.verify()
    finished(run, output)
    found = torch.load(output, weights_only=True)
    assert differences(found, expected_state()) == []


def test_a_process_that_was_forked_can_be_terminated():
    trainer, loader, options = fit_job.job()
    codes = []

    def fork(event):
        if event.kind == "step" and not codes:
            context = multiprocessing.get_context("fork")
            runs = context.Event()
            # In short sleeps: Python runs no handler for a signal that came just before a long one.
            child = context.Process(
                target=lambda: (runs.set(), [time.sleep(0.05) for _ in range(1200)])
            )
            child.start()
            assert runs.wait(20)
            child.terminate()
            child.join(20)
            codes.append(child.exitcode)

    assert trainer.fit(loader, callbacks=[fork], **options).stopped_by == "steps"
    assert codes == [-signal.SIGTERM]
