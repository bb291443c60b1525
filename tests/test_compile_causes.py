"""Why a model is not one graph, under ``fullgraph``: the cause, the user's line, what to do."""

from __future__ import annotations

import re
import time

import pytest
import torch
from torch import nn
from torch._inductor.exc import CppCompileError

from torchfast import CompileError, CompileRecord
from torchfast.compiler import CompiledModule
from torchfast.compiler.causes import explained, is_of_the_machine

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@torch.library.custom_op("torchfast_tests::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    """Has no fake implementation."""
    return x.clone()


library = torch.library.Library("torchfast_tests_causes", "DEF")
library.define("defined(Tensor x) -> Tensor")
library.impl("defined", torch.Tensor.clone, "CPU")


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


class WithoutFakeByTheLibrary(Line):
    def forward(self, x):
        return torch.ops.torchfast_tests_causes.defined(self.line(x).detach())


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
    WithoutFakeByTheLibrary: (
        "the operator torchfast_tests_causes::defined has no fake implementation",
        1,
        "torch.library.register_fake\\('torchfast_tests_causes::defined'\\)",
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
        pytest.raises(CompileError, match=f"{cause}.*, at {place}. Remedy: .*{remedy}") as raised,
    ):
        model(torch.ones(4, 8))
    assert "torch.compiler.disable" not in str(raised.value)  # which fullgraph allows as little
    assert not re.search(r"\.[.,;]", str(raised.value))


def test_an_operator_without_fake_is_named_where_it_runs_eagerly(caplog):
    model = WithoutFake()
    x = torch.ones(4, 8)
    with CompiledModule(model, backend="eager") as handle:
        assert torch.equal(model(x), model.line(x))
        assert "torchfast_tests::without_fake has no fake" in handle.status[""]
    assert "torchfast_tests::without_fake has no fake implementation" in caplog.text


def test_the_record_names_an_operator_without_fake():
    model = WithoutFakeByTheLibrary()
    with CompiledModule(model, backend="eager"), CompileRecord() as record:
        model(torch.ones(4, 8))
    (found,) = record.summary().graph_breaks
    assert found.kind == "no fake"
    assert found.reason.startswith("the operator torchfast_tests_causes::defined has no fake")
    assert found.remedy.endswith("register_fake('torchfast_tests_causes::defined')")


def test_what_the_machine_lacks_is_told_from_below_what_the_compiler_says():
    error = CppCompileError(["g++", "x.cpp"], "x.cpp:1: fatal error: No space left on device")
    cause, remedy = explained(error, 60.0)
    assert is_of_the_machine(cause)
    assert "TORCHINDUCTOR_CACHE_DIR" in remedy
    assert "CXX" in explained(CppCompileError(["g++"], "no such header"), 60.0)[1]


def test_a_cause_that_was_cut_looks_so():
    assert explained(RuntimeError("word " * 100), 60.0)[0].endswith("...")
    assert explained(RuntimeError("It failed."), 60.0)[0] == "RuntimeError: It failed"


def test_what_is_of_the_machine():
    assert is_of_the_machine("InvalidCxxCompiler: No working C++ compiler found")
    assert is_of_the_machine("OSError: [Errno 28] No space left on device")
    assert not is_of_the_machine("RuntimeError: no kernel")
