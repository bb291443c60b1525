"""Trains a residual network to classify photographs that are kept compressed in memory."""

import argparse
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Photographs(Dataset):
    def __init__(self, count, size):
        rng = np.random.default_rng(0)
        self.size = size
        # Smooth pictures, as photographs are: noise would not compress.
        coarse = rng.integers(0, 256, (32, 3, size // 8, size // 8), dtype=np.uint8)
        pictures = coarse.repeat(8, axis=2).repeat(8, axis=3)
        self.files = [zlib.compress(picture.tobytes(), 6) for picture in pictures]
        self.labels = rng.integers(0, 100, count)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        raw = np.frombuffer(zlib.decompress(self.files[index % 32]), np.uint8)
        picture = raw.reshape(3, self.size, self.size).astype(np.float32) / 255
        return self.augment(torch.from_numpy(picture)), int(self.labels[index])

    def augment(self, picture):
        picture = F.interpolate(picture[None], scale_factor=1.15, mode="bicubic")[0]
        top, left = torch.randint(picture.shape[-1] - self.size, (2,)).tolist()
        picture = picture[:, top : top + self.size, left : left + self.size]
        picture = picture * torch.empty(3, 1, 1).uniform_(0.8, 1.2)
        spread, mean = torch.std_mean(picture, dim=(1, 2), keepdim=True)
        return (picture - mean) / (spread + 1e-3)


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


def build(width):
    stages = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for i in range(3):
        stages.append(Residual(width << i, width << (i + 1), 2))
        stages.append(Residual(width << (i + 1), width << (i + 1), 1))
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width * 8, 100))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = torch.device(args.device)
    size, width, batch = (64, 8, 4) if args.small else (224, 64, 64)
    pictures = Photographs(batch * args.steps, size)
    pinned = device.type == "cuda"
    loader = DataLoader(pictures, batch, shuffle=True, pin_memory=pinned)  # <- here
    model = build(width).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    for images, labels in loader:  # <- here
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f} after {args.steps} steps")


if __name__ == "__main__":
    main()
