"""Trains a latent cross-attention network that regresses properties of jets from detector hits."""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width, source, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.keyvalue = nn.Linear(source, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, latents: Tensor, source: Tensor) -> Tensor:
        q = self.query(latents).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        kv = self.keyvalue(source).unflatten(-1, (2, self.heads, -1))
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = Attention(width, width, heads)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, latents: Tensor) -> Tensor:
        x = self.norm1(latents)
        latents = latents + self.attend(x, x)
        x = self.widen(self.norm2(latents))
        return latents + self.narrow(F.gelu(x, approximate="tanh"))


class JetRegressor(nn.Module):
    def __init__(self, features, embed, latents, width, heads, depth, targets):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(features, embed), nn.GELU(), nn.Linear(embed, embed))
        self.latents = nn.Parameter(0.02 * torch.randn(latents, width))
        self.read = Attention(width, embed, heads)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, targets)

    def forward(self, hits: Tensor) -> Tensor:
        latents = self.latents.expand(len(hits), -1, -1)
        latents = latents + self.read(latents, self.embed(hits))
        return self.head(self.norm(self.layers(latents)).mean(dim=1))


def simulate_events(count, hits, features, targets, device):
    """Hits scattered around a few jet axes; the targets are moments of the energy deposits."""
    axis = torch.randn(count, 1, features, device=device)
    cloud = axis + torch.randn(count, hits, features, device=device)
    energy = cloud[..., :1].exp()
    moments = (energy * cloud).sum(1) / energy.sum(1)
    return cloud.bfloat16(), moments[:, :targets].contiguous()


def learning_rate(step, steps, warmup=10):
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / max(steps, 1)))


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = torch.device(options.device)
    if options.small:
        events, batch, hits = 32, 4, 32
        model = JetRegressor(8, 16, 8, 32, heads=2, depth=2, targets=4)
    else:
        events, batch, hits = 2048, 96, 1024
        model = JetRegressor(8, 256, 256, 1536, heads=12, depth=6, targets=4)
    model = model.to(device)

    clouds, moments = simulate_events(events, hits, 8, 4, device)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
        lr=2e-4,
        betas=(0.9, 0.95),
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(step, options.steps)
    )
    history = torch.zeros(options.steps, device=device)
    for step in range(options.steps):
        chosen = torch.randint(events, (batch,), device=device)
        with torch.autocast(device.type, torch.bfloat16):
            predicted = model(clouds.index_select(0, chosen))
        loss = F.huber_loss(predicted.float(), moments.index_select(0, chosen))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        history[step] = loss.detach()
    print(f"mean loss of the last steps: {history[-10:].mean().item():.4f}")


if __name__ == "__main__":
    main()
