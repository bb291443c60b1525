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

import logging
from typing import Any

import torch

from torchfast._core.traced_uses import (
    aliases_of,
    give_own_value,
    may_be_kept,
    memory_of,
    storage_of,
    tell_once,
    value_in,
    without_data,
)

_logger = logging.getLogger(__name__)

_NOT_SEEN = (
    "could not look into a compiled block that is recomputed (%s): if it reads a buffer of its "
    "own and writes to it as well, its gradient is wrong; leave such blocks out of recompute"
)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def keep_what_is_written() -> None:
    """Let the checkpoint that has just been traced run again on what it has found.

    Dynamo runs it where it traces the call, and nothing of it is left in what is compiled.
    """
    try:
        _keep_what_is_written()
    except Exception as error:  # another torch may do it in another way
        tell_once(_logger, _NOT_SEEN, error)


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
    roots = memory_of(
        [
            value_in(node)
            for node in output.root_tracer.graph.nodes
            if node.op in ("placeholder", "get_attr")
        ]
    )
    values = [value_in(arg) for arg in call.args[1:]]
    # A tensor that the graph computes itself is not written to in place.
    found = [
        arg
        for arg, value in zip(call.args[1:], values, strict=True)
        if storage_of(value) in roots and may_be_kept(value)
    ]
    if not found:
        return
    fake_mode = output.tracing_context.fake_mode
    with without_data(fake_mode) as uses:
        body(*aliases_of(values))
    written = uses.read_and_written()
    with graph.inserting_before(call), fake_mode, torch.no_grad():
        for arg in found:
            if storage_of(value_in(arg)) in written:
                give_own_value(graph, arg)
