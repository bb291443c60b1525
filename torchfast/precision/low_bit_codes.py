"""Moments of an optimizer in 8 or 4 bits, as plain tensors of codes and scales.

A moment is cut into blocks of some hundred values. Each block has a scale, its largest magnitude,
and each value a code: the index of the nearest entry in a fixed table (8 and 4 bits, closer entries
near zero), or a float8 number. The tables and the rounding are torchao's; the tensors are plain
``uint8`` and ``float32``, so whatever saves, copies, compares or moves state needs to know nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from torchfast.precision.torchao_modules import torchao_module

KINDS: Final = ("8bit", "4bit", "fp8", "full")
BLOCKS: Final = {"8bit": 256, "4bit": 128, "fp8": 256}
# What torchao and others found: a small tensor saves nothing and loses most.
_SMALLEST: Final = 4096
_WANTED_BY: Final = "an optimizer with low-bit state"


class Codec(NamedTuple):
    """How a moment becomes codes and scales, and comes back.

    Attributes:
        encode: Flat fp32 values and a table, to codes and scales.
        decode: Codes, scales and the table, to flat fp32 values.
        signed: The table of a moment that has both signs; empty where none is needed.
        unsigned: That of one that has not.
    """

    encode: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    decode: Callable[[Tensor, Tensor, Tensor], Tensor]
    signed: tuple[float, ...]
    unsigned: tuple[float, ...]


def is_coded(kind: str, num_values: int) -> bool:
    """Whether a moment of so many values is kept as codes."""
    return kind in BLOCKS and num_values >= _SMALLEST and num_values % BLOCKS[kind] == 0


def empty_codes(kind: str, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales for the moment of a tensor, uninitialised."""
    codes = torch.empty_like(like, dtype=torch.uint8, requires_grad=False)
    if kind == "4bit":
        codes = torch.empty(like.numel() // 2, dtype=torch.uint8, device=like.device)
    scales = torch.empty(like.numel() // BLOCKS[kind], device=like.device)
    return codes, scales


def codec(kind: str) -> Codec:
    """Return how moments of this kind are coded.

    Raises:
        ImportError: torchao is missing, too old or too new.
    """
    if kind == "fp8":
        return Codec(*_as_float8(), (), ())
    quantize = f"quantize_{kind}_with_qmap"
    names = "create_dynamic_map", "scale_tensor", "dequant_with_qmap", quantize
    ao = torchao_module("torchao.optim.quant_utils", _WANTED_BY, *names)
    if kind == "8bit":
        signed, unsigned = ao.create_dynamic_map(signed=True), ao.create_dynamic_map(signed=False)
        return Codec(*_by_table(ao, "8bit"), tuple(signed), tuple(unsigned))
    signed = ao.create_dynamic_map(True, 3, 4)
    unsigned = torch.linspace(0, 1, 17, device="cpu")[1:].tolist()  # none of them is zero
    return Codec(*_by_table(ao, "4bit"), tuple(signed), tuple(unsigned))


def rounder() -> Callable[[Tensor], Tensor]:
    """Return what rounds fp32 to bf16 up or down by chance, so that small steps add up.

    Raises:
        ImportError: torchao is missing, too old or too new.
    """
    name = "_fp32_to_bf16_sr"
    ao = torchao_module("torchao.optim.quant_utils", "stochastic rounding", name)
    rounded: Callable[[Tensor], Tensor] = ao._fp32_to_bf16_sr
    return rounded


def _by_table(ao: Any, kind: str) -> tuple[Any, Any]:
    block = BLOCKS[kind]
    scale_tensor, lookup = ao.scale_tensor, ao.dequant_with_qmap
    is_packed = kind == "4bit"
    quantize = ao.quantize_4bit_with_qmap if is_packed else ao.quantize_8bit_with_qmap

    def encode(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        scaled, scales = scale_tensor(values, block)
        codes = quantize(scaled, table)
        return (codes[::2] << 4 | codes[1::2]) if is_packed else codes, scales

    def decode(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
        if is_packed:
            codes = torch.stack([codes >> 4, codes & 0b1111], dim=-1).view(-1)
        values: Tensor = lookup(codes, table, scales)
        return values

    return encode, decode


def _as_float8() -> tuple[Any, Any]:
    block = BLOCKS["fp8"]
    name = "quantize_fp8"
    quantize = torchao_module("torchao.optim.subclass_fp8", _WANTED_BY, name).quantize_fp8

    def encode(values: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = quantize(values, block)
        return codes.view(torch.uint8), scales

    def decode(codes: Tensor, scales: Tensor, _: Tensor) -> Tensor:
        values = codes.view(torch.float8_e4m3fn).float()
        return (values.view(-1, block) * scales.view(-1, 1)).view(-1)

    return encode, decode
