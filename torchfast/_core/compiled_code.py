"""Telling what ``torch.compile`` returned from anything else."""

from __future__ import annotations


def is_compiled_by_torch(value: object) -> bool:
    """Whether a value is what ``torch.compile`` returned for a function or a module.

    The object itself has to hold torch's mark: a proxy answers to that name as to any other.
    """
    held = getattr(value, "__dict__", None)
    return isinstance(held, dict) and "_torchdynamo_orig_callable" in held
