"""The first attention of a process, at which torch orders its back-ends: a block's; ordered."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpu.own_process import told_by
from gpu.requirements import requires
from torchfast import Plan, Trainer, attention_backends, attention_report

pytestmark = requires(gpus=1)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Linear(128, 384)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 64)).transpose(1, 2) for t in self.parts(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(
            2
        )


def trained(recompute):
    torch.manual_seed(0)
    model = nn.Sequential(Attends(), Attends()).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan(precision="bf16", recompute=recompute)
    batch = torch.randn(4, 128, 128, device="cuda")
    with Trainer(model, optimizer, lambda model, x: model(x).square().mean(), plan) as trainer:
        losses = [trainer.step(batch).item() for _ in range(3)]
    return losses, torch._C._get_sdp_priority_order()


def chosen(names):
    q = torch.randn(1, 2, 128, 64, dtype=torch.bfloat16, device="cuda")
    with attention_backends(*names):
        return attention_report(q, q, q).backend


@pytest.mark.parametrize("what", ["blocks", "selective"])
def test_the_first_block_takes_the_same_back_end_again(what):
    expected = told_by(__file__, json.dumps({"recompute": False}))
    assert expected == told_by(__file__, json.dumps({"recompute": what}))


@pytest.mark.parametrize("names", [("flash", "cudnn"), ("efficient", "cudnn", "flash")])
def test_an_order_holds_for_the_first_one(names):
    assert told_by(__file__, json.dumps({"names": names})) == names[0]


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    found = chosen(asked["names"]) if "names" in asked else trained(asked["recompute"])
    print(json.dumps(found))  # noqa: T201
