"""What one call of a block saves for the backward, and what its expensive operations cost.

The call runs as it always does; hooks count what autograd saves, and a dispatch mode notes the
expensive operations. What counts is distinct storage: a tensor that several operations save is
there once, and a view holds the whole of its storage. Parameters and buffers are not activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from torchfast._core.reading import Mark, Marks
from torchfast.memory.kept_norms import Norm
from torchfast.memory.kept_results import OpClass, Result, counted_alias, flops_of, op_class
from torchfast.memory.saved_tensor import Packed, free_at_end
from torchfast.memory.stretches import Stretch, Stretches

Storages = dict[int, int]
"""Bytes by storage."""


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """What was seen in one call.

    Attributes:
        saved: Storages that autograd saved.
        inputs: Storages of the tensors it was called with.
        returned: Storages of those it returned, which the next block is called with.
        results: Its expensive operations.
        result_storages: What each of these returned, as storages.
        made_in: In which stretch of the block each of these ran.
        order: All stretches.
        norms: The norms among the results, which come behind the operations.
        kept_inputs: The inputs of attention among the results, which are the last ones.
        attention: The numbers of the results that calls of torch's attention are.
    """

    saved: Storages
    inputs: Storages
    returned: Storages
    results: tuple[Result, ...]
    result_storages: tuple[Storages, ...]
    made_in: tuple[Stretch, ...]
    order: tuple[Stretch, ...]
    norms: tuple[Norm, ...]
    kept_inputs: tuple[KeptInputs, ...]
    attention: tuple[int, ...]

    @property
    def saved_bytes(self) -> int:
        """What the call saves, with its inputs as far as it saves them, but what it returns."""
        handed_on = self.returned.keys() - self.inputs.keys()
        return sum(size for key, size in self.saved.items() if key not in handed_on)

    @property
    def input_bytes(self) -> int:
        """What recompute saves of it."""
        return sum(self.inputs.values())


class KeptInputs(NamedTuple):
    """Attention whose inputs can be kept in place of what they are made from.

    Attributes:
        read_in: The stretch of the block in which attention is called.
        layers: The calls of layers that are left out then.
        result: What it would take to keep, and what it costs.
        storages: What is kept.
    """

    read_in: Stretch
    layers: tuple[Stretch, ...]
    result: Result
    storages: Storages


@final
class CostMeter:
    """Runs calls of a block and counts.

    Args:
        module: The block, or the model that holds it: whose parameters do not count.
        device: Where it runs, to time the operations; None times nothing.
        others: Tensors that do not count either.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | None = None,
        others: Iterable[Tensor] = (),
    ) -> None:
        self._not_counted = storages([*module.parameters(), *module.buffers(), *others])
        self._marks = None if device is None else Marks(device)

    def run(
        self, block: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, Callable[[], BlockCosts]]:
        """Call a function that is the forward of a block.

        Returns:
            What it returned, and what gives the costs, once the device has come so far. That keeps
            the results of expensive operations alive, or others would get their memory.
        """
        saved: Storages = {}
        packed: list[Packed] = []
        stretches = Stretches()

        def pack(tensor: Tensor) -> Tensor:
            packed.append(Packed(None, tensor, tensor._version))
            found = self.counted([tensor])
            saved.update(found)
            stretches.saves(tensor, found)
            return tensor.detach()

        noting = _Noting(lambda: len(packed), self._marks, stretches)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with stretches.noting(block), hooks, noting:
            result = function(*args, **kwargs)

        # Those that are waited for: a second run ends there.
        num_waited = len(packed) - sum(1 for _ in free_at_end(packed, result))
        packed.clear()  # with the graph that they are in
        returned = self.counted(tensors_in(result))
        inputs = self.counted(tensors_in((args, kwargs)))

        def costs() -> BlockCosts:
            norms = stretches.norms(num_waited, returned)
            noted = noting.noted
            results = [one.result(num_waited, self._marks) for one in noted]
            kept_inputs = noting.kept_inputs(results, inputs)
            return BlockCosts(
                saved=saved,
                inputs=inputs,
                returned=returned,
                results=(
                    *results,
                    *(norm.result for norm in norms),
                    *(one.result for one in kept_inputs),
                ),
                result_storages=(
                    *(one.storages for one in noted),
                    *(norm.storages for norm in norms),
                    *(one.storages for one in kept_inputs),
                ),
                made_in=tuple(noting.made_in),
                order=tuple(stretches.order),
                norms=tuple(norms),
                kept_inputs=tuple(kept_inputs),
                attention=tuple(noting.attention),
            )

        return result, costs

    def counted(self, tensors: Iterable[Tensor]) -> Storages:
        """Return the storages of tensors that are activations."""
        found = storages(tensors)
        return {key: size for key, size in found.items() if key not in self._not_counted}


def storages(tensors: Iterable[Tensor]) -> Storages:
    """Return the storages of tensors, each once."""
    found: Storages = {}
    for tensor in tensors:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
    given |= kwargs
    return [
        tensor
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(given.get(argument.name))
    ]


@final
class _Noted:
    __slots__ = (
        "_alive", "_num_counted", "flops", "kind", "marks", "moved_bytes", "num_saved",
        "num_writes", "size_bytes", "storages",
    )  # fmt: skip

    def __init__(
        self, kind: OpClass, args: Any, out: Any, num_saved: int, marks: tuple[Mark, Mark] | None
    ) -> None:
        self.kind: OpClass = kind
        self.flops = flops_of(kind, args, out)
        self._alive = [counted_alias(tensor) for tensor in tensors_in(out)]
        self.storages = storages(self._alive)
        self.size_bytes = sum(self.storages.values())
        self.moved_bytes = sum(tensor.nbytes for tensor in (*tensors_in(args), *self._alive))
        self.num_saved, self.marks = num_saved, marks
        self.num_writes = 0  # to its memory, since
        self._num_counted = self._count()

    def result(self, num_waited: int, marks: Marks | None) -> Result:
        # What is computed when everything is saved is not waited for: the second run ends there.
        # Nor could a second run be given what was written to behind autograd's back, through
        # ``.data`` or a view of ``unsafe_chunk``: by the count nobody has.
        is_intact = self.num_writes <= self._count() - self._num_counted
        is_needed = self.num_saved < num_waited and is_intact
        ms = 0.0 if marks is None or self.marks is None else marks.between_ms(*self.marks)
        return Result(self.kind, self.size_bytes, self.flops, is_needed, ms, self.moved_bytes)

    def _count(self) -> int:
        """Return how often autograd knows it to have been written to."""
        return sum(tensor._version for tensor in self._alive if not tensor.is_inference())


@final
class _Noting(TorchDispatchMode):
    """Notes the expensive operations that run under it."""

    def __init__(
        self, num_saved: Callable[[], int], marks: Marks | None, stretches: Stretches
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted: list[_Noted] = []
        self.made_in: list[Stretch] = []
        self.attention: list[int] = []
        self._num_saved, self._marks, self._stretches = num_saved, marks, stretches

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what is compiled inside a block be compiled."""
        return True

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = op_class(func)
        read = tensors_in((args, kwargs))
        self._stretches.runs(read)
        if kind is None:
            out = func(*args, **(kwargs or {}))
            for key in storages(_written(func, args, kwargs or {})):
                for one in self.noted:
                    one.num_writes += key in one.storages
            self._stretches.ran(func, read, tensors_in(out))
            return out
        before = None if self._marks is None else self._marks.now()
        out = func(*args, **(kwargs or {}))
        num_saved = self._num_saved()
        marks = None if self._marks is None or before is None else (before, self._marks.now())
        self.noted.append(_Noted(kind, args, out, num_saved, marks))
        self.made_in.append(self._stretches.now)
        self._stretches.ran(func, read, tensors_in(out))
        if kind == "attention" and self._stretches.is_in_attention:
            self.attention.append(len(self.made_in) - 1)
        return out

    def kept_inputs(self, results: list[Result], arguments: Storages) -> list[KeptInputs]:
        """Return the inputs of attention that can be kept, and what that takes and spares.

        Args:
            results: Of the operations.
            arguments: What is there anyway.
        """
        found = []
        for one in self._stretches.inputs():
            attention = [n for n in self.attention if self.made_in[n] == one.read_in]
            if self.made_in.count(one.read_in) != 1 or len(attention) != 1:
                continue
            own = self.noted[attention[0]].storages
            held = {
                key: size
                for key, size in one.storages.items()
                if key not in own and key not in arguments
            }
            spares = [n for n, stretch in enumerate(self.made_in) if stretch in one.layers]
            spared = [results[number] for number in spares]
            result = Result(
                "inputs",
                sum(held.values()),
                sum(result.flops for result in spared),
                ms=sum(result.ms for result in spared),
                moved_bytes=one.moved_bytes + sum(result.moved_bytes for result in spared),
                needs=attention[0],
                spares=tuple(spares),
            )
            found.append(KeptInputs(one.read_in, one.layers, result, held))
        return found
