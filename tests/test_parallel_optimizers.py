"""Which optimizers update shards, and what is said of those that do not."""

import functools

import pytest
import torch

import ranks
from parallel_training import batches, fresh, mean_loss
from torchfast import Plan, PlanError, Trainer

OPTIM = torch.optim
BUILDS = {
    name: functools.partial(getattr(OPTIM, name), lr=0.01)
    for name in (
        "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam",
        "RMSprop", "Rprop", "SGD",
    )
}  # fmt: skip
BUILDS |= {
    "AdamW fused": functools.partial(OPTIM.AdamW, fused=True),
    "SGD fused": functools.partial(OPTIM.SGD, lr=0.01, fused=True),
    "SGD momentum": functools.partial(OPTIM.SGD, lr=0.01, momentum=0.9),
}
REFUSED = {"Adafactor", "Rprop", "SGD fused"}


def stepped(rank):
    told = {}
    for name, build in BUILDS.items():
        try:
            trainer = Trainer(fresh(), build, mean_loss, Plan(shard="fsdp"))
        except PlanError as error:
            told[name] = str(error)
            continue
        for batch in batches(rank)[:2]:
            trainer.step(batch)
        told[name] = "steps"
    return told


@functools.cache
def of_ranks():
    return ranks.run(stepped)


@pytest.mark.parametrize("name", list(BUILDS))
def test_an_optimizer_updates_shards_or_is_refused_by_name(name):
    for told in of_ranks():
        if told[name] == "steps":
            continue
        assert name in REFUSED
        assert f"torch.optim.{name.split()[0]} as it was built cannot update sharded" in told[name]


def fused(rank):
    plan = Plan(shard="fsdp", optimizer="fused")
    found = []
    for build in (BUILDS["SGD"], BUILDS["AdamW"]):
        trainer = Trainer(fresh(), build, mean_loss, plan)
        trainer.step(batches(rank)[0])
        found.append(str(trainer.report()))
    return found


def test_a_fused_form_that_takes_no_shards_steps_aside():
    for sgd, adamw in ranks.run(fused):
        assert "SGD runs as given: torch refused fused SGD for shards of torch.float32" in sgd
        assert "AdamW runs its fused update" in adamw
