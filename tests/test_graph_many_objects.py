"""A step that reaches very many objects: all are watched up to some number, and the report says so.

What holds nothing but plain values is compared by whoever holds it, so it is none of that number.
"""

from __future__ import annotations

import types
from functools import partial

import pytest
from torch import nn, optim

from both_ways import alike, trained
from models import DropoutNet, mean_loss
from tape import CPU, counts, reasons
from torchfast.graphs import places
from torchfast.graphs.attributes import Attributes

pytestmark = pytest.mark.usefixtures("tape")

ADAMW = partial(optim.AdamW, lr=0.01, fused=True)
STEPS, CHANGED_AT = 16, 8


class Tuples(DropoutNet):
    """Has what convolutions have in their attributes, many times over."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Identity() for _ in range(2000))
        for number, part in enumerate(self.parts):
            part.kernel_size, part.stride = [number, 3], {"stride": (number, 1)}


def many(num):
    """Return a loss whose weight lies last in a tree of so many objects that the step names."""
    last = types.SimpleNamespace(weight=1.0)
    leaves = [types.SimpleNamespace(weight=0.0) for _ in range(num - 1)] + [last]
    held = types.SimpleNamespace(parts=[leaves[i : i + 200] for i in range(0, num, 200)])

    def loss_fn(model, batch):
        return mean_loss(model, batch) * sum(p.weight for part in held.parts for p in part)

    return loss_fn, last


def deep(weight=1.0):
    held = types.SimpleNamespace(train=types.SimpleNamespace(weight=weight))
    return lambda model, batch: mean_loss(model, batch) * held.train.weight, held.train


def train(make, **options):
    loss_fn, changed = make()

    def change(number):
        if number == CHANGED_AT:
            changed.weight = 0.5

    return trained(loss_fn, STEPS, ADAMW, before=change, **options)


def trained_alike(make, **options):
    return alike(partial(train, make, **options))


def notes(step):
    return [d.detail for d in step.report().decisions if "objects" in d.detail]


def test_a_change_is_noticed_among_thousands_of_objects():
    step = trained_alike(lambda: many(3000))
    assert counts(step) == (1, STEPS - 3, 3, 2), reasons(step)
    assert notes(step) == []


def test_the_tuples_of_a_large_model_leave_room_for_what_the_loss_reads():
    step = trained_alike(deep, net=Tuples)
    assert counts(step) == (1, STEPS - 3, 3, 2), reasons(step)
    assert notes(step) == []


def test_the_report_says_what_is_not_watched_any_more(monkeypatch):
    monkeypatch.setattr(places, "_MOST_OBJECTS", 100)
    step, _ = train(lambda: many(300))
    assert counts(step) == (1, STEPS - 3, 3, 1)
    (note,) = notes(step)
    assert note == (
        "the step reaches more than 100 objects; a change of values in those beyond is not noticed"
    )
    assert note in str(step.report())


def test_so_it_does_where_objects_that_the_step_does_not_name_have_code(monkeypatch):
    """Whose names are not known then, so more may be read than is watched."""
    monkeypatch.setattr(places, "_MOST_OBJECTS", 100)
    held = types.SimpleNamespace(
        weight=1.0, others=[types.SimpleNamespace(number=number) for number in range(200)]
    )
    step, _ = train(lambda: (lambda model, batch: mean_loss(model, batch) * held.weight, held))
    assert counts(step) == (1, STEPS - 3, 3, 2)
    assert len(notes(step)) == 1


def test_a_container_of_plain_values_is_not_looked_into():
    held = types.SimpleNamespace(tables=[[1.0, 2.0] for _ in range(200)])
    attributes = Attributes(lambda: held.tables, CPU)
    attributes.refresh([])
    held.tables[150][0] = 3.0
    assert attributes.changed() == "'tables' of SimpleNamespace"
