"""Tensors of which each rank has a part: the DTensors of FSDP2 and of tensor parallelism.

Each rank writes the part that it has, and of parts that several ranks have one writes. What is read
is placed as somebody's else is: on as many ranks as there are now, each of which reads no more than
its own part. The parts of a loaded one lie on the CPU, whatever device its mesh is of, as all that
is loaded does; ``load_state_dict()`` moves them.

torch.distributed.tensor is not imported here: who has no such tensor needs none of it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from torchfast._core.local import local

_HOME: Final = "torch.distributed.tensor"


def is_sharded(value: object) -> bool:
    """Whether it is a tensor of which each rank has a part."""
    home = sys.modules.get(_HOME)
    return home is not None and isinstance(value, home.DTensor)


def with_part(tensor: Tensor, part: Tensor) -> Tensor:
    """Return a tensor that is sharded as ``tensor``, with another part on this rank."""
    if not is_sharded(tensor):
        return part
    # Not from_local(), which would move the part to the device of the mesh.
    made: Tensor = sys.modules[_HOME].DTensor(part.detach(), _spec(tensor), requires_grad=False)
    return made


def problem_of(tensor: Tensor, num_ranks: int) -> str | None:
    """Say why a sharded tensor cannot be stored, and what to do."""
    if any(placement.is_partial() for placement in _spec(tensor).placements):
        return "a DTensor whose parts are still to be added up; redistribute() it first"
    if num_ranks == 1 and _spec(tensor).mesh.size() > 1:
        return (
            f"a DTensor over {_spec(tensor).mesh.size()} ranks, and this manager saves for one "
            "process; make the CheckpointManager on all ranks, behind init_process_group() and "
            "with across_ranks=True"
        )
    return None


def identity_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return what two sharded tensors have in common that are one; None where it is not known."""
    part = local(tensor)
    if part.numel() == 0:
        return None
    spec = _spec(tensor)
    layout = (part.data_ptr(), part.dtype, part.shape, part.stride())
    return (*layout, tuple(tensor.shape), spec.placements, spec.mesh)


def placed_like(like: Mapping[str, Tensor], key: str, size: torch.Size) -> Tensor | None:
    """Return the sharded tensor whose placement is that of a stored tensor, if there is one.

    It is the one under the same key, or under a key above it if it has the same size: a parameter
    in the place of the optimizer's state of it stands for all its moments.
    """
    found = like.get(key)
    if found is not None:
        return found
    while "/" in key:
        key = key.rpartition("/")[0]
        above = like.get(key)
        if above is not None and above.shape == size:
            return above
    return None


def part_of(whole: Any, like: object) -> Any:
    """Return a tensor that every rank has whole as one that is sharded as ``like``.

    Anything else is returned as it is: what is sharded already, or is not of that shape.
    """
    if not is_sharded(like) or is_sharded(whole) or getattr(whole, "shape", None) != like.shape:  # type: ignore[attr-defined]
        return whole
    spec = _spec(like)  # type: ignore[arg-type]
    # Each rank takes its own part; none sends any.
    return sys.modules[_HOME].distribute_tensor(
        whole, spec.mesh, spec.placements, src_data_rank=None
    )


def empty_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a new tensor that is sharded as ``tensor``, whose part lies on the CPU."""
    part = torch.empty(local(tensor).shape, dtype=dtype, device="cpu")
    spec = _spec(tensor)
    whole = torch.empty(tensor.shape, device="meta")  # for its strides
    meta = type(spec.tensor_meta)(whole.shape, whole.stride(), dtype)
    spec = type(spec)(spec.mesh, spec.placements, tensor_meta=meta)
    made: Tensor = sys.modules[_HOME].DTensor(part, spec, requires_grad=False)
    return made


def _spec(tensor: Tensor) -> Any:
    return tensor._spec  # type: ignore[attr-defined]
