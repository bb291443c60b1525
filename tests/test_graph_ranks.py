"""Ranks that capture the same step: each decides for itself only what the others need not know."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

import ranks
from models import DropoutNet, make_batches, mean_loss
from torchfast import Trainer
from torchfast._core.rank_group import RankGroup
from torchfast.graphs.together import Together

pytestmark = pytest.mark.usefixtures("tape")

STEPS = 8


class Counted:
    """Captures cleanly, and computes something else in each call."""

    def __init__(self):
        self.count = 0

    def __call__(self, model, batch):
        self.count += 1
        return mean_loss(model, batch) / self.count


def draws(model, batch):
    return mean_loss(model, batch) * random.random()


def train(loss_fn, batches, num_evicted=0):
    """Train with a graph whose engine talks to the other ranks."""
    torch.manual_seed(0)
    model = DropoutNet()
    trainer = Trainer(model, partial(torch.optim.AdamW, lr=0.01, fused=True), loss_fn)
    graph = trainer._step._graph
    engine = graph._graph
    engine._together = graph._together = Together(RankGroup.join(timeout_s=20))
    engine.store.num_evicted = num_evicted
    for batch in batches:
        trainer.step(batch)
    report = trainer.report()
    return report.counters["graphs"], report.counters["replays"], str(report)


def work(rank):
    batches = make_batches(STEPS)
    shorter = [tuple(t[:2] for t in b) if rank == 1 and 3 < n < 6 else b
               for n, b in enumerate(batches)]  # fmt: skip
    return {
        "all": train(mean_loss, batches),
        "one draws": train(draws if rank == 1 else mean_loss, batches),
        "one counts": train(Counted() if rank == 1 else mean_loss, batches),
        "one has no room": train(mean_loss, batches, 1000 if rank == 1 else 0),
        "other shapes": train(mean_loss, shorter),
    }


@pytest.fixture
def results():
    return ranks.run(work, timeout_s=120)


def test_ranks_capture_and_fall_back_together(results):
    for result in results:
        graphs, replays, _ = result["all"]
        assert (graphs, replays) == (1, STEPS - 3)
        for name in ("one draws", "one counts", "one has no room"):
            assert result[name][:2] == (0, 0), result[name][2]
    first, second = results
    for name in ("one draws", "one counts", "one has no room"):
        assert "another rank could not capture it" in first[name][2]
    assert "draws from" in second["one draws"][2]
    # What one rank alone could capture, it does not; and what one could replay, neither does.
    assert first["other shapes"][:2] == second["other shapes"][:2] == (1, STEPS - 3 - 2)
