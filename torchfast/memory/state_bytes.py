"""What an optimizer's state takes, also before there is any.

How much is kept of an element is the optimizer's own affair: AdamW keeps two numbers, with
``amsgrad`` three, in 8 bits a quarter of that (of small tensors all of it), and factored moments
are next to nothing, but for vectors. So a copy of the optimizer makes one update of a parameter on
the host, of each shape, or of one like it that is small, and its state is counted. Of an optimizer
that is neither torch's nor ours, or that needs a closure, it is guessed by its options.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfast._core.storages import plain_parts
from torchfast.memory.block_costs import tensors_in

# For what has more values something smaller stands, of as many at most: enough for moments in few
# bits, which begin at 4,096 values.
_MOST_TRIED: Final = 2**18
# By 256, by 128 alone, and by neither.
_MATRICES: Final = ((256, 1024), (2047, 128), (511, 513))
_SHORT: Final = 64
_SIDES: Final = range(128, 15, -1)
_MOST_IN_A_KERNEL: Final = 343  # of 7 x 7 x 7
_KNOWN: Final = ("torch", "torchao", "torchfast")


def state_bytes(optimizer: Optimizer) -> int:
    """Return what the state takes on the devices of the parameters.

    Numerics: Changes nothing.
    """
    return sum(_of_group(optimizer, group) for group in optimizer.param_groups)


def _of_group(optimizer: Optimizer, group: dict[str, Any]) -> int:
    parameters: list[Tensor] = group["params"]
    devices = {parameter.device for parameter in parameters}
    held = tensors_in([optimizer.state[p] for p in parameters if p in optimizer.state])
    if held:  # the group has been updated
        return _nbytes(tensor for tensor in held if tensor.device in devices)
    numbers: Counter[tuple[torch.dtype, tuple[int, ...]]] = Counter()
    for parameter in parameters:
        if parameter.requires_grad:
            numbers[parameter.dtype, _tried_shape(parameter.shape)] += parameter.numel()
    each = (
        number * _bytes_an_element(optimizer, group, dtype, shape)
        for (dtype, shape), number in numbers.items()
    )
    return int(sum(each))


def _tried_shape(shape: torch.Size) -> tuple[int, ...]:
    """Return a small shape of which as much is kept of each value; of matrices, about as much."""
    if shape.numel() <= _MOST_TRIED:
        return tuple(shape)
    wanted = _divisible(shape.numel())
    found = (one for one in _smaller(shape) if _divisible(torch.Size(one).numel()) == wanted)
    return next(found, _MATRICES[0])


def _smaller(shape: torch.Size) -> Iterator[tuple[int, ...]]:
    if len(shape) > 2 and shape[2:].numel() > _MOST_IN_A_KERNEL:
        shape = shape[-2:]  # matrices beside each other
    if len(shape) > 2:
        # Factored moments of kernels are one for each row and column of each of them.
        pairs = [*((side, side) for side in _SIDES), *((128, side) for side in _SIDES)]
        kernels = (torch.Size((*pair, *shape[2:])) for pair in pairs)
        yield from (tuple(size) for size in kernels if size.numel() <= _MOST_TRIED)
    elif len(shape) == 2 and min(shape) > _SHORT:
        yield from _MATRICES
    else:
        short = min(shape) if len(shape) == 2 else 1
        for long in range(_MOST_TRIED // short, _MOST_TRIED // short - 257, -1):
            sizes = (long, short) if shape[0] == max(shape) else (short, long)
            yield sizes[: len(shape)]


def _divisible(number: int) -> tuple[bool, bool]:
    """Return what decides whether moments in few bits are kept of so many: blocks of 128 or 256."""
    return number % 256 == 0, number % 128 == 0


def _bytes_an_element(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype, shape: tuple[int, ...]
) -> float:
    if type(optimizer).__module__.partition(".")[0] in _KNOWN:
        generator = torch.get_rng_state()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return _tried(optimizer, group, dtype, shape)
        except Exception:  # it needs a closure, a device, or is not made to be copied
            pass
        finally:
            torch.set_rng_state(generator)
    copies = 2 if "betas" in group else 1 if group.get("momentum") else 0
    if "history_size" in group:  # LBFGS: as many steps and changes of gradients, and the last ones
        copies = 2 * int(group["history_size"]) + 2
    return copies * dtype.itemsize


def _tried(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype, shape: tuple[int, ...]
) -> float:
    parameter = nn.Parameter(torch.ones(shape, dtype=dtype, device="cpu"))
    parameter.grad = torch.ones_like(parameter)
    twin = object.__new__(type(optimizer))
    # Not what a scheduler has put around ``step``, and none of the hooks.
    twin.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(twin, hooks, OrderedDict())
    # A rate on a device, and a form of the update for graphs, are for parameters there.
    is_torchao = type(optimizer).__module__.startswith("torchao")
    alike = {
        **optimizer.defaults,
        **group,
        "params": [parameter],
        "lr": torch.tensor(1e-3) if is_torchao else 1e-3,
    }
    if type(optimizer).__module__.startswith("torch.optim"):
        alike |= {name: False for name in ("capturable", "fused") if name in group}
    twin.param_groups, twin.state = [alike], defaultdict(dict)
    step: Any = type(twin).step
    while getattr(step, "hooked", False):  # by torch, which calls hooks of all optimizers there
        step = step.__wrapped__
    eager = torch.compiler.set_stance("force_eager") if is_torchao else nullcontext()
    with torch.enable_grad(), eager:
        step(twin)
    kept = [t for t in tensors_in(list(twin.state.values())) if t.numel() > 1]  # but the count
    return _nbytes(kept) / parameter.numel()


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Return what tensors take: those of torchao in few bits say what they stand for."""
    return sum(part.nbytes for tensor in tensors for part in plain_parts(tensor))
