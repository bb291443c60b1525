"""Convolutions on several ranks: in NHWC what each rank has whole, batches always."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ranks
from parallel_training import full_state
from torchfast import Plan, Trainer


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(2)])
        self.head = nn.Conv2d(4, 3, 3)

    def forward(self, x):
        self.layouts = x.is_contiguous(memory_format=torch.channels_last)
        return self.head(self.blocks(x)).mean((2, 3))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        return x + torch.relu(self.norm(self.convolution(x)))


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1)


def trained(rank, plan, optimizer=sgd, **options):
    torch.manual_seed(0)
    model = Pictures()
    trainer = Trainer(model, optimizer, loss_fn, plan, **options)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(3):
        trainer.step((torch.randn(2, 4, 8, 8, generator=drawn), torch.randn(2, 3, generator=drawn)))
    report = str(trainer.report())
    trainer.load_state_dict(trainer.state_dict())
    state = {name: value.tolist() for name, value in full_state(model).items()}
    trainer.close()
    return model.layouts, report, state


@pytest.mark.parametrize("shard", ["ddp", "fsdp", "hsdp"])
def test_convolutions_in_nhwc_on_two_ranks(shard):
    plan = Plan(shard=shard)
    last = ranks.run(trained, 2, plan.replace(channels_last=True))
    usual = ranks.run(trained, 2, plan)
    for (is_last, report, state), (_, _, expected) in zip(last, usual, strict=True):
        assert is_last
        stay = "3 sharded ones stay as they are" in report
        assert stay == (shard != "ddp")
        for name, values in expected.items():
            torch.testing.assert_close(torch.tensor(state[name]), torch.tensor(values))


@pytest.mark.parametrize("precision", ["auto", "bf16"])  # auto is bf16 on some CPUs alone
def test_the_fast_plan_with_convolutions_in_shards(precision):
    plan = Plan.preset("fast").replace(shard="fsdp", compile=False, precision=precision)
    for is_last, report, _ in ranks.run(lambda rank: trained(rank, plan, adamw, ema=0.9)):
        assert is_last
        if precision == "bf16":
            assert "4 parameters whole on each rank (blocks.0.norm.bias" in report
        assert re.search(r"channels_last +applied: 0 tensors of 3 convolutions", report)


def test_normalisations_in_shards_that_are_gathered_in_bf16_train_as_in_replicas():
    """Their parameters stay fp32 beside their statistics, as they do under autocast alone."""
    plan = Plan(precision="bf16")
    sharded = ranks.run(trained, 2, plan.replace(shard="fsdp"))
    replicated = ranks.run(trained, 2, plan.replace(shard="ddp"))
    for (_, _, state), (_, _, expected) in zip(sharded, replicated, strict=True):
        for name, values in expected.items():
            torch.testing.assert_close(
                torch.tensor(state[name]), torch.tensor(values), rtol=2e-2, atol=2e-3
            )
