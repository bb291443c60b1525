"""Captures that run out of memory: an account, nothing left alive, and training that goes on."""

from __future__ import annotations

import gc
import weakref
from queue import SimpleQueue

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from models import mean_loss
from planting import TEXT, BackwardPlant, batch_of, weights
from torchfast import (
    CaptureError,
    CUDAGraphOptions,
    OutOfMemoryOptions,
    Plan,
    Trainer,
)

pytestmark = pytest.mark.usefixtures("tape")


class InCapture:
    """Has no room while a step is recorded."""

    def __init__(self, where="forward", error=torch.OutOfMemoryError):
        self.where, self.error = where, error
        self.seen = SimpleQueue()  # into which nobody looks: an attribute would be put back

    def check(self, size, where):
        if where == self.where and _get_current_dispatch_mode() is not None:
            raise self.error(TEXT)


class Net(nn.Module):
    def __init__(self, plant):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.plant = plant

    def forward(self, x):
        hidden = self.first(x)
        if _get_current_dispatch_mode() is not None:
            self.plant.seen.put(weakref.ref(hidden))
        out = BackwardPlant.apply(self.second(hidden), self.plant)
        self.plant.check(len(x), "forward")
        return out


def made(plant, *, on_failure="eager", **options):
    torch.manual_seed(0)
    net = Net(plant)
    plan = Plan(cuda_graph=CUDAGraphOptions(on_failure=on_failure, check=False), **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return Trainer(net, optimizer, mean_loss, plan)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_capture_has_an_account_and_the_step_runs_eagerly(where, caplog):
    trainer, twin = made(InCapture(where)), made(InCapture("never"))
    for number in range(6):
        for each in (trainer, twin):
            each.step(batch_of(4, seed=number))
    account = trainer._step.memory.last_account
    assert account.stage == "capture"
    assert "test_out_of_memory_in_a_capture.py" in account.line or "planting.py" in account.line
    assert account.requested_bytes == 2 * 2**30
    counters = trainer.report().counters
    assert counters["captures_out_of_memory"] == 1
    assert counters["graphs"] == 0
    assert "out_of_memory" not in counters  # no step failed
    told = [r.getMessage() for r in caplog.records if r.name == "torchfast.memory.out_of_memory"]
    assert told == [str(account)]
    assert "cpu is out of memory in the capture at " in told[0]
    assert twin.report().counters["replays"] >= 1
    assert "captures_out_of_memory" not in twin.report().counters
    for name, value in weights(trainer).items():
        assert torch.equal(value, weights(twin)[name])


def test_each_shape_is_counted_and_the_first_is_told(caplog):
    trainer = made(InCapture())
    for size in (4, 4, 4, 4, 6, 6, 6, 6):
        trainer.step(batch_of(size))
    assert trainer.report().counters["captures_out_of_memory"] == 2
    told = [r for r in caplog.records if r.name == "torchfast.memory.out_of_memory"]
    assert len(told) == 1


@pytest.mark.parametrize("action", ["raise", "split"])
def test_a_capture_that_raises_has_it_too_and_keeps_nothing_alive(action):
    plant = InCapture()
    trainer = made(plant, on_failure="raise", out_of_memory=OutOfMemoryOptions(action=action))
    for number in range(3):
        trainer.step(batch_of(4, seed=number))
    with pytest.raises(CaptureError, match="memory ran out") as caught:
        trainer.step(batch_of(4, seed=3))
    assert caught.value.account.stage == "capture"
    assert str(caught.value.account) in caught.value.__notes__
    gc.collect()
    assert plant.seen.get()() is None  # though the error lives
    trainer.step(batch_of(4, seed=3))  # as it is from now on
    assert trainer.num_steps == 4


def test_another_failure_of_a_capture_has_none(caplog):
    trainer = made(InCapture(error=ValueError), on_failure="raise")
    for number in range(3):
        trainer.step(batch_of(4, seed=number))
    with pytest.raises(CaptureError) as caught:
        trainer.step(batch_of(4, seed=3))
    assert caught.value.account is None
    assert trainer._step.memory.last_account is None
    assert "captures_out_of_memory" not in trainer.report().counters
    assert "out of memory" not in caplog.text


def test_what_was_being_handled_before_is_not_this_captures():
    trainer = made(InCapture(error=ValueError))
    try:
        raise torch.OutOfMemoryError("of something else")
    except torch.OutOfMemoryError:
        for number in range(5):
            trainer.step(batch_of(4, seed=number))
    assert trainer.report().counters["graphs"] == 0
    assert trainer._step.memory.last_account is None
