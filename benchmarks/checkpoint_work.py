"""A training whose checkpoints are measured, and the folder that they go to."""

from __future__ import annotations

import collections
import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.job import MAX_GRAD_NORM, Job
from benchmarks.worker import Mark, drain
from benchmarks.workloads import Size, workload
from torchfast import CheckpointManager, Trainer
from torchfast.fit_checkpoints import CheckpointOptions, FitCheckpoints, FitProgress

WORKLOAD = "llama"
# How far the host runs ahead of the device: as far as a loop that reads its loss now and then.
AHEAD = 2
# Parameters and both moments of AdamW, in float32.
BYTES_PER_PARAMETER = 12
# As many files at once as a save writes.
FILES = 4


@dataclass(frozen=True)
class Settings:
    """How checkpoints are measured.

    Attributes:
        size: ``"full"`` or ``"smoke"``.
        device: ``"cuda"`` or ``"cpu"``.
        plan: The trainer's.
        every: Steps between checkpoints.
        keep: Checkpoints kept.
        around: Steps of a window with one save in it.
        saves: Of each kind, at most.
        pairs: Of windows with checkpoints and without, at most.
    """

    size: Size = "full"
    device: str = "cuda"
    plan: str = "fast"
    every: int = 50
    keep: int = 1
    around: int = 8
    saves: int = 3
    pairs: int = 7

    @property
    def room_bytes(self) -> int:
        """What must be free: the checkpoints that are kept, and the one being written."""
        return (self.keep + 1) * num_parameters(self.size) * BYTES_PER_PARAMETER


def num_parameters(size: Size) -> int:
    """Return the parameters of the model, without memory for it."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in workload(WORKLOAD, size).build().parameters())


class Training:
    """The workload under a trainer, with what ``fit`` does about checkpoints.

    Args:
        settings: What to train, and where.
        folder: For checkpoints.
        seed: Of the weights.
    """

    def __init__(self, settings: Settings, folder: Path, seed: int = 0) -> None:
        self.device = torch.device(settings.device)
        own = workload(WORKLOAD, settings.size)
        torch.manual_seed(seed)
        with self.device:
            model = own.build()
        job = Job(own, model, self.device, lambda _: None)
        self.trainer = Trainer(
            model,
            job.adamw(model, fused=True),
            own.loss_fn if settings.plan == "fast" else job.loss_fn,
            settings.plan,
            max_grad_norm=MAX_GRAD_NORM,
        )
        self.loader = self.trainer.prefetch(job.loader(pinned=True), reuse=True)
        self.manager = CheckpointManager(folder, keep_last=settings.keep)
        options = CheckpointOptions(checkpoint=self.manager, every=None, resume=None)
        self.checkpoints = FitCheckpoints(options, self.trainer._step, self.loader)
        self.saved_step = -1
        self._batches: Iterator[Any] | None = None
        self._marks: collections.deque[Mark] = collections.deque()

    @property
    def replays(self) -> int:
        """How many steps were replays of a graph."""
        return int(self.trainer.report().counters.get("replays", 0))

    def run(self, steps: int) -> list[Tensor]:
        """Do steps and return their losses; the host runs ahead of the device, but not far."""
        if self._batches is None:  # not before a position may have been loaded
            self._batches = iter(self.loader)
        losses = []
        for _ in range(steps):
            losses.append(self.trainer.step(next(self._batches)))
            self._marks.append(Mark(self.device))
            if len(self._marks) > AHEAD:
                self._marks.popleft().wait()
        return losses

    def warm_up(self) -> None:
        """Step until a graph is live, if there is to be one."""
        self.run(5)
        self.drain()

    def step_s(self, steps: int) -> float:
        """Return the seconds of a step, over some of them."""
        self.drain()
        start = time.perf_counter()
        self.run(steps)
        self.drain()
        return (time.perf_counter() - start) / steps

    def save(self, *, blocking: bool = False) -> float:
        """Save as ``fit`` does and return the seconds of the call."""
        start = time.perf_counter()
        self.saved_step = self.trainer.num_steps
        progress = FitProgress(num_steps=self.saved_step)
        self.checkpoints.save(progress, None, blocking=blocking)
        return time.perf_counter() - start

    def until_written(self, write: Write) -> int:
        """Train on until a save is on the disk, and return the steps that this took.

        Raises:
            RuntimeError: There is no such checkpoint, as of a model that holds NaN.
        """
        steps = 0
        while write.is_running:
            self.run(1)
            steps += 1
        write.finish()
        self.drain()
        if self.saved_step not in self.manager.steps():
            raise RuntimeError(f"nothing was saved at step {self.saved_step}")
        return steps

    def drain(self) -> None:
        """Wait for the device."""
        drain(self.device)

    def saved_bytes(self) -> int:
        """Return the size of the newest checkpoint."""
        folder = self.manager.directory / f"step-{self.manager.steps()[-1]}"
        return sum(file.stat().st_size for file in folder.iterdir())

    def close(self) -> None:
        """Wait for the last save, and let go of the graph and of the memory for saves."""
        try:
            self.manager.close()
        finally:
            self.trainer.close()
            self.loader.close()


class Write:
    """Watches, beside the training, when the save that is in flight is on the disk.

    Until it is finished nobody else may ask the manager.
    """

    def __init__(self, manager: CheckpointManager) -> None:
        self._manager = manager
        self._error: BaseException | None = None
        self._start = time.perf_counter()
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it is still being written."""
        return self._thread.is_alive()

    def finish(self) -> float:
        """Wait for its end, and return the seconds it took."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.seconds

    def _wait(self) -> None:
        try:
            self._manager.wait()
        except BaseException as error:
            self._error = error
        self.seconds = time.perf_counter() - self._start


# -- The folder ------------------------------------------------------------------------------------


def roomiest() -> Path:
    """Return the folder for temporary files, of those that a machine has, with most room."""
    places = [Path("/dev/shm"), Path(tempfile.gettempdir()), Path.cwd()]
    usable = [place for place in places if place.is_dir() and os.access(place, os.W_OK)]
    return max(usable, key=lambda place: shutil.disk_usage(place).free)


def file_system(folder: Path) -> str:
    """Return the kind of file system that a folder lies on: "tmpfs", "ext4"."""
    found = "", "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, point, kind, *_ = line.split()
            if folder.resolve().is_relative_to(point) and len(point) >= len(found[0]):
                found = point, kind
    return found[1]


def write_gb_s(folder: Path, num_bytes: int) -> float:
    """Return how fast some files are written at once, until all of them are on the disk."""
    piece = os.urandom(min(num_bytes // FILES, 4 << 20))
    pieces = max(1, num_bytes // FILES // len(piece))
    errors: list[OSError] = []

    def write(path: Path) -> None:
        try:
            with path.open("wb", buffering=0) as file:
                for _ in range(pieces):
                    file.write(piece)
                os.fsync(file.fileno())
        except OSError as error:
            errors.append(error)

    paths = [folder / f"bandwidth-{number}" for number in range(FILES)]
    threads = [threading.Thread(target=write, args=(path,)) for path in paths]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    for path in paths:
        path.unlink(missing_ok=True)
    if errors:
        raise errors[0]
    return FILES * pieces * len(piece) / seconds / 1e9
