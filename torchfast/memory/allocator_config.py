"""The settings of torch's memory allocators as a value that is checked before torch sees it.

Torch keeps memory that was freed and cuts it into pieces for what comes next. Where sizes vary, the
pieces stop fitting: memory is reserved, but no hole is large enough, and training runs out of
memory, or waits while torch returns everything to the driver and asks for it again. Which settings
help depends on why, and on when they are made (see `allocator_keys`).

No setting changes a number that is computed. All of them cost nothing but what is said there.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, final

import torch

from torchfast._core.arguments import check_choice, describe, explain_init_keywords
from torchfast._core.errors import UnsupportedDeviceError
from torchfast.memory.allocator_change import (
    AllocatorChange,
    change,
    nothing_to_change,
    settings_in_force,
)
from torchfast.memory.allocator_environment import AllocatorEnvironment, read_environment
from torchfast.memory.allocator_keys import KEYS, LARGE_SEGMENT_MB, NEWEST, OLDEST
from torchfast.memory.allocator_text import read_settings, write_settings

Preset = Literal["variable-shapes", "long-runs", "graphs"]

# What each preset sets, and why; a setting that the torch in use does not know yet is left out.
PRESETS: Final[Mapping[str, tuple[Mapping[str, Any], str]]] = {
    "variable-shapes": (
        {"expandable_segments": True},
        "each new largest shape makes a segment grow, where otherwise it needs one more beside "
        "those that have become too small",
    ),
    "long-runs": (
        {"expandable_segments": True, "pinned_max_round_threshold_mb": 64},
        "evaluation and checkpoints allocate other sizes than steps do, which over days leaves "
        "holes; and a large pinned block for a checkpoint need not be rounded up to the next power "
        "of two",
    ),
    "graphs": (
        {"graph_capture_record_stream_reuse": True},
        "a graph keeps the memory of its capture for its whole life, and without this a capture "
        "cannot use again what a side stream has used; segments stay as they are, since a graph's "
        "memory never grows after its capture, and NCCL registers buffers of graphs, which fails "
        "for segments that grow unless NCCL_GRAPH_REGISTER=0",
    ),
}


@final
@explain_init_keywords
@dataclass(frozen=True, kw_only=True)
class AllocatorConfig:
    """Settings of torch's device and pinned-memory allocators; None leaves torch's default.

    Args:
        backend: ``"native"`` or ``"cudaMallocAsync"``. Read as torch is imported.
        large_segment_size_mb: Taken from the device at once for tensors of 1 to 10 MB; above 10.
        max_split_size_mb: Blocks from this size on are never split; at least
            ``large_segment_size_mb`` (20 by default).
        max_non_split_rounding_mb: How much larger than asked for such a block may be.
        garbage_collection_threshold: Share, in (0, 1), of what ``per_process_memory_fraction``
            allows, above which old free segments are returned. Does nothing without a fraction.
        roundup_power2_divisions: Sizes are rounded up to so many steps between powers of two: a
            power of two, or a mapping such as ``{256: 2, 512: 4, ">": 8}`` by megabytes.
        expandable_segments: Segments grow in place.
        expandable_segments_reserve: Address space of such a segment, such as 0.5 or ``"40G"``.
            Torch 2.15 and later.
        expandable_segments_reserve_by_class: The same by class of stream. Torch 2.15 and later.
        release_lock_on_cudamalloc: Other threads allocate while one waits for the driver.
        per_process_memory_fraction: The most of a device that this process takes, in [0, 1].
        throw_on_cudamalloc_oom: Tell that memory is short before asking the driver in vain. Torch
            2.12 and later.
        graph_capture_record_stream_reuse: Within a capture, use memory again that other streams
            have used. Not with conditional nodes.
        pinned_use_background_threads: A thread finds out which pinned blocks are free again.
        pinned_max_round_threshold_mb: Pinned blocks above it are not rounded up to a power of two.
            Torch 2.13 and later.
        pinned_max_cached_size_mb: Pinned blocks above it are not kept. Torch 2.13 and later.
        pinned_use_cuda_host_register: Pin by registering ordinary memory.
        pinned_num_register_threads: Threads for that; a power of two up to 128.
        pinned_reserve_segment_size_mb: Pin so much at once. Read at the first pinned block.
        pinned_free_catch_all: An error while pinned memory is freed does not end the process.
            Torch 2.12 and later.

    Raises:
        TypeError: A value of the wrong type, or an unknown name, with the nearest one.
        ValueError: A value out of range, or two that contradict each other.
    Numerics: Bitwise equal.
    Synchronizes: Never.
    Example: >>> AllocatorConfig(expandable_segments=True, max_split_size_mb=64).to_text()
        'max_split_size_mb:64,expandable_segments:True'
    """

    backend: str | None = None
    large_segment_size_mb: int | None = None
    max_split_size_mb: int | None = None
    max_non_split_rounding_mb: int | None = None
    garbage_collection_threshold: float | None = None
    roundup_power2_divisions: int | Mapping[int | str, int] | tuple[Any, ...] | None = None
    expandable_segments: bool | None = None
    expandable_segments_reserve: float | str | None = None
    expandable_segments_reserve_by_class: Mapping[str, Any] | tuple[Any, ...] | None = None
    release_lock_on_cudamalloc: bool | None = None
    per_process_memory_fraction: float | None = None
    throw_on_cudamalloc_oom: bool | None = None
    graph_capture_record_stream_reuse: bool | None = None
    pinned_use_background_threads: bool | None = None
    pinned_max_round_threshold_mb: int | None = None
    pinned_max_cached_size_mb: int | None = None
    pinned_use_cuda_host_register: bool | None = None
    pinned_num_register_threads: int | None = None
    pinned_reserve_segment_size_mb: int | None = None
    pinned_free_catch_all: bool | None = None

    def __post_init__(self) -> None:
        """Check each value, then those that depend on each other."""
        for name, key in KEYS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, key.check(name, value))
        self._check_sizes()
        self._check_backend()

    @classmethod
    def preset(cls, name: Preset, *, version: str | None = None, **others: Any) -> AllocatorConfig:
        """Return the settings for a kind of run; ``others`` are added or replace its own.

        Those that torch ``version`` (None: this one) does not know are left out.

        ``"variable-shapes"``: expandable segments, as each new largest shape would need a segment
        of its own. ``"long-runs"``: the same, and pinned blocks above 64 MB are not rounded up
        (torch 2.13 and later). ``"graphs"``: a capture uses again what side streams have used.
        """
        check_choice("preset", name, PRESETS)
        settings, _ = PRESETS[name]
        target = _target(version)
        known = {k: v for k, v in settings.items() if KEYS[k].since <= target}
        return cls(**(known | others))

    @classmethod
    def parse(cls, text: str, place: str = "the text") -> AllocatorConfig:
        """Return the settings of a text as torch reads it, but strictly.

        Raises:
            TypeError: Not a text.
            ValueError: It cannot be read, names what does not exist, or has a value out of range.
        """
        if not isinstance(text, str):
            raise TypeError(f"{place} must be a str such as 'max_split_size_mb:128', got {text!r}")
        try:
            return cls(**read_settings(text, place))
        except TypeError as error:
            raise ValueError(f"{place}: {error}") from error

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> AllocatorConfig:
        """Return the settings of the environment variable that wins; `environment` says which."""
        found = cls.environment(environ)
        return cls.parse(found.text, found.winner or "the environment")

    @staticmethod
    def environment(environ: Mapping[str, str] | None = None) -> AllocatorEnvironment:
        """Return which of the environment variables wins, what it says, and what loses."""
        return read_environment(os.environ if environ is None else environ)

    @property
    def settings(self) -> dict[str, Any]:
        """What is set, by torch's names."""
        return {name: value for name in KEYS if (value := getattr(self, name)) is not None}

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is allowed, but does less than one may think; each with its reason."""
        return tuple(_remarks(self.settings))

    def merged(self, other: AllocatorConfig) -> AllocatorConfig:
        """Return these settings with those that ``other`` makes in place of them."""
        if not isinstance(other, AllocatorConfig):
            raise TypeError(f"other must be an AllocatorConfig, got {describe(other)}")
        return dataclasses.replace(self, **other.settings)

    def __repr__(self) -> str:
        """Return the call that makes these settings, those that are left alone left out."""
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"AllocatorConfig({settings})"

    def to_text(self) -> str:
        """Return the settings as torch reads them, for whichever version."""
        return write_settings(self.settings)

    def to_env(self, *, version: str | None = None) -> dict[str, str]:
        """Return the environment variable to set, ``PYTORCH_ALLOC_CONF``, with its value.

        Args:
            version: The torch that will read it, such as ``"2.12"``; None means this one.

        Raises:
            ValueError: That version does not know one of the settings.
        """
        self.check_version(version)
        return {"PYTORCH_ALLOC_CONF": self.to_text()}

    def check_version(self, version: str | None = None) -> None:
        """Raise ValueError if torch ``version`` (None: this one) does not know a setting."""
        target = _target(version)
        for name in self.settings:
            if KEYS[name].since > target:
                since = ".".join(map(str, KEYS[name].since))
                raise ValueError(
                    f"{name} is known to torch {since} and later, and this is for torch "
                    f"{'.'.join(map(str, target))}, which would refuse to start; leave it out"
                )

    def check_device(self, device_type: str) -> None:
        """Raise UnsupportedDeviceError if the allocator of a device type lacks a setting."""
        for name in self.settings:
            if KEYS[name].cuda_only and device_type not in ("cuda", "cpu"):
                raise UnsupportedDeviceError(
                    f"{name} is a setting of CUDA's allocator, and {device_type} has none like it; "
                    "leave it out there"
                )

    def apply(self) -> AllocatorChange:
        """Make these settings now, as far as that is still possible, and say what became of each.

        Settings that are in force and not named here stay. The environment variable that wins is
        set as well, so that processes started from here have the same. CUDA is not initialised.
        Without CUDA in torch nothing is changed, and the result says so.

        Raises:
            ValueError: This version of torch does not know a setting, or a setting contradicts
                one that is in force.
            UnsupportedDeviceError: The accelerator of this torch has no such setting.
        Synchronizes: Never.
        """
        self.check_version()
        kind = _accelerator()
        self.check_device(kind)
        if kind == "cpu":
            return nothing_to_change(self.settings)
        before = self.parse(settings_in_force(), "what is in force")
        in_time = {k: v for k, v in self.settings.items() if KEYS[k].read != "import"}
        remarks = before.merged(AllocatorConfig(**in_time)).remarks
        return change(self.settings, before.settings, remarks)

    def _check_sizes(self) -> None:
        segment = self.large_segment_size_mb or LARGE_SEGMENT_MB
        for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
            value = getattr(self, name)
            if value is not None and value < segment:
                raise ValueError(
                    f"{name} must be >= large_segment_size_mb, which is {segment}, got {value}; "
                    "raise it, or lower large_segment_size_mb"
                )

    def _check_backend(self) -> None:
        if self.backend != "cudaMallocAsync":
            return
        ignored = [name for name in self.settings if KEYS[name].native_only]
        if ignored:
            raise ValueError(
                f"backend='cudaMallocAsync' is the driver's allocator, which does not look at "
                f"{', '.join(ignored)}; leave out the one or the other"
            )


def _remarks(settings: dict[str, Any]) -> list[str]:
    found = []
    expandable = settings.get("expandable_segments") is True
    if "garbage_collection_threshold" in settings:
        if settings.get("per_process_memory_fraction", 1.0) == 1.0:
            found.append(
                "garbage_collection_threshold does nothing without per_process_memory_fraction "
                "below 1, of which it is a share"
            )
        if expandable:
            found.append(
                "garbage_collection_threshold returns whole segments only, and a segment that "
                "grows is seldom free as a whole"
            )
    if expandable and "max_split_size_mb" in settings:
        found.append(
            "max_split_size_mb keeps blocks of ordinary segments whole; with expandable_segments "
            "all blocks are split"
        )
    if not expandable and any(name.startswith("expandable_segments_") for name in settings):
        found.append("expandable_segments_reserve does nothing without expandable_segments=True")
    if "pinned_num_register_threads" in settings and not settings.get(
        "pinned_use_cuda_host_register"
    ):
        found.append(
            "pinned_num_register_threads does nothing without pinned_use_cuda_host_register=True"
        )
    cached, rounded = (
        settings.get(f"pinned_max_{name}_mb") for name in ("cached_size", "round_threshold")
    )
    if cached is not None and rounded is not None and rounded > cached:
        found.append(
            "pinned_max_round_threshold_mb above pinned_max_cached_size_mb: blocks that are not "
            "kept are not rounded up either"
        )
    if expandable and settings.get("graph_capture_record_stream_reuse"):
        found.append(
            "graphs that hold NCCL's work need NCCL_GRAPH_REGISTER=0 with expandable_segments"
        )
    divisions = settings.get("roundup_power2_divisions")
    if isinstance(divisions, tuple):
        numbers = [interval for interval, _ in divisions if isinstance(interval, int)]
        gaps = [a for a, b in itertools.pairwise(numbers) if b != 2 * a]
        if gaps:
            found.append(
                f"roundup_power2_divisions leaves out the powers of two after {gaps[0]}, and torch "
                "does not round in such a gap"
            )
    return found


def _running() -> tuple[int, int]:
    return _version(torch.__version__)


def _target(version: str | None) -> tuple[int, int]:
    """Return the version that was asked for, whose settings are known, or else this one."""
    if version is None:
        return _running()
    asked = _version(version)
    if not OLDEST <= asked <= NEWEST:
        oldest, newest = (".".join(map(str, known)) for known in (OLDEST, NEWEST))
        raise ValueError(
            f"version must be from {oldest} to {newest}, of which the settings are known, got "
            f"{version!r}"
        )
    return asked


def _version(text: str) -> tuple[int, int]:
    if not isinstance(text, str):
        raise TypeError(f"version must be written as '2.13', got {text!r} ({type(text).__name__})")
    try:
        major, minor = text.split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        raise ValueError(f"version must be written as '2.13', got {text!r}") from None


def _accelerator() -> str:
    """Return whose allocator this torch was built with, without asking for a device."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        return "cuda"
    return "xpu" if torch.xpu._is_compiled() else "cpu"
