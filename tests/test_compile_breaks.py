"""Graph breaks are found at the user's line, with their cause, and told apart from wanted ones."""

from __future__ import annotations

import contextlib
import json
import logging
import time
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from torchfast.compiler.breaks import read_break, shortened, why_given_up
from torchfast.compiler.record import CompileRecord

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def record_of(function, *arguments, times=2, **options):
    """Compile and call a function; what happened."""
    with CompileRecord() as record:
        compiled = torch.compile(function, backend="eager", **options)
        for _ in range(times):
            compiled(*arguments)
    return record.summary()


def prints(x):
    y = x + 1
    print("here")  # noqa: T201, the line
    return y * 2


def reads_item(x):
    y = x.sin()
    n = y.sum().item()  # the line
    return x * n


def reads_list(x):
    n = x.sin().tolist()  # the line
    return x * n[0]


def branches(x):
    y = x.sin()
    if y.sum() > 100:  # the line
        return y + 1
    return y - 1


def indexes_by_mask(x):
    y = x.sin()
    z = y[y > 0]  # the line
    return z * 2


def reads_nonzero(x):
    y = x.sin()
    z = torch.nonzero(y)  # the line
    return z + 1


def uses_numpy(x):
    y = x.sin()
    np.save("/dev/null", np.ones(1))  # the line
    return y * 2


def sleeps(x):
    y = x.sin()
    time.sleep(0)  # the line
    return y * 2


def logs(x):
    y = x.sin()
    logging.getLogger("models").warning("here")  # the line
    return y * 2


def warns(x):
    y = x.sin()
    warnings.warn("here", stacklevel=1)  # the line
    return y * 2


@torch.compiler.disable(reason="it is slow to compile")
def kept_out(x):
    return x + 1


def calls_disabled(x):
    y = x.sin()
    y = kept_out(y)  # the line
    return y * 2


KEPT_OUT = torch.compiler.disable(nn.Linear(4, 4), reason="it is slow to compile")


def calls_a_disabled_module(x):
    y = x.sin()
    y = KEPT_OUT(y)  # the line
    return y * 2


def asks_for_a_break(x):
    y = x.sin()
    torch._dynamo.graph_break()  # the line
    return y * 2


CAUSES = [
    (prints, "print"),
    (reads_item, "item"),
    (reads_list, "item"),
    (branches, "data-dependent branch"),
    (indexes_by_mask, "dynamic shape"),
    (reads_nonzero, "dynamic shape"),
    (uses_numpy, "numpy"),
    (sleeps, "unsupported function"),
    (logs, "logging"),
    (warns, "logging"),
    (calls_disabled, "disabled"),
    (calls_a_disabled_module, "disabled"),
    (asks_for_a_break, "asked for"),
]


@pytest.mark.filterwarnings("ignore")  # torch's, and the function's own
@pytest.mark.parametrize(
    ("function", "kind"), CAUSES, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_break_is_named_at_the_users_line(function, kind):
    summary = record_of(function, torch.randn(4))
    [found] = [e for e in summary.graph_breaks if "the line" in e.place.text]
    assert found.kind == kind
    assert found.place.file == __file__
    assert found.place.name == function.__name__
    assert found.on_purpose == (kind in ("disabled", "asked for"))
    assert bool(found.remedy) != found.on_purpose
    assert not found.gave_up
    assert found.place.text in str(found)
    assert found.reason in str(summary)


@pytest.mark.filterwarnings("ignore")
def test_every_break_of_a_function_is_at_that_line():
    for function, _ in CAUSES:
        torch._dynamo.reset()
        summary = record_of(function, torch.randn(4))
        assert all("the line" in e.place.text for e in summary.graph_breaks), function


def test_a_clean_model_has_none():
    summary = record_of(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout()), torch.randn(2, 4))
    assert summary.graph_breaks == ()
    assert summary.given_up == ()
    assert summary.num_graphs == 1
    assert summary.counters()["graph_breaks"] == 0


def test_what_is_wanted_is_counted_apart():
    def both(x):
        return prints(kept_out(x))

    numbers = record_of(both, torch.randn(4)).counters()
    assert numbers["graph_breaks"] == 1
    assert numbers["graph_breaks_on_purpose"] == 1


@pytest.mark.parametrize("function", [calls_disabled, calls_a_disabled_module])
def test_the_reason_given_to_disable_is_told(function):
    [found] = record_of(function, torch.randn(4)).graph_breaks
    assert "it is slow to compile" in found.reason


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_script_in_a_model_is_told_as_one():
    class HasScript(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = torch.jit.script(nn.Linear(4, 4))

        def forward(self, x):
            return self.part(x.sin()) * 2

    [found] = record_of(HasScript(), torch.randn(4)).unwanted_breaks
    assert found.kind == "TorchScript"
    assert "the module there that the script was made of" in found.remedy


@pytest.mark.filterwarnings("ignore:Dynamo does not know how:UserWarning")
def test_the_function_that_torch_cannot_look_into_is_named():
    [found] = record_of(sleeps, torch.randn(4)).unwanted_breaks
    assert found.reason.endswith("time.sleep")


def test_a_break_in_a_called_function_is_one_break_there():
    def outer(x):
        y = prints(x)
        return y.cos()

    summary = record_of(outer, torch.randn(4))
    [found] = summary.graph_breaks
    assert found.place.name == "prints"
    assert found.times == 2  # it cuts the graph of the caller, and then its own
    assert "outer" in found.within
    assert summary.num_graphs == 3


# --- functions that are given up as a whole ------------------------------------------------------


@contextlib.contextmanager
def opened():
    yield


def breaks_in_a_loop(x):
    for _ in range(2):
        x = x + 1
        print("here")  # noqa: T201, the line
    return x


def breaks_in_a_try(x):
    try:
        y = x + x.sum().item()  # the line
    except ValueError:
        y = x
    return y


def breaks_in_a_with(x):
    with opened():
        y = x + 1
        print("here")  # noqa: T201, the line
    return y


@pytest.mark.parametrize(
    ("function", "kind", "place"),
    [
        (breaks_in_a_loop, "print", "loop"),
        (breaks_in_a_try, "item", "try"),
        (breaks_in_a_with, "print", "with block"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_function_given_up_is_told_with_the_line(function, kind, place):
    summary = record_of(function, torch.randn(4))
    assert not summary.is_compiled
    [found] = summary.graph_breaks
    assert found.kind == kind
    assert found.gave_up
    assert "the line" in found.place.text
    [frame] = summary.given_up
    assert frame.code.name == function.__name__
    assert frame.at_break
    assert place in frame.reason
    assert summary.headline.startswith("nothing was compiled: ")
    # One decision for the outcome, one for the break: the frame is not told a second time.
    decisions = summary.decisions()
    assert [d.outcome for d in decisions] == ["stepped aside", "stepped aside"]


def test_a_backend_that_fails_is_given_up_and_no_break():
    def broken(_module, _inputs):
        raise RuntimeError("no compiler here")

    with CompileRecord() as record, pytest.raises(Exception, match="no compiler here"):
        torch.compile(lambda x: x + 1, backend=broken)(torch.ones(2))
    summary = record.summary()
    assert summary.graph_breaks == ()
    [frame] = summary.given_up
    assert "no compiler here" in frame.reason
    assert summary.num_graphs == 0
    assert any("no compiler here" in d.detail for d in summary.decisions()[1:])


def test_an_error_of_the_user_is_no_break():
    def raises(x):
        y = x + 1
        if y.shape[0] > 1:
            raise ValueError("too long")
        return y

    with CompileRecord() as record, pytest.raises(ValueError, match="too long"):
        torch.compile(raises, backend="eager")(torch.ones(2))
    assert record.summary().graph_breaks == ()


def test_the_summary_is_json():
    values = json.loads(json.dumps(record_of(prints, torch.randn(4)).to_dict()))
    [found] = values["graph_breaks"]
    assert found["kind"] == "print"
    assert found["place"]["text"].startswith('print("here")')
    assert values["counters"]["graphs"] == 2


# --- reading messages ---------------------------------------------------------------------------


def test_an_unknown_cause_is_given_in_torchs_words():
    message = (
        "Something new\n  Explanation: Dynamo cannot do this\n    over two lines.\n"
        "  Hint: Please report an issue to PyTorch.\n  Hint: Do that instead.\n\n"
        "  Developer debug context: x\n\n For more details: https://somewhere"
    )
    reading = read_break(message)
    assert reading.kind == "other"
    assert reading.reason == "Dynamo cannot do this over two lines."
    assert reading.remedy == "Do that instead."
    assert not reading.on_purpose


@pytest.mark.parametrize("message", ["", "\n\n", "Explanation:", "no form at all"])
def test_any_message_is_read(message):
    reading = read_break(message)
    assert reading.reason
    assert reading.remedy


def test_a_line_that_torch_gives_no_reason_for():
    reading = read_break("step_unsupported")
    assert "rest of the function runs as it is" in reading.reason
    assert "graph break of its own" in reading.remedy
    assert not reading.on_purpose
    assert read_break("torch._dynamo.step_unsupported() with empty checkpoint").on_purpose


def test_what_came_first_is_the_cause():
    message = (
        "Failed to trace builtin operator\n  Explanation: Dynamo does not know how to trace "
        "builtin operator `print` with argument types ['str']\n\n"
        "*** While handling this graph break, another graph break occurred: ***\n\n"
        "graph break in loop\n  Explanation: torch.compile"
    )
    assert read_break(message).kind == "print"
    assert why_given_up(message) == "inside of a for or while loop"


def test_long_text_is_cut_at_a_word():
    assert shortened("one two  three", limit=8) == "one two ..."
    assert shortened("one\n two") == "one two"
