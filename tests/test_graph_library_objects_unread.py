"""Objects of libraries' of which no number is read, and those that cannot be looked into."""

from __future__ import annotations

import array
import ctypes
import logging
import multiprocessing
import queue
import threading
import types
from functools import partial
from multiprocessing import managers

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from host_values import ADAMW, train
from models import DropoutNet, make_batches, mean_loss
from tape import CPU, Twins, counts, reasons
from torchfast import Trainer
from torchfast._core.compare import differences
from torchfast.graphs import CUDAGraphStep, places
from torchfast.graphs.attributes import Attributes
from torchfast.graphs.value_forms import bytes_of, put_bytes

pytestmark = pytest.mark.usefixtures("tape")

STEPS = 16
EACH_STEP = partial(optim.lr_scheduler.ExponentialLR, gamma=0.9)


class Program:
    """Holds what most training programs hold, and asks none of it for a number that changes."""

    def __init__(self):
        self.loader = DataLoader(TensorDataset(torch.zeros(4, 2)))
        self.optimizer = optim.SGD([torch.ones(1)], lr=0.1)
        self.scheduler = EACH_STEP(optim.SGD([torch.ones(1)], lr=0.1))
        self.logger, self.queue = logging.getLogger(__name__), queue.Queue()
        self.lock, self.generator = threading.Lock(), torch.Generator()
        self.local, self.count = threading.local(), multiprocessing.Value("i", 0)

    def loss_fn(self, model, batch):
        named = {"inputs": batch[0], "targets": batch[1]}
        assert self.loader.batch_size == 1
        assert self.optimizer.param_groups is not self.scheduler
        self.logger.debug("a step of %s", self.loader.dataset)
        with self.lock:
            self.queue.put(1)
        assert self.generator.device.type == "cpu"
        assert self.local is not self.count
        return mean_loss(model, (named.get("inputs"), named.get("targets")))

    def between_steps(self):
        """Change what no code of the step reads."""
        self.scheduler.optimizer.step()
        self.scheduler.step()
        self.local.value = self.scheduler.last_epoch
        iter(self.loader)
        for _ in range(self.queue.qsize()):
            self.queue.get()


def test_what_else_is_held_and_not_asked_for_numbers_is_in_nobodys_way(monkeypatch):
    held, looks = Program(), []
    changed = Attributes.changed
    monkeypatch.setattr(Attributes, "changed", lambda self: looks.append(1) or changed(self))
    twins = Twins(DropoutNet, ADAMW, held.loss_fn)
    for batch in make_batches(STEPS):
        twins.step(batch)
        held.between_steps()
        assert not twins.differences(gradients=False)
    assert twins.counts == (1, STEPS - 3, 3, 1), reasons(twins.captured)
    assert len(looks) <= 2


def test_a_schedule_in_the_closure_that_is_not_asked_is_in_nobodys_way():
    optimizer = optim.SGD([torch.ones(1)], lr=0.1)
    scheduler = EACH_STEP(optimizer)
    loss_fn = lambda model, batch: mean_loss(model, batch) * (2 if scheduler else 1)  # noqa: E731
    twins = Twins(DropoutNet, ADAMW, loss_fn)
    for batch in make_batches(STEPS):
        twins.step(batch)
        optimizer.step()
        scheduler.step()
        assert not twins.differences(gradients=False)
    assert twins.counts == (1, STEPS - 3, 3, 1), reasons(twins.captured)


class OwnSchedule(optim.lr_scheduler.ExponentialLR):
    """A schedule of the user's that is stepped as the library's."""


@pytest.mark.parametrize("kind", [optim.lr_scheduler.ExponentialLR, OwnSchedule])
def test_a_schedule_that_the_step_itself_steps_is_not_captured_however_deep_it_lies(kind):
    results = []
    for is_captured in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        other = optim.SGD([torch.ones(1)], lr=0.1)
        parts = types.SimpleNamespace(scheduler=kind(other, 0.9))
        other.step()
        held = types.SimpleNamespace(trainer=types.SimpleNamespace(parts=parts))

        def step(batch, model=model, optimizer=optimizer, held=held):
            optimizer.zero_grad()
            mean_loss(model, batch).backward()
            optimizer.step()
            held.trainer.parts.scheduler.step()

        fn = CUDAGraphStep(step, state=[model, optimizer]) if is_captured else step
        for batch in make_batches(STEPS):
            fn(batch)
        results.append(parts.scheduler.last_epoch)
    assert results == [STEPS, STEPS]
    assert "'last_epoch' of" in reasons(fn)[0]


def test_what_another_process_keeps_cannot_be_watched_so_the_step_runs_eagerly():
    value = managers.ValueProxy.__new__(managers.ValueProxy)
    kept = [1.0]
    value._callmethod = lambda name, args=(): kept[0]  # which would ask the other process
    held = types.SimpleNamespace(shared=value)
    loss_fn = lambda model, batch: mean_loss(model, batch) * held.shared.value  # noqa: E731
    twins = Twins(DropoutNet, ADAMW, loss_fn)
    assert train(twins, lambda _: kept.__setitem__(0, 0.5)) is None
    assert twins.counts[1] == 0
    assert "'shared' of SimpleNamespace, which another process keeps" in reasons(twins.captured)[0]


def test_the_epoch_that_fit_sets_is_read_in_each():
    """Of data sets and samplers that the loss reaches by the loader."""
    results = []
    for plan in ("eager", "exact"):
        torch.manual_seed(0)
        data = TensorDataset(*(torch.cat(ts) for ts in zip(*make_batches(12), strict=True)))
        sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=False)
        loader = DataLoader(data, batch_size=4, sampler=sampler)

        def loss_fn(model, batch, loader=loader):
            return mean_loss(model, tuple(batch)) * (1.0 + loader.sampler.epoch)

        trainer = Trainer(DropoutNet(), ADAMW, loss_fn, plan)
        torch.manual_seed(1)
        trainer.fit(loader, epochs=3, progress=False)
        results.append(trainer.model.state_dict())
    assert not differences(*results)
    assert counts(trainer)[3] == 3, reasons(trainer)


def in_thread():
    held = threading.local()
    held.count = 0

    def count():
        held.count += 1
        return held.count

    return count


def in_c():
    number = ctypes.c_int(0)

    def count():
        number.value = number.value + 1
        return number.value

    return count


def in_array():
    numbers = array.array("l", [0, 0])

    def count():
        numbers[1] += 1
        return numbers[1]

    return count


@pytest.mark.parametrize("make", [in_thread, in_c, in_array])
def test_a_step_that_counts_there_runs_eagerly_and_counts_right(make):
    ends = []
    for plan in ("eager", "exact"):
        torch.manual_seed(0)
        count = make()
        loss_fn = lambda model, batch, count=count: mean_loss(model, batch) * count()  # noqa: E731
        trainer = Trainer(DropoutNet(), ADAMW, loss_fn, plan)
        torch.manual_seed(1)
        losses = [trainer.step(batch) for batch in make_batches(STEPS)]
        ends.append([count(), losses, trainer.model.state_dict()])
    assert ends[0][0] == STEPS + 1
    assert not differences(*ends)
    assert "a number on the host" in reasons(trainer)[0]


def test_what_another_thread_sets_meanwhile_is_not_taken_back():
    stop = threading.Event()
    attributes = Attributes(lambda: stop.is_set(), CPU)
    attributes.refresh([])
    before = attributes.reached()
    stop.set()
    before.put_back()
    assert stop.is_set()
    assert attributes.changed() == "'_flag' of Event"


@pytest.mark.parametrize(
    "value", [ctypes.py_object([]), ctypes.c_void_p(3), ctypes.CDLL(None).printf, bytearray(3)]
)
def test_addresses_are_left_where_they_are(value):
    put_bytes(value, bytes_of(value))
    put_bytes(value, b"12345678")
    assert bytes_of(value) != b"12345678"


# --- What of them counts --------------------------------------------------------------------------


def test_an_object_that_the_step_asks_for_nothing_is_none_of_those_it_looks_into(monkeypatch):
    monkeypatch.setattr(places, "_MOST_OBJECTS", 3)
    held = [threading.Event() for _ in range(8)]
    attributes = Attributes(lambda: held, CPU)
    attributes.refresh([])
    assert attributes.notes() == []
    assert not list(attributes.sizes())


def test_an_attribute_that_comes_and_a_tensor_that_is_replaced():
    held = threading.local()
    held.weight, held.last = 1.0, torch.ones(1)
    attributes = Attributes(lambda: (held.weight, held.last, held.beside), CPU)
    attributes.refresh([])
    held.last = torch.zeros(1)
    assert attributes.changed() is None  # as a step leaves one there
    held.beside = 2.0
    assert attributes.changed() == "'beside' of _local"


def test_large_arrays_of_c_are_data():
    values = (ctypes.c_double * 1000)()
    attributes = Attributes(lambda: values[0], CPU)
    attributes.refresh([])
    values[0] = 1.0
    assert attributes.changed() is None
