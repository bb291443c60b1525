"""How much of a step's speed is left when its batches come from a loader.

η is the time of a step on batches that are on the device already, over the time of the same step
with the loader. It says something only where the loader's upstream could supply more than the step
takes: at least 1.2 times as much, measured by emptying the DataLoader alone. Below that a row says
so and is not judged. Blocks of both kinds take turns in one process, and each block with the loader
is compared with those on both sides of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.loader_batches import (
    HOWS,
    Batches,
    How,
    check_shared_memory,
    data_loader,
    images,
    mapped,
    num_bytes,
    reserve,
)
from benchmarks.loader_work import (
    Arm,
    Row,
    Settings,
    Work,
    attempt,
    drained_ms,
    forever,
    middle,
    resident,
    transfer_ms,
)
from torchfast import PrefetchingLoader

RATIOS = (0.2, 0.5, 0.8)  # of the time on the bus to the time of a step
TARGET, ENOUGH = 0.99, 1.2
SPARE = 0.05  # for what a step takes less than it was calibrated for
MANY = 50_000  # batches of a list: more than anyone takes
# Depth, ownership, whether workers write into memory that is used again, whether a graph launches.
FORMS = (
    (2, True, True, True),
    (2, True, True, False),
    (2, True, False, True),
    (1, True, True, True),
    (4, True, True, True),
    (2, False, True, True),
)


def rows(settings: Settings) -> Iterator[Row]:
    """Yield a row a ratio, depth and ownership; and the control, with batches that are pinned.

    Where the workers cannot supply enough for the highest ratio, the highest for which they can
    comes behind it.
    """
    bench = Bench(settings)
    forms = FORMS[:1] if settings.brief or settings.smoke else FORMS
    try:
        for ratio in (*RATIOS, None):
            if ratio is None and (ratio := bench.highest_ratio()) is None:
                continue
            bench.set_step(ratio)
            for depth, reuse, recycled, graphed in forms:
                bench.work.graphed = graphed
                what = {
                    "ratio": ratio,
                    "depth": depth,
                    "reuse": reuse,
                    "recycled": recycled,
                    "graphed": graphed,
                }
                yield attempt(
                    settings,
                    what,
                    lambda d=depth, r=reuse, again=recycled: bench.from_workers(d, r, again),
                )
            bench.work.graphed = True
            if settings.brief:
                continue
            what = {
                "ratio": ratio,
                "depth": 2,
                "reuse": True,
                "recycled": False,
                "graphed": True,
                "upstream": "pinned list",
            }
            yield attempt(settings, what, bench.from_pinned_list)
    finally:
        bench.close()


class Bench:
    """One kind of batch, and steps of several lengths."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.template = images(settings.images, 32 if settings.smoke else 224)
        self.bytes = num_bytes(self.template)
        self.transfer_ms = transfer_ms(self.template, settings.device)
        self.work = Work(settings.device, graphed=True)
        self.step_ms = 0.0
        self._resident = resident(self.template, settings.device)
        self._loaders: dict[tuple[How, bool], DataLoader[Any]] = {}
        self._supply: dict[tuple[How, bool], dict[str, float]] = {}
        check_shared_memory(self.bytes, settings.workers)

    def set_step(self, ratio: float) -> None:
        """Make a step as long as it has to be for this ratio."""
        self.step_ms = self.work.calibrate(self.transfer_ms / ratio, self._resident[0])

    def from_workers(self, depth: int, reuse: bool, recycled: bool) -> Row:
        """Measure with worker processes, which do as much as leaves the supply sufficient."""
        how = self._how(recycled)
        supply = self.supply(how, recycled)
        for other in HOWS:
            if other != how:  # of longer steps
                self._loaders.pop((other, recycled), None)
        loader = self._loader(how, recycled)
        expected = loader.dataset.__getitems__([0])  # type: ignore[attr-defined]
        figures = self._measure(loader, expected, depth, reuse, self.settings.workers)
        tried = self._tried(recycled)
        return self._judged({"upstream": how, **supply, **figures, "supplies_ms": tried})

    def _how(self, recycled: bool) -> How:
        """Return what workers do at most for a sufficient supply; what is fastest if none is."""
        for how in HOWS:
            if self.supply(how, recycled)["supply_ms"] * ENOUGH <= self.step_ms:
                return how
        return min(HOWS, key=lambda how: self.supply(how, recycled)["supply_ms"])

    def highest_ratio(self) -> float | None:
        """Return the ratio up to which workers supply enough; None if that is all of `RATIOS`."""
        least = min(self._tried(recycled=True).values(), default=math.inf)
        if least * ENOUGH <= self.transfer_ms / RATIOS[-1]:
            return None
        ratio = self.transfer_ms / (least * ENOUGH * (1 + SPARE))
        return ratio if max(ratio for ratio in RATIOS[:-1]) < ratio < RATIOS[-1] else None

    def from_pinned_list(self) -> Row:
        """Measure with batches that are pinned and ready: the control."""
        pinned = [self.template]
        if self.settings.on_cuda:
            pinned = [mapped(self.template, lambda t: t.pin_memory()) for _ in range(2)]
        figures = self._measure(pinned * MANY, self.template, 2, True, 0)
        return self._judged({"supply_ms": 0.0, **figures})

    def _loader(self, how: How, recycled: bool) -> DataLoader[Any]:
        """Return a loader whose workers stay: their start takes longer than a measurement."""
        if (how, recycled) not in self._loaders:
            self._loaders[how, recycled] = data_loader(
                Batches(self.template, how), workers=self.settings.workers, recycled=recycled
            )
        return self._loaders[how, recycled]

    def supply(self, how: How, recycled: bool) -> dict[str, float]:
        """Return the time of a batch: out of the DataLoader, and through the loader unused.

        Emptied alone, nobody looks at the batches, in memory that is used again or new: the work
        that this leaves to the loader is in the second figure.
        """
        if (how, recycled) not in self._supply:
            settings, workers = self.settings, self.settings.workers
            loader = self._loader(how, recycled)
            skip = 2 * reserve(workers)
            alone = drained_ms(iter(loader), settings, skip)
            prefetching = PrefetchingLoader(loader, settings.device, reuse=True)
            with prefetching:
                batches = iter(prefetching)
                through = drained_ms(batches, settings, skip, settings.device)
                batches.close()  # type: ignore[attr-defined]
            self._supply[how, recycled] = {"supply_ms": alone, "supply_through_ms": through}
            # Or its workers would wait with batches in their hands while others are measured.
            del loader, self._loaders[how, recycled]
        return self._supply[how, recycled]

    def _tried(self, recycled: bool) -> dict[str, float]:
        return {
            how: supply["supply_ms"]
            for (how, again), supply in self._supply.items()
            if again == recycled
        }

    def _measure(self, upstream: Any, expected: Any, depth: int, reuse: bool, workers: int) -> Row:
        settings, device = self.settings, self.settings.device
        steps = settings.steps(self.step_ms)
        loader = PrefetchingLoader(upstream, device, depth=depth, reuse=reuse)
        control = Arm(forever(self._resident), self.work, device)
        lead = reserve(workers, depth) + 4
        arm = Arm(loader, self.work, device, lead=lead, close=loader.close)
        sums = [self.work.sum_of(b) for b in (self._resident[0], self._on_device(expected))]
        self.work.total.zero_()
        try:
            arm.run(lead)  # workers start, pinned memory is made
            before = [control.block_ms(steps)]
            with_loader = []
            for _ in range(settings.rounds):
                with_loader.append(arm.block_ms(steps))
                before.append(control.block_ms(steps))
            statistics = loader.statistics()
            total = sum(s * a.num_steps for s, a in zip(sums, (control, arm), strict=True))
            right = (total - int(self.work.total)) % 2**64 == 0
        finally:
            arm.close()
        return {
            "steps": steps,
            "every_byte_right": right,
            "resident_ms": middle(before)[1],
            "loader_ms": middle(with_loader)[1],
            "resident_blocks_ms": before,
            "loader_blocks_ms": with_loader,
            "etas": [
                (a + b) / 2 / c
                for a, b, c in zip(before[:-1], before[1:], with_loader, strict=True)
            ],
            # Not a number where nothing was timed, which JSON does not know.
            "copy_ms": None if math.isnan(statistics.copy_ms) else statistics.copy_ms,
            "stall_ms": None if math.isnan(statistics.stall_ms) else statistics.stall_ms,
            "starved": statistics.starved,
            "loader_says": statistics.verdict,
        }

    def _on_device(self, batch: Any) -> Any:
        return resident(batch, self.settings.device, 1)[0]

    def _judged(self, row: Row) -> Row:
        low, eta, high = middle(row["etas"])
        # Nothing is as fast as a list; a number that JSON knows stands for that.
        supply = row["resident_ms"] / row["supply_ms"] if row["supply_ms"] else 1e6
        verdict = "held" if eta >= TARGET else "missed"
        if supply < ENOUGH:
            verdict = "supply-bound"
        if not row["every_byte_right"]:
            verdict = "WRONG BYTES"
        return {
            "bytes": self.bytes,
            "transfer_ms": self.transfer_ms,
            "gb_s": self.bytes / self.transfer_ms / 1e6,
            "actual_ratio": self.transfer_ms / row["resident_ms"],
            "workers": self.settings.workers,
            **row,
            "supply_over_demand": supply,
            "eta": eta,
            "eta_quartiles": [low, high],
            "verdict": verdict,
        }

    def close(self) -> None:
        """Let the workers go."""
        self._loaders.clear()


def line(row: Row) -> str:
    """Return a row in words."""
    low, high = row["eta_quartiles"]
    through = row["resident_ms"] / row["supply_through_ms"] if "supply_through_ms" in row else 0
    return (
        f"bus/step {row['actual_ratio']:4.0%} depth {row['depth']} reuse {row['reuse']!s:5} "
        f"{upstream_of(row):27} supply x{min(row['supply_over_demand'], 99):5.2f} "
        f"(through x{through:5.2f}) step {row['resident_ms']:.3f} -> {row['loader_ms']:.3f} ms "
        f"eta {row['eta']:.4f} [{low:.4f} {high:.4f}] {row['verdict']}; {row['loader_says']}"
    )


def upstream_of(row: Row) -> str:
    """Return what the batches came from, whether in memory that is used again, how it was run."""
    launched = "" if row["graphed"] else ", one by one"
    return f"{row['upstream']}{' recycled' if row['recycled'] else ''}{launched}"


def short_line(row: Row) -> str:
    """Return a row of a repetition in fewer words."""
    return (
        f"bus/step {row['actual_ratio']:4.0%} depth {row['depth']} reuse {row['reuse']!s:5} "
        f"{upstream_of(row):27} eta {row['eta']:.4f} {row['verdict']}"
    )


def header(found: list[Row]) -> Iterator[str]:
    """Yield what is the same for all rows."""
    for row in found[:1]:
        yield (
            f"batch {row['bytes'] / 1e6:.1f} MB, {row['transfer_ms']:.3f} ms on the bus "
            f"({row['gb_s']:.1f} GB/s), {row['workers']} workers"
        )
