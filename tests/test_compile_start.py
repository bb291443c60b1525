"""What makes a start with compiled code on disk shorter, and that it leaves nothing changed."""

from __future__ import annotations

import contextvars
import functools
import gc
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from torchfast import CompiledModule
from torchfast.compiler import early_keys, early_launches

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)
    gc.enable()


def seen_while_compiling(fails=False):
    seen = []

    def backend(graph, inputs):
        seen.append(gc.get_threshold())
        if fails:
            raise NotImplementedError("no code")
        return graph.forward

    model = nn.Linear(2, 2)
    with CompiledModule(model, backend=backend):
        model(torch.ones(1, 2))
    return seen


@pytest.mark.parametrize("fails", [False, True])
def test_the_garbage_collector_comes_less_often_while_something_is_compiled(fails, thresholds):
    gc.set_threshold(700, 10, 5)
    assert seen_while_compiling(fails) == [(20_000, 10, 5)]
    assert gc.get_threshold() == (700, 10, 5)


@pytest.mark.parametrize("own", [(0, 10, 10), (1_000_000, 3, 3)])
def test_what_somebody_wants_of_the_garbage_collector_stays(own, thresholds):
    gc.set_threshold(*own)
    assert seen_while_compiling() == [own]
    assert gc.get_threshold() == own


@pytest.fixture(autouse=True)
def nothing_is_under_way():
    """No thread of another test is taken for one of this one."""
    for thread in threading.enumerate():
        if thread.name in (early_keys._NAME, early_keys._DRIVER_NAME):
            thread.join(60)


def test_the_keys_are_worked_out_in_a_thread(monkeypatch):
    from torch._inductor import codecache

    asked = []

    def key():
        asked.append(threading.current_thread())
        raise OSError("cannot be read")  # which is for him who needs it

    monkeypatch.setattr(codecache, "torch_key", key)
    monkeypatch.setattr(torch.version, "cuda", None)  # Triton's keys have threads of their own
    threads = early_keys.work_out_keys()
    begun = list(threads)
    early_keys.wait_for_keys(threads)
    assert asked == begun
    assert len(begun) == 1
    assert threads == []  # which are waited for once


@pytest.fixture
def as_with_cuda(monkeypatch):
    """Triton is there, whose key and driver are stand-ins, and something is on a GPU."""
    compat, driver = ModuleType("triton_compat"), ModuleType("driver")
    workers = ModuleType("async_compile")
    compat.triton_key = lambda: b"triton"
    pool = functools.lru_cache(1)(list)
    workers.AsyncCompile = SimpleNamespace(process_pool=pool)
    workers.maybe_warm_pool = pool
    driver.driver = SimpleNamespace(active=None)
    monkeypatch.setitem(sys.modules, "torch._inductor.runtime.triton_compat", compat)
    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", workers)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.runtime", ModuleType("triton.runtime"))
    monkeypatch.setitem(sys.modules, "triton.runtime.driver", driver)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return SimpleNamespace(compat=compat, driver=driver, workers=workers)


def test_both_keys_are_worked_out_at_the_same_time(as_with_cuda, monkeypatch):
    from torch._inductor import codecache

    meeting, met = threading.Barrier(2), []

    def key():
        meeting.wait(30)  # raises if nobody comes
        met.append(1)

    monkeypatch.setattr(codecache, "torch_key", key)
    as_with_cuda.compat.triton_key = key
    early_keys.wait_for_keys(early_keys.work_out_keys())
    assert len(met) == 2


def test_tritons_driver_is_started_beside_the_keys_and_not_waited_for(as_with_cuda, monkeypatch):
    from torch._inductor import codecache

    go, made = threading.Event(), threading.Event()

    class Config:
        @property
        def active(self):
            go.wait(30)
            made.set()

    monkeypatch.setattr(codecache, "torch_key", lambda: b"torch")
    as_with_cuda.driver.driver = Config()
    early_keys.wait_for_keys(early_keys.work_out_keys())
    assert not made.is_set()
    go.set()
    assert made.wait(30)


def test_torchs_workers_are_started_once_their_key_is_there(as_with_cuda, monkeypatch):
    from torch._inductor import codecache

    done = []
    monkeypatch.setattr(codecache, "torch_key", lambda: done.append("key"))
    pool = as_with_cuda.workers.AsyncCompile.process_pool
    as_with_cuda.workers.maybe_warm_pool = lambda: done.append("workers") or pool()
    early_keys.wait_for_keys(early_keys.work_out_keys())
    assert done == ["key", "workers"]
    # Once they were there, those that have gone idle are not woken for nothing.
    early_keys.wait_for_keys(early_keys.work_out_keys())
    assert done == ["key", "workers", "key"]
    pool.cache_clear()  # as in a process that was forked
    early_keys.wait_for_keys(early_keys.work_out_keys(for_gpu=False))
    assert done == ["key", "workers", "key", "key"]


@pytest.mark.parametrize(
    ("options", "is_on_gpu", "starts"),
    [({}, True, True), ({"mode": "auto"}, True, False), ({}, False, False)],
)
def test_only_what_is_compiled_for_a_gpu_has_workers_started(
    options, is_on_gpu, starts, monkeypatch
):
    asked = []
    monkeypatch.setattr(
        "torchfast.compiler.account.work_out_keys",
        lambda *, for_gpu: asked.append(for_gpu) or [],
    )
    monkeypatch.setattr(nn.Parameter, "is_cuda", is_on_gpu, raising=False)
    CompiledModule(nn.Linear(2, 2), **options).close()
    assert asked == [starts]


def test_the_threads_see_the_settings_of_whoever_begins(monkeypatch):
    from torch._inductor import codecache

    setting, seen = contextvars.ContextVar("setting", default="torch's"), []
    setting.set("the user's")
    monkeypatch.setattr(codecache, "torch_key", lambda: seen.append(setting.get()))
    monkeypatch.setattr(torch.version, "cuda", None)
    early_keys.wait_for_keys(early_keys.work_out_keys())
    assert seen == ["the user's"]


def test_all_who_wait_for_the_keys_wait():
    go, waiting, done = threading.Event(), threading.Barrier(3), []

    class Keys(threading.Thread):
        def join(self, timeout=None):
            waiting.wait(30)
            super().join(timeout)

    def wait():
        early_keys.wait_for_keys(threads)
        done.append(keys.is_alive())

    keys = Keys(target=go.wait, args=(30,), daemon=True)
    keys.start()
    threads = [keys]
    both = [threading.Thread(target=wait, daemon=True) for _ in range(2)]
    for thread in both:
        thread.start()
    waiting.wait(30)  # both have come
    assert done == []
    go.set()
    for thread in both:
        thread.join(30)
    assert done == [False, False]


def test_workers_that_do_not_start_are_for_whoever_needs_them(as_with_cuda, monkeypatch):
    from torch._inductor import codecache

    def start():
        asked.append(1)
        raise OSError("no more processes")

    asked = []
    monkeypatch.setattr(codecache, "torch_key", lambda: b"torch")
    as_with_cuda.workers.maybe_warm_pool = start
    early_keys.wait_for_keys(early_keys.work_out_keys())
    assert asked == [1]


def test_where_nothing_is_on_a_gpu_nothing_is_started(as_with_cuda, monkeypatch):
    assert len(early_keys._driver()) == len(early_keys._workers()) == 1
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert early_keys._driver() == early_keys._workers() == []


def test_a_second_owner_of_compiled_code_waits_for_what_the_first_has_begun(monkeypatch):
    from torch._inductor import codecache

    go, asked = threading.Event(), []

    def key():
        asked.append(1)
        go.wait(30)

    monkeypatch.setattr(codecache, "torch_key", key)
    monkeypatch.setattr(torch.version, "cuda", None)  # Triton's keys have threads of their own
    first, second = early_keys.work_out_keys(), early_keys.work_out_keys()
    assert first == second
    go.set()
    early_keys.wait_for_keys(second)
    assert len(asked) == 1


def test_a_compilation_begins_when_the_keys_are_there(monkeypatch):
    go, seen = threading.Event(), []

    class Keys(threading.Thread):
        def join(self, timeout=None):
            go.set()
            super().join(timeout)

    def trace(graph, inputs, **_):
        seen.append(keys.is_alive())
        return graph.forward

    keys = Keys(target=go.wait, args=(30,), daemon=True)
    keys.start()
    monkeypatch.setattr("torchfast.compiler.account.work_out_keys", lambda **_: [keys])
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", trace)
    model = nn.Linear(2, 2)
    with CompiledModule(model):
        model(torch.ones(1, 2))
    assert seen == [False]


@pytest.mark.parametrize(("backend", "number"), [("inductor", 1), ("eager", 0)])
def test_only_what_looks_them_up_has_them_worked_out(backend, number, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "torchfast.compiler.account.work_out_keys", lambda **_: asked.append(1) or []
    )
    model = nn.Linear(2, 2)
    CompiledModule(model, backend=backend).close()
    assert len(asked) == number


@pytest.mark.parametrize("broken", ["torch._inductor.codecache", "triton_compat"])
def test_an_import_that_fails_in_any_way_is_for_him_who_needs_it(broken, monkeypatch):
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name.endswith(broken):
                raise RuntimeError("the driver is too old")

    for name in [name for name in sys.modules if name.endswith(broken)]:
        monkeypatch.delitem(sys.modules, name)
        package, _, attribute = name.rpartition(".")
        monkeypatch.delattr(sys.modules[package], attribute, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(early_keys, "_ask", lambda keys: None)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    threads = early_keys.work_out_keys()
    assert bool(threads) == (broken == "triton_compat")


def test_without_the_keys_nothing_is_amiss(monkeypatch):
    from torch._inductor import codecache

    monkeypatch.delattr(codecache, "torch_key")
    assert early_keys.work_out_keys() == []


@pytest.mark.parametrize("is_there", [False, True])
def test_who_waits_for_the_keys_launches_what_is_launched_anyway(is_there, monkeypatch):
    go, launched = threading.Event(), []

    def launch():
        launched.append(thread.is_alive())
        go.set()

    monkeypatch.setattr(early_keys, "launch_early", launch)
    thread = threading.Thread(target=go.wait, args=(30,), daemon=True)
    thread.start()
    if is_there:
        go.set()
        thread.join(30)
    early_keys.wait_for_keys([thread])
    assert launched == ([] if is_there else [True])
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("is_initialized", "is_capturing", "launches"),
    [(False, False, False), (True, True, False), (True, False, True)],
)
def test_nothing_is_launched_early_but_where_a_gpu_is_used(
    is_initialized, is_capturing, launches, monkeypatch
):
    made = []

    def ones(*size, **_):
        made.append(size)
        raise torch.OutOfMemoryError("full")  # which is for him who needs it

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    monkeypatch.setattr(torch, "ones", ones)
    early_launches.launch_early()
    assert bool(made) == launches
