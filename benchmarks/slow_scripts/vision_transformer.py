"""Trains a vision transformer to classify small pictures, with bf16 autocast."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)  # <- here
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))  # <- here
        return x + self.mlp(self.norm2(x))  # <- here


class VisionTransformer(nn.Module):
    def __init__(self, size, patch, width, layers, classes):
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(3 * patch * patch, width)
        self.places = nn.Parameter(torch.zeros((size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        patches = F.pixel_unshuffle(images, self.patch).flatten(2).transpose(1, 2)
        x = self.blocks(self.embed(patches) + self.places)
        return self.head(self.norm(x).mean(1))


class SmoothedLoss(nn.Module):
    """Cross-entropy with smoothed labels, in mixed precision."""

    def forward(self, logits, labels):
        with torch.autocast(logits.device.type, torch.bfloat16):
            return F.cross_entropy(logits, labels, label_smoothing=0.1)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = torch.device(args.device)
    size, width, layers, batch = (32, 64, 2, 2) if args.small else (224, 384, 12, 64)
    model = VisionTransformer(size, 16, width, layers, classes=100).to(device)
    criterion = SmoothedLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    images = torch.randn(8, batch, 3, size, size, device=device)
    labels = torch.randint(100, (8, batch), device=device)
    for step in range(args.steps):
        logits = model(images[step % 8])  # <- here
        loss = criterion(logits, labels[step % 8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f} after {args.steps} steps")


if __name__ == "__main__":
    main()
