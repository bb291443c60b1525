"""What a block finds around it when it runs again on a device: generators that it holds itself."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from gpu.requirements import requires
from torchfast import Plan, Trainer
from torchfast._core.compare import differences

pytestmark = requires(gpus=1)


class DrawsItself(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.line = nn.Linear(32, 32)
        self.generator = torch.Generator("cuda").manual_seed(seed)

    def forward(self, x):
        kept = torch.rand(x.shape, device=x.device, generator=self.generator) > 0.3
        return torch.tanh(self.line(x)) * kept


def trained(plan, steps=14):
    torch.manual_seed(0)
    model = nn.Sequential(*(DrawsItself(seed) for seed in range(3))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Trainer(model, optimizer, lambda model, x: model(x).square().mean(), plan) as trainer:
        batch = torch.ones(8, 32, device="cuda")
        losses = [trainer.step(batch).clone() for _ in range(steps)]
        report = trainer.report()
        held = [block.generator.get_state() for block in model]
        state = {name: value.clone() for name, value in model.state_dict().items()}
    return {"losses": losses, "state": state, "generators": held}, report


@pytest.mark.parametrize("cuda_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("what", ["blocks", "selective"])
def test_own_generators_draw_the_same_again(deterministic, what, cuda_graph):
    expected, _ = trained(Plan())
    assert not any(torch.equal(*pair) for pair in itertools.pairwise(expected["losses"]))
    found, report = trained(Plan(recompute=what, cuda_graph=cuda_graph))
    assert differences(expected, found) == []
    assert (report.counters.get("replays", 0) > 0) == cuda_graph, str(report)
