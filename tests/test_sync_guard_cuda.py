"""SyncGuard on CUDA, simulated: torch's own check is a warning when the call returns."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from functools import partial

import pytest
import torch

from host_waits import Seen, batch, find, here, listening, torch_left_as_it_was
from torchfast import HostSyncError, SyncGuard
from torchfast._core import syncs
from torchfast._core.sync_calls import NO, PERHAPS, SURE, SyncCall
from torchfast._core.syncs import SyncWatch


@pytest.fixture(autouse=True)
def torch_stays_as_it_was():
    with torch_left_as_it_was():
        yield


class Check:
    """Stands for torch's check of CUDA synchronisation."""

    def __init__(self):
        self.mode = 0

    def wait(self):
        if self.mode:
            warnings.warn("called a synchronizing CUDA operation (at x.h:1.)", stacklevel=2)


@pytest.fixture
def check(monkeypatch):
    check = Check()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_get_sync_debug_mode", lambda: check.mode, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_set_sync_debug_mode", lambda mode: setattr(check, "mode", mode),
        raising=False,
    )  # fmt: skip
    return check


class Library:
    """Calls that wait, for sure or sometimes."""

    check: Check

    @staticmethod
    def read():
        time.sleep(0.02)
        Library.check.wait()

    @staticmethod
    def read_if(waits):
        if waits:
            Library.check.wait()


def watch_of_library():
    return SyncWatch(
        [
            SyncCall(Library, "read", "item", lambda *_: SURE),
            SyncCall(Library, "read_if", "boolean mask", lambda *_: PERHAPS),
        ]
    )


def test_a_wait_is_told_before_and_timed_after(check):
    Library.check = check
    with listening(Seen("cuda"), watch_of_library()) as seen:
        began = time.perf_counter()
        line = here() + 1
        Library.read()
        most_ms = (time.perf_counter() - began) * 1e3
    assert seen.expected == [("item", line)]
    ((kind, at, took),) = seen.heard
    assert (kind, at) == ("item", line)
    assert 20 <= took <= most_ms
    assert check.mode == 0


def test_what_may_wait_is_told_if_it_has(check):
    Library.check = check
    with listening(Seen("cuda"), watch_of_library()) as seen:
        Library.read_if(False)
        line = here() + 1
        Library.read_if(True)
    assert seen.expected == []
    assert [(kind, at) for kind, at, _ in seen.heard] == [("boolean mask", line)]


def test_a_wait_in_a_call_that_was_thought_not_to_wait_is_found(check):
    Library.check = check
    watch = SyncWatch([SyncCall(Library, "read", "item", lambda *_: NO)])
    with listening(Seen("cuda"), watch) as seen:
        assert Library.read.__name__ == "read"
        Library.read()
    # The frame that warns is here, as Python stands for C++.
    assert [(kind, took) for kind, _, took in seen.heard] == [("other", None)]


def test_the_function_in_place_of_a_call_is_passed_through():
    place = SyncCall(Library, "read", "item", lambda *_: NO)
    watch = SyncWatch([place])
    found = []
    original, Library.read = (
        Library.read,
        staticmethod(
            lambda: found.append(syncs._place(sys._getframe(1), "other", frozenset({"cuda"})))
        ),
    )
    try:
        with listening(Seen("cpu"), watch):
            line = here() + 1
            Library.read()
    finally:
        Library.read = staticmethod(original)
    assert [(p.file, p.line) for p in found] == [(__file__, line)]


def test_a_wait_that_is_no_known_call_is_found_by_torchs_check(check):
    with listening(Seen("cuda"), watch_of_library()) as seen:
        assert check.mode == 1
        line = here() + 1
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    assert check.mode == 0
    assert seen.heard == [("other", line, None)]


def test_of_one_wait_within_another_it_is_told_once(check):
    """Of an operator of the net that runs another one; torch's check speaks when all is over."""
    selects, finds = (
        SyncCall(torch.ops, name, kind, lambda *_: SURE)
        for name, kind in (("masked_select", "boolean mask"), ("nonzero", "nonzero"))
    )
    watch = SyncWatch([])

    def find_below():
        watch.run_below(finds, lambda: None, (), {}, sys._getframe())

    with listening(Seen("cuda"), watch) as seen:
        select_below = partial(watch.run_below, selects, find_below, (), {}, sys._getframe())
        speak = partial(warnings.warn, "called a synchronizing CUDA operation", stacklevel=1)
        for each in (select_below, select_below, speak, speak):
            line = here() + 1
            each()
    assert [(kind, at) for kind, at, _ in seen.heard] == [("boolean mask", line)] * 2


def test_torchs_check_is_not_heard_in_other_threads(check):
    with listening(Seen("cuda"), watch_of_library()) as seen:
        thread = threading.Thread(target=check.wait)
        thread.start()
        thread.join()
    assert seen.heard == []


def test_a_check_that_the_user_has_turned_on_stays_the_users(check):
    check.mode = 1
    with pytest.warns(match="synchronizing"), listening(Seen("cuda"), watch_of_library()) as seen:
        check.wait()
    assert check.mode == 1
    assert len(seen.heard) == 1


def test_other_warnings_pass(check):
    with pytest.warns(match="something else"), listening(Seen("cuda"), watch_of_library()):
        warnings.warn("something else", stacklevel=1)


def test_a_late_wait_is_raised_at_its_line(check, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(HostSyncError, match=r"has waited.*other at"), SyncGuard("raise"):
        check.wait()


@pytest.mark.parametrize(
    ("owner", "name"), [(torch.cuda, "synchronize"), (torch.accelerator, "synchronize")]
)
def test_explicit_synchronisation_is_found(owner, name, monkeypatch):
    monkeypatch.setattr(owner, name, lambda: None)
    with SyncGuard(device="cpu") as guard:
        line = here() + 1
        getattr(owner, name)()
    assert [(s.line, s.kind) for s in guard.report().syncs] == [(line, "synchronize")]


@pytest.mark.parametrize(("owner", "kind"), [("Stream", "stream wait"), ("Event", "event wait")])
def test_waits_for_streams_and_events_are_found(owner, kind, monkeypatch):
    waits = type(owner, (), {"synchronize": lambda self: None})
    monkeypatch.setattr(torch.cuda, owner, waits)
    with SyncGuard(device="cpu") as guard:
        line = here() + 1
        waits().synchronize()
    assert [(s.line, s.kind) for s in guard.report().syncs] == [(line, kind)]


def test_waits_that_the_compiler_takes_into_a_graph_are_found(fresh_dynamo):
    stream = torch.Stream("cpu")

    def function(x):
        x = torch.relu(x)
        stream.synchronize()
        return torch.relu(x)

    compiled = torch.compile(function, backend="aot_eager")
    with SyncGuard(device="cpu") as first:
        compiled(batch())
    with SyncGuard(device="cpu") as second:
        compiled(batch())
        compiled(batch())
    # Where torch has no operator for it, as in 2.11, its graph leaves the wait out.
    is_in_graph = hasattr(torch.ops.streams, "synchronize_stream")
    for guard, count in ((first, 1), (second, 2)):
        told = [(s.file, s.function, s.kind, s.count) for s in guard.report().syncs]
        assert told == [(__file__, function.__name__, "stream wait", count)] * is_in_graph


def test_a_wait_takes_its_time_in_the_report(check, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(0.02))
    with SyncGuard() as guard:
        for _ in range(2):
            torch.cuda.synchronize()
        check.wait()
    timed, untimed = guard.report().syncs
    assert (timed.kind, timed.count, timed.num_timed) == ("synchronize", 2, 2)
    assert 20 <= timed.max_ms <= timed.total_ms
    assert (untimed.kind, untimed.count, untimed.num_timed) == ("other", 1, 0)
    assert guard.report().costliest(9).endswith("(1x, time unknown)")
    assert guard.report().costliest(1).endswith("; elsewhere (1x)")
    assert str(guard.report()).startswith("the host waited 3 times, ")


def test_what_is_compiled_before_the_guard_is_not_compiled_again(fresh_dynamo, check):
    def function(x):
        return find(torch.where(x > 0, x, 1.0))

    compiled = torch.compile(function, backend="aot_eager")
    compiled(batch())
    stats = torch._dynamo.utils.counters
    before = stats["stats"]["unique_graphs"]
    seen = Seen("cuda")
    with listening(seen):
        compiled(batch())
    compiled(batch())
    assert stats["stats"]["unique_graphs"] == before


def test_numbers_on_the_host_cost_an_update_next_to_nothing(check):
    """Not even a look at who asks: an AdamW that is not fused reads two for each parameter."""
    looked = []
    calls = [
        SyncCall(torch.Tensor, "item", "item", lambda *_: looked.append(1) or NO, reads_itself=True)
    ]
    with listening(Seen("cuda"), SyncWatch(calls)):
        assert torch.ones(1).item() == 1.0
        assert torch.nn.Parameter(torch.ones(1)).item() == 1.0
        assert not looked
        assert torch.ones(1).as_subclass(Other).item() == 1.0
        assert looked


class Other(torch.Tensor):
    """Somebody's own: asking it for anything may run their code."""
