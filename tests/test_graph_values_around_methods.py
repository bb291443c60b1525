"""Values that methods have around them, or read for an operator, and modules that lists hide."""

from __future__ import annotations

import dataclasses
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from host_values import ADAMW, train
from models import DropoutNet, make_batches, mean_loss
from tape import Twins, reasons

pytestmark = pytest.mark.usefixtures("tape")


class Box:
    """Is a number to operators of all kinds."""

    def __init__(self):
        self.value = 1.0

    def __rmul__(self, other):
        return other * self.value

    def __neg__(self):
        return -self.value

    def __float__(self):
        return self.value

    def __contains__(self, value):
        return value == self.value

    def __len__(self):
        return int(self.value)

    def __lt__(self, other):
        return self.value < other

    def __enter__(self):
        return self.value

    def __exit__(self, *_):
        pass


@dataclasses.dataclass
class Settings:
    kind: str = "whole"
    value: float = 1.0


class Reversed(torch.autograd.Function):
    factor = 1.0

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -Reversed.factor * gradient


def within(box):
    with box as value:
        return value


def by_keyword(settings):
    match settings:
        case Settings(kind="whole"):
            return 1.0
    return 0.5


def by_position(settings):
    match settings:
        case Settings("whole"):
            return 1.0
    return 0.5


def set_value(held):
    held.value = 0.5


def set_kind(held):
    held.kind = "half"


def set_late(held):
    held.late = True


READ = {
    "an operator": (Box, lambda h: 1.0 * h, set_value),
    "a sign": (Box, lambda h: -(-h), set_value),  # noqa: B002
    "float": (Box, float, set_value),
    "in": (Box, lambda h: 1.0 if 1.0 in h else 0.5, set_value),
    "a truth value": (Box, lambda h: 1.0 if h else 0.5, set_value),
    "a comparison": (Box, lambda h: 0.5 if h < 1.0 else 1.0, set_value),
    "with": (Box, within, set_value),
    "a pattern with keywords": (Settings, by_keyword, set_kind),
    "a pattern by position": (Settings, by_position, set_kind),
    "hasattr": (Settings, lambda h: 0.5 if hasattr(h, "late") else 1.0, set_late),
}


@pytest.mark.parametrize("way", READ)
def test_what_is_read_without_a_name_is_watched(way):
    make, read, change = READ[way]
    held = make()
    twins = Twins(DropoutNet, ADAMW, lambda model, batch: mean_loss(model, batch) * read(held))
    assert train(twins, lambda _: change(held)) is None
    assert twins.counts == (1, 15, 3, 2), reasons(twins.captured)


def with_reversal(model, batch):
    inputs, targets = batch
    return mean_loss(lambda x: Reversed.apply(model(x)), (inputs, targets))


def test_what_a_backward_of_the_users_reads_is_watched():
    Reversed.factor = 1.0
    twins = Twins(DropoutNet, ADAMW, with_reversal)
    assert train(twins, lambda _: setattr(Reversed, "factor", 0.5)) is None
    assert twins.counts == (1, 15, 3, 2), reasons(twins.captured)


def of_forward(box):
    class Net(DropoutNet):
        def forward(self, x):
            return super().forward(x) * box.value

    return Net, mean_loss


def of_decorated_forward(box):
    def scaled(forward):
        return lambda self, x: forward(self, x) * box.value

    class Net(DropoutNet):
        forward = scaled(DropoutNet.forward)

    return Net, mean_loss


def of_default(box):
    class Net(DropoutNet):
        def forward(self, x, by=box):
            return super().forward(x) * by.value

    return Net, mean_loss


def of_method(box):
    class Loss:
        def scaled(self, loss):
            return loss * box.value

        def __call__(self, model, batch):
            return self.scaled(mean_loss(model, batch))

    return DropoutNet, Loss()


def of_property(box):
    class Loss:
        @property
        def weight(self):
            return box.value

        def __call__(self, model, batch):
            return mean_loss(model, batch) * self.weight

    return DropoutNet, Loss()


def of_backward(box):
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * box.value

    class Net(DropoutNet):
        def forward(self, x):
            return Own.apply(super().forward(x))

    return Net, mean_loss


AROUND = (of_forward, of_decorated_forward, of_default, of_method, of_property, of_backward)


@pytest.mark.parametrize("make", AROUND)
def test_what_is_around_a_method_is_watched(make):
    box = SimpleNamespace(value=1.0)
    net, loss_fn = make(box)
    twins = Twins(net, ADAMW, loss_fn)
    assert train(twins, lambda _: set_value(box)) is None
    assert twins.counts == (1, 15, 3, 2), reasons(twins.captured)


class Teacher(nn.Module):
    """Counts in a buffer, which its forward replaces."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(8, 4).requires_grad_(False), nn.Dropout(0.5)
        self.register_buffer("centre", torch.zeros(4))
        self.scale = 1.0

    def forward(self, x):
        found = self.dropout(self.layer(x)) * self.scale - self.centre
        self.centre = 0.9 * self.centre + 0.1 * found.mean(0)
        return found


class Student(DropoutNet):
    """Hides its teacher from ``state_dict()``."""

    def __init__(self, hide):
        super().__init__()
        self.hidden = hide(Teacher())

    def forward(self, x):
        hidden = self.hidden
        teacher = hidden.teacher if isinstance(hidden, SimpleNamespace) else hidden[0]
        return super().forward(x) + teacher(x)


HIDDEN = {
    "a list": (lambda teacher: [teacher], lambda student: student.hidden[0]),
    "an object": (lambda t: SimpleNamespace(teacher=t), lambda s: s.hidden.teacher),
}


def double(teacher):
    teacher.scale = 2.0


def replace_layer(teacher):
    teacher.layer = nn.Linear(8, 4).requires_grad_(False)
    nn.init.constant_(teacher.layer.weight, 0.1)
    nn.init.zeros_(teacher.layer.bias)


def replace_memory(teacher):
    teacher.layer.weight.data = teacher.layer.weight.data * 0.5


CHANGES = {
    "nothing": lambda _: None,
    "eval": nn.Module.eval,
    "an attribute": double,
    "a layer": replace_layer,
    "memory": replace_memory,
}


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_is_hidden_from_the_model_is_watched_and_put_back(hidden, change):
    hide, find = HIDDEN[hidden]
    twins = Twins(lambda: Student(hide), ADAMW, mean_loss)
    event = lambda twins: twins.both(lambda model, _: CHANGES[change](find(model)))  # noqa: E731
    assert train(twins, event) is None
    assert torch.equal(find(twins.plain).centre, find(twins.model).centre)
    assert twins.counts[1] >= 14, reasons(twins.captured)


class Runner:
    """Its loss reads no count, which other code of it does."""

    def __init__(self):
        self.count = 0

    def backward(self, loss):  # a name that torch calls in functions of its own only
        if self.count % 2:
            loss.backward()

    def __call__(self, model, batch):
        return mean_loss(model, batch)


class Asking(Runner):
    def __call__(self, model, batch):
        names = {"count": 1.0}
        return mean_loss(model, batch) * (0.5 if hasattr(batch, "mask") else names["count"])


class Matching(Runner):
    def __call__(self, model, batch):
        match len(batch):
            case int(number):
                return mean_loss(model, batch) * number


@pytest.mark.parametrize("kind", [Runner, Asking, Matching])
def test_a_count_of_the_loop_that_the_step_does_not_read_leaves_its_graph(kind):
    runner = kind()

    def loss_fn(model, batch):
        return runner(model, batch)

    twins = Twins(DropoutNet, ADAMW, loss_fn)
    for batch in make_batches(1) * 12:
        runner.count += 1
        twins.step(batch)
    twins.check(gradients=False)
    assert twins.counts == (1, 9, 3, 1), reasons(twins.captured)


class WithoutHash(nn.Module):
    def __eq__(self, other):
        return self is other

    __hash__ = None


KNOWN = nn.Linear(2, 2)
LISTED = {"a weak proxy": lambda: weakref.proxy(KNOWN), "one without a hash": WithoutHash}


@pytest.mark.parametrize("kind", LISTED)
def test_a_list_may_have_what_is_no_module_to_torch(kind):
    class Net(DropoutNet):
        kept = [LISTED[kind]()]  # noqa: RUF012  # which no copy of the model copies

        def forward(self, x):
            return super().forward(x) * len(self.kept)

    twins = Twins(Net, ADAMW, mean_loss)
    assert train(twins) is None
    assert twins.counts[1] > 0, reasons(twins.captured)
