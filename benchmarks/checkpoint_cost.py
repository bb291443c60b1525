"""What checkpoints cost a training: how long a save holds it up, the throughput, the way back.

    PYTHONPATH=. python benchmarks/checkpoint_cost.py [--out FILE] [--sections stall ...]
    PYTHONPATH=. python benchmarks/checkpoint_cost.py --device cpu --size smoke

The training is the workload "llama" (1.14 billion parameters, AdamW), saved as ``fit`` saves it.

- **stall**: the seconds of the call, and by how much steps with a save among them take longer than
  as many steps without. The first save, which allocates the memory for all, stands apart. Of the
  others some are called while steps are queued, as in a loop: the call then waits for them too, so
  what counts is the stall. Some are called when the device has finished, which shows what the call
  itself takes. A blocking save is there to compare. The training goes on until each is on the disk.
- **throughput**: as many steps as lie between two checkpoints, with a save at their end and the one
  before still being written at their beginning, against as many without, in turns.
- **resume**: see ``checkpoint_resume.py``.

Figures are printed, and written, as they come. ``--out`` takes up a file of the same settings,
machine and commit: sections that are not measured again stay as they are. ``--any-commit`` takes up
one of another commit; each section says of which run it is.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import checkpoint_resume, results
from benchmarks.checkpoint_work import (
    Settings,
    Training,
    Write,
    file_system,
    num_parameters,
    roomiest,
    write_gb_s,
)

Row = dict[str, Any]

# Each section's part of the time.
SHARES = {"stall": 0.4, "throughput": 0.35, "resume": 0.25}
MOST_STALL_S = 0.5
MOST_COST = 0.02
LEAD = 2
# Steps before the save; the others of a window follow it.
BEFORE = 2
BANDWIDTH_BYTES = {"full": 2 << 30, "smoke": 1 << 20}


class Bench:
    """The sections, and one training that the first two share.

    Args:
        settings: What is measured.
        scratch: A folder of our own.
    """

    def __init__(self, settings: Settings, scratch: Path) -> None:
        self.settings = settings
        self.deadline = float("inf")
        self._scratch = scratch
        self._training: Training | None = None
        self._step_s = 0.0
        self._written_s = 0.0

    def seconds_left(self) -> float:
        """Return what is left for this section."""
        return self.deadline - time.monotonic()

    def rows(self, section: str) -> Iterator[Row]:
        """Yield the rows of a section."""
        return {"stall": self.stall, "throughput": self.throughput, "resume": self.resume}[
            section
        ]()

    # -- Stall ---------------------------------------------------------------------------------

    def stall(self) -> Iterator[Row]:
        """Yield a row for each save."""
        training = self._trained()
        kinds = ["first", "running", "blocking"]
        while kinds.count("running") < self.settings.saves:
            kinds += ["running", "drained"]
        took_s = 0.0
        for kind in kinds:
            if kind != "first" and self.seconds_left() < took_s:
                yield {"kind": kind, "status": "left out", "reason": "no time was left"}
                continue
            start = time.monotonic()
            yield {"kind": kind, "status": "ran", **self._save(training, kind)}
            took_s = time.monotonic() - start

    def _save(self, training: Training, kind: str) -> Row:
        drained = kind != "running"
        without_s = self._window(training, drained=drained)
        calls: list[tuple[float, Write]] = []

        def save() -> None:
            call_s = training.save(blocking=kind == "blocking")
            calls.append((call_s, Write(training.manager)))

        with_s = self._window(training, save, drained=drained)
        [(call_s, write)] = calls
        start = time.perf_counter()
        steps = training.until_written(write)
        beside_s = time.perf_counter() - start
        self._written_s = call_s if kind == "blocking" else write.seconds
        return {
            "call_s": call_s,
            "without_s": without_s,
            "with_s": with_s,
            "stall_s": with_s - without_s,
            "written_s": self._written_s,
            # Of the steps beside the write only; one or two tell nothing.
            "beside_ms": beside_s / steps * 1e3 if steps >= 3 else None,
            "bytes": training.saved_bytes(),
        }

    def _window(
        self, training: Training, save: Callable[[], None] = lambda: None, *, drained: bool
    ) -> float:
        """Return the seconds of some steps, with a save among them or without."""
        training.run(LEAD)
        training.drain()
        start = time.perf_counter()
        training.run(BEFORE)
        if drained:
            training.drain()
        save()
        training.run(self.settings.around - BEFORE)
        training.drain()
        return time.perf_counter() - start

    # -- Throughput ----------------------------------------------------------------------------

    def throughput(self) -> Iterator[Row]:
        """Yield a row for each pair of windows, as many as there is time for."""
        training = self._trained()
        every = self.settings.every
        took_s = 2 * (every + LEAD) * self._step_s + 2 * self._written_s
        for number in range(self.settings.pairs):
            if self.seconds_left() < took_s * (1.0 if number == 0 else 1.1):
                reason = f"a pair takes {took_s:.0f} s, and no time was left"
                yield {"pair": number, "status": "left out", "reason": reason}
                return
            start = time.monotonic()
            row: Row = {"pair": number, "status": "ran", "every": every}
            # Whoever is first is another one each time.
            for saves in (True, False) if number % 2 == 0 else (False, True):
                row |= self._saving(training) if saves else self._plain(training)
            took_s = time.monotonic() - start
            yield {**row, "cost": row["with_s"] / row["without_s"] - 1}

    def _plain(self, training: Training) -> Row:
        training.run(LEAD)
        return {"without_s": self.settings.every * training.step_s(self.settings.every)}

    def _saving(self, training: Training) -> Row:
        training.run(LEAD)
        training.save()
        training.drain()
        start = time.perf_counter()
        training.run(self.settings.every)
        call_s = training.save()
        training.drain()
        with_s = time.perf_counter() - start
        training.until_written(Write(training.manager))
        return {"with_s": with_s, "call_s": call_s}

    # -- Resume --------------------------------------------------------------------------------

    def resume(self) -> Iterator[Row]:
        """Yield the cuts of both models."""
        self.close()  # memory, and room for other checkpoints
        return checkpoint_resume.rows(self.settings, self._scratch, self.seconds_left)

    # -- The training --------------------------------------------------------------------------

    def _trained(self) -> Training:
        if self._training is None:
            self._training = Training(self.settings, self._scratch / "checkpoints")
            self._training.warm_up()
            self._step_s = self._training.step_s(self.settings.around)
            replays = self._training.replays
            live = f"a live graph ({replays} replays)" if replays else "no graph"
            print(f"a step takes {self._step_s * 1e3:.1f} ms; {live}", flush=True)
        return self._training

    def about(self) -> Row:
        """Return what is known of the training by now."""
        if self._training is None:
            return {}
        return {"step_ms": self._step_s * 1e3, "live_graph": self._training.replays > 0}

    def close(self) -> None:
        """Let go of the training and of its checkpoints."""
        if self._training is not None:
            try:
                self._training.close()
            except Exception as error:  # which must not keep the other sections from running
                print(f"the last save failed: {error}", flush=True)
        self._training = None
        shutil.rmtree(self._scratch / "checkpoints", ignore_errors=True)
        gc.collect()
        if self.settings.device == "cuda":
            torch.cuda.empty_cache()


# -- What the rows say -----------------------------------------------------------------------------


def summary(section: str, rows: list[Row]) -> Row:
    """Return the figures of a section that count."""
    ran = [row for row in rows if row["status"] == "ran"]
    return {"stall": of_stall, "throughput": of_throughput, "resume": of_resume}[section](ran)


def of_stall(rows: list[Row]) -> Row:
    """Return the medians of each kind of save, and whether the stall is what is claimed."""
    found: Row = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        found[kind] = {
            "saves": len(own),
            **{
                key: statistics.median(row[key] for row in own)
                for key in ("call_s", "stall_s", "written_s", "bytes")
            },
            "stalls_s": [row["stall_s"] for row in own],
        }
    if "running" in found:
        found["held"] = found["running"]["stall_s"] <= MOST_STALL_S
    return found


def of_throughput(rows: list[Row]) -> Row:
    """Return the cost of a checkpoint at every so many steps, as a part of the time."""
    if not rows:
        return {}
    costs = [row["cost"] for row in rows]
    low, median, high = (
        statistics.quantiles(costs, n=4, method="inclusive") if len(costs) > 1 else costs * 3
    )
    return {
        "every": rows[0]["every"],
        "pairs": len(costs),
        "cost": median,
        "quartiles": [low, high],
        "call_s": statistics.median(row["call_s"] for row in rows),
        "held": median <= MOST_COST,
    }


def of_resume(rows: list[Row]) -> Row:
    """Return how many cuts came back to the bit, and what loading took."""
    small = [row for row in rows if row["model"] == "small"]
    found: Row = {
        "cuts": len(small),
        "twice": sum(len(row["cuts"]) > 1 for row in small),
        "live_graph": sum(row["live_graph"] for row in small),
        "same": sum(is_same(row) for row in small),
        "held": bool(rows) and all(map(is_same, rows)),
    }
    for row in rows:
        if row["model"] == "large":
            found["large"] = {key: row[key] for key in ("steps", "bytes", "read_s", "load_s")}
            found["large"] |= {"live_graph": row["live_graph"], "same": is_same(row)}
    return found


def is_same(row: Row) -> bool:
    """Whether a resumed run came to the bits of the uninterrupted one."""
    return bool(row["same_losses"] and row["same_state"])


def line(section: str, row: Row) -> str:
    """Return a row in words."""
    if row["status"] != "ran":
        what = ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("status", "reason"))
        return f"{what}: {row['status']}: {row['reason'][:300]}"
    if section == "stall":
        beside = f"; a step beside it {row['beside_ms']:.1f} ms" if row["beside_ms"] else ""
        return (
            f"{row['kind']:<9} call {row['call_s']:7.3f} s  stall {row['stall_s']:7.3f} s  "
            f"written in {row['written_s']:6.2f} s, {row['bytes'] / 1e9:.2f} GB{beside}"
        )
    if section == "throughput":
        return (
            f"pair {row['pair']}: {row['every']} steps {row['without_s']:.3f} s, with a checkpoint "
            f"{row['with_s']:.3f} s (call {row['call_s']:.3f} s): {row['cost']:+.2%}"
        )
    live = "live graph" if row["live_graph"] else "no graph"
    same = "same bits" if is_same(row) else f"OTHER BITS: {row['num_differing']} entries"
    if row["model"] == "small":
        return f"small, cut at {' and '.join(map(str, row['cuts']))}: {same}, {live}"
    return (
        f"large, {row['bytes'] / 1e9:.2f} GB: read in {row['read_s']:.2f} s, loaded in "
        f"{row['load_s']:.2f} s; {row['steps']} steps: {same}, {live}"
    )


# -- The run ---------------------------------------------------------------------------------------


def measured(bench: Bench, name: str, limit_s: float, note: Callable[[Row], None]) -> None:
    """Run a section; what it has found is printed and noted row by row."""
    print(f"\n== {name}, at most some {limit_s:.0f} s", flush=True)
    start = time.monotonic()
    bench.deadline = start + limit_s
    section: Row = {"status": "ran", "seconds": 0.0, "rows": []}
    try:
        for row in bench.rows(name):
            section["rows"].append(row)
            section |= {"seconds": round(time.monotonic() - start, 1), **bench.about()}
            section["summary"] = summary(name, section["rows"])
            print(line(name, row), flush=True)
            note(section)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        section |= {"status": "failed", "reason": reason[:2000]}
        print(f"FAILED: {reason}", flush=True)
    section["seconds"] = round(time.monotonic() - start, 1)
    held = section.get("summary", {}).get("held")
    print(f"{name}: {section['status']}, held: {held}, {section['seconds']} s", flush=True)
    note(section)


def place(settings: Settings, folder: Path) -> Row:
    """Return what is known of the folder for checkpoints.

    Raises:
        SystemExit: It has too little room.
    """
    free = shutil.disk_usage(folder).free
    about = {"file_system": file_system(folder), "free_bytes": free}
    print(f"checkpoints go to {folder} ({about['file_system']}), {free / 1e9:.1f} GB free")
    if free < settings.room_bytes:
        raise SystemExit(
            f"too little room: {settings.keep + 1} checkpoints take "
            f"{settings.room_bytes / 1e9:.1f} GB; name another folder with --folder"
        )
    about["write_gb_s"] = write_gb_s(folder, BANDWIDTH_BYTES[settings.size])
    print(f"four files at once are written at {about['write_gb_s']:.2f} GB/s", flush=True)
    return about


def arguments(command_line: Iterable[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=["full", "smoke"], default="full")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plan", choices=["exact", "fast"], default="fast")
    parser.add_argument("--sections", nargs="+", choices=list(SHARES), default=list(SHARES))
    parser.add_argument("--folder", type=Path, help="for checkpoints; emptied of them afterwards")
    parser.add_argument("--limit-s", type=float, default=240.0, help="of all sections together")
    parser.add_argument("--every", type=int, help="steps between checkpoints")
    parser.add_argument("--keep", type=int, default=1, help="checkpoints kept on the disk")
    parser.add_argument("--any-commit", action="store_true", help="go on with another's --out")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(None if command_line is None else list(command_line))
    if args.every is None:
        args.every = 50 if args.size == "full" else 5
    return args


def settings_of(args: argparse.Namespace) -> Settings:
    """Return what is measured."""
    brief = {"saves": 1, "pairs": 2, "around": 4} if args.size == "smoke" else {}
    return Settings(args.size, args.device, args.plan, args.every, args.keep, **brief)


def main(command_line: Iterable[str] | None = None) -> Row:
    """Measure, print and write the figures; return them."""
    args = arguments(command_line)
    start = time.monotonic()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings = settings_of(args)
    if args.size == "smoke":
        torch.set_num_threads(1)  # threads that compete for few cores take the time of a test
    root = args.folder or roomiest()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="checkpoint-cost-", dir=root) as folder:
        scratch = Path(folder)
        about = {"settings": vars(settings), "num_parameters": num_parameters(args.size)}
        sections = results.earlier_sections(args.out, about, any_commit=args.any_commit)
        figures: Row = {**about, "place": place(settings, scratch), "sections": sections}
        run = results.this_run()

        def note(name: str, section: Row) -> None:
            sections[name] = {**section, "run": run}
            if args.out:
                results.write(args.out, figures)

        bench = Bench(settings, scratch)
        try:
            names = [name for name in SHARES if name in args.sections]
            for number, name in enumerate(names):
                left = args.limit_s - (time.monotonic() - start)
                share = SHARES[name] / sum(SHARES[other] for other in names[number:])
                measured(bench, name, left * share, lambda section, n=name: note(n, section))
        finally:
            bench.close()
    return figures


if __name__ == "__main__":
    # So that a time-out removes what may be tens of gigabytes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    main()
