"""Parameters of a sharded model that are not sharded: each rank has all of them.

Those are the ones that the user names, scalars, which `fully_shard` cannot take apart, and, where
shards are gathered in bf16, those of BatchNorm and its like: their statistics are fp32, and some
kernels take none of another precision beside them. Under autocast alone they are fp32 as well.
torch leaves such parameters alone altogether: it neither brings them to the device nor their
gradients together, so the ranks would drift apart without a word. Here their gradients are averaged
once a step, as replicas do it, all in one collective behind the last backward.

An optimizer then has whole and sharded parameters in one list, which its foreach and fused forms
give to one kernel. torch takes the whole ones for replicated there if it is told to.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.modules.batchnorm import _NormBase

from torchfast._core.errors import PlanError
from torchfast._core.selection import select_modules
from torchfast.parallel.options import ShardOptions
from torchfast.parallel.ranks import mean_over_ranks


@final
class WholeParameters:
    """The parameters of a model that every rank has whole.

    Args:
        model: Before it is sharded.
        options: Which of them; scalars and parameters beside fp32 statistics besides.
        reduce_dtype: In which gradients are averaged; None is their own.
        gather_dtype: In which the others are gathered; None is their own.

    Raises:
        ValueError: ``ignored`` names what is not in the model.
    """

    def __init__(
        self,
        model: nn.Module,
        options: ShardOptions,
        reduce_dtype: torch.dtype | None,
        gather_dtype: torch.dtype | None = None,
    ) -> None:
        self._model, self._reduce_dtype = model, reduce_dtype
        chosen = _ignored_names(model, options)
        if gather_dtype is torch.bfloat16:
            chosen |= _names_beside_statistics(model)
        self.names = {n for n, p in model.named_parameters() if n in chosen or p.dim() == 0}

    def check_scaled(self) -> None:
        """Raise where gradients are to be unscaled, which torch cannot in a list of both kinds.

        Raises:
            PlanError: There are such parameters.
        """
        if self.names:
            raise PlanError(
                f"precision='fp16' does not go with {self}: torch cannot unscale gradients of "
                "whole and of sharded parameters together; take precision='bf16' or shard='ddp'"
            )

    def of(self, model: nn.Module) -> set[nn.Parameter]:
        """Return those of the model or of its twin."""
        return {p for name, p in model.named_parameters() if name in self.names}

    def plain(self, model: nn.Module) -> list[nn.Parameter]:
        """Return those of the model that are no DTensors of the user's, in its order."""
        named = model.named_parameters()
        return [p for name, p in named if name in self.names and not isinstance(p, DTensor)]

    def replicas(self) -> list[nn.Parameter]:
        """Return those of the model that are the same on all ranks."""
        return self.plain(self._model)

    def move(self, model: nn.Module, device: torch.device) -> None:
        """Bring those of the model or of its twin to the device that it runs on, and its buffers.

        Where shards are on the host, `fully_shard` brings buffers to the device, but not those that
        had no memory then.
        """
        for tensor in (*self.of(model), *model.buffers()):
            if tensor.device != device and tensor.device.type != "meta":
                tensor.data = tensor.data.to(device)

    def reduce(self, ask: Callable[[], None] = lambda: None) -> None:
        """Average their gradients over the ranks; one that no rank has becomes zero.

        Parameters that are DTensors already, of some other parallelism, are the user's.

        Args:
            ask: Called right before the ranks come together.

        Raises:
            PlanError: A gradient is sparse.

        Synchronizes: Never.
        """
        found = [
            (name, p)
            for name, p in self._model.named_parameters()
            if name in self.names and p.requires_grad and not isinstance(p, DTensor)
        ]
        if not found:
            return
        gradients: list[Tensor] = []
        for name, parameter in found:
            if parameter.grad is None:  # here; another rank may have used it
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.is_sparse:
                raise PlanError(
                    f"the gradient of {name!r} is sparse, and the parameters that shard=... keeps "
                    "whole have theirs averaged as dense ones; build that module with sparse=False"
                )
            gradients.append(parameter.grad)
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        reduced = flat if self._reduce_dtype is None else flat.to(self._reduce_dtype)
        mean = mean_over_ranks(reduced, ask)
        parts = mean.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def mixed(self) -> AbstractContextManager[Any]:
        """Return the context in which they and shards may stand in one list, as of an optimizer."""
        return implicit_replication() if self.names else nullcontext()

    def __str__(self) -> str:
        names = sorted(self.names)
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        return f"{len(names)} parameters whole on each rank ({shown})"


def _names_beside_statistics(model: nn.Module) -> set[str]:
    """Return the names of the parameters of normalisations that keep statistics in fp32."""
    beside = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, _NormBase) and module.running_mean is not None
        for parameter in module.parameters(recurse=False)
        if module.running_mean.dtype is parameter.dtype is torch.float32
    }
    return {name for name, parameter in model.named_parameters() if id(parameter) in beside}


def _ignored_names(model: nn.Module, options: ShardOptions) -> set[str]:
    """Return the names of the parameters that are to be left whole; of a tied one the first."""
    every = dict(model.named_parameters(remove_duplicate=False))
    rest = [item for item in options.ignored if item not in every]
    paths = tuple(f"{path}." for path in select_modules(model, rest, "ignored")[0]) if rest else ()
    chosen = {
        id(parameter)
        for name, parameter in every.items()
        if name in options.ignored or name.startswith(paths or "\0")
    }
    return {name for name, parameter in model.named_parameters() if id(parameter) in chosen}
