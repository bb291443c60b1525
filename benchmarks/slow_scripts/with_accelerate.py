"""Trains a GPT-like model with Accelerate and logs the size of its weights."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    from accelerate import Accelerator
except ImportError:
    raise SystemExit("this script needs accelerate: pip install accelerate") from None


class Model(nn.Module):
    def __init__(self, vocabulary, width, layers):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.layers(self.tokens(tokens)))


class WeightLog:
    """The norm and the largest value of every weight, at every step."""

    def __init__(self, model):
        self.model = model
        self.rows = []

    def write(self, step, loss):
        sizes = {}
        for name, parameter in self.model.named_parameters():
            weight = parameter.detach()
            sizes[name] = (weight.norm().item(), weight.abs().max().item())  # <- here
        self.rows.append({"step": step, "loss": loss.detach(), **sizes})


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    width, layers, batch, length = (64, 2, 2, 16) if args.small else (512, 12, 160, 256)
    accelerator = Accelerator(mixed_precision="bf16", cpu=args.device == "cpu")
    model = Model(4096, width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    texts = TensorDataset(torch.randint(4096, (batch * args.steps, length + 1)))
    loader = DataLoader(texts, batch, pin_memory=args.device != "cpu")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    log = WeightLog(model)
    for step, (tokens,) in enumerate(loader):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        log.write(step, loss)
    print(f"loss {loss.item():.3f} after {args.steps} steps, {len(log.rows)} rows")


if __name__ == "__main__":
    main()
