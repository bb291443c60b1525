"""Checkpoints of a fit: when one is saved, what is in it, and how a killed run goes on.

A checkpoint holds the training state (`TrainStep.state_dict`), the position of the loader and how
far this call of ``fit`` had come, so the same command, started again, does what was left of it and
ends where it would have ended. They are saved between two steps, never within one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

import torch

from torchfast._core.arguments import check_int
from torchfast._core.errors import StateMismatchError
from torchfast.checkpoint import Checkpoint, CheckpointManager
from torchfast.data import PrefetchingLoader
from torchfast.step import TrainStep

logger = logging.getLogger(__name__)

KEPT = 3  # of a run whose folder was given by its path
Target = str | os.PathLike[str] | CheckpointManager
Resume = str | os.PathLike[str] | int | None


@final
@dataclass(frozen=True, kw_only=True)
class FitProgress:
    """How far a call of ``fit`` has come: updates done, and epochs finished."""

    num_steps: int = 0
    num_epochs: int = 0


@final
@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """The arguments of ``Trainer.fit`` about checkpoints, which documents them; checked here."""

    checkpoint: Target | None
    every: int | None
    resume: Resume

    def __post_init__(self) -> None:
        if not isinstance(self.checkpoint, str | os.PathLike | CheckpointManager | None):
            raise TypeError(
                "checkpoint must be a path, a CheckpointManager or None, got "
                f"{self.checkpoint!r} ({type(self.checkpoint).__name__})"
            )
        if self.every is not None:
            check_int("checkpoint_every", self.every, minimum=1)
            if self.checkpoint is None:
                raise ValueError(f"checkpoint_every={self.every} needs checkpoint=, got None")
        if isinstance(self.resume, bool) or not isinstance(
            self.resume, str | os.PathLike | int | None
        ):
            raise TypeError(
                "resume must be 'auto', a step, the path of other checkpoints or None, got "
                f"{self.resume!r} ({type(self.resume).__name__})"
            )
        if self.checkpoint is None and self.resume not in ("auto", None):
            raise ValueError(f"resume={self.resume!r} needs checkpoint=, got None")


@final
class FitCheckpoints:
    """Saves and resumes one call of ``fit``.

    Args:
        options: Where, how often, and what to begin with.
        step: What is trained.
        loader: What it is trained on.

    Raises:
        ValueError: ``resume=None``, and there are checkpoints already.
        CheckpointWriteError: The folder cannot be made.

    Synchronizes: At a save, to see whether the model is finite and to copy the state.
    """

    def __init__(
        self, options: CheckpointOptions, step: TrainStep, loader: PrefetchingLoader
    ) -> None:
        self._options = options
        self._step = step
        self._loader = loader
        self._saved_at: int | None = None
        self._told_of_nan = False
        self._is_own = not isinstance(options.checkpoint, CheckpointManager)
        self._manager: CheckpointManager | None
        if isinstance(options.checkpoint, CheckpointManager):
            self._manager = options.checkpoint
        elif options.checkpoint is not None:
            self._manager = CheckpointManager(options.checkpoint, keep_last=KEPT)
        else:
            self._manager = None

    # -- Resuming ----------------------------------------------------------------------------------

    def resume(self) -> FitProgress:
        """Put trainer and loader where the checkpoint has them, and return how far it had come."""
        found = self._find()
        if found is None:
            return FitProgress()
        progress = self._load(found)
        logger.info("going on from step %d (%s)", self._step.num_steps, found.path)
        return progress

    def _find(self) -> Checkpoint | None:
        manager, resume = self._manager, self._options.resume
        if manager is None:
            return None
        steps = manager.steps()
        if resume is None:
            if steps:
                raise ValueError(
                    f"resume=None begins anew, but {manager.directory} has checkpoints (the newest "
                    f"of step {steps[-1]}), which a later run would go on from; give another "
                    "folder, or resume='auto'"
                )
            return None
        if isinstance(resume, int):
            return manager.load(resume)
        found = manager.load()
        if found is not None or resume == "auto":
            return found
        if not Path(resume).is_dir():
            raise ValueError(
                f"resume={os.fspath(resume)!r} is no folder of checkpoints; give 'auto', a step "
                "or such a folder"
            )
        with CheckpointManager(resume) as other:
            found = other.load()
        if found is None:
            raise ValueError(
                f"resume={os.fspath(resume)!r} has no checkpoint; give 'auto', a step or a folder "
                "of checkpoints"
            )
        return found

    def _load(self, found: Checkpoint) -> FitProgress:
        lacking = {"loader", "fit"} - set(found.state)
        if lacking:
            raise StateMismatchError(
                f"the checkpoint {found.path} lacks {sorted(lacking)}, so it was not saved by fit; "
                "load its parts with CheckpointManager.load() and the load_state_dict() of each"
            )
        # The trainer's first, and whole: it has the generators that the rest of the run draws from.
        self._step.load_state_dict(found.state)
        self._loader.load_state_dict(found.state["loader"])
        self._saved_at = self._step.num_steps
        return FitProgress(**found.state["fit"])

    # -- Saving ------------------------------------------------------------------------------------

    def after_step(self, progress: FitProgress, evaluation: Mapping[str, float] | None) -> None:
        """Save if a checkpoint is due.

        Args:
            progress: How far the call has come.
            evaluation: What an evaluation of exactly this state found, if there was one.
        """
        every = self._options.every
        if every is not None and progress.num_steps % every == 0:
            self.save(progress, evaluation)

    def after_epoch(self, progress: FitProgress, evaluation: Mapping[str, float] | None) -> None:
        """Save unless checkpoints come every so many steps."""
        if self._options.every is None:
            self.save(progress, evaluation, again=True)

    def save(
        self,
        progress: FitProgress,
        evaluation: Mapping[str, float] | None,
        *,
        again: bool = False,
        blocking: bool = False,
    ) -> None:
        """Save what there is now, unless this step was saved.

        Args:
            progress: How far the call has come.
            evaluation: What to save it with, for the manager's ``monitor``.
            again: Replace a checkpoint of this step.
            blocking: Return when it is on the disk.
        """
        if self._manager is None or (self._saved_at == self._step.num_steps and not again):
            return
        if not self._is_finite():
            return
        state = {
            **self._step.state_dict(),
            "loader": self._loader.state_dict(),
            "fit": asdict(progress),
        }
        self._manager.save(state, self._step.num_steps, metrics=evaluation, blocking=blocking)
        self._saved_at = self._step.num_steps

    def _is_finite(self) -> bool:
        """Whether the model is worth keeping: a checkpoint of NaN would replace a good one."""
        tensors = [
            tensor
            for tensor in (*self._step.model.parameters(), *self._step.model.buffers())
            if tensor.is_floating_point() or tensor.is_complex()
        ]
        flags = [tensor.isfinite().all().to(self._step.device) for tensor in tensors]
        if not flags or bool(torch.stack(flags).all()):
            return True
        if not self._told_of_nan:
            self._told_of_nan = True
            logger.warning(
                "at step %d the model holds values that are not finite, so no checkpoint is saved "
                "any more and the last good one is kept; Plan(nonfinite='skip') skips such updates",
                self._step.num_steps,
            )
        return False

    def close(self) -> None:
        """Wait for the last save.

        Raises:
            CheckpointWriteError: It failed.
        """
        if self._manager is None:
            return
        if self._is_own:
            self._manager.close()
        else:
            self._manager.wait()
