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
# So many at a time: their products have 8 bytes each.
_CHUNK: Final = 1 << 22


@final
class BitHash:
    """Hashes tensors of one device.

    What it keeps is 8 bytes for each word of the largest tensor, 32 MiB at most.
    """

    def __init__(self) -> None:
        # Other ones for the chunks: with those of the words, element i of chunk j would count as
        # much as element j of chunk i.
        self._of_words, self._of_chunks = _Factors(0), _Factors(1)

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the hash of a dense tensor's memory, an int64 on its device.

        Shape and strides are not in it.

        Synchronizes: For the largest tensor so far, to copy factors to the device.
        """
        words = _words(tensor.detach())
        factors = self._of_words.first(min(_CHUNK, words.numel()), words.device)
        if words.numel() <= _CHUNK:
            return (words * factors).sum()
        sums = [(chunk * factors[: chunk.numel()]).sum() for chunk in words.split(_CHUNK)]
        return (torch.stack(sums) * self._of_chunks.first(len(sums), words.device)).sum()


class _Factors:
    """Odd numbers, drawn once: an even one would leave high bits out of the sum."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._drawn: Tensor | None = None

    def first(self, count: int, device: torch.device) -> Tensor:
        """Return the first so many."""
        known = 0 if self._drawn is None else self._drawn.numel()
        if self._drawn is None or known < count:
            # On the host, for the same ones everywhere; those that there are stay what they are.
            more = torch.empty(count - known, dtype=torch.int64, device="cpu")
            more.random_(-(1 << 63), None, generator=self._generator)
            more = (more | 1).to(device)
            self._drawn = more if self._drawn is None else torch.cat([self._drawn, more])
        return self._drawn[:count]


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor in one row, in an order that is always the same."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    if not tensor.is_contiguous():  # as it lies in memory: what is only transposed is not copied
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    flat = tensor.reshape(-1)
    return flat.view(_WORDS[flat.element_size()])
