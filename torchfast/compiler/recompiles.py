"""What changed so that compiled code no longer fits: a guard of torch's, read.

Compiled code holds for what it was compiled with. Each thing that it relies on is checked before
every call by a guard: the sizes and dtypes of tensors, the values of Python numbers, the type of an
object, whether gradients are recorded. Where a guard fails, torch compiles the same function again,
for minutes with a large model. After `torch._dynamo.config.recompile_limit` (8) versions it gives
up, and what fits none of them runs eagerly from then on.

torch names a failed guard as the expression that was false, such as ``tensor 'x' size mismatch at
index 0. expected 8, actual 5`` or ``self.step == 3``. Here it becomes: which argument, attribute or
global state, which dimension, from what to what, and what to do.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from torchfast._core.user_code import is_users

Guards = Callable[[str | None], str]

_SIZES = (
    "pad or drop the odd batch, or under dynamic=False compile the dimension as dynamic "
    "(mark_dynamic)"
)
_REMEDIES = {
    "size": _SIZES,
    "single": "a dimension of size 1 or 0 is always compiled apart: pad or drop the batch",
    "rank": "give the argument the same number of dimensions at every call",
    "stride": "give it the same memory layout at every call, by .contiguous()",
    "dtype": "give it the same dtype at every call",
    "device": "give it from the same device at every call",
    "requires_grad": "give it with the same requires_grad at every call",
    "inference mode": "make it under the same mode every time; one version for training and one "
    "for evaluation under torch.inference_mode() are as they should be",
    "value": "a Python number or string is compiled in as a constant: keep one that changes in a "
    "tensor, or leave it out of the compiled code",
    "counter": "a number that changes at each step is compiled in as a constant: keep it in a "
    "tensor (register_buffer), or count outside of the compiled code",
    "training": "train and eval are compiled one time each, which is as it should be unless the "
    "mode of a part keeps changing",
    "global state": "call it under the same modes (no_grad, autocast, default dtype) every time; "
    "one version for training and one for evaluation are as they should be",
    "type": "give an object of the same type at every call",
    "object": "keep the same object: a new function, module or class at each call is compiled anew",
    "structure": "give the same entries at every call",
    "aliasing": "give distinct tensors at every call, or the same one twice at every call",
    "dynamic marking": "mark the dimension of every batch, from the first one on",
    "backend": "give torch.compile the same backend object every time",
    "other": "find what differs between the calls; TORCH_LOGS=recompiles_verbose shows all guards",
}
_OF_TENSORS = ("dtype", "rank", "stride", "device", "requires_grad", "inference mode", "type")
_STATES = {
    "grad_mode": "grad mode",
    "default_dtype": "default dtype",
    "torch_function": "torch function mode",
    "deterministic_algorithms": "deterministic algorithms",
    "allow_tf32": "tf32",
    "num_threads": "number of threads",
}

# As torch names them in C++.
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
    "Bool": "bool", "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip


class Change(NamedTuple):
    """What a failed guard says has changed.

    Attributes:
        kind: ``"size"``, ``"dtype"``, ``"value"``, ``"training"``, ``"global state"``, ...; a key
            of the table of remedies.
        source: The argument, attribute or state, as an expression: ``"batch['ids']"``,
            ``"self.step"``, ``"grad mode"``.
        dimension: Of a tensor; None where no single one is meant.
        before: What it was compiled for, in words; None if unknown.
        after: What it was called with; None if unknown.
        remedy: What to do about it.
        at: The user's line that first relies on it, as ``file:line``; empty if torch does not say.
    """

    kind: str
    source: str
    dimension: int | None
    before: str | None
    after: str | None
    remedy: str
    at: str = ""

    def __str__(self) -> str:
        what = self.source
        if self.dimension is not None:
            part = "the stride of dimension" if self.kind == "stride" else "dimension"
            what = f"{part} {self.dimension} of {what}"
        elif self.kind in _OF_TENSORS:
            what = f"the {self.kind} of {what}"
        if self.after is not None:
            return f"{what} changed from {self.before} to {self.after}"
        return f"{what} changed" if self.before is None else f"{what} is no longer {self.before}"


def read_guard(reason: str, guards: Guards | None = None) -> Change:
    """Read the reason that torch gives for compiling a function again.

    Args:
        reason: As in the compilation metrics: ``"0/1: tensor 'x' size mismatch at index 0. ..."``.
        guards: Returns all guards of a compiled version as text, of the one named or, by None, of
            the one just compiled; it tells what a value has become.
    """
    lines = reason.strip().split("\n")
    version, guard = _split_version(lines[0])
    at = _place(lines)
    # A literal may contain a "#", but torch's comments stand behind two blanks.
    expression = re.split(r"\s{2,}#\s", guard, maxsplit=1)[0].strip()
    change = _tensor(expression) or _symbolic(expression)
    if change is None:
        change = _state(expression, version, guards) or _value(expression, guards)
    if change is None:
        change = _identity(expression) or _change("other", _shown(expression))
    return change._replace(at=at)


def as_counter(change: Change) -> Change:
    """Return the change of a value as that of one that changes at each step."""
    return change._replace(kind="counter", remedy=_REMEDIES["counter"])


def _change(
    kind: str,
    source: str,
    dimension: int | None = None,
    before: str | None = None,
    after: str | None = None,
) -> Change:
    return Change(kind, source, dimension, before, after, _REMEDIES[kind])


def _tensor(guard: str) -> Change | None:
    found = re.match(r"tensor '(.*?)' (.+?) mismatch(?: at index (\d+))?\.? ?(.*)", guard)
    if found is None:
        return None
    source, what = readable(found[1]), found[2].lower()
    if source.count("'") % 2:  # the name of an entry has quotes of its own: tensor 'k['b'][1]'
        found = (
            re.match(r"tensor '(.*)' (.+?) mismatch(?: at index (\d+))?\.? ?(.*)", guard) or found
        )
        source, what = readable(found[1]), found[2].lower()
    values = re.search(r"[Ee]xpected (?:device index to be )?(.*?), (?:actual|got) (.*)", found[4])
    before, after = (values[1], values[2].rstrip(".")) if values else (None, None)
    index = int(found[3]) if found[3] else None
    if "requires_grad" in what:
        was = "requires_grad=1" in found[4]
        return _change("requires_grad", source, None, str(was), str(not was))
    if "dtype" in what:
        names = (_DTYPES.get(name, name) if name else None for name in (before, after))
        return _change("dtype", source, None, *names)
    for kind in ("size", "stride", "rank"):
        if kind in what:
            return _change(kind, source, index, before, after)
    if _differ_by_inference(before, after):
        switches = ("off" if "Autograd" in str(keys) else "on" for keys in (before, after))
        return _change("inference mode", source, None, *switches)
    if "device" in what or "dispatch key" in what:
        return _change("device", source, None, before, after)
    return _change("other", source, None, before, after)


def _differ_by_inference(before: str | None, after: str | None) -> bool:
    """Whether two sets of dispatch keys are of one device, and one of an inference tensor."""
    # Those have no autograd key; the mode of the call may add ADInplaceOrView to either.
    keys = [set(re.findall(r"\w+", (text or "").partition("(")[2])) for text in (before, after)]
    differing = {key for key in keys[0] ^ keys[1] if key != "ADInplaceOrView"}
    return bool(differing) and all(key.startswith("Autograd") for key in differing)


def _symbolic(guard: str) -> Change | None:
    """Read a guard on a dimension that is dynamic already, such as ``2 <= x.size()[0]``."""
    found = re.findall(r"([A-Za-z_][\w.\[\]'\"]*?)\.(size|stride)\(\)\[(\d+)\]", guard)
    if not found:
        return None
    source, kind, dimension = found[0]
    change = _change(kind, readable(source), int(dimension), f"one with {_shown(guard)}", None)
    if kind == "size" and re.match(r"2 <= ", guard):
        # torch compiles a size of 0 or 1 apart, whatever is dynamic.
        return change._replace(before="2 or more", after="0 or 1", remedy=_REMEDIES["single"])
    return change


def _state(guard: str, version: str | None, guards: Guards | None) -> Change | None:
    if guard.startswith("GLOBAL_STATE"):
        names = guard.partition("changed:")[2].split()
        values = [_global_states(guards(v)) if guards else {} for v in (version, None)]
        key = names[0] if len(names) == 1 else ""
        before, after = (_switch(v[key]) if key in v else None for v in values)
        shown = ", ".join(_STATES.get(name, name.replace("_", " ")) for name in names)
        return _change("global state", shown or "global state", None, before, after)
    for text, name in (
        ("torch_function_mode_stack", "torch function mode"),
        ("CURRENT_DEVICE", "default device"),
        ("saved_tensors_hooks", "saved tensor hooks"),
    ):
        if text in guard:
            return _change("global state", name)
    if "'_dynamo_" in guard and guard.startswith(("hasattr", "not hasattr")):
        source = re.search(r"hasattr\((.*), '_dynamo", guard)
        return _change("dynamic marking", readable(source[1]) if source else guard)
    if "_dynamo_" in guard and "on runtime tensor" in guard:  # as later versions say it, unnamed
        return _change("dynamic marking", "the dimensions marked as dynamic of a tensor")
    if guard.startswith("BACKEND_MATCH"):
        return _change("backend", "torch.compile")
    return None


def _value(guard: str, guards: Guards | None) -> Change | None:
    length = re.match(r"len\((.*?)\) == (\d+)", guard)
    if length:
        return _change("structure", readable(length[1]), None, f"{length[2]} entries", None)
    contains = re.match(r"(not )?___dict_contains\((.*), (.*)\)", guard)
    if contains:
        source = f"{readable(contains[3])}[{contains[2]}]"
        states = ("absent", "there") if contains[1] else ("there", "absent")
        return _change("structure", source, None, *states)
    found = re.match(r"(.+?) == (.+)", guard)
    if found is None or not _is_literal(found[2]):
        return None
    source, before = found[1], found[2]
    if source.endswith(".training"):
        modes = ("train", "eval") if before == "True" else ("eval", "train")
        return _change("training", readable(source.removesuffix(".training")), None, *modes)
    after = _became(source, guards)
    kind = "counter" if _counts(before, after) else "value"
    return _change(kind, readable(source), None, before, after)


def _identity(guard: str) -> Change | None:
    found = re.match(r"___check_(type|obj)_id\((.*), \d+\)(?:, type=<class '(.*?)'>)?", guard)
    if found:
        if found[1] == "type":
            return _change("type", readable(found[2]), None, found[3], None)
        return _change("object", readable(found[2]))
    if guard.startswith("Duplicate tensor"):
        names = re.findall(r'"(.*?)"', guard)
        return _change("aliasing", ", ".join(map(readable, names)) or "the arguments", None,
                       "distinct tensors", "one tensor")  # fmt: skip
    if "invalidated" in guard:
        return _change("object", _shown(guard))
    return None


def _became(source: str, guards: Guards | None) -> str | None:
    if guards is None:
        return None
    found = re.search(
        rf"EQUALS_MATCH: {re.escape(source)} == (.+?)(?:\s{{2,}}#|\n|$)", guards(None)
    )
    return found[1].strip() if found else None


def _switch(value: object) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else json.dumps(value)


def _counts(before: str, after: str | None) -> bool:
    """Whether a value looks like a step counter: a whole number, and then the next one."""
    return before.isdecimal() and after is not None and after == str(int(before) + 1)


def _global_states(text: str) -> dict[str, Any]:
    found = re.search(r"___check_global_state\(\) against (\{.*\})", text)
    try:
        return dict(json.loads(found[1])) if found else {}
    except ValueError:
        return {}


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text in ("inf", "-inf", "nan") or text.startswith(("torch.", "device("))
    return True


def _split_version(line: str) -> tuple[str | None, str]:
    found = re.match(r"(\S*\d+/\d+): (.*)", line, re.DOTALL)
    return (found[1], found[2]) if found else (None, line)


def _place(lines: list[str]) -> str:
    """Return the innermost line of the user's in torch's stack of the code that relies on a value.

    Outermost stands the function of torchfast's that a region is compiled through.
    """
    found = re.findall(r'File "(.*?)", line (\d+)', "\n".join(lines[1:]))
    users = [place for place in found if is_users(place[0])]
    return ":".join(users[-1]) if users else ""


def _shown(text: str, limit: int = 160) -> str:
    text = " ".join(readable(text).split())
    return text if len(text) <= limit else text[: limit - 4] + " ..."


def readable(source: str) -> str:
    """Return torch's expression for a value as the user would write it.

    Example:
        >>> readable("self._modules['l']._parameters['weight']")
        'self.l.weight'
    """
    source = re.sub(r"L\[\s*['\"](.*?)['\"]\s*\]", r"\1", source)
    source = re.sub(r"G\[\s*['\"](.*?)['\"]\s*\]", r"\1", source)
    return re.sub(
        r"(?:\.__dict__)?(?:\[['\"]|\.)_(?:modules|parameters|buffers)(?:['\"]\])?"
        r"\[['\"](.*?)['\"]\]",
        lambda match: f"[{match[1]}]" if match[1].isdecimal() else f".{match[1]}",
        source,
    )
