"""A loader's report: the verdict, with what to do about it, and how batches got to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchfast._core.decisions import Decision, Report
from torchfast.data.monitored import memory_of
from torchfast.data.pool_receiver import PoolStatistics
from torchfast.data.statistics import LoaderStatistics

if TYPE_CHECKING:
    from torchfast.data.loader import PrefetchingLoader
    from torchfast.data.ring import Ring


def device_tensors(loader: PrefetchingLoader) -> list[Tensor]:
    """Return the blocks of device memory that a loader's ring holds; none before it has begun."""
    ring = loader._ring
    return [] if ring is None else [block for slot in ring.slots for block in slot.blocks]


def loader_report(
    loader: Any,
    device: torch.device,
    statistics: LoaderStatistics,
    prefetch: Decision | None,
    across_epochs: Decision | None,
    *,
    ring: Ring | None,
    is_ahead: bool,
) -> Report:
    """Return the report of a `PrefetchingLoader`.

    Args:
        loader: What it iterates over.
        device: Where batches go.
        statistics: What was counted.
        prefetch: How batches are fetched for a device; None where they stay on the host.
        across_epochs: What became of fetching over the end of an epoch, if that was asked for.
        ring: What batches go through, if they do already.
        is_ahead: Whether they are fetched ahead, if there is a ring or is to be one.
    """
    has_workers = getattr(loader, "num_workers", 0) > 0
    ahead = prefetch is not None and is_ahead
    verdict = Decision(
        lever="verdict",
        outcome="applied",
        detail=advice(statistics, ahead=ahead, has_workers=has_workers),
    )
    decisions = [verdict, direct_decision(device) if prefetch is None else prefetch]
    if across_epochs is not None:
        decisions.append(across_epochs)
    if ring is not None and ring.finishes_late:
        decisions.append(
            Decision(
                lever="transform",
                outcome="stepped aside",
                detail="it draws random numbers, so it runs on the training's stream, where a "
                "plain loop would run it, and not beside the step; draw in the data set instead"
                + (
                    "; it began to draw later than in the first batches, and what it drew ahead "
                    "before that was seen fell in another order than a plain loop's"
                    if ring.drew_ahead
                    else ""
                ),
            )
        )
    if ring is not None and (memory := memory_of(loader)) is not None:
        decisions.append(memory_decision(memory))
    figures = {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in statistics.to_dict().items()
        if value is not None
    }
    title = f"PrefetchingLoader over {type(loader).__name__} on {device}"
    return Report(title=title, decisions=tuple(decisions), counters=figures)


def memory_decision(memory: PoolStatistics) -> Decision:
    """Return how batches get out of the workers' memory, which is used again."""
    what = f"{memory.num_blocks} blocks of the workers', {memory.num_bytes / 1e6:.1f} MB"
    if memory.not_pinned:
        detail = f"{what}, {memory.num_pinned} of them pinned in place: {memory.not_pinned}"
        return Decision(lever="recycle_memory", outcome="stepped aside", detail=detail)
    detail = f"{what}, {memory.num_pinned} of them pinned in place and read by the device there"
    if memory.num_ordinary:
        detail += f"; {memory.num_ordinary} batches came in other memory and were copied"
    return Decision(lever="recycle_memory", outcome="applied", detail=detail)


def direct_decision(device: torch.device) -> Decision:
    """Return what became of fetching ahead on a device without a copy stream."""
    if device.type == "cpu":
        detail = "on the CPU nothing could be copied beside a step: batches come one by one"
        return Decision(lever="prefetch", outcome="left alone", detail=detail)
    detail = f"on {device.type} batches are fetched and copied one by one; it needs CUDA"
    return Decision(lever="prefetch", outcome="stepped aside", detail=detail)


def advice(statistics: LoaderStatistics, *, ahead: bool, has_workers: bool) -> str:
    """Return the verdict in a sentence, with what to do about it.

    Args:
        statistics: What was counted.
        ahead: Whether batches are fetched ahead.
        has_workers: Whether the loader has worker processes.
    """
    s = statistics
    if s.verdict == "unknown":
        unseen = s.num_unseen
        why = f": the loop broke off behind {unseen} of them" if unseen else ""
        return f"{s.num_batches} batches are too few to tell{why}"
    if s.verdict == "fed":
        return f"fed: the device waits for data {max(s.starved, s.stalled):.1%} of the time"
    if s.verdict == "supply-bound":
        cause = (
            f"which supplies {s.supply_over_demand:.3g} times what the loop could take"
            if ahead
            else "and nothing is fetched ahead"
        )
        remedy = "more worker processes" if has_workers else "worker processes"
        return (
            f"supply-bound: {s.starved:.0%} of the time goes into waiting for the loader, {cause}; "
            f"try {remedy} (torchfast.sweep_workers measures how many pay), or cheaper samples"
        )
    return (
        f"transfer-bound: the device waits for the bus {s.stalled:.0%} of the time; a batch takes "
        f"{s.copy_ms:.3g} ms of it; send fewer bytes: uint8 with a transform that casts on the "
        "device, or transfer_dtype=torch.bfloat16"
    )
