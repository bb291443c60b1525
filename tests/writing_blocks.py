"""Blocks whose forward writes to tensors that it reads as well, in one way or another."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Moves a centre by what it has seen, as norms of observations do."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.register_buffer("mean", torch.full((8,), 0.3))

    def forward(self, x):
        y = self.line(torch.tanh(x - self.mean) * x)
        self.write(y.detach().mean(0))
        return torch.relu(y) + x

    def write(self, mean):
        with torch.no_grad():
            self.mean.add_(mean)


class Hidden(Block):
    """A write that torch's count of writes does not see."""

    def write(self, mean):
        self.mean.data.mul_(0.7).add_(mean)


class Rows(Block):
    """Writes to a part of it."""

    def write(self, mean):
        self.mean[2:5] = mean[2:5]


class Behind(Block):
    """Reads it behind the write."""

    def forward(self, x):
        y = self.line(x)
        self.write(y.detach().mean(0))
        return torch.tanh(y * self.mean) * y


class Unnamed(Block):
    """A tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.count = torch.ones(8, dtype=torch.float64)

    def forward(self, x):
        y = super().forward(torch.sin(x + self.count) * x)
        self.count.mul_(1.2)
        return y


class View(Block):
    """Reads it by another name."""

    def __init__(self):
        super().__init__()
        self.register_buffer("both", torch.ones(2, 8, dtype=torch.float64))
        self.first = self.both[0]

    def forward(self, x):
        self.both.add_(0.2)
        return super().forward(torch.sin(x + self.first) * x)

    def __deepcopy__(self, memo):
        block = type(self)()
        block.load_state_dict(self.state_dict())
        return block.double()


class Frozen(Block):
    """Averages its weights in a parameter that no optimizer has."""

    def __init__(self):
        super().__init__()
        self.target = nn.Parameter(torch.eye(8), requires_grad=False)

    def forward(self, x):
        y = super().forward(torch.tanh(F.linear(x, self.target.clone())) * x)
        with torch.no_grad():
            self.target.lerp_(self.line.weight, 0.3)
        return y


class Shrunk(Block):
    """Writes to a weight that trains, as forced weight normalization does."""

    def forward(self, x):
        with torch.no_grad():
            self.line.weight.mul_(0.9)
        return super().forward(x)


class ReadsNorm(nn.Module):
    """Computes with the statistics that its norm is about to write."""

    def __init__(self):
        super().__init__()
        self.line, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        y = self.line(x) * torch.rsqrt(self.norm.running_var + 0.1)
        return self.norm(y).relu() + x


class Within(nn.Module):
    """Calls one block twice, another between."""

    def __init__(self):
        super().__init__()
        self.one, self.other = Block(), Hidden()

    def forward(self, x):
        return self.one(self.other(self.one(x)))


class Left(Block):
    """The compiler has to leave it."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


class Replaced(Block):
    """Puts another tensor there, which torch's compiler leaves alone in a checkpoint."""

    def write(self, mean):
        self.mean = self.mean + mean


class Counted(Block):
    """Reads how often it was called."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        y = self.line(x) / (1 + self.calls)
        self.calls += 1
        return torch.tanh(y) * (x - 1 / self.calls)


class Codebook(nn.Module):
    """A codebook that moves with its codes, as of a VQ-VAE without a gradient of its own."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.register_buffer("codes", torch.randn(16, 8))

    def forward(self, x):
        y = self.line(x)
        with torch.no_grad():
            nearest = torch.cdist(y, self.codes).argmin(1)
        code = self.codes[nearest]
        commitment = (y - code).square().mean(1, keepdim=True)
        with torch.no_grad():
            chosen = F.one_hot(nearest, 16).to(y)
            count = chosen.sum(0)[:, None]
            moved = 0.5 * self.codes + 0.5 * (chosen.T @ y) / count.clamp_min(1)
            self.codes.copy_(torch.where(count > 0, moved, self.codes))
        return y + (code - y).detach() + commitment


class Shortened(nn.Module):
    """Shortens its own weight behind the use."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        y = torch.sin(self.weight.sum(0)) * x
        with torch.no_grad():
            self.weight.div_(self.weight.norm())
        return y


class Halved(Block):
    """Reads what it has just written, which is made again from what was there before."""

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.5)
        return torch.relu(self.line(torch.tanh(x - self.mean) * x)) + x


class Between(Halved):
    """And writes to it again."""

    def forward(self, x):
        y = super().forward(x)
        self.write(y.detach().mean(0))
        return y


class Filled(Halved):
    """Fills it anew, and reads it."""

    def forward(self, x):
        with torch.no_grad():
            self.mean.copy_(torch.sin(x.mean(0)))
        return torch.relu(self.line(torch.tanh(x - self.mean) * x)) + x


EACH = [
    Block,
    Hidden,
    Rows,
    Behind,
    Unnamed,
    View,
    Frozen,
    Shrunk,
    ReadsNorm,
    Left,
    Replaced,
    Counted,
    Codebook,
    Shortened,
    Halved,
    Between,
    Filled,
]
