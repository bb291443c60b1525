"""ExpertBuffers: room for the tokens of each expert that is there before the step.

A mixture sends each expert another number of tokens in each step. Sliced by these numbers, tensors
have new sizes every time: the host waits to learn them, the allocator finds no block of that size,
and no graph can hold the step. Here each expert has room for ``capacity`` tokens, always. Tokens
find their places by sums on the device, so nothing waits and nothing changes its size; those that
find no room are left out, and counted.

The buffer of the tokens is written anew by each `ExpertBuffers.dispatch`. So each mixture needs its
own: used again before the backward of what it held, torch says that a variable was modified.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchfast._core.arguments import check_int, check_type, explain_keywords
from torchfast._core.device import check_device


class Places(NamedTuple):
    """Where each token went.

    Attributes:
        slots: ``(tokens, choices)``: the row in all experts' room; one behind the last if none.
        found: ``(tokens, choices)``: whether it found room.
        room: Of how many experts, and how many rows each.
    """

    slots: Tensor
    found: Tensor
    room: tuple[int, int]


@final
class ExpertBuffers:
    """Sends tokens to experts of fixed capacity and brings their outputs back.

    Args:
        num_experts: How many.
        capacity: Rows of each.
        width: Of a token.
        dtype: Of tokens.
        device: Of tokens; None is torch's default one.

    Attributes:
        num_dropped: A device tensor: token choices that found no room, since it was made.

    Raises:
        TypeError: A count that is no int, or what is no dtype or device.
        ValueError: A count below 1, a device that is not there, tensors that do not fit together.
        UnsupportedDeviceError: A kind of device that this machine or torch build has none of.

    Numerics: A token's output is that of its experts, weighted; tokens are in their order within
        each expert. Dropped ones add zero.
    Synchronizes: Never.

    Example:
        >>> buffers = ExpertBuffers(2, 3, 4)
        >>> tokens, experts = torch.randn(5, 4), torch.tensor([[0], [1], [0], [0], [0]])
        >>> rows, places = buffers.dispatch(tokens, experts)
        >>> outputs = buffers.combine(rows, places, torch.ones(5, 1))
        >>> torch.equal(outputs[:4], tokens[:4]), int(buffers.num_dropped)
        (True, 1)
    """

    @explain_keywords
    def __init__(
        self,
        num_experts: int,
        capacity: int,
        width: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | int | None = None,
    ) -> None:
        self.num_experts = check_int("num_experts", num_experts, minimum=1)
        self.capacity = check_int("capacity", capacity, minimum=1)
        self.width = check_int("width", width, minimum=1)
        check_type("dtype", dtype, torch.dtype)
        if device is not None:  # else torch's default one
            device = check_device(device)
        self.num_dropped = torch.zeros((), dtype=torch.int64, device=device)
        # One row more, where tokens without room go: so their number need not be known.
        rows = self.num_experts * self.capacity + 1
        self._rows = torch.zeros(rows, self.width, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """What the buffer takes."""
        return self._rows.numel() * self._rows.element_size()

    def dispatch(self, tokens: Tensor, experts: Tensor) -> tuple[Tensor, Places]:
        """Put tokens into the rows of their experts.

        Args:
            tokens: ``(tokens, width)``.
            experts: ``(tokens, choices)``, ints: the experts of each token, in
                ``[0, num_experts)``, which is not checked, since that would wait for the device.

        Returns:
            ``(num_experts, capacity, width)``, zero where nobody is, differentiable in the tokens
            and valid until the next call; and where the tokens went, for `combine`.
        """
        self._check(tokens, experts)
        places = self._places(experts)
        rows: Tensor = _Dispatch.apply(tokens, places.slots, self._rows)  # type: ignore[no-untyped-call]
        return rows.view(self.num_experts, self.capacity, self.width), places

    def combine(self, outputs: Tensor, places: Places, weights: Tensor) -> Tensor:
        """Add up what experts made of each token, by weight.

        Args:
            outputs: ``(num_experts, capacity, any width)``.
            places: From `dispatch`.
            weights: ``(tokens, choices)``.

        Returns:
            ``(tokens, any width)``.
        """
        if outputs.shape[:2] != (self.num_experts, self.capacity):
            raise ValueError(
                f"outputs must be (num_experts={self.num_experts}, capacity={self.capacity}, "
                f"width), got {tuple(outputs.shape)}"
            )
        if not isinstance(places, Places) or weights.shape != places.slots.shape:
            shape = tuple(places.slots.shape) if isinstance(places, Places) else "(tokens, choices)"
            raise ValueError(
                "combine takes (outputs, places, weights), with places from dispatch and weights "
                f"of shape {shape}, got {type(places).__name__} and "
                f"{tuple(getattr(weights, 'shape', ()))}"
            )
        if places.room != (self.num_experts, self.capacity):
            raise ValueError(
                f"places are of a buffer of (num_experts, capacity)={places.room}, and this one "
                f"has {(self.num_experts, self.capacity)}; give those that its own dispatch made"
            )
        flat = outputs.flatten(0, 1)
        found = flat[places.slots.clamp(max=len(flat) - 1)]
        # Not times zero: what stands in a row that is not the token's may be infinite.
        found = found.masked_fill(~places.found.unsqueeze(-1), 0.0)
        return (found * weights.unsqueeze(-1)).sum(1)

    def _places(self, experts: Tensor) -> Places:
        flat = experts.flatten()
        one_hot = flat.unsqueeze(1) == torch.arange(self.num_experts, device=flat.device)
        # Of each token, how many of its expert come before it.
        before = one_hot.cumsum(0).gather(1, flat.unsqueeze(1)).squeeze(1) - 1
        found = before < self.capacity
        slots = torch.where(found, flat * self.capacity + before, self.num_experts * self.capacity)
        # In a backward this is a second run: recompute, which has counted in the first.
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            self.num_dropped += (~found).sum()
        room = self.num_experts, self.capacity
        return Places(slots.view_as(experts), found.view_as(experts), room)

    def _check(self, tokens: Tensor, experts: Tensor) -> None:
        check_type("tokens", tokens, Tensor)
        check_type("experts", experts, Tensor)
        if tokens.dim() != 2 or tokens.shape[1] != self.width or tokens.dtype != self._rows.dtype:
            raise ValueError(
                f"tokens must be (tokens, width={self.width}) of {self._rows.dtype}, got "
                f"{tuple(tokens.shape)} of {tokens.dtype}; make ExpertBuffers with their width and "
                "dtype="
            )
        if experts.dim() != 2 or len(experts) != len(tokens) or experts.dtype != torch.int64:
            raise ValueError(
                f"experts must be (tokens={len(tokens)}, choices) of torch.int64, got "
                f"{tuple(experts.shape)} of {experts.dtype}"
            )


@final
class _Dispatch(torch.autograd.Function):
    """Writes tokens into a buffer that is there."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, slots: Tensor, buffer: Tensor) -> Tensor:
        buffer.zero_()
        copies = tokens.unsqueeze(1).expand(-1, slots.shape[1], -1)  # one for each choice
        buffer.index_copy_(0, slots.flatten(), copies.flatten(0, 1))
        ctx.save_for_backward(slots)
        return buffer[:-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        # The row behind the last, where tokens without room went, passes nothing back.
        found = gradient[slots.clamp(max=len(gradient) - 1)]
        found = found.masked_fill((slots == len(gradient)).unsqueeze(-1), 0.0)
        return found.sum(1), None, None
