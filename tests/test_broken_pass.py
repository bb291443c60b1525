"""Ranks that all fail in a step go on as if it had not been: nothing of it comes into the next."""

from contextlib import suppress

import pytest
import torch
from torch.nn import functional as F

import ranks
from parallel_training import OPTIMIZERS, Own, batches, fresh, full_state
from tape import taped
from torchfast import Plan, ShardOptions, Trainer
from torchfast._core.fsdp_pieces import pieces_of

FAILS_AT = 3
SHARDS = {
    "ddp": "ddp",
    "fsdp": "fsdp",
    "hsdp": ShardOptions(strategy="hsdp", num_replicas=2),
    "fsdp two ahead": ShardOptions(strategy="fsdp", prefetch=2),
}


class BrokenError(Exception):
    pass


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise BrokenError


class Loss:
    """A loss that fails once, behind the first block, there in the forward or in the backward."""

    def __init__(self, where, fails):
        self.where, self.fails = where, fails

    def __call__(self, model, batch):
        tokens, targets = batch
        x = model.embedding(tokens)
        for number, block in enumerate(model.blocks):
            x = block(x)
            if number == 0 and self.fails():
                if self.where == "forward":
                    raise BrokenError
                x = Broken.apply(x)
        return F.cross_entropy(model.head(x).flatten(0, 1), targets.flatten())


def at_call(number):
    calls = []

    def fails():
        calls.append(0)
        return len(calls) == number

    return fails


def never():
    return False


def trainer_of(shard, loss_fn, accumulate=1, *, cuda_graph=False):
    return Trainer(
        fresh(),
        OPTIMIZERS["adamw"],
        loss_fn,
        Plan(shard=shard, cuda_graph=cuda_graph),
        max_grad_norm=0.5,
        accumulate=accumulate,
    )


def trained(trainer, given):
    """Train, and leave out what fails; return losses, and weights that have been put together."""
    losses = []
    for batch in given:
        with suppress(BrokenError):
            losses.append(trainer.step(batch))
    state = full_state(trainer.model)
    trainer.close()
    return losses, state


def same(found, expected):
    (losses, state), (expected_losses, expected_state) = found, expected
    return (
        len(losses) == len(expected_losses)
        and all(map(torch.equal, losses, expected_losses))
        and all(torch.equal(state[name], value) for name, value in expected_state.items())
    )


def failing(rank):
    found = {}
    for name, shard in SHARDS.items():
        for accumulate in (1, 2):
            given = batches(rank, accumulate=accumulate)
            left = [b for at, b in enumerate(given) if at != (FAILS_AT - 1) // accumulate]
            expected = trained(trainer_of(shard, Loss("nowhere", never), accumulate), left)
            for where in ("forward", "backward"):
                trainer = trainer_of(shard, Loss(where, at_call(FAILS_AT)), accumulate)
                found[name, accumulate, where] = same(trained(trainer, given), expected)
        given = batches(rank)
        expected = trained(trainer_of(shard, Loss("nowhere", never)), given)
        trainer = trainer_of(shard, Loss("forward", at_call(1)))
        with pytest.raises(BrokenError):
            trainer.evaluate(Own(given[:1]))
        found[name, "evaluation"] = same(trained(trainer, given), expected)
    return found


@pytest.fixture(scope="module")
def results():
    return ranks.run(failing, timeout_s=120)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("shard", SHARDS)
def test_a_step_that_fails_on_all_ranks_is_as_if_it_had_not_been(shard, where, accumulate, results):
    for found in results:
        assert found[shard, accumulate, where]


@pytest.mark.parametrize("shard", SHARDS)
def test_so_is_an_evaluation(shard, results):
    for found in results:
        assert found[shard, "evaluation"]


def captured(rank, monkeypatch):
    """Train with a step that no capture goes through."""
    found = {}
    given = batches(rank) * 4  # replicas warm up for eleven
    for shard in ("ddp", "fsdp"):
        expected = trained(trainer_of(shard, Loss("nowhere", never)), given)
        for where in ("forward", "backward"):
            with taped(monkeypatch) as backends:

                def fails(of=backends):
                    return of[-1].tape is not None

                trainer = trainer_of(shard, Loss(where, fails), cuda_graph=True)
                own = trained(trainer, given)
                report = trainer.report()
            pieces = list(pieces_of(trainer.model))
            found[shard, where] = {
                "same": same(own, expected),
                "graphs": report.counters["graphs"],
                "told": "BrokenError" in str(report),
                "closed": all(p.is_sharded and p._training_state.name == "IDLE" for p in pieces),
            }
    return found


def test_so_is_a_capture_that_fails(monkeypatch):
    expected = {"same": True, "graphs": 0, "told": True, "closed": True}
    for found in ranks.run(captured, 2, monkeypatch, timeout_s=120):
        assert found == dict.fromkeys(found, expected)
        assert len(found) == 4
