"""Trains a diffusion transformer to remove noise from latent pictures, compiled and in bf16."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads = width // 64
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.adapt = nn.Linear(width, 4 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x, condition):
        shift1, scale1, shift2, scale2 = self.adapt(condition)[:, None].chunk(4, -1)
        batch, length, width = x.shape
        y = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(y).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiffusionTransformer(nn.Module):
    def __init__(self, channels, length, width, layers):
        super().__init__()
        self.enter, self.leave = nn.Linear(channels, width), nn.Linear(width, channels)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x, time):
        x, condition = self.enter(x) + self.places, self.time(time)
        for block in self.blocks:
            x = block(x, condition)
        return self.leave(x)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    width, layers, batch, length = (64, 2, 2, 16) if args.small else (1024, 8, 64, 256)
    model = DiffusionTransformer(16, length, width, layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compiled = torch.compile(model, backend="eager" if args.small else "inductor")
    latents = torch.randn(16, batch, length, 16, device=device)
    for step in range(args.steps):
        clean = latents[step % 16]
        noise = torch.randn_like(clean)
        time = torch.rand(batch, 1, device=device)
        noisy = torch.lerp(clean, noise, time[:, None])
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.mse_loss(compiled(noisy, time), noise - clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f} after {args.steps} steps")


if __name__ == "__main__":
    main()
