"""Signals: a run ends between two steps, and whoever had the handlers gets them back.

What they do is seen from outside as well: a script of its own trains until a signal reaches it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import torchfast
from fitting import BATCHES, EmptyFrom, evaluations, fit, handlers, training
from torchfast import EmptyEpochError
from torchfast.reporting import read_jsonl

# --- signals in this process --------------------------------------------------------------------


def send_at(step, number=signal.SIGTERM):
    def send(event):
        if (event.kind, event.num_steps) == ("step", step):
            os.kill(os.getpid(), number)

    return send


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_the_step(number):
    before = handlers()
    kinds = []
    result = fit(
        epochs=5,
        evaluate=BATCHES,
        callbacks=[send_at(6, number), lambda e: kinds.append(e.kind)],
    )
    assert (result.num_steps, result.num_epochs) == (6, 1)
    assert result.stopped_by == number.name
    assert kinds[-1] == "end"
    assert [record["step"] for record in training(result)] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in evaluations(result)] == [4]
    assert handlers() == before


@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
def test_a_warning_and_the_word_are_not_asking_twice_in_either_order(tmp_path, order):
    """Two threads of a process may take signals that come together in the other order."""
    numbers = [[signal.SIGTERM, signal.SIGUSR1][index] for index in order]
    before = handlers()

    def both(event):
        if (event.kind, event.num_steps) == ("step", 6):
            for number in numbers:
                os.kill(os.getpid(), number)

    result = fit(epochs=5, callbacks=[both], checkpoint=tmp_path)
    assert (result.num_steps, result.stopped_by) == (6, "SIGTERM")
    assert handlers() == before


def test_a_signal_in_the_last_step_of_an_epoch_starts_no_evaluation():
    evaluated = []
    result = fit(
        epochs=5,
        evaluate=lambda model: evaluated.append(1) or {"loss": 1.0},
        callbacks=[send_at(4)],
    )
    assert (result.num_steps, result.stopped_by) == (4, "SIGTERM")
    assert evaluated == []


def test_handlers_are_ours_only_while_fit_runs():
    def mine(number, frame):
        raise AssertionError

    before = signal.signal(signal.SIGTERM, mine)
    try:
        seen = []
        fit(steps=1, callbacks=[lambda e: seen.append(signal.getsignal(signal.SIGTERM))])
        assert mine not in seen
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handlers_are_put_back_after_an_error():
    before = handlers()
    with pytest.raises(EmptyEpochError):
        fit(EmptyFrom(1), epochs=2)
    assert handlers() == before


def test_a_signal_in_the_last_evaluation_is_told_of():
    def evaluate(model):
        os.kill(os.getpid(), signal.SIGTERM)
        return {"loss": 1.0}

    assert fit(steps=1, evaluate=evaluate).stopped_by == "SIGTERM"


class Batches:
    """A loader that does what a generator function does."""

    def __init__(self, load):
        self.load = load

    def __iter__(self):
        return self.load()


def test_an_evaluation_cut_short_by_a_signal_is_not_recorded():
    def load():
        yield BATCHES[0]
        os.kill(os.getpid(), signal.SIGTERM)
        yield from BATCHES

    result = fit(steps=4, evaluate=Batches(load), evaluate_every=2)
    assert result.stopped_by == "SIGTERM"
    assert evaluations(result) == []


def test_a_loader_of_evaluation_that_dies_of_the_signal_is_no_error():
    def load():
        yield BATCHES[0]
        os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly")

    assert fit(steps=4, evaluate=Batches(load), evaluate_every=2).stopped_by == "SIGINT"


def test_a_training_loader_that_dies_of_the_signal_is_no_error(caplog):
    def load():
        yield BATCHES[0]
        os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly")

    result = fit(load(), steps=4)
    assert (result.num_steps, result.stopped_by) == (1, "SIGINT")
    assert "the loader failed while stopping on SIGINT" in caplog.text


def test_fit_in_a_thread_works_without_handlers():
    before = handlers()
    seen, results = [], []

    def run():
        results.append(fit(steps=3, callbacks=[lambda e: seen.append(handlers())]))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert results[0].num_steps == 3
    assert set(seen) == {before}


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        seen = []
        result = fit(
            steps=2,
            callbacks=[lambda event: seen.append(os.kill(os.getpid(), signal.SIGINT))],
        )
        assert (result.num_steps, result.stopped_by) == (2, "steps")
        assert seen
    finally:
        signal.signal(signal.SIGINT, before)


# --- signals from outside -----------------------------------------------------------------------

# Imports once, then forks a process for each line it reads: a mode and a folder. Each process leads
# a group of its own, as a job of a shell does, and ends as a script does, not by os._exit.
SCRIPT = """
import json, os, signal, sys, time
# A shell may have started us with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchfast import Trainer

torch.set_num_threads(1)
optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
optimizer.zero_grad(), optimizer.step()  # the first optimizer imports much, once for all
for line in iter(sys.stdin.readline, ""):
    mode, folder = line.split()
    pid = os.fork()
    if pid == 0:
        break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()

os.setsid()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for number, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)

class Endless(IterableDataset):
    def __iter__(self):
        while True:
            time.sleep(0.005)
            yield torch.ones(2, 3)

def blocking():
    for number in range(1000):
        if number == 3:
            print("blocked", flush=True)
            time.sleep(60)
        yield torch.ones(2, 3)

loader = {
    "plain": Endless(),
    "workers": DataLoader(Endless(), batch_size=None, num_workers=2),
    "persistent": DataLoader(Endless(), batch_size=None, num_workers=2, persistent_workers=True),
    "blocking": blocking(),
}[mode]
if mode == "persistent":
    iter(loader)  # its workers start now, before fit has set its handlers
model = torch.nn.Linear(3, 1)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).sum())
before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

def started(event):
    if event.kind == "step" and event.num_steps == 2 and mode != "blocking":
        pids = open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read()
        print("started", pids, flush=True)

result = trainer.fit(
    loader,
    steps=10**6,
    log_every=1,
    log_path=f"{folder}/log.jsonl",
    progress="off",
    callbacks=[started],
)
print(json.dumps({
    "stopped_by": result.stopped_by,
    "num_steps": result.num_steps,
    "trained": trainer.num_steps,
    "restored": before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)),
}), flush=True)
"""


class Job:
    """A process of the script, up to the line that says it is ready."""

    def __init__(self, spawner, folder, mode):
        self.spawner, self.folder = spawner, folder
        print(mode, folder, file=spawner.stdin, flush=True)
        self.pid = int(spawner.stdout.readline())
        # Whatever goes wrong, nothing of it outlives the test.
        self.watchdog = threading.Timer(40, os.killpg, (self.pid, signal.SIGKILL))
        self.watchdog.start()
        out = folder / "out"
        while not (out.exists() and out.read_text().endswith("\n")) and self.watchdog.is_alive():
            time.sleep(0.01)
        self.ready = out.read_text().split()

    def end(self):
        """Wait for the end; return the exit code, the last line it printed and its stderr."""
        try:
            code = int(self.spawner.stdout.readline())
        finally:
            self.watchdog.cancel()
        out = (self.folder / "out").read_text().splitlines()
        return code, out[-1], (self.folder / "err").read_text()

    def logged(self):
        return [record["step"] for record in read_jsonl(self.folder / "log.jsonl")]


@pytest.fixture(scope="module")
def spawner():
    root = str(Path(torchfast.__file__).parents[1])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    ) as process:
        yield process
        process.stdin.close()


def check_clean_end(job, name):
    code, last, err = job.end()
    assert code == 0, err
    told = json.loads(last)
    assert told["stopped_by"] == name
    assert told["restored"] is True
    assert told["num_steps"] == told["trained"] >= 2
    assert job.logged() == list(range(1, told["num_steps"] + 1))
    return err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_from_outside_ends_the_run_between_steps(spawner, tmp_path, number):
    job = Job(spawner, tmp_path, "plain")
    assert job.ready == ["started"]
    os.kill(job.pid, number)
    assert check_clean_end(job, number.name) == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_acts_at_once(spawner, tmp_path, number):
    job = Job(spawner, tmp_path, "blocking")
    assert job.ready == ["blocked"]
    os.kill(job.pid, number)
    time.sleep(0.2)
    assert Path(f"/proc/{job.pid}/status").read_text().split("State:")[1].split()[0] == "S"
    begun = time.monotonic()
    os.kill(job.pid, number)
    code, last, err = job.end()
    assert time.monotonic() - begun < 20
    # Python ends by an uncaught KeyboardInterrupt's signal, unless a hook ran code after it; then
    # it ends by 1.
    assert code in ({-number, 1} if number == signal.SIGINT else {-number}), err
    assert last == "blocked"
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    assert job.logged() == [1, 2, 3]


@pytest.mark.parametrize("mode", ["workers", "persistent"])
def test_ctrl_c_reaches_workers_too_and_leaves_no_orphan(spawner, tmp_path, mode):
    job = Job(spawner, tmp_path, mode)
    started, *workers = job.ready
    assert (started, len(workers)) == ("started", 2)
    os.killpg(job.pid, signal.SIGINT)
    check_clean_end(job, "SIGINT")
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
