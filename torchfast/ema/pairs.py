"""The tensors of a model beside those of its average, sorted into launches."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchfast._core.local import local
from torchfast._core.storages import is_expanded

Table = dict[str, Any]


@final
@dataclass(eq=False, slots=True)
class Entry:
    """A tensor of the model and its average, and where each of them stands.

    Attributes:
        name: As in ``named_parameters`` and ``named_buffers``.
        key: In the tables.
        source: The model's tensor, as it was found.
        table: Where the model holds it now; None where only the tensor is known.
        shown: The tensor of the averaged model.
        shown_in: Where that holds it.
        average: ``shown`` itself; of a tensor of 16 bits, whose average would never move by the
            small steps of a high decay, what it is rounded from.
    """

    name: str
    key: str
    source: Tensor
    table: Table | None
    shown: Tensor
    shown_in: Table | None
    average: Tensor

    @property
    def is_rounded(self) -> bool:
        """Whether the average is kept in a longer format than the weight."""
        return self.average is not self.shown

    def take_over(self) -> None:
        """Let the average be what is shown; where that is how it is rounded, it stays as it is."""
        if self.is_rounded:
            shown = self.shown.to(self.average.dtype)
            is_kept = shown == self.average.to(self.shown.dtype).to(self.average.dtype)
            self.average.copy_(torch.where(is_kept, self.average, shown))


@final
@dataclass(eq=False)
class Group:
    """Entries of one device and dtype, which one launch serves."""

    entries: list[Entry]
    may_move: bool  # buffers, which a forward may replace by others

    def pairs(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return averages, the model's tensors of now, and what shows rounded averages.

        Of sharded ones this rank's parts, which are all that an average needs.
        """
        found = [(e, e.source) for e in self.entries]
        if self.may_move:
            now = [(e, e.source if e.table is None else e.table.get(e.key)) for e in self.entries]
            # Not like the source of before, which a forward may have resized in place.
            found = [(e, t) for e, t in now if t is not None and _alike(t, e.shown)]
        averages = [local(entry.average) for entry, _ in found]
        rounded = [local(entry.shown) for entry, _ in found if entry.is_rounded]
        return averages, [local(tensor) for _, tensor in found], rounded

    def start(self) -> None:
        """Let the averages be what the model holds."""
        averages, sources, rounded = self.pairs()
        _copy(averages, sources)
        _copy(rounded, averages)

    def move(self, weight: float | Tensor) -> None:
        """Move the averages towards what the model holds: by ``weight`` of the way."""
        averages, sources, rounded = self.pairs()
        if not averages:
            return
        if rounded:
            wide = [torch.empty_like(average) for average in averages]
            _copy(wide, sources)
            sources = wide
        if isinstance(weight, Tensor):
            weights = [weight.to(averages[0].device, averages[0].dtype)] * len(averages)
            torch._foreach_lerp_(averages, sources, weights)
        else:
            torch._foreach_lerp_(averages, sources, weight)
        _copy(rounded, averages)


def copied(model: nn.Module) -> nn.Module:
    """Return a copy in eval mode whose parameters need no gradients.

    Raises:
        TypeError: It cannot be copied, or the copy shares modules or parameters with it.
    """
    try:
        with WithoutGraphs():
            averaged = copy.deepcopy(model)
    except Exception as error:
        raise TypeError(
            f"ema needs a copy of the model, and copy.deepcopy() of {type(model).__name__} failed "
            f"({type(error).__name__}: {str(error)[:200]}); keep what cannot be copied outside of "
            "its modules, or give it a __deepcopy__"
        ) from error
    own = {id(part) for part in chain(model.modules(), model.parameters())}
    for part in chain(averaged.modules(), averaged.parameters()):
        if id(part) in own:  # and would be frozen, and averaged with itself
            raise TypeError(
                f"ema needs a copy of the model of its own, and copy.deepcopy() of "
                f"{type(model).__name__} shares a {type(part).__name__} with it; let __deepcopy__ "
                "copy its modules and parameters"
            )
    for parameter in averaged.parameters():  # not by the model: scripted ones have no such method
        parameter.detach_().requires_grad_(False)
    _into_eval(averaged)
    return averaged


def _into_eval(averaged: nn.Module) -> None:
    """Put a copy into eval mode, but merge no weights that are to be averaged apart.

    Whether a ``train()`` of a class's own merges is tried with random numbers, since an adapter is
    mostly zero at first.
    """
    own = [m for m in averaged.modules() if type(m).train is not nn.Module.train]
    held = [t for m in own for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
    held = [local(t) for t in held if t.is_floating_point() and _is_writable(t) and not t.is_meta]
    before = [tensor.detach().clone() for tensor in held]
    with torch.no_grad():
        for tensor in held:
            tensor.uniform_(generator=torch.Generator(tensor.device).manual_seed(0))
        drawn = [tensor.detach().clone() for tensor in held]
        averaged.eval()
        if not all(map(torch.equal, held, drawn)):
            averaged.train()  # which takes them apart again
            for module in averaged.modules():
                module.training = False
        for tensor, old in zip(held, before, strict=True):
            tensor.copy_(old)


@final
class WithoutGraphs(TorchFunctionMode):
    """Lets deepcopy() copy a tensor with a graph, such as a loss that a module keeps, detached."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Table | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return copy.deepcopy(args[0].detach(), *args[1:])
        return func(*args, **(kwargs or {}))


def take_buffers(model: nn.Module, averaged: nn.Module) -> None:
    """Give the copy of a model the buffers that the model has now: what is alike stays."""
    twins = dict(averaged.named_modules())
    clones: dict[int, Tensor] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        twin = twins[prefix]
        before = dict(twin._buffers)
        twin._buffers.clear()
        for key, buffer in module._buffers.items():
            twin.__dict__.pop(key, None)  # what was a plain attribute would hide it
            twin._buffers[key] = None
            if buffer is None:
                continue
            if id(buffer) not in clones:
                old = before.get(key)
                if old is None or not _alike(old, buffer) or old.is_inference():
                    old = buffer.detach().clone()
                clones[id(buffer)] = old
            twin._buffers[key] = clones[id(buffer)]
        twin._non_persistent_buffers_set = set(module._non_persistent_buffers_set)


def pair(model: nn.Module, averaged: nn.Module) -> list[Entry]:
    """Pair the tensors of a model with those of its copy, each once."""
    twins = dict(averaged.named_modules())
    found: dict[int, Entry] = {}
    for prefix, module in model.named_modules():
        twin = twins[prefix]
        # Scripted modules keep no tables in Python: only their tensors are known.
        has_tables = not isinstance(module, torch.jit.ScriptModule)
        for kind in ("_parameters", "_buffers"):
            table, shown_in = getattr(module, kind), getattr(twin, kind)
            for key, source in table.items():
                if source is None or id(source) in found or not _is_writable(shown_in[key]):
                    continue
                found[id(source)] = Entry(
                    name=f"{prefix}.{key}" if prefix else key,
                    key=key,
                    source=source,
                    table=table if has_tables else None,
                    shown=shown_in[key],
                    shown_in=shown_in if has_tables else None,
                    average=shown_in[key],
                )
    return list(found.values())


def buffer_forms(model: nn.Module) -> list[Any]:
    """Return what a model's buffers are, but for their values."""
    return [(name, b.shape, b.dtype) for name, b in model.named_buffers()]


def forms(tensors: list[Tensor]) -> list[Any]:
    """Return of what kind tensors are; a list that is equal means that they can be paired on."""
    return [(t.dtype, t.device, t.shape) for t in tensors]


def _alike(now: Tensor, then: Tensor) -> bool:
    return now.shape == then.shape and now.dtype == then.dtype


def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, values)


def is_real(tensor: Tensor) -> bool:
    """Whether it holds numbers that have a mean."""
    return tensor.is_floating_point() or tensor.is_complex()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of this dtype are averaged."""
    if dtype.is_complex:
        return torch.complex64 if dtype.itemsize < torch.complex64.itemsize else dtype
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype


def _is_writable(tensor: Tensor) -> bool:
    """Whether it can be written to in place: no sparse, no expanded tensor."""
    return tensor.layout is torch.strided and not is_expanded(tensor)
