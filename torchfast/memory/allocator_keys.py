"""Every key of torch's allocators: what it takes, since when, and until when it can be changed.

The settings are one text, ``key:value,key:value``, in an environment variable. Torch reads it at
three times, and that decides what a late change can still do:

- as torch is imported: ``backend``, which picks the allocator;
- as a device's allocator is made, at the first use of CUDA: ``per_process_memory_fraction``;
- at the first pinned block: ``pinned_reserve_segment_size_mb``.

All others are looked up at each allocation, so a change counts from the next one on. What was
allocated before stays as it is.

A CUDA build rejects a key that it does not know, and a CPU build swallows all of them, so the table
below is checked by us: from the headers of torch 2.11 to 2.15.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final, Literal

from torchfast._core.arguments import check_choice, check_flag, check_int, suggestion

Moment = Literal["allocation", "import", "device", "first pinned"]
Version = tuple[int, int]

# The versions of torch whose settings are in the table.
OLDEST: Final[Version] = (2, 11)
NEWEST: Final[Version] = (2, 15)

LARGE_SEGMENT_MB: Final = 20  # torch's default, below which blocks have to be splittable
_MOST_MB: Final = 2**43  # torch multiplies by 2**20 in 64 bits, and wraps around silently
_MOST_INTERVAL_MB: Final = 65536
_MOST_THREADS: Final = 128
_LEAST_SHARE: Final = (
    1e-9  # torch cannot read the smallest numbers there are, and nobody wants them
)

# What torch writes its names as on AMD devices; it reads both there.
ALIASES: Final = {
    "release_lock_on_hipmalloc": "release_lock_on_cudamalloc",
    "pinned_use_hip_host_register": "pinned_use_cuda_host_register",
}


@dataclass(frozen=True, kw_only=True)
class AllocatorKey:
    """One key.

    Attributes:
        name: As torch spells it.
        accepts: The values, in words.
        check: ``(name, value) -> value``, or raises.
        since: The first of torch 2.11 to 2.15 that knows it.
        read: When torch looks at it.
        cuda_only: Whether only CUDA and ROCm builds know it.
        native_only: Whether ``backend="cudaMallocAsync"`` does not look at it.
        effect: What it does, and when to use it.
        stays: What a late change leaves as it is.
    """

    name: str
    accepts: str
    check: Callable[[str, Any], Any]
    since: Version = (2, 11)
    read: Moment = "allocation"
    cuda_only: bool = True
    native_only: bool = True
    effect: str
    stays: str = "what is allocated already"


def _megabytes(least: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        number = check_int(name, value, minimum=least)
        if number > _MOST_MB:
            raise ValueError(f"{name} is in megabytes and must be <= {_MOST_MB}, got {value}")
        return number

    return check


def _share(name: str, value: Any, *, zero: bool, one: bool) -> float:
    accepted = f"{'[' if zero else '('}0, 1{']' if one else ')'}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number in {accepted}, got {value!r}")
    number = float(value)
    if not (_LEAST_SHARE <= number < 1 or (zero and number == 0) or (one and number == 1)):
        raise ValueError(f"{name} is a share and must be in {accepted}, got {value}")
    return number


def _threshold(name: str, value: Any) -> float:
    return _share(name, value, zero=False, one=False)


def _fraction(name: str, value: Any) -> float:
    return _share(name, value, zero=True, one=True)


def _power_of_two(name: str, value: Any, *, zero: bool = False, most: int | None = None) -> int:
    number = check_int(name, value, minimum=0 if zero else 1)
    if number & (number - 1) or (most is not None and number > most):
        limit = "" if most is None else f" up to {most}"
        raise ValueError(f"{name} must be a power of two{limit}, got {value}")
    return number


def _threads(name: str, value: Any) -> int:
    return _power_of_two(name, value, most=_MOST_THREADS)


def _divisions(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping | tuple | list):
        return _power_of_two(name, value)
    pairs = _pairs(name, value, "{256: 2, '>': 4}")
    if not pairs:
        raise ValueError(f"{name} has no interval; name one, such as {{256: 2, '>': 4}}, or None")
    checked: list[tuple[int | str, int]] = []
    for interval, number in pairs:
        if interval != ">":
            _power_of_two(f"an interval of {name}, in megabytes,", interval, most=_MOST_INTERVAL_MB)
        checked.append((interval, _power_of_two(f"{name}[{interval!r}]", number, zero=True)))
    intervals = [interval for interval, _ in checked]
    numbers = [interval for interval in intervals if isinstance(interval, int)]
    if numbers != sorted(set(numbers)) or ">" in intervals[:-1]:
        raise ValueError(
            f"the intervals of {name} must rise, with '>' as the last, got {intervals}; "
            "torch fills in from one to the next"
        )
    return tuple(checked)


def _pairs(name: str, value: Any, example: str) -> tuple[tuple[Any, Any], ...]:
    if isinstance(value, Mapping):
        return tuple(value.items())
    for pair in value:
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise TypeError(
                f"{name} must be a mapping such as {example}, or its pairs, got {value!r}"
            )
    return tuple((key, number) for key, number in value)


def _backend(name: str, value: Any) -> str:
    if value == "hipMallocAsync":
        return "cudaMallocAsync"
    return check_choice(name, value, ("native", "cudaMallocAsync"))


def _reserve(name: str, value: Any) -> float | str:
    number: Any = value
    if isinstance(value, str):
        if not re.fullmatch(r"(\d+(\.\d*)?|\.\d+)[Gg]", value):
            raise ValueError(
                f"{name} must be a share of the device such as 0.5 or a size such as '40G', "
                f"got {value!r}"
            )
        number = float(value[:-1])
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(
            f"{name} must be a share such as 0.5 or a size such as '40G', got {value!r}"
        )
    if not _LEAST_SHARE <= float(number) < math.inf:
        raise ValueError(f"{name} must be above 0 and finite, got {value!r}")
    return value.upper() if isinstance(value, str) else float(value)


def _reserves(name: str, value: Any) -> tuple[tuple[str, float | str], ...]:
    if not isinstance(value, Mapping | tuple | list):
        raise TypeError(f"{name} must be a mapping of classes to sizes, got {value!r}")
    pairs = _pairs(name, value, "{'side': '4G'}")
    for label, _ in pairs:
        if not (isinstance(label, str) and re.fullmatch(r"[^\s,:\[\]]+", label)):
            raise ValueError(
                f"a class of {name} must be a word without ',', ':', '[' and ']', got {label!r}"
            )
    return tuple((label, _reserve(f"{name}[{label!r}]", size)) for label, size in pairs)


def _key(name: str, accepts: str, check: Callable[[str, Any], Any], **others: Any) -> AllocatorKey:
    return AllocatorKey(name=name, accepts=accepts, check=check, **others)


# In the order in which they are written: what a check of torch's depends on comes before it.
KEYS: Final[Mapping[str, AllocatorKey]] = {
    key.name: key
    for key in (
        _key(
            "backend",
            "'native' or 'cudaMallocAsync'",
            _backend,
            read="import",
            native_only=False,
            effect="which allocator: torch's own, or the driver's, which knows none of the "
            "settings for segments and splits",
        ),
        _key(
            "large_segment_size_mb",
            "megabytes, an int > 10",
            _megabytes(11),
            cuda_only=False,
            effect="how much is taken from the device at once for tensors of 1 to 10 MB "
            "(20 by default); more where there are many of them",
            stays="segments that are there",
        ),
        _key(
            "max_split_size_mb",
            "megabytes, an int >= large_segment_size_mb",
            _megabytes(11),
            cuda_only=False,
            effect="blocks from this size on are never split, so that the rest of one is not lost "
            "to small tensors; against fragmentation where expandable_segments is not to be had",
            stays="blocks that are split",
        ),
        _key(
            "max_non_split_rounding_mb",
            "megabytes, an int >= large_segment_size_mb",
            _megabytes(11),
            cuda_only=False,
            effect="how much larger than asked for an unsplittable block may be (20 by default)",
        ),
        _key(
            "garbage_collection_threshold",
            "a share in (0, 1)",
            _threshold,
            cuda_only=False,
            effect="above this share of what per_process_memory_fraction allows, old free segments "
            "are returned one by one, before all of them have to be at once",
        ),
        _key(
            "roundup_power2_divisions",
            "a power of two, or a mapping of megabytes (and '>') to powers of two or 0",
            _divisions,
            cuda_only=False,
            effect="rounds sizes up to so many steps between powers of two, so that sizes that "
            "differ by little find each other's blocks; costs what is rounded up",
        ),
        _key(
            "expandable_segments",
            "True or False",
            check_flag,
            cuda_only=False,
            effect="segments that grow in place instead of new ones beside them: the remedy "
            "against fragmentation by sizes that vary",
            stays="segments that are there, until torch.cuda.empty_cache() returns them",
        ),
        _key(
            "expandable_segments_reserve",
            "a share of the device such as 0.5, or a size such as '40G'",
            _reserve,
            since=(2, 15),
            effect="how much address space (not memory) a growing segment may take",
            stays="segments that are there",
        ),
        _key(
            "expandable_segments_reserve_by_class",
            "a mapping of classes of streams to shares or sizes",
            _reserves,
            since=(2, 15),
            effect="the same, for streams that were given a class",
            stays="segments that are there",
        ),
        _key(
            "release_lock_on_cudamalloc",
            "True or False",
            check_flag,
            effect="other threads may allocate while one waits for the driver; for several "
            "threads that allocate at once",
        ),
        _key(
            "per_process_memory_fraction",
            "a share in [0, 1]",
            _fraction,
            read="device",
            effect="the most of a device that this process takes; beyond it, out of memory, "
            "though there be more",
        ),
        _key(
            "throw_on_cudamalloc_oom",
            "True or False",
            check_flag,
            since=(2, 12),
            effect="out of memory is told before the driver is asked in vain",
        ),
        _key(
            "graph_capture_record_stream_reuse",
            "True or False",
            check_flag,
            effect="within a capture, memory that other streams have used is used again as soon "
            "as the graph's order allows; without it, not before the capture ends",
            stays="graphs that are captured",
        ),
        _key(
            "pinned_use_background_threads",
            "True or False",
            check_flag,
            cuda_only=False,
            native_only=False,
            effect="a thread of its own finds out which pinned blocks are free again; for loops "
            "that pin much in small pieces",
            stays="the thread, once it runs",
        ),
        _key(
            "pinned_max_round_threshold_mb",
            "megabytes, an int >= 0",
            _megabytes(0),
            since=(2, 13),
            cuda_only=False,
            native_only=False,
            effect="pinned blocks above it are not rounded up to a power of two, which for a large "
            "one may be half of it",
        ),
        _key(
            "pinned_max_cached_size_mb",
            "megabytes, an int >= 0",
            _megabytes(0),
            since=(2, 13),
            cuda_only=False,
            native_only=False,
            effect="pinned blocks above it are returned to the system as they are freed, and "
            "pinned anew when wanted again, which is slow",
        ),
        _key(
            "pinned_use_cuda_host_register",
            "True or False",
            check_flag,
            native_only=False,
            effect="pins by registering ordinary memory instead of asking the driver for it; "
            "faster for large blocks, with several threads",
        ),
        _key(
            "pinned_num_register_threads",
            f"a power of two up to {_MOST_THREADS}",
            _threads,
            native_only=False,
            effect="how many threads touch the pages of a block that is registered; 8 is "
            "where torch's authors saw the best",
        ),
        _key(
            "pinned_reserve_segment_size_mb",
            "megabytes, an int >= 1",
            _megabytes(1),
            read="first pinned",
            native_only=False,
            effect="pins so much at once, from which small pinned blocks are cut",
        ),
        _key(
            "pinned_free_catch_all",
            "True or False",
            check_flag,
            since=(2, 12),
            native_only=False,
            effect="an error while pinned memory is freed does not end the process; for those "
            "who go on after a CUDA error",
        ),
    )
}


def known_name(name: str, place: str) -> str:
    """Return torch's spelling of a key.

    Raises:
        ValueError: No version of torch that is supported knows it.
    """
    name = ALIASES.get(name, name)
    if name not in KEYS:
        raise ValueError(
            f"{place} names {name!r}, which is no setting of torch's allocators"
            f"{suggestion(name, KEYS)}"
        )
    return name
