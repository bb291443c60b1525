"""Why a model is not one graph, under ``fullgraph``: the cause, the user's line, what to do."""

from __future__ import annotations

import re
import time

import pytest
import torch
from torch import nn

from torchfast import CompileError
from torchfast.compiler import CompiledModule
from torchfast.compiler.causes import is_of_the_machine

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@torch.library.custom_op("torchfast_tests::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    """Has no fake implementation."""
    return x.clone()


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 3)


class Prints(Line):
    def forward(self, x):
        y = self.line(x)
        print("y", y.mean())  # noqa: T201
        return y


class Branches(Line):
    def forward(self, x):
        y = self.line(x)
        return y if y.mean() > 10 else -y


class BranchesOnANumber(Line):
    def forward(self, x):
        y = self.line(x)
        return y if y.abs().mean().item() > 100 else -y


class AsksTheTime(Line):
    def forward(self, x):
        return self.line(x) * time.time()


class WithoutFake(Line):
    def forward(self, x):
        return without_fake(self.line(x))


CASES = {
    Prints: (r"print\(\) cannot be a part of a graph", 2, "take the line out"),
    Branches: ("an if, while or assert on the value of a tensor", 2, "torch.where or torch.cond"),
    BranchesOnANumber: ("an if, while or assert on the value of a tensor", 2, "torch.where"),
    AsksTheTime: ("cannot look into: time.time", 1, "call it before the model"),
    WithoutFake: (
        "the operator torchfast_tests::without_fake has no fake implementation",
        1,
        "torch.library.register_fake\\('torchfast_tests::without_fake'\\)",
    ),
}


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.parametrize("make", CASES)
def test_cause_line_and_remedy_are_told(make):
    cause, lines, remedy = CASES[make]
    line = make.forward.__code__.co_firstlineno + lines
    place = f"{re.escape(__file__)}:{line}"
    model = make()
    with (
        CompiledModule(model, fullgraph=True, backend="eager"),
        pytest.raises(CompileError, match=f"{cause}.*, at {place}. Remedy: .*{remedy}"),
    ):
        model(torch.ones(4, 8))


def test_an_operator_without_fake_is_named_where_it_runs_eagerly(caplog):
    model = WithoutFake()
    x = torch.ones(4, 8)
    with CompiledModule(model, backend="eager") as handle:
        assert torch.equal(model(x), model.line(x))
        assert "torchfast_tests::without_fake has no fake" in handle.status[""]
    assert "torchfast_tests::without_fake has no fake implementation" in caplog.text


def test_what_is_of_the_machine():
    assert is_of_the_machine("InvalidCxxCompiler: No working C++ compiler found")
    assert is_of_the_machine("OSError: [Errno 28] No space left on device")
    assert not is_of_the_machine("RuntimeError: no kernel")
