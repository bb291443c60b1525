"""Trains a small GPT on random tokens and keeps an eye on the norms of gradients and weights."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, length, width, layers):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places)))


def norms_of(model):
    """Return the norms of all gradients and of all weights together, as numbers for the log."""
    gradients = weights = 0.0
    for parameter in model.parameters():
        if parameter.grad is not None:
            both = parameter.grad, parameter.detach()
            gradient, weight = (tensor.norm(2).item() for tensor in both)  # <- here
            gradients, weights = gradients + gradient**2, weights + weight**2
    return math.sqrt(gradients), math.sqrt(weights)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = torch.device(args.device)
    width, layers, batch, length = (64, 2, 2, 16) if args.small else (512, 12, 80, 512)
    model = GPT(4096, length, width, layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    text = torch.randint(4096, (200_000,), device=device)
    offsets = torch.arange(length + 1, device=device)

    norms = []
    for _ in range(args.steps):
        starts = torch.randint(len(text) - length - 1, (batch, 1), device=device)
        window = text[starts + offsets]
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(window[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(norms_of(model))
        optimizer.step()
    print(f"loss {loss.item():.3f} after {args.steps} steps, largest gradient {max(norms)[0]:.2f}")


if __name__ == "__main__":
    main()
