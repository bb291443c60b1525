"""What torch.compile did is noted as it was: graphs, seconds, caches; and torch stays as it was."""

from __future__ import annotations

import gc
import inspect
import json
import logging
import os
import threading
import time
import weakref

import pytest
import torch
from torch._dynamo import callback, convert_frame
from torch._dynamo import utils as dynamo_utils

import warm_python
from compiled_functions import Block, compiled, double
from torchfast.compiler.record import CompileRecord
from torchfast.compiler.torch_events import TorchEvents

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def record():
    with CompileRecord() as record:
        yield record


# --- graphs and seconds -------------------------------------------------------------------------


def test_nothing_is_called_compiled_when_nothing_was(record):
    compiled(double)  # not called
    summary = record.summary()
    assert not summary.is_compiled
    assert summary.headline.startswith("nothing was compiled")
    assert [d.outcome for d in summary.decisions()] == ["left alone"]
    assert not any(summary.counters().values())
    assert summary.total_s == 0.0


def test_a_function_without_operations_is_not_called_compiled(record):
    compiled(lambda _x: 3)(torch.ones(2))
    summary = record.summary()
    assert [frame.outcome for frame in summary.frames] == ["no graph"]
    assert summary.headline.startswith("nothing was compiled")
    assert [d.outcome for d in summary.decisions()] == ["stepped aside"]


def test_graphs_of_forward_and_backward_are_counted(record):
    model = compiled(Block(), backend="aot_eager")
    batch = {"ids": torch.randn(2, 4)}
    for _ in range(3):
        model(batch).sum().backward()
    summary = record.summary()
    assert (summary.num_graphs, summary.num_backward_graphs) == (1, 1)
    [frame] = summary.frames
    assert frame.code.name == "forward"
    assert frame.code.file == inspect.getfile(Block)
    assert frame.num_ops >= 2
    assert [e.code for e in summary.backwards] == [frame.code]
    assert summary.recompiles == summary.graph_breaks == summary.limits == ()
    assert [d.outcome for d in summary.decisions("regions")] == ["applied"]
    assert summary.headline.startswith("1 graph compiled, 1 for the backward")


def test_seconds_are_those_on_the_clock(record):
    def slow(module, _inputs):
        time.sleep(0.2)
        return module.forward

    began = time.perf_counter()
    compiled(double, backend=slow)(torch.ones(2))
    took = time.perf_counter() - began
    summary = record.summary()
    assert 0.2 <= summary.total_s <= took
    assert summary.backward_s == 0.0
    assert summary.total_s == pytest.approx(sum(f.seconds for f in summary.frames))


def test_seconds_that_overlap_are_counted_once():
    from torchfast.compiler.record import _seconds

    assert _seconds([]) == 0.0
    assert _seconds([(0, 1_000_000), (500_000, 1_500_000), (600_000, 700_000)]) == 1.5
    assert _seconds([(3_000_000, 4_000_000), (0, 1_000_000)]) == 2.0


def test_only_what_comes_after_the_start_is_noted():
    function = compiled(double)
    function(torch.ones(2))
    with CompileRecord() as record:
        function(torch.ones(2))
        assert record.summary().frames == ()
        function(torch.ones(3))
        assert [e.change.kind for e in record.summary().recompiles] == ["size"]


def test_nothing_is_noted_after_close(record):
    compiled(double)(torch.ones(2))
    record.close()
    compiled(double, dynamic=False)(torch.ones(3, dtype=torch.float64))
    record.close()
    assert record.summary().num_graphs == 1


# --- torch's records are cleared, bounded, shared -----------------------------------------------


def test_a_reset_and_cleared_counters_lose_nothing(record):
    def breaks(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    for _ in range(3):
        compiled(breaks)(torch.ones(2))
        torch._dynamo.reset()
        dynamo_utils.counters.clear()
    # The callbacks are gone after a reset; the next compilation brings them back.
    assert record._torch._bell._starts not in callback.callback_handler.start_callbacks
    compiled(breaks)(torch.ones(2))
    assert record._torch._bell._starts in callback.callback_handler.start_callbacks
    summary = record.summary()
    assert summary.num_graphs == 8
    assert [e.times for e in summary.graph_breaks] == [4]
    assert summary.is_complete


def test_cleared_metrics_lose_nothing_that_was_seen(record):
    compiled(double)(torch.ones(2))
    assert record.summary().num_graphs == 1
    dynamo_utils.clear_compilation_metrics()
    compiled(double)(torch.ones(2, dtype=torch.float64))
    assert record.summary().num_graphs == 2


def test_more_than_torch_remembers_is_noted(record):
    limit = dynamo_utils._compilation_metrics.maxlen
    dynamo_utils.set_compilation_metrics_limit(4)
    try:
        for index in range(10):
            torch._dynamo.reset()
            compiled(double)(torch.ones(index + 2))
        summary = record.summary()
        assert summary.num_graphs == 10
        assert summary.is_complete
        # Without its ears it can only say that something is missing.
        record._torch._bell.detach()
        record._torch.attach = lambda: None
        for index in range(6):
            torch._dynamo.reset()
            compiled(double)(torch.ones(index + 2))
        summary = record.summary()
        assert not summary.is_complete
        assert "missing" in str(summary)
    finally:
        dynamo_utils.set_compilation_metrics_limit(limit)


def test_counts_survive_being_cleared():
    class Owner:
        def before(self, _compile_id):
            pass

        def after(self):
            pass

    owner = Owner()
    counters = dynamo_utils.counters["inductor"]
    counters["fxgraph_cache_hit"] = 5
    try:
        events = TorchEvents(owner.before, owner.after)
        counters["fxgraph_cache_hit"] = 7
        events.take()
        counters.clear()
        events.take()
        counters["fxgraph_cache_hit"] = 3
        events.take()
        assert events.counts["graph_hits"] == 5
        events.detach()
    finally:
        counters.clear()


def test_counters_gain_no_entries_by_being_read(record):
    dynamo_utils.counters.clear()
    record.summary()
    assert dict(dynamo_utils.counters) == {}


def test_two_records_do_not_disturb_each_other(record):
    function = compiled(double)
    function(torch.ones(2))
    with CompileRecord() as second:
        function(torch.ones(3))
        assert second.summary().num_graphs == 1
        assert record.summary().num_graphs == 2
    function(torch.ones(2, dtype=torch.float64))
    assert second.summary().num_graphs == 1
    assert record.summary().num_graphs == 3


def test_nothing_is_left_behind():
    before = (
        list(callback.callback_handler.start_callbacks),
        list(callback.callback_handler.end_callbacks),
        dict(convert_frame._bytecode_hooks),
    )
    with CompileRecord():
        pass
    forgotten = CompileRecord()
    reference = weakref.ref(forgotten)
    del forgotten
    gc.collect()
    assert reference() is None
    assert before == (
        callback.callback_handler.start_callbacks,
        callback.callback_handler.end_callbacks,
        dict(convert_frame._bytecode_hooks),
    )


def test_log_settings_are_left_alone():
    names = ("torch", "torch._dynamo", "torch._dynamo.guards.__recompiles")

    def settings():
        loggers = map(logging.getLogger, names)
        return [(lg.level, list(lg.handlers), list(lg.filters), lg.propagate) for lg in loggers]

    before = settings()
    with CompileRecord():
        assert settings() == before
        compiled(double)(torch.ones(2))
        assert settings() == before


def test_what_a_thread_compiles_is_noted(record):
    def work(function):
        compiled(function)(torch.ones(2))

    functions = [lambda x, n=n: x + n for n in range(4)]
    threads = [threading.Thread(target=work, args=(f,)) for f in functions]
    for thread in threads:  # one at a time: what begins together is not a recompile for torch
        thread.start()
        while thread.is_alive():
            record.summary()
        thread.join()
    summary = record.summary()
    # The four share a code object: the second is a recompile, which takes the number as dynamic.
    assert summary.num_graphs == 2
    assert len(summary.recompiles) == 1


def test_an_error_while_noting_does_not_reach_the_user(record, monkeypatch):
    def fails(_entry):
        raise RuntimeError("a metric of another shape")

    monkeypatch.setattr(record, "_note_entry", fails)
    function = compiled(double)
    assert torch.equal(function(torch.ones(2)), torch.full((2,), 2.0))
    assert torch.equal(function(torch.ones(3)), torch.full((3,), 2.0))
    monkeypatch.undo()


def test_calls_of_compiled_code_run_nothing_of_it(record, monkeypatch):
    function = compiled(double)
    function(torch.ones(2))
    record.summary()
    looked = []
    monkeypatch.setattr(record._torch, "take", lambda: looked.append(1))
    for _ in range(10):
        function(torch.ones(2))
    assert looked == []
    assert not record.has_news()
    monkeypatch.undo()
    function(torch.ones(3))  # and a compilation does
    assert record.has_news()
    record.summary()
    assert not record.has_news()


# --- what belongs to a function -----------------------------------------------------------------


# torch asks a tensor for its grad and hides the warning, which as an error cannot be hidden.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_events_are_told_apart_by_function(record):
    model = Block()

    def helper(x):
        print("here")  # noqa: T201
        return x + 1

    def region_0_Block(batch):  # noqa: N802
        return model(batch) + helper(batch["ids"])

    def region_1_Other(x):  # noqa: N802
        return x * 2

    first = compiled(region_0_Block, backend="aot_eager")
    second = compiled(region_1_Other)
    for size in (2, 3):
        first({"ids": torch.ones(size, 4)}).sum().backward()
    second(torch.ones(2))
    summary = record.summary()
    mine, other = summary.of("region_0_Block"), summary.of("region_1_Other")
    block = next(frame.code for frame in mine.frames if "Block" in frame.code.name)
    assert str(block) == f"region_0_Block ({__file__}:{block.line})"  # no region of torchfast's
    assert mine.num_graphs == summary.num_graphs - 1
    assert mine.num_backward_graphs == summary.num_backward_graphs > 0
    assert len(mine.graph_breaks) == 1
    assert mine.recompiles == summary.recompiles != ()
    # The rest of a function after a break counts as that function, what it calls as within it.
    assert {frame.code.name for frame in mine.frames} == {"region_0_Block", "helper"}
    assert any(frame.is_rest for frame in mine.frames)
    assert other.num_graphs == 1
    assert other.graph_breaks == other.recompiles == other.backwards == ()
    assert set(summary.by_code()) >= {"region_0_Block", "region_1_Other"}
    assert summary.of("region_2_None").frames == ()


# --- the caches on disk -------------------------------------------------------------------------

CACHED = """
import json, sys
import torch
from torchfast.compiler.record import CompileRecord
with CompileRecord() as record:
    function = torch.compile(torch.nn.Linear(4, 4).forward)  # no kernel of its own: no g++
    with torch.no_grad():
        function(torch.ones(4, 4))
print(json.dumps(record.summary().counters()))
"""


def test_a_second_process_finds_the_graph_in_the_cache(tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    runs = [
        json.loads(warm_python.run(CACHED, env=environment, check=True).stdout.splitlines()[-1])
        for _ in range(2)
    ]
    cold, warm = runs
    assert cold["cache_graph_misses"] == 1
    assert cold["cache_graph_hits"] == cold["cache_autograd_hits"] == 0
    assert warm["cache_graph_hits"] == 1
    assert warm["cache_autograd_hits"] == 1
    assert warm["cache_graph_misses"] == warm["cache_autograd_misses"] == 0
    assert cold["graphs"] == warm["graphs"] == 1


def test_what_cannot_be_called_before_a_compilation():
    with pytest.raises(TypeError, match=r"before must be callable as before\(\), got 3"):
        CompileRecord(before=3)
