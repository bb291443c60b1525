"""One plain file of weights, for and from programs that know nothing of torchfast.

What is written is what ``torch.save(model.state_dict(), path)`` writes, and what is read is what
that wrote: a dict of tensors under the model's own keys. It is the one file here that is a pickle,
since that is what everybody reads. It is read with ``weights_only=True``, which builds tensors and
plain values and refuses everything else, and mapped into memory rather than copied.
"""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch import Tensor

from torchfast._core.errors import CheckpointCorruptError, UnsafeCheckpointError
from torchfast._core.replacing import replacing
from torchfast.checkpoint.files import first_bytes, sync_folder, writing

_ZIP: Final = b"PK\x03\x04"
_PICKLE: Final = b"\x80\x02"  # the only protocol that torch.save writes


def import_state_dict(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a state dict from one file that ``torch.save`` or `CheckpointManager.export` wrote.

    Nothing in the file is run. Tensors are mapped from the file and come on the CPU; do not
    overwrite the file while they are in use.

    Args:
        path: The file.

    Returns:
        The mapping, for ``model.load_state_dict()``.

    Raises:
        FileNotFoundError: There is none.
        UnsafeCheckpointError: It holds more than tensors and plain values.
        CheckpointCorruptError: It is cut, damaged or no such file.
        TypeError: It holds no mapping.

    Example:
        >>> import tempfile
        >>> model = torch.nn.Linear(2, 1)
        >>> path = Path(tempfile.mkdtemp()) / "model.pt"
        >>> torch.save(model.state_dict(), path)
        >>> model.load_state_dict(import_state_dict(path))
        <All keys matched successfully>
    """
    file = Path(os.fsdecode(os.fspath(path)))
    if file.is_dir():
        raise ValueError(
            f"{file} is a folder, expected one file; for a folder of checkpoints use "
            "CheckpointManager"
        )
    head = first_bytes(file)
    if head[:1] == _PICKLE[:1] and not head.startswith(_PICKLE):
        raise _unsafe(file)
    try:
        # Only a zip can be mapped; what torch wrote before it had zips is read.
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=head == _ZIP)
    except pickle.UnpicklingError as error:
        if head == _ZIP or head.startswith(_PICKLE):
            raise _unsafe(file) from error
        raise _not_readable(file, error) from error
    except (EOFError, RuntimeError, ValueError, LookupError) as error:
        raise _not_readable(file, error) from error
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{file} holds a {type(state).__name__}, expected a state dict: a mapping of tensors"
        )
    return state  # type: ignore[return-value]


def export_state_dict(state: object, path: str | os.PathLike[str]) -> None:
    """Write a state dict into one file, whole or not at all.

    Raises:
        ValueError: ``path`` is a folder.
        TypeError: ``state`` is no mapping.
        CheckpointWriteError: The file cannot be written.
    """
    file = Path(os.fsdecode(os.fspath(path))).absolute()
    if file.is_dir():
        raise ValueError(f"{file} is a folder, expected the path of a file; add a file name")
    if not isinstance(state, Mapping):
        raise TypeError(
            f"only a mapping of tensors can be exported, got {type(state).__name__}; take the part "
            "that is a state dict, such as 'model'"
        )
    temporary = file.with_name(f"{file.name}.tmp-{uuid.uuid4().hex}")
    num_bytes = sum(v.numel() * v.element_size() for v in state.values() if isinstance(v, Tensor))
    with writing(file, num_bytes):
        with replacing(file, temporary) as fd, open(fd, "wb", closefd=False) as stream:
            _save(state, stream)
        sync_folder(file.parent)


def _save(state: object, stream: IO[bytes]) -> None:
    try:
        torch.save(state, stream)
    except RuntimeError as error:
        # What torch says of the end of its file hides why it could not write it.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _unsafe(file: Path) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(
        f"{file} holds more than tensors and plain values, and loading it could run code; it was "
        "not loaded. Ask whoever made it for a file of model.state_dict() alone"
    )


def _not_readable(file: Path, error: Exception) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{file} is no whole file of torch.save ({type(error).__name__}: {str(error)[:200]}); make "
        "it anew"
    )
