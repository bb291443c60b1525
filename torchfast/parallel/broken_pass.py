"""A sharded model behind a forward or a backward that ended in the middle.

`fully_shard` keeps account of a pass: what is gathered, which gradients are there already, and
whether the end of the backward will be seen to. An error leaves the account as it stands, and the
next step goes on from there: gradients of the step that failed come into its own, nobody waits for
what its last blocks reduce, and a capture that failed leaves what it has gathered, which no device
has ever computed. None of it raises. So whoever goes on has the account closed first.

From torch 2.13 on a model can do that itself, but waits for events, which no device knows where a
capture has recorded them, and leaves gradients of whole parameters.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from torchfast._core.fsdp_pieces import own_pieces

_STREAMS: Final = (
    "all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream",
)  # fmt: skip
# What is None between passes, or empty; some torch have more of it, and some less.
_OF_ALL: Final = (
    "all_gather_state", "reduce_scatter_state", "reduce_scatter_states", "post_forward_order",
    "_last_post_reduce_events",
)  # fmt: skip
_OF_A_STATE: Final = ("_modules_to_run_forward",)
_OF_A_PIECE: Final = (
    "_all_gather_result", "_post_reduce_event", "_reshard_after_forward_event",
    "_all_reduce_state", "_partial_reduce_output", "_post_forward_indices",
)  # fmt: skip
_OF_A_PARAMETER: Final = ("unsharded_accumulated_grad", "grad_offload_event")


def close_pass(model: nn.Module, device: torch.device) -> None:
    """Bring a sharded model to where it is between steps; gradients on their way are lost.

    Not within a capture.

    Synchronizes: Never.
    """
    for module in model.modules():
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        if state is None:
            continue
        context, shared = state._state_ctx, state._comm_ctx
        if device.type == "cuda":
            # Work on these may still be at memory that is let go of below.
            for name in _STREAMS:
                if (stream := getattr(shared, name, None)) is not None:
                    torch.cuda.current_stream(device).wait_stream(stream)
        context.iter_forward_root, context.post_backward_final_callback_queued = None, False
        _empty(shared, _OF_ALL)
        _empty(state, _OF_A_STATE)
        state._training_state = type(state._training_state).IDLE
        for piece in own_pieces(module):
            _close_piece(piece)


def _close_piece(piece: Any) -> None:
    _empty(piece, _OF_A_PIECE)
    piece._training_state = type(piece._training_state).IDLE
    for parameter in piece.fsdp_params:
        _empty(parameter, _OF_A_PARAMETER)
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is not None:
            whole.grad = None
    piece._to_sharded()


def _empty(holder: Any, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, list | dict | set):
            value.clear()
        elif value is not None:
            setattr(holder, name, None)
