"""A number that tells whether the bits of a tensor are what they were, without a copy of them.

Each word of bits is multiplied by a number of its own, drawn once, and all are added up modulo
2**64 (the multilinear family of Carter and Wegman, 1979), in rows whose sums have numbers of their
own in turn. Of words of at most 32 bits two that differ anywhere, be it by a sign or by their
order, have the same sum with a probability of about 2**-32 within a row, and of about 2**-27 at
worst over several. A plain sum would not do: ``neg_()`` leaves it where as many signs go up as
down.

Where Triton is installed, one kernel reads a tensor once (`bit_hash_kernel`). Elsewhere torch's
operators do it, with products that are written and read again, in many times its time; the number
is the same. What does not lie in memory without gaps is copied before, either way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Final, TypeAlias, final

import torch
from torch import Tensor

Launch: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], None]

_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
# Words that share a factor of their row; the factors of all its places stay in the L2 cache.
_ROW: Final = 1 << 14
# So many words at a time without a kernel: their products have 8 bytes each.
_PART: Final = 1 << 22


@final
class BitHash:
    """Hashes tensors of one device.

    It keeps 256 KiB there, and more for a tensor of more than 2**28 words.
    """

    def __init__(self) -> None:
        # Other ones for the rows: with those of the places, element i of row j would count as much
        # as element j of row i.
        self._of_places, self._of_rows = _Factors(0), _Factors(1)
        self._has_kernel = True

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Return the hashes of dense tensors' memory, an int64 of their device for each.

        Shape and strides are not in them.

        Synchronizes: For the first tensor, and for one of more rows than factors were drawn for, to
            copy factors to the device.
        """
        hashed = self._by_kernel(tensors) if tensors[0].is_cuda and self._has_kernel else None
        if hashed is None:
            hashed = torch.stack([_by_operators(*self._parts(tensor)) for tensor in tensors])
        return hashed

    def _by_kernel(self, tensors: tuple[Tensor, ...]) -> Tensor | None:
        hashed = tensors[0].new_zeros(len(tensors), dtype=torch.int64)
        for one, tensor in zip(hashed.unbind(), tensors, strict=True):
            if not tensor.numel():
                continue
            parts = self._parts(tensor)
            try:
                _kernel()(*parts, one)
            except Exception as error:  # Triton compiles with whatever compiler it finds
                self._has_kernel = False
                if getattr(error, "name", None) == "triton":  # it is not installed
                    return None
                *_, cause = str(error).splitlines() or [""]
                warnings.warn(
                    "gradients are hashed by torch's operators, which takes the device many times "
                    f"as long, since Triton failed: {type(error).__name__}: {cause}; "
                    "check that torch.compile works here (it needs a C compiler)",
                    stacklevel=2,
                )
                return None
        return hashed

    def _parts(self, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the words of a tensor, the factors of all places, and those of its rows."""
        words = _words(tensor.detach())
        num_rows = -(-words.numel() // _ROW)
        places, rows = self._of_places, self._of_rows
        return words, places.first(_ROW, words.device), rows.first(num_rows, words.device)


def _kernel() -> Launch:
    from torchfast.memory.bit_hash_kernel import launch

    return launch


def _by_operators(words: Tensor, of_places: Tensor, of_rows: Tensor) -> Tensor:
    sums = [of_rows[:0]]
    for part in words.split(_PART):
        whole = part.numel() // _ROW * _ROW
        if whole:
            sums.append((part[:whole].view(whole // _ROW, _ROW) * of_places).sum(1))
        if whole < part.numel():
            rest = part[whole:]
            sums.append((rest * of_places[: rest.numel()]).sum().view(1))
    return (torch.cat(sums) * of_rows).sum()


@final
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
            more = torch.empty(max(count, 2 * known, _ROW) - known, dtype=torch.int64, device="cpu")
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
    if flat.stride() != (1,):  # every third element of a row, or one of another row's
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(_WORDS[flat.element_size()])
