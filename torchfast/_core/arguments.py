"""Argument checks whose messages give name, value and what is accepted."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Literal, ParamSpec, TypeVar

import torch
from torch.utils.data import Dataset

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

# What other libraries, and torch, take as an argument beside the model, and here is a plan's field.
_OF_PLANS = {
    **dict.fromkeys(("scaler", "grad_scaler", "fp16"), "precision='fp16'"),
    **dict.fromkeys(
        ("amp", "use_amp", "autocast", "mixed_precision", "bf16", "precision", "dtype"),
        "precision='bf16'",
    ),
    **dict.fromkeys(("compile", "use_compile", "torch_compile", "compile_model"), "compile=True"),
    **dict.fromkeys(("fused", "fused_optimizer"), "optimizer='fused'"),
    **dict.fromkeys(("gradient_checkpointing", "recompute"), "recompute='blocks'"),
    **dict.fromkeys(("ddp", "fsdp", "strategy", "shard"), "shard='ddp'"),
    **dict.fromkeys(("cuda_graph", "cudagraph", "cuda_graphs"), "cuda_graph=True"),
    **dict.fromkeys(("channels_last", "memory_format"), "channels_last=True"),
    **dict.fromkeys(("benchmark", "cudnn_benchmark"), "cudnn_benchmark=True"),
    **{name: f"{name}=..." for name in ("nonfinite", "offload", "sync_guard", "allocator")},
    "out_of_memory": "out_of_memory='split'",
}


def check_int(name: str, value: object, *, minimum: int) -> int:
    """Return ``value`` as an int of at least ``minimum``; bools and floats are not ints."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int >= {minimum}, got {describe(value)}")
    if value < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {value}")
    return int(value)


def check_positive(name: str, value: object) -> float:
    """Return ``value`` as a float if it is a real number above zero (infinity is accepted)."""
    # numpy's numbers are registered as such; its bool, like torch's tensors, is not.
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number > 0, got {describe(value)}")
    number = float(value)
    if not number > 0:  # false of NaN, too; math.isnan is nothing that Dynamo could trace
        raise ValueError(f"{name} must be > 0, got {value}")
    return number


def check_not_negative(name: str, value: object) -> float:
    """Return ``value`` as a float if it is a finite real number of at least zero."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number >= 0, got {describe(value)}")
    number = float(value)
    if not 0.0 <= number < math.inf:  # false of NaN, too
        raise ValueError(f"{name} must be a finite number >= 0, got {value}")
    return number


def check_flag(name: str, value: object) -> bool:
    """Return ``value`` if it is a bool; 0 and 1 are not."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {describe(value)}")
    return value


def check_flag_or_auto(name: str, value: object) -> bool | Literal["auto"]:
    """Return ``value`` if it is a bool or ``"auto"``."""
    if value != "auto" and not isinstance(value, bool):
        raise TypeError(f"{name} must be True, False or 'auto', got {describe(value)}")
    return value


def check_float_dtype(name: str, value: object) -> torch.dtype:
    """Return ``value`` if it is a floating-point dtype."""
    if not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise TypeError(
            f"{name} must be a floating-point torch.dtype or None, got {describe(value)}"
        )
    return value


def check_choice(
    name: str, value: object, choices: Iterable[str], error: type[ValueError] = ValueError
) -> str:
    """Return ``value`` if it is one of ``choices``, else raise ``error`` with the nearest one."""
    known = list(choices)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {known}, got {describe(value)}")
    if value not in known:
        raise error(f"{name} must be one of {known}, got {value!r}{suggestion(value, known)}")
    return value


def check_callable(name: str, value: object, signature: str) -> None:
    """Raise unless ``value`` can be called; ``signature`` says how it will be."""
    if not callable(value):
        raise TypeError(f"{name} must be callable as {signature}, got {describe(value)}")


def check_type(name: str, value: object, kind: type) -> None:
    """Raise unless ``value`` is of a class of torch's.

    Raises:
        TypeError: It is not.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be torch's {kind.__name__}, got {describe(value)}")


def check_folder(name: str, value: object, of: str) -> str:
    """Return the path of a folder, there or not, as text.

    Raises:
        TypeError: It is no path.
        ValueError: It is empty, of a shell, or a file's.
    """
    if not isinstance(value, str | os.PathLike):
        raise TypeError(
            f"{name} must be the path of a folder, got {value!r} ({type(value).__name__})"
        )
    text = os.fsdecode(os.fspath(value))
    if not text:  # such as a variable of the environment that is not set
        raise ValueError(f"{name}='' names no folder; pass its path, or None for no {of}")
    if text.startswith("~"):
        raise ValueError(
            f"{name}={text!r} begins with '~', which only a shell expands; pass "
            f"os.path.expanduser({name})"
        )
    if os.path.isfile(os.path.abspath(text)):
        raise ValueError(f"{name}={text!r} is a file, expected a folder for a {of}; name another")
    return text


def check_iterable(name: str, value: object, of: str) -> None:
    """Raise unless ``value`` can be iterated, without starting to.

    ``iter()`` itself would start loader workers and draw random numbers.
    """
    if not (hasattr(type(value), "__iter__") or hasattr(type(value), "__getitem__")):
        raise TypeError(f"{name} must be an iterable of {of}, got {describe(value)}")
    if isinstance(value, str | bytes | Mapping):  # whose items are letters and keys
        raise TypeError(
            f"{name} must be an iterable of {of}, and what iter() gives of a "
            f"{type(value).__name__} is none; put a single one in a list"
        )


def check_batches(name: str, value: object, of: str = "batches") -> None:
    """Raise unless ``value`` can be iterated, and a data set that yields single samples is none.

    Python iterates what has ``__getitem__`` until that raises IndexError, which a data set that
    wraps around or makes its samples never does.
    """
    check_iterable(name, value, of)
    if isinstance(value, Dataset) and not hasattr(type(value), "__iter__"):
        raise TypeError(
            f"{name} must be an iterable of {of}, and a {type(value).__name__} is a data set of "
            "samples; give DataLoader(dataset, batch_size=...), with batch_size=None where each "
            "of its items is a batch"
        )


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def explain_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Make an unknown keyword's TypeError name the nearest accepted one.

    The signature stays visible to type checkers and to ``inspect``. For constructors and other
    calls outside the step: it costs a few microseconds.
    """
    accepted = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self" and parameter.kind is not parameter.VAR_POSITIONAL
    ]
    owner = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in accepted:
                hint = suggestion(name, accepted)
                if "plan" in accepted and name in _OF_PLANS:
                    hint = f"; that is for the plan: plan=Plan({_OF_PLANS[name]})"
                raise TypeError(
                    f"{owner}() has no argument {name!r}{hint} (accepted: {', '.join(accepted)})"
                )
        return function(*args, **kwargs)

    return checked


def explain_init_keywords(cls: C) -> C:
    """Apply `explain_keywords` to the constructor that ``@dataclass`` wrote."""
    cls.__init__ = explain_keywords(cls.__init__)  # type: ignore[misc]
    return cls


def describe(value: object) -> str:
    """Return a value as a message names it: in one line, and with its type."""
    text = " ".join(repr(value).split())
    if len(text) > 80:
        text = text[:77] + "..."
    return f"{text} ({type(value).__name__})"
