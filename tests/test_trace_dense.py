"""A dense trace is read once, in pieces that are decoded whole, and gives the same steps."""

from __future__ import annotations

import json
import random
import time

import pytest

from synthetic_trace import SyntheticTrace
from torchfast import analyse_trace
from torchfast.profiling import commands, trace_file
from torchfast.profiling.trace import read_trace
from torchfast.profiling.trace_file import TraceFile
from torchfast.profiling.trace_window import _Numbers

STEPS, KERNELS = 20, 30


@pytest.fixture(scope="module")
def dense():
    made = SyntheticTrace()
    for step in range(STEPS):
        at = step * 10_000.0
        made.step(step, at, at + 9_000)
        for n in range(KERNELS):
            begin = at + 100 * n
            made.op(f"aten::op{n}", begin + 10, begin + 30, dims=[[2, 2]], types=["float"])
            made.kernel(begin + 3000, begin + 3050, at=begin + 12)
    return made


@pytest.fixture
def readings(monkeypatch):
    """Count how often a file is gone through."""
    found = []
    original = TraceFile.event_lists

    def counted(self):
        found.append(self.path)
        return original(self)

    monkeypatch.setattr(TraceFile, "event_lists", counted)
    return found


def kept(trace):
    return trace.work, trace.calls, [s[:5] for s in trace.spans]


@pytest.mark.parametrize("most", [10_000, 700, 300])
@pytest.mark.parametrize("order", ["written", "shuffled", "device first"])
def test_the_same_steps_are_kept_in_one_reading(
    dense, tmp_path, readings, most, order, monkeypatch
):
    monkeypatch.setattr(trace_file, "_PIECE", 4096)  # many pieces, so that the window shrinks
    path = dense.write(tmp_path / "trace.json")
    whole = read_trace(path)
    document = json.loads(path.read_text())
    events = document["traceEvents"]
    if order == "shuffled":
        random.Random(3).shuffle(events)
    elif order == "device first":
        events.sort(key=lambda event: event.get("cat") != "kernel")
    path.write_text(json.dumps(document))
    readings.clear()

    trace = read_trace(path, most_events=most)

    # Out of order, the first step may be found when what it holds has been dropped.
    assert len(readings) == 1 or (order == "shuffled" and len(readings) == 2)
    expected = len(trace.steps)
    per_step = 3 * KERNELS + 1
    assert most // per_step - 1 <= expected <= max(1, most // per_step) or expected == STEPS
    assert [step.name for step in trace.steps] == [f"ProfilerStep#{n}" for n in range(expected)]
    last = trace.steps[-1].end
    assert sorted(w.correlation for w in trace.work) == sorted(
        c.correlation for c in whole.calls if c.start <= last
    )
    assert len(trace.spans) == expected * (KERNELS + 1)
    assert bool(trace.remarks) == (most < 10_000)


def test_what_stands_before_the_first_step_is_read_past(dense, tmp_path, readings, monkeypatch):
    monkeypatch.setattr(trace_file, "_PIECE", 4096)
    path = dense.write(tmp_path / "trace.json")
    document = json.loads(path.read_text())
    first = min(e["ts"] for e in document["traceEvents"] if e.get("ph") == "X")
    early = {"ph": "X", "cat": "cpu_op", "name": "early", "pid": 1, "tid": 1, "dur": 1}
    before = [early | {"ts": first - 5000 + n} for n in range(2000)]
    document["traceEvents"] = before + document["traceEvents"]
    path.write_text(json.dumps(document))

    trace = read_trace(path, most_events=300)

    assert len(readings) == 2
    assert len(trace.steps) >= 2
    assert not [span for span in trace.spans if span.name == "early"]


@pytest.mark.parametrize("layout", [None, 2])
def test_pieces_are_decoded_whole(dense, tmp_path, layout):
    path = tmp_path / "trace.json"
    document = json.loads(dense.text())
    path.write_text(json.dumps(document, indent=layout))
    sizes = [len(events) for events in TraceFile(path).event_lists()]
    assert sum(sizes) == len(document["traceEvents"])
    assert max(sizes) > 0.9 * sum(sizes)
    assert list(TraceFile(path).events()) == document["traceEvents"]


def test_braces_in_names_mislead_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_file, "_PIECE", 256)
    path = tmp_path / "trace.json"
    events = [
        {"name": "}, {", "args": {"list": [{"a": 1}, {"b": "},{"}], "n": n}} for n in range(200)
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    assert list(TraceFile(path).events()) == events


def test_progress_is_told(dense, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trace_file, "_PIECE", 4096)
    path = dense.write(tmp_path / "trace.json")
    parts = []
    analyse_trace(path, progress=parts.append)
    assert parts == sorted(parts)
    assert parts[0] < 0.5
    assert parts[-1] == 1.0
    monkeypatch.setattr(commands, "_SAID_EVERY_S", 0.0)
    commands._progress_of(path)(0.25)
    assert capsys.readouterr().err == "reading trace.json: 25%\n"


def test_a_dense_trace_of_a_size_is_read_in_seconds(dense, tmp_path):
    """20 MB; at this pace 1 GB takes some minutes at the very most."""
    path = tmp_path / "trace.json"
    body = json.dumps(json.loads(dense.text())["traceEvents"], indent=1)[1:-1]
    with path.open("w") as file:
        file.write('{"traceEvents": [' + body)
        while file.tell() < 20_000_000:
            file.write("," + body)
        file.write("]}")
    begin = time.perf_counter()
    trace = read_trace(path, most_events=50_000)
    assert time.perf_counter() - begin < 10
    assert trace.num_events > 50_000
    assert len(trace.work) + len(trace.calls) + len(trace.spans) <= 50_001


def test_numbers():
    numbers = _Numbers()
    for number in (0, -3, 5, 8, 1 << 20, 1 << 40):
        numbers.add(number)
    assert [n for n in (0, -3, 4, 5, 6, 8, 1 << 20, 1 << 40) if n in numbers] == [
        5,
        8,
        1 << 20,
        1 << 40,
    ]


def test_numbers_beyond_the_bits_that_there_is_room_for(monkeypatch):
    monkeypatch.setattr(_Numbers, "_MOST_BITS", 1 << 6)
    numbers = _Numbers()
    for number in (30, 60, 65, 90):
        numbers.add(number)
    assert [n for n in range(1, 200) if n in numbers] == [30, 60, 65, 90]


def test_work_that_was_launched_before_the_first_step_is_not_the_steps(tmp_path):
    made = SyntheticTrace()
    for n in range(50):
        made.kernel(5000 + 10 * n, 5005 + 10 * n, at=10.0 * n)  # runs within the first step
    for step in range(STEPS):
        at = 1000 + step * 10_000.0
        made.step(step, at, at + 9_000)
        for n in range(KERNELS):
            made.kernel(at + 100 * n + 50, at + 100 * n + 60, at=at + 100 * n)

    trace = read_trace(made.write(tmp_path / "trace.json"), most_events=400)

    assert len(trace.steps) >= 2
    assert len(trace.work) == KERNELS * len(trace.steps) == len(trace.calls)
