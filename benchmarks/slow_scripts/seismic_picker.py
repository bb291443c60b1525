"""Trains a residual convolutional network that marks arrivals in three-component seismograms."""

import argparse
import math
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

RATE = 100.0
STRIDE = 4


class SyntheticSeismograms(Dataset):
    """Earthquakes on coloured station noise, a new one for every index."""

    def __init__(self, count, length):
        self.count, self.length = count, length

    def __len__(self):
        return self.count

    def station_noise(self, rng):
        a1 = rng.uniform(1.2, 1.5)
        a2 = -rng.uniform(0.55, 0.65)
        before, last = 0.0, 0.0
        noise = []
        for _ in range(self.length):
            before, last = last, a1 * last + a2 * before + rng.gauss(0.0, 0.05)  # <- here
            noise.append(last)
        return noise

    def __getitem__(self, index):
        rng = random.Random(index)
        wave = np.array([self.station_noise(rng) for _ in range(3)], dtype=np.float32)
        p = rng.randrange(self.length // 8, self.length // 2)
        s = p + rng.randrange(self.length // 16, self.length // 3)
        for start, pitch, gain in ((p, 8.0, (1.0, 0.3, 0.3)), (s, 3.5, (0.5, 1.6, 1.6))):
            t = np.arange(self.length - start, dtype=np.float32) / RATE
            burst = np.sin(2 * math.pi * pitch * t) * np.exp(-t / rng.uniform(1.0, 4.0))
            wave[:, start:] += np.outer(gain, burst)
        wave /= wave.std(axis=1, keepdims=True)
        label = np.zeros(self.length // STRIDE, dtype=np.int64)
        label[max(p // STRIDE - 5, 0) : p // STRIDE + 5] = 1
        label[max(s // STRIDE - 5, 0) : s // STRIDE + 5] = 2
        return torch.from_numpy(wave), torch.from_numpy(label)


class Residual(nn.Module):
    def __init__(self, width, kernel):
        super().__init__()
        shape = {"kernel_size": (1, kernel), "padding": (0, kernel // 2), "bias": False}
        self.first = nn.Conv2d(width, width, **shape)
        self.second = nn.Conv2d(width, width, **shape)
        self.norm1 = nn.BatchNorm2d(width)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x):
        y = F.relu(self.norm1(self.first(x)), inplace=True)
        return F.relu(x + self.norm2(self.second(y)), inplace=True)


class Picker(nn.Module):
    def __init__(self, width, blocks, kernel=7):
        super().__init__()
        self.stem = nn.Conv2d(3, width, (1, 16), stride=(1, STRIDE), padding=(0, 6))
        self.body = nn.Sequential(*(Residual(width, kernel) for _ in range(blocks)))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, waves):
        x = waves.unsqueeze(2).contiguous(memory_format=torch.channels_last)
        return self.head(self.body(self.stem(x))).squeeze(2)


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    device = torch.device(options.device)
    batch, length, width, blocks = (4, 512, 16, 2) if options.small else (64, 3000, 768, 6)

    model = Picker(width, blocks).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-4, fused=True
    )
    loader = DataLoader(  # <- here
        SyntheticSeismograms(options.steps * batch, length),
        batch_size=batch,
        num_workers=0,
        pin_memory=device.type == "cuda",
    )
    weight = torch.tensor([0.05, 1.0, 1.0], device=device)
    loss = torch.zeros((), device=device)
    for waves, labels in loader:  # <- here
        waves = waves.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(waves)
        loss = F.cross_entropy(logits.float(), labels, weight=weight)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    print(f"loss after {options.steps} steps: {loss.item():.4f}")


if __name__ == "__main__":
    main()
