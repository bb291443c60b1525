"""Trains a per-point classifier of lidar sweeps with shared layers and a pooled context."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

COMPUTE = torch.bfloat16


class Dense(nn.Linear):
    def forward(self, x):
        weight, bias = self.weight.to(COMPUTE), self.bias.to(COMPUTE)
        return F.linear(x.to(COMPUTE), weight, bias).float()  # <- here


class Norm(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x.to(COMPUTE), self.normalized_shape, eps=self.eps).float()  # <- here


class Activation(nn.Module):
    def forward(self, x):
        return F.silu(x.to(COMPUTE)).float()  # <- here


class Add(nn.Module):
    def forward(self, x, y):
        return (x.to(COMPUTE) + y.to(COMPUTE)).float()  # <- here


class PointBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = Norm(channels, elementwise_affine=False)
        self.first = Dense(channels, channels)
        self.activation = Activation()
        self.second = Dense(channels, channels)
        self.add = Add()

    def forward(self, x):
        return self.add(x, self.second(self.activation(self.first(self.norm(x)))))


class PointClassifier(nn.Module):
    def __init__(self, channels, blocks, classes):
        super().__init__()
        self.embed = Dense(8, channels)
        self.local = nn.Sequential(*[PointBlock(channels) for _ in range(blocks - 2)])
        self.context = Dense(channels, channels)
        self.add = Add()
        self.fused = nn.Sequential(*[PointBlock(channels) for _ in range(2)])
        self.head = Dense(channels, classes)

    def forward(self, points):
        x = self.local(self.embed(points))
        x = self.add(x, self.context(x.mean(dim=1, keepdim=True)))
        return self.head(self.fused(x))


def make_sweeps(count, sweeps, points, classes, device):
    """Sweeps of points with a label that depends on height, range and reflectance."""
    prepared = []
    for _ in range(count):
        features = torch.randn(sweeps, points, 8, device=device)
        score = features[..., 2] + 0.5 * features[..., :2].norm(dim=-1) + 0.3 * features[..., 3]
        labels = score.mul(2.0).add(classes / 2).clamp(0, classes - 1).long()
        prepared.append((features, labels))
    return prepared


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)

    sweeps, points, channels, blocks, classes = 64, 32768, 192, 5, 16
    if options.small:
        sweeps, points, channels, blocks = 4, 256, 32, 3
    device = torch.device(options.device)
    data = make_sweeps(8, sweeps, points, classes, device)
    model = PointClassifier(channels, blocks, classes).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=options.steps + 1)

    losses = torch.zeros(options.steps, device=device)
    for step in range(options.steps):
        features, labels = data[step % len(data)]
        logits = model(features)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses[step] = loss.detach()

    print(f"loss {losses[-5:].mean().item():.4f}")


if __name__ == "__main__":
    main()
