"""A Llama: grouped-query attention, rotary positions, SwiGLU and RMSNorm."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.definition import Size, Workload, blocks
from benchmarks.workloads.tokens import language_workload
from benchmarks.workloads.transformer import initialize


class LlamaSize(NamedTuple):
    """The shape of the model and of its batches, and the learning rate."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    batch: int
    context: int
    lr: float


SIZES: dict[Size, LlamaSize] = {
    "full": LlamaSize(16, 2048, 16, 8, 8192, vocabulary=32_000, batch=4, context=4096, lr=1e-4),
    "smoke": LlamaSize(2, 32, 4, 2, 64, vocabulary=64, batch=2, context=32, lr=3e-3),
}


def rotary_table(head_width: int, context: int, theta: float = 500_000.0) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angle of each position and frequency."""
    frequencies = theta ** -(torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(context).float(), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of features by the angle of its position, in float32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


class Block(nn.Module):
    """Attention and SwiGLU, each added to its input."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.head_width = size.width // size.heads
        kv_width = size.kv_heads * self.head_width
        self.norm1, self.norm2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, kv_width, bias=False)
        self.value = nn.Linear(size.width, kv_width, bias=False)
        self.proj = nn.Linear(size.width, size.width, bias=False)
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return a tensor shaped as ``x``: (batch, length, width)."""
        x = x + self.attend(self.norm1(x), cos, sin)
        y = self.norm2(x)
        mixed: Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + mixed

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return causal attention in which groups of query heads share a key and value head."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return out


class Llama(nn.Module):
    """A causal transformer with an output layer of its own."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        cos, sin = rotary_table(size.width // size.heads, size.context)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        initialize(self, size.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, vocabulary)."""
        logits: Tensor = self.head(self.hidden(tokens))
        return logits

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return what goes into the output layer, of shape (batch, length, width)."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        out: Tensor = self.norm(x)
        return out

    @property
    def output_weight(self) -> Tensor:
        """The output layer's, of shape (vocabulary, width)."""
        return self.head.weight


def workload(name: str, size: Size) -> Workload:
    """Return "llama"."""
    at = SIZES[size]
    return language_workload(
        name, "Llama", partial(Llama, at), at, num_batches=3, lr=at.lr, regions=blocks
    )
