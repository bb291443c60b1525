"""Ways to do one thing that are timed in turns, and the words by which each script is called."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import results


class Arm:
    """One of the ways, with the times of its turns; whoever derives from it says what a step is.

    Args:
        device: Where its work is done.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.times_ms: list[float] = []

    def run(self) -> object:
        """Do one step."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what it holds."""

    def turn(self, steps: int) -> None:
        """Time some steps."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.run()
        self.synchronize()
        self.times_ms.append((time.perf_counter() - start) / steps * 1e3)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def steps_of_a_turn(arm: Arm, seconds: float, fewest: int, most: int) -> int:
    """Return how many steps of an arm take so long, by a short turn that leaves no time behind."""
    arm.turn(fewest)
    return min(most, max(fewest, round(seconds * 1e3 / arm.times_ms.pop())))


def take_turns(arms: Sequence[Arm], rounds: int, steps: int) -> None:
    """Time every arm in every round."""
    for number in range(rounds + 1):
        # Whoever is first in a round is another one each time; the first round only warms up.
        for position in range(len(arms)):
            arms[(position + number) % len(arms)].turn(steps)
    for arm in arms:
        del arm.times_ms[0]


def median_and_quartiles(values: Sequence[float]) -> tuple[float, list[float]]:
    """Return the median of some values, and the quartiles; one value is all of them."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return statistics.median(values), [low, high]


def parser_of(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser of what every script takes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--out", type=Path)
    return parser


def check_has_graphs(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End a script that needs graphs on a device that has none."""
    if args.device != "cuda":
        parser.error(f"--device is {args.device}, which has no graphs; run it on a CUDA device")


def write_rows(
    args: argparse.Namespace,
    rows: list[dict[str, Any]],
    *,
    settings: Mapping[str, Any] | None = None,
    **others: Any,
) -> None:
    """Write what was measured so far, with how, if a file is wanted.

    Args:
        args: By what the script was called.
        rows: What was measured.
        settings: What belongs to how beside what every script has.
        others: What else the file is to hold.
    """
    if args.out is not None:
        how = {"settings": settings_of(args, settings)}
        results.write(args.out, {**how, **others, "rows": rows})


def settings_of(
    args: argparse.Namespace, settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return how a script measures, for its file."""
    common = {"size": args.size, "rounds": args.rounds, "block_s": args.block_s}
    return {**common, **(settings or {})}


def use_deterministic_algorithms() -> None:
    """Have kernels add in one order, so that two ways can be equal to the bit."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
