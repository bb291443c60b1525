"""Parts of a model that only some ranks use, whose shards would go together with other parts'."""

import pytest
import torch
from torch import nn

import ranks
from parallel_training import OPTIMIZERS, Block, Own
from torchfast import Plan, PlanError, ShardOptions, Trainer


class Routed(nn.Module):
    """Each batch goes through one of its blocks."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))

    def forward(self, x, number):
        return self.head(self.blocks[number](self.first(x)))


PIECES = {
    "blocks": "fsdp",
    "one piece": ShardOptions(strategy="fsdp", blocks=()),
    "blocks left whole": ShardOptions(strategy="fsdp", blocks=(), ignored=("blocks.*",)),
}


def trained(rank, shard, differs_from, steps):
    torch.manual_seed(0)
    trainer = Trainer(
        Routed(),
        OPTIMIZERS["sgd"],
        lambda model, batch: model(*batch).square().mean(),
        Plan(shard=shard),
    )
    try:
        for number in range(1, steps + 1):
            batch = torch.ones(2, 8), rank if number >= differs_from else number % 3
            if number == 2:
                trainer.evaluate(Own([batch]))
            trainer.step(batch)
    except PlanError as error:
        return f"step {number}: {error}"
    finally:
        trainer.close()
    return "went well"


def routed(rank):
    return {
        name: [
            trained(rank, shard, first, steps) for first, steps in ((999, 8), (1, 8), (128, 130))
        ]
        for name, shard in PIECES.items()
    }


@pytest.fixture(scope="module")
def told():
    return ranks.run(routed)


@pytest.mark.parametrize(
    ("pieces", "how"),
    [
        ("blocks", "rank 0 has blocks.0, rank 1 has blocks.1"),
        ("one piece", "rank 0 has no blocks.1.norm.weight, rank 1 has no blocks.0.norm.weight"),
    ],
)
def test_ranks_that_use_different_parts_are_told(pieces, how, told):
    for of_rank in told:
        well, early, late = of_rank[pieces]
        assert well == "went well"
        assert early.startswith("step 2: the ranks used different parts of the model in a step")
        assert how in early
        assert late.startswith("step 129: the ranks used different parts")


def test_what_is_left_whole_may_be_used_by_some_ranks_only(told):
    for of_rank in told:
        assert of_rank["blocks left whole"] == ["went well"] * 3
