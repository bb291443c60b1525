"""Trains a message-passing network that predicts formation energies of molecules of varied size."""

import argparse
import random

import torch
from torch import nn
from torch.nn import functional as F


class MessageLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.sender = nn.Linear(width, width, bias=False)
        self.receiver = nn.Linear(width, width)
        self.distance = nn.Linear(16, width, bias=False)
        self.mix = nn.Linear(width, width)
        self.update = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, atoms, source, radial):
        sent = self.sender(atoms).float().index_select(0, source).bfloat16()
        bonds = (sent + self.distance(radial)).unflatten(0, (len(atoms), -1))
        message = self.mix(F.silu(bonds + self.receiver(atoms).unsqueeze(1)))
        pooled = message.sum(dim=1)
        return self.norm(atoms + self.update(F.silu(pooled)))


class AttentiveReadout(nn.Module):
    """One vector a molecule: its atoms, weighted by a softmax within the molecule."""

    def __init__(self, width):
        super().__init__()
        self.score = nn.Linear(width, 1)
        self.energy = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, atoms, sizes):
        scores = self.score(atoms)
        pooled = []
        for members, score in zip(atoms.split(sizes), scores.split(sizes), strict=True):
            weight = torch.softmax(score, dim=0)  # <- here
            pooled.append((weight * members).sum(dim=0))  # <- here
        return self.energy(torch.stack(pooled)).squeeze(-1)


class EnergyModel(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.element = nn.Embedding(20, width)
        self.layers = nn.ModuleList(MessageLayer(width) for _ in range(depth))
        self.readout = AttentiveReadout(width)

    def forward(self, graph):
        atoms = self.element(graph["elements"])
        for layer in self.layers:
            atoms = layer(atoms, graph["source"], graph["radial"])
        return self.readout(atoms, graph["sizes"])


def make_graph(molecules, largest, neighbours, rng, device):
    """One batch of molecules as a disconnected graph; every atom has the same number of bonds."""
    sizes = [rng.randint(largest // 2, largest) for _ in range(molecules)]
    size = torch.tensor(sizes)
    first = (size.cumsum(0) - size).repeat_interleave(size * neighbours)
    total = int(size.sum())
    span = size.repeat_interleave(size * neighbours)
    source = first + torch.minimum((torch.rand(len(span)) * span).long(), span - 1)
    elements = torch.randint(20, (total,))
    owner = torch.arange(molecules).repeat_interleave(size)
    energy = torch.zeros(molecules).index_add_(0, owner, (elements - 9.5) / 10) / size**0.5
    length = torch.rand(total * neighbours, 1) * 4 + 1
    radial = torch.exp(-((length - torch.linspace(1, 5, 16)) ** 2) * 4)
    radial = radial.bfloat16()
    tensors = {"elements": elements, "source": source, "radial": radial, "energy": energy}
    graph = {name: tensor.to(device) for name, tensor in tensors.items()}
    return graph | {"sizes": sizes}


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    rng = random.Random(0)
    device = torch.device(options.device)
    if options.small:
        molecules, largest, neighbours, width, depth = 16, 8, 4, 32, 2
    else:
        molecules, largest, neighbours, width, depth = 512, 52, 16, 512, 8

    graphs = [make_graph(molecules, largest, neighbours, rng, device) for _ in range(4)]
    model = EnergyModel(width, depth).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01, fused=True)
    average = torch.zeros((), device=device)
    step = 0
    while step < options.steps:
        for graph in graphs[: options.steps - step]:
            with torch.autocast(device.type, torch.bfloat16):
                energy = model(graph)
            loss = F.smooth_l1_loss(energy.float(), graph["energy"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            average.lerp_(loss.detach(), 0.1 if step else 1.0)
            step += 1
    print(f"running loss {average.item():.4f} after {step} steps")


if __name__ == "__main__":
    main()
