"""Ranks that were given different things hear of it before they wait for each other.

What ranks do together is a sequence of collectives that must be the same on each. A model that has
a layer more on one rank, a limit for clipping on one only, or another number of steps: none of that
is seen by what runs the collectives, which wait for ever, or bring together what has nothing to do
with each other. So ranks compare beforehand what decides over the sequence: a digest, in one
collective; and only where it differs what they have. Which optimizer each has is no matter of
collectives, but of whether they train one model: that is compared once it is built.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchfast._core.errors import PlanError
from torchfast._core.rank_group import RankGroup

_DIGITS: Final = 15  # of a digest, as many as a signed number of 64 bits holds


def number_of(told: Sequence[str]) -> int:
    """Return what some lines are known by."""
    return int(hashlib.sha256("\n".join(told).encode()).hexdigest()[:_DIGITS], 16)


def difference(ranks: RankGroup, told: Sequence[str]) -> str:
    """Return the first line that differs between ranks, and on which; empty if none does.

    All ranks call it.

    Synchronizes: The ranks' hosts, not the device.
    """
    if len(set(ranks.each(number_of(told)).wait())) == 1:
        return ""
    first, *others = ranks.gather(list(told))
    for rank, lines in enumerate(others, start=1):
        for own, other in zip_longest(first, lines, fillvalue="nothing more"):
            if own != other:
                return f"rank 0 has {own}, rank {rank} has {other}"
    return "two ranks differ"


def check_alike(ranks: RankGroup, model: nn.Module, settings: Mapping[str, object]) -> None:
    """Raise on all ranks unless they have models of one layout, and the same settings.

    Raises:
        PlanError: They have not.
    """
    told = [f"{name}={value!r}" for name, value in settings.items()]
    found = difference(ranks, [*told, *_layout(model)])
    if found:
        raise PlanError(
            f"the ranks were given different models or settings ({found}), and train one model "
            "together; build the same model and the same Trainer on all ranks"
        )


def check_alike_optimizers(ranks: RankGroup, model: nn.Module, optimizer: Optimizer) -> None:
    """Raise on all ranks unless each updates the same parameters, in one order, by one rule.

    Replicas would drift apart, shards of one parameter be updated by several rules, and a state
    that is saved by position be loaded into other parameters.

    Raises:
        PlanError: They do not.

    Synchronizes: Where an option is a tensor on the device.
    """
    found = difference(ranks, list(_rules(model, optimizer)))
    if found:
        raise PlanError(
            f"the ranks were given different optimizers ({found}), and train one model together; "
            "build the same one on all ranks, over parameters in the same order, which those of a "
            "set do not have"
        )


def _rules(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    yield f"the optimizer {type(optimizer).__qualname__}"
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for option, value in sorted(group.items()):
            if option not in ("params", "param_names"):
                yield f"{option}={_scalars(value)} in group {number}"
        for parameter in group["params"]:
            yield f"{names.get(id(parameter), 'another parameter')} in group {number}"


def _scalars(value: object) -> object:
    """Return what can be compared of an option: of objects, their kind."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return tuple(map(_scalars, value))
    is_plain = value is None or isinstance(value, bool | int | float | complex | str)
    return repr(value) if is_plain else type(value).__name__


def _layout(model: nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        trained = "trained" if parameter.requires_grad else "frozen"
        meta = ", without memory" if parameter.is_meta else ""
        yield f"{name}: {_shape(parameter)}, {parameter.dtype}, {trained}{meta}"
    for name, buffer in model.named_buffers():
        yield f"{name}: {_shape(buffer)}, {buffer.dtype}"


def _shape(tensor: Tensor) -> str:
    # What cannot train yet is refused elsewhere, with what to do.
    return "no shape yet" if is_lazy(tensor) else str(tuple(tensor.shape))
