"""float8 beside bf16 where several ranks train together: one comparison, told once."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import ranks
from float8_models import batches, gpt_without_batch_norm, loss_fn
from torchfast import Float8Options, Plan, ShardOptions, Trainer

FSDP = ShardOptions(strategy="fsdp", gather_dtype="fp32")
SHARDS = {"ddp": ("ddp", False), "fsdp": (FSDP, False), "gathered": (FSDP, True)}


def model_of_test(outlier=None):
    model = gpt_without_batch_norm()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if outlier is not None:
        with torch.no_grad():
            model.blocks[1][0].weight[0, 0] = outlier
    return model


def watched(own, shard, *, gather=False, outlier=None, steps=1, loss=loss_fn, **options):
    """Return the trainer, what it drifted and what it logged, after steps from watched ones on."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("torchfast").addHandler(handler)
    float8 = Float8Options(
        **{"recipe": "tensorwise", "smallest": 16, "watch_at": (1, 3), **options},
        emulate=True,
        all_gather=gather,
    )
    trainer = Trainer(
        model_of_test(outlier),
        partial(optim.AdamW, lr=3e-3),
        loss,
        Plan(precision=float8, shard=shard),
    )
    losses = [float(trainer.step(own)) for _ in range(steps)]
    report = str(trainer.report())
    logging.getLogger("torchfast").removeHandler(handler)
    drifts = trainer._step._transforms._float8.watch.drifts
    figures = [(d.step, d.loss, d.plain_loss, d.norm, d.plain_norm, d.layers) for d in drifts]
    return {"drifts": figures, "said": messages, "report": report, "losses": losses}


def joined_batch():
    of_ranks = [batches(1, seed=number)[0] for number in range(2)]
    return tuple(torch.cat(parts) for parts in zip(*of_ranks, strict=True))


@pytest.fixture(scope="module")
def compared():
    def rank(number):
        own = batches(1, seed=number)[0]
        return {
            name: watched(own, shard, gather=gather, steps=4)
            for name, (shard, gather) in SHARDS.items()
        } | {
            f"unwatched {name}": watched(own, shard, gather=gather, steps=4, watch_at=())
            for name, (shard, gather) in SHARDS.items()
        }

    return ranks.run(rank, timeout_s=120)


@pytest.mark.parametrize("name", SHARDS)
def test_ranks_find_what_one_process_finds_with_the_batches_of_both(name, compared):
    first, second = (of_rank[name] for of_rank in compared)
    assert first["drifts"] == second["drifts"]
    assert [drift[0] for drift in first["drifts"]] == [1, 3]
    assert "beside bf16, update 1: loss" in first["report"]
    _, loss, plain_loss, norm, plain_norm, layers = first["drifts"][0]
    alone = watched(joined_batch(), None)["drifts"][0]
    _, alone_loss, alone_plain_loss, alone_norm, alone_plain_norm, alone_layers = alone
    assert loss == pytest.approx(alone_loss, rel=2e-3)
    assert plain_loss == pytest.approx(alone_plain_loss, rel=1e-3)
    assert norm == pytest.approx(alone_norm, rel=3e-2)
    assert plain_norm == pytest.approx(alone_plain_norm, rel=1e-2)
    assert loss != plain_loss
    found = {(n.layer, n.operand): n for n in layers}
    expected = {(n.layer, n.operand): n for n in alone_layers}
    assert found.keys() == expected.keys()
    for key, numbers in expected.items():
        if key[1] != "gradient":  # of which each rank has those of its own mean
            assert found[key].amax == pytest.approx(numbers.amax, rel=2e-2), key
            assert found[key].lost == pytest.approx(numbers.lost, abs=2e-3), key


@pytest.mark.parametrize("name", SHARDS)
def test_the_comparison_changes_no_step(name, compared):
    for of_rank in compared:
        assert of_rank[name]["losses"] == of_rank[f"unwatched {name}"]["losses"]


@pytest.mark.parametrize("name", SHARDS)
def test_the_first_rank_warns_of_what_any_sees(name):
    def rank(number):
        shard, gather = SHARDS[name]
        own = batches(1, seed=number)[0]
        # The row of the outlier lies on the first rank's shard alone.
        return watched(own, shard, gather=gather, outlier=1e6, loss_drift=1e-9)

    first, second = ranks.run(rank)
    assert any("layer 'blocks.1.0' does not fit float8" in message for message in first["said"])
    assert any("the loss in float8 is" in message for message in first["said"])
    assert not second["said"]
    for report in (first["report"], second["report"]):
        assert "(!)" in report
        assert "its weight that are not zero become it beside a largest value of 1e+06" in report


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_what_is_lost_is_counted_over_all_ranks(name):
    def rank(number):
        inputs = torch.zeros(16, 32)
        inputs[0, 0] = 1e7 if number else 1.0
        inputs[1:9] = 1e-3 * number
        torch.manual_seed(0)
        trainer = Trainer(
            nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 3)),
            partial(optim.SGD, lr=0.0),
            lambda model, batch: model(batch).float().square().mean(),
            Plan(
                precision=Float8Options(
                    recipe="tensorwise", smallest=16, watch_at=(1,), emulate=True
                ),
                shard=SHARDS[name][0],
            ),
        )
        trainer.step(inputs)
        trainer.report()
        (drift,) = trainer._step._transforms._float8.watch.drifts
        return {n.operand: n.lost for n in drift.layers}

    for lost in ranks.run(rank):
        assert lost["input"] == pytest.approx(256 / 258)  # not half, as one rank loses nothing


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_on_one_rank_are_seen_by_all(bad):
    def rank(number):
        def loss(model, batch):
            model.embed.weight.data[0] = bad if number else 0.0
            return loss_fn(model, batch)

        tokens, targets = batches(1, seed=number)[0]
        return watched((tokens * 0, targets), "ddp", loss=loss)["report"]

    for report in ranks.run(rank):
        assert "input has values that are not finite" in report


def test_a_rank_that_cannot_compare_stops_all():
    def rank(number):
        calls = []

        def loss(model, batch):
            calls.append(batch)
            if number == 1 and len(calls) == 2:
                raise torch.OutOfMemoryError("out of memory")
            return loss_fn(model, batch)

        own = batches(1, seed=number)[0]
        found = watched(own, "ddp", loss=loss, steps=3)
        dist.barrier()
        return found["report"], found["losses"]

    (first, _), (second, _) = ranks.run(rank)
    assert "another rank could not run a step in both formats" in first
    assert "not compared with bf16: OutOfMemoryError: out of memory" in second


def test_layers_that_only_one_rank_calls_are_compared():
    def rank(number):
        def loss(model, batch):
            blocks = model.blocks
            model.blocks = blocks[: 1 + number]
            try:
                return loss_fn(model, batch)
            finally:
                model.blocks = blocks

        shard = ShardOptions(strategy="ddp", unused_parameters=True)
        return watched(batches(1, seed=number)[0], shard, loss=loss)

    first, second = ranks.run(rank)
    assert first["drifts"] == second["drifts"]
    (drift,) = first["drifts"]
    assert {n.layer for n in drift[5]} == {"blocks.0.0", "blocks.0.3", "blocks.1.0", "blocks.1.3"}
    assert all(n.lost < 0.5 and n.amax > 0 for n in drift[5])


def test_processes_that_train_apart_do_not_compare():
    def rank(number):
        return watched(batches(1)[0], None)["report"]

    for report in ranks.run(rank):
        assert "not compared with bf16: with several processes and no shard= in the plan" in report
