"""Telling what ``torch.compile`` and ``torch.compiler.disable`` returned from anything else."""

from __future__ import annotations

from functools import partial


def is_compiled_by_torch(value: object) -> bool:
    """Whether a value is what ``torch.compile`` returned for a function or a module."""
    return is_wrapped_by_torch(value) and not is_disabled(value)


def is_disabled(value: object) -> bool:
    """Whether a value is what ``torch.compiler.disable`` returned, or a ``partial`` of that."""
    while isinstance(value, partial):
        value = value.func
    if not is_wrapped_by_torch(value):
        return False
    held = vars(value)
    # Of a module torch has kept the context in which it runs, whose class is private.
    context = type(held.get("dynamo_ctx")).__name__
    return held.get("_torchdynamo_disable") is True or context == "DisableContext"


def is_wrapped_by_torch(value: object) -> bool:
    """Whether a value is what either of the two returned.

    The object itself has to hold torch's mark: a proxy answers to that name as to any other.
    """
    held = getattr(value, "__dict__", None)
    return isinstance(held, dict) and "_torchdynamo_orig_callable" in held
