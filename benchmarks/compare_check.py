"""Whether ``compare.py`` tells a small slowdown from noise, on this machine.

    PYTHONPATH=. python benchmarks/compare_check.py [--workloads W ...] [--out FILE]

The same code is measured again and again, each time by processes of its own, and each result is
compared with the one before: the verdict ought to be "no difference" each time. Then a slowdown of
3 % is planted in the method, on the host and on the device, and the verdict ought to be "slower".
On a GPU the method is captured, and what it is set against is the loop by hand that is, too.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import compare, results
from benchmarks.methods import METHODS, TUNED
from benchmarks.process import steady_layout
from benchmarks.workloads import NAMES, workload
from benchmarks.yardstick import Measurement, Settings

METHOD = "torchfast exact"
PLANTED = 0.03


def reference_on(device: str) -> str:
    """Return what the method is set against."""
    return "by hand: graph" if device == "cuda" else TUNED.name


def measured(name: str, settings: Settings, slowdowns: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yield a result for each slowdown, measured one after the other.

    All processes are there from the beginning, and each result has some of its own.
    """
    measurements = [
        Measurement(workload(name, settings.size), settings, {METHOD: slowdown} if slowdown else {})
        for slowdown in slowdowns
    ]
    try:
        names = dict.fromkeys([TUNED.name, reference_on(settings.device), METHOD])
        spawned = [m.spawn([METHODS[name] for name in names]) for m in measurements]
        for measurement, processes in zip(measurements, spawned, strict=True):
            measurement.measure(measurement.warm_up(processes))
            measurement.close()  # those to come have the device to themselves
            yield measurement.result()
    finally:
        for measurement in measurements:
            measurement.close()


def verdict(
    before: dict[str, Any], after: dict[str, Any], name: str, settings: Settings
) -> dict[str, Any]:
    """Return what the comparison says of two results, as files."""
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for number, result in enumerate((before, after)):
            path = Path(folder) / f"{number}.json"
            path.write_text(
                json.dumps(
                    {
                        "machine": results.machine(),
                        "settings": asdict(settings),
                        "workloads": {name: result},
                    }
                )
            )
            files.append(compare.ResultFile(path))
        reference = reference_on(settings.device)
        (row,) = compare.compare(*files, methods=f"^{METHOD}$", reference=reference).rows
    return {"verdict": row.verdict, **row.bounds._asdict()}


def check(name: str, settings: Settings, same: int, planted: int) -> Iterator[dict[str, Any]]:
    """Yield the verdicts on the same code, and on a planted slowdown against the same code."""
    slowdowns = [0.0] * (same + 1) + [PLANTED, 0.0] * planted
    kinds = ["same"] * same + ["planted", "taken away"] * planted
    with contextlib.closing(measured(name, settings, slowdowns)) as found:
        pairs = itertools.pairwise(found)
        for kind, (before, after) in zip(kinds, pairs, strict=True):
            yield {"kind": kind, **verdict(before, after, name, settings)}


def main() -> None:
    """Measure, print the verdicts, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=NAMES, default=["gpt-small", "vit"])
    parser.add_argument("--same", type=int, default=10, help="comparisons of the same code")
    parser.add_argument("--planted", type=int, default=1, help="comparisons with a slowdown")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--block-s", type=float, default=0.06)
    parser.add_argument("--lead-s", type=float, default=0.03)
    parser.add_argument("--cores", type=int, default=2, help="on which all processes stay")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    steady_layout()
    settings = Settings(
        device=args.device,
        size="full" if args.device == "cuda" else "smoke",
        rounds=args.rounds,
        block_s=args.block_s,
        lead_s=args.lead_s,
        cores=args.cores,
    )
    rows: list[dict[str, Any]] = []
    for name in args.workloads:
        for found in check(name, settings, args.same, args.planted):
            rows.append({"workload": name, **found})
            print(
                f"{name:12} {found['kind']:10} {found['change']:.4f} "
                f"[{found['low']:.4f}, {found['high']:.4f}] {found['verdict']}",
                flush=True,
            )
            if args.out:  # after each: whoever interrupts keeps what there is
                settled = {
                    "settings": asdict(settings),
                    "method": METHOD,
                    "reference": reference_on(args.device),
                    "planted": PLANTED,
                }
                results.write(args.out, {**settled, "rows": rows})


if __name__ == "__main__":
    main()
