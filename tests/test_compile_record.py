"""What torch.compile did is noted as it was: graphs, recompiles, limits, caches, seconds."""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
import time
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo import callback, convert_frame
from torch._dynamo import utils as dynamo_utils

import warm_python
from torchfast.compiler.recompiles import read_guard, readable
from torchfast.compiler.record import CompileRecord
from torchfast.compiler.torch_events import TorchEvents

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def record():
    with CompileRecord() as record:
        yield record


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, batch):
        return self.dropout(self.linear(batch["ids"]))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        return x * self.steps


def double(x):
    return x * 2


def compiled(function, **options):
    return torch.compile(function, **{"backend": "eager", **options})


def only_change(record):
    [event] = record.summary().recompiles
    return event.change


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
    assert frame.code.file == __file__
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


# --- recompiles ---------------------------------------------------------------------------------


def test_a_size_is_named_with_argument_and_dimension(record):
    model = compiled(Block())
    model({"ids": torch.ones(8, 4)})
    model({"ids": torch.ones(5, 4)})
    change = only_change(record)
    assert change[:5] == ("size", "batch['ids']", 0, "8", "5")
    assert str(change) == "dimension 0 of batch['ids'] changed from 8 to 5"
    assert "mark_dynamic" in change.remedy


def test_a_size_of_one_is_said_to_be_compiled_apart(record):
    function = compiled(double)
    for size in (4, 5, 1):
        function(torch.ones(size))
    change = record.summary().recompiles[-1].change
    assert change[:5] == ("size", "x", 0, "2 or more", "0 or 1")
    assert "always" in change.remedy


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (torch.ones(2), torch.ones(2).double(), ("dtype", "x", None, "float32", "float64")),
        (torch.ones(2), torch.ones(2, 2), ("rank", "x", None, "1", "2")),
        (
            torch.ones(2),
            torch.ones(2, requires_grad=True),
            ("requires_grad", "x", None, "False", "True"),
        ),
        (torch.ones(3, 2), torch.ones(2, 3).t(), ("stride", "x", 0, "2", "1")),
    ],
    ids=["dtype", "rank", "requires_grad", "stride"],
)
def test_another_property_of_a_tensor_is_named(record, first, second, expected):
    function = compiled(double, dynamic=False)
    function(first)
    function(second)
    assert only_change(record)[:5] == expected


def test_a_python_number_is_named(record):
    function = compiled(lambda x, n: x * n, dynamic=False)
    for number in (3, 8):
        function(torch.ones(2), number)
    change = only_change(record)
    assert change[:5] == ("value", "n", None, "3", "8")
    assert change.at.startswith(__file__)


def test_a_string_is_named(record):
    function = compiled(lambda x, way: x * 2 if way == "up" else x / 2)
    for way in ("up", "down"):
        function(torch.ones(2), way)
    assert only_change(record)[:5] == ("value", "way", None, "'up'", "'down'")


def test_train_and_eval_are_named(record):
    model = Block()
    function = compiled(model)
    function({"ids": torch.ones(2, 4)})
    model.eval()
    function({"ids": torch.ones(2, 4)})
    assert only_change(record)[:5] == ("training", "self.dropout", None, "train", "eval")


def test_grad_mode_is_named(record):
    function = compiled(double)
    function(torch.ones(2))
    with torch.no_grad():
        function(torch.ones(2))
    assert only_change(record)[:5] == ("global state", "grad mode", None, "on", "off")


def test_autocast_is_named(record):
    function = compiled(double)
    function(torch.ones(2))
    with torch.autocast("cpu"):
        function(torch.ones(2))
    change = only_change(record)
    assert change.kind == "global state"
    assert "autocast" in change.source


def test_one_tensor_given_twice_is_named(record):
    function = compiled(lambda x, y: x + y)
    tensor = torch.ones(2)
    function(tensor, torch.ones(2))
    function(tensor, tensor)
    assert only_change(record)[:3] == ("aliasing", "x, y", None)


def test_another_type_is_named(record):
    function = compiled(lambda pair: pair[0] * 2)
    function((torch.ones(2),))
    function([torch.ones(2)])
    assert only_change(record)[:4] == ("type", "pair", None, "tuple")


def test_calls_that_fit_compile_nothing(record):
    model = Block()
    function = compiled(model)
    for _ in range(4):
        function({"ids": torch.ones(2, 4)})
    assert record.summary().recompiles == ()
    assert record.summary().num_graphs == 1


# --- the recompile limit ------------------------------------------------------------------------


@pytest.fixture
def few_versions():
    with torch._dynamo.config.patch(recompile_limit=3):
        yield


@pytest.fixture
def no_warnings_of_torch(caplog):
    # Whether the limit is seen must not hang on whether torch logs it.
    logger = logging.getLogger("torch._dynamo.convert_frame")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.mark.usefixtures("few_versions", "no_warnings_of_torch")
def test_a_step_counter_and_the_limit_are_named(record):
    model = Counting()
    function = compiled(model)
    for _ in range(6):
        function(torch.ones(2))
    summary = record.summary()
    assert [e.change[:5] for e in summary.recompiles] == [
        ("counter", "self.steps", None, "0", "1"),
        ("counter", "self.steps", None, "1", "2"),
    ]
    [limit] = summary.limits
    assert limit.code.name == "forward"
    assert limit.code.file == __file__
    assert limit.limit == "recompile_limit (3)"
    assert limit.change[:4] == ("counter", "self.steps", None, "2")
    assert summary.num_graphs == 3
    assert summary.given_up == ()
    assert "runs eagerly since" in str(summary)
    assert "register_buffer" in str(limit)
    assert "stepped aside" in [d.outcome for d in summary.decisions()]
    assert summary.counters()["recompile_limits"] == 1


@pytest.mark.usefixtures("few_versions", "no_warnings_of_torch")
def test_below_the_limit_there_is_none(record):
    function = compiled(Counting())
    for _ in range(3):
        function(torch.ones(2))
    assert record.summary().limits == ()
    assert len(record.summary().recompiles) == 2


@pytest.mark.usefixtures("few_versions", "no_warnings_of_torch")
def test_the_limit_is_named_where_the_first_versions_are_older_than_the_record():
    function = compiled(Counting())
    for _ in range(3):
        function(torch.ones(2))
    with CompileRecord() as record:
        function(torch.ones(2))
    [limit] = record.summary().limits
    assert limit.code.name == "forward"


@pytest.mark.usefixtures("few_versions", "no_warnings_of_torch")
def test_the_limit_under_fullgraph_is_noted_too(record):
    function = compiled(Counting(), fullgraph=True)
    for _ in range(3):
        function(torch.ones(2))
    with pytest.raises(Exception, match="fullgraph"):
        function(torch.ones(2))
    assert len(record.summary().limits) == 1


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


# --- reading guards ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        (
            "0/0: tensor 'a[0]['b'][1]' size mismatch at index 2. expected 4, actual 5",
            ("size", "a[0]['b'][1]", 2, "4", "5"),
        ),
        (
            "tensor 'self._modules['l']._parameters['weight']' requires_grad mismatch. "
            "expected requires_grad=1. Guard failed on a parameter, consider",
            ("requires_grad", "self.l.weight", None, "True", "False"),
        ),
        (
            "0/0: tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU), actual "
            "DispatchKeySet(CUDA)",
            ("device", "x", None, "DispatchKeySet(CPU)", "DispatchKeySet(CUDA)"),
        ),
        ("0/2: L['n'] == '# 3'  # if n:  # a.py:1 in f", ("value", "n", None, "'# 3'", None)),
        ("0/2: len(xs) == 3", ("structure", "xs", None, "3 entries", None)),
        ("not ___dict_contains('m', batch)", ("structure", "batch['m']", None, "absent", "there")),
        ("___check_obj_id(self.act, 12)", ("object", "self.act", None, None, None)),
        (
            "hasattr(x, '_dynamo_dynamic_indices') == False",
            ("dynamic marking", "x", None, None, None),
        ),
        ("something else", ("other", "something else", None, None, None)),
        ("", ("other", "", None, None, None)),
    ],
)
def test_a_guard_is_read(guard, expected):
    change = read_guard(guard)
    assert change[:5] == expected
    assert change.remedy


def test_a_source_is_written_as_the_user_would():
    assert readable("L['self']._modules['layers']._modules['0'].p") == "self.layers[0].p"
    assert readable("L['self'].__dict__['_modules']['l']") == "self.l"
    assert readable("G['LIMIT']") == "LIMIT"
