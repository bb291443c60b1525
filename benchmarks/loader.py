"""Everything that is claimed of the loader, measured: one file of figures.

    PYTHONPATH=. python benchmarks/loader.py --out FILE [--sections eta overlap ...] [--limit-s S]
    PYTHONPATH=. python benchmarks/loader.py --device cpu --smoke

A section is a group of rows about one claim. Each runs in a process of its own, so that neither an
allocator nor a hang of one reaches another; a section that fails, or takes too long, leaves the
rows it had and its error, and the rest goes on. The efficiency is measured in several fresh
processes if there is time. The figures are written after each section and printed at the end.

``--out`` takes up a file of the same settings, machine and commit: sections that are not measured
again stay as they are. ``--any-commit`` takes up one of another commit; each section says of which
run it is.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import (
    loader_eta,
    loader_host,
    loader_memory,
    loader_overlap,
    loader_peers,
    loader_timeline,
    results,
)
from benchmarks.loader_batches import shared_memory_bytes
from benchmarks.loader_work import Row, Settings

# What a section gets beyond its limit, to write what it has, before it is ended.
GRACE_S = 15.0


class Section(NamedTuple):
    """A group of rows.

    Attributes:
        measure: Yields them.
        line: Says one in words.
        limit_s: How long it may take.
        title: What it is about.
    """

    measure: Callable[[Settings], Iterator[Row]]
    line: Callable[[Row], str]
    limit_s: float
    title: str


SECTIONS = {
    "eta": Section(loader_eta.rows, loader_eta.line, 120, "efficiency, target 0.99"),
    "overlap": Section(loader_overlap.rows, loader_overlap.line, 50, "overlap, target 0.95"),
    "next": Section(
        loader_host.next_rows,
        loader_host.next_line,
        30,
        "next() of two tensors fetched ahead, target 50 µs",
    ),
    "launch": Section(
        loader_host.launch_rows, loader_host.launch_line, 60, "a step of about 0.15 ms"
    ),
    "memory": Section(loader_memory.rows, loader_memory.line, 45, "memory over many epochs"),
    "timeline": Section(loader_timeline.rows, loader_timeline.line, 30, "timeline"),
    "peers": Section(loader_peers.rows, loader_peers.line, 200, "beside other loaders"),
}
# Measured again in fresh processes, the figures that matter most.
REPEATED = "eta"


def measured(name: str, settings: Settings, note: Callable[[Row], None]) -> Row:
    """Run a section here; what it has found is noted row by row."""
    section: Row = {"status": "ran", "seconds": 0.0, "rows": []}
    start = time.monotonic()
    try:
        for row in SECTIONS[base(name)].measure(settings):
            section["rows"].append(row)
            section["seconds"] = round(time.monotonic() - start, 1)
            note(section)
    except Exception as error:
        section |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    section["seconds"] = round(time.monotonic() - start, 1)
    return section


def isolated(name: str, args: argparse.Namespace, limit_s: float) -> Row:
    """Run a section in a process of its own, which is ended when it takes too long."""
    with tempfile.TemporaryDirectory(prefix="loader-") as folder:
        part, log = Path(folder) / "part.json", Path(folder) / "log"
        command = [sys.executable, __file__, "--sections", name, "--no-isolate", "--out", str(part)]
        command += ["--limit-s", str(limit_s), *passed_on(args)]
        if name != base(name):
            command.append("--brief")
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=results.ROOT,
                env={**os.environ, "PYTHONPATH": str(results.ROOT)},
            )
            try:
                status: int | None = process.wait(limit_s + GRACE_S)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end(process)
        section = section_in(part, name)
        if status != 0 or section["status"] != "ran":
            what = "it took too long" if status is None else f"it ended with status {status}"
            section |= {"status": "failed", "log": log.read_text()[-4000:]}
            section.setdefault("reason", what)
    return section


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its workers, which are a group of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def section_in(part: Path, name: str) -> Row:
    """Return what a process has written by now."""
    if not part.exists():
        return {"status": "failed", "rows": []}
    section: Row = json.loads(part.read_text())["sections"].get(name, {"rows": []})
    return {"status": "ran", **section}


def passed_on(args: argparse.Namespace) -> list[str]:
    """Return the options that a section's process has from this one."""
    options = ["--device", args.device, "--workers", str(args.workers)]
    options += ["--peer-workers", str(args.peer_workers), "--images", str(args.images)]
    options += ["--rounds", str(args.rounds)]
    return [*options, "--smoke"] if args.smoke else options


def base(name: str) -> str:
    """Return the section that a repetition repeats."""
    return name.partition(" again")[0]


def names(args: argparse.Namespace) -> list[str]:
    """Return the sections that run, repetitions last."""
    repeated = REPEATED in args.sections and args.isolate
    again = [f"{REPEATED} again {number}" for number in range(2, args.processes + 1)]
    return [*args.sections, *(again if repeated else [])]


def settings_of(args: argparse.Namespace, limit_s: float) -> Settings:
    """Return how a section is measured."""
    return Settings(
        device=args.device,
        smoke=args.smoke,
        brief=args.brief,
        workers=args.workers,
        peer_workers=args.peer_workers,
        images=args.images,
        rounds=args.rounds,
        deadline=time.monotonic() + limit_s,
    )


def surroundings(args: argparse.Namespace) -> Row:
    """Return the settings, and what of the machine matters for a loader."""
    return {
        **settings_of(args, 0).to_dict(),
        "torch_threads": torch.get_num_threads(),
        "shared_memory_bytes": shared_memory_bytes(),
    }


def printed(sections: dict[str, Row]) -> Iterator[str]:
    """Yield all figures in words."""
    for name, section in sections.items():
        known = SECTIONS[base(name)]
        yield f"\n== {name}: {known.title} ({section['status']}, {section.get('seconds', 0)} s)"
        if base(name) == REPEATED:
            yield from loader_eta.header(ran(section))
        line = known.line if name == base(name) else loader_eta.short_line
        for row in section["rows"]:
            yield line(row) if row["status"] == "ran" else without_figures(row)
        if section["status"] != "ran":
            yield f"FAILED: {section.get('reason')}"
            yield from (f"  | {text}" for text in section.get("log", "").splitlines()[-12:])


def ran(section: Row) -> list[Row]:
    """Return the rows with figures."""
    return [row for row in section["rows"] if row["status"] == "ran"]


def without_figures(row: Row) -> str:
    """Return why a row has no figures."""
    what = ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("status", "reason"))
    return f"{what}: {row['status']}: {row['reason'][:300]}"


def arguments(command_line: Iterable[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    default = Settings()
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--any-commit", action="store_true", help="go on with another's --out")
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), type=section_name)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--smoke", action="store_true", help="all small; it only has to run")
    parser.add_argument("--brief", action="store_true", help="of eta only the default form")
    parser.add_argument("--limit-s", type=float, default=560.0)
    parser.add_argument("--processes", type=int, default=3, help="fresh ones, for eta")
    parser.add_argument("--isolate", action=argparse.BooleanOptionalAction)
    parser.add_argument("--workers", type=int, default=max(4, min(default.workers, cores - 4)))
    parser.add_argument("--peer-workers", type=int, default=default.peer_workers)
    parser.add_argument("--images", type=int, default=default.images)
    parser.add_argument("--rounds", type=int, default=default.rounds)
    args = parser.parse_args(None if command_line is None else list(command_line))
    if args.isolate is None:
        args.isolate = not args.smoke
    if args.smoke:
        args.workers = args.peer_workers = min(2, cores)
        args.images, args.rounds, args.processes = 4, 2, min(args.processes, 2)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; try --device cpu --smoke")
    return args


def section_name(text: str) -> str:
    """Return a section's name, of all that there are."""
    if base(text) not in SECTIONS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(SECTIONS)}")
    return text


def main(command_line: Iterable[str] | None = None) -> dict[str, Row]:
    """Measure; return what is written."""
    args = arguments(command_line)
    deadline = time.monotonic() + args.limit_s
    if args.smoke:
        torch.set_num_threads(1)  # threads that compete for few cores take the time of a test
    about = {"settings": surroundings(args)}
    sections: dict[str, Row] = results.earlier_sections(args.out, about, any_commit=args.any_commit)
    figures: dict[str, Any] = {**about, "sections": sections}
    run = results.this_run()

    def note(name: str, section: Row) -> None:
        sections[name] = {**section, "run": run}  # not that of a process of its own
        if args.out:
            results.write(args.out, figures)

    for name in names(args):
        left = deadline - time.monotonic()
        if args.isolate:
            limit_s = min(SECTIONS[base(name)].limit_s, left - GRACE_S)
            if limit_s < 1:
                note(name, {"status": "left out", "reason": "no time was left", "rows": []})
                continue
            section = isolated(name, args, limit_s)
        else:
            # Where it hangs, this says so before it is ended from outside.
            faulthandler.dump_traceback_later(max(left, 1) + GRACE_S / 2)
            section = measured(name, settings_of(args, left), lambda s, n=name: note(n, s))
            faulthandler.cancel_dump_traceback_later()
        note(name, section)
        print(f"{name}: {section['status']}, {section.get('seconds', 0)} s", flush=True)
    print("\n".join(printed({name: sections[name] for name in names(args) if name in sections})))
    return figures


if __name__ == "__main__":
    main()
