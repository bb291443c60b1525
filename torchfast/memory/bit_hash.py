"""A number that tells whether the bits of a tensor are what they were, without a copy of them.

Each word of bits is multiplied by a number of its own, drawn once, and all are added up modulo
2**64 (the multilinear family of Carter and Wegman, 1979). Of words of at most 32 bits two that
differ anywhere, be it by a sign or by their order, have the same sum with a probability of about
2**-32. A plain sum would not do: ``neg_()`` leaves it where as many signs go up as down.
"""

from __future__ import annotations

from typing import Final, final

import torch
from torch import Tensor

_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
# So many at a time: products have 8 bytes each, and should stay in the device's cache.
_CHUNK: Final = 1 << 22


@final
class BitHash:
    """Hashes tensors of one device.

    What it keeps is 8 bytes for each element of the largest tensor, 32 MiB at most.
    """

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._factors: Tensor | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the hash of a dense tensor, an int64 on its device.

        Synchronizes: For the largest tensor so far, to copy factors to the device.
        """
        words = _words(tensor.detach())
        factors = self._first(min(_CHUNK, words.numel()), words.device)
        if words.numel() <= _CHUNK:
            return (words * factors).sum()
        sums = [(chunk * factors[: chunk.numel()]).sum() for chunk in words.split(_CHUNK)]
        return (torch.stack(sums) * self._first(len(sums), words.device)).sum()

    def _first(self, count: int, device: torch.device) -> Tensor:
        """Return the first factors."""
        known = 0 if self._factors is None else self._factors.numel()
        if self._factors is None or known < count:
            # On the host, for the same ones everywhere; those that there are stay what they are.
            more = torch.empty(count - known, dtype=torch.int64, device="cpu")
            more.random_(-(1 << 63), None, generator=self._generator)
            more = more.to(device)
            self._factors = more if self._factors is None else torch.cat([self._factors, more])
        return self._factors[:count]


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor in one row, in an order that is always the same."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    if not tensor.is_contiguous():  # as it lies in memory: what is only transposed is not copied
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    flat = tensor.reshape(-1)
    return flat.view(_WORDS[flat.element_size()])
