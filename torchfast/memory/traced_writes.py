"""Tensors that a compiled block writes to: its second run gets what the first one found.

Under the compiler a block's second run is a copy of its operations in the backward, and what they
read of the graph's inputs is read where these stand. A buffer that the block has written to by then
holds the new value, so torch's checkpoint computes another gradient, and says nothing.

So such a tensor gets its own value, from a copy of it, in front of the block: ``t.copy_(copy)``.
That changes nothing, but what is behind it depends on the copy, which nobody writes to. The copy is
made by an operator of its own, since the compiler would compute a ``clone`` again in the backward,
from the new value.

Which tensors these are is seen while the block is traced, from its operations: they run once more,
on tensors without data. Those count that are written to and are read besides. Statistics of norms
are read by nobody but the norm that writes them, which trains without them, and averages that are
only counted up by the operation that writes them; neither costs anything. Nor does a buffer that is
only read, such as the frequencies of a rotary embedding: its block is compiled as ever.

Torch has no public way to the operations of a checkpoint that is being traced, so what Dynamo has
noted of them is read there: the graph so far, and in it the last checkpoint. This module is to be
imported where something is traced: it imports torch's compiler.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_logger = logging.getLogger(__name__)

# As torch's operators call what a norm keeps of its batches; some do not say that they write it.
_STATISTICS = ("running_mean", "running_var")
_TRAINS = ("training", "train", "use_input_stats")


@torch.library.custom_op("torchfast::value_of", mutates_args=(), schema="(Tensor x) -> Tensor")
def _value_of(x: Tensor) -> Tensor:
    return x.clone()


@_value_of.register_fake
def _without_data(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def keep_what_is_written() -> None:
    """Let the checkpoint that has just been traced run again on what it has found.

    Dynamo runs it where it traces the call, and nothing of it is left in what is compiled.
    """
    try:
        _keep_what_is_written()
    except Exception as error:  # another torch may do it in another way
        _warn_once(f"{type(error).__name__}: {error}")


@functools.cache
def _warn_once(why: str) -> None:
    _logger.warning(
        "could not look into a compiled block that is recomputed (%s): if it reads a buffer of its "
        "own and writes to it as well, its gradient is wrong; leave such blocks out of recompute",
        why,
    )


def _keep_what_is_written() -> None:
    # Here, where another torch that has it elsewhere ends in the warning.
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output: Any = InstructionTranslator.current_tx().output
    graph = output.graph
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    call = next((node for node in reversed(graph.nodes) if node.target is checkpoint), None)
    if call is None:
        return  # the compiler had to leave the block
    body = output.nn_modules[call.args[0].target]
    roots = _memory_of(
        [
            node.meta.get("example_value")
            for node in output.root_tracer.graph.nodes
            if node.op in ("placeholder", "get_attr")
        ]
    )
    values = [_value_in(arg) for arg in call.args[1:]]
    # A tensor that the graph computes itself is not written to in place. Of one that comes with a
    # gradient torch keeps the value, or raises an error.
    found = [
        arg
        for arg, value in zip(call.args[1:], values, strict=True)
        if _storage_of(value) in roots and (value.is_leaf or not value.requires_grad)
    ]
    if not found:
        return
    written = _written_and_read(body, values, output.tracing_context.fake_mode)
    with graph.inserting_before(call), output.tracing_context.fake_mode, torch.no_grad():
        for arg in found:
            value = _value_in(arg)
            if _storage_of(value) not in written:
                continue
            plain = graph.call_method("detach", (arg,))
            plain.meta["example_value"] = value.detach()
            kept = graph.call_function(torch.ops.torchfast.value_of.default, (plain,))
            kept.meta["example_value"] = torch.empty_like(value)
            put = graph.call_method("copy_", (plain, kept))
            put.meta["example_value"] = plain.meta["example_value"]


def _value_in(arg: Any) -> Any:
    return arg.meta.get("example_value") if isinstance(arg, torch.fx.Node) else arg


def _storage_of(value: Any) -> int | None:
    """Return what stands for a tensor's memory; None of what has none of its own."""
    # A tensor that holds others, such as a DTensor, is left as it is: few buffers are.
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return None
    storage: int = value.untyped_storage()._cdata
    return storage


def _written_and_read(body: Any, values: list[Any], fake_mode: Any) -> set[int]:
    """Return the memory that operations write to and that others of them read."""
    with ExitStack() as stack:
        if fake_mode.shape_env is not None:
            # Sizes that depend on data are other ones in this run, and nobody asks for them.
            stack.enter_context(fake_mode.shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(fake_mode)
        stack.enter_context(torch.no_grad())
        # The same memory, but what is written has its own count, and its own shape.
        aliases = tree_map_only(FakeTensor, lambda tensor: tensor.data, values)
        uses: _Uses = stack.enter_context(_Uses())
        body(*aliases)
        return uses.written & uses.read


@final
class _Uses(TorchDispatchMode):
    """Notes which memory operations write to, and which they read, on the way to what is made."""

    # A class attribute of torch's: without, it would refuse operators that hold functions.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()
        self.read: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return self._called(func, args, kwargs)
        given = dict(_by_name(func, args, kwargs))
        trains = all(given.get(name, True) for name in _TRAINS)
        for argument in func._schema.arguments:
            memory = _memory_of(given.get(argument.name))
            alias = argument.alias_info
            if (alias is not None and alias.is_write) or (argument.name in _STATISTICS and trains):
                self.written |= memory
            elif alias is None:  # and no view, which reads nothing
                self.read |= memory
        return func(*args, **kwargs)

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator that holds functions; torch lets few of them write to what they get."""
        name = func.name()
        if name == "invoke_subgraph":
            with self:
                return args[0](*args[2:])
        self.read |= _memory_of((args, kwargs))
        if name == "triton_kernel_wrapper_mutation":
            self.written |= _memory_of(_written_by_kernel(**kwargs))
        return func(*args, **kwargs)


def _written_by_kernel(
    kernel_idx: int,
    constant_args_idx: int,
    tma_descriptor_metadata: Any,
    kwargs: dict[str, Any],
    **_others: Any,
) -> list[Any]:
    # Where there are such kernels, it is loaded. Of a kernel that it cannot read it names all.
    from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors

    names = get_mutated_tensors(kernel_idx, constant_args_idx, kwargs, tma_descriptor_metadata)
    return [kwargs.get(name) for name in names]


def _by_name(func: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        yield argument.name, value
    yield from kwargs.items()


def _memory_of(values: Any) -> set[int]:
    """Return what stands for the memory of each tensor in a structure."""
    found = map(_storage_of, tree_leaves(values))
    return {storage for storage in found if storage is not None}
