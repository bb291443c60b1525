"""The loader beside others: the loop by hand, timm, Accelerate and Lightning, on the same batches.

All have the same data set, the same number of worker processes and the same step, and live in one
process. A round is a block from each, in random order, and methods are compared round by round.
The others get a DataLoader that pins, as their guides say. torchfast gets its own, whose workers
write into memory that is used again, as its guide says; and for comparison a plain one, unpinned
and pinned. Where batches are normalised, every method does it on
the device: timm's does it always.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.loader_batches import (
    Batches,
    check_shared_memory,
    data_loader,
    images,
    mapped,
    nested,
    num_bytes,
    reserve,
    tokens,
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

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# A step is this much longer than the bus needs, and than the workers need: nobody is starved.
OVER_TRANSFER, OVER_SUPPLY, LEAST_MS = 2.5, 1.4, 1.0
OURS = (
    "torchfast",
    "torchfast reuse",
    "torchfast, plain DataLoader",
    "torchfast, torch pins",
)


class Kind(NamedTuple):
    """Batches of one kind.

    Attributes:
        name: What it is called.
        template: A batch.
        normalised: Whether images are normalised on the device.
        long_step: Whether the step leaves time for what torch's pinning thread needs too, so that
            nobody is starved; otherwise it is as long as the workers need.
    """

    name: str
    template: Any
    normalised: bool = False
    long_step: bool = False


class LeftOutError(Exception):
    """A method that cannot be measured here, with the reason."""


def rows(settings: Settings) -> Iterator[Row]:
    """Yield a row for each kind of batch, with all methods."""
    for kind in kinds(settings):
        yield attempt(settings, {"kind": kind.name}, partial(compare, settings, kind))
        gc.collect()


def kinds(settings: Settings) -> Iterator[Kind]:
    """Yield the kinds of batches."""
    pixels = 32 if settings.smoke else 224
    yield Kind("images 256, normalised to fp16", images(settings.images, pixels), normalised=True)
    yield Kind("nested dict, 12 tensors", nested(2 if settings.smoke else 64))
    if settings.smoke:
        return
    yield Kind("tokens 32 x 1025", tokens())
    yield Kind("images 256, uint8", images(settings.images, pixels))
    yield Kind("images 256, uint8, long step", images(settings.images, pixels), long_step=True)
    yield Kind("images 64, uint8", images(max(settings.images // 4, 1), pixels))


class Normaliser:
    """What timm's loader does to images: to fp16, minus the mean, by the deviation."""

    def __init__(self, device: str) -> None:
        self._mean, self._std = (
            torch.tensor([255 * x for x in values], dtype=torch.float16, device=device)[
                :, None, None
            ]
            for values in (MEAN, STD)
        )

    def __call__(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the batch with its images normalised."""
        pictures, labels = batch
        return pictures.to(torch.float16).sub_(self._mean).div_(self._std), labels


def compare(settings: Settings, kind: Kind) -> Row:
    """Return the figures of all methods on one kind of batch."""
    check_shared_memory(num_bytes(kind.template) * len(METHODS), settings.peer_workers)
    work, device = Work(settings.device), settings.device
    on_device = resident(kind.template, device)
    finish = Normaliser(device) if kind.normalised else None
    step = (lambda batch: work(finish(batch))) if finish else work
    bus_ms = transfer_ms(kind.template, device)
    supply_ms = measured_supply_ms(settings, kind, pinned=False)
    # Each measurement starts workers of its own, so what nobody asks for is left out.
    matters = settings.on_cuda and kind.long_step
    pinned_ms = measured_supply_ms(settings, kind, pinned=True) if matters else None
    needed_ms = max(supply_ms, pinned_ms or 0.0)
    work.calibrate(
        max(OVER_TRANSFER * bus_ms, OVER_SUPPLY * needed_ms, LEAST_MS),
        finish(on_device[0]) if finish else on_device[0],
    )
    arms, left_out = started(settings, kind, work, finish)
    arms["resident"] = Arm(forever(on_device), step, device)
    try:
        blocks = take_turns(arms, settings, work.time_ms(lambda: step(on_device[0])), left_out)
    finally:
        for arm in arms.values():
            arm.close()
    return {
        "bytes": num_bytes(kind.template),
        "workers": settings.peer_workers,
        "transfer_ms": bus_ms,
        "supply_ms": supply_ms,
        "supply_pinned_ms": pinned_ms,
        "left_out": left_out,
        **compared(blocks),
    }


def measured_supply_ms(settings: Settings, kind: Kind, *, pinned: bool) -> float:
    """Return the time of a batch out of the DataLoader, where nothing is done with it."""
    loader = upstream(settings, kind, pinned=pinned)
    return drained_ms(iter(loader), settings, 2 * reserve(settings.peer_workers))


def started(
    settings: Settings, kind: Kind, work: Work, finish: Normaliser | None
) -> tuple[dict[str, Arm], dict[str, str]]:
    """Return the methods at work, and why others are not."""
    arms: dict[str, Arm] = {}
    left_out: dict[str, str] = {}
    lead = 2 if settings.smoke else reserve(settings.peer_workers, 2) + 4
    for name, (build, normalises) in METHODS.items():
        try:
            batches, close = build(settings, kind, finish)
            step: Callable[[Any], Any] = work
            if finish is not None and not normalises:
                step = partial(_finish_first, work, finish)
            arm = Arm(batches, step, settings.device, lead=lead, close=close)
            arm.run(2)
            arms[name] = arm
        except Exception as error:
            known = isinstance(error, LeftOutError)
            left_out[name] = str(error) if known else f"{type(error).__name__}: {error}"
    return arms, left_out


def _finish_first(work: Work, finish: Normaliser, batch: Any) -> None:
    work(finish(batch))


def take_turns(
    arms: dict[str, Arm], settings: Settings, step_ms: float, left_out: dict[str, str]
) -> dict[str, list[float]]:
    """Return the blocks of each method; one that fails on its way is left out."""
    steps, order = settings.steps(step_ms), random.Random(0)
    blocks: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(settings.rounds + 1):
        for name in order.sample(sorted(blocks), len(blocks)):
            try:
                taken = arms[name].block_ms(steps)
            except Exception as error:
                left_out[name] = f"{type(error).__name__}: {error}"
                del blocks[name]
                continue
            if number:  # the first round is for what is not yet as it will be
                blocks[name].append(taken)
    return blocks


def compared(blocks: dict[str, list[float]]) -> Row:
    """Return medians, and torchfast against the best of the others, round by round."""
    methods = {
        name: {
            "median_ms": middle(taken)[1],
            "quartiles_ms": middle(taken)[::2],
            "blocks_ms": taken,
        }
        for name, taken in blocks.items()
    }
    peers = [name for name in blocks if name not in (*OURS, "resident")]
    if not peers:
        raise RuntimeError("no other method ran")
    best = min(peers, key=lambda name: methods[name]["median_ms"])
    ratios = {}
    for name in [name for name in OURS if name in blocks]:
        pairs = zip(blocks[name], blocks[best], strict=True)
        low, median, high = middle([ours / theirs for ours, theirs in pairs])
        ratios[name] = {"median": median, "quartiles": [low, high]}
    return {"methods": methods, "best_peer": best, "ratio_to_best_peer": ratios}


# -- The methods -----------------------------------------------------------------------------------

Batched = tuple[Iterable[Any], Callable[[], Any] | None]


def upstream(settings: Settings, kind: Kind, *, pinned: bool = True, recycled: bool = False) -> Any:
    """Return the DataLoader that everybody has, or torchfast's."""
    data, workers = Batches(kind.template), settings.peer_workers
    pinned = pinned and settings.on_cuda
    return data_loader(data, workers=workers, pinned=pinned, recycled=recycled)


def by_hand(settings: Settings, kind: Kind, _finish: Any) -> Batched:
    """Return the loop that every guide shows."""
    loader, device = upstream(settings, kind), settings.device
    return (mapped(b, lambda t: t.to(device, non_blocking=True)) for b in loader), None


def timm(settings: Settings, kind: Kind, finish: Any) -> Batched:
    """Return timm's loader, to fp16 and with its own mean and deviation."""
    if finish is None:
        raise LeftOutError("it normalises always, which is another work")
    try:
        from timm.data.loader import PrefetchLoader
    except ImportError as error:
        raise LeftOutError(f"timm is not here: {error}") from error
    loader = PrefetchLoader(
        upstream(settings, kind),
        mean=MEAN,
        std=STD,
        device=torch.device(settings.device),
        img_dtype=torch.float16,
    )
    return loader, None


def accelerate(settings: Settings, kind: Kind, _finish: Any) -> Batched:
    """Return Accelerate's prepared loader, told to copy without waiting."""
    try:
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration
    except ImportError as error:
        raise LeftOutError(f"accelerate is not here: {error}") from error
    accelerator = Accelerator(
        cpu=not settings.on_cuda, dataloader_config=DataLoaderConfiguration(non_blocking=True)
    )
    return accelerator.prepare(upstream(settings, kind)), None


def lightning(settings: Settings, kind: Kind, _finish: Any) -> Batched:
    """Return the loader that Lightning's Fabric sets up."""
    try:
        try:
            from lightning.fabric import Fabric
        except ImportError:
            from lightning_fabric import Fabric  # comes with pytorch-lightning too
    except ImportError as error:
        raise LeftOutError(f"lightning is not here: {error}") from error
    fabric = Fabric(accelerator=settings.device, devices=1)
    return fabric.setup_dataloaders(upstream(settings, kind)), None


def torchfast(
    settings: Settings,
    kind: Kind,
    finish: Any,
    *,
    reuse: bool = False,
    pinned: bool = False,
    recycled: bool = True,
) -> Batched:
    """Return torchfast's loader."""
    source = upstream(settings, kind, pinned=pinned, recycled=recycled)
    loader = PrefetchingLoader(source, settings.device, reuse=reuse, transform=finish)
    return loader, loader.close


# Each with whether its batches come normalised.
METHODS: dict[str, tuple[Callable[..., Batched], bool]] = {
    "by hand": (by_hand, False),
    "timm": (timm, True),
    "Accelerate": (accelerate, False),
    "Lightning Fabric": (lightning, False),
    "torchfast": (torchfast, True),
    "torchfast reuse": (partial(torchfast, reuse=True), True),
    "torchfast, plain DataLoader": (partial(torchfast, recycled=False), True),
    "torchfast, torch pins": (partial(torchfast, pinned=True, recycled=False), True),
}


def line(row: Row) -> str:
    """Return a row in words."""
    methods = ", ".join(f"{name} {m['median_ms']:.3f}" for name, m in row["methods"].items())
    ratios = "; ".join(
        f"{name}/best {r['median']:.4f} [{r['quartiles'][0]:.4f} {r['quartiles'][1]:.4f}]"
        for name, r in row["ratio_to_best_peer"].items()
    )
    absent = "".join(f"\n    without {name}: {why[:160]}" for name, why in row["left_out"].items())
    pinned_ms = row["supply_pinned_ms"]
    pinned = "" if pinned_ms is None else f", pinned {pinned_ms:.3f} ms"
    return (
        f"{row['kind']}: {methods} ms; best peer {row['best_peer']}; {ratios} (bus "
        f"{row['transfer_ms']:.3f} ms, supply {row['supply_ms']:.3f} ms{pinned}){absent}"
    )
