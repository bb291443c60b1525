"""What cannot be compiled runs eagerly, once, and says why; a hang ends; errors stay the user's."""

from __future__ import annotations

import copy
import inspect
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchfast._core.errors import CompileError, TorchFastError
from torchfast.compiler import CompiledModule, CompileOptions, compile_callable
from torchfast.compiler.timeout import CallTimeoutError, call_within


@pytest.fixture(autouse=True)
def clean_dynamo():
    torch._dynamo.reset()
    handlers = [signal.getsignal(n) for n in range(signal.SIGRTMIN, signal.SIGRTMAX + 1)]
    yield
    torch._dynamo.reset()
    for thread in threading.enumerate():
        if thread.name == "torchfast-keys":  # ends by itself, when what it reads has been read
            thread.join()
    assert not [t for t in threading.enumerate() if t.name.startswith("torchfast")]
    assert handlers == [signal.getsignal(n) for n in range(signal.SIGRTMIN, signal.SIGRTMAX + 1)]


def told(caplog):
    return [r.getMessage() for r in caplog.records if r.name.startswith("torchfast")]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if x.shape[0] == 13:
            raise ValueError("thirteen rows")
        return torch.relu(self.norm(self.line(x))) + x


class Broken(Block):
    """Its graph breaks in the middle, after the statistics of the norm."""

    def forward(self, x):
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y * 2 + torch.rand_like(y)


class Backend:
    """Fails, or does what else it is told, at some of the graphs."""

    def __init__(self, act, at=lambda number: True):
        self.act, self.at, self.number = act, at, 0

    def __call__(self, graph, inputs):
        self.number += 1
        if self.at(self.number):
            self.act()
        return graph.forward


def fails():
    raise NotImplementedError("no such kernel\nin this machine")


ROWS = torch.linspace(-1, 1, 32).reshape(4, 8)


def assert_as_eager(model, handle, x=ROWS, calls=1):
    """Outputs, statistics and random numbers are those of the eager model."""
    eager = copy.deepcopy(model)
    results = []
    for twin in (model, eager):
        torch.manual_seed(0)
        results.append([twin(x) for _ in range(calls)])
    torch.testing.assert_close(*results)
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert model.calls == eager.calls if hasattr(model, "calls") else True


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
            ):
                model(ROWS)
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


# -- A compiler that hangs -------------------------------------------------------------------------


def spins():
    while True:
        pass


def waits():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def swallows():
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        try:
            time.sleep(0.1)
        except BaseException:
            continue
    time.sleep(60)


def runs_a_process():
    subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"], check=True)


HANGS = [spins, waits, swallows, runs_a_process, lambda: time.sleep(60)]


# What is raised at any line may be lost in a destructor; a second later it comes again.
LOST = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@LOST
@pytest.mark.parametrize("hang", HANGS, ids=["spin", "lock", "swallow", "process", "sleep"])
def test_a_compile_that_hangs_ends_in_the_main_thread(hang, caplog):
    model = Block()
    alarm = signal.getitimer(signal.ITIMER_REAL)
    backend = Backend(hang)
    with CompiledModule(model, backend=backend, timeout_s=0.5) as handle:
        start = time.monotonic()
        assert_as_eager(model, handle, calls=2)
        assert time.monotonic() - start < 30
        assert "compiling took longer than timeout_s=0.5" in handle.status[""]
        assert backend.number == 1
        assert len(told(caplog)) == 1
        assert "regions='blocks'" in told(caplog)[0]
    # The alarm of others, pytest-timeout's here, goes on.
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (alarm[0] > 0)


@LOST
def test_a_compile_that_hangs_ends_in_another_thread():
    model = Block()
    with CompiledModule(model, backend=Backend(spins), timeout_s=0.5) as handle:
        thread = threading.Thread(target=assert_as_eager, args=(model, handle))
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        assert "compiling took longer" in handle.status[""]


def test_the_limit_is_for_all_that_one_call_compiles():
    model = Broken()
    backend = Backend(lambda: time.sleep(0.7))
    with CompiledModule(model, backend=backend, timeout_s=1.2) as handle:
        assert_as_eager(model, handle)
        assert "compiling took longer" in handle.status[""]


def test_a_slow_forward_is_no_slow_compile():
    class Slow(nn.Module):
        @torch.compiler.disable
        def wait(self):
            time.sleep(1.2)

        def forward(self, x):
            y = x.sin()
            self.wait()
            return y * 2

    model = Slow()
    with CompiledModule(model, backend="eager", timeout_s=1.0) as handle:
        model(ROWS)
        assert handle.status == {"": "compiled"}


def test_a_call_within_its_limit_returns_and_its_errors_pass():
    assert call_within(5.0, max, 1, 2) == 2
    with pytest.raises(ZeroDivisionError):
        call_within(5.0, lambda: 1 / 0)
    with pytest.raises(CallTimeoutError):
        call_within(0.05, time.sleep, 20)
    with pytest.raises(CallTimeoutError):
        call_within(0.0, max, 1, 2)


def test_limits_within_limits():
    def inner():
        with pytest.raises(CallTimeoutError):
            call_within(0.05, time.sleep, 20)
        return "inner ended"

    assert call_within(20.0, inner) == "inner ended"
    start = time.monotonic()
    with pytest.raises(CallTimeoutError):
        call_within(0.2, call_within, 20.0, time.sleep, 30)
    assert time.monotonic() - start < 10


def test_a_signal_that_is_taken_is_left_alone():
    seen = []
    signal.signal(signal.SIGRTMIN, lambda number, frame: seen.append(number))
    try:
        with pytest.raises(CallTimeoutError):
            call_within(0.05, time.sleep, 20)
    finally:
        signal.signal(signal.SIGRTMIN, signal.SIG_DFL)
    assert seen == []


AFTER_LIMITS = """
import importlib.util, sys, threading, time

spec = importlib.util.spec_from_file_location("timeout", sys.argv[1])
timeout = importlib.util.module_from_spec(spec)
spec.loader.exec_module(timeout)
ended = []

def in_a_thread(seconds, function, *args):
    def run():
        try:
            ended.append(timeout.call_within(seconds, function, *args))
        except timeout.CallTimeoutError:
            ended.append("interrupted")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

def long():
    time.sleep(0.2)
    return "never here"

in_a_thread(20.0, max, 1, 2)
in_a_thread(0.02, long)
in_a_thread(20.0, timeout.call_within, 20.0, max, 3, 4)
sys.setprofile(lambda *_: None)
(lambda: None)()  # where an interruption was taken back, Python 3.11 stays here for good
sys.setprofile(None)
print(ended)
"""


def test_no_limit_leaves_the_interpreter_looking_for_what_was_taken_back():
    command = [sys.executable, "-c", AFTER_LIMITS, inspect.getfile(call_within)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[2, 'interrupted', 4]"
