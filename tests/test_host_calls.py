"""How many of torchfast's own Python functions a steady step calls: what it costs a cold host.

A count says the same on every machine, where a time says something about its other programs. The
bounds are a little above what there is, and far below what it was with a call for each question.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import torchfast
from benchmarks.step_host import trainer_of
from simulated_device import Prompt, simulated
from torchfast.data import stager

OWN = str(Path(torchfast.__file__).parent)
STEPS = 64  # of which few are timed, or looked at otherwise


@pytest.fixture
def trainer():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with trainer_of("smoke", "cpu") as (trainer, batch):
        yield trainer, batch
    torch.set_num_threads(threads)


@pytest.fixture
def device(monkeypatch):
    """A simulated device, which is never late."""
    with simulated(monkeypatch, stager.TOO_SLOW_S) as device:
        device.kind = Prompt
        yield device


def calls_of(work, num_steps):
    """Return how often each function of torchfast is called in a step, by its name."""
    found = Counter()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OWN):
            found[code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return Counter({name: number / num_steps for name, number in found.items()})


def test_a_replayed_step(trainer):
    trainer, batch = trainer

    def steps():
        for _ in range(STEPS):
            trainer.step(batch)

    found = calls_of(steps, STEPS)
    assert found["GraphEngine.replay"] == 1
    assert found.total() <= 43, found.most_common()


@pytest.mark.usefixtures("device")
def test_a_loop_over_a_ring(trainer):
    trainer, batch = trainer
    loader = iter(trainer.prefetch([batch] * (2 * STEPS), reuse=True, background=False))
    for _ in range(STEPS // 2):
        trainer.step(next(loader))

    def steps():
        for _ in range(STEPS):
            trainer.step(next(loader))

    found = calls_of(steps, STEPS)
    assert found["GraphEngine.replay"] == found["Ring.stage"] == 1
    assert found.total() <= 85, found.most_common()


@pytest.mark.usefixtures("device")
def test_fit_adds_few(trainer):
    trainer, batch = trainer
    loader = trainer.prefetch([batch] * 1000, reuse=True, background=False)

    def of_fit(steps):
        return calls_of(lambda: trainer.fit(loader, steps=steps, log_every=1000, progress=False), 1)

    of_fit(STEPS)
    # What a call of fit does once is in both.
    found = of_fit(4 * STEPS)
    found.subtract(of_fit(STEPS))
    per_step = {name: number / (3 * STEPS) for name, number in found.items()}
    assert per_step["GraphEngine.replay"] == 1
    assert sum(per_step.values()) <= 120, sorted(per_step.items(), key=lambda p: -p[1])
