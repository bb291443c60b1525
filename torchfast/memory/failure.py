"""What is kept of a step that ran out of memory: words and numbers, and nothing that it allocated.

An exception holds the frames that it came through, and a frame its local variables: the input of
each layer, the loss with its graph. As long as the error lives, so does all that. So the account is
taken while they are there, since they are what it tells of, and then the frames are cleared.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfast._core.batches import count_samples
from torchfast._core.user_code import owner_of
from torchfast.memory.account import MemoryAccount, look
from torchfast.memory.advice import advice
from torchfast.memory.memory_pool import living_pools
from torchfast.memory.moment import MemoryMoment, MomentSource, requested_of
from torchfast.memory.out_of_memory_options import OutOfMemoryOptions
from torchfast.memory.owners import known_owners, living_owners
from torchfast.memory.splitting import parts_of

_REPEATABLE = ("forward", "backward")  # before which nothing has been updated
_MOST_SNAPSHOTS = 3  # each may be hundreds of megabytes


@final
class AccountTaker:
    """Takes the account of an error.

    Args:
        model: Whose tensors are named.
        optimizer: Whose state is.
        device: Where the step runs.
        options: Whether lines are noted, and where snapshots go.
        moments: What the allocator knew.
        stages: The stage by the code of the function that does it.
        facts: The plan's fields.
        others: Returns more tensors by category.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        options: OutOfMemoryOptions,
        moments: MomentSource,
        *,
        stages: Mapping[CodeType, str],
        facts: Mapping[str, Any],
        others: Callable[[], Mapping[str, Iterable[Tensor]]],
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._options, self._moments = options, moments
        self._stages, self._facts, self._others = stages, facts, others
        self._num_snapshots = 0

    def take(
        self, error: torch.OutOfMemoryError, pieces: tuple[Any, ...], *, in_capture: bool = False
    ) -> MemoryAccount:
        """Return the account, as far as there is one; an error here would hide the other one."""
        stage, line = self._stage(error)
        stage = "capture" if in_capture else stage
        try:
            return self._take(str(error), stage, line, pieces)
        except Exception as problem:
            remark = f"no account could be taken: {type(problem).__name__}: {problem}"
            return MemoryAccount(
                device=str(self._device), stage=stage, line=line, remarks=(remark,)
            )

    def _stage(self, error: BaseException) -> tuple[str, str | None]:
        """Return in what stage an error was raised, and the innermost line of the user's."""
        stage, line = "step", None
        for frame, number in traceback.walk_tb(error.__traceback__):
            stage = self._stages.get(frame.f_code, stage)
            if owner_of(frame) == "user":
                code = frame.f_code
                line = f"{code.co_filename}:{number}, in {code.co_name}"
        return stage, line

    def _take(
        self, text: str, stage: str, line: str | None, pieces: tuple[Any, ...]
    ) -> MemoryAccount:
        moment = self._moments.take()
        known = known_owners(self._model, self._optimizer, pieces, self._others(), self._device)
        living = [] if moment.segments is None else living_owners(self._device)
        pools = {number: pool.name for number, pool in living_pools().items()}
        found = look(moment, known, living, self._model, pools)
        requested = moment.requested_bytes
        remarks = []
        if moment.segments is None:
            remarks.append(f"the allocator of {self._device} does not tell what it holds")
        elif not found.modules and not self._options.lines:
            remarks.append(
                "lines and modules of activations: Plan(out_of_memory=OutOfMemoryOptions("
                "lines=True))"
            )
        path = self._write(moment, remarks)
        outside = None
        if moment.total_bytes is not None and moment.free_bytes is not None:
            outside = max(0, moment.total_bytes - moment.free_bytes - moment.reserved_bytes)
        return MemoryAccount(
            device=str(self._device),
            stage=stage,
            line=line,
            requested_bytes=requested_of(text) if requested is None else requested,
            free_bytes=moment.free_bytes,
            limit_bytes=moment.limit_bytes,
            total_bytes=moment.total_bytes,
            outside_bytes=outside,
            allocated_bytes=moment.allocated_bytes,
            reserved_bytes=moment.reserved_bytes,
            in_use=found.in_use,
            not_in_use=found.not_in_use,
            largest=found.largest,
            modules=found.modules,
            advice=advice(found, moment, stage, self._facts, _most_samples(pieces)),
            snapshot_path=path,
            remarks=tuple(remarks),
        )

    def _write(self, moment: MemoryMoment, remarks: list[str]) -> str | None:
        """Write the snapshot, if there is one; a full disk must not hide that memory ran out."""
        if moment.snapshot is None or self._options.snapshot is None:
            return None
        if self._num_snapshots >= _MOST_SNAPSHOTS:
            remarks.append(f"no snapshot was written, {_MOST_SNAPSHOTS} were already")
            return None
        self._num_snapshots += 1
        name = f"out-of-memory-{os.getpid()}-{self._num_snapshots}.pickle"
        path = Path(self._options.snapshot) / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                pickle.dump(moment.snapshot, file)
        except OSError as problem:
            remarks.append(f"the snapshot was not written: {problem}")
            return None
        return str(path)


def _most_samples(pieces: tuple[Any, ...]) -> int | None:
    """Return how many samples the largest of what ran at once has; None where nobody can tell."""
    counts = [count_samples(part) for piece in pieces for part in parts_of(piece)]
    return None if None in counts else max(filter(None, counts), default=None)


def cause_of(
    error: BaseException | None, outer: BaseException | None
) -> torch.OutOfMemoryError | None:
    """Return that memory ran out, if an error is that or comes of it.

    Args:
        error: The error.
        outer: What was being handled before, which may be that of another step.
    """
    seen = {id(outer)}
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def let_go(error: BaseException, outer: BaseException | None) -> None:
    """Free what the frames of an error's traceback hold, and of those that led to it.

    Args:
        error: The error.
        outer: What was being handled before, which is not ours to take apart.
    """
    seen = {id(outer)}
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        with suppress(Exception):
            traceback.clear_frames(current.__traceback__)
        current.__traceback__ = None
        waiting += [current.__cause__, current.__context__]


def why_never(account: MemoryAccount) -> str | None:
    """Return why what has failed cannot be done again; None if nothing has been updated before."""
    if account.stage in _REPEATABLE:
        return None
    return f"it happened in the {account.stage}, not in forward or backward"


def why_alone(account: MemoryAccount | None, *, is_shared: bool) -> str:
    """Return why the other ranks could not begin again."""
    if account is not None and (never := why_never(account)) is not None:
        return never
    why = "it was beside forward and backward" if is_shared else "a step of this size has fitted"
    return f"the other ranks could not be told, since {why}"
