"""Numbers that a step notes, such as the size of its batch, beside those that it counts.

Both are written by the step itself. What it notes is the same whenever it runs on a batch of that
kind, so a graph may hold it; what it counts goes on, and no graph may.
"""

from __future__ import annotations

from functools import partial

import pytest
from torch import optim

from both_ways import alike, trained
from models import make_batches, mean_loss
from tape import CPU, counts, reasons, without_check
from torchfast.graphs.attributes import Attributes

pytestmark = pytest.mark.usefixtures("tape")

ADAMW = partial(optim.AdamW, lr=0.01, fused=True)
STEPS, EVERY = 40, 5  # and each fifth batch is a short one, as at the end of an epoch

noted = {"size": 6}


class Loss:
    def __init__(self):
        self.size = self.before = 6
        self.steps, self.is_odd = 0, False

    def noting(self, model, batch):
        self.size = len(batch[0])
        return mean_loss(model, batch) * (6 / self.size)

    def counting(self, model, batch):
        self.steps += 1
        return mean_loss(model, batch) * (1.0 if self.steps % 7 else 0.5)

    def toggling(self, model, batch):
        self.is_odd = not self.is_odd
        return mean_loss(model, batch) * (1.0 if self.is_odd else 0.5)

    def looking_back(self, model, batch):
        self.before, self.size = self.size, len(batch[0])
        return mean_loss(model, batch) * (6 / self.before)


def in_object():
    return Loss().noting


def in_closure():
    size = 6

    def loss_fn(model, batch):
        nonlocal size
        size = len(batch[0])
        return mean_loss(model, batch) * (6 / size)

    return loss_fn


def in_dictionary():
    def loss_fn(model, batch):
        noted["size"] = len(batch[0])
        return mean_loss(model, batch) * (6 / noted["size"])

    return loss_fn


def train(make, is_short, *, cuda_graph=True):
    if isinstance(is_short, int):
        is_short = [number % is_short == is_short - 1 for number in range(STEPS)]
    batches = [
        tuple(part[:4] for part in batch) if short else batch
        for short, batch in zip(is_short, make_batches(STEPS), strict=True)
    ]
    return trained(make(), batches, ADAMW, cuda_graph=cuda_graph)


def trained_alike(make, is_short=EVERY):
    return alike(partial(train, make, is_short))


NOTING = [in_object, in_closure, in_dictionary]


@pytest.mark.parametrize("make", NOTING)
def test_a_step_that_notes_the_size_of_its_batch_has_a_graph_for_each_size(make):
    step = trained_alike(make)
    graphs, replays, eager, captures = counts(step)
    assert graphs == 2, reasons(step)
    assert captures <= 3  # one more, as the first short batch tells that the number varies
    assert eager <= 6
    assert replays == STEPS - eager


@pytest.mark.parametrize("make", NOTING)
def test_taken_for_a_count_it_would_be_captured_no_more(make, monkeypatch):
    monkeypatch.setattr(Attributes, "_only_notes", lambda *_: False)
    assert counts(trained_alike(make))[0] < 2


@pytest.mark.parametrize("is_short", [2, 3, EVERY, [n % 2 and n < 21 for n in range(STEPS)]])
@pytest.mark.parametrize("name", ["counting", "toggling", "looking_back"])
def test_what_depends_on_the_steps_before_is_never_taken_for_noted(name, is_short):
    trained_alike(lambda: getattr(Loss(), name), is_short)


@pytest.mark.parametrize("name", ["counting", "toggling", "looking_back"])
def test_without_the_guard_such_a_step_trains_wrong(name, monkeypatch):
    monkeypatch.setattr(Attributes, "_only_notes", lambda *_: True)
    without_check(monkeypatch)  # which finds it too, if two steps tell
    with pytest.raises(AssertionError):
        trained_alike(lambda: getattr(Loss(), name))


def test_a_number_is_noted_only_where_it_came_of_another_one_before():
    """As ``size``; a number that came of the same one may count, from wherever it was set back."""
    held = Loss()
    attributes = Attributes(lambda: held.steps, CPU)

    def run(start, end):
        held.steps = start
        attributes.refresh([])
        held.steps = end

    run(0, 4)
    assert "'steps' of Loss" in attributes.counted("short")
    attributes.ran("short")
    run(0, 4)
    assert "'steps' of Loss" in attributes.counted("short")
    run(3, 5)
    assert "'steps' of Loss" in attributes.counted("short")
    run(3, 4)
    assert "'steps' of Loss" in attributes.counted("long")
    assert attributes.counted("short") is None
