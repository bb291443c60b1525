"""The events of a trace that are kept, as tuples; times are in microseconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

# The categories of the events that torchfast adds, see lines.py and held_memory.py beside this.
LINE: Final = "torchfast_line"
HELD: Final = "torchfast_held"
STEP: Final = re.compile(r"ProfilerStep#?\s*(\d+)")
# Which node of autograd an operator has made, or is the backward of.
SEQUENCE: Final = "Sequence number"
FORWARD_THREAD: Final = "Fwd thread id"


class DeviceWork(NamedTuple):
    """A kernel, a copy or a fill."""

    name: str
    kind: str
    device: int
    stream: int
    start: float
    end: float
    correlation: int
    num_bytes: int = 0


class HostCall(NamedTuple):
    """A call of the CUDA runtime or driver."""

    name: str
    start: float
    end: float
    thread: str
    correlation: int


class HostSpan(NamedTuple):
    """An operator, an annotation, a frame or a line of the host.

    ``facts`` holds the shapes and types of an operator's inputs, and its place in autograd, where
    the trace has them.
    """

    name: str
    kind: str
    start: float
    end: float
    thread: str
    facts: Mapping[str, Any] | None = None


class MemoryEvent(NamedTuple):
    """Memory taken (or, if negative, given back) on a device, and what is taken after it."""

    time: float
    device: str
    num_bytes: int
    allocated: int
    reserved: int
    address: int
    thread: str


class HeldBlock(NamedTuple):
    """A block of memory of which it was known, at a moment, what it is.

    ``what`` is a category of torchfast/profiling/memory.py, or empty where the block was given back
    by then and the trace does not tell when.
    """

    time: float
    what: str
    device: str
    address: int
    num_bytes: int
