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

import functools
import logging
import operator
from typing import Any, final

import torch
from torch._subclasses import FakeTensor
from typing_extensions import override

_logger = logging.getLogger(__name__)


@final
class KeptReads:
    """A backend that lets the backward read what the forward has read.

    Args:
        mode: As in ``torch.compile``.
        dynamic: Likewise.
    """

    def __init__(self, mode: str, dynamic: bool | None) -> None:
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
        except Exception as error:  # another torch may trace in another way
            _warn_once(f"{type(error).__name__}: {error}")
        return self._compiler(graph, inputs)

    def reset(self) -> None:
        """Forget what was recorded for the compiler's own graphs."""
        self._compiler.reset()


@functools.cache
def _warn_once(why: str) -> None:
    _logger.warning(
        "could not look into what is compiled (%s): a forward that reads a buffer of its own and "
        "writes to it afterwards may get another gradient; prove it with "
        "torchfast.testing.assert_parity, or leave its block out of regions",
        why,
    )


def keep_reads(graph: torch.fx.GraphModule) -> None:
    """Change a graph of Dynamo in place, so that its backward reads what its forward has read."""
    nodes = list(graph.graph.nodes)
    if not any(map(_may_write, nodes)):
        return
    roots = [n for n in nodes if n.op in ("placeholder", "get_attr") and _may_be_kept(_value(n))]
    output = next(n for n in nodes if n.op == "output")
    if not roots or not any(_needs_gradient(_value(n)) for n in output.all_input_nodes):
        return
    # Here, since it registers an operator.
    from torchfast._core.traced_uses import aliases_of, give_own_value, storage_of, without_data

    fake_mode = _value(roots[0]).fake_mode
    given = [aliases_of(_value(n)) for n in nodes if n.op == "placeholder"]
    with without_data(fake_mode) as uses:
        _WithoutData(graph, fake_mode).run(*given)
    written = uses.read_and_written()
    first = next(n for n in nodes if n.op not in ("placeholder", "get_attr"))
    found = [n for n in roots if storage_of(_value(n)) in written]
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
        return any(getattr(target, name)._schema.is_mutable for name in target.overloads())
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    name, home = getattr(target, "__name__", ""), getattr(target, "__module__", None) or ""
    if home == "_operator":
        return name == "setitem" or (hasattr(operator, f"__{name}__") and name.startswith("i"))
    writes = name.endswith("_") or bool(node.kwargs.get("inplace")) or "out" in node.kwargs
    # Of functions that hold others, and those that are not torch's, nobody knows.
    is_known = home.startswith(("torch", "builtins")) and not isinstance(
        target, torch._ops.HigherOrderOperator
    )
    return writes or not is_known


def _value(node: torch.fx.Node) -> Any:
    return node.meta.get("example_value")


def _may_be_kept(value: Any) -> bool:
    # Of a tensor that comes with a gradient torch keeps the value, or raises an error.
    return isinstance(value, FakeTensor) and (value.is_leaf or not value.requires_grad)


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


@final
class _WithoutData(torch.fx.Interpreter):
    """Runs a graph on tensors without data, and has none of its own."""

    def __init__(self, graph: torch.fx.GraphModule, fake_mode: Any) -> None:
        super().__init__(graph)
        self._fake_mode = fake_mode

    @override
    def run_node(self, n: torch.fx.Node) -> Any:
        value = _value(n) if n.op == "get_attr" else None
        if isinstance(value, FakeTensor):
            return value.data
        return super().run_node(n)
