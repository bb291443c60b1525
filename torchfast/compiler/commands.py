"""``python -m torchfast cache``: look at a folder of compiled artifacts, and make room in it.

Beside its entries, which are compiled code, lie the receipts of what was measured: which way to
compile was the fastest.

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
from torchfast.compiler.receipt_files import StoredReceipt, list_receipts
from torchfast.compiler.store_contents import StoredEntry, clear, list_entries, prune
from torchfast.compiler.store_files import Unusable


def add_commands(commands: Any) -> None:
    """Add ``cache`` and what is under it to the subparsers of ``python -m torchfast``."""
    parser = commands.add_parser(
        "cache",
        help="list, show, prune or clear compiled artifacts and what was measured",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add(actions, "list", _list, "one line for each entry, last used first, and each receipt")
    show = _add(actions, "show", _show, "what entries are for, if they are whole, and receipts")
    show.add_argument("entry", nargs="?", default="", metavar="NAME", help="how its name begins")
    room = _add(actions, "prune", _prune, "remove the least recently used")
    room.add_argument(
        "--max-bytes",
        type=_bytes,
        required=True,
        metavar="N",
        help="what may stay: a number of bytes, or one with kB, MB, GB or TB behind it",
    )
    rid = _add(actions, "clear", _clear, "remove all that the cache wrote, and nothing else")
    rid.add_argument(
        "--receipts",
        action="store_true",
        help="remove what was measured and keep what was compiled: the next run searches again",
    )


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
    receipts = list_receipts(path)
    for stored in receipts:
        if stored.receipt is None:
            status = fail(_problem(stored), DAMAGED)
            continue
        found = stored.receipt
        say(
            f"{_short(stored.name)}  {size(stored.num_bytes):>8}  {one_line(found.created)}  "
            f"{one_line(found.model_name)}: {one_line(found.choice)}"
        )
    say(_total(entries, receipts))
    return status


def _show(path: Path, arguments: argparse.Namespace) -> int:
    begin = arguments.entry
    entries = [e for e in list_entries(path, verify=True) if _is_called(e.name, begin)]
    receipts = [r for r in list_receipts(path) if _is_called(r.name, begin)]
    if not entries and not receipts:
        if begin:
            return fail(f"{path} has no entry whose name begins with {begin!r}", WRONG)
        say(_total(entries, receipts))
        return 0
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
    for stored in receipts:
        if stored.receipt is None:
            status = fail(_problem(stored), DAMAGED)
            continue
        say(f"{stored.name}")
        for line in str(stored.receipt).splitlines():
            say(f"  {one_line(line)}")
        say(f"  batches: {one_line(stored.receipt.key.batch)}")
    return status


def _prune(path: Path, arguments: argparse.Namespace) -> int:
    return _removed(prune(path, arguments.max_bytes))


def _clear(path: Path, arguments: argparse.Namespace) -> int:
    return _removed(clear(path, receipts_only=arguments.receipts))


def _removed(names: list[str]) -> int:
    for name in names:
        say(f"removed {name}")
    return 0


def _total(entries: list[StoredEntry], receipts: list[StoredReceipt]) -> str:
    total = f"{len(entries)} entries, {size(sum(entry.num_bytes for entry in entries))}"
    return f"{total}; {len(receipts)} receipts" if receipts else total


def _problem(stored: StoredEntry | StoredReceipt) -> str:
    problem = one_line(stored.problem)
    return problem if stored.name in problem else f"{stored.name}: {problem}"


def _short(name: str) -> str:
    """Return the name of an entry or a receipt so that it fits a line."""
    first, last = name.rpartition(".")[0].split("-")[1:]
    return f"{first[:8]}..{last[:4]}"


def _is_called(name: str, begin: str) -> bool:
    """Whether a name begins so, with or without what it is of, or is this in short."""
    return (
        name.startswith(begin) or name.partition("-")[2].startswith(begin) or _short(name) == begin
    )


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
