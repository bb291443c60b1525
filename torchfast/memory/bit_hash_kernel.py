"""The kernel of `bit_hash`: it reads words once, and adds up in registers.

Imported where Triton is, and only once it is needed.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

_BLOCK: Final = 2048


# Without types: Triton takes every name in here for one of the kernel's.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_words"], do_not_specialize_on_alignment=["out"]
)
def _hash(  # type: ignore[no-untyped-def]
    words,
    of_places,
    of_rows,
    out,
    num_words,
    row_words: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((block,), tl.int64)
    for first in range(0, row_words, block):
        places = first + tl.arange(0, block)
        at = row * row_words + places
        word = tl.load(words + at, mask=at < num_words, other=0).to(tl.int64)
        total += word * tl.load(of_places + places)
    # In any order: a sum modulo 2**64 has no rounding.
    tl.atomic_add(out, tl.sum(total, 0) * tl.load(of_rows + row), sem="relaxed")


def launch(words: Tensor, of_places: Tensor, of_rows: Tensor, out: Tensor) -> None:
    """Add the hash of words to ``out``.

    Args:
        words: One row of integers.
        of_places: As many as the words that share a factor of ``of_rows``, a multiple of 2,048.
        of_rows: One for each so many words.
        out: An int64.
    """
    grid = (of_rows.numel(),)
    _hash[grid](words, of_places, of_rows, out, words.numel(), of_places.numel(), _BLOCK)
