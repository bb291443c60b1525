"""Checkpoints that a killed run goes on from.

A checkpoint is a folder ``step-N``: the tensors as raw bytes, everything else as JSON, and a
manifest with the size and hash of each file. It is written under another name and renamed when all
of it is on the disk, so a run may be killed at any point, during a save too, and finds the last
whole one. Loading reads each file once and compares it with its hash on the way.

A save copies the state and returns; a thread writes it (`staging.py`). It helps where writing takes
long enough to be noticed. It does not help where the host has no memory for the copy, or where the
next save begins before the last has ended: at most one is in flight, and the next waits for it.

It is built on torch.distributed.checkpoint (`storage.py`). One process saves and loads; the layout
has room for many ranks. No file of a checkpoint is a pickle, and none is ever unpickled.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, final, overload

import torch
from torch import Tensor

from torchfast._core.arguments import check_int, explain_keywords
from torchfast._core.device import is_capturing
from torchfast._core.errors import (
    CheckpointCorruptError,
    CheckpointWriteError,
    ClosedError,
    UnsafeCheckpointError,
)
from torchfast.checkpoint.background import Background
from torchfast.checkpoint.folder import CheckpointFolder, Step, folder_path
from torchfast.checkpoint.loading import read_checkpoint, verify_folder
from torchfast.checkpoint.retention import Mode, Retention
from torchfast.checkpoint.saving import Saver
from torchfast.checkpoint.staging import Stager
from torchfast.checkpoint.state_file import export_state_dict
from torchfast.checkpoint.tree import flatten

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
    """

    step: int
    state: dict[str, Any] = field(repr=False)
    metrics: Mapping[str, float]
    path: Path


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

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: A bad number, or ``directory`` is a file.

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
    ) -> None:
        retention = Retention(
            keep_last=keep_last,
            keep_every=keep_every,
            monitor=monitor,
            mode=mode,
            keep_best=keep_best,
        )
        self._folder = CheckpointFolder(folder_path(directory))
        os.makedirs(self._folder.path, exist_ok=True)
        self._folder.clean()
        # Here rather than at the first save: importing DCP takes a second.
        import torchfast.checkpoint.storage  # noqa: F401

        self._saver = Saver(self._folder, retention)
        self._stager = Stager()
        self._background = Background(f"the last checkpoint of {self._folder.path}")
        self._told_of_unwanted = False
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

        Synchronizes: Once, with the current stream of each device in the state; not with a CUDA
            device whose free memory is twice the state's there.
        """
        self._check_open()
        step = check_int("step", step, minimum=0)
        values = _checked_metrics(metrics)
        if only_if is not None:
            _check_flag(only_if)
        _refuse_capture()
        tree, tensors = flatten(state)
        self.wait()
        if blocking:
            if self._is_wanted(only_if, step):
                self._saver.write(tree, tensors, step, values)
            return
        flag = max(tensors, default="") + "?"  # beyond the last key, so it is none of them
        staged = self._stager.stage(tensors if only_if is None else {**tensors, flag: only_if})

        def write() -> None:
            staged.arrived()
            if self._is_wanted(staged.tensors.pop(flag, None), step):
                self._saver.write(tree, staged.tensors, step, values)

        self._background.start(write)

    def wait(self) -> None:
        """Wait until the last save is on the disk and what is not to be kept is deleted.

        Raises:
            CheckpointWriteError: It failed. Raised once.
        """
        self._background.wait()

    def _is_wanted(self, only_if: Tensor | None, step: int) -> bool:
        if only_if is None or bool(only_if):
            return True
        if not self._told_of_unwanted:
            self._told_of_unwanted = True
            logger.warning(
                "the state of step %d is not worth keeping (only_if is False; for fit: parameters "
                "are not finite), so nothing is saved while that is so, and the last good "
                "checkpoint stays; Plan(nonfinite='skip') skips updates that spoil a model",
                step,
            )
        return False

    @property
    def has_failed(self) -> bool:
        """Whether the last save failed, which the next `save`, `wait` or `close` will raise."""
        return self._background.has_failed

    # -- Loading -----------------------------------------------------------------------------------

    @overload
    def load(self, step: Literal["latest"] = "latest") -> Checkpoint | None: ...
    @overload
    def load(self, step: int) -> Checkpoint: ...
    def load(self, step: Step = "latest") -> Checkpoint | None:
        """Load the newest checkpoint, or that of a step.

        ``"latest"`` takes the largest step. One that is damaged is renamed (``step-N.bad-...``,
        never deleted) with a warning in the log, and the one before it is taken. A step that is
        asked for by number is loaded or raises.

        Args:
            step: ``"latest"`` or a step.

        Returns:
            The checkpoint; for ``"latest"`` None where there is none yet.

        Raises:
            ValueError: There is none of that step.
            CheckpointCorruptError: That step is damaged; or ``"latest"``, and all of them are.
            UnsafeCheckpointError: A file of that step is a pickle; it was not loaded.
            StateMismatchError: It was written by a newer torchfast.
            CheckpointWriteError: A save that was being written failed.
        """
        self._check_open()
        self.wait()
        if step != "latest":
            return self._read(self._folder.existing(step))
        bad: dict[int, Exception] = {}
        for candidate in reversed(self._folder.steps()):
            try:
                found = self._read(candidate)
            except (CheckpointCorruptError, UnsafeCheckpointError) as error:
                if candidate in self._folder:  # else another process has just deleted it
                    bad[candidate] = error
                continue
            if bad:
                # Not before: if all of them are bad, the next start is to say so again.
                told = [f"{error} (now {self._set_aside(at)})" for at, error in bad.items()]
                logger.warning(
                    "going on from step %d, since newer checkpoints are damaged: %s",
                    candidate,
                    "; ".join(told),
                )
            return found
        if bad:
            raise CheckpointCorruptError(
                f"every checkpoint in {self._folder.path} is damaged: "
                f"{'; '.join(map(str, bad.values()))}; begin anew in another folder, or put a copy "
                "here"
            )
        return None

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in order. None is opened."""
        return self._folder.steps()

    def verify(self, step: Step = "latest") -> None:
        """Read a checkpoint and compare all of it with its hashes; nothing is changed.

        Raises:
            ValueError: There is none.
            CheckpointCorruptError: It is damaged; the message names the file.
            UnsafeCheckpointError: A file of it is a pickle.
            StateMismatchError: It was written by a newer torchfast.
        """
        self.wait()
        verify_folder(self._folder.of(self._folder.existing(step)))

    def export(
        self, path: str | os.PathLike[str], step: Step = "latest", *, part: str = "model"
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
        _, state = read_checkpoint(self._folder.of(self._folder.existing(step)), part)
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

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(
                "this CheckpointManager was closed; make a new one to save or load again"
            )

    def _read(self, step: int) -> Checkpoint:
        path = self._folder.of(step)
        manifest, state = read_checkpoint(path)
        return Checkpoint(step=step, state=state, metrics=manifest.metrics, path=path)

    def _set_aside(self, step: int) -> str:
        try:
            return self._folder.set_aside(step).name
        except OSError as error:
            return f"still in its place: it could not be renamed, {error.strerror}"


def _checked_metrics(metrics: object) -> dict[str, float]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"metrics must be a mapping such as {{'loss': 2.5}}, got {type(metrics).__name__}"
        )
    for name, value in metrics.items():
        if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(
                f"metrics[{name!r}] must be a host number under a str, got {type(value).__name__}; "
                "use .item() on a tensor"
            )
    return {name: float(value) for name, value in metrics.items()}


def _check_flag(only_if: object) -> None:
    if not isinstance(only_if, Tensor) or only_if.dtype != torch.bool or only_if.shape:
        found = type(only_if).__name__
        if isinstance(only_if, Tensor):
            found = f"{tuple(only_if.shape)} of {only_if.dtype}"
        raise TypeError(
            f"only_if must be a bool tensor of shape (), got {found}; give tensor.all(), or "
            "torch.tensor(flag)"
        )


def _refuse_capture() -> None:
    if is_capturing():
        raise CheckpointWriteError(
            "save() was called while a CUDA graph is being captured, where nothing can be "
            "copied to the host; save before or after the capture"
        )
