"""Reading traces: whole, packed, cut short, damaged, foreign, and larger than what is kept."""

import gzip
import json
import subprocess
import sys

import pytest

from synthetic_trace import SyntheticTrace
from torchfast import TraceError
from torchfast.profiling import trace_file
from torchfast.profiling.lines import UserLines
from torchfast.profiling.report import analyse_trace
from torchfast.profiling.trace import read_trace
from torchfast.profiling.trace_file import TraceFile


def some(steps=3, kernels=4):
    made = SyntheticTrace()
    for step in range(steps):
        begin = step * 1000.0
        made.step(step, begin, begin + 900)
        for i in range(kernels):
            made.kernel(begin + 20 + 100 * i, begin + 60 + 100 * i)
    return made


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("piece", [7, 1000, 1 << 22])
def test_every_event_is_read_whatever_the_pieces(tmp_path, monkeypatch, name, piece):
    monkeypatch.setattr(trace_file, "_PIECE", piece)
    made = some()
    file = TraceFile(made.write(tmp_path / name))

    events = list(file.events())

    assert [e for e in events if e["ph"] == "X"] == made.events
    assert file.header["deviceProperties"] == [{"id": 0, "name": "Test Device"}]
    assert file.remarks == []


def test_a_list_alone_is_a_trace(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(some().events))

    assert len(read_trace(path).work) == 12


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("part", [0.4, 0.7, 0.95])
def test_a_file_cut_short_gives_what_came_before(tmp_path, name, part):
    path = some(steps=40).write(tmp_path / name)
    data = path.read_bytes()
    whole = read_trace(path)
    path.write_bytes(data[: int(len(data) * part)])

    cut = read_trace(path)

    assert 0 < len(cut.work) < len(whole.work)
    assert cut.work == whole.work[: len(cut.work)]
    assert any("ends in the middle" in remark for remark in cut.remarks)


def test_damage_in_the_middle_is_remarked(tmp_path):
    text = some(steps=10).text()
    middle = text.index('"ph"', len(text) // 2)
    path = tmp_path / "trace.json"
    path.write_text(text[:middle] + "?" + text[middle:])

    trace = read_trace(path)

    assert trace.work
    assert any("is damaged after" in remark for remark in trace.remarks)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello, this is a log", "is not JSON, it begins with 'h'"),
        (b"\x89PNG\r\n\x1a\n\x00", "is not JSON"),
        (b'{"loss": 1.0, "step": 3}', r"JSON without traceEvents \(it has loss, step\)"),
        (b"{}", "it has nothing"),
        (b'{"traceEvents": {"a": 1}}', "traceEvents that are no list"),
        (b'{"schemaVersion": 1, "deviceProp', "not a whole JSON file"),
        (b'{"schemaVersion": 1,', "ends before its first event"),
        (b"\n", "ends before its first event"),
        (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\xff", "ends before its first event"),
        (b'{"traceEvents": []}', "0 events but none of torch.profiler's"),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "v8", "name": "gc", "ts": 1, "dur": 2}]}',
            "1 events but none of torch.profiler's",
        ),
        (b'{"traceEvents": [nonsense, and more of it]}', "not a whole JSON file"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, content, message):
    path = tmp_path / "trace.json"
    path.write_bytes(content)

    with pytest.raises(TraceError, match=message):
        read_trace(path)


@pytest.mark.parametrize("before", ['{"losses": ', '{"traceEvents": ['])
def test_a_value_longer_than_any_of_a_trace_is_not_read_to_its_end(tmp_path, monkeypatch, before):
    monkeypatch.setattr(trace_file, "_PIECE", 1000)
    monkeypatch.setattr(trace_file, "_LONGEST_EVENT", 4000)
    path = tmp_path / "trace.json"
    path.write_text(f"{before}{list(range(10_000))}")
    file = TraceFile(path)

    with pytest.raises(TraceError, match="a value of it is longer than any of a trace"):
        list(file.events())
    assert file.part_read < 0.2


def test_a_missing_file_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.json")


@pytest.mark.parametrize("junk", [None, 3, "text", [], {}, {"ph": "X"}, {"ph": "X", "ts": "soon"}])
def test_strange_events_are_passed_over(tmp_path, junk):
    made = some()
    made.events.insert(5, junk)
    events = [{"ph": "X", "cat": "kernel", "name": None, "ts": 4e12, "dur": None, "args": 3}]
    made.events += events

    assert len(read_trace(made.write(tmp_path / "trace.json")).work) == 13


def test_too_many_events_are_cut_to_whole_steps(tmp_path):
    path = some(steps=100).write(tmp_path / "trace.json")

    trace = read_trace(path, most_events=300)

    assert 10 <= len(trace.steps) <= 40
    assert len(trace.work) >= 4 * (len(trace.steps) - 1)
    assert any("of 100 steps are looked at" in remark for remark in trace.remarks)
    assert trace.num_events == 901


def test_memory_is_bounded_by_what_is_kept(tmp_path):
    """60 MB of events that nobody asks for are read with little more than a piece of the file."""
    path = tmp_path / "trace.json"
    made = some()
    filler = json.dumps(
        {"ph": "f", "cat": "fwdbwd", "name": "x" * 400, "ts": 1, "pid": 1, "tid": 1}
    )
    with path.open("w") as file:
        file.write(made.text().replace('"traceName"', '"z"').rsplit("]", 1)[0])
        for _ in range(130_000):
            file.write("," + filler)
        file.write("]}")
    assert path.stat().st_size > 60_000_000
    program = (
        "import resource, sys\n"
        "from torchfast.profiling.trace import read_trace\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert len(read_trace(sys.argv[1]).work) == 12\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )

    run = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )

    assert int(run.stdout) < 40_000  # kB


def ahead(steps):
    """Steps of 1 ms of which the host has launched all before the device has done two."""
    made = SyntheticTrace()
    for step in range(steps):
        at = step * 100.0
        made.step(step, at, at + 99)
        for i in range(10):
            begin = step * 1000.0 + 1000 + 100 * i
            made.kernel(begin, begin + 99, at=at + 5 * i + 1)
    return made


def test_work_of_the_device_is_kept_with_its_launch(tmp_path):
    trace = read_trace(ahead(20).write(tmp_path / "trace.json"), most_events=300)

    assert 10 <= len(trace.steps) < 20
    assert len(trace.work) == 10 * len(trace.steps)
    assert 2 * len(trace.work) + len(trace.steps) <= 300 + 21
    figures = analyse_trace(tmp_path / "trace.json").figures
    assert figures.per_step_ms(figures.window_us) == pytest.approx(1.0, rel=0.01)


def test_work_without_a_launch_is_kept_by_its_time(tmp_path):
    made = some(steps=100)
    made.more_of(99_999, 50, 60)
    made.more_of(99_998, 99_990, 99_999)

    trace = read_trace(made.write(tmp_path / "trace.json"), most_events=300)

    assert [w.correlation for w in trace.work if w.correlation > 99_000] == [99_999]


def test_memory_events_count_as_events(tmp_path):
    made = some(steps=50, kernels=1)
    for number in range(5000):
        made.memory(10.0 * number, 8, number, allocated=8 * number)

    trace = read_trace(made.write(tmp_path / "trace.json"), most_events=1000)

    assert 5 <= len(trace.steps) <= 10
    assert len(trace.memory) <= 1000


def test_a_gzip_of_several_members_is_read_whole(tmp_path):
    data = some(steps=30).text().encode()
    path = tmp_path / "trace.json.gz"
    path.write_bytes(b"".join(gzip.compress(data[i : i + 5000]) for i in range(0, len(data), 5000)))

    trace = read_trace(path)

    assert (len(trace.work), trace.remarks) == (120, [])


@pytest.mark.parametrize("keep", [0.6, 0.8])
def test_steps_whose_work_was_not_read_are_left_out(tmp_path, keep):
    """Torch writes what the host did first, and the device after it."""
    made = some(steps=20)
    made.events.sort(key=lambda event: event["cat"] == "kernel")
    text = made.text()
    first = text.index('"kernel"')
    path = tmp_path / "trace.json"
    path.write_text(text[: first + int((len(text) - first) * keep)])

    report = analyse_trace(path)

    figures = report.figures
    assert abs(figures.num_steps - 20 * keep) <= 2
    assert figures.per_step_ms(figures.busy_us) == pytest.approx(0.16)
    assert any("of the 20 steps that were read" in remark for remark in report.remarks)


def test_a_part_without_work_of_the_device_gets_no_verdict(tmp_path):
    made = some(steps=20)
    made.events.sort(key=lambda event: event["cat"] == "kernel")
    text = made.text()
    path = tmp_path / "trace.json"
    path.write_text(text[: text.index('"kernel"')])

    with pytest.raises(TraceError, match="nothing can be said of the steps"):
        analyse_trace(path)


def test_a_trace_of_the_host_cut_short_is_still_one_of_the_host(tmp_path):
    made = SyntheticTrace(device=False)
    for step in range(20):
        made.step(step, step * 100.0, step * 100.0 + 99)
        made.op("aten::mm", step * 100.0 + 10, step * 100.0 + 50)
    text = made.text()
    path = tmp_path / "trace.json"
    path.write_text(text[: len(text) // 2])

    assert analyse_trace(path).figures.num_steps == 10


HUGE = int("9" * 400)
STRANGE = {
    "a category that is a list": {"cat": ["kernel"]},
    "a number too large": {"ts": HUGE},
    "a length too large": {"dur": HUGE},
    "a negative length": {"dur": -1e9},
    "facts that are numbers": {"args": 7},
    "huge facts": {"args": {"correlation": HUGE, "bytes": HUGE, "device": HUGE, "stream": [1]}},
    "half of a pair": {"name": "\ud83d kernel", "tid": "\ud800"},
    "no process": {"pid": {"a": 1}},
}


@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE)
@pytest.mark.parametrize("category", ["kernel", "gpu_memcpy", "cuda_runtime", "cpu_op"])
def test_odd_events_end_in_no_traceback(tmp_path, strange, category):
    made = some()
    made.op("aten::mm", 15, 80, dims=[[HUGE, 4], [4, HUGE]], types=["float", "float"])
    made.events.append(dict(made.events[1]) | {"cat": category} | strange)
    report = analyse_trace(made.write(tmp_path / "trace.json"))

    report.write_html(tmp_path / "page.html")
    report.write_json(tmp_path / "page.json")
    str(report).encode()

    assert report.figures.num_steps == 3


def test_odd_memory_events(tmp_path):
    made = some()
    made.memory(30, 8, 1, allocated=8)
    made.events += [made.events[-1] | {"ts": ts} for ts in (HUGE, "soon", None, float("nan"))]

    assert len(read_trace(made.write(tmp_path / "trace.json")).memory) == 1


@pytest.mark.parametrize("properties", ["3", '"x"', '[3, {"name": "\\ud800"}]', "null"])
def test_odd_properties_of_devices(tmp_path, properties):
    text = some().text()
    begin, end = text.index("[", text.index("deviceProperties")), text.index('"displayTimeUnit"')
    path = tmp_path / "trace.json"
    path.write_text(text[:begin] + properties + ", " + text[end:])

    str(analyse_trace(path)).encode()


@pytest.mark.parametrize("where", ["first", "later", "header"])
def test_deep_nesting_is_damage(tmp_path, where):
    deep = '{"args": ' + "[" * 200_000
    path = tmp_path / "trace.json"
    text = some(steps=20).text()
    if where == "first":
        path.write_text('{"traceEvents": [' + deep)
    elif where == "header":
        path.write_text('{"a": ' + "[" * 200_000)
    else:
        path.write_text(text.replace('"traceName"', '"z"').rsplit("]", 1)[0] + "," + deep)

    if where == "later":
        assert any("is damaged after" in remark for remark in read_trace(path).remarks)
        return
    with pytest.raises(TraceError, match="nested too deeply"):
        read_trace(path)


def test_lines_are_added_where_the_events_end(tmp_path):
    made = some()
    made.op("aten::mm", 15, 80, dims=[[2, 3], [3, 4]], types=["float", "float"])
    path = made.write(tmp_path / "trace.json")
    path.write_text(path.read_text().replace('"trace.json"', '"runs[3]/a], \\"b\\": [1]}.json"'))
    before = json.loads(path.read_text())
    lines = UserLines()
    lines.start()
    len("one call")
    lines.stop()

    assert lines.write_into(path) == 1

    after = json.loads(path.read_text())
    assert after["traceName"] == before["traceName"]
    assert after["traceEvents"][:-1] == before["traceEvents"]
    assert after["traceEvents"][-1]["name"].rpartition(":")[0] == "test_trace_file.py"
