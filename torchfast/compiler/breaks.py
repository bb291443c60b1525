"""Why a graph broke, in plain words, and what to do about it.

torch.compile turns a function into one graph as long as it can follow every line. At a line that it
cannot follow it ends the graph, runs that line in Python, and begins another graph after it: a
graph break. Each one costs a launch of its own, keeps the compiler from fusing across it, and, when
the line reads a tensor's value, makes the host wait for the device. Inside of a loop, a ``try`` or
some ``with`` blocks it cannot begin again after the line, and gives the whole function up.

torch says why in a message for its own developers. Here it is matched against the causes that turn
up in training code; for any other, torch's own explanation and first hint are given, shortened.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# The title of a break before a region that is compiled by itself.
APART = "torchfast region apart"
# torch joins the messages of a break that led to another one by this.
_LED_TO = "*** While handling this graph break, another graph break occurred: ***"
# What torch raises where it cannot follow a function, by class.
CANNOT_FOLLOW = ("Unsupported", "UserError")
_NO_FAKE = re.compile(r"no fake impl registered for <?(?:CustomOpDef\()?([\w.:]+)")
_UNSUPPORTED = re.compile(r"unsupported operator: (\w+)\.(\w+)(?:\.default\b|(\.\w+))?")
_NOT_FOR_USERS = (
    "please report an issue",
    "docs.google.com",
    "may have been caused by an earlier graph break",
)


class BreakReading(NamedTuple):
    """What a message of torch's says of a graph break.

    Attributes:
        kind: A short name of the cause; ``"other"`` where it is none of the known ones.
        reason: The cause in plain words.
        remedy: What to do about it; empty where there is nothing to do.
        on_purpose: Somebody asked for it, by ``torch.compiler.disable`` or the like.
    """

    kind: str
    reason: str
    remedy: str
    on_purpose: bool = False


class _Cause(NamedTuple):
    kind: str
    pattern: str  # looked for in the title, the explanation and the context, ignoring case
    reason: str
    remedy: str
    on_purpose: bool = False


_CAUSES = (
    _Cause(
        "disabled",
        r"torch\.compiler\.disable\(?\)?`?d function|skip calling `torch\.compiler\.disable|"
        r"is wrapped with `torch\.compiler\.disable",
        "the function is kept out of the graph by torch.compiler.disable",
        "",
        True,
    ),
    _Cause(
        "asked for",
        r"torch\._dynamo\.(graph_break|skip_frame|step_unsupported)\(\)",
        "the code asks for it by a call of torch._dynamo",
        "",
        True,
    ),
    _Cause(
        "TorchScript",
        r"torch\.jit\.script|wrapped around scriptmodules",
        "a part that torch.jit.script made, which has no Python that torch could follow",
        "put the module there that the script was made of, or torch.compiler.disable on it",
    ),
    _Cause(
        # The title is all that torch says of it.
        "no way back",
        r"^step_unsupported$",
        "torch cannot compile this line nor begin again after it, so the rest of the function "
        "runs as it is",
        "the cause is told as a graph break of its own, in what the line calls: mend that one",
    ),
    _Cause(
        "data-dependent branch",
        r"data-dependent branching|^generic_jump|data-dependent assertion|"
        r"Could not guard on data-dependent expression",
        "an if, while or assert on the value of a tensor: which way to go is known only when the "
        "numbers are",
        "choose with torch.where or torch.cond, or take the test out of the compiled code; tests "
        "of shapes and of the configuration are no problem",
    ),
    _Cause(
        "no fake",
        rf"{_UNSUPPORTED.pattern}|{_NO_FAKE.pattern}",
        "the operator {name} has no fake implementation, which makes a result of the right shape "
        "and dtype of no data",
        "register one, by torch.library.register_fake({name!r})",
    ),
    _Cause(
        "numpy",
        r"numpy",
        "a call of numpy that torch cannot follow",
        "use the torch function of the same name, or do it before the batch reaches the model",
    ),
    _Cause(
        "print",
        r"builtin operator `print`|builtins?\.print\b",
        "print() cannot be a part of a graph",
        "take the line out, or put it under `if not torch.compiler.is_compiling():`",
    ),
    _Cause(
        "logging",
        r"logging\.logger|loggingloggervariable|`_?warnings\.warn",
        "logging and warnings cannot be a part of a graph",
        "log outside of the model, put the line under `if not torch.compiler.is_compiling():`, or "
        "add the function to torch._dynamo.config.ignore_logging_functions",
    ),
    _Cause(
        "item",
        r"tensor\.item\(\)|tensor\.tolist\(\)|_local_scalar_dense|aten\.item",
        "a tensor is made a Python number (.item(), float(), int(), .tolist()), which also makes "
        "the host wait for the device",
        "keep it a tensor and read it after the step; where the number is needed inside, "
        "torch._dynamo.config.capture_scalar_outputs = True keeps it in the graph",
    ),
    _Cause(
        "dynamic shape",
        r"dynamic shape operator|data-dependent shape|dynamic slicing with tensor|"
        r"indexing list with non-scalar|boolean mask",
        "the size of a result depends on the numbers (nonzero, x[mask], unique, masked_select)",
        "keep the size fixed: torch.where, a multiplication by the mask, a loss's ignore_index; or "
        "torch._dynamo.config.capture_dynamic_output_shape_ops = True",
    ),
    _Cause(
        "context manager",
        r"genericcontextwrappingvariable|unsupported context manager|contextlib|"
        r"@contextmanager|context manager's __enter__",
        "a with block of a context manager that torch cannot leave and enter again",
        "open it outside of the compiled code",
    ),
    _Cause(
        "generator",
        r"attempt to trace generator|call_method on generator|generator reconstruction|"
        r"infinite generator|sub-generator",
        "a generator function",
        "return a list instead, or keep it outside of the compiled code",
    ),
    _Cause(
        "hook",
        r"intermediate hooks|backwards? hooks require|hook handle|register_hook",
        "a hook on a tensor or a backward hook on a module inside of the compiled code",
        "register it on the outermost module or on a parameter, or remove it",
    ),
    _Cause(
        "backward",
        r"tensor\.backward\(\)|torch\.autograd\.grad|autograd\.grad ",
        "a backward pass inside of the compiled code",
        "compile the forward and the loss only, and call backward() outside",
    ),
    _Cause(
        "raises",
        r"observed exception|failed to raise exception",
        "the code raises an exception that it does not catch itself",
        "where it is not meant to, run it without torch.compile for the traceback",
    ),
    _Cause(
        "in-place requires_grad",
        r"requires_grad_\(\)|tensor\.requires_grad",
        "requires_grad is set inside of the compiled code",
        "set it before the call",
    ),
    _Cause(
        "unsupported function",
        r"marked as skipped|failed to trace builtin operator|unsupported method call|"
        r"unsupported function call|does not know how to trace|constant fold exception|"
        r"unimplemented builtin|cannot determine source file",
        "a function that torch cannot look into",
        "call it before the model, write it with torch functions, or make it an operator by "
        "torch.library.custom_op; torch.compiler.disable on it makes the break a deliberate one",
    ),
)

_NO_RESUME = (
    ("graph break in loop", "inside of a for or while loop"),
    ("genericcontextwrappingvariable", "inside of a with block of a user's context manager"),
    ("data-dependent assertion", "in an assert"),
)


def read_break(message: str) -> BreakReading:
    """Read what torch says of a graph break.

    Args:
        message: The reason as torch gives it: a title, an explanation, hints and a context.
    """
    # What came first is the cause; what it led to says only why torch could not go on after it.
    first = message.split(_LED_TO)[0].strip()
    title = first.split("\n", 1)[0].strip()
    explanation, hints = _part(first, "Explanation"), _hints(first)
    # The titles are looked through first, as the explanation of one cause may name another. The
    # last cause is what torch calls everything that it cannot look into, so it comes last.
    everything = " ".join((title, explanation, _part(first, "Developer debug context")))
    for causes, text in ((_CAUSES[:-1], title), (_CAUSES, everything)):
        for cause in causes:
            if re.search(cause.pattern, text, re.IGNORECASE):
                return _reading(cause, explanation, message)
    reason = explanation or title or "torch gives no reason"
    remedy = next((h for h in hints if not any(n in h.lower() for n in _NOT_FOR_USERS)), "")
    return BreakReading(
        "other",
        shortened(reason),
        shortened(remedy)
        or "keep the line out of the compiled code, or mark it by torch.compiler.disable",
    )


def is_apart(message: str) -> bool:
    """Whether torch stopped, as it was told to, before a region that is compiled by itself."""
    return message.split(_LED_TO)[0].strip().startswith(APART)


def why_given_up(message: str) -> str:
    """Return why torch could not go on after a break: a place in the code, in words."""
    lowered = message.lower()
    for text, place in _NO_RESUME:
        if text in lowered:
            return place
    return "in a try block or the like"


def shortened(text: str, limit: int = 200) -> str:
    """Return ``text`` on one line, cut at a word."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit].rsplit(" ", 1)[0] + " ..."


def without_fake(message: str) -> str | None:
    """Return the custom operator that torch cannot trace for want of a fake; None if it is not."""
    found = _NO_FAKE.search(message)
    if found is not None:
        return found[1]
    found = _UNSUPPORTED.search(message)
    return None if found is None else f"{found[1]}::{found[2]}{found[3] or ''}"


def _reading(cause: _Cause, explanation: str, message: str) -> BreakReading:
    reason = cause.reason
    if cause.kind == "no fake":
        operator = without_fake(message)
        texts = [text.format(name=operator) for text in (reason, cause.remedy)]
        return BreakReading(cause.kind, texts[0], texts[1])
    if cause.kind == "unsupported function":
        # Which one is what the user has to know.
        name = re.search(
            r"(?:function|method|builtin|operator) `([^`]+?)\.?`(?: of class `(\w+)`)?",
            explanation,
        )
        if name:
            of_class = f"{name[2]}." if name[2] else ""
            reason += f": {of_class}{name[1]}"
    elif cause.kind == "disabled":
        given = re.search(r"\(reason: (.+?)\)", explanation)
        if given and given[1] != "None":
            reason += f" ({given[1]})"
    return BreakReading(cause.kind, reason, cause.remedy, cause.on_purpose)


def _part(message: str, name: str) -> str:
    """Return what stands after ``name:`` up to the next named part."""
    found = re.search(rf"{name}:(.*?)(?=\n\s*(?:Hint|Developer debug context):|\n\n|\Z)", message,
                      re.DOTALL)  # fmt: skip
    return found[1].strip() if found else ""


def _hints(message: str) -> list[str]:
    found = re.findall(
        r"Hint:(.*?)(?=\n\s*(?:Hint|Developer debug context):|\n\n|\Z)", message, re.DOTALL
    )
    return [hint.strip() for hint in found]
