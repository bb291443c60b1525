"""What a compiled forward reads of a tensor that it writes to, kept for its backward.

Torch's inductor computes again in the backward what is cheap, from the inputs of the graph. One of
them that the forward has written to by then, such as a centre that was subtracted and then moved,
or a codebook that moves with its codes, holds the new value: the gradient is another one, and
nothing is said (torch 2.11 and 2.13). So it may be where the write comes first: what was read may
be made once more from what was there before.

So each tensor that is read and written to gets its own value from a copy of it, in front of the
graph (`torchfast._core.traced_uses`); the backward gets the copy. It costs that copy, and its
memory until the backward. Which tensors these are is seen in the graph that is to be compiled. A
buffer that is filled anew as a whole and then read needs none.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any, cast, final

import torch
from torch._subclasses import FakeTensor
from typing_extensions import override

from torchfast._core.traced_uses import (
    aliases_of,
    give_own_value,
    may_be_kept,
    storage_of,
    tell_once,
    value_in,
    without_data,
)

_logger = logging.getLogger(__name__)

_NOT_SEEN = (
    "could not look into what is compiled (%s): a forward that reads a buffer of its own and "
    "writes to it may get another gradient; prove it with torchfast.testing.assert_parity, or "
    "leave its block out of regions"
)

# As the module `operator` calls them.
_IN_PLACE = (
    *("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
    *("iand", "ior", "ixor", "ilshift", "irshift", "iconcat"),
)
# What writes to an argument though its name does not end so: statistics, ranges of observers.
_UNSAID = ("batch_norm", "instance_norm", "moving_avg", "rrelu")


@final
class KeptReads:
    """A backend that lets the backward read what the forward has read.

    Args:
        mode: As in ``torch.compile``.
        dynamic: Likewise.
    """

    def __init__(self, mode: str, dynamic: bool | None) -> None:
        # As for "inductor" itself: loaded by torch._dynamo.reset(), it would end that in an error.
        import torch._inductor.compile_fx

        self.__name__ = "inductor"  # torch's name of what it calls
        self._compiler: Any = torch._TorchCompileInductorWrapper(mode, None, dynamic)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeptReads) and bool(self._compiler == other._compiler)

    __hash__ = None  # type: ignore[assignment]  # as torch's own

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Compile a graph."""
        try:
            keep_reads(graph)
        except Exception as error:  # what runs with data may fail without, or another torch differ
            tell_once(_logger, _NOT_SEEN, error)
        return self._compiler(graph, inputs)

    def reset(self) -> None:
        """Forget what was recorded for the compiler's own graphs."""
        self._compiler.reset()


def keep_reads(graph: torch.fx.GraphModule) -> None:
    """Change a graph of Dynamo in place, so that its backward reads what its forward has read."""
    nodes = list(graph.graph.nodes)
    if not any(map(_may_write, nodes)):
        return
    roots = [n for n in nodes if n.op in ("placeholder", "get_attr") and may_be_kept(value_in(n))]
    # As torch asks before it makes a backward.
    if not roots or not torch.is_grad_enabled() or not any(map(_needs_gradient, nodes)):
        return
    fake_mode = value_in(roots[0]).fake_mode
    given = [aliases_of(value_in(n)) for n in nodes if n.op == "placeholder"]
    with without_data(fake_mode) as uses:
        _WithoutData(graph).run(*given)
    written = uses.read_and_written()
    first = next(n for n in nodes if n.op not in ("placeholder", "get_attr"))
    found = [n for n in roots if storage_of(value_in(n)) in written]
    if expanded := [n for n in found if _is_expanded(value_in(n))]:
        found = [n for n in found if n not in expanded]
        why = f"{expanded[0].target} is an expanded view of what is written to"
        tell_once(_logger, _NOT_SEEN, ValueError(why))
    with graph.graph.inserting_before(first), fake_mode, torch.no_grad():
        for node in found:
            give_own_value(graph.graph, node)
    if found:
        graph.recompile()


def _may_write(node: torch.fx.Node) -> bool:
    """Whether a node may write to what it gets; most graphs have none, and need no second look."""
    target: Any = node.target
    if node.op == "call_method":
        return str(target).endswith("_")
    if node.op != "call_function":
        return node.op == "call_module"
    if isinstance(target, torch._ops.OpOverloadPacket):
        some = [getattr(target, name) for name in target.overloads()]
    else:
        some = [target] if isinstance(target, torch._ops.OpOverload) else []
    if some:
        is_unsaid = any(part in str(target) for part in _UNSAID)
        return is_unsaid or any(operation._schema.is_mutable for operation in some)
    name, home = getattr(target, "__name__", ""), getattr(target, "__module__", None) or ""
    if home == "_operator":
        return name in _IN_PLACE
    # Of functions that hold others, and those that are not torch's, nobody knows.
    is_known = home.startswith(("torch", "builtins")) and not isinstance(
        target, torch._ops.HigherOrderOperator
    )
    writes = name.endswith("_") or "out" in node.kwargs or any(part in name for part in _UNSAID)
    return writes or not is_known or any(_asked_for(node, name) for name in ("inplace", "max_norm"))


def _asked_for(node: torch.fx.Node, name: str) -> bool:
    """Whether a function is called with an argument that makes it write, by name or by place."""
    try:
        names = list(inspect.signature(cast("Any", node.target)).parameters)
    except (TypeError, ValueError):  # of a function in C, which takes none of these
        names = []
    place = names.index(name) if name in names else len(node.args)
    return bool(node.kwargs.get(name) or (place < len(node.args) and node.args[place]))


def _is_expanded(value: torch.Tensor) -> bool:
    """Whether elements share their memory, so that nothing can be put there."""
    pairs = zip(value.shape, value.stride(), strict=True)
    return any(isinstance(stride, int) and stride == 0 and size != 1 for size, stride in pairs)


def _needs_gradient(node: torch.fx.Node) -> bool:
    value = value_in(node)
    is_input = node.op in ("placeholder", "get_attr") and isinstance(value, torch.Tensor)
    return is_input and bool(value.requires_grad)


@final
class _WithoutData(torch.fx.Interpreter):
    """Runs a graph on tensors without data, and has none of its own."""

    @override
    def run_node(self, n: torch.fx.Node) -> Any:
        value = value_in(n) if n.op == "get_attr" else None
        return value.data if isinstance(value, FakeTensor) else super().run_node(n)
