"""Calls of what is compiled: keywords of any name, and calls in which nothing is computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from compile_models import compiled
from failing_compilers import told
from torchfast.compiler import CompileOptions, compile_callable


class Named(nn.Module):
    """Whose keyword is the name of an argument of what compiles it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Keyword() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, module=2.0, function=1.0, conversion=0.5)
        return x


class Keyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, module=1.0, function=0.0, conversion=0.0):
        return self.linear(x) * module + function + conversion


TRACERS = {
    "torch.jit": torch.jit.trace,
    "make_fx": lambda model, x: make_fx(model)(x),
    "torch.fx": lambda model, _: torch.fx.symbolic_trace(model),
}


@pytest.mark.parametrize("trace", TRACERS.values(), ids=TRACERS)
@pytest.mark.parametrize("regions", ["blocks", "whole"])
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_trace_follows_the_model_as_it_is(trace, regions):
    """Torch traces nothing that it has compiled, and the model looks like one that it has not."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])
    x = torch.ones(2, 4)
    with compiled(model, regions=regions) as handle:
        for _ in range(2):
            torch.testing.assert_close(trace(model, x)(x), model(x))
        assert set(handle.status.values()) == {"compiled"}


@pytest.mark.parametrize("regions", ["blocks", "whole"])
def test_a_keyword_may_have_any_name(regions):
    model, x = Named(), torch.ones(2, 4)
    expected = model(x)
    with compiled(model, regions=regions) as handle:
        torch.testing.assert_close(model(x), expected)
        assert set(handle.status.values()) == {"compiled"}
        with torch.compiler.set_stance("fail_on_recompile"):
            torch.testing.assert_close(model(x), expected)


def test_a_keyword_of_a_callable_may_have_any_name():
    options = CompileOptions(backend="eager")
    function = compile_callable(lambda x, function=1.0: x * function, options)
    torch.testing.assert_close(function(torch.ones(2), function=3.0), torch.full((2,), 3.0))


class Skipped(nn.Module):
    """A block that is left out now and then, as LayerDrop does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.is_left_out = False

    def forward(self, x):
        return x if self.is_left_out else x + self.linear(x)


def test_a_call_without_an_operation_says_nothing_of_later_ones(caplog):
    torch._dynamo.reset()
    model = nn.Sequential(Skipped(), Skipped())
    x = torch.ones(2, 4)
    with compiled(model, regions="blocks") as handle:
        for block in model:
            block.is_left_out = True
        assert model(x) is x
        (status,) = set(handle.status.values())
        assert status.startswith("eager: its calls so far had nothing to compile")
        for block in model:
            block.is_left_out = False
        model(x)
        assert set(handle.status.values()) == {"compiled"}
        model[0].is_left_out = True  # looked at again
        model(x)
        model[0].is_left_out = False
        before = handle.report().counters["graphs"]
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            model(torch.ones(3, 4))  # as is what differs behind that
        assert handle.report().counters["graphs"] > before
    assert not told(caplog)


def test_a_region_that_never_has_an_operation_is_asked_about_some_times_only(caplog):
    model = nn.Sequential(Skipped(), Skipped())
    for block in model:
        block.is_left_out = True
    with compiled(model, regions="blocks") as handle:
        for _ in range(40):
            model(torch.ones(2, 4))
        assert all("Remedy: compile other regions" in state for state in handle.status.values())
    assert len(told(caplog)) == 1


def test_a_compiled_region_that_often_has_no_operation_says_when_it_is_asked_no_more(caplog):
    torch._dynamo.reset()
    model = nn.Sequential(Skipped())
    with compiled(model, regions=("0",)) as handle:
        model(torch.ones(2, 4))
        model[0].is_left_out = True
        for _ in range(70):
            model(torch.ones(2, 4))
        assert handle.report().counters["graphs"] == 1
    (warning,) = told(caplog)
    assert "torch is asked no more" in warning


def test_parameters_that_are_not_initialized_are_refused():
    """Where a trace makes them, each block draws the same numbers."""
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"parameter 0\.weight .* call the model once"):
        compiled(model)
    model(torch.ones(2, 3))
    with compiled(model):
        model(torch.ones(2, 3))
