"""The folder of checkpoints: whole ones under their names, everything else under another.

::

    run/
      step-100/                 a checkpoint; a folder gets this name only when all of it is on disk
      step-200/
      step-300.tmp-3f2a...      being written, or left by a process that was killed
      step-300.tmp-3f2a....lock held by the process that writes it, and let go by its end
      step-100.old-9c41...      the one before it of this step, while it is replaced
      step-150.bad-77d0...      found damaged and set aside; never deleted
      latest                    the name of the last one written, for people and scripts
      folder-5b1e....id         empty; its name is the id of this folder

The name is the commit: written under a temporary name, every file and the manifest put on the disk,
renamed, the rename put on the disk, and ``latest`` after it. A kill at any point leaves either no
new checkpoint or a whole one. Which is the newest is told by the number in the name, never by a
time.

What is left by a process that is gone is removed by the next that opens the folder. Whether it is
gone is told by the lock, which the system releases whatever the end was; a file system without
locks keeps the leftovers.
"""

from __future__ import annotations

import fcntl
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal, final

from torchfast._core.arguments import check_int
from torchfast._core.replacing import replacing, write_all
from torchfast.checkpoint.files import make_folder, remove_tree, sync_folder

Step = int | Literal["latest"]
Which = Step | Literal["best"]
LATEST: Final = "latest"
_SHOWN: Final = 10
_STEP: Final = re.compile(r"step-(0|[1-9]\d{0,18})\Z")
_IDENTITY: Final = re.compile(r"folder-([0-9a-f]{32})\.id\Z")
_LEFTOVER: Final = re.compile(r"step-(\d+)\.(tmp|old)-([0-9a-f]{32})(\.lock|\.latest)?\Z")


def folder_path(directory: object) -> Path:
    """Return the absolute path of a folder of checkpoints.

    Raises:
        TypeError: No path.
        ValueError: It is a file.
    """
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(f"directory must be a path, got {directory!r} ({type(directory).__name__})")
    # Absolute at once: the working directory may change or go.
    path = Path(os.path.abspath(os.fsdecode(os.fspath(directory))))
    if path.exists() and not path.is_dir():
        raise ValueError(
            f"directory={os.fspath(path)!r} is a file, expected a folder of checkpoints; to read a "
            "file of weights use import_state_dict"
        )
    return path


@final
class CheckpointFolder:
    """A folder of checkpoints, and the operations that leave it whole.

    Args:
        path: An absolute path; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __contains__(self, step: int) -> bool:
        return self.of(step).is_dir()

    def of(self, step: int) -> Path:
        """Return where the checkpoint of a step lies."""
        return self.path / f"step-{step}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in order; none is opened."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        found = [int(match[1]) for match in map(_STEP.match, names) if match]
        return sorted(step for step in found if step in self)

    def existing(self, step: Step) -> int:
        """Return ``step``, or the newest for ``"latest"``, if there is a checkpoint of it.

        Raises:
            ValueError: There is none.
        """
        steps = self.steps()
        if step == "latest" and steps:
            return steps[-1]
        if step != "latest" and check_int("step", step, minimum=0) in steps:
            return int(step)
        raise ValueError(
            f"step={step!r} is not in {self.path}, which has {_listed(steps)}; take one of "
            "these, or check the folder"
        )

    def identity(self) -> str:
        """Return the folder's id, which it gets when it is first asked.

        A checkpoint that was copied in from elsewhere carries another, and is not ours to delete.
        """
        names = sorted(os.listdir(self.path))
        found = next((match[1] for match in map(_IDENTITY.match, names) if match), None)
        if found is not None:
            return found
        identity = uuid.uuid4().hex
        # The name is all of it: a file that has contents could be found without them.
        path = self.path / f"folder-{identity}.id"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
        return identity

    @contextmanager
    def new(self, step: int) -> Iterator[Path]:
        """Enter a temporary folder that becomes the checkpoint of ``step`` if the body succeeds."""
        number, lock = self._locked(step)
        temporary = self.path / f"step-{step}.tmp-{number}"
        try:
            make_folder(temporary)
            yield temporary
            sync_folder(temporary)
            self._install(temporary, step, number)
            self._point_latest(step, number)
        except BaseException:
            # Room first: this may well be why it failed.
            with suppress(OSError):
                remove_tree(temporary)
            raise
        finally:
            with suppress(OSError):
                os.unlink(self._lock_path(step, number))
            os.close(lock)

    def delete(self, step: int) -> None:
        """Delete a checkpoint: first its name, so that half of one is never found under it."""
        temporary = self.path / f"step-{step}.tmp-{uuid.uuid4().hex}"
        os.rename(self.of(step), temporary)
        sync_folder(self.path)
        with suppress(FileNotFoundError):  # somebody else may be cleaning up
            remove_tree(temporary)

    def set_aside(self, step: int) -> Path:
        """Give a damaged checkpoint another name, under which it is neither loaded nor deleted."""
        aside = self.path / f"step-{step}.bad-{uuid.uuid4().hex}"
        os.rename(self.of(step), aside)
        sync_folder(self.path)
        return aside

    def clean(self) -> None:
        """Remove what processes that are gone have left, and finish what they had begun."""
        try:
            names = sorted(os.listdir(self.path))
        except OSError:
            return
        for match in filter(None, map(_LEFTOVER.match, names)):
            with self._claimed(int(match[1]), match[3]) as is_dead, suppress(OSError):
                if is_dead:
                    self._clear(match[0], int(match[1]), match[2])

    # -- One write -----------------------------------------------------------------------------

    def _install(self, temporary: Path, step: int, number: str) -> None:
        """Rename a finished folder; one of the same step that is there makes way until then."""
        old = self.path / f"step-{step}.old-{number}"
        replaced = step in self
        if replaced:
            os.rename(self.of(step), old)
        try:
            os.rename(temporary, self.of(step))
        except BaseException:
            if replaced:
                os.rename(old, self.of(step))
            raise
        sync_folder(self.path)
        if replaced:
            remove_tree(old)

    def _point_latest(self, step: int, number: str) -> None:
        # A name of its own under the lock, so that it is known as a leftover too.
        temporary = self.path / f"step-{step}.tmp-{number}.latest"
        with replacing(self.path / LATEST, temporary) as fd:
            write_all(fd, f"{self.of(step).name}\n".encode("ascii"))
        sync_folder(self.path)

    def _locked(self, step: int) -> tuple[str, int]:
        """Return a new number and the descriptor of its lock, which exists before the folder."""
        while True:
            number = uuid.uuid4().hex
            path = self._lock_path(step, number)
            lock = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:
                return number, lock  # no locks here; nobody will take it for a leftover either
            # Between the two calls somebody may have taken it for a leftover.
            if os.fstat(lock).st_nlink:
                return number, lock
            os.close(lock)

    def _lock_path(self, step: int, number: str) -> Path:
        return self.path / f"step-{step}.tmp-{number}.lock"

    # -- Cleaning ------------------------------------------------------------------------------

    @contextmanager
    def _claimed(self, step: int, number: str) -> Iterator[bool]:
        """Hold the lock of a write and say whether its writer is gone."""
        try:
            lock = os.open(self._lock_path(step, number), os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            yield isinstance(error, FileNotFoundError)
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
        finally:
            os.close(lock)

    def _clear(self, name: str, step: int, kind: str) -> None:
        path = self.path / name
        if kind == "old" and step not in self:
            # Its writer was killed between two renames.
            os.rename(path, self.of(step))
        elif path.is_dir():
            remove_tree(path)
        else:
            os.unlink(path)


def _listed(steps: list[int]) -> str:
    if not steps:
        return "no checkpoint"
    more = f"{len(steps) - _SHOWN} more and " if len(steps) > _SHOWN else ""
    return f"{more}the steps {steps[-_SHOWN:]}"
