"""What a step writes to attributes and dictionaries for the loop to read, in replays."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn, optim

from both_ways import alike, trained
from models import make_batches, mean_loss
from tape import CPU, counts
from torchfast.graphs.attributes import Attributes
from torchfast.graphs.places import Place
from torchfast.graphs.reached import Notes

pytestmark = pytest.mark.usefixtures("tape")

SGD = partial(optim.SGD, lr=0.1, momentum=0.9, fused=True)
STEPS = 10


class Held:
    pass


def in_hook(model, noted):
    model.register_forward_hook(lambda *call: noted.update(a=call[-1].detach()))
    return lambda: noted["a"]


def in_attribute_of_module(model, _):
    take = model.forward

    def forward(inputs):
        model.latest = take(inputs)
        return model.latest

    model.forward = forward
    return lambda: model.latest.detach()


def in_new_list(model, noted):
    model.register_forward_hook(lambda *call: noted.update(a=[call[-1].detach()]))
    return lambda: noted["a"]


def in_other_object(model, _):
    held = Held()
    model.register_forward_hook(lambda *call: setattr(held, "latest", call[-1].detach()))
    return lambda: held.latest


@pytest.mark.parametrize("sizes", [(6,), (6, 4), (6, 6, 4)], ids=str)
@pytest.mark.parametrize(
    "note",
    [in_hook, in_attribute_of_module, in_new_list, in_other_object],
    ids=lambda f: f.__name__,
)
def test_what_a_step_notes_is_that_of_the_step_whatever_ran_before(note, sizes):
    """Of a memory bank, or a plot: replays of several graphs and steps that run eagerly."""
    batches = [
        tuple(part[: sizes[number % len(sizes)]] for part in batch)
        for number, batch in enumerate(make_batches(16))
    ]

    def train(*, cuda_graph):
        read, means = [], []

        def net():
            model = nn.Linear(8, 5)
            read.append(note(model, {}))
            return model

        def before(number):
            if number:
                found = read[0]()
                means.append((found.pop() if isinstance(found, list) else found).mean(0))

        step, left = trained(mean_loss, batches, SGD, net=net, before=before, cuda_graph=cuda_graph)
        return step, [left, means]

    step = alike(train)
    assert counts(step)[1] >= 16 - 5
    assert ": what the latest replay has computed, until the next one" in str(step.report())


def test_without_writing_them_again_notes_are_those_of_another_step(monkeypatch):
    monkeypatch.setattr(Notes, "write", lambda self: None)
    with pytest.raises(AssertionError):
        test_what_a_step_notes_is_that_of_the_step_whatever_ran_before(in_hook, (6, 4))


def test_a_list_that_grows_is_left_as_it_is():
    """Nobody can know how long it is to be; one entry came of the capture, as of a step."""
    noted = []

    def loss_fn(model, batch):
        loss = mean_loss(model, batch)
        noted.append(loss.detach())
        return loss

    step, _ = trained(loss_fn, STEPS, SGD, net=lambda: nn.Linear(8, 5))
    assert counts(step) == (1, STEPS - 3, 3, 1)
    assert len(noted) == 4


class Noting(nn.Linear):
    """Notes what the loop reads in a dictionary, which the loop clears, or replaces."""

    def __init__(self, first):
        super().__init__(8, 5)
        self.aux = dict(first)

    def forward(self, inputs):
        found = super().forward(inputs)
        self.aux["mean"] = found.detach().mean()
        return found


def clear(model):
    model.aux.clear()


def replace(model):
    model.aux = {}


def replace_by_none(model):
    model.aux = {"mean": None}


@pytest.mark.parametrize("empty", [clear, replace, replace_by_none], ids=lambda f: f.__name__)
def test_a_dictionary_that_the_loop_empties_is_filled_in_each_step(empty):
    def train(*, cuda_graph):
        models, means = [], []

        def net():
            models.append(Noting({}))
            return models[0]

        def before(number):
            if number:
                means.append(models[0].aux["mean"].clone())
            empty(models[0])

        step, left = trained(mean_loss, STEPS, SGD, net=net, before=before, cuda_graph=cuda_graph)
        return step, [left, means]

    assert counts(alike(train)) == (1, STEPS - 3, 3, 1)


def test_a_window_that_the_loop_has_emptied_is_left_empty():
    """A note by its place in a list has none there any more; a replay must not fail for it."""
    kept, where = [torch.zeros(5)], {}

    def loss_fn():
        return kept, where

    attributes = Attributes(loss_fn, CPU)
    attributes.refresh([])
    before = attributes.reached()
    kept[0] = where["a"] = torch.ones(5)
    notes = attributes.reached().notes(before)
    kept.clear()
    where.clear()
    notes.write()
    assert not kept
    assert torch.equal(where["a"], torch.ones(5))


def test_attributes_are_written_without_a_call_for_each(monkeypatch):
    """There may be one in each layer, and the device waits for the host in a short step."""
    monkeypatch.setattr(Place, "write", None)
    model, value = nn.Linear(8, 5), torch.ones(5)
    notes = Notes([(Place(model, "Linear", is_module=True), "latest", value)], [])
    notes.write()
    assert model.latest is value
