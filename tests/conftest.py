"""What all tests share: one thread a process, and the profiles of hypothesis."""

import gc
import json
import math
import os

# Steps of a few microseconds are not made faster by threads, and workers of xdist share the cores.
# It has to be said before torch is imported, and holds for processes that tests start as well.
os.environ["OMP_NUM_THREADS"] = "1"
# What the inductor builds is small kernels: which vectors the compiler of C++ can do need not be
# tried. Its headers are precompiled, as torch has it by itself: that halves what a kernel takes.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"

import pytest
import torch
from hypothesis import settings

import costs
from simulated_device import Prompt, simulated
from tape import taped

torch.set_num_threads(1)
costs.leave_out()


def pytest_collection_finish(session):
    set_aside()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or nextitem.path != item.path:
        set_aside()


def set_aside():
    """Have the garbage collector look no more at what is alive now: modules and tests, mostly.

    They are half a million objects. A capture collects garbage before it begins, and so do tests of
    what is freed: that took a second each, and half of the time of all tests.
    """
    gc.collect()
    gc.freeze()


# A training step has no useful deadline: its first call compiles, allocates and loads libraries.
settings.register_profile("dev", deadline=None)
# In CI the examples are the same in every run, so that a change is judged and not its luck.
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture
def device(monkeypatch):
    """A simulated device, through whose ring every loader of the test feeds."""
    with simulated(monkeypatch) as device:
        yield device


@pytest.fixture(params=["one by one", "through the ring", "through the ring without a thread"])
def every_way(request, monkeypatch):
    """Each way that a batch can take to its step."""
    if request.param == "one by one":
        yield
        return
    too_slow_s = math.inf if request.param.endswith("without a thread") else 0.0
    with simulated(monkeypatch, too_slow_s) as device:
        device.kind = Prompt
        yield


@pytest.fixture
def run_benchmark(monkeypatch, tmp_path, capsys):
    """A function that runs a benchmark small on the CPU; returns its rows and what it printed."""

    def run(benchmark, *more):
        out = tmp_path / "figures.json"
        options = ["--device", "cpu", "--size", "smoke", "--rounds", "2", "--out", str(out)]
        monkeypatch.setattr("sys.argv", ["benchmark.py", *options, *more])
        try:
            benchmark.main()
        finally:
            torch.use_deterministic_algorithms(False)
        return json.loads(out.read_text())["rows"], capsys.readouterr().out

    return run


@pytest.fixture
def tape(monkeypatch):
    """Steps on the CPU are captured on tape; the backends that do it, newest last."""
    with taped(monkeypatch) as backends:
        yield backends


@pytest.fixture
def fresh_dynamo():
    """The compiler knows nothing of what other tests compiled, and they nothing of this one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["whole", "samples"])
def room(request, monkeypatch):
    """Judge replays by copies, and as where a state is large beside the device's memory."""
    from torchfast.graphs import replay_check, run_ends, saved_named_state

    if request.param == "samples":
        monkeypatch.setattr(run_ends, "SAMPLE", 2)
        for module in (replay_check, saved_named_state):
            monkeypatch.setattr(module, "have_room", lambda *_: False)
