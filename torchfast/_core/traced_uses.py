"""What the operations of a traced graph read and write, and a tensor's own value within one.

What stands in a graph that is being compiled is run once more here, on tensors without data, and
each operation says by its schema which tensors it writes to. Reads and writes are told by the
memory, so that views count as what they are of.

This module is to be imported where something is traced: it registers an operator.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from torchfast._core.autocast import autocast_state, set_autocast
from torchfast._core.measure import first_line

# As torch's operators call what a norm keeps of its batches; some do not say that they write it.
_STATISTICS = ("running_mean", "running_var")
_TRAINS = ("training", "train", "use_input_stats")
# What writes without looking at what was there.
_PUTS = (
    torch.ops.aten.copy_.default,
    torch.ops.aten.zero_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
)

# Cheaper by the call than a `torch.library.custom_op`, which has layers that are not needed here.
_LIBRARY = torch.library.Library("torchfast", "FRAGMENT")
_LIBRARY.define("value_of(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("value_of", torch.clone, "CompositeExplicitAutograd")
# Not by `register_fake`, which looks for its caller in all imported modules, if nobody has before.
_LIBRARY.impl("value_of", torch.empty_like, "Meta")


def give_own_value(graph: torch.fx.Graph, arg: torch.fx.Node) -> None:
    """Let what follows in a graph read a tensor from a copy that nobody writes to.

    It is ``arg.copy_(copy)``, which changes nothing, but what is behind it depends on the copy. The
    copy is made by an operator of its own, since a compiler would compute a ``clone`` again in the
    backward, from what was written meanwhile.

    Args:
        graph: Of Dynamo, with the place set at which nodes are inserted, within its fake mode.
        arg: The tensor.
    """
    value = arg.meta["example_value"]
    plain = graph.call_method("detach", (arg,))
    plain.meta["example_value"] = value = value.detach()
    kept = graph.call_function(torch.ops.torchfast.value_of.default, (plain,))
    kept.meta["example_value"] = torch.empty_like(value)
    put = graph.call_method("copy_", (plain, kept))
    put.meta["example_value"] = value


@contextmanager
def without_data(fake_mode: Any) -> Iterator[TracedUses]:
    """Run operations on tensors without data, and note what they use."""
    shapes = fake_mode.shape_env
    # Sizes that depend on data are other ones in this run, and nobody asks for them.
    fresh = nullcontext() if shapes is None else shapes.ignore_fresh_unbacked_symbols()
    with _left_as_it_was(), fresh, fake_mode, torch.no_grad(), TracedUses() as uses:
        yield uses


@contextmanager
def _left_as_it_was() -> Iterator[None]:
    """Leave what a run has entered and not left, as one that fails in the middle of it.

    Traced operations enter autocast and the levels of ``torch.func`` for this thread.
    """
    functorch: Any = torch._C._functorch
    leave = {
        functorch.TransformType.Vmap: functorch._vmap_decrement_nesting,
        functorch.TransformType.Grad: functorch._grad_decrement_nesting,
        functorch.TransformType.Jvp: functorch._jvp_decrement_nesting,
        functorch.TransformType.Functionalize: functorch._func_decrement_nesting,
    }
    depth = functorch.get_dynamic_layer_stack_depth()
    accelerator = torch.accelerator.current_accelerator()
    autocast = autocast_state("cpu" if accelerator is None else accelerator.type)
    nesting = _autocast_nesting()
    try:
        yield
    finally:
        while functorch.get_dynamic_layer_stack_depth() > depth:
            leave[functorch.peek_interpreter_stack().key()]()
        set_autocast(*autocast)
        for _ in range(_autocast_nesting() - nesting):
            torch.autocast_decrement_nesting()


def _autocast_nesting() -> int:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def aliases_of(values: Any) -> Any:
    """Return tensors of the same memory whose writes have a count, and a shape, of their own."""
    return tree_map_only(FakeTensor, lambda tensor: tensor.data, values)


def value_in(arg: Any) -> Any:
    """Return what stands for an argument without data, if it is a node of a graph of Dynamo."""
    return arg.meta.get("example_value") if isinstance(arg, torch.fx.Node) else arg


def may_be_kept(value: Any) -> bool:
    """Whether it is a tensor that can get its own value, and may need one."""
    # Of a tensor that comes with a gradient torch keeps the value, or raises an error.
    return isinstance(value, FakeTensor) and (value.is_leaf or not value.requires_grad)


_TOLD: set[tuple[str, type[Exception]]] = set()


def tell_once(logger: logging.Logger, message: str, error: Exception) -> None:
    """Warn of what could not be looked into, once for each kind of error.

    What errors say here may be long, and has places and names that differ each time.
    """
    key = message, type(error)
    if key not in _TOLD:
        _TOLD.add(key)
        logger.warning(message, first_line(error))


def storage_of(value: Any) -> int | None:
    """Return what stands for a tensor's memory; None of what has none of its own."""
    # A tensor that holds others, such as a DTensor, is left as it is: few buffers are.
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return None
    storage: int = value.untyped_storage()._cdata
    return storage


def memory_of(values: Any) -> set[int]:
    """Return what stands for the memory of each tensor in a structure."""
    found = map(storage_of, tree_leaves(values))
    return {storage for storage in found if storage is not None}


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is surely all of its memory, each element once."""
    num_bytes = tensor.untyped_storage().nbytes()
    # Of sizes that are symbols to ask would be to fix them.
    if not all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride(), num_bytes)):
        return False
    dense: bool = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return dense and tensor.numel() * tensor.element_size() == num_bytes


@final
class TracedUses(TorchDispatchMode):
    """Notes which memory operations write to, and which they read, on the way to what is made.

    Attributes:
        written: What was written to.
        read: What was read.
        replaced: What was put in place of all that there was, before anything was read.
    """

    # A class attribute of torch's: without, it would refuse operators that hold functions.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()
        self.read: set[int] = set()
        self.replaced: set[int] = set()

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
        # The one reads for nobody but the write behind it, others make nothing: a device, a size.
        schema = func._schema
        makes = schema.is_mutable or any("Tensor" in str(made.type) for made in schema.returns)
        reads = makes and func is not torch.ops.torchfast.value_of.default
        given = dict(_by_name(func, args, kwargs))
        trains = all(given.get(name, True) for name in _TRAINS)
        writes: set[int] = set()
        for argument in schema.arguments:
            memory = memory_of(given.get(argument.name))
            alias = argument.alias_info
            if (alias is not None and alias.is_write) or (argument.name in _STATISTICS and trains):
                writes |= memory
            elif alias is None and reads:  # and no view, which reads nothing
                self.read |= memory
        if func in _PUTS and _is_whole(args[0]):
            self.replaced |= writes - self.read - self.written
        self.written |= writes
        return func(*args, **kwargs)

    def read_and_written(self) -> set[int]:
        """Return what depends on the value that was there at first, and was written to."""
        return self.written & self.read - self.replaced

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator that holds functions.

        Torch lets two of them write to what they get; it refuses the others where they would.
        """
        name = func.name()
        if name == "invoke_subgraph":
            with self:
                return args[0](*args[2:])
        self.read |= memory_of((args, kwargs))
        if name == "triton_kernel_wrapper_mutation":
            self.written |= memory_of(_written_by_kernel(**kwargs))
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
