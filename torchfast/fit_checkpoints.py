"""Checkpoints of a fit: when one is saved, what is in it, and how a killed run goes on.

A checkpoint holds the training state (`TrainStep.state_dict`), the position of the loader and how
far this call of ``fit`` had come, so the same command, started again, does what was left of it and
ends where it would have ended. They are saved between two steps, never within one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union, final

import torch
from torch import Tensor

from torchfast import checkpoint as checkpoints
from torchfast._core.arguments import check_int
from torchfast._core.errors import CheckpointWriteError, StateMismatchError
from torchfast._core.local import local
from torchfast._core.rng import seed_everything
from torchfast.checkpoint.sharded import is_sharded
from torchfast.data import PrefetchingLoader
from torchfast.step import TrainStep

if TYPE_CHECKING:
    from torchfast.checkpoint import Checkpoint, CheckpointManager

logger = logging.getLogger(__name__)

KEPT = 3  # of a run whose folder was given by its path
# Not by |, which takes no name of a class that is imported when one is made.
Target: TypeAlias = Union[str, os.PathLike[str], "CheckpointManager"]
Resume = str | os.PathLike[str] | int | None


@final
@dataclass(frozen=True, kw_only=True)
class FitProgress:
    """How far a call of ``fit`` has come.

    Attributes:
        num_steps: Updates done.
        num_epochs: Epochs finished.
        evaluated_at: Updates done at the last evaluation that was due; -1 before one was.
    """

    num_steps: int = 0
    num_epochs: int = 0
    evaluated_at: int = -1


@final
@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """The arguments of ``Trainer.fit`` about checkpoints, which documents them; checked here."""

    checkpoint: Target | None
    every: int | None
    resume: Resume

    def __post_init__(self) -> None:
        is_folder = isinstance(self.checkpoint, str | os.PathLike | None)
        if not (is_folder or isinstance(self.checkpoint, checkpoints.CheckpointManager)):
            raise TypeError(
                "checkpoint must be a path, a CheckpointManager or None, got "
                f"{self.checkpoint!r} ({type(self.checkpoint).__name__})"
            )
        if self.checkpoint == "":
            raise ValueError("checkpoint is an empty path; name a folder, or give None")
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
        self._saved: tuple[FitProgress, bool] | None = None
        self._is_own = False
        self._manager: CheckpointManager | None = None
        if isinstance(options.checkpoint, str | os.PathLike):
            self._is_own = True
            self._manager = checkpoints.CheckpointManager(
                options.checkpoint, keep_last=KEPT, across_ranks=step.ranks.are_many
            )
        elif options.checkpoint is not None:
            self._manager = options.checkpoint
        scheduler = step.lr_scheduler
        if self._manager is not None and not (
            scheduler is None or hasattr(scheduler, "load_state_dict")
        ):
            raise TypeError(
                f"lr_scheduler ({type(scheduler).__name__}) has no state_dict and load_state_dict, "
                "so a resumed run would begin its schedule again; give it both"
            )

    # -- Resuming ----------------------------------------------------------------------------------

    def resume(self) -> FitProgress:
        """Put trainer and loader where the checkpoint has them, and return how far it had come."""
        found = self._find()
        if found is None:
            return FitProgress()
        if self._step.num_steps > 0:
            raise ValueError(
                f"the trainer has done {self._step.num_steps} steps already, which {found.path} "
                "would replace; build the trainer anew to go on from it, or give this call a "
                "folder of its own"
            )
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
            return manager.load(resume, like=self._placed())
        found = manager.load(like=self._placed())
        if found is not None or resume == "auto":
            return found
        if not Path(resume).is_dir():
            raise ValueError(
                f"resume={os.fspath(resume)!r} is no folder of checkpoints; give 'auto', a step "
                "or such a folder"
            )
        with checkpoints.CheckpointManager(resume, across_ranks=self._step.ranks.are_many) as other:
            found = other.load(like=self._placed())
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
        known = {field.name for field in fields(FitProgress)}
        if set(found.state["fit"]) != known:
            raise StateMismatchError(
                f"the checkpoint {found.path} counts {sorted(found.state['fit'])}, and this "
                f"torchfast counts {sorted(known)}; go on with the version that saved it"
            )
        self._loader.check_state_dict(found.state["loader"])  # before anything is changed
        # The trainer's first, and whole: it has the generators that the rest of the run draws from.
        self._step.load_state_dict(found.state)
        self._loader.load_state_dict(found.state["loader"])
        if self._step.ranks.rank >= found.world_size:
            self._draw_apart()
        progress = FitProgress(**found.state["fit"])
        self._saved = progress, bool(found.metrics)
        return progress

    def _placed(self) -> dict[str, Any] | None:
        """Return how the state is sharded, so that each rank reads its part only."""
        parameters = [p for group in self._step.optimizer.param_groups for p in group["params"]]
        if not any(map(is_sharded, parameters)):
            return None
        # Before the first step an optimizer has no moments yet; they are sharded as what they are
        # of, under whose number they are saved.
        return {**self._step.state_dict(), "optimizer": {"state": dict(enumerate(parameters))}}

    def _draw_apart(self) -> None:
        """Give a rank that the checkpoint does not know random numbers of its own.

        It has those of a rank that it does know, and would draw the same as that one.
        """
        seed = int(torch.randint(2**62, (), device="cpu")) + self._step.ranks.rank
        self._step.state.beside.draw_apart(seed)
        seed_everything(seed)

    # -- Saving ------------------------------------------------------------------------------------

    @property
    def are_on(self) -> bool:
        """Whether any are saved."""
        return self._manager is not None

    def after_step(self, progress: FitProgress, evaluation: Mapping[str, float] | None) -> None:
        """Save if a checkpoint is due.

        Args:
            progress: How far the call has come.
            evaluation: What an evaluation of exactly this state found, if there was one.

        Raises:
            CheckpointWriteError: This save failed, or the one before it, of which it is heard now.
        """
        if self._manager is None:
            return
        every = self._options.every
        # Ranks hear of a failure at different times, but save at the same step: the next one due.
        failed = self._manager.has_failed and not self._step.ranks.are_many
        if failed or (every is not None and progress.num_steps % every == 0):
            self.save(progress, evaluation)

    def after_epoch(self, progress: FitProgress, evaluation: Mapping[str, float] | None) -> None:
        """Save if checkpoints come after each epoch, or one of this step was saved before it."""
        was_saved = self._saved is not None and self._saved[0].num_steps == progress.num_steps
        if self._options.every is None or was_saved:
            self.save(progress, evaluation)

    def save(
        self,
        progress: FitProgress,
        evaluation: Mapping[str, float] | None,
        *,
        blocking: bool = False,
    ) -> None:
        """Save what there is now, unless just this was saved.

        Args:
            progress: How far the call has come.
            evaluation: What to save it with, for the manager's ``monitor``.
            blocking: Return when it is on the disk.

        Raises:
            CheckpointWriteError: This save failed, or the one before it; then this one was tried.
        """
        manager = self._manager
        key = progress, bool(evaluation)
        if manager is None:
            return
        if self._saved == key:
            if self._step.ranks.are_many:
                manager.wait()  # raises on all of them, or on none
            if not manager.has_failed:
                return
        state = {
            **self._step.state_dict(),
            "loader": self._loader.state_dict(),
            "fit": asdict(progress),
        }
        step = self._step.num_steps
        is_finite = self._is_finite()
        try:
            manager.save(state, step, metrics=evaluation, blocking=blocking, only_if=is_finite)
        except CheckpointWriteError:
            # The error may be that of the save before. The disk may have room again, and nothing
            # newer than that will come.
            with suppress(CheckpointWriteError):
                manager.save(state, step, metrics=evaluation, blocking=True, only_if=is_finite)
            raise
        self._saved = key

    def _is_finite(self) -> Tensor | None:
        """Return whether the model is worth keeping: a checkpoint of NaN would replace a good one.

        Synchronizes: Never; the flag is read where the checkpoint is written.
        """
        # Not the buffers: a mask may hold infinities on purpose. Nor dtypes of a byte, which know
        # no infinity, or no isfinite().
        flags = [
            # Of a sharded one, this rank's part; one rank that says no is enough.
            parameter.isfinite().all().to(self._step.device)
            for parameter in map(local, self._step.model.parameters())
            if parameter.dtype.itemsize > 1
            and (parameter.is_floating_point() or parameter.is_complex())
        ]
        return torch.stack(flags).all() if flags else None

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

    def abandon(self) -> None:
        """Let a manager of our own go while another error is on its way."""
        if self._manager is None or not self._is_own:
            return  # the user's manager keeps its error for the user
        try:
            self._manager.close()
        except Exception as error:
            logger.warning("a checkpoint failed too, besides the error that ends fit: %s", error)
