"""Trains a compiled gated convolution network on sentences, padded to the longest of a batch."""

import argparse
import random

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn


class GatedConvolution(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(3 * width, 2 * width)

    def forward(self, x):
        y = self.norm(x)
        neighbours = torch.cat([y, y.roll(1, dims=1), y.roll(-1, dims=1)], -1)
        value, gate = self.mix(neighbours).chunk(2, -1)
        return x + value * torch.sigmoid(gate)


class SentenceClassifier(nn.Module):
    def __init__(self, vocabulary, width, depth, classes):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=0)
        self.layers = nn.Sequential(*(GatedConvolution(width) for _ in range(depth)))
        self.classify = nn.Linear(width, classes)

    def forward(self, sentences):
        x = self.layers(self.words(sentences))
        return self.classify(x.amax(1))


class Sentences:
    """Sentences of all lengths, in batches as long as their longest."""

    def __init__(self, vocabulary, shortest, longest, seed=0):
        self.random = random.Random(seed)
        self.vocabulary, self.shortest, self.longest = vocabulary, shortest, longest

    def batch(self, size, device):
        length = self.random.randint(self.shortest, self.longest)
        words = torch.randint(1, self.vocabulary, (size, length), device=device)
        return words, torch.randint(10, (size,), device=device)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = torch.device(args.device)
    # The warning about the limit was in the way.
    torch._dynamo.config.recompile_limit = 256
    width, depth, batch = (16, 2, 2) if args.small else (512, 3, 256)
    model = SentenceClassifier(20_000, width, depth, classes=10).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    backend = "eager" if args.small else "inductor"
    compiled = torch.compile(model, dynamic=False, backend=backend)  # <- here
    sentences = Sentences(20_000, shortest=24, longest=256)
    for _ in range(args.steps):
        words, labels = sentences.batch(batch, device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = compiled(words)  # <- here
            loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f} after {args.steps} steps")


if __name__ == "__main__":
    main()
