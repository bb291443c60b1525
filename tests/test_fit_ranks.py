"""``fit`` on several ranks, killed and gone on with: exact on as many, and possible on others."""

from __future__ import annotations

import os
import shutil
import signal
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ranks
from checkpointing import assert_same
from torchfast import CheckpointManager, CheckpointWriteError, Plan, PrefetchingLoader, Trainer

STEPS = 7


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.25), nn.Linear(6, 3))


def loss_fn(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def data(batch_size):
    values = torch.Generator().manual_seed(5)
    samples = TensorDataset(
        torch.randn(32, 4, generator=values), torch.randn(32, 3, generator=values)
    )
    order = torch.Generator().manual_seed(6)
    return DataLoader(samples, batch_size, shuffle=True, generator=order)


def trained(folder, steps, shard, batch_size=2, seed=3):
    """Fit up to so many steps, from what the folder has; return the state, made whole."""
    model = net(seed)
    plan = Plan(shard=shard) if shard else "eager"
    trainer = Trainer(model, partial(torch.optim.AdamW, lr=1e-2), loss_fn, plan=plan)
    trainer.fit(
        data(batch_size),
        steps=steps,
        checkpoint=folder,
        checkpoint_every=1,
        progress="off",
    )
    return full(trainer.state_dict())


def full(value):
    if isinstance(value, dict):
        return {key: full(each) for key, each in value.items() if key not in ("rng", "plan")}
    whole = getattr(value, "full_tensor", None)
    return whole() if whole else value.clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_a_run_goes_on_exactly_and_on_other_numbers_of_ranks(shard, tmp_path):
    def whole(rank):
        return trained(tmp_path / "whole", STEPS, shard)

    def parts(rank):
        folder = tmp_path / "parts"
        trained(folder, 3, shard)
        return trained(folder, STEPS, shard, seed=99)  # none of which is to be seen

    expected = ranks.run(whole)
    found = ranks.run(parts)
    assert_same(found[0], expected[0])
    assert_same(found[1], expected[1])
    assert_same(expected[1]["model"], expected[0]["model"])

    # In one process with batches twice as large, which is at the same place in the data.
    one = trained(tmp_path / "parts", STEPS + 2, None, batch_size=4)
    assert one["num_steps"] == STEPS + 2
    # And on two again, from what one has saved.
    two = ranks.run(lambda rank: trained(tmp_path / "parts", STEPS + 4, shard))
    assert_same(two[0]["model"], two[1]["model"])
    assert two[1]["num_steps"] == STEPS + 4


def plain(folder, steps, batch_size, seed):
    """Fit without dropout, whose masks are each rank's; return the state and what was read."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    read = []

    def loss(model, batch):
        read.extend(batch[0][:, 0].tolist())
        return loss_fn(model, batch)

    plan = Plan(shard="fsdp") if dist.is_initialized() else "eager"
    trainer = Trainer(model, partial(torch.optim.AdamW, lr=1e-2), loss, plan=plan)
    at = trainer.fit(
        data(batch_size), steps=steps, checkpoint=folder, checkpoint_every=1, progress="off"
    )
    return full(trainer.state_dict()), read, at.num_steps


def test_what_four_ranks_have_saved_goes_on_on_eight_and_on_one(tmp_path):
    """F14: the model bitwise, and the samples that are left of the epoch, each once."""
    saved = ranks.run(lambda rank: plain(tmp_path / "run", 2, 2, 3), 4)
    expected = ranks.run(lambda rank: plain(tmp_path / "whole", 4, 2, 3), 4)
    for folder in ("eight", "one"):
        shutil.copytree(tmp_path / "run", tmp_path / folder)
    loaded = ranks.run(lambda rank: plain(tmp_path / "eight", 2, 2, 99), 8)
    assert all(not read for _, read, _ in loaded)  # nothing was left to do but to load
    for state, _, _ in loaded:
        assert_same(state["model"], saved[0][0]["model"])
        assert_same(state["optimizer"]["state"], saved[0][0]["optimizer"]["state"])
    before = [sample for _, read, _ in saved for sample in read]
    # With batches as large a step takes twice as many: the position is another number of them.
    eight = ranks.run(lambda rank: plain(tmp_path / "eight", 3, 2, 99), 8)
    one = plain(tmp_path / "one", 4, 8, 99)
    everything = data(1).dataset.tensors[0][:, 0].tolist()
    for goes_on in (eight, [one]):
        after = [sample for _, read, _ in goes_on for sample in read]
        assert len(before) == len(after) == 16
        assert sorted([*before, *after]) == sorted(everything)
    for key, value in expected[0][0]["model"].items():
        torch.testing.assert_close(one[0]["model"][key], value, rtol=2e-4, atol=2e-6)


def test_what_cannot_be_saved_ends_all_ranks_alike(tmp_path):
    def work(rank):
        write = os.write

        def full_disk(descriptor, data):
            raise OSError(28, "No space left on device")

        if rank == 1:
            os.write = full_disk
        with pytest.raises(CheckpointWriteError):
            trained(tmp_path / "run", STEPS, "fsdp")
        os.write = write

    ranks.run(work)


def test_a_loader_that_is_not_divided_is_refused():
    """Each rank would train on all of the data, and say nothing of it."""

    def work(rank):
        trainer = Trainer(
            net(0), partial(torch.optim.AdamW, lr=1e-2), loss_fn, plan=Plan(shard="ddp")
        )
        whole = PrefetchingLoader(data(2), "cpu")
        for take in (partial(trainer.fit, steps=1), trainer.prefetch):
            with pytest.raises(ValueError, match="has ranks='1' and the trainer ranks='2'"):
                take(whole)
        mine = trainer.prefetch(iter([torch.ones(2)] * 4))  # nor may what is divided be refused
        assert len(list(trainer.prefetch(mine))) == 2

    ranks.run(work)


def test_several_steps_at_once_are_one_after_the_other_on_ranks():
    """Which agree before each step; and who was asked for them is told."""

    def work(rank):
        ends = []
        for unroll in (None, 3):
            trainer = Trainer(
                net(0), partial(torch.optim.AdamW, lr=1e-2), loss_fn, plan=Plan(shard="ddp")
            )
            torch.manual_seed(7 + rank)
            trainer.fit(data(2), steps=7, unroll=unroll, progress="off")
            ends.append(full(trainer.state_dict()))
        with pytest.raises(ValueError, match=r"different arguments of fit \(.*unroll="):
            trainer.fit(data(2), steps=1, unroll=2 + rank, progress="off")
        (told,) = [d.detail for d in trainer.report().decisions if d.lever == "unroll"]
        return *ends, told

    for one, several, told in ranks.run(work):
        assert_same(one, several)
        assert told.startswith("steps that are given together run one by one: there is no graph")


class CutShort:
    """A loader whose workers hear of Ctrl-C before the loop does."""

    is_sharded = True

    def __iter__(self):
        for number in range(8):
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)
                raise RuntimeError("DataLoader worker exited unexpectedly")
            yield data(2).dataset[:2]


def test_an_epoch_that_a_signal_cuts_is_not_counted(tmp_path):
    def work(rank):
        trainer = Trainer(
            net(0), partial(torch.optim.AdamW, lr=1e-2), loss_fn, plan=Plan(shard="ddp")
        )
        result = trainer.fit(CutShort(), epochs=2, progress="off", checkpoint=tmp_path / "run")
        with CheckpointManager(tmp_path / "run") as checkpoints:
            at = checkpoints.load().state["loader"]["num_batches"]
        return result.stopped_by, result.num_steps, result.num_epochs, at

    assert ranks.run(work) == [("SIGINT", 3, 0, 3)] * 2


def norms(rank, shard):
    """A metric of a weight is a sharded number; fit tells it, as it tells any other."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])

    def told(model, batch):
        norm = model[0][0].weight.norm().detach()
        return model(batch).square().mean(), {"norm": norm, "rank": float(rank)}

    trainer = Trainer(model, partial(torch.optim.SGD, lr=0.0), told, Plan(shard=shard))
    result = trainer.fit([torch.ones(2, 4)] * 4, steps=2, log_every=1, progress="off")
    weight = full(dict(model.named_parameters()))["0.0.weight"]
    return [each["metrics"] for each in result.history], float(weight.detach().norm())


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_a_metric_of_a_sharded_weight_is_told(shard):
    for told, norm in ranks.run(norms, 2, shard):
        assert [each["norm"] for each in told] == [pytest.approx(norm)] * 2
        assert [each["rank"] for each in told] == [0.5] * 2
