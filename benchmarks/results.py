"""Where a measurement was made, and the file it goes to."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("triton", "torchao", "lightning", "accelerate", "transformers", "timm")
ROOT = Path(__file__).parent.parent
# Stands for the card in the name of a result file, in the lists of commands and where tables look.
CARD = "CARD"


def machine() -> dict[str, Any]:
    """Return what a reader needs to know of the machine and the software."""
    # Not above, here and in `gpu`: tables are made where no torch is.
    import torch

    import torchfast

    return {
        "gpu": gpu(),
        "cpu_cores": len(cores()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchfast": torchfast.__version__,
        "packages": {name: v for name in PACKAGES if (v := _version(name)) is not None},
        "commit": _commit(),
    }


def gpu() -> str | None:
    """Return what torch calls the GPU; None without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def card(name: str | None) -> str:
    """Return what a GPU of this name is called in the names of files: its model, in lower case.

    That is the first word with a digit, "h200" of NVIDIA H200 and "a100" of NVIDIA A100-SXM4-80GB,
    or all words where none has one. Without a GPU it is "cpu".
    """
    if name is None:
        return "cpu"
    words = re.findall(r"[a-z0-9]+", name.lower())
    return next((word for word in words if re.search(r"\d", word)), "-".join(words))


def cores() -> list[int]:
    """Return the cores that this process may run on."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep other runs off a result file while this one reads it and writes it again.

    A host with several GPUs can then measure on each of them into one file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)  # which lets go of it


def write(path: Path, figures: dict[str, Any]) -> None:
    """Write figures with machine, command and date as JSON."""
    result = {
        "date": _today(),
        "command": _command(),
        "machine": machine(),
        **figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # In one move, so that whoever interrupts leaves the old file or the new one.
    part = path.with_name(path.name + ".part")
    part.write_text(_without_places(json.dumps(result, indent=1)) + "\n")
    part.replace(path)


def _without_places(text: str) -> str:
    """Return a text, such as a cause with its line, without where this machine keeps its code."""
    packages = Path(sysconfig.get_path("purelib"))
    for place in (packages.parent, ROOT.resolve()):  # the first may be in the second
        text = text.replace(json.dumps(f"{place}/")[1:-1], "")
    return text


def resumed(
    path: Path,
    expected: dict[str, Any],
    *,
    ignoring: Collection[str] = (),
    replace: bool = False,
) -> dict[str, Any] | None:
    """Return what an earlier run wrote, or None if it wrote nothing.

    Args:
        path: The file.
        expected: What must stand in it, by key.
        ignoring: What may differ of the machine, or of a dictionary that is expected.
        replace: Return None too where something else stands there, which is to be written over.

    Raises:
        SystemExit: It was written by another commit, on another machine, or under other settings:
            figures from two measurements would stand in one file.
    """
    if not path.exists():
        return None
    earlier: dict[str, Any] = json.loads(path.read_text())
    for key, value in {"machine": machine(), **expected}.items():
        found, wanted = (_without(v, ignoring) for v in (earlier.get(key), value))
        if found != wanted:
            if replace:
                return None
            raise SystemExit(
                f"{path} was measured with {key} {found}, and this is {wanted}; "
                "remove the file or write to another"
            )
    return earlier


def earlier_sections(
    path: Path | None, expected: dict[str, Any], *, any_commit: bool = False
) -> dict[str, Any]:
    """Return the sections that an earlier run left in a file, each with the run that it is from.

    Args:
        path: The file, if any.
        expected: As for `resumed`.
        any_commit: Take up what another commit measured, too.
    """
    earlier = resumed(path, expected, ignoring=["commit"] * any_commit) if path else None
    if earlier is None:
        return {}
    run = run_of(earlier)
    return {name: {"run": run, **section} for name, section in earlier["sections"].items()}


def _without(value: Any, keys: Collection[str]) -> Any:
    return {k: v for k, v in value.items() if k not in keys} if isinstance(value, dict) else value


def run_of(figures: dict[str, Any]) -> dict[str, str]:
    """Return when, by which command and at which commit a file was written."""
    commit = figures["machine"]["commit"]
    return {"date": figures["date"], "command": figures["command"], "commit": commit}


def this_run() -> dict[str, str]:
    """Return when, by which command and at which commit this is measured."""
    return {"date": _today(), "command": _command(), "commit": _commit()}


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _command() -> str:
    """Return the command that ran, without the places of its output.

    The GPU and the cores that a run was confined to are in it: something else may have run on the
    others.
    """
    module = sys.modules["__main__"].__spec__
    arguments = list(sys.argv) if module is None else ["-m", module.name, *sys.argv[1:]]
    for option in ("--out", "--plot", "--keep"):
        if option in arguments:
            position = arguments.index(option)
            del arguments[position : position + 2]
    words = ["PYTHONPATH=."]
    if gpus := os.environ.get("CUDA_VISIBLE_DEVICES"):
        words.append(f"CUDA_VISIBLE_DEVICES={gpus}")
    mine = cores()
    if len(mine) < (os.cpu_count() or 1):
        words += ["taskset", "-c", _ranges(mine)]
    return " ".join([*words, "python", shlex.join(arguments)])


def _ranges(numbers: list[int]) -> str:
    """Return sorted numbers as ``taskset`` takes them: 0-3,8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def _commit() -> str:
    """Return the commit that ran; a copy without its history is told by the environment."""
    if "TORCHFAST_COMMIT" in os.environ:
        return os.environ["TORCHFAST_COMMIT"]
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
