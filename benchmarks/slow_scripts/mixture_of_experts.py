"""Trains a transformer whose feed-forward layers are mixtures of experts, one for each token."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Mixture(nn.Module):
    def __init__(self, width, num_experts):
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(num_experts)
        )

    def forward(self, x):
        tokens = x.flatten(0, 1)
        gate, chosen = self.router(tokens).softmax(-1).max(-1)
        output = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            mine = chosen == i
            result = expert(tokens[mine])  # <- here
            output[mine] = result.to(output.dtype)  # <- here
        return (output * gate[:, None]).view_as(x)


class Block(nn.Module):
    def __init__(self, width, num_experts):
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mixture = Mixture(width, num_experts)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mixture(self.norm2(x))


class Model(nn.Module):
    def __init__(self, vocabulary, width, layers, num_experts):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, num_experts) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.blocks(self.tokens(tokens)))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = torch.device(args.device)
    width, layers, experts, batch, length = (
        (64, 2, 4, 2, 16) if args.small else (768, 6, 8, 80, 512)
    )
    model = Model(4096, width, layers, experts).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    data = torch.randint(4096, (64, batch, length + 1), device=device)
    for step in range(args.steps):
        tokens, targets = data[step % 64, :, :-1], data[step % 64, :, 1:]
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f} after {args.steps} steps")


if __name__ == "__main__":
    main()
