"""Writing one checkpoint, and deleting those that it makes needless: in that order.

A checkpoint that takes the place of others is read back and compared with its hashes first, each
file as soon as it is on the disk, while others are still being written. It gets its name only then.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import final

import torch
from torch import Tensor

from torchfast._core.errors import (
    CheckpointCorruptError,
    CheckpointWriteError,
    TorchFastError,
    UnsafeCheckpointError,
)
from torchfast.checkpoint.files import FileEntry, writing
from torchfast.checkpoint.folder import CheckpointFolder
from torchfast.checkpoint.loading import TREE, verify_folder
from torchfast.checkpoint.manifest import SCHEMA, Manifest, read_manifest
from torchfast.checkpoint.retention import Retention
from torchfast.checkpoint.tree import Node

logger = logging.getLogger(__name__)


@final
class Saver:
    """Writes checkpoints into a folder and keeps as many as it is told to."""

    def __init__(self, folder: CheckpointFolder, retention: Retention) -> None:
        self._folder = folder
        self._retention = retention

    def write(
        self, tree: Node, tensors: Mapping[str, Tensor], step: int, metrics: Mapping[str, float]
    ) -> None:
        """Write a checkpoint whole, then delete what is not to be kept.

        Raises:
            CheckpointWriteError: It could not be written, or does not read back.
        """
        from torchfast.checkpoint.storage import write

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

        num_bytes = len(text) + sum(t.numel() * t.element_size() for t in tensors.values())
        prunes = bool(self._surplus(step, {step: metrics}))
        read_back = prunes or step in self._folder
        with (
            writing(self._folder.of(step), num_bytes),
            _reading_back(step),
            self._folder.new(step) as temporary,
        ):
            write({**tensors, TREE: text}, temporary, describe, read_back=read_back)
            if read_back:
                verify_folder(temporary, contents=False)
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

    def _surplus(self, step: int, more: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Return what need not be kept, once ``step`` is there; ``more`` is not there yet."""
        return self._retention.surplus({**self._own_metrics(), **more}, step)

    def _own_metrics(self) -> dict[int, Mapping[str, float]]:
        """Return the metrics of the checkpoints that were saved into this folder."""
        if self._retention.keep_last is None:
            return {}
        identity = self._folder.identity()
        found: dict[int, Mapping[str, float]] = {}
        for step in self._folder.steps():
            # What cannot be read is not known to be ours.
            with suppress(TorchFastError, OSError):
                manifest = read_manifest(self._folder.of(step))
                if manifest.owner == identity:
                    found[step] = manifest.metrics
        return found


@contextmanager
def _reading_back(step: int) -> Iterator[None]:
    try:
        yield
    except (CheckpointCorruptError, UnsafeCheckpointError) as error:
        raise CheckpointWriteError(
            f"the checkpoint of step {step} was written, but does not read back: {error}; it was "
            "taken away, and no older one was deleted: check the disk"
        ) from error
