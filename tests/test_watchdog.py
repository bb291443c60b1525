"""Watchdog: says once where every rank stands, costs a step nothing, and leaves no thread."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import ranks
from torchfast import Watchdog, phase
from torchfast._core import phases

TIMEOUT_S = 1.0


def until(condition, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def threads():
    return [thread for thread in threading.enumerate() if "watchdog" in thread.name]


def test_one_process(caplog):
    def stand_still():
        with phase("update"):
            until(lambda: "stood still" in caplog.text)
            time.sleep(3 * TIMEOUT_S)
            assert caplog.text.count("stood still") == 1  # once for each standstill

    with Watchdog(timeout_s=TIMEOUT_S, num_steps=lambda: 41) as watchdog:
        stand_still()
        text = caplog.text
        assert "rank 0: after step 41, in the phase 'update' for" in text
        assert "test_watchdog.py:" in text
        assert "(until)" in text or "(stand_still)" in text
        until(lambda: caplog.text.count("stood still") == 2)
        assert "in no phase of a step" in caplog.text
    assert threads() == []
    assert phases._watchers == {}
    watchdog.close()


def test_a_run_that_goes_on_is_not_spoken_of(caplog):
    with Watchdog(timeout_s=1.0):
        start = time.monotonic()
        while time.monotonic() - start < 2.5:
            with phase("forward"):
                time.sleep(0.01)
    assert caplog.text == ""


def test_one_around_another_hears_the_same_phases(caplog):
    """As a user's around fit, which makes its own on many ranks."""

    def go_on(until_s):
        start = time.monotonic()
        while time.monotonic() - start < until_s:
            with phase("forward"):
                time.sleep(0.01)

    with Watchdog(timeout_s=0.5):
        with Watchdog(timeout_s=0.5):
            go_on(0.8)
        go_on(0.8)
    assert caplog.text == ""
    assert phases._watchers == {}


def test_a_timer_of_the_same_thread_hears_the_same_phases():
    class Timer:
        def __init__(self):
            self.heard = []

        def begin(self, name):
            self.heard.append(name)
            return name

        def end(self, begun):
            self.heard.append(f"/{begun}")

    timer = Timer()
    with Watchdog():
        phases.start_recording(timer)
        with phase("forward"), phase("inner"):
            pass
        phases.stop_recording(timer)
    assert timer.heard == ["forward", "inner", "/inner", "/forward"]
    with phase("forward") as heard:
        assert not heard


def test_every_rank_says_where_all_of_them_stand(caplog):
    def load_a_batch():
        with phase("data_wait"):
            time.sleep(4 * TIMEOUT_S)

    def work(rank):
        with Watchdog(timeout_s=TIMEOUT_S, num_steps=lambda: 7 + rank):
            if rank == 1:
                load_a_batch()
            with phase("backward"):
                dist.all_reduce(torch.ones(1))
            until(lambda: "stood still" in caplog.text)
            dist.barrier()
        return caplog.text

    for text in ranks.run(work):
        assert "rank 0: after step 7, in the phase 'backward' for" in text
        assert "rank 1: after step 8, in the phase 'data_wait' for" in text
        assert "(load_a_batch)" in text
        assert "all_reduce" in text or "distributed_c10d" in text


def is_dead(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"  # nobody has waited for it yet
    except FileNotFoundError:
        return True


def test_a_rank_that_is_dead(caplog):
    def work(rank):
        pids = [None, None]
        dist.all_gather_object(pids, os.getpid())
        with Watchdog(timeout_s=TIMEOUT_S):
            if rank == 1:
                time.sleep(TIMEOUT_S)  # so that it has left word
                os.kill(os.getpid(), signal.SIGKILL)
            while not is_dead(pids[1]):  # a standstill before would find it alive
                with phase("forward"):
                    time.sleep(0.01)
            until(lambda: "stood still" in caplog.text)
        return caplog.text

    text, _ = ranks.run(work, ends={1: -signal.SIGKILL})
    assert "rank 1: says nothing any more; before: " in text


def test_bad_arguments(caplog):
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ValueError, match="timeout_s must be > 0"):
        Watchdog(timeout_s=0)
    with pytest.raises(TypeError, match="num_steps must be callable"):
        Watchdog(num_steps=3)
    with pytest.raises(TypeError, match="did you mean 'timeout_s'"):
        Watchdog(timeout=3)
    assert threads() == []
