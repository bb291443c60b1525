"""One measurement of a worker sweep, and what is put back after it."""

from __future__ import annotations

import copy
import multiprocessing
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from torchfast._core.generators import set_states, state_of
from torchfast.data.held_generators import held_generators
from torchfast.data.monitored import MonitoredDataLoader, end_workers, named_loss
from torchfast.data.workers import PREFETCH_FACTOR, build_dataloader

JOIN_S = 5.0


class FailedError(Exception):
    """A measurement that came to nothing; the text is for the row."""


@dataclass(frozen=True)
class Trial:
    """Drain a loader for a while."""

    num_workers: int
    window_s: float
    deadline: float

    def drain(self, loader: MonitoredDataLoader) -> tuple[float, float]:
        """Return batches per second, and the seconds until the first one."""
        ahead = self.num_workers * (loader.prefetch_factor or PREFETCH_FACTOR)
        iterator = _Epochs(loader)
        try:
            start = time.perf_counter()
            next(iterator)
            startup_s = time.perf_counter() - start
            for _ in range(ahead):
                if time.perf_counter() >= self.deadline:
                    break
                next(iterator)
            rate = self._rate(iterator)
        except BaseException:
            iterator.end()
            raise
        iterator.finish()
        return rate, startup_s

    def _rate(self, iterator: Iterator[Any]) -> float:
        # Workers that started together deliver together: several such bursts are to be seen.
        least = 4 * max(1, self.num_workers)
        start = now = time.perf_counter()
        count = 0
        while count == 0 or (
            now < self.deadline and (count < least or now < start + self.window_s)
        ):
            next(iterator)
            count += 1
            now = time.perf_counter()
        return count / max(now - start, 1e-9)


@dataclass
class _Epochs:
    """Iterates over a loader, epoch after epoch."""

    loader: MonitoredDataLoader
    iterator: Any = None
    num_batches: int = 0

    def __iter__(self) -> _Epochs:
        return self

    def __next__(self) -> Any:
        if self.iterator is None:
            self.iterator = iter(self.loader)
        while True:
            try:
                batch = next(self.iterator)
            except StopIteration:
                if self.num_batches == 0:
                    raise RuntimeError(
                        "an epoch yielded no batch: is the data set empty?"
                    ) from None
                self.num_batches = 0
                self.iterator = iter(self.loader)
            else:
                self.num_batches += 1
                return batch

    def finish(self) -> None:
        """End the workers after what they are doing."""
        if hasattr(self.iterator, "finish"):
            self.iterator.finish()

    def end(self) -> None:
        """End the workers now."""
        if hasattr(self.iterator, "end"):
            self.iterator.end()
        if self.loader._iterator is not None:
            end_workers(self.loader._iterator)


def drain_in_child(
    answer: Any, trial: Trial, dataset: Any, batch_size: int | None, options: dict[str, Any]
) -> None:
    """Send what a trial without workers measured, or an error's last line."""
    # As in a worker: the threads of a forked process's pool are gone, and waiting for them hangs.
    torch.set_num_threads(1)
    try:
        loader = build_dataloader(dataset, batch_size, num_workers=0, pin_memory=False, **options)
        answer.send(trial.drain(loader))
    except KeyboardInterrupt:
        pass  # the main process has it too
    except Exception as error:
        answer.send(in_a_line(error))


# -- What is put back ------------------------------------------------------------------------------


@contextmanager
def owned_processes(given: Any) -> Iterator[Any]:
    """Yield a context for processes; at the end none that it started is alive."""
    if given is None or isinstance(given, str):
        # Not get_context() itself, which would settle the start method of the whole process.
        method = given or multiprocessing.get_start_method(allow_none=True)
        given = multiprocessing.get_context(method or multiprocessing.get_all_start_methods()[0])
    context = copy.copy(given)
    started = []

    def start(*args: Any, **kwargs: Any) -> Any:
        started.append(given.Process(*args, **kwargs))
        return started[-1]

    context.Process = start
    try:
        yield context
    finally:
        for process in started:
            if process.pid is not None and process.is_alive():
                process.kill()
                process.join(timeout=JOIN_S)


@contextmanager
def preserved_generators(loader: DataLoader[Any]) -> Iterator[None]:
    """Put back the generators that a loader and its parts draw from."""
    found = held_generators(loader, ())
    if loader.generator is not None:  # of whichever device
        found["generator"] = loader.generator
    states = {name: state_of(generator) for name, generator in found.items()}
    try:
        yield
    finally:
        set_states(found, states)


def apart(samplers: tuple[Any, ...], dataset: Any, generator: Any) -> tuple[Any, ...]:
    """Return samplers to iterate, so that what the given ones count and draw stays theirs.

    They are copies, which share the data set, for its size, and ``generator``. Those that cannot be
    copied are returned themselves.
    """
    shared = [dataset, generator, *_values(dataset)]
    for sampler in samplers:
        shared += [value for value in _values(sampler) if isinstance(value, Dataset)]
    try:
        return copy.deepcopy(samplers, {id(each): each for each in shared})
    except Exception:  # a lock, a file, a connection
        return samplers


def _values(holder: Any) -> Iterable[Any]:
    return tuple(getattr(holder, "__dict__", {}).values())


@contextmanager
def unadvised_numbers() -> Iterator[None]:
    """Try more workers than torch advises without its warning: that is the question here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


def in_a_line(error: BaseException) -> str:
    """Return the kind and the last line, which is where an error of a worker has its own."""
    error = named_loss(error)
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, FailedError) or len(lines) > 1:
        return lines[-1].strip()
    return f"{type(error).__name__}: {lines[0]}"
