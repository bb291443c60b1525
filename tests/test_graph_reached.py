"""What a capture that failed, and the check of one that did not, leave where the step keeps things.

Each step carries a tensor over to the next one, in one of many places and in one of three ways. A
capture of it either fails, as it reads a value, or goes through and is checked. Either way it has
to train as it does uncaptured.
"""

from __future__ import annotations

import weakref
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn, optim

from both_ways import alike, trained
from models import mean_loss
from tape import CPU, counts, reasons
from torchfast._core.storages import Memory
from torchfast.graphs import reached
from torchfast.graphs.attributes import Attributes
from torchfast.graphs.host_facts import HostFacts
from torchfast.graphs.named_state import NamedState
from torchfast.graphs.reached import Copies, Reached

pytestmark = pytest.mark.usefixtures("tape")

SGD = partial(optim.SGD, lr=0.1, momentum=0.9, fused=True)
STEPS = 10
KEPT = [torch.zeros(5)]


class Held:
    def __init__(self):
        self.value = torch.zeros(5)


class InSlots:
    __slots__ = ("value",)

    def __init__(self):
        self.value = torch.zeros(5)


class OfClass:
    value = torch.zeros(5)


def in_attribute(model):
    model.kept = torch.zeros(5)
    return lambda: model.kept, lambda new: setattr(model, "kept", new)


def in_list_of_module(model):
    model.kept = [torch.zeros(5)]
    return lambda: model.kept[0], lambda new: model.kept.__setitem__(0, new)


def in_nested_of_module(model):
    model.kept = {"a": [torch.zeros(5)]}
    return lambda: model.kept["a"][0], lambda new: model.kept["a"].__setitem__(0, new)


def in_object_of_module(model):
    model.kept = Held()
    return lambda: model.kept.value, lambda new: setattr(model.kept, "value", new)


def in_object(_):
    kept = Held()
    return lambda: kept.value, lambda new: setattr(kept, "value", new)


def in_slots(_):
    kept = InSlots()
    return lambda: kept.value, lambda new: setattr(kept, "value", new)


def in_namespace(_):
    kept = SimpleNamespace(value=torch.zeros(5))
    return lambda: kept.value, lambda new: setattr(kept, "value", new)


def in_class(_):
    OfClass.value = torch.zeros(5)
    return lambda: OfClass.value, lambda new: setattr(OfClass, "value", new)


def in_closure(_):
    kept = torch.zeros(5)

    def write(new):
        nonlocal kept
        kept = new

    return lambda: kept, write


def in_list(_):
    kept = [torch.zeros(5)]
    return lambda: kept[0], lambda new: kept.__setitem__(0, new)


def in_growing_list(_):
    kept = [torch.zeros(5)]
    return lambda: kept[-1], kept.append


def in_deque(_):
    kept = deque([torch.zeros(5)], maxlen=1)
    return lambda: kept[-1], kept.append


def in_dict(_):
    kept = {}
    return lambda: kept.get("a", torch.zeros(5)), lambda new: kept.__setitem__("a", new)


def in_globals(_):
    KEPT[:] = [torch.zeros(5)]
    return lambda: KEPT[0], lambda new: KEPT.__setitem__(0, new)


PLACES = [
    *(in_attribute, in_list_of_module, in_nested_of_module, in_object_of_module, in_object),
    *(in_slots, in_namespace, in_class, in_closure, in_list, in_growing_list, in_deque, in_dict),
    in_globals,
]


def replaced(old, new, write):
    write(0.5 * old + new)


def written_in_place(old, new, _):
    old.mul_(0.5).add_(new)


def written_by_foreach(old, new, _):
    torch._foreach_mul_([old], 0.5)
    torch._foreach_add_([old], [new])


def given_other_data(old, new, _):
    old.data = 0.5 * old + new


CASES = [
    (place, way)
    for place in PLACES
    for way in (replaced, written_in_place, given_other_data)
    if place is not in_dict or way is replaced  # it is empty at first
]


def carrying(place, way, *, reads):
    """Return what makes a loss that carries a tensor over, and that tensor."""

    def train(*, cuda_graph):
        found = []

        def net():
            model = nn.Linear(8, 5)
            found.extend(place(model))
            return model

        def loss_fn(model, batch, found=found):
            read, write = found
            loss = mean_loss(model, batch) + (model.weight.sum(1) - read()).square().mean()
            with torch.no_grad():
                way(read(), model.weight.mean(1) + batch[0].mean(), write)
            if reads:
                assert loss.item() < 1e9
            return loss

        step, left = trained(loss_fn, STEPS, SGD, net=net, cuda_graph=cuda_graph)
        return step, [*left, found[0]().clone()]

    return train


@pytest.mark.parametrize("reads", [True, False], ids=["failed", "checked"])
@pytest.mark.parametrize(("place", "way"), CASES)
def test_what_a_step_carries_over_is_that_of_the_plain_loop(place, way, reads):
    step = alike(carrying(place, way, reads=reads))
    if reads or way is given_other_data:
        assert counts(step) == (0, 0, STEPS, 0)
    if way is given_other_data and not reads:
        assert "the memory of a" in reasons(step)[0]
    if way is written_in_place and not reads:
        assert counts(step) == (1, STEPS - 3, 3, 1)


def test_what_foreach_writes_is_put_back_behind_the_check():
    step = alike(carrying(in_list_of_module, written_by_foreach, reads=False))
    assert counts(step) == (1, STEPS - 3, 3, 1)


def test_what_may_be_data_is_not_copied(monkeypatch):
    monkeypatch.setattr(reached, "_SMALL_BYTES", 4 * 12)
    kept = [torch.ones(10), torch.ones(10), torch.ones(2), torch.ones(1)]
    attributes = Attributes(lambda: kept, CPU)
    attributes.refresh([])
    found = attributes.reached().unsure(CPU)
    assert [*map(len, found)] == [10, 2]


CONTROLS = {
    "values": (Reached, in_object, replaced, True),
    "contents": (Reached, in_deque, replaced, True),
    "contents behind the check": (Reached, in_list, replaced, False),
    "memory": (Memory, in_attribute, given_other_data, True),
    "copies": (Copies, in_list_of_module, written_by_foreach, False),
}


@pytest.mark.parametrize("control", CONTROLS.values(), ids=CONTROLS)
def test_without_putting_it_back_it_trains_wrong(control, monkeypatch):
    part, place, way, reads = control
    monkeypatch.setattr(part, "put_back", lambda self: None)
    with pytest.raises(AssertionError):
        alike(carrying(place, way, reads=reads))


def test_without_looking_at_their_memory_tensors_stand_still(monkeypatch):
    monkeypatch.setattr(Memory, "has_moved", lambda self: False)
    with pytest.raises(AssertionError):
        alike(carrying(in_object, given_other_data, reads=False))


@pytest.mark.parametrize("reads", [True, False], ids=["failed", "checked"])
def test_a_momentum_encoder_whose_data_is_assigned(reads):
    """As the first implementation of MoCo has it."""

    class Momentum(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = nn.Linear(8, 5), nn.Linear(8, 5).requires_grad_(False)

        def forward(self, inputs):
            for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
                key.data = key.data * 0.9 + query.data * 0.1
            return self.query(inputs) + self.key(inputs)

    def loss_fn(model, batch):
        loss = mean_loss(model, batch)
        return loss * 2.0 if reads and loss.item() > 1e9 else loss

    alike(lambda cuda_graph: trained(loss_fn, STEPS, SGD, net=Momentum, cuda_graph=cuda_graph))


def test_a_failed_capture_leaves_no_entry_behind():
    noted, counted, seen = [], np.zeros(1), set()

    def loss_fn(model, batch):
        loss = mean_loss(model, batch)
        noted.append(loss.detach())
        counted[0] += 1
        seen.add(int(counted[0]))
        return loss * 1.0 if loss.item() else loss

    trained(loss_fn, STEPS, SGD, net=lambda: nn.Linear(8, 5))
    assert len(noted) == counted[0] == len(seen) == STEPS


def test_what_has_come_into_being_goes():
    held, slots, table = Held(), InSlots(), {}
    del slots.value

    def loss_fn():
        return held.late, slots.value, table["late"]

    attributes = Attributes(loss_fn, CPU)
    attributes.refresh([])
    before = attributes.reached()
    held.late = slots.value = table["late"] = torch.ones(5)
    before.put_back()
    assert not hasattr(held, "late")
    assert not hasattr(slots, "value")
    assert not table


def test_what_cannot_be_compared_or_written_to_is_put_back_too():
    """Keys that are tensors, of which a comparison says nothing, and an array that is only read."""
    first, second, array = torch.ones(2), torch.ones(2), np.arange(3.0)
    array.flags.writeable = False
    by_tensor = {first: 1.0}

    def loss_fn():
        return by_tensor, array

    attributes = Attributes(loss_fn, CPU)
    attributes.refresh([])
    before = attributes.reached()
    del by_tensor[first]
    by_tensor[second] = 2.0
    before.put_back()
    assert [*by_tensor.items()] == [(first, 1.0)]
    assert next(iter(by_tensor)) is first


def trained_with_kept(loss_fn):
    """Return a step that has trained, and the tensors that its captures keep for their graphs."""
    kept = []
    take = HostFacts.left

    def note(self):
        found = take(self)
        kept.extend(found[0])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostFacts, "left", note)
        step, _ = trained(loss_fn, STEPS, SGD, net=lambda: nn.Linear(8, 5))
    return step, kept


def test_a_graph_keeps_the_memory_that_it_reads():
    """Of a tensor in an object, which the step replaces: it may be given to another otherwise."""
    held = Held()

    def loss_fn(model, batch):
        loss = mean_loss(model, batch) + 0.0 * held.value.sum()
        held.value = loss.detach().expand(5).clone()
        return loss

    step, replaced_ones = trained_with_kept(loss_fn)
    assert counts(step)[1] > 0
    assert [tuple(t.shape) for t in replaced_ones] == [(5,)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("reads", [True, False], ids=["failed", "checked"])
def test_a_nested_tensor_in_an_attribute_stops_no_training(reads):
    """It says that it is strided, and has neither strides nor a shape."""
    nested = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)])

    def loss_fn(model, batch):
        loss = mean_loss(model, batch) * nested.size(0)
        return loss * 2.0 if reads and loss.item() > 1e9 else loss

    def train(*, cuda_graph):
        return trained(loss_fn, STEPS, SGD, net=lambda: nn.Linear(8, 5), cuda_graph=cuda_graph)

    alike(train)


def test_a_proxy_of_what_is_gone_stops_no_capture():
    def loss_fn(model, batch):
        held = Held()
        model.seen = weakref.proxy(held)
        return mean_loss(model, batch)

    step, _ = trained(loss_fn, STEPS, SGD, net=lambda: nn.Linear(8, 5))
    assert counts(step) == (1, STEPS - 3, 3, 1)


def test_what_a_step_reaches_is_walked_twice_in_a_capture(monkeypatch):
    walks = []
    take = Attributes.reached
    monkeypatch.setattr(Attributes, "reached", lambda self: walks.append(1) or take(self))
    step, _ = trained(mean_loss, STEPS, SGD, net=lambda: nn.Linear(8, 5))
    assert counts(step) == (1, STEPS - 3, 3, 1)
    assert len(walks) == 2


def test_what_is_kept_of_an_earlier_step_keeps_no_graph_of_autograd():
    """A graph may read the tensor's memory; what a function had kept for backward it does not."""

    def loss_fn(model, batch):
        model.latest = model(batch[0])
        return mean_loss(model, batch) + 0.0 * model.latest.sum()

    step, kept = trained_with_kept(loss_fn)
    assert counts(step)[1] > 0
    assert kept
    assert not any(tensor.requires_grad for tensor in kept)


def test_a_failed_capture_whose_facts_are_held_keeps_nothing_that_it_has_made():
    """Where memory ran out, another attempt follows while they are."""
    held = Held()

    def loss_fn():
        return held.value

    attributes = Attributes(loss_fn, CPU)
    attributes.refresh([])
    facts = HostFacts(NamedState([]), CPU, attributes)
    held.value = torch.ones(5)
    made = weakref.ref(held.value)
    facts.left()
    facts.put_back()
    assert made() is None
