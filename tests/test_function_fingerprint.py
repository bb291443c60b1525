"""The fingerprint of a function differs where it computes something else, and nowhere else."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchfast._core.function_fingerprint import function_fingerprint

ROOT = Path(__file__).parent.parent
FACTOR = 2.0


def helper(x):
    return x.sum() * FACTOR


def other_helper(x):
    return x.mean() * FACTOR


class Step:
    """What holds a loss beside much else."""

    def __init__(self, weight=1.0, run="monday"):
        self.weight, self.run = weight, run
        self.criterion = nn.CrossEntropyLoss()
        self.num_steps = 0

    def loss(self, model, batch):
        return self.weight * self.criterion(model(batch), batch) + self.penalty(model)

    def penalty(self, model):
        return 0.0

    def log(self):
        return self.run


class Callable:
    def __init__(self, options):
        self.options = options

    def __call__(self, model, batch):
        return model(batch).sum() * self.options["scale"]


def closing_over(value):
    return lambda model, batch: value


def by_default(value):
    def loss(model, batch, weight=value):
        return weight * model(batch).sum()

    return loss


def wrapped(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)

    return call


def calling(function):
    return lambda model, batch: function(model(batch))


def smoothing(value):
    step = Step()
    step.criterion.label_smoothing = value
    return step.loss


SAME = {
    "a function": lambda: helper,
    "a method": lambda: Step().loss,
    "the value of a tensor": lambda: closing_over(torch.rand(3)),
    "a lambda": lambda: lambda model, batch: F.mse_loss(model(batch), batch),
    "a cycle": lambda: closing_over((lambda a: (a.append(a), a)[1])([])),
    "what has no fields": lambda: closing_over(object()),
    "a set": lambda: closing_over({"b", "a", "c"}),
    "torch.compile": lambda: torch.compile(helper),
}


@pytest.mark.parametrize("make", SAME.values(), ids=SAME)
def test_it_is_the_same_for_the_same_function(make):
    assert function_fingerprint(make()) == function_fingerprint(make())


DIFFERENT = {
    "code": (lambda m, b: m(b).sum(), lambda m, b: m(b).mean()),
    "operator": (lambda m, b: m(b) + 1, lambda m, b: m(b) - 1),
    "constant": (lambda m, b: m(b) * 2, lambda m, b: m(b) * 3),
    "closure": (closing_over(1.0), closing_over(2.0)),
    "closure's type": (closing_over(1), closing_over(True)),
    "shape": (closing_over(torch.ones(3)), closing_over(torch.ones(4))),
    "module": (closing_over(nn.Linear(2, 3)), closing_over(nn.Linear(2, 4))),
    "default": (by_default(1.0), by_default(2.0)),
    "a function of torch": (calling(F.relu), calling(F.gelu)),
    "a builtin of torch": (calling(torch.relu), calling(torch.tanh)),
    "a global function": (closing_over(helper), closing_over(other_helper)),
    "what is wrapped": (wrapped(helper), wrapped(other_helper)),
    "wrapped by torch": (torch.no_grad()(helper), torch.no_grad()(other_helper)),
    "compiled": (torch.compile(helper), torch.compile(other_helper)),
    "cached": (functools.lru_cache(helper), functools.lru_cache(other_helper)),
    "partial": (functools.partial(helper, x=1), functools.partial(helper, x=2)),
    "an attribute": (Step(1.0).loss, Step(2.0).loss),
    "an attribute of a module": (smoothing(0.0), smoothing(0.1)),
    "another method": (Step().loss, Step().penalty),
    "options of a callable": (Callable({"scale": 1.0}), Callable({"scale": 2.0})),
    "a nested list": (closing_over([1, [2, 3]]), closing_over([1, [2, 4]])),
}


@pytest.mark.parametrize(("one", "two"), DIFFERENT.values(), ids=DIFFERENT)
def test_it_differs_for_another_function(one, two):
    assert function_fingerprint(one) != function_fingerprint(two)


def calls_helper(model, batch):
    return helper(model(batch))


def changed_by(monkeypatch, name, value, function):
    before = function_fingerprint(function)
    monkeypatch.setitem(globals(), name, value)
    after = function_fingerprint(function)
    monkeypatch.undo()
    assert function_fingerprint(function) == before
    return after != before


def test_global_functions_and_what_they_read_are_seen(monkeypatch):
    assert changed_by(monkeypatch, "helper", other_helper, calls_helper)
    assert changed_by(monkeypatch, "FACTOR", 3.0, calls_helper)  # of a function that it calls
    assert not changed_by(monkeypatch, "other_helper", helper, calls_helper)


def test_a_method_that_the_loss_calls_is_seen_and_others_are_not(monkeypatch):
    before = function_fingerprint(Step().loss)
    monkeypatch.setattr(Step, "log", lambda self: None)
    assert function_fingerprint(Step().loss) == before
    monkeypatch.setattr(Step, "penalty", lambda self, model: 1.0)
    assert function_fingerprint(Step().loss) != before


def test_what_no_code_of_the_loss_names_is_not_seen():
    assert function_fingerprint(Step(run="monday").loss) == function_fingerprint(
        Step(run="tuesday").loss
    )


def test_large_containers_are_told_by_their_length():
    assert function_fingerprint(closing_over([1.0] * 1000)) == function_fingerprint(
        closing_over([2.0] * 1000)
    )
    assert function_fingerprint(closing_over([1.0] * 1000)) != function_fingerprint(
        closing_over([1.0] * 1001)
    )


PROBE = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import test_function_fingerprint as t
def loss(model, batch):
    return {code}
names = [loss, t.Step().loss, t.calls_helper, t.SAME["a set"](), t.SAME["torch.compile"]()]
print(*map(t.function_fingerprint, names))
"""


def fingerprints_in_a_process(seed, code):
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", PROBE.format(root=str(ROOT), code=code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_it_is_the_same_in_processes_that_hash_otherwise():
    one = fingerprints_in_a_process("1", "model(batch).sum()")
    two = fingerprints_in_a_process("2", "model(batch).sum() + 1")
    assert len(one) == 5
    assert one[1:] == two[1:]
    assert one[0] != two[0]  # the control: code of a script without a file counts
