"""The pre-norm transformer block that GPT, the mixture of experts and ViT are made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """Two linear layers, four times as wide inside."""

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor shaped as ``x``."""
        mixed: Tensor = self.down(F.gelu(self.up(x)))
        return mixed


class Experts(nn.Module):
    """Feed-forward networks of which a router picks two for each token.

    Every expert runs on all tokens, and its gate is zero where it was not picked. That is more
    arithmetic than sorting tokens by expert, but no shape depends on the data: the host need not
    wait for the router, and the step can be captured.
    """

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(width, bias=True) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor shaped as ``x``."""
        scores = self.router(x)
        picked = scores.topk(2)
        others = torch.full_like(scores, float("-inf"))
        gates = others.scatter(-1, picked.indices, picked.values).softmax(-1)
        mixed = torch.zeros_like(x)
        for gate, expert in zip(gates.split(1, dim=-1), self.experts, strict=True):
            mixed = mixed + gate * expert(x)
        return mixed


class Block(nn.Module):
    """Attention and a feed-forward network, each added to its input."""

    def __init__(
        self, width: int, heads: int, *, causal: bool, bias: bool = False, num_experts: int = 0
    ) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.proj = nn.Linear(width, width, bias=bias)
        self.feed_forward = (
            Experts(width, num_experts) if num_experts else FeedForward(width, bias=bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor shaped as ``x``: (batch, length, width)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        mixed: Tensor = self.feed_forward(self.norm2(x))
        return x + mixed


def initialize(model: nn.Module, layers: int) -> None:
    """Initialize as GPT-2: what ends a residual branch is added up 2 * layers times."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            ends_branch = name.endswith(("proj.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if ends_branch else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
