"""The lines that the user's code is at: from when to when, and what is left alone."""

import inspect
import json
import os
import sys
import threading
import time

import pytest
import torch

import torchfast
from synthetic_trace import SyntheticTrace
from torchfast.profiling import lines as module
from torchfast.profiling.lines import UserLines


@pytest.fixture
def noted(tmp_path):
    """A function that runs another with its calls noted.

    It returns ``{line: [(begin, end)]}`` in whole nanoseconds: two ends that are one instant would
    differ as sums of microseconds since 1970, of which a float tells quarters.
    """

    def run(function):
        trace = SyntheticTrace(zero=time.time_ns())
        lines = UserLines()
        assert lines.start()
        try:
            function()
        finally:
            lines.stop()
        path = tmp_path / "trace.json"
        trace.write(path)
        number = lines.write_into(path)
        found = {}
        for event in json.loads(path.read_text())["traceEvents"]:
            if event.get("cat") != "torchfast_line":
                continue
            file, _, line = event["name"].rpartition(":")
            begin = round(event["ts"] * 1e3)
            found.setdefault((file.rpartition("/")[-1], int(line)), []).append(
                (begin, begin + round(event["dur"] * 1e3))
            )
        assert sum(len(spans) for spans in found.values()) == number
        return found

    return run


def line_of(function, text):
    """The number of the first line of a function that holds a text."""
    source, first = inspect.getsourcelines(function)
    return first + next(at for at, line in enumerate(source) if text in line)


def inner():
    return torch.ones(3).sum().item()


def outer():
    inner()
    time.sleep(0.01)


def test_lines_nest_as_calls_do(noted):
    found = noted(outer)

    def span(function, text):
        (one,) = found["test_user_lines.py", line_of(function, text)]
        return one

    begin, end = span(outer, "inner()")
    first, last = span(inner, "torch.ones")
    assert begin <= first <= last <= end
    slept, woke = span(outer, "time.sleep")
    assert woke - slept >= 10_000_000
    assert slept >= last


def picks(tokens, mask):
    chosen = mask > 0
    taken = tokens[chosen]
    tokens[chosen] = 2 * taken
    return tokens @ tokens.T


def test_what_is_no_call_has_its_line(noted):
    tokens, mask = torch.ones(4, 4), torch.tensor([1, 0, 1, 0])
    found = noted(lambda: picks(tokens, mask))
    for text in ("mask > 0", "tokens[chosen]", "2 * taken", "tokens @"):
        assert len(found["test_user_lines.py", line_of(picks, text)]) == 1


def test_a_frame_that_runs_already_has_the_lines_to_come(tmp_path):
    lines = UserLines()
    assert lines.start()
    total = torch.ones(3) + 1  # begun after
    lines.stop()
    path = tmp_path / "trace.json"
    SyntheticTrace().write(path)
    lines.write_into(path)
    names = [e["name"] for e in json.loads(path.read_text())["traceEvents"]]
    text = "total = torch"
    here = line_of(test_a_frame_that_runs_already_has_the_lines_to_come, text)
    assert sum(name.endswith(f"test_user_lines.py:{here}") for name in names) == 1
    assert sys._getframe().f_trace is None
    assert total.sum() == 6


def test_what_a_library_calls_is_not_noted(noted):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    batch = torch.ones(2, 4)

    def step():
        model(batch)

    found = noted(step)

    mine = {line: spans for (file, line), spans in found.items() if file == "test_user_lines.py"}
    assert len(mine.pop(line_of(step, "model(batch)"))) == 1
    assert set(found) - {("test_user_lines.py", line) for line in mine} <= {
        ("test_user_lines.py", line_of(step, "model(batch)"))
    }


def counting():
    yield from range(3)


def fails():
    raise ValueError


def goes_on():
    for _ in counting():
        abs(-1)
    try:
        fails()
    except ValueError:
        abs(-2)
    abs(-3)


def test_generators_and_exceptions_keep_the_order(noted):
    found = noted(goes_on)

    assert len(found["test_user_lines.py", line_of(goes_on, "abs(-1)")]) == 3
    assert len(found["test_user_lines.py", line_of(goes_on, "fails()")]) == 1
    assert len(found["test_user_lines.py", line_of(goes_on, "abs(-3)")]) == 1
    assert len(found["test_user_lines.py", line_of(goes_on, "in counting()")]) == 4
    # A generator is entered three times, and once more to end.
    assert len(found["test_user_lines.py", line_of(counting, "yield from")]) == 4
    # Where a function begins, nothing runs yet.
    assert ("test_user_lines.py", line_of(fails, "def fails")) not in found


def test_a_debugger_that_is_there_is_left_alone():
    calls = []

    def mine(frame, event, _):
        calls.append(event)

    lines = UserLines()
    sys.settrace(mine)
    try:
        started = lines.start()
        lines.stop()
        held = sys.gettrace()
    finally:
        sys.settrace(None)
    assert not started
    assert held is mine


def test_one_that_takes_the_place_is_left_alone():
    lines = UserLines()
    assert lines.start()
    sys.settrace(print_nothing)
    lines.stop()
    held = sys.gettrace()
    sys.settrace(None)

    assert held is print_nothing


def print_nothing(frame, event, argument):
    pass


def test_another_thread_can_end_it():
    lines = UserLines()
    assert lines.start()
    thread = threading.Thread(target=lines.stop)
    thread.start()
    thread.join()

    abs(-1)  # the hook ends at the next call that it notes

    assert sys.gettrace() is None


def test_a_loop_of_many_calls_fills_no_file(monkeypatch, noted):
    monkeypatch.setattr(module, "_MOST", 10)

    def loop():
        for _ in range(50):
            abs(-1)

    def calls():
        loop()

    found = noted(calls)

    # Of those that were open, each function has one: the test's own, `noted`'s, the two here.
    assert 10 <= sum(len(spans) for spans in found.values()) <= 14
    assert sys.gettrace() is None
    # The line that all others ran in is still told, up to where there was no room for more.
    ((begin, end),) = found["test_user_lines.py", line_of(calls, "loop()")]
    inner = [
        span for line, spans in found.items() if line[1] < line_of(calls, "def") for span in spans
    ]
    assert len(found["test_user_lines.py", line_of(loop, "abs(-1)")]) >= 4
    assert all(last <= end for first, last in inner if first >= begin)


SYMBOLS = """
def simplify():
    for _ in range(50):
        abs(-1)
"""


@pytest.mark.parametrize("file", ["sympy/core/expr.py", "/tmp/torchinductor_me/ab/cab.py"])
def test_what_a_compilation_runs_is_not_the_user_s(monkeypatch, noted, file):
    monkeypatch.setattr(module, "_MOST", 20)
    made = {}
    exec(compile(SYMBOLS, file, "exec"), made)

    def compiles():
        made["simplify"]()
        abs(-2)

    found = noted(compiles)

    assert len(found["test_user_lines.py", line_of(compiles, "simplify")]) == 1
    assert len(found["test_user_lines.py", line_of(compiles, "abs(-2)")]) == 1
    assert not [line for line in found if line[0] != "test_user_lines.py"]


def test_a_worker_that_is_forked_notes_nothing():
    lines = UserLines()
    lines.start()
    child = os.fork()
    if child == 0:
        try:
            abs(-1)
            os._exit(0 if sys.gettrace() is None else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    lines.stop()

    assert os.waitstatus_to_exitcode(status) == 0


FORKING = """
import os, sys

def later():
    return sys.gettrace() is None

def forked():
    child = os.fork()
    if child == 0:
        later()
        os._exit(0 if later() else 1)
    return child
"""


def test_a_worker_of_libraries_alone_goes_on_without_the_hook():
    library = {}
    exec(compile(FORKING, "/lib/site-packages/library.py", "exec"), library)
    lines = UserLines()
    assert lines.start()
    _, status = os.waitpid(library["forked"](), 0)
    lines.stop()

    assert os.waitstatus_to_exitcode(status) == 0


def test_threads_of_others_are_not_touched(tmp_path):
    # As torch.profiler's own are.
    model = torch.nn.Linear(4, 4)
    batches = [torch.ones(2, 4)] * 20
    hooks, on_main, is_over = set(), set(), threading.Event()

    def other():
        while not is_over.wait(0.0005):
            hooks.add(sys.gettrace())

    threads = [threading.Thread(target=other) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        with torchfast.profile(tmp_path, steps=1, warmup=1) as profiling:
            for batch in profiling.iterate(batches):
                model(batch).sum().backward()
                on_main.add(sys.gettrace() is not None)
                time.sleep(0.01)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()

    assert hooks == {None}
    assert on_main == {False, True}
    assert sys.gettrace() is None


def test_the_report_says_why_there_are_no_lines(tmp_path):
    sys.settrace(print_nothing)
    try:
        with torchfast.profile(tmp_path, steps=1, warmup=1) as profiling:
            for _ in profiling.iterate(range(20)):
                torch.ones(3).sum()
    finally:
        held = sys.gettrace()
        sys.settrace(None)

    assert held is print_nothing
    assert any("a debugger holds sys.settrace" in r for r in profiling.report.remarks)


def sum_of_squares():
    total = 0
    for number in range(module._MOST_OF_A_FUNCTION):
        total += number
    return total


def calls_a_long_loop():
    sum_of_squares()
    inner()  # behind the loop


def test_a_function_of_very_many_lines_leaves_room_for_the_others(noted):
    found = noted(calls_a_long_loop)

    file = "test_user_lines.py"
    of_the_loop = line_of(sum_of_squares, "total +=")
    assert len(found[file, of_the_loop]) > 0.4 * module._MOST_OF_A_FUNCTION
    assert len(found[file, of_the_loop]) < 0.6 * module._MOST_OF_A_FUNCTION
    ((begin, end),) = found[file, line_of(calls_a_long_loop, "    sum_of")]
    assert all(begin <= a and b <= end for a, b in found[file, of_the_loop])
    assert len(found[file, line_of(calls_a_long_loop, "behind")]) == 1
    assert len(found[file, line_of(inner, "item()")]) == 1


def test_it_tells_which_function_was_left_out_and_leaves_frames_as_they_were():
    lines = UserLines()
    lines.start()
    for number in range(module._MOST_OF_A_FUNCTION):
        _ = number
    lines.stop()

    (left,) = lines.left_out
    first = test_it_tells_which_function_was_left_out_and_leaves_frames_as_they_were.__code__
    assert left.endswith(f"test_user_lines.py:{first.co_firstlineno}")
    assert inspect.currentframe().f_trace_lines


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.ones(8) * sum([number for number in range(100) if self.is_odd(number)])

    def is_odd(self, number):
        time.sleep(0.0001)
        return number % 2


def test_a_slow_data_set_leaves_room_for_the_line_that_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MOST", 400)
    monkeypatch.setattr(module, "_MOST_OF_A_FUNCTION", 100)
    with torchfast.profile(tmp_path, steps=3, warmup=1) as profiling:
        for batch in torch.utils.data.DataLoader(Slow(), batch_size=8):
            batch.square().sum()
            profiling.step()
            if profiling.is_done:
                break

    report = profiling.report

    here = line_of(test_a_slow_data_set_leaves_room_for_the_line_that_waits_for_it, "for batch in")
    assert report.verdict.line.endswith(f"test_user_lines.py:{here}")
    left = f"test_user_lines.py:{Slow.is_odd.__code__.co_firstlineno} runs very many lines"
    assert any(left in remark for remark in report.remarks)
