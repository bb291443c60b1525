"""A copy of all that a step reads and changes, to run the same step more than once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from torchfast._core.pinned_block import PinnedBlock
from torchfast.graphs.copies import copies_of
from torchfast.graphs.host_facts import HostFacts
from torchfast.graphs.named_state import NamedState

# Of the device's free memory copies may take this part; what takes more goes to the host. The steps
# that are run from a copy need memory too.
_PART_OF_FREE = 0.2
_ALIGNMENT = 64


@final
class SavedNamedState:
    """Tensors, numbers and generators of a named state, as they are now.

    On the device if there is memory to spare, else in pinned memory of the host.

    Args:
        state: What to save.
        device: Where the step runs.
        others: Tensors to save with it.
        facts: Of before a capture, with what the step reached right behind it: put back too.
        everything: What `NamedState.everything` returns now, if somebody has asked already.

    Synchronizes: Yes.
    """

    def __init__(
        self,
        state: NamedState,
        device: torch.device,
        others: Sequence[Tensor] = (),
        facts: HostFacts | None = None,
        everything: Sequence[Tensor] | None = None,
    ) -> None:
        everything = state.everything() if everything is None else everything
        if facts is None:
            self._host = HostFacts(state, device, everything=everything)
        else:
            self._host = facts.afresh(state, everything)
        self._device = device
        self._tensors = [*everything, *others]
        self._block: PinnedBlock | None = None
        if have_room(device, bytes_of(self._tensors)):
            self._values = copies_of(self._tensors)
        else:
            self._values = self._on_host()

    def put_back(self) -> None:
        """Bring everything to what it was."""
        self._host.put_back()
        with torch.no_grad():
            for tensor, value in zip(self._tensors, self._values, strict=True):
                tensor.copy_(value, non_blocking=self._block is not None)
        self._wait()

    def tensors(self) -> list[Tensor]:
        """Return the copies, in the order of `NamedState.everything`."""
        return self._values

    def _on_host(self) -> list[Tensor]:
        plain = [t for t in self._tensors if type(t) in (Tensor, torch.nn.Parameter)]
        starts, end = {}, 0
        for tensor in plain:
            starts[id(tensor)] = end
            end += -(-bytes_of([tensor]) // _ALIGNMENT) * _ALIGNMENT
        self._block = PinnedBlock(end, self._device)
        values = []
        for tensor in self._tensors:
            value = tensor.detach()
            if (start := starts.get(id(tensor))) is None:  # made of several: each knows its own way
                values.append(value.to("cpu", copy=True))
                continue
            part = self._block.memory[start : start + bytes_of([tensor])]
            # In the tensor's own layout, or to put it back would take a copy on the device.
            strides = torch.empty_like(tensor, device="meta").stride()
            values.append(part.view(tensor.dtype).as_strided(tensor.shape, strides))
            values[-1].copy_(value, non_blocking=True)
        self._wait()
        return values

    def _wait(self) -> None:
        if self._block is not None and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def bytes_of(some: Sequence[Tensor]) -> int:
    """Return how much memory the values of some tensors take."""
    return sum(t.numel() * t.element_size() for t in some)


def have_room(device: torch.device, num_bytes: int) -> bool:
    """Whether copies of so many bytes may stay on the device."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return num_bytes < _PART_OF_FREE * free
