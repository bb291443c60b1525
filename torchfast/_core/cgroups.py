"""The control groups of this process: what a container or a scheduler grants it of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MEMBERSHIPS = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")


def cgroup_folders(
    controller: str, memberships: Path = MEMBERSHIPS, root: Path = ROOT
) -> Iterator[Path]:
    """Yield the folders of a controller for this process's groups and their parents.

    Args:
        controller: Such as ``"cpu"``: the folder of the first version of control groups.
        memberships: Where the system says which groups those are.
        root: Where control groups are mounted.
    """
    try:
        lines = memberships.read_text().splitlines()
    except OSError:  # no Linux
        lines = []
    for line in lines:
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        mount = root / controller if controller in controllers.split(",") else root
        if controllers and mount == root:
            continue
        folder = mount / path.strip("/")
        # In a container the path may be the host's and the mount the container's: ask the root too.
        for place in {folder, *folder.parents, mount}:
            if place == mount or mount in place.parents:
                yield place


def usable_memory() -> int | None:
    """Return the bytes that this process may have, of its machine or container, if that is told."""
    limits = [limit for folder in cgroup_folders("memory") if (limit := _limit(folder)) is not None]
    with suppress(OSError, ValueError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)


def _limit(folder: Path) -> int | None:
    """Return the memory that a control group grants; None where it does not say."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            return int((folder / name).read_text())
        except (OSError, ValueError):  # not there, or "max"
            continue
    return None
