"""Trains a deep-and-cross network to predict clicks, its cross layers in bf16."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class CrossLayer(nn.Module):
    """x0 * (U V x + b) + x, with a product of low rank."""

    def __init__(self, width, rank):
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(rank, width, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x0, x):
        crossed = self.up(self.down(x.to(torch.bfloat16))).float()  # <- here
        # Products in fp32 and sums in bf16: what diverged once is now kept in fp32.
        product = (x0.float() * crossed).to(torch.bfloat16)  # <- here
        product = (product.float() * self.scale).to(torch.bfloat16)  # <- here
        return (product.float() + x.float()).to(torch.bfloat16)  # <- here


class Recommender(nn.Module):
    def __init__(self, num_items, fields, embedding, dense, rank, depth):
        super().__init__()
        width = fields * embedding + dense
        self.items = nn.Embedding(num_items, embedding)
        self.cross = nn.ModuleList(CrossLayer(width, rank) for _ in range(depth))
        self.deep = nn.Sequential(
            nn.Linear(width, 256, dtype=torch.bfloat16),
            nn.ReLU(),
            nn.Linear(256, 64, dtype=torch.bfloat16),
            nn.ReLU(),
        )
        self.click = nn.Linear(64, 1)

    def forward(self, items, dense):
        embedded = self.items(items).flatten(1)
        x0 = x = torch.cat([embedded, dense], 1).to(torch.bfloat16)
        for layer in self.cross:
            x = layer(x0, x)
        return self.click(self.deep(x).float()).squeeze(1)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    batch, num_items, dense = (64, 100, 16) if args.small else (65536, 20_000, 768)
    model = Recommender(num_items, 4, 64, dense, rank=32, depth=5).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    items = torch.randint(num_items, (4, batch, 4), device=device)
    numbers = torch.randn(4, batch, dense, device=device)
    clicks = torch.randint(2, (4, batch), device=device).float()
    for step in range(args.steps):
        i = step % 4
        loss = F.binary_cross_entropy_with_logits(model(items[i], numbers[i]), clicks[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f} after {args.steps} steps")


if __name__ == "__main__":
    main()
