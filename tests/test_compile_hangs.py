"""A compiler that hangs is ended, in time and without a trace."""

from __future__ import annotations

import gc
import inspect
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
from torch import nn

from failing_compilers import ROWS, Backend, Block, Broken, assert_as_eager, dynamo_left_clean, told
from torchfast.compiler import CompiledModule
from torchfast.compiler.timeout import CallTimeoutError, call_within


@pytest.fixture(autouse=True)
def clean_dynamo():
    with dynamo_left_clean():
        yield


def spins():
    while True:
        pass


def waits():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def swallows():
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        try:
            time.sleep(0.1)
        except BaseException:
            continue
    time.sleep(60)


def runs_a_process():
    subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"], check=True)


HANGS = [spins, waits, swallows, runs_a_process, lambda: time.sleep(60)]
# What is raised at any line may be lost in a destructor; a second later it comes again.
LOST = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@LOST
@pytest.mark.parametrize("hang", HANGS, ids=["spin", "lock", "swallow", "process", "sleep"])
def test_a_compile_that_hangs_ends_in_the_main_thread(hang, caplog):
    model = Block()
    alarm = signal.getitimer(signal.ITIMER_REAL)
    backend = Backend(hang)
    with CompiledModule(model, backend=backend, timeout_s=0.5) as handle:
        start = time.monotonic()
        assert_as_eager(model, handle, calls=2)
        assert time.monotonic() - start < 30
        assert "compiling took longer than timeout_s=0.5" in handle.status[""]
        assert backend.number == 1
        assert len(told(caplog)) == 1
        assert "regions='blocks'" in told(caplog)[0]
    # The alarm of others, pytest-timeout's here, goes on.
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (alarm[0] > 0)


@LOST
def test_a_limit_around_a_compile_is_not_told_of_as_its_own(caplog):
    """As that of a search: the region was called too slow to compile within a longer limit."""
    model = Block()
    backend = Backend(lambda: time.sleep(60), at=lambda number: number == 1)
    with CompiledModule(model, backend=backend, timeout_s=100) as handle:
        with pytest.raises(CallTimeoutError):
            call_within(0.5, model, ROWS)
        assert told(caplog) == []
        assert "timeout_s" not in handle.status[""]
        model(ROWS)
        assert handle.status[""] == "compiled"


@LOST
def test_a_compile_that_hangs_ends_in_another_thread():
    model = Block()
    with CompiledModule(model, backend=Backend(spins), timeout_s=0.5) as handle:
        thread = threading.Thread(target=assert_as_eager, args=(model, handle))
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        assert "compiling took longer" in handle.status[""]


def test_the_limit_is_for_all_that_one_call_compiles():
    model = Broken()
    backend = Backend(lambda: time.sleep(0.7))
    with CompiledModule(model, backend=backend, timeout_s=1.2) as handle:
        assert_as_eager(model, handle)
        assert "compiling took longer" in handle.status[""]


def test_a_slow_forward_is_no_slow_compile():
    class Slow(nn.Module):
        @torch.compiler.disable
        def wait(self):
            time.sleep(1.2)

        def forward(self, x):
            y = x.sin()
            self.wait()
            return y * 2

    model = Slow()
    with CompiledModule(model, backend="eager", timeout_s=1.0) as handle:
        model(ROWS)
        assert handle.status == {"": "compiled"}


def test_a_call_within_its_limit_returns_and_its_errors_pass():
    assert call_within(5.0, max, 1, 2) == 2
    with pytest.raises(ZeroDivisionError):
        call_within(5.0, lambda: 1 / 0)
    with pytest.raises(CallTimeoutError):
        call_within(0.05, time.sleep, 20)
    with pytest.raises(CallTimeoutError):
        call_within(0.0, max, 1, 2)


def test_limits_within_limits():
    def inner():
        with pytest.raises(CallTimeoutError):
            call_within(0.05, time.sleep, 20)
        return "inner ended"

    assert call_within(20.0, inner) == "inner ended"
    start = time.monotonic()
    with pytest.raises(CallTimeoutError):
        call_within(0.2, call_within, 20.0, time.sleep, 30)
    assert time.monotonic() - start < 10


def test_a_signal_that_is_taken_is_left_alone():
    seen = []
    signal.signal(signal.SIGRTMIN, lambda number, frame: seen.append(number))
    try:
        with pytest.raises(CallTimeoutError):
            call_within(0.05, time.sleep, 20)
    finally:
        signal.signal(signal.SIGRTMIN, signal.SIG_DFL)
    assert seen == []


class Calls:
    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        self.function(*args)


@pytest.mark.parametrize(
    ("in_a_thread", "of"),
    [(False, lambda f: f), (True, lambda f: f), (False, Calls), (False, partial)],
)
def test_what_the_garbage_collector_calls_is_left_to_end(in_a_thread, of):
    ends, outcomes = [], []

    def callback(phase, info):
        if phase == "stop":
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                pass
            ends.append(time.monotonic())

    def collects():
        gc.collect()
        for _ in range(2000):
            time.sleep(0.01)  # a thread is interrupted between two lines only, not in a long wait

    def limited():
        with pytest.raises(CallTimeoutError):
            call_within(0.1, collects)
        outcomes.append(time.monotonic())

    gc.disable()  # so that only this one is looked at
    gc.callbacks.append(called := of(callback))
    try:
        if in_a_thread:
            thread = threading.Thread(target=limited)
            thread.start()
            thread.join()
        else:
            limited()
    finally:
        gc.callbacks.remove(called)
        gc.enable()
    assert len(ends) == len(outcomes) == 1
    assert outcomes[0] - ends[0] < 0.9  # and not with the next interruption, a second later


AFTER_LIMITS = """
import importlib.util, sys, threading, time

spec = importlib.util.spec_from_file_location("timeout", sys.argv[1])
timeout = importlib.util.module_from_spec(spec)
spec.loader.exec_module(timeout)
ended = []

def in_a_thread(seconds, function, *args):
    def run():
        try:
            ended.append(timeout.call_within(seconds, function, *args))
        except timeout.CallTimeoutError:
            ended.append("interrupted")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

def long():
    time.sleep(0.2)
    return "never here"

in_a_thread(20.0, max, 1, 2)
in_a_thread(0.02, long)
in_a_thread(20.0, timeout.call_within, 20.0, max, 3, 4)
sys.setprofile(lambda *_: None)
(lambda: None)()  # where an interruption was taken back, Python 3.11 stays here for good
sys.setprofile(None)
print(ended)
"""


def test_no_limit_leaves_the_interpreter_looking_for_what_was_taken_back():
    command = [sys.executable, "-c", AFTER_LIMITS, inspect.getfile(call_within)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[2, 'interrupted', 4]"
