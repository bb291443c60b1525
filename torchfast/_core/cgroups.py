"""The control groups of this process: what a container or a scheduler grants it of the machine."""

from __future__ import annotations

from collections.abc import Iterator
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
        _, controllers, path = line.split(":", 2)
        mount = root / controller if controller in controllers.split(",") else root
        if controllers and mount == root:
            continue
        folder = mount / path.strip("/")
        # In a container the path may be the host's and the mount the container's: ask the root too.
        for place in {folder, *folder.parents, mount}:
            if place == mount or mount in place.parents:
                yield place
