"""What makes a start with compiled code on disk shorter, and that it leaves nothing changed."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch
from torch import nn

from torchfast import CompiledModule
from torchfast.compiler import early_keys

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


def test_the_keys_are_worked_out_in_a_thread(monkeypatch):
    from torch._inductor import codecache

    asked = []

    def key():
        asked.append(threading.current_thread())
        raise OSError("cannot be read")  # which is for him who needs it

    monkeypatch.setattr(codecache, "torch_key", key)
    thread = early_keys.work_out_keys()
    assert thread is not None
    thread.join()
    assert asked == [thread]


@pytest.mark.parametrize(("backend", "number"), [("inductor", 1), ("eager", 0)])
def test_only_what_looks_them_up_has_them_worked_out(backend, number, monkeypatch):
    asked = []
    monkeypatch.setattr("torchfast.compiler.account.work_out_keys", lambda: asked.append(1))
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
    thread = early_keys.work_out_keys()
    assert (thread is None) == (broken != "triton_compat")


def test_without_the_keys_nothing_is_amiss(monkeypatch):
    from torch._inductor import codecache

    monkeypatch.delattr(codecache, "torch_key")
    assert early_keys.work_out_keys() is None
