"""How ranks are laid out: in one row, or in replicas of a row of shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from torchfast._core.errors import PlanError
from torchfast.parallel.options import ShardOptions
from torchfast.parallel.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_mesh(options: ShardOptions, ranks: Ranks, device: torch.device) -> None:
    """Raise unless the user's mesh, if there is one, is of these ranks and this strategy.

    Raises:
        PlanError: It is not.
    """
    mesh = options.mesh
    if mesh is None:
        return
    num_dims = 2 if options.strategy == "hsdp" else 1
    if mesh.ndim != num_dims:
        raise PlanError(
            f"mesh has {mesh.ndim} dimensions, and strategy={options.strategy!r} takes {num_dims}: "
            "(ranks,) for 'ddp' and 'fsdp', (replicas, shards) for 'hsdp'"
        )
    if mesh.size() != ranks.world_size:
        raise PlanError(
            f"mesh holds {mesh.size()} ranks, and the run has {ranks.world_size}, all of which "
            "train together here; give a mesh of all of them"
        )
    if mesh.device_type != device.type:
        raise PlanError(
            f"mesh is of device type {mesh.device_type!r}, and this rank trains on {device}; build "
            f"it with init_device_mesh({device.type!r}, ...)"
        )
    if num_dims == 2 and mesh.mesh_dim_names is None:
        raise PlanError(
            "mesh has no names for its two dimensions, which torch asks for; build it with "
            "mesh_dim_names=('replicate', 'shard')"
        )


def num_replicas(options: ShardOptions, ranks: Ranks) -> int:
    """Return how many groups of ranks hold the whole model, each its shards of it.

    Raises:
        PlanError: The ranks cannot be divided so.
    """
    if options.strategy != "hsdp":
        return 1
    if options.mesh is not None:
        return int(options.mesh.size(0))
    count = options.num_replicas
    if count is None:
        count = ranks.num_machines
    if ranks.world_size % count:
        raise PlanError(
            f"num_replicas={count} does not divide the {ranks.world_size} ranks; take a divisor"
        )
    return count


def mesh_for(options: ShardOptions, ranks: Ranks, device: torch.device) -> DeviceMesh:
    """Return the mesh over which a model is sharded; a new one is made by all ranks together."""
    if options.mesh is not None:
        return cast("DeviceMesh", options.mesh)
    from torch.distributed.device_mesh import init_device_mesh  # where it is needed

    if options.strategy == "fsdp":
        return init_device_mesh(device.type, (ranks.world_size,), mesh_dim_names=("shard",))
    replicas = num_replicas(options, ranks)
    shape = (replicas, ranks.world_size // replicas)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def reshard_for(options: ShardOptions, num_shards: int) -> bool | int:
    """Return what `fully_shard` is to do behind a forward, where so many ranks share a model.

    Raises:
        PlanError: They cannot be divided so.
    """
    count = options.reshard_after_forward
    if isinstance(count, bool):
        return count
    if num_shards % count:
        raise PlanError(
            f"reshard_after_forward={count} does not divide the {num_shards} ranks that share a "
            "model; take a divisor, such as the number of GPUs of a machine, or True"
        )
    return count if count < num_shards else True
