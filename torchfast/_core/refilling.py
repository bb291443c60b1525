"""Containers and arrays put back to what was in them, in place: who else holds one sees it, too."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, Final

import numpy as np

from torchfast._core.compare import same_objects

# Others may have ways of their own to be filled, such as the outputs of transformers.
REFILLED: Final = (list, dict, set, deque, OrderedDict, defaultdict, Counter)


def refill(container: Any, content: Any) -> None:
    """Have a container, or an array, hold what a copy of it holds.

    Args:
        container: Of one of the types `REFILLED`, or an array of NumPy's without objects.
        content: What its ``copy`` returned.
    """
    if isinstance(container, list | deque):
        if not same_objects(container, content):
            container.clear()
            container.extend(content)
    elif isinstance(container, dict):
        # By being the same: keys may be tensors, whose comparison gives another one.
        is_same = same_objects(container, content)
        if not (is_same and same_objects(container.values(), content.values())):
            container.clear()
            container.update(content)
    elif isinstance(container, set):
        if container != content:
            container.clear()
            container.update(content)
    elif bits(container) != bits(content):  # an array, which may be one that is only read
        container[...] = content


def bits(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Return the values of an array, with their type and shape."""
    return array.dtype.str, array.shape, array.tobytes()
