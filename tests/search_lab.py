"""Candidates that are fakes, on a clock of their own, to be searched."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from torchfast.compiler.candidates import Candidate
from torchfast.compiler.search import search

CPU = torch.device("cpu")
BATCH = (torch.randn(16, 8), torch.randint(0, 4, (16,)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.second = nn.Linear(32, 4)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


class Lab:
    """A model whose candidates are fakes: seconds on a clock of the lab's, and what they do."""

    def __init__(self, model=None, batch=BATCH):
        self.model = Net() if model is None else model
        self.batch = batch
        self.now = 0.0
        self.unit_s = 1.0
        self.extra = None
        self.log = []
        self.in_force = None
        self.first = set()

    def clock(self):
        return self.now

    def work(self):
        self.now += self.unit_s
        if self.extra is not None:
            self.extra()
        inputs, targets = self.batch
        loss = F.cross_entropy(self.model(inputs), targets)
        loss.backward()
        return loss.detach()

    def candidate(self, name, unit_s=1.0, compile_s=0.0, *, each_time=False, **options):
        """Return a candidate whose unit takes so long, and the first one its compile too."""
        doing = options.pop("doing", lambda: None)
        damage = options.pop("damage", None)
        assert not options

        def apply():
            assert self.in_force is None
            self.in_force = name
            before = self.unit_s, self.extra
            hooks = []
            if damage is not None:
                hooks.append(damage(self.model))

            def extra():
                if name not in self.first or (each_time and not state["ran"]):
                    self.first.add(name)
                    self.now += compile_s
                state["ran"] = True
                self.log.append(name)
                doing()

            state = {"ran": False}
            self.unit_s, self.extra = unit_s, extra

            def undo():
                assert self.in_force == name
                self.in_force = None
                self.unit_s, self.extra = before
                for hook in hooks:
                    hook.remove()

            return undo

        return Candidate(name=name, apply=apply)

    def search(self, *candidates, budget_s=1000.0, **options):
        receipt = search(
            [self.candidate("eager"), *candidates],
            self.work,
            model=self.model,
            device=CPU,
            batch=self.batch,
            budget_s=budget_s,
            clock=self.clock,
            synchronize=lambda: None,
            **options,
        )
        assert self.in_force is None
        return receipt


def off_by(factor):
    return lambda model: model.register_forward_hook(lambda m, args, output: output * factor)


def statuses(receipt):
    return {c.name: c.status for c in receipt.candidates}
