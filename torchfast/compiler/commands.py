"""``python -m torchfast cache``: look at a folder of compiled artifacts, and make room in it.

``list`` and ``show`` change nothing, ``prune`` and ``clear`` remove only what the cache wrote. None
of them runs anything of what is stored. They exit with 0 if all is well, with 1 if an entry is
damaged or the folder cannot be used, and with 2 if the arguments are wrong or what they name is not
there.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchfast._core.shell import DAMAGED, UNITS, WRONG, fail, one_line, say, size
from torchfast.compiler.store_contents import StoredEntry, clear, list_entries, prune
from torchfast.compiler.store_files import Unusable


def add_commands(commands: Any) -> None:
    """Add ``cache`` and what is under it to the subparsers of ``python -m torchfast``."""
    parser = commands.add_parser(
        "cache",
        help="list, show, prune or clear compiled artifacts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add(actions, "list", _list, "one line for each entry, last used first")
    show = _add(actions, "show", _show, "what entries are for, and whether they are whole")
    show.add_argument("entry", nargs="?", default="", metavar="ENTRY", help="how its name begins")
    room = _add(actions, "prune", _prune, "remove the least recently used")
    room.add_argument(
        "--max-bytes",
        type=_bytes,
        required=True,
        metavar="N",
        help="what may stay: a number of bytes, or one with kB, MB, GB or TB behind it",
    )
    _add(actions, "clear", _clear, "remove all that the cache wrote, and nothing else")


def _add(
    actions: Any, name: str, run: Callable[[Path, argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text)
    parser.add_argument("folder", metavar="FOLDER", help="the folder of the cache")
    parser.set_defaults(run=lambda arguments: _guarded(run, arguments))
    return parser


def _guarded(run: Callable[[Path, argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    path = Path(os.path.abspath(arguments.folder))
    try:
        return run(path, arguments)
    except FileNotFoundError:
        return fail(f"{path} is not there", WRONG)
    except Unusable as error:
        return fail(str(error), DAMAGED)
    except OSError as error:
        return fail(f"{path}: {error.strerror or error}", DAMAGED)


def _list(path: Path, arguments: argparse.Namespace) -> int:
    del arguments
    entries = list_entries(path)
    status = 0
    for entry in entries:
        if entry.header is None:
            status = fail(_problem(entry), DAMAGED)
            continue
        written_at, machine, work = entry.header.written_at, entry.header.machine, entry.header.work
        torch_and_device = f"{machine.get('torch', '?')}  {machine.get('device_name', '?')}"
        say(
            f"{_short(entry.name)}  {size(entry.num_bytes):>8}  {one_line(written_at)}  "
            f"used {entry.uses:>3}  torch {one_line(torch_and_device)}  "
            f"{one_line(work.get('model_class', '?'))}"
        )
    say(_total(entries))
    return status


def _show(path: Path, arguments: argparse.Namespace) -> int:
    begin = arguments.entry.removeprefix("entry-")
    entries = [
        entry
        for entry in list_entries(path, verify=True)
        if entry.name.removeprefix("entry-").startswith(begin) or _short(entry.name) == begin
    ]
    if not entries and not begin:
        say(_total(entries))
        return 0
    if not entries:
        return fail(f"{path} has no entry whose name begins with {begin!r}", WRONG)
    status = 0
    for entry in entries:
        if entry.header is None:
            status = fail(_problem(entry), DAMAGED)
            continue
        header = entry.header
        say(f"{entry.name}")
        written = f"{header.written_at} by {header.torchfast}"
        say(f"  {size(entry.num_bytes)}, written {one_line(written)}")
        last = f", last {one_line(entry.used_at)}" if entry.used_at else ""
        say(f"  used {entry.uses} times{last}")
        for kind, number in header.artifacts.items():
            say(f"  artifacts {one_line(kind)} = {number}")
        for title, facts in (("work", header.work), ("machine", header.machine)):
            for name, value in facts.items():
                say(f"  {title} {one_line(name)} = {one_line(value)}")
        say("  whole: the payload has the SHA-256 of its header")
    return status


def _prune(path: Path, arguments: argparse.Namespace) -> int:
    return _removed(prune(path, arguments.max_bytes))


def _clear(path: Path, arguments: argparse.Namespace) -> int:
    del arguments
    return _removed(clear(path))


def _removed(names: list[str]) -> int:
    for name in names:
        say(f"removed {name}")
    return 0


def _total(entries: list[StoredEntry]) -> str:
    return f"{len(entries)} entries, {size(sum(entry.num_bytes for entry in entries))}"


def _problem(entry: StoredEntry) -> str:
    problem = one_line(entry.problem)
    return problem if entry.name in problem else f"{entry.name}: {problem}"


def _short(name: str) -> str:
    work, machine = name.removeprefix("entry-").removesuffix(".cache").split("-")
    return f"{work[:8]}..{machine[:4]}"


def _bytes(text: str) -> int:
    """Return ``"20GB"`` as a number of bytes.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    number, power = text, 0
    for index, unit in enumerate(UNITS):
        if index and text.lower().endswith(unit.lower()):
            number, power = text[: -len(unit)], index
    with suppress(ValueError):
        value = float(number) * 1000**power
        if 0 <= value < math.inf:
            return int(value)
    raise argparse.ArgumentTypeError(
        f"must be a number of bytes, or one with kB, MB, GB or TB behind it, got {text!r}"
    )
