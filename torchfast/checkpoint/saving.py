"""Writing one checkpoint, and deleting those that it makes needless: in that order.

A checkpoint that takes the place of others is read back and compared with its hashes first, each
file as soon as it is on the disk, while others are still being written. It gets its name only then.

Where several ranks write one, rank 0 makes the folder, and gives it its name when all have written
their files. After each part of it every rank tells the others how it went: so a save that fails on
one fails on all of them, and one that succeeds on one is there for all. A rank that is killed is
missed at the next such moment at the latest; then nothing gets its name either.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import Tensor

from torchfast._core.errors import (
    CheckpointCorruptError,
    CheckpointWriteError,
    RankError,
    TorchFastError,
    UnsafeCheckpointError,
)
from torchfast._core.local import local
from torchfast._core.rank_group import RankGroup
from torchfast.checkpoint.files import FileEntry, writing
from torchfast.checkpoint.folder import CheckpointFolder
from torchfast.checkpoint.loading import tree_name, verify_folder
from torchfast.checkpoint.manifest import SCHEMA, Manifest, read_manifest
from torchfast.checkpoint.retention import Retention
from torchfast.checkpoint.sharded import is_sharded
from torchfast.checkpoint.tree import Node

logger = logging.getLogger(__name__)


@final
class Saver:
    """Writes checkpoints into a folder and keeps as many as it is told to.

    Args:
        folder: Where to.
        retention: Which to keep.
        ranks: Who writes; all of them make the same calls.
    """

    def __init__(self, folder: CheckpointFolder, retention: Retention, ranks: RankGroup) -> None:
        self._folder = folder
        self._retention = retention
        self._ranks = ranks
        self._told_of_unwanted = False

    def save(
        self,
        tree: Node,
        tensors: Mapping[str, Tensor],
        step: int,
        metrics: Mapping[str, float],
        only_if: Tensor | None,
    ) -> None:
        """Write a checkpoint, if all ranks find it worth keeping; they are about to save it too.

        Raises:
            CheckpointWriteError: It could not be written, or does not read back; on any rank. Or
                one could not begin, or they save different steps.
        """
        if self._agree(step, wanted=only_if is None or bool(only_if)):
            self._write(tree, tensors, step, metrics)
        elif not self._told_of_unwanted and self._ranks.is_first:
            self._told_of_unwanted = True
            logger.warning(
                "the state of step %d is not worth keeping (only_if is False; for fit: parameters "
                "are not finite), so nothing is saved while that is so, and the last good "
                "checkpoint stays; Plan(nonfinite='skip') skips updates that spoil a model",
                step,
            )

    def _agree(self, step: int, *, wanted: bool) -> bool:
        """Return whether all ranks want to save."""
        if self._ranks.size == 1:
            return wanted
        with _naming_ranks(step):
            said = self._ranks.gather((step, wanted, None), f"save step {step}")
        failed = [f"rank {rank}: {text}" for rank, (_, _, text) in enumerate(said) if text]
        if failed:
            raise CheckpointWriteError(
                f"the checkpoint of step {step} could not be begun on every rank "
                f"({'; '.join(failed)}); nothing was written"
            )
        steps = [each for each, _, _ in said]
        if len(set(steps)) > 1:
            raise CheckpointWriteError(
                f"the ranks save different steps, by rank {steps}; save at the same step on all "
                "of them. Nothing was written"
            )
        return all(each for _, each, _ in said)

    def excuse(self, step: int, error: BaseException) -> None:
        """Tell the other ranks, which are about to `save`, that this one cannot take part."""
        if self._ranks.size > 1:
            with suppress(RankError):
                self._ranks.gather((step, False, f"{type(error).__name__}: {error}"))

    def _write(
        self, tree: Node, tensors: Mapping[str, Tensor], step: int, metrics: Mapping[str, float]
    ) -> None:
        """Write a checkpoint whole, then delete what is not to be kept."""
        from torchfast.checkpoint.storage import write

        ranks = self._ranks
        text = json.dumps(tree).encode("ascii")

        def describe(files: Mapping[str, FileEntry], world_size: int) -> Manifest:
            return Manifest(
                schema=SCHEMA,
                step=step,
                world_size=world_size,
                owner=self._folder.identity(),
                saved_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                torch=str(torch.__version__),
                metrics=metrics,
                files=files,
            )

        parts = map(local, tensors.values())
        num_bytes = len(text) + sum(part.numel() * part.element_size() for part in parts)
        with _naming_ranks(step), ExitStack() as stack:
            stack.enter_context(self._explained(step, num_bytes))

            def begin() -> _Begun | None:
                if not ranks.is_first:
                    return None
                prunes = bool(self._surplus(step, {step: metrics}))
                read_back = prunes or step in self._folder
                temporary = stack.enter_context(self._folder.new(step))
                return _Begun(
                    temporary.name,
                    prunes,
                    read_back,
                    {k for k, t in tensors.items() if is_sharded(t)},
                )

            begun = ranks.together(begin)[0]
            assert begun is not None
            temporary = self._folder.path / begun.name

            if ranks.size > 1:
                ranks.together(lambda: _check_shared(temporary))
            write(
                # Of what is one tensor under several names, rank 0 has said which it is stored by.
                {
                    **{k: t for k, t in tensors.items() if k in begun.sharded or not is_sharded(t)},
                    tree_name(ranks.rank): text,
                },
                temporary,
                describe,
                ranks=ranks,
                # So that the other ranks are told what the system had to say.
                explained=lambda: self._explained(step, num_bytes),
                read_back=begun.read_back,
            )

            def end() -> None:
                if ranks.is_first and begun.read_back:
                    verify_folder(temporary, contents=False)
                stack.close()  # on rank 0 this gives the folder its name
                if ranks.is_first:
                    self._settle(step, prunes=begun.prunes)

            ranks.together(end)

    def _settle(self, step: int, *, prunes: bool) -> None:
        """Delete what the checkpoint of ``step``, which is there now, makes needless."""
        newest = max(self._folder.steps(), default=step)
        if newest > step:
            logger.warning(
                "step %d was saved, but %s has step %d, which load() will take: move what is newer "
                "away to go on from the older one",
                step,
                self._folder.path,
                newest,
            )
        if prunes:
            self._prune(step)

    @contextmanager
    def _explained(self, step: int, num_bytes: int) -> Iterator[None]:
        with writing(self._folder.of(step), num_bytes), _reading_back(step):
            yield

    def _prune(self, step: int) -> None:
        """Delete what is not to be kept; the checkpoint of ``step`` has been read back."""
        for old in self._surplus(step, {}):
            try:
                self._folder.delete(old)
            except OSError as error:
                logger.warning(
                    "%s could not be deleted (%s); delete it yourself if the disk fills",
                    self._folder.of(old),
                    error.strerror,
                )

    def best_step(self) -> int:
        """Return the step with the best metric; see `CheckpointManager.best_step`."""
        monitor, metrics = self._retention.monitor, dict(self._metrics())
        if not (best := self._retention.best(metrics)):
            raise ValueError(
                f"no checkpoint in {self._folder.path} has the metric {monitor!r} that is "
                "monitored; save with metrics=..., as fit does where it evaluates"
            )
        return best[0]

    def _surplus(self, step: int, more: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Return what need not be kept, once ``step`` is there; ``more`` is not there yet."""
        return self._retention.surplus({**self._own_metrics(), **more}, step)

    def _own_metrics(self) -> dict[int, Mapping[str, float]]:
        """Return the metrics of the checkpoints that were saved into this folder."""
        if self._retention.keep_last is None:
            return {}
        return dict(self._metrics(owner=self._folder.identity()))

    def _metrics(self, owner: str | None = None) -> Iterator[tuple[int, Mapping[str, float]]]:
        """Yield the metrics of each checkpoint that can be read, of an owner or of all."""
        for step in self._folder.steps():
            # What cannot be read is not known to be ours.
            with suppress(TorchFastError, OSError):
                manifest = read_manifest(self._folder.of(step))
                if owner in (None, manifest.owner):
                    yield step, manifest.metrics


@final
class _Begun(NamedTuple):
    """What rank 0 has decided about a save.

    Attributes:
        name: Of the temporary folder.
        prunes: Whether others are deleted afterwards.
        read_back: Whether what was written is read again.
        sharded: The keys of the sharded tensors.
    """

    name: str
    prunes: bool
    read_back: bool
    sharded: set[str]


def _check_shared(temporary: Path) -> None:
    if not temporary.is_dir():
        raise CheckpointWriteError(
            f"{temporary} was made by rank 0 and is not to be seen on rank "
            f"{torch.distributed.get_rank()}; give all ranks a folder on storage that they share"
        )


@contextmanager
def _naming_ranks(step: int) -> Iterator[None]:
    try:
        yield
    except RankError as error:
        raise CheckpointWriteError(
            f"the checkpoint of step {step} could not be written by all ranks: {error}. What was "
            "there before is as it was"
        ) from error


@contextmanager
def _reading_back(step: int) -> Iterator[None]:
    try:
        yield
    except (CheckpointCorruptError, UnsafeCheckpointError) as error:
        raise CheckpointWriteError(
            f"the checkpoint of step {step} was written, but does not read back: {error}; it was "
            "taken away, and no older one was deleted: check the disk"
        ) from error
