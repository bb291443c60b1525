"""Worker processes for loading: how many, and with which options.

Workers pay where making a batch takes Python or waiting: decoding, tokenising, reading files. They
cost a process each, a copy of each batch into shared memory, and start-up. Where samples lie in
memory already, they only cost. What is chosen here is a good guess from the machine and the data
set's kind, made without drawing a sample; `sweep_workers` measures instead.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from torchfast._core.arguments import check_callable, check_int, explain_keywords
from torchfast._core.cgroups import MEMBERSHIPS, ROOT, cgroup_folders
from torchfast._core.decisions import Decision, Outcome, Report
from torchfast._core.device import resolve_device
from torchfast.data.monitored import MonitoredDataLoader

Auto = Literal["auto"]

# Beyond it memory and start-up grow surely, and supply only perhaps: that has to be measured.
MOST_WORKERS = 8
PREFETCH_FACTOR = 2
# Options with their reasons. The timeout is long enough for the first batch of slow storage or of a
# full shuffle buffer.
USUAL_TIMEOUT = 300.0, "seconds for a batch; after that an error names the worker"
USUAL_PREFETCH = (
    PREFETCH_FACTOR,
    "batches ahead a worker; more cost memory and help if times vary much",
)


@explain_keywords
def build_dataloader(
    dataset: Any,
    batch_size: int | None = 1,
    *,
    shuffle: bool = False,
    num_workers: int | Auto = "auto",
    device: torch.device | str | int | None = None,
    pin_memory: bool | Auto = "auto",
    recycle_memory: bool | Auto = "auto",
    persistent_workers: bool | Auto = "auto",
    prefetch_factor: int | None = None,
    timeout: float | Auto = "auto",
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    sampler: Iterable[Any] | None = None,
    batch_sampler: Iterable[Any] | None = None,
    generator: torch.Generator | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    multiprocessing_context: Any = None,
    in_order: bool = True,
) -> MonitoredDataLoader:
    """Build a DataLoader with the options that fit the machine and the data set.

    What is given is taken as it is; the rest is chosen. ``loader.report()`` has each choice and
    its reason. No sample is drawn to choose. The choices change how fast batches come and not
    which: an iterable data set gets workers by itself only if it says that it divides itself. But a
    data set that you change between epochs needs ``persistent_workers=False``.

    Args:
        dataset: A map-style data set (``__getitem__`` and ``__len__``) or an ``IterableDataset``.
        batch_size: Samples in a batch; None where the data set yields whole batches.
        shuffle: Draw a new order each epoch.
        num_workers: ``"auto"`` takes one core less than this process may use (affinity and cgroup
            quota, divided by torchrun's local ranks), at most 8, and 0 for samples in memory.
        device: Where training runs; None means an accelerator if there is one.
        pin_memory: ``"auto"`` pins only for a CUDA device, with workers and without
            ``recycle_memory``: a thread of torch's then copies each batch to pinned memory. A
            `PrefetchingLoader` needs none of it; a plain loop that copies with
            ``non_blocking=True`` does, and gives True.
        recycle_memory: Let workers make batches in shared memory that is used again once all
            tensors of a batch are gone; see `MonitoredDataLoader`. A `PrefetchingLoader` on a CUDA
            device has it pinned in place. ``"auto"`` does it where there are workers, unless
            ``pin_memory=True`` asks for a copy anyway.
        persistent_workers: ``"auto"`` keeps workers between epochs unless an epoch has fewer
            batches than there are workers, or the data set has ``set_epoch``, which they would not
            see, as nothing else that is changed in it between epochs.
        prefetch_factor: Batches that each worker is ahead; None means 2.
        timeout: Seconds to wait for a batch before the worker is given up; 0 waits for ever.
            ``"auto"`` is 300 when there are workers.
        drop_last: Leave out a last batch that is smaller.
        collate_fn: Samples to a batch; None means torch's.
        sampler: The order of the samples.
        batch_sampler: The samples of each batch, in place of ``batch_size``, ``shuffle``,
            ``sampler`` and ``drop_last``.
        generator: Draws the order, and the seeds of the workers.
        worker_init_fn: Called with the worker's number in each worker. torch gives a worker one
            thread; other libraries' threads are to be limited here.
        multiprocessing_context: ``"fork"``, ``"spawn"``, ``"forkserver"`` or a context.
        in_order: Whether batches come in the order of the sampler whichever worker is ready first.

    Returns:
        A ``torch.utils.data.DataLoader`` with ``report()``. A lost worker is an error that names
        it.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: An impossible value; or an option of workers together with ``num_workers=0``.
        UnsupportedDeviceError: The device is not in this machine.

    Numerics: Exact. The same samples in the same order for any number of workers, but random
        augmentation draws from other generators in other processes.
    Synchronizes: Never.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> loader = build_dataloader(TensorDataset(torch.arange(6.0)), 2, device="cpu")
        >>> [batch[0].tolist() for batch in loader]
        [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
        >>> loader.num_workers  # the samples lie in memory
        0
    """
    _check_dataset(dataset, sampler, batch_sampler)
    if batch_size is not None:
        check_int("batch_size", batch_size, minimum=1)
    for name, flag in (("shuffle", shuffle), ("drop_last", drop_last), ("in_order", in_order)):
        _check_flag(name, flag)
    for name, function, signature in (
        ("collate_fn", collate_fn, "collate_fn(samples)"),
        ("worker_init_fn", worker_init_fn, "worker_init_fn(worker_id)"),
    ):
        if function is not None:
            check_callable(name, function, signature)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator or None, got {generator!r} "
            f"({type(generator).__name__})"
        )
    num_batches = _num_batches(dataset, batch_size, sampler, batch_sampler, drop_last=drop_last)
    choice = _Choice()
    workers = _workers(choice, num_workers, dataset, num_batches, collate_fn)
    recycles = _recycle_memory(choice, recycle_memory, pin_memory, workers, num_workers != "auto")
    _pin_memory(choice, pin_memory, workers, device, recycles=recycles)
    for name, given, chosen in (
        ("persistent_workers", persistent_workers, _persistent(dataset, num_batches, workers)),
        ("prefetch_factor", _check_prefetch(prefetch_factor), USUAL_PREFETCH),
        ("timeout", _check_timeout(timeout), USUAL_TIMEOUT),
        ("multiprocessing_context", multiprocessing_context, (None, "the system's default")),
    ):
        _of_workers(choice, name, given, chosen, workers, asked=num_workers != "auto")
    loader = MonitoredDataLoader(
        dataset,
        batch_size,
        shuffle=shuffle if not isinstance(dataset, IterableDataset) else shuffle or None,
        sampler=sampler,
        batch_sampler=batch_sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        worker_init_fn=worker_init_fn,
        generator=generator,
        in_order=in_order,
        **choice.options,
    )
    loader._report = Report(
        title=f"DataLoader over {type(dataset).__name__}", decisions=tuple(choice.decisions)
    )
    return loader


def usable_cores() -> int:
    """Return how many cores this process may use: affinity and cgroup quota, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # macOS, Windows
        cores = os.cpu_count() or 1
    return max(1, min(cores, _cgroup_cores()))


def _cgroup_cores(memberships: Path = MEMBERSHIPS, root: Path = ROOT) -> int:
    """Return the whole cores that this process's cgroups and their parents grant it."""
    quotas = map(_quota, cgroup_folders("cpu", memberships, root))
    return int(min(min(quotas, default=math.inf), 2**16))


def _quota(folder: Path) -> float:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return math.inf if quota in ("max", "-1") else float(quota) / float(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


# -- Choices ---------------------------------------------------------------------------------------


@dataclass
class _Choice:
    """The options chosen so far, and why."""

    options: dict[str, Any] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)

    def take(self, name: str, value: Any, why: str, outcome: Outcome | None = None) -> None:
        self.options[name] = value
        outcome = outcome or ("applied" if value else "left alone")
        self.decisions.append(Decision(lever=name, outcome=outcome, detail=f"{value}: {why}"))


def _workers(
    choice: _Choice,
    given: int | Auto,
    dataset: Any,
    num_batches: int | None,
    collate_fn: Callable[..., Any] | None,
) -> int:
    if given != "auto":
        if isinstance(given, bool) or not isinstance(given, int):
            raise TypeError(
                f"num_workers must be 'auto' or an int >= 0, got {given!r} ({type(given).__name__})"
            )
        count, why = check_int("num_workers", given, minimum=0), "as asked"
    else:
        count, why = _auto_workers(dataset, num_batches, collate_fn)
    choice.take("num_workers", count, why)
    return count


def _auto_workers(
    dataset: Any, num_batches: int | None, collate_fn: Callable[..., Any] | None
) -> tuple[int, str]:
    if multiprocessing.current_process().daemon:
        return 0, "this process is a worker itself and may start none"
    shards = _num_shards(dataset)
    if isinstance(dataset, IterableDataset) and shards is None:
        return 0, (
            "each worker would iterate over the whole of an iterable data set; if yours divides "
            "itself (torch.utils.data.get_worker_info()), give num_workers"
        )
    if collate_fn is None and _is_in_memory(dataset):
        return 0, "the samples lie in memory; sending them between processes costs more"
    ranks = _local_ranks()
    cores = max(1, usable_cores() // ranks)
    limits = {
        cores - 1: f"of {cores} usable cores"
        + (f" (each of {ranks} ranks)" if ranks > 1 else "")
        + " one is left to the main process",
        MOST_WORKERS: f"there are {cores} cores; whether more than {MOST_WORKERS} workers help has "
        "to be measured: sweep_workers",
    }
    if num_batches is not None:
        limits.setdefault(num_batches if num_batches > 1 else 0, "an epoch has no more batches")
    if shards is not None:
        limits.setdefault(shards if shards > 1 else 0, "the data set has no more shards")
    return min(limits), limits[min(limits)]


def _recycle_memory(
    choice: _Choice, given: bool | Auto, pin_memory: Any, workers: int, asked: bool
) -> bool:
    if given != "auto" and not isinstance(given, bool):
        raise TypeError(f"recycle_memory must be 'auto', True or False, got {given!r}")
    chosen: tuple[bool, str] = (
        True,
        "workers write again into shared memory that the training has finished with",
    )
    if pin_memory is True:
        chosen = False, "pin_memory=True copies each batch to other memory by itself"
    _of_workers(choice, "recycle_memory", given, chosen, workers, asked=asked)
    return bool(choice.options["recycle_memory"])


def _pin_memory(
    choice: _Choice, given: bool | Auto, workers: int, device: Any, *, recycles: bool
) -> None:
    if given != "auto" and not isinstance(given, bool):
        raise TypeError(f"pin_memory must be 'auto', True or False, got {given!r}")
    target = (
        torch.accelerator.current_accelerator(check_available=True)
        if device is None
        else resolve_device(device, nn.Module())
    )
    if given != "auto":
        choice.take("pin_memory", given, "as asked")
    elif target is None or target.type != "cuda":
        kind = "no accelerator" if target is None else target.type
        choice.take("pin_memory", False, f"the batches go to {kind}, which gains nothing by it")
    elif workers == 0:
        why = "without workers the training would wait for it: pinning costs more than it gains"
        choice.take("pin_memory", False, why)
    elif recycles:
        why = (
            "a PrefetchingLoader pins the workers' memory where it is (recycle_memory); a plain "
            "loop may want pin_memory=True"
        )
        choice.take("pin_memory", False, why)
    else:
        choice.take("pin_memory", True, f"copies to {target.type} need not wait; a thread pins")


def _persistent(dataset: Any, num_batches: int | None, workers: int) -> tuple[bool, str]:
    if callable(getattr(dataset, "set_epoch", None)):
        return False, "workers that stay would not see the data set's set_epoch()"
    if num_batches is not None and num_batches < workers:
        return False, f"an epoch has {num_batches} batches, fewer than there are workers"
    return True, "they need not start anew each epoch"


# What torch is given when there are no workers.
_WITHOUT = {
    "persistent_workers": False,
    "prefetch_factor": None,
    "timeout": 0,
    "recycle_memory": False,
    "multiprocessing_context": None,
}


def _of_workers(
    choice: _Choice, name: str, given: Any, chosen: tuple[Any, str], workers: int, *, asked: bool
) -> None:
    """Choose an option that means something only if there are workers."""
    if name == "persistent_workers" and given != "auto" and not isinstance(given, bool):
        raise TypeError(f"persistent_workers must be 'auto', True or False, got {given!r}")
    without = _WITHOUT[name]
    is_given = given is not None and given != "auto"
    if workers > 0:
        choice.take(name, *((given, "as asked") if is_given else chosen))
    elif not is_given or given == without:
        choice.options[name] = without
    elif asked:
        raise ValueError(
            f"{name}={given!r} needs worker processes, but num_workers=0; leave it out, or give "
            "num_workers"
        )
    else:
        why = f"{given!r} was asked for, and there are no workers (see num_workers)"
        choice.take(name, without, why, "stepped aside")


def _num_batches(
    dataset: Any, batch_size: int | None, sampler: Any, batch_sampler: Any, *, drop_last: bool
) -> int | None:
    """Return how many batches an epoch has, None where nobody knows before it ends."""
    try:
        if batch_sampler is not None:
            return len(batch_sampler)
        num_samples = len(dataset if sampler is None else sampler)
    except (TypeError, NotImplementedError):
        return None
    if batch_size is None:
        return num_samples
    return num_samples // batch_size if drop_last else -(-num_samples // batch_size)


def _num_shards(dataset: Any) -> int | None:
    """Return in how many parts an iterable data set divides itself, as those of Hugging Face do."""
    if not isinstance(dataset, IterableDataset):
        return None
    shards = getattr(dataset, "num_shards", getattr(dataset, "n_shards", None))
    return shards if isinstance(shards, int) else None


def _is_in_memory(dataset: Any) -> bool:
    if isinstance(dataset, Subset):
        return _is_in_memory(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return all(map(_is_in_memory, dataset.datasets))
    return isinstance(dataset, TensorDataset | torch.Tensor | list | tuple)


def _local_ranks() -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(text)) if text.isdecimal() else 1


# -- Checks ----------------------------------------------------------------------------------------


def _check_dataset(dataset: Any, sampler: Any, batch_sampler: Any) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, type) or not (
        isinstance(dataset, IterableDataset) or hasattr(dataset, "__getitem__")
    ):
        raise TypeError(
            "dataset must be a map-style data set, with __getitem__ and __len__, or a "
            f"torch.utils.data.IterableDataset, got {kind} {repr(dataset)[:80]}"
        )
    if isinstance(dataset, IterableDataset) or sampler is not None or batch_sampler is not None:
        return
    if not hasattr(dataset, "__len__"):
        raise TypeError(
            f"dataset ({kind}) has no __len__, so its samples cannot be put in an order; write "
            "one, or give a sampler"
        )


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} ({type(value).__name__})")


def _check_prefetch(value: int | None) -> int | None:
    return None if value is None else check_int("prefetch_factor", value, minimum=1)


def _check_timeout(value: Any) -> Any:
    if value == "auto":
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"timeout must be 'auto' or a number of seconds >= 0, got {value!r} "
            f"({type(value).__name__})"
        )
    if not 0 <= value < math.inf:
        raise ValueError(f"timeout must be a finite number of seconds >= 0, got {value}")
    return value
