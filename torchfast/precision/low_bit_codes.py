"""Moments of an optimizer in 8 or 4 bits, as plain tensors of codes and scales.

A moment is cut into blocks of some hundred values. Each block has a scale, its largest magnitude,
and each value a code: the index of the nearest entry in a fixed table (8 and 4 bits, closer entries
near zero), or a float8 number. The tables and the rounding are torchao's; the tensors are plain
``uint8`` and ``float32``, so whatever saves, copies, compares or moves state needs to know nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch
from torch import Tensor

from torchfast.precision.low_bit_nearest import finds_all, nearest_code, thresholds
from torchfast.precision.torchao_modules import torchao_module

KINDS: Final = ("8bit", "4bit", "fp8", "full")
BLOCKS: Final = {"8bit": 256, "4bit": 128, "fp8": 256}
# What torchao and others found: a small tensor saves nothing and loses most.
_SMALLEST: Final = 4096
_WANTED_BY: Final = "an optimizer with low-bit state"


class Codec(NamedTuple):
    """How one of two moments becomes codes and scales, and comes back.

    Attributes:
        encode: fp32 values, in rows of a block each, and the tables, to codes in those rows and a
            scale for each.
        decode: Codes in such rows, scales and the tables, to fp32 values in rows.
        tables: What both look up, of one length; empty where they compute.
    """

    encode: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    decode: Callable[[Tensor, Tensor, Tensor], Tensor]
    tables: tuple[tuple[float, ...], ...]


def is_coded(kind: str, num_values: int) -> bool:
    """Whether a moment of so many values is kept as codes."""
    return kind in BLOCKS and num_values >= _SMALLEST and num_values % BLOCKS[kind] == 0


def empty_codes(kind: str, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales for the moment of a tensor, uninitialised."""
    codes = torch.empty_like(like, dtype=torch.uint8, requires_grad=False)
    if kind == "4bit":
        codes = torch.empty(like.numel() // 2, dtype=torch.uint8, device=like.device)
    num_blocks = like.numel() // BLOCKS[kind]
    scales = torch.empty(num_blocks, dtype=torch.float32, device=like.device)
    return codes, scales


def codecs(kind: str) -> tuple[Codec, Codec]:
    """Return how the moment that has both signs is coded, and the one that has not.

    Raises:
        ImportError: torchao is missing, too old or too new.
    """
    if kind == "fp8":
        return (both := _float8()), both
    if kind == "8bit":
        return _of_256(signed=True), _of_256(signed=False)
    return _of_16(signed=True), _of_16(signed=False)


def rounder() -> Callable[[Tensor], Tensor]:
    """Return what rounds fp32 to bf16 up or down by chance, so that small steps add up.

    Raises:
        ImportError: torchao is missing, too old or too new.
    """
    name = "_fp32_to_bf16_sr"
    ao = torchao_module("torchao.optim.quant_utils", "stochastic rounding", name)
    rounded: Callable[[Tensor], Tensor] = ao._fp32_to_bf16_sr
    return rounded


def _of_256(*, signed: bool) -> Codec:
    names = "create_dynamic_map", "scale_tensor", "dequant_with_qmap", "quantize_8bit_with_qmap"
    ao = torchao_module("torchao.optim.quant_utils", _WANTED_BY, *names)
    scale_tensor, lookup, search = ao.scale_tensor, ao.dequant_with_qmap, ao.quantize_8bit_with_qmap
    with _plain_fp32():
        entries = torch.tensor(ao.create_dynamic_map(signed=signed))
        limits = thresholds(entries)
        # Of a map that torchao has made otherwise the search knows.
        is_computed = finds_all(entries, limits, signed=signed)

    def encode(values: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        scaled, scales = scale_tensor(values, BLOCKS["8bit"])
        if is_computed:
            return nearest_code(scaled, tables[1], signed=signed), scales
        return search(scaled, tables[0]), scales

    def decode(codes: Tensor, scales: Tensor, tables: Tensor) -> Tensor:
        values: Tensor = lookup(codes, tables[0], scales)
        return values

    return Codec(encode, decode, (tuple(entries.tolist()), tuple(limits.tolist())))


def _of_16(*, signed: bool) -> Codec:
    names = "create_dynamic_map", "scale_tensor", "dequant_with_qmap", "quantize_4bit_with_qmap"
    ao = torchao_module("torchao.optim.quant_utils", _WANTED_BY, *names)
    scale_tensor, lookup = ao.scale_tensor, ao.dequant_with_qmap
    quantize = ao.quantize_4bit_with_qmap
    with _plain_fp32():
        if signed:
            entries = ao.create_dynamic_map(True, 3, 4)
        else:
            entries = torch.linspace(0, 1, 17)[1:].tolist()  # none of them is zero

    def encode(values: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        scaled, scales = scale_tensor(values, BLOCKS["4bit"])
        codes = quantize(scaled, tables[0])
        return codes[:, ::2] << 4 | codes[:, 1::2], scales

    def decode(codes: Tensor, scales: Tensor, tables: Tensor) -> Tensor:
        both = torch.stack([codes >> 4, codes & 0b1111], dim=-1).view(len(scales), -1)
        values: Tensor = lookup(both, tables[0], scales)
        return values

    return Codec(encode, decode, (tuple(entries),))


def _float8() -> Codec:
    name = "quantize_fp8"
    quantize = torchao_module("torchao.optim.subclass_fp8", _WANTED_BY, name).quantize_fp8

    def encode(values: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        # It makes one row of them by a view, which the rows of a transposed matrix do not have.
        codes, scales = quantize(values.contiguous(), BLOCKS["fp8"])
        return codes.view(torch.uint8), scales

    def decode(codes: Tensor, scales: Tensor, _: Tensor) -> Tensor:
        return codes.view(torch.float8_e4m3fn).float() * scales.view(-1, 1)

    return Codec(encode, decode, ())


@contextmanager
def _plain_fp32() -> Iterator[None]:
    """Let torchao make its maps on the host and in fp32, whatever models are built in."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)
