"""The fingerprint of a model is the same in every process and differs where code could branch."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
import time
import types
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchfast._core.batches import MicroBatches
from torchfast._core.fingerprint import batch_signature, model_fingerprint

ROOT = Path(__file__).parent.parent


class Block(nn.Module):
    def __init__(self, width=4, p=0.1):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(width))
        self.p = p
        self.sizes = [1, 2]
        self.activation = F.gelu
        self.names = {"b", "a", "c"}
        self.config = types.SimpleNamespace(attention="sdpa", layers=2, _own_hash=hash("sdpa"))

    def forward(self, x):
        return x + F.dropout(self.activation(self.linear(x)), self.p, self.training)


def build():
    return nn.Sequential(Block(), Block())


PROBE = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from test_fingerprint import build
from torchfast._core.fingerprint import model_fingerprint
print(model_fingerprint(build()))
"""


def test_it_is_the_same_in_processes_that_hash_otherwise():
    outputs = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROBE.format(root=str(ROOT))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert len(outputs.pop().strip()) == 64


def test_the_values_of_weights_and_a_trained_step_leave_it_alone():
    model = build()
    before = model_fingerprint(model)
    model(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1.0
    model.register_forward_hook(lambda *_: None)
    model[0].name_or_path = model[0].config._name_or_path = "checkpoints/step-2000"
    assert model_fingerprint(model) == before


def untie(model):
    model[1].linear.bias = model[0].linear.bias


def replace_forward(model):
    class Block(type(model[0])):
        __qualname__ = "Block"
        __module__ = type(model[0]).__module__

        def forward(self, x):
            return x - self.linear(x)

    model[1].__class__ = Block


CHANGES = {
    "width": lambda m: setattr(m[1], "linear", nn.Linear(4, 4, bias=False)),
    "dtype": lambda m: m[1].to(torch.bfloat16),
    "eval": lambda m: m[1].eval(),
    "scalar": lambda m: setattr(m[1], "p", 0.2),
    "int for bool": lambda m: setattr(m[1], "p", True),
    "list": lambda m: m[1].sizes.append(3),
    "set": lambda m: m[1].names.add("d"),
    "function": lambda m: setattr(m[1], "activation", F.relu),
    "partial": lambda m: setattr(m[1], "activation", functools.partial(F.gelu)),
    "config": lambda m: setattr(m[1].config, "attention", "eager"),
    "config's number": lambda m: setattr(m[1].config, "num_hashes", 2),
    "frozen": lambda m: m[1].linear.weight.requires_grad_(False),
    "strides": lambda m: setattr(m[1].linear.weight, "data", m[1].linear.weight.data.t()),
    "buffer": lambda m: m[1].register_buffer("more", torch.zeros(1)),
    "parameter for buffer": lambda m: (
        delattr(m[1], "mask"),
        setattr(m[1], "mask", nn.Parameter(torch.ones(4), requires_grad=False)),
    ),
    "tied": untie,
    "shared": lambda m: m.__setitem__(1, m[0]),
    "one more": lambda m: m.append(Block()),
    "order": lambda m: (
        m._modules.move_to_end("0")
        if hasattr(m._modules, "move_to_end")
        else m._modules.update({"0": m._modules.pop("0")})
    ),
    "code": replace_forward,
    "private number": lambda m: setattr(m[1], "_depth", 3),
    "own forward": lambda m: setattr(m[1], "forward", types.MethodType(doubled, m[1])),
}


def doubled(module, x):
    return 2 * module.linear(x)


def activation_of(factor, default=1.0, body="times"):
    """Return functions of one name that compute different things."""
    if body == "times":

        def activation(x, scale=default):
            return x * factor * scale

    else:

        def activation(x, scale=default):
            return x + factor + scale

    activation.__qualname__ = "activation"
    return activation


@pytest.mark.parametrize(
    "other", [activation_of(2.0), activation_of(1.0, 2.0), activation_of(1.0, body="plus")]
)
def test_a_function_is_told_by_what_it_computes_and_not_by_its_name(other):
    found = []
    for activation in (activation_of(1.0), activation_of(1.0), other):
        model = build()
        model[1].activation = activation
        found.append(model_fingerprint(model))
    assert found[0] == found[1] != found[2]
    assert found[1] != found[2]


@pytest.mark.parametrize(("factor", "default"), [(2.0, 1.0), (1.0, 2.0)])
def test_a_method_is_told_by_the_values_that_it_was_made_with(factor, default):
    def model_of(factor, default):
        class Made(nn.Module):
            def forward(self, x, scale=default):
                return x * factor * scale

        Made.__qualname__ = "Made"
        return Made()

    first, same, other = model_of(1.0, 1.0), model_of(1.0, 1.0), model_of(factor, default)
    assert model_fingerprint(first) == model_fingerprint(same) != model_fingerprint(other)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_differs(change):
    model = build()
    before = model_fingerprint(model)
    assert model_fingerprint(build()) == before
    change(model)
    assert model_fingerprint(model) != before


def test_code_can_be_left_out():
    model = build()
    before = model_fingerprint(model, code=False)
    replace_forward(model)
    assert model_fingerprint(model, code=False) == before


def test_lazy_and_odd_attributes_are_taken():
    model = nn.Sequential(nn.LazyLinear(3), nn.Identity())
    model[1].itself = [model[1].__dict__]  # a cycle
    model[1].surrogate = "\udcff"
    model[1].lock = __import__("threading").Lock()
    assert model_fingerprint(model) == model_fingerprint(model)


# -- Batches ---------------------------------------------------------------------------------------


@dataclass
class Pair:
    inputs: torch.Tensor
    targets: torch.Tensor


def test_batches_are_told_by_structure_shape_and_dtype():
    x, y = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
    batches = [
        x,
        y,
        (x, y),
        [x, y],
        {"x": x},
        {"z": x},
        Pair(x, y),
        MicroBatches([x]),
        MicroBatches([x, x]),
        torch.zeros(3, 2).t(),
        x.double(),
        torch.zeros(2, 3, requires_grad=True),
        (x, 1),
        (x, None),
        nn.utils.rnn.pack_sequence([x, x]),
    ]
    signatures = [batch_signature(batch) for batch in batches]
    assert len(set(signatures)) == len(batches)
    assert signatures[6] == "Pair(inputs=float32[2, 3] cpu, targets=int64[2] cpu)"


def test_values_of_batches_are_not_told():
    first = (torch.zeros(2), 1, "a")
    assert batch_signature(first) == batch_signature((torch.ones(2), 2, "b"))


def test_what_a_closure_holds_beside_values_is_told_by_its_class():
    """A logger changes with each message, and a module holds everything."""
    logger = logging.getLogger("of a closure")
    gone = weakref.proxy(nn.Linear(1, 1))  # at once
    nested = {i: {j: dict.fromkeys(range(100), 0) for j in range(100)} for i in range(100)}

    class Made(nn.Module):
        def forward(self, x):
            logger.debug("called", gone)
            return torch.sin(x) * nested[0][0][0]

    before = model_fingerprint(Made())
    start = time.perf_counter()
    logger.warning("told")
    logging.getLogger("of a closure.and another")
    assert model_fingerprint(Made()) == before
    assert time.perf_counter() - start < 1.0
