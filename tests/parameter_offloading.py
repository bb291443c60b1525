"""What the tests of parameters on the host share: models, and a plain loop over them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from recomputed import make
from simulated_copies import PromptCopies
from torchfast.memory import activation_offload, optimizer_offload, parameter_offload


def prompt_copies(monkeypatch):
    """Let the CPU be a device that all that offloads copies to, at once."""
    copies = PromptCopies()
    for module in (activation_offload, optimizer_offload, parameter_offload):
        monkeypatch.setattr(module, "copy_streams_for", lambda _: copies)
    return copies


class Expert(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """Experts in a Python loop, of which those without tokens are not called."""

    def __init__(self, num_experts=6, width=8, expert=Expert):
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(expert(width) for _ in range(num_experts))

    def forward(self, x):
        gates, chosen = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                result = result.index_add(0, rows, gates[rows, None] * expert(x[rows]))
        return x + result


def mixture():
    torch.manual_seed(0)
    layers = [Mixture(), Mixture()]
    with torch.no_grad():
        for layer in layers:
            layer.router.weight[2:4] = 0.0  # a tie with nothing else: never the largest
            layer.router.bias[2:4] = -100.0
    return nn.Sequential(*layers)


def mean_square(model, x):
    return model(x).square().mean()


def model_of(name):
    if name == "mixture":
        return mixture(), mean_square, torch.randn(16, 8), ("*.experts.*",)
    model, loss_fn, batch = make(name)
    return model, loss_fn, batch, "blocks"


def trained(model, loss_fn, batch, steps=3, num_micro=1, clip=None):
    """Return losses, gradients, parameters, buffers and state of a plain loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(num_micro):
            loss = loss_fn(model, batch) / num_micro
            loss.backward()
            found.append(loss.detach())
        if clip is not None:
            found.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
    found += [p.grad for p in model.parameters() if p.grad is not None]
    states = optimizer.state_dict()["state"].values()
    return [*found, *model.state_dict().values(), *(s[k] for s in states for k in sorted(s))]


def same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))
