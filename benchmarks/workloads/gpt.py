"""GPT as in nanoGPT, and the same with a mixture of experts in each block."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.definition import Size, Workload, blocks
from benchmarks.workloads.tokens import language_workload
from benchmarks.workloads.transformer import Block, initialize


class GPTSize(NamedTuple):
    """The shape of the model and of its batches, and the learning rate."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    context: int
    lr: float
    experts: int = 0


SIZES: dict[tuple[str, Size], GPTSize] = {
    ("gpt-small", "full"): GPTSize(6, 384, 6, vocabulary=256, batch=16, context=256, lr=3e-4),
    ("gpt-small", "smoke"): GPTSize(2, 32, 2, vocabulary=64, batch=4, context=32, lr=3e-3),
    # 50,257 tokens, padded to a multiple of 64 for the sake of the last matrix product.
    ("gpt2", "full"): GPTSize(12, 768, 12, vocabulary=50_304, batch=32, context=1024, lr=3e-4),
    ("gpt2", "smoke"): GPTSize(3, 48, 3, vocabulary=128, batch=2, context=32, lr=3e-3),
    ("moe", "full"): GPTSize(
        6, 512, 8, vocabulary=32_000, batch=4, context=64, lr=3e-4, experts=32
    ),
    ("moe", "smoke"): GPTSize(2, 32, 2, vocabulary=64, batch=2, context=32, lr=3e-3, experts=4),
}


class GPT(nn.Module):
    """A causal transformer whose output layer is the embedding again."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(
            Block(size.width, size.heads, causal=True, num_experts=size.experts)
            for _ in range(size.layers)
        )
        self.norm = nn.LayerNorm(size.width, bias=False)
        initialize(self, size.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, vocabulary)."""
        return F.linear(self.hidden(tokens), self.output_weight)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return what goes into the output layer, of shape (batch, length, width)."""
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out

    @property
    def output_weight(self) -> Tensor:
        """The output layer's, of shape (vocabulary, width)."""
        return self.embed.weight


def workload(name: str, size: Size) -> Workload:
    """Return "gpt-small", "gpt2" or "moe"."""
    at = SIZES[name, size]
    kind = {"gpt-small": "GPT", "gpt2": "GPT-2", "moe": "MoE GPT"}[name]
    experts = f", {at.experts} experts" if at.experts else ""
    return language_workload(
        name, kind, partial(GPT, at), at, details=experts, lr=at.lr, regions=blocks
    )
