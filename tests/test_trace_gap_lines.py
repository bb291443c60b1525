"""Each gap of a device has the line that the host was at, in its own trace or in another."""

import gzip
import json
import time

import pytest
import torch

from synthetic_trace import AUTOGRAD, GEMM, STEPS, SyntheticTrace, report
from torchfast import analyse_trace, profile
from torchfast.profiling.gap_lines import idle_by_line
from torchfast.profiling.verdict import largest_gaps

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
# A gap of 240 us for each: what the host is late with, and the line that it is at.
PARTS = {
    "data": "train.py:10",
    "sync": "train.py:20",
    "python": "augment.py:30",
    "allocation": "train.py:40",
    "compile": "train.py:50",
    "launch": "train.py:60",
}


def loop(*, slow=1.0, has_lines=False, kernel_us=150.0, parts=PARTS, steps=STEPS):
    """Steps with a gap for each part; a host that notes lines is slow."""
    made = SyntheticTrace()
    length = 400.0 * slow
    for step in range(steps):
        begin = step * length * len(parts)
        made.step(step, begin, begin + length * len(parts) - 1)
        for number, (part, line) in enumerate(parts.items()):
            at = begin + number * length + 1
            late = at + 238 * slow  # the launch that comes late
            if part == "data":
                made.annotation(LOADER, at, late - 3)
            elif part == "sync":
                made.op("aten::item", at - 100, late - 30)
                made.call("cudaStreamSynchronize", at - 99, at + 2)
                made.op("aten::add", late - 28, late - 2)
            elif part == "compile":
                made.op("_compile.compile_inner (dynamo_timed)", at, late - 3)
            elif part == "allocation":
                made.call("cudaMalloc", at, late - 3)
            elif part == "launch":
                for i in range(10):
                    made.op("aten::view", at + 23 * i * slow, at + 23 * (i + 1) * slow - 1)
            if has_lines:
                made.line(line, at - 101 if part == "sync" else at - 0.5, late + 9)
            made.kernel(late + 2, late + 2 + kernel_us, GEMM, at=late, op="aten::mm")
    return made


def lines(found, least_us=0.0):
    return {(g.cause, g.line) for g in found.figures.gaps if g.length > least_us}


def test_the_lines_are_in_the_trace_itself(tmp_path):
    found = report(loop(has_lines=True), tmp_path)

    assert lines(found) == set(PARTS.items())


@pytest.mark.parametrize("slow", [1.0, 2.5])
def test_the_lines_are_in_a_slower_trace_of_the_same_loop(tmp_path, slow):
    lined = loop(slow=slow, has_lines=True, steps=2)
    found = report(loop(), tmp_path, lined)

    assert lines(found) == set(PARTS.items())


def test_without_lines_there_are_none(tmp_path):
    assert lines(report(loop(), tmp_path)) == {(cause, None) for cause in PARTS}


def test_the_gaps_of_slow_steps_are_not_needed(tmp_path):
    """With lines the device may be late itself, and never idle."""
    lined = loop(slow=1.0, has_lines=True, kernel_us=398.0)
    found = report(loop(), tmp_path, lined)

    assert not any(g.length > 3 for g in report(lined, tmp_path).figures.gaps)
    assert lines(found) == set(PARTS.items())


def test_of_two_waits_each_has_its_own_line(tmp_path):
    parts = {"sync": "train.py:20", "data": "train.py:10"}

    def twice(*, has_lines):
        made = loop(parts=parts, has_lines=has_lines)
        for step in range(STEPS):
            at = step * 800.0 + 450
            made.op("aten::item", at, at + 180)
            made.call("cudaStreamSynchronize", at + 1, at + 10)
            if has_lines:
                made.line("model.py:7", at - 1, at + 182)
        made.events = [e for e in made.events if e["name"] != LOADER]
        return made

    found = report(twice(has_lines=False), tmp_path, twice(has_lines=True))

    assert lines(found) == {("sync", "train.py:20"), ("sync", "model.py:7")}


@pytest.mark.parametrize("is_other", [False, True])
def test_before_and_behind_a_wait_for_a_batch_each_part_has_its_line(tmp_path, is_other):
    def steps(slow, *, has_lines):
        made = SyntheticTrace()
        for step in range(STEPS):
            begin = step * 1000.0 * slow
            made.step(step, begin, begin + 1000 * slow - 1)
            marks = [begin + slow * at for at in (0, 110, 300, 500, 800)]
            made.call("cudaStreamSynchronize", marks[0] + 10, marks[1])
            made.annotation(LOADER, marks[2], marks[3])
            made.kernel(marks[4] + 2, begin + 1000 * slow + 105, GEMM, at=marks[4], op="aten::mm")
            if has_lines:
                for number in range(4):
                    made.line(f"train.py:{number}", marks[number], marks[number + 1] - 1)
        return made

    lined = steps(2.0, has_lines=True) if is_other else None
    found = report(steps(1.0, has_lines=not is_other), tmp_path, lined)

    assert lines(found) == {
        ("python", "train.py:1"),
        ("data", "train.py:2"),
        ("python", "train.py:3"),
    }
    by_line = {row.line: row.total_us / row.num for row in idle_by_line(found.figures.gaps)}
    assert by_line == {
        "train.py:1": pytest.approx(195, abs=5),
        "train.py:2": pytest.approx(200, abs=5),
        "train.py:3": pytest.approx(302, abs=5),
    }
    (finding,) = [f for f in found.findings if f.kind == "slow-data"]
    assert finding.figure == pytest.approx(0.2 * (STEPS - 1) / STEPS, rel=0.05)


@pytest.mark.parametrize("is_other", [False, True])
def test_what_a_wait_costs_behind_a_batch_has_the_line_of_the_wait(tmp_path, is_other):
    def steps(*, has_lines):
        made = SyntheticTrace()
        for step in range(STEPS):
            begin = step * 1000.0
            made.step(step, begin, begin + 999)
            made.call("cudaStreamSynchronize", begin + 10, begin + 105)
            made.op("aten::add", begin + 106, begin + 290)
            made.annotation(LOADER, begin + 300, begin + 400)
            made.op("aten::add", begin + 401, begin + 795)
            made.kernel(begin + 802, begin + 1100, GEMM, at=begin + 800)
            if has_lines:
                made.line("train.py:5", begin + 5, begin + 298)
                made.line("train.py:6", begin + 299, begin + 810)
        return made

    lined = steps(has_lines=True) if is_other else None
    found = report(steps(has_lines=not is_other), tmp_path, lined)

    assert lines(found) == {("sync", "train.py:5"), ("data", "train.py:6")}


@pytest.mark.parametrize("is_other", [False, True])
def test_operators_before_a_wait_for_a_batch_have_their_line_and_not_the_launchs(
    tmp_path, is_other
):
    def steps(*, has_lines):
        made = SyntheticTrace()
        for step in range(STEPS):
            begin = step * 1000.0
            made.step(step, begin, begin + 999)
            for i in range(10):
                made.op("aten::add", begin + 105 + 30 * i, begin + 134 + 30 * i)
            made.annotation(LOADER, begin + 410, begin + 700)
            made.op("aten::view", begin + 705, begin + 795)
            made.kernel(begin + 802, begin + 1090, GEMM, at=begin + 800)
            if has_lines:
                made.line("metrics.py:5", begin + 100, begin + 405)
                made.line("train.py:6", begin + 408, begin + 703)
                made.line("train.py:7", begin + 704, begin + 810)
        return made

    lined = steps(has_lines=True) if is_other else None
    found = report(steps(has_lines=not is_other), tmp_path, lined)

    assert lines(found) == {
        ("launch", "metrics.py:5"),
        ("data", "train.py:6"),
        ("launch", "train.py:7"),
    }
    before = [gap for gap in found.figures.gaps if gap.line == "metrics.py:5"]
    assert all((gap.what, gap.start < gap.moment < gap.end) == ("", True) for gap in before)


def test_a_device_that_was_not_ready_has_no_line(tmp_path):
    made = SyntheticTrace()
    made.step(0, -20, 700)
    made.line("train.py:3", -15, 690)
    made.kernel(0, 100, at=-10)
    made.kernel(500, 600, at=-5)

    assert lines(report(made, tmp_path)) == {("device", None)}


def test_a_late_launch_of_the_backward_has_the_line_of_its_forward(tmp_path):
    made = SyntheticTrace()
    for step in range(STEPS):
        begin, node = step * 1000.0, step + 7
        made.step(step, begin, begin + 999)
        made.line("model.py:26", begin + 10, begin + 30)
        made.op("aten::mul", begin + 11, begin + 29, node=node)
        made.kernel(begin + 45, begin + 200, GEMM, at=begin + 13)
        made.line("train.py:78", begin + 50, begin + 990)
        name, how = "MulBackward0", {"tid": AUTOGRAD, "node": node, "of": 1}
        made.op(f"autograd::engine::evaluate_function: {name}", begin + 60, begin + 600, **how)
        made.kernel(begin + 560, begin + 990, GEMM, at=begin + 550, tid=AUTOGRAD)

    found = report(made, tmp_path)

    assert lines(found, least_us=300) == {("launch", "model.py:26")}


def test_what_lines_cost_is_added_up_and_shown(tmp_path):
    found = report(loop(), tmp_path, loop(slow=2.0, has_lines=True, steps=2))
    rows = idle_by_line(found.figures.gaps)

    assert {(row.cause, row.line) for row in rows} == set(PARTS.items())
    assert sum(row.total_us for row in rows) == pytest.approx(found.figures.idle_us)
    assert [row.total_us for row in rows] == sorted((r.total_us for r in rows), reverse=True)
    (python,) = [row for row in rows if row.cause == "python"]
    assert (python.num, python.total_us / python.num) == (STEPS, pytest.approx(250, abs=30))

    found.write_html(tmp_path / "page.html")
    page, text, data = (tmp_path / "page.html").read_text(), str(found), found.to_dict()
    by_line = text.split("idle, by the line of the host")[1].split("longest gaps")[0]
    longest = text.split("longest gaps")[1].split("kernels  ")[0]
    assert "augment.py:30" in by_line
    assert any(f" at {gap.line}" in longest for gap in largest_gaps(found.figures, 5))
    assert (
        "augment.py:30" in page.split("<h2>Idle by line</h2>")[1].split("<h2>Longest gaps</h2>")[0]
    )
    assert "augment.py:30" in page.split("<h2>Longest gaps</h2>")[1]
    assert "python at augment.py:30" in page.split("<svg")[1].split("</svg>")[0]
    assert {(r["cause"], r["line"]) for r in data["idle_by_line"]} == set(PARTS.items())
    assert data["longest_gaps"][0].keys() == {"start_ms", "ms", "cause", "what", "line"}
    assert data["longest_gaps"][0]["line"] in PARTS.values()


@pytest.mark.parametrize("cause", ["allocation", "launch"])
def test_a_verdict_without_a_fault_has_the_line_of_most_of_the_idle_time(tmp_path, cause):
    parts = {cause: "train.py:40"}
    found = report(loop(parts=parts), tmp_path, loop(slow=2.0, has_lines=True, parts=parts))

    assert found.findings == ()
    assert (found.verdict.name, found.verdict.line) == ("launch-bound", "train.py:40")


def test_a_verdict_has_no_line_where_many_have_a_part(tmp_path):
    made = SyntheticTrace()
    for step in range(STEPS):
        for i in range(4):
            at = step * 1600.0 + 400 * i
            made.call("cudaMalloc", at + 1, at + 236)
            made.line(f"model.py:{i + 1}", at, at + 250)
            made.kernel(at + 240, at + 340, GEMM, at=at + 238)
        made.step(step, step * 1600.0, step * 1600.0 + 1599)
    found = report(made, tmp_path)

    assert (found.verdict.name, found.verdict.line) == ("launch-bound", None)
    assert {row.line for row in idle_by_line(found.figures.gaps)} == {
        f"model.py:{i + 1}" for i in range(4)
    }


def test_the_figures_of_a_table_stand_below_each_other(tmp_path):
    text = str(report(loop(), tmp_path)).split("time of a step")[1].split("launches and")[0]

    assert "the host launches too slowly" in text
    assert len({line.index(" ms") for line in text.splitlines()[1:] if " ms" in line}) == 1


def add_a_device(path):
    """Let each product of a real trace of the host launch a kernel of 10 us."""
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    products = [e for e in trace["traceEvents"] if e.get("name") == "aten::mm"]
    for number, op in enumerate(products, start=1_000_000):
        common = {"ph": "X", "pid": op["pid"], "args": {"correlation": number}}
        at = {"ts": op["ts"] + op["dur"] / 2, "dur": op["dur"] / 4, "tid": op["tid"]}
        after = {"ts": op["ts"] + op["dur"] + 2, "dur": 10, "tid": 7}
        trace["traceEvents"] += [
            {**common, **at, "cat": "cuda_runtime", "name": "cudaLaunchKernel"},
            {**common, **after, "cat": "kernel", "name": GEMM},
        ]
    with gzip.open(path, "wt") as file:
        json.dump(trace, file)


def test_the_lines_of_a_real_profile(tmp_path):
    def batches():
        while True:
            time.sleep(0.02)
            yield torch.ones(4, 4)

    def augment(x):
        time.sleep(0.01)
        return x

    def loop():
        with profile(tmp_path, steps=3, warmup=2) as profiling:
            for x in profiling.iterate(batches()):
                y = torch.mm(x, x)
                y = torch.mm(augment(y), x)

    loop()
    for name in ("trace.json.gz", "lines.json.gz"):
        add_a_device(tmp_path / name)
    found = analyse_trace(tmp_path / "trace.json.gz", lines=tmp_path / "lines.json.gz")

    long = {cause: line.rpartition("/")[2] for cause, line in lines(found, least_us=5000)}
    begin = loop.__code__.co_firstlineno
    assert long == {
        "data": f"test_trace_gap_lines.py:{begin + 2}",
        "python": f"test_trace_gap_lines.py:{augment.__code__.co_firstlineno + 1}",
    }
    assert found.verdict.line == long["data"]
