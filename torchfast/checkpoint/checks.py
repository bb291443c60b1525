"""Checks on what a `CheckpointManager` is asked to do, made before anything is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from numbers import Real
from pathlib import Path

import torch
from torch import Tensor

from torchfast._core.device import is_capturing
from torchfast._core.errors import CheckpointWriteError, ClosedError, RankError
from torchfast._core.rank_group import RankGroup


def checked_keys(per_rank: object) -> tuple[str, ...]:
    """Return the keys whose values each rank keeps for itself."""
    keys = tuple(per_rank) if isinstance(per_rank, Collection) else ()
    if (
        not isinstance(per_rank, Collection)
        or isinstance(per_rank, str)
        or not all(isinstance(key, str) for key in keys)
    ):
        raise TypeError(
            f"per_rank must be keys of the state such as ('loader', 'rng'), got {per_rank!r} "
            f"({type(per_rank).__name__})"
        )
    return keys


def checked_metrics(metrics: object) -> dict[str, float]:
    """Return host numbers by name, as floats."""
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


def check_only_if(only_if: object) -> None:
    """Raise unless it is a bool of shape ``()``."""
    if not isinstance(only_if, Tensor) or only_if.dtype != torch.bool or only_if.shape:
        found = type(only_if).__name__
        if isinstance(only_if, Tensor):
            found = f"{tuple(only_if.shape)} of {only_if.dtype}"
        raise TypeError(
            f"only_if must be a bool tensor of shape (), got {found}; give tensor.all(), or "
            "torch.tensor(flag)"
        )


def check_usable(ranks: RankGroup, *, closed: bool) -> None:
    """Raise where a manager is closed, or was made before the process knew of other ranks.

    Each of them would save for itself into the folder of all.
    """
    if closed:
        raise ClosedError("this CheckpointManager was closed; make a new one to save or load again")
    if ranks.is_outdated:
        raise RankError(
            "this CheckpointManager was made before the process group and is that of one process; "
            "make it behind the Trainer or start_ranks(), or give it across_ranks=False"
        )


def refuse_capture() -> None:
    """Raise while a graph is being captured."""
    if is_capturing():
        raise CheckpointWriteError(
            "save() was called while a CUDA graph is being captured, where nothing can be "
            "copied to the host; save before or after the capture"
        )


def problems_of_all(ranks: RankGroup, path: Path, problem: str | None) -> list[str]:
    """Return what any rank has against a checkpoint.

    One that is gone everywhere was deleted meanwhile. One that is gone for some only lies on a disk
    that not all of them have: to go on without it would be to begin anew, and to find out at the
    first save.

    Args:
        ranks: Who have looked.
        path: Of the checkpoint.
        problem: What this one has against it; empty where it is not there.

    Raises:
        RankError: It is there for some ranks and not for others.
    """
    problems = ranks.gather(problem)
    if ranks.size > 1 and "" in problems:
        seen = ranks.gather(path.is_dir())
        lacking = [rank for rank, is_seen in enumerate(seen) if not is_seen]
        if len(lacking) < ranks.size:
            raise RankError(
                f"{path} is not to be seen on the ranks {lacking}, and is on others; give all "
                "ranks a folder on storage that they share"
            )
    return [each for each in problems if each is not None]
