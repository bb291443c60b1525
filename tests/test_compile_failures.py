"""What cannot be compiled runs eagerly, once, and says why; errors stay the user's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from failing_compilers import ROWS, Backend, Block, Broken, assert_as_eager, dynamo_left_clean, told
from torchfast._core.errors import CompileError, TorchFastError
from torchfast.compiler import CompiledModule, CompileOptions, compile_callable


@pytest.fixture(autouse=True)
def clean_dynamo():
    with dynamo_left_clean():
        yield


def fails():
    raise NotImplementedError("no such kernel\nin this machine")


# -- A compiler that fails -------------------------------------------------------------------------


@pytest.mark.parametrize("model", [Block(), Broken()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("first", [1, 2])
def test_a_failing_backend_runs_eagerly_and_nothing_twice(model, first, caplog):
    backend = Backend(fails, lambda number: number >= first)
    with CompiledModule(model, backend=backend) as handle:
        assert_as_eager(model, handle, calls=3)
        number = backend.number
        assert handle.status[""].startswith("eager: NotImplementedError: no such kernel.")
        assert len(told(caplog)) == 1
        assert told(caplog)[0].startswith(f"the whole model ({type(model).__name__}) runs eagerly")
        assert "Remedy: on_failure='raise'" in told(caplog)[0]
        assert handle.report().stepped_aside
        model(ROWS[:2])
        assert backend.number == number


def test_one_kind_fails_and_the_others_are_compiled(caplog):
    class Tall(Block):
        pass

    model = nn.Sequential(*(Block() for _ in range(3)), *(Tall() for _ in range(2)))
    with CompiledModule(
        model, backend=Backend(fails, lambda n: n == 1), regions="blocks"
    ) as handle:
        assert_as_eager(model, handle)
        states = list(handle.status.values())
        assert all(state.startswith("eager: NotImplementedError") for state in states[:3])
        assert states[3:] == ["compiled"] * 2
        assert len(told(caplog)) == 1
        assert told(caplog)[0].startswith("0 to 2 (Block) runs eagerly")
        outcomes = [decision.outcome for decision in handle.decisions()]
        assert outcomes == ["applied", "stepped aside", "applied"]


def test_a_failure_at_a_later_recompile():
    model = Block()
    with CompiledModule(model, backend=Backend(fails, lambda n: n == 2), dynamic=False) as handle:
        assert_as_eager(model, handle)
        assert handle.status == {"": "compiled"}
        assert_as_eager(model, handle, x=torch.ones(3, 8))
        assert handle.status[""].startswith("eager")


def test_raise_raises_at_each_call():
    model = Block()
    with CompiledModule(model, backend=Backend(fails), on_failure="raise"):
        for _ in range(2):
            with pytest.raises(
                CompileError, match=r"the whole model \(Block\) cannot be compiled: No"
            ) as caught:
                model(ROWS)
            assert "no such kernel" in str(caught.value.__cause__)
    assert issubclass(CompileError, TorchFastError)
    assert issubclass(CompileError, RuntimeError)
    with pytest.raises(CompileError) as caught:
        compile_callable(torch.sin, CompileOptions(backend=Backend(fails), on_failure="raise"))(
            ROWS
        )
    assert "no such kernel" in str(caught.value.__cause__)


def test_a_backend_that_does_not_exist(caplog):
    model = Block()
    with CompiledModule(model, backend="indcutor") as handle:
        assert_as_eager(model, handle)
        assert "torch._dynamo.list_backends()" in handle.status[""]
        assert len(told(caplog)) == 1
    with pytest.raises(CompileError, match="Invalid backend"):
        CompiledModule(model, backend="indcutor", on_failure="raise")
    assert "_compiled_call_impl" not in vars(model)


def test_an_internal_error_of_the_compiler(monkeypatch):
    from torch._dynamo import output_graph

    def breaks(*args, **kwargs):
        raise KeyError("lost")

    model = Block()
    with CompiledModule(model, backend="eager") as handle:
        monkeypatch.setattr(output_graph.OutputGraph, "compile_and_call_fx_graph", breaks)
        assert_as_eager(model, handle)
        assert "KeyError" in handle.status[""]


def test_without_a_compiler_for_cpp(tmp_path, monkeypatch):
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = nn.Linear(3, 5)
    without = {"cpp.cxx": (None, "no-such-compiler"), "compile_threads": 1, "fx_graph_cache": False}
    with config.patch(without):
        handle = CompiledModule(model)
        eager = copy.deepcopy(model)
        x = torch.ones(2, 3, requires_grad=True)
        torch.testing.assert_close(model(x).sin(), eager(x).sin())
        compiled = compile_callable(lambda x: (x.sin() * 3).cos())
        torch.testing.assert_close(compiled(x), (x.sin() * 3).cos())
        handle.close()
    assert "install a C++ compiler" in compiled.status


def test_the_backward_is_compiled_where_a_failure_can_be_answered():
    from torch._dynamo.backends.common import aot_autograd

    def no_backward(graph, inputs):
        raise NotImplementedError("no backward here")

    def forward(graph, inputs):
        return graph.forward

    for grad in (True, False):
        model = nn.Linear(8, 8)
        backend = aot_autograd(fw_compiler=forward, bw_compiler=no_backward)
        with CompiledModule(model, backend=backend) as handle, torch.set_grad_enabled(grad):
            loss = model(ROWS).sum()
            if grad:
                loss.backward()
                assert "no backward here" in handle.status[""]
                assert model.weight.grad is not None
            else:
                assert handle.status == {"": "compiled"}


# -- The user's own errors -------------------------------------------------------------------------


@pytest.mark.parametrize("on_failure", ["eager", "raise"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_an_error_of_the_model_passes_and_is_no_failure(fullgraph, on_failure, caplog):
    model = Block()
    with CompiledModule(
        model, backend="eager", fullgraph=fullgraph, on_failure=on_failure
    ) as handle:
        for _ in range(2):
            with pytest.raises(ValueError, match="thirteen rows"):
                model(torch.ones(13, 8))
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                model(torch.ones(2, 9))
        assert handle.status == {"": "not called"}
        assert_as_eager(model, handle, calls=2)
        assert handle.status == {"": "compiled"}
        with pytest.raises(ValueError, match="thirteen rows"):
            model(torch.ones(13, 8))
        assert handle.status == {"": "compiled"}
    assert told(caplog) == []


def test_a_graph_break_is_an_error_under_fullgraph():
    model = Broken()
    with CompiledModule(model, backend="eager", fullgraph=True):
        for _ in range(2):
            with pytest.raises(CompileError, match="leave fullgraph out"):
                model(ROWS)
    with CompiledModule(model, backend="eager") as handle:
        assert_as_eager(model, handle, calls=2)
        assert handle.status == {"": "compiled"}


def test_a_failing_backend_under_fullgraph_runs_eagerly():
    model = Block()
    with CompiledModule(model, backend=Backend(fails), fullgraph=True) as handle:
        assert_as_eager(model, handle, calls=2)
        assert handle.status[""].startswith("eager: NotImplementedError")


# -- Silent non-compilation ------------------------------------------------------------------------


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_under_a_dispatch_mode_nothing_is_compiled_but_later(caplog):
    model = Block()
    with CompiledModule(model, backend="eager") as handle:
        with Watching():
            model(ROWS)
            model(ROWS)
        assert "TorchDispatchMode Watching is active" in handle.status[""]
        assert len(told(caplog)) == 1
        # Torch itself would leave the code alone for ever.
        assert_as_eager(model, handle)
        assert handle.status == {"": "compiled"}


def test_a_stance_and_a_switched_off_compiler():
    model = Block()
    with CompiledModule(model, backend="eager") as handle:
        with torch.compiler.set_stance("force_eager"):
            model(ROWS)
        assert "set_stance('force_eager')" in handle.status[""]
        model(ROWS)
        assert handle.status == {"": "compiled"}
    model = Block()
    with torch._dynamo.config.patch(disable=True), CompiledModule(model, backend="eager") as handle:
        assert_as_eager(model, handle)
        assert "the compiler is switched off" in handle.status[""]


def test_after_the_recompile_limit(caplog):
    class Scaled(nn.Module):
        def forward(self, x, word):
            return x * len(word) if word != "x" else x

    model = Scaled()
    with CompiledModule(model, backend="eager") as handle:
        for number in range(8):
            model(ROWS, "a" * number)
        assert told(caplog) == []
        model(ROWS, "a" * 9)
        model(ROWS, "a" * 10)
        (said,) = told(caplog)
        assert "the recompile limit is reached" in said
        assert handle.decisions()[1].outcome == "stepped aside"
        assert "recompile limit" in handle.decisions()[1].detail


def test_what_holds_no_tensor_operation_is_not_called_compiled():
    handle = CompiledModule(nn.Identity(), backend="eager")
    with handle:
        assert handle.status == {"": "not called"}
        function = compile_callable(lambda: 3, CompileOptions(backend="eager"))
        assert function() == 3
        assert function.status.startswith("eager: ")
