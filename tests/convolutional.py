"""Convolutional networks of bottlenecks, written as users write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Leaves(nn.Module):
    """A bottleneck, as most models write it."""

    def __init__(self, width=16, inner=8, norm=nn.BatchNorm2d, inplace=True):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, inner, 1, bias=False), norm(inner)
        self.conv2, self.norm2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False), norm(inner)
        self.conv3, self.norm3 = nn.Conv2d(inner, width, 1, bias=False), norm(width)
        self.relu = nn.ReLU(inplace=inplace)

    def activated(self, x, number):
        return self.relu(x)

    def ends(self, y, x):
        y += x
        return self.relu(y)

    def forward(self, x):
        y = self.activated(self.norm1(self.conv1(x)), 1)
        y = self.activated(self.norm2(self.conv2(y)), 2)
        return self.ends(self.norm3(self.conv3(y)), x)


class Functional(Leaves):
    def activated(self, x, number):
        return F.relu(x) if number == 1 else torch.relu(x)

    def ends(self, y, x):
        return F.relu(y + x)


class Shortcut(Leaves):
    """A norm on each side of the sum; the one that comes first is read last."""

    def __init__(self):
        super().__init__()
        self.conv4, self.norm4 = nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16)

    def ends(self, y, x):
        return self.relu(y + self.norm4(self.conv4(x)))


class Counted(nn.Module):
    """Counts its calls, second runs aside, on the host: such a step cannot be captured."""

    num_calls = 0

    def forward(self, x):
        if torch._C._current_graph_task_id() == -1:
            self.num_calls += 1
        return super().forward(x)


class Net(nn.Module):
    def __init__(self, block, count=3):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.Sequential(*(block() for _ in range(count)))
        self.head = nn.Linear(16, 50)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))
