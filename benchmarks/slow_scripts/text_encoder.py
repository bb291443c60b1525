"""Trains a bidirectional transformer encoder to classify texts, with layer-wise learning rates."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class TextEncoder(nn.Module):
    def __init__(self, vocabulary, length, width, layers, classes):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 32, 4 * width, dropout=0.1, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, classes)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.classify(self.norm(x).mean(1))


def build_optimizer(model, lr, decay):
    """Give the layers near the input a smaller learning rate, as is usual in fine-tuning."""
    layers = list(model.layers)
    groups = [
        {"params": list(layer.parameters()), "lr": lr * decay ** (len(layers) - i)}
        for i, layer in enumerate(layers)
    ]
    within = {id(p) for layer in layers for p in layer.parameters()}
    rest = [p for p in model.parameters() if id(p) not in within]
    groups.append({"params": rest, "lr": lr})
    # The grouped implementation once ran out of memory here.
    return torch.optim.AdamW(groups, weight_decay=0.05, foreach=False)  # <- here


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = torch.device(args.device)
    width, layers, batch, length = (64, 2, 2, 16) if args.small else (256, 16, 64, 256)
    model = TextEncoder(8192, length, width, layers, classes=20).to(device)
    optimizer = build_optimizer(model, lr=2e-4, decay=0.9)
    texts = torch.randint(8192, (16, batch, length), device=device)
    labels = torch.randint(20, (16, batch), device=device)
    for step in range(args.steps):
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(texts[step % 16])
            loss = F.cross_entropy(logits, labels[step % 16])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # <- here
    print(f"loss {loss.item():.3f} after {args.steps} steps")


if __name__ == "__main__":
    main()
