"""A step that draws from an iterator: no replay would go on, and an iterator cannot be compared.

What is drawn changes long after the check, so nothing else would find it.
"""

from __future__ import annotations

import codecs
import inspect
import itertools
import types
from functools import partial

import pytest
import torch
from torch import nn, optim

from both_ways import alike, trained
from models import DropoutNet, make_batches, mean_loss
from tape import counts, reasons
from torchfast import Plan, TrainStep
from torchfast._core.compare import differences
from torchfast.graphs import CUDAGraphStep
from torchfast.graphs.attributes import Attributes

pytestmark = pytest.mark.usefixtures("tape")

ADAMW = partial(optim.AdamW, lr=0.01, fused=True)
STEPS, TURNS_AT = 16, 12

lambdas = iter(())


def values():
    """Yield the weights of a loss."""
    for step in itertools.count():
        yield 1.0 if step < TURNS_AT else 0.5


class Loss:
    def __init__(self, iterator):
        self.lambdas = iterator
        self.table = {"lambdas": iterator}
        self.draw = partial(next, iterator)
        self.method = iterator.__next__

    def by_attribute(self, model, batch):
        return mean_loss(model, batch) * next(self.lambdas)

    def by_loop(self, model, batch):
        for value in self.lambdas:
            loss = mean_loss(model, batch) * value
            break
        return loss

    def by_table(self, model, batch):
        return mean_loss(model, batch) * next(self.table["lambdas"])

    def by_partial(self, model, batch):
        return mean_loss(model, batch) * self.draw()

    def by_method(self, model, batch):
        return mean_loss(model, batch) * self.method()

    def by_string(self, model, batch):
        weight = next(getattr(self, "lambdas")) if self.lambdas else 1.0  # noqa: B009
        return mean_loss(model, batch) * weight

    def with_default(self, model, batch):
        return mean_loss(model, batch) * next(self.lambdas, None)

    def by_choice(self, model, batch):
        return mean_loss(model, batch) * next(self.lambdas if batch else ())

    def by_send(self, model, batch):
        return mean_loss(model, batch) * self.lambdas.send(None)

    def if_there(self, model, batch):
        if self.lambdas is not None and self.lambdas:
            return mean_loss(model, batch) * next(self.lambdas)
        return mean_loss(model, batch)

    def by_another(self, model, batch):
        return mean_loss(model, batch) * self.weight()

    def weight(self):
        return next(self.lambdas)

    def beside(self, model, batch):
        return mean_loss(model, batch)


class Own:
    """An iterator of the user's own, which is watched as any object is."""

    def __init__(self):
        self.step = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.step += 1
        return 1.0 if self.step <= TURNS_AT else 0.5


class Wrapping:
    def __init__(self):
        self.source = values()

    def __next__(self):
        return next(self.source)


class DrawingNet(DropoutNet):
    def __init__(self):
        super().__init__()
        self.lambdas = values()

    def forward(self, x):
        return super().forward(x) * next(self.lambdas)


def by_global(model, batch):
    return mean_loss(model, batch) * next(lambdas)


def in_global():
    globals()["lambdas"] = values()
    return by_global


def in_closure():
    drawn = values()
    return lambda model, batch: mean_loss(model, batch) * next(drawn)


def in_default():
    drawn = values()

    def loss_fn(model, batch, lambdas=drawn):
        return mean_loss(model, batch) * next(lambdas)

    return loss_fn


def in_loss(name, make=values):
    return lambda: getattr(Loss(make()), name)


def list_iterator():
    return iter([1.0] * TURNS_AT + [0.5] * STEPS)


def cycle():
    return itertools.cycle([1.0] * TURNS_AT + [0.5])


def halved_late():
    return map((1.0).__truediv__, itertools.chain([1.0] * TURNS_AT, itertools.repeat(2.0)))


DRAWING = {
    "generator in an attribute": in_loss("by_attribute"),
    "list's": in_loss("by_attribute", list_iterator),
    "cycle": in_loss("by_attribute", cycle),
    "map": in_loss("by_attribute", halved_late),
    "in a loop": in_loss("by_loop", cycle),
    "in a dictionary": in_loss("by_table"),
    "in a partial": in_loss("by_partial"),
    "as its method": in_loss("by_method"),
    "by another method": in_loss("by_another"),
    "by a string": in_loss("by_string"),
    "with a default": in_loss("with_default"),
    "one of two": in_loss("by_choice"),
    "send": in_loss("by_send"),
    "if there is one": in_loss("if_there"),
    "global": in_global,
    "closure": in_closure,
    "default": in_default,
}


def train(make, **options):
    return trained(make(), STEPS, ADAMW, **options)


def trained_alike(make, **options):
    return alike(partial(train, make, **options))


@pytest.mark.parametrize("make", DRAWING.values(), ids=DRAWING)
def test_a_step_that_draws_from_an_iterator_runs_eagerly_and_draws_once_a_step(make):
    step = trained_alike(make)
    assert counts(step) == (0, 0, STEPS, 0)
    (reason,) = reasons(step)
    assert "the step draws from an iterator" in reason


@pytest.mark.parametrize("make", DRAWING.values(), ids=DRAWING)
def test_without_the_guard_it_trains_wrong(make, monkeypatch):
    monkeypatch.setattr(Attributes, "iterator", lambda self: None)
    _, expected = train(make, cuda_graph=False)
    step, found = train(make)
    assert counts(step)[1] > 0
    assert differences(expected, found)


def line_with(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + [text in line for line in lines].index(True)


def test_the_reason_names_the_iterator_and_the_line():
    (reason,) = reasons(train(in_loss("by_attribute", cycle))[0])
    line = line_with(Loss.by_attribute, "next(")
    place = f"'lambdas' of Loss at tests/test_graph_iterators.py:{line} (by_attribute)"
    assert f"the step draws from an iterator (itertools.cycle), {place}, and" in reason
    (reason,) = reasons(train(in_global)[0])
    assert f"at tests/test_graph_iterators.py:{line_with(by_global, 'next(')} (by_gl" in reason
    (reason,) = reasons(train(in_closure)[0])
    assert "'drawn' in the closure of in_closure" in reason


def test_an_iterator_in_a_module_counts_if_its_code_names_it():
    step = trained_alike(lambda: mean_loss, net=DrawingNet)
    assert counts(step) == (0, 0, STEPS, 0)
    assert "an iterator (generator), 'lambdas' of DrawingNet" in reasons(step)[0]


@pytest.mark.parametrize("kind", [Own, Wrapping])
def test_an_iterator_of_ones_own_class_is_told_by_what_it_holds(kind):
    def make():
        drawn = kind()
        return lambda model, batch: mean_loss(model, batch) * next(drawn)

    step = trained_alike(make)
    assert counts(step) == (0, 0, STEPS, 0)
    (reason,) = reasons(step)
    assert ("'step' of Own" if kind is Own else "'source' of Wrapping") in reason


def test_what_the_loop_alone_draws_from_is_in_nobodys_way(tmp_path):
    """So are a log that the step writes to, though files are iterators, and iterators of a call."""
    held = Loss(values())
    held.log = (tmp_path / "log").open("w")

    class Net(DropoutNet):
        def __init__(self):
            super().__init__()
            self.unnamed = values()

    def loss_fn(model, batch):
        held.log.write("a step\n")
        factors = iter([1.0, 2.0])
        return held.beside(model, batch) * next(factors)

    torch.manual_seed(0)
    step = TrainStep(Net(), ADAMW, loss_fn, Plan(cuda_graph=True))
    for batch in make_batches(STEPS):
        next(held.lambdas)
        step(batch)
    held.log.close()
    assert counts(step) == (1, STEPS - 3, 3, 1), reasons(step)


class Named:
    """Has iterators by names that the step uses, but for other things than to draw."""

    def __init__(self, log):
        self.data = values()
        self.rest = values()
        self.log = log

    def __call__(self, model, batch):
        for parameter in model.parameters():
            parameter.data.mul_(1.0)
        if self.rest is not None and self.data is not None and self.rest:
            self.log.write("a step")
        return mean_loss(model, batch)


def test_an_iterator_whose_name_the_step_uses_for_another_object_is_in_nobodys_way(tmp_path):
    with codecs.open(str(tmp_path / "log"), "w", "utf8") as log:  # an iterator of its lines
        step = trained_alike(lambda: Named(log))
    assert counts(step) == (1, STEPS - 3, 3, 1), reasons(step)


def train_all(step):
    for _ in range(STEPS):
        step(next(lambdas))


def test_a_global_function_that_has_the_name_of_a_method_is_none_of_the_steps():
    def loss_fn(model, batch):
        model.train()
        return mean_loss(model, batch)

    source = inspect.getsource(train_all).replace("train_all", "train")
    names = {"lambdas": values(), "mean_loss": mean_loss}
    exec(compile(source, __file__, "exec"), names)
    named = types.FunctionType(loss_fn.__code__, names)
    step = trained_alike(lambda: named)
    assert counts(step) == (1, STEPS - 3, 3, 1), reasons(step)


def test_the_line_is_one_that_draws():
    held = types.SimpleNamespace(data=values())

    def loss_fn(model, batch):
        for parameter in model.parameters():
            parameter.data.mul_(1.0)
        return mean_loss(model, batch) * next(held.data)

    (reason,) = reasons(train(lambda: loss_fn)[0])
    assert f":{line_with(loss_fn, 'next(')} (loss_fn)" in reason


def test_a_step_that_begins_to_draw_runs_eagerly_from_then_on():
    results = []
    for cuda_graph in (False, True):
        held = types.SimpleNamespace(weight=None)

        def loss_fn(model, batch, held=held):
            loss = mean_loss(model, batch)
            return loss if held.weight is None else loss * next(held.weight)

        torch.manual_seed(0)
        step = TrainStep(DropoutNet(), ADAMW, loss_fn, Plan(cuda_graph=cuda_graph))
        for number, batch in enumerate(make_batches(STEPS)):
            if number == 8:
                held.weight = itertools.count(1.0, 0.5)
            step(batch)
        results.append(step.model.state_dict())
    assert not differences(*results)
    assert "an iterator (itertools.count), 'weight' of SimpleNamespace" in reasons(step)[0]


def test_a_batch_that_the_step_itself_fetches_is_new_in_each_step():
    """A step of one's own that takes no batch but draws it."""
    results = []
    for is_captured in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(make_batches(STEPS), batch_size=None, collate_fn=tuple)
        batches = iter(loader)

        def step(model=model, optimizer=optimizer, batches=batches):
            optimizer.zero_grad()
            loss = mean_loss(model, next(batches))
            loss.backward()
            optimizer.step()
            return loss.detach()

        fn = CUDAGraphStep(step, state=[model, optimizer]) if is_captured else step
        results.append([[fn() for _ in range(STEPS)], model.state_dict()])
    assert not differences(*results)
    assert "_SingleProcessDataLoaderIter" in reasons(fn)[0]
