"""Trains an LSTM on sequences of characters and watches the distribution of its weights."""

import argparse
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn


class CharacterModel(nn.Module):
    def __init__(self, characters, width, layers):
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.predict = nn.Linear(width, characters)

    def forward(self, text):
        hidden, _ = self.lstm(self.embed(text))
        return self.predict(hidden)


class Histograms:
    """Keeps how weights and gradients are distributed, for plots."""

    def __init__(self, bins=64):
        self.bins = bins
        self.history = defaultdict(list)

    def add(self, name, tensor):
        values = tensor.detach().float().cpu()  # <- here
        low, high = values.aminmax()
        counts = torch.histc(values, self.bins, low.item(), high.item())
        self.history[name].append((low.item(), high.item(), counts))

    def watch(self, model):
        for name, parameter in model.named_parameters():
            self.add(name, parameter)
            if parameter.grad is not None:
                self.add(f"{name}.grad", parameter.grad)


def train(model, text, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    histograms = Histograms()
    for step in range(steps):
        batch = text[step % len(text)]
        with torch.autocast(text.device.type, torch.bfloat16):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        histograms.watch(model)
    return loss, histograms


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    width, layers, batch, length = (16, 1, 2, 16) if args.small else (1024, 2, 512, 128)
    model = CharacterModel(128, width, layers).to(device)
    text = torch.randint(128, (8, batch, length + 1), device=device)
    loss, histograms = train(model, text, args.steps)
    print(f"loss {loss.item():.3f} after {args.steps} steps, {len(histograms.history)} histograms")


if __name__ == "__main__":
    main()
