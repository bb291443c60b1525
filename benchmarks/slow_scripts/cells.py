"""Trains a denoising autoencoder of single-cell gene counts with a Poisson likelihood."""

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Sizes:
    genes: int = 16384
    width: int = 4096
    blocks: int = 3
    batch: int = 8192
    cells: int = 32768


SMALL = Sizes(genes=256, width=64, blocks=2, batch=64, cells=256)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))  # <- here


class CellAutoencoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.encode = nn.Linear(sizes.genes, sizes.width)
        self.blocks = nn.Sequential(*[Residual(sizes.width) for _ in range(sizes.blocks)])
        self.norm = nn.LayerNorm(sizes.width)
        self.decode = nn.Linear(sizes.width, sizes.genes)

    def forward(self, x):
        return self.decode(self.norm(self.blocks(self.encode(x))))  # <- here


class Trainer:
    def __init__(self, sizes, device):
        self.sizes = sizes
        with device:
            self.model = CellAutoencoder(sizes)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)
        self.counts = self.simulate(device)
        self.order = torch.randperm(sizes.cells, device=device)
        self.device = device

    def simulate(self, device):
        """Counts of cells that mix a few expression programs, kept as bytes."""
        programs = torch.randn(16, self.sizes.genes, device=device)
        parts = []
        for size in [self.sizes.batch] * (self.sizes.cells // self.sizes.batch):
            usage = 0.3 * torch.randn(size, 16, device=device)
            rate = (usage @ programs - 0.5).clamp_(max=4.0).exp_()
            parts.append(torch.poisson(rate).clamp_(max=255).to(torch.uint8))
        return torch.cat(parts)

    def batch(self, step):
        first = step * self.sizes.batch % self.sizes.cells
        if first == 0:
            self.order = torch.randperm(self.sizes.cells, device=self.device)
        return self.counts.index_select(0, self.order[first : first + self.sizes.batch]).float()

    def step(self, step):
        counts = self.batch(step)
        corrupted = F.dropout(torch.log1p(counts), p=0.2)
        log_rate = self.model(corrupted)  # <- here
        loss = F.poisson_nll_loss(log_rate, counts)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # <- here
        self.optimizer.step()
        return loss.detach()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)

    trainer = Trainer(SMALL if options.small else Sizes(), torch.device(options.device))
    mean = torch.zeros((), device=options.device)
    for step in range(options.steps):
        mean.lerp_(trainer.step(step), 0.1 if step else 1.0)
    print(f"loss {mean.item():.4f}")


if __name__ == "__main__":
    main()
