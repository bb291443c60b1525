"""What options objects say of themselves: which fields are not as by default, and as text."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Any

from torchfast._core.errors import PlanError


def changed_fields(options: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are not as by default, in their order."""
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    return {name: value for name, value in values.items() if value != defaults[name]}


def refuse_unused(options: Any, names: Iterable[str], needs: str) -> None:
    """Raise where fields are given that do nothing, as another one is not.

    Args:
        options: A dataclass.
        names: Of the fields.
        needs: What would have to be given, as it is written.

    Raises:
        PlanError: One of them is not as by default.
    """
    changed = changed_fields(options)
    for name in names:
        if name in changed:
            raise PlanError(
                f"{name}={changed[name]!r} does nothing without {needs}; give both, or leave it out"
            )


def call_of(options: object, shown: Mapping[str, Any]) -> str:
    """Return the call that makes these options, with what is to be shown of them."""
    return f"{type(options).__name__}({', '.join(f'{k}={v!r}' for k, v in shown.items())})"


def json_ready(value: Any) -> object:
    """Return a value as JSON takes it: tuples as lists, classes and functions by name."""
    if isinstance(value, tuple):
        return [json_ready(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str | int | float) or value is None:
        return value
    name: str = getattr(value, "__qualname__", type(value).__qualname__)
    return name
