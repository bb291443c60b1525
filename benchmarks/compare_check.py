"""Whether ``compare.py`` tells a small slowdown from noise, on this machine.

    PYTHONPATH=. python benchmarks/compare_check.py [--workloads W ...] [--out FILE]

The same code is measured again and again, each time by processes of its own, and each result is
compared with the one before: the verdict ought to be "no difference" each time. Then a slowdown of
3 % is planted in the method, on the host and on the device, and the verdict ought to be "slower".
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
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


def measure(name: str, settings: Settings, slowdowns: list[float]) -> list[dict[str, Any]]:
    """Return a result for each slowdown, measured one after the other.

    All processes are there from the beginning, and each result has two of its own.
    """
    measurements = [
        Measurement(workload(name, settings.size), settings, {METHOD: slowdown} if slowdown else {})
        for slowdown in slowdowns
    ]
    try:
        spawned = [m.spawn([TUNED, METHODS[METHOD]]) for m in measurements]
        for measurement, processes in zip(measurements, spawned, strict=True):
            measurement.measure(measurement.warm_up(processes))
    finally:
        for measurement in measurements:
            measurement.close()
    return [measurement.result() for measurement in measurements]


def verdicts(measured: list[dict[str, Any]], name: str, settings: Settings) -> list[dict[str, Any]]:
    """Return what the comparison says of each result and the one before, as files."""
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for number, result in enumerate(measured):
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
        rows = [
            compare.compare(before, after).rows[0] for before, after in itertools.pairwise(files)
        ]
    return [{"verdict": row.verdict, **row.bounds._asdict()} for row in rows]


def check(name: str, settings: Settings, same: int, planted: int) -> dict[str, Any]:
    """Return the verdicts on the same code, and on a planted slowdown against the same code."""
    slowdowns = [0.0] * (same + 1) + [PLANTED, 0.0] * planted
    measured = measure(name, settings, slowdowns)
    found = verdicts(measured, name, settings)
    return {
        "same": found[:same],
        # Every other one takes the slowdown away again.
        "planted": found[same::2],
        "taken away": found[same + 1 :: 2],
        "results": [result["methods"] for result in measured],
    }


def main() -> None:
    """Measure, print the verdicts, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=NAMES, default=["gpt-small", "vit"])
    parser.add_argument("--same", type=int, default=10, help="comparisons of the same code")
    parser.add_argument("--planted", type=int, default=1, help="comparisons with a slowdown")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--block-s", type=float, default=0.1)
    parser.add_argument("--lead-s", type=float, default=Settings.lead_s)
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
    found = {}
    for name in args.workloads:
        found[name] = check(name, settings, args.same, args.planted)
        for kind in ("same", "planted", "taken away"):
            for verdict in found[name][kind]:
                print(
                    f"{name:12} {kind:10} {verdict['change']:.4f} "
                    f"[{verdict['low']:.4f}, {verdict['high']:.4f}] {verdict['verdict']}",
                    flush=True,
                )
    if args.out:
        results.write(args.out, {"settings": asdict(settings), "method": METHOD, "checks": found})


if __name__ == "__main__":
    main()
