"""Checkpoints that a killed run goes on from.

A checkpoint is a folder ``step-N``: the tensors as raw bytes, everything else as JSON, and a
manifest with the size and hash of each file. It is written under another name and renamed when all
of it is on the disk, so a run may be killed at any point, during a save too, and finds the last
whole one. Loading reads each file once and compares it with its hash on the way.

A save copies the state and returns; a thread writes it (`staging.py`). It helps where writing takes
long enough to be noticed. It does not help where the host has no memory for the copy, or where the
next save begins before the last has ended: at most one is in flight, and the next waits for it.

It is built on torch.distributed.checkpoint (`storage.py`). Of many ranks each writes its parts of
what is sharded, rank 0 what all have alike, and each what is its own: the position of its loader
and its generators. Any number of ranks loads it again. They save and load together, and what fails
on one of them fails on all (`saving.py`).

No file of a checkpoint is a pickle, and none is ever unpickled.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, final, overload

from torch import Tensor

from torchfast._core.arguments import check_flag, check_int, explain_keywords
from torchfast._core.errors import (
    CheckpointCorruptError,
    CheckpointWriteError,
    UnsafeCheckpointError,
)
from torchfast._core.rank_group import RankGroup
from torchfast.checkpoint.background import Background
from torchfast.checkpoint.checks import (
    check_only_if,
    check_usable,
    checked_keys,
    checked_metrics,
    problems_of_all,
    refuse_capture,
)
from torchfast.checkpoint.folder import CheckpointFolder, Which, folder_path
from torchfast.checkpoint.loading import read_checkpoint, verify_folder
from torchfast.checkpoint.retention import Mode, Retention
from torchfast.checkpoint.saving import Saver
from torchfast.checkpoint.staging import Stager
from torchfast.checkpoint.state_file import export_state_dict
from torchfast.checkpoint.tree import Whose, flatten, sharded_tensors

logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What `CheckpointManager.load` returns.

    Attributes:
        step: The step that it was saved at.
        state: What was saved; its tensors are on the CPU and nobody else's.
        metrics: What it was saved with.
        path: The folder that it was read from.
        world_size: How many ranks saved it. A rank beyond these has the own parts (generators,
            position) of the rank with its number modulo this one.
    """

    step: int
    state: dict[str, Any] = field(repr=False)
    metrics: Mapping[str, float]
    path: Path
    world_size: int = 1


@final
class CheckpointManager:
    """Saves and loads checkpoints in one folder, and deletes those that are not to be kept.

    A state is a mapping of tensors, numpy arrays, numbers, texts, bytes, None and of dicts, lists,
    tuples and sets of them: ``trainer.state_dict()``, a loader's, ``state_dict()`` of any
    ``torch.optim`` optimizer and scheduler. It comes back equal to the bit, with the same types.
    Tensors come back on the CPU, and those that share memory share it again.

    Without ``keep_last`` nothing is ever deleted. With it, a checkpoint is kept if any of the
    options keeps it; others are deleted after the new one has been read back and compared with its
    hashes. Only what was saved into this folder is deleted: never a checkpoint that was copied into
    it, nor one that is damaged.

    Args:
        directory: The folder, made if it is not there. Leftovers of killed saves are removed.
        keep_last: Keep the last so many.
        keep_every: Keep those whose step is a multiple of this.
        monitor: Keep the best by this metric.
        mode: Whether the best is the one with the least (``"min"``) or largest value.
        keep_best: How many of the best.
        per_rank: Keys of the state whose values each rank keeps for itself. Everything else that
            is not sharded is the same on all ranks, and rank 0's is saved.
        across_ranks: Whether the ranks of a process group save one checkpoint together. False is
            for a manager that one process has for itself.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: A bad number, or ``directory`` is a file.
        RankError: Another rank failed, or cannot be reached.

    Numerics: What is loaded is what was saved, to the bit, NaN payloads included.
    Synchronizes: `save` waits for the device until the state is copied. Nothing else does.

    Example:
        >>> import tempfile
        >>> import torch
        >>> with CheckpointManager(tempfile.mkdtemp(), keep_last=2) as checkpoints:
        ...     for step in (1, 2, 3):
        ...         checkpoints.save({"weight": torch.full((2,), step), "step": step}, step)
        ...     checkpoints.wait()
        ...     print(checkpoints.steps(), checkpoints.load().state)
        [2, 3] {'weight': tensor([3, 3]), 'step': 3}
    """

    @explain_keywords
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        monitor: str | None = None,
        mode: Mode = "min",
        keep_best: int = 1,
        per_rank: Collection[str] = ("loader", "rng"),
        across_ranks: bool = True,
    ) -> None:
        retention = Retention(
            keep_last=keep_last,
            keep_every=keep_every,
            monitor=monitor,
            mode=mode,
            keep_best=keep_best,
        )
        own = checked_keys(per_rank)
        self._folder = CheckpointFolder(folder_path(directory))
        check_flag("across_ranks", across_ranks)
        self._ranks = RankGroup.join() if across_ranks else RankGroup.alone()
        self._whose = Whose(rank=self._ranks.rank, num_ranks=self._ranks.size, own=own)
        self._ranks.together(self._open)
        # Here rather than at the first save: importing DCP takes a second.
        import torchfast.checkpoint.storage  # noqa: F401

        self._saver = Saver(self._folder, retention, self._ranks)
        self._stager = Stager()
        self._background = Background(f"the last checkpoint of {self._folder.path}")
        self._closed = False

    @property
    def directory(self) -> Path:
        """The folder."""
        return self._folder.path

    # -- Saving ------------------------------------------------------------------------------------

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        blocking: bool = False,
        only_if: Tensor | None = None,
    ) -> None:
        """Save ``state`` as the checkpoint of ``step``.

        Returns when the state has been copied; from then on it may change. A save before this one
        that is still being written is waited for first, and if it failed, its error is raised here
        and nothing is saved. A checkpoint of the same step is replaced.

        Args:
            state: What to save.
            step: Updates done; the newest checkpoint is the one with the largest.
            metrics: Host numbers by name, for ``monitor`` and for people.
            blocking: Return when it is on the disk. Takes no second copy of the state.
            only_if: A bool of shape ``()``, on any device: whether the state is worth keeping.
                Where it is False nothing is saved, and a warning says so once. It travels with
                the state, so nobody waits for it. ``fit`` gives whether all parameters are finite.

        Raises:
            TypeError: The state holds something that a checkpoint cannot; nothing was written.
            ValueError: A negative step.
            CheckpointWriteError: This save (if blocking) or the one before it failed; or a CUDA
                graph is being captured.
            ClosedError: After `close`.
            RankError: The manager was made before the process group.

        Synchronizes: Once, with the current stream of each device in the state; not with a CUDA
            device whose free memory is twice the state's there.
        """
        self._check_open()
        step = check_int("step", step, minimum=0)
        try:
            values = checked_metrics(metrics)
            if only_if is not None:
                check_only_if(only_if)
            refuse_capture()
            tree, tensors = flatten(state, self._whose)
            self.wait()
            flag = max(tensors, default="") + "?"  # beyond the last key, so it is none of them
            copied = tensors if only_if is None else {**tensors, flag: only_if}
            staged = None if blocking else self._stager.stage(copied)
        except BaseException as error:
            # The other ranks are about to save, and would wait for this one.
            with suppress(CheckpointWriteError):
                self.wait()
            self._saver.excuse(step, error)
            raise
        if staged is None:
            self._saver.save(tree, tensors, step, values, only_if)
            return

        def write() -> None:
            try:
                copies = staged.arrived()
            except BaseException as error:
                self._saver.excuse(step, error)
                raise
            wanted = copies.pop(flag, None)
            self._saver.save(tree, copies, step, values, wanted)

        self._background.start(write)

    def wait(self) -> None:
        """Wait until the last save is on the disk and what is not to be kept is deleted.

        Raises:
            CheckpointWriteError: It failed. Raised once.
        """
        self._background.wait()

    @property
    def has_failed(self) -> bool:
        """Whether the last save failed, which the next `save`, `wait` or `close` will raise."""
        return self._background.has_failed

    # -- Loading -----------------------------------------------------------------------------------

    @overload
    def load(
        self, step: Literal["latest"] = "latest", *, like: Mapping[str, Any] | None = None
    ) -> Checkpoint | None: ...
    @overload
    def load(
        self, step: int | Literal["best"], *, like: Mapping[str, Any] | None = None
    ) -> Checkpoint: ...
    def load(
        self, step: Which = "latest", *, like: Mapping[str, Any] | None = None
    ) -> Checkpoint | None:
        """Load the newest checkpoint, the best, or that of a step.

        ``"latest"`` takes the largest step. One that is damaged is renamed (``step-N.bad-...``,
        never deleted) with a warning in the log, and the one before it is taken. A step that is
        asked for by number is loaded or raises. Several ranks take the same one: what one of them
        finds damaged none of them takes.

        Args:
            step: ``"latest"``, ``"best"`` (see `best_step`) or a step.
            like: A state whose sharded tensors say how to shard those under the same keys: each
                rank then reads its part only. One in the place of a mapping stands for all tensors
                of its size in there, so ``{"optimizer": {"state": dict(enumerate(parameters))}}``
                shards moments. Without it everything comes back whole, on each rank.

        Returns:
            The checkpoint; for ``"latest"`` None where there is none yet.

        Raises:
            ValueError: There is none of that step, or it is not known which is the best.
            CheckpointCorruptError: That step is damaged; or ``"latest"``, and all of them are.
            UnsafeCheckpointError: A file of that step is a pickle; it was not loaded.
            StateMismatchError: It was written by a newer torchfast, or ``like`` has other sizes.
            CheckpointWriteError: A save that was being written failed.
            RankError: It could not be loaded on another rank, or is not to be seen there.
        """
        self._check_open()
        self.wait()
        placed = None if like is None else sharded_tensors(like)
        if step == "best":  # one of them for all
            step = self._ranks.together(self._saver.best_step)[0]
        if step != "latest":
            return self._ranks.alike(lambda: self._read(self._folder.existing(step), placed))
        bad: dict[int, str] = {}
        for candidate in reversed(self._ranks.gather(self._folder.steps(), "load")[0]):
            found, problems = self._tried(candidate, placed)
            if problems is not None:
                if problems:  # else another process has just deleted it
                    bad[candidate] = problems
                continue
            # Not before: if all of them are bad, the next start is to say so again.
            if bad and self._ranks.is_first:
                told = [f"{text} (now {self._set_aside(at)})" for at, text in bad.items()]
                logger.warning(
                    "going on from step %d, since newer checkpoints are damaged: %s",
                    candidate,
                    "; ".join(told),
                )
            return found
        if bad:
            raise CheckpointCorruptError(
                f"every checkpoint in {self._folder.path} is damaged: "
                f"{'; '.join(bad.values())}; begin anew in another folder, or put a copy here"
            )
        return None

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in order. None is opened."""
        return self._folder.steps()

    def best_step(self) -> int:
        """Return the step whose metric ``monitor`` is the best; of two that are equal the later.

        It is what this process sees in the folder; other ranks are not asked.

        Raises:
            ValueError: No ``monitor`` was given, or no checkpoint has that metric.
        """
        self.wait()
        return self._saver.best_step()

    def verify(self, step: Which = "latest") -> None:
        """Read a checkpoint and compare all of it with its hashes; nothing is changed.

        Raises:
            ValueError: There is none.
            CheckpointCorruptError: It is damaged; the message names the file.
            UnsafeCheckpointError: A file of it is a pickle.
            StateMismatchError: It was written by a newer torchfast.
        """
        self.wait()
        verify_folder(self._folder.of(self._existing(step)))

    def export(
        self, path: str | os.PathLike[str], step: Which = "latest", *, part: str = "model"
    ) -> None:
        """Write one part of a checkpoint into one file, as ``torch.save`` does.

        ``import_state_dict`` reads it back, and so does ``torch.load``.

        Args:
            path: The file; one that is there is replaced.
            step: Which checkpoint.
            part: A key of the state: ``"model"``, or that of averaged weights.

        Raises:
            ValueError: No such step or part, or ``path`` is a folder.
            TypeError: The part is no mapping.
            CheckpointCorruptError: The checkpoint is damaged.
            CheckpointWriteError: The file cannot be written.
        """
        self.wait()
        _, state = read_checkpoint(self._folder.of(self._existing(step)), part)
        export_state_dict(state, path)

    def close(self) -> None:
        """Wait for the last save and give its memory back; a second call does nothing.

        Raises:
            CheckpointWriteError: The last save failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._stager.release()
            self._ranks.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as own:
            if error is None:
                raise
            # The error that is on its way tells more of what went wrong.
            logger.warning("a checkpoint failed too, besides the error that ends the run: %s", own)

    def __repr__(self) -> str:
        return f"CheckpointManager({os.fspath(self.directory)!r}, steps={self.steps()})"

    # -- The parts of a save and of a load ---------------------------------------------------------

    def _existing(self, step: Which) -> int:
        return self._folder.existing(self.best_step() if step == "best" else step)

    def _check_open(self) -> None:
        check_usable(self._ranks, closed=self._closed)

    def _open(self) -> None:
        os.makedirs(self._folder.path, exist_ok=True)
        if self._ranks.is_first:
            self._folder.clean()

    def _tried(
        self, step: int, placed: Mapping[str, Tensor] | None
    ) -> tuple[Checkpoint | None, str | None]:
        """Read a checkpoint on each rank; return it, or what any of them has against it."""
        problem: str | None = None

        def tried() -> Checkpoint | None:
            nonlocal problem
            try:
                return self._read(step, placed)
            except (CheckpointCorruptError, UnsafeCheckpointError) as error:
                problem = str(error) if step in self._folder else ""
                return None

        found = self._ranks.alike(tried)
        problems = problems_of_all(self._ranks, self._folder.of(step), problem)
        # One file that is damaged is found to be so by every rank that reads it.
        return found, "; ".join(dict.fromkeys(filter(None, problems))) if problems else None

    def _read(self, step: int, placed: Mapping[str, Tensor] | None) -> Checkpoint:
        path = self._folder.of(step)
        manifest, state = read_checkpoint(path, rank=self._ranks.rank, like=placed)
        size = manifest.world_size
        return Checkpoint(
            step=step, state=state, metrics=manifest.metrics, path=path, world_size=size
        )

    def _set_aside(self, step: int) -> str:
        try:
            return self._folder.set_aside(step).name
        except OSError as error:
            return f"still in its place: it could not be renamed, {error.strerror}"
