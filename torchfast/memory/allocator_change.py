"""Changing the allocators' settings while the program runs, and telling the truth about it.

Torch takes a new text at any time and says nothing of what came too late. It also forgets some
settings that the new text does not repeat, and not others. So the whole text is sent each time:
what is in force, with what is new in place of it. What torch reads at one moment only is compared
with where the process stands, without touching the device.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import torch

from torchfast.memory.allocator_environment import read_environment
from torchfast.memory.allocator_keys import KEYS
from torchfast.memory.allocator_text import write_settings

Outcome = Literal["in effect", "unchanged", "too late", "not here"]


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """What became of one setting.

    Attributes:
        name: The setting.
        value: What was asked for.
        outcome: ``"in effect"``, ``"unchanged"`` (it was so before), ``"too late"``, or
            ``"not here"`` (this torch has no such allocator).
        detail: Why, and what to do.
    """

    name: str
    value: Any
    outcome: Outcome
    detail: str


@dataclass(frozen=True, kw_only=True)
class AllocatorChange:
    """What became of the settings that were asked for.

    Attributes:
        settings: One entry for each.
        in_force: The text that torch has now.
        variable: The environment variable that holds it too, for processes started from here.
        remarks: What is allowed, but does less than one may think; variables that are ignored.
    """

    settings: tuple[SettingChange, ...]
    in_force: str
    variable: str | None
    remarks: tuple[str, ...] = ()

    @property
    def too_late(self) -> tuple[SettingChange, ...]:
        """The settings that can only be made before the program starts."""
        return tuple(s for s in self.settings if s.outcome == "too late")

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready builtins."""
        return {
            "settings": {
                s.name: {"value": s.value, "outcome": s.outcome, "detail": s.detail}
                for s in self.settings
            },
            "in_force": self.in_force,
            "variable": self.variable,
            "remarks": list(self.remarks),
        }

    def __str__(self) -> str:
        """Return one line for each setting and remark."""
        lines = [f"{s.name}={s.value!r}  {s.outcome}: {s.detail}" for s in self.settings]
        return "\n".join([*lines, *(f"note: {remark}" for remark in self.remarks)])


def settings_in_force() -> str:
    """Return the text that torch's allocators go by now, without initialising CUDA."""
    # Torch 2.12 and later tell it. Before, it stands in a snapshot, once there is a device to take
    # one of; until then only the environment can have said anything.
    tell = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if tell is not None:
        return str(tell())
    if torch.cuda.is_initialized():
        told = torch.cuda.memory._snapshot().get("allocator_settings", {})
        return str(told.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return read_environment(os.environ).text


def nothing_to_change(asked: dict[str, Any]) -> AllocatorChange:
    """Return what becomes of settings where torch has no allocator for a device."""
    environment = read_environment(os.environ)
    detail = "this torch has no allocator for devices, so there is nothing to set"
    return AllocatorChange(
        settings=tuple(
            SettingChange(name=name, value=value, outcome="not here", detail=detail)
            for name, value in asked.items()
        ),
        in_force=environment.text,
        variable=environment.winner,
    )


def change(
    asked: dict[str, Any], before: dict[str, Any], remarks: tuple[str, ...]
) -> AllocatorChange:
    """Put what is asked for over what was in force before, as far as there is time.

    Args:
        asked: Checked settings.
        before: Those in force.
        remarks: On both together.
    """
    changes = tuple(_judge(name, value, before) for name, value in asked.items())
    late = {each.name for each in changes if each.outcome == "too late"}
    wanted = before | {name: value for name, value in asked.items() if name not in late}
    text = write_settings({name: wanted[name] for name in KEYS if name in wanted})
    # The backend was chosen at import: named again, it could only fail.
    torch._C._accelerator_setAllocatorSettings(
        write_settings({n: wanted[n] for n in KEYS if n in wanted and n != "backend"})
    )
    fraction = wanted.get("per_process_memory_fraction")
    if torch.cuda.is_initialized() and fraction != before.get("per_process_memory_fraction"):
        torch.cuda.set_per_process_memory_fraction(fraction)
    environment = read_environment(os.environ)
    variable = environment.winner or "PYTORCH_ALLOC_CONF"
    os.environ[variable] = text
    remarks += tuple(
        f"{name}={ignored!r} of the environment is ignored, since {environment.winner} beats it"
        for name, ignored in environment.ignored.items()
    )
    if not environment.caching:
        remarks += ("PYTORCH_NO_CUDA_MEMORY_CACHING is set, so no setting counts",)
    return AllocatorChange(settings=changes, in_force=text, variable=variable, remarks=remarks)


def _judge(name: str, value: Any, before: dict[str, Any]) -> SettingChange:
    key = KEYS[name]
    started = torch.cuda.is_initialized()

    def verdict(outcome: Outcome, detail: str) -> SettingChange:
        return SettingChange(name=name, value=value, outcome=outcome, detail=detail)

    if key.read == "import":
        current = _backend()
        if value == current:
            return verdict("unchanged", f"torch was imported with {current!r}")
        return verdict(
            "too late",
            f"it is read as torch is imported, and that was with {current!r}; set the environment "
            "variable before the program starts, see python -m torchfast env",
        )
    if before.get(name) == value:
        return verdict("unchanged", "it was so before")
    if not started:
        return verdict("in effect", "from the first allocation on")
    if key.read == "device":
        device = f"cuda:{torch.cuda.current_device()}"
        return verdict(
            "in effect",
            f"on {device}, by torch.cuda.set_per_process_memory_fraction; other devices that are "
            "in use keep theirs",
        )
    if key.read == "first pinned" and _num_pinned():
        return verdict(
            "too late",
            "it is read at the first pinned block, and there was one; set it before, or in the "
            "environment",
        )
    return verdict("in effect", f"from the next allocation on; unchanged is {key.stays}")


def _backend() -> str:
    return str(torch._C._cuda_getAllocatorBackend())


def _num_pinned() -> int:
    return int(torch.cuda.host_memory_stats().get("num_host_alloc", 0))
