"""Buffers of several ranks: the first one's in each forward, in evaluations and after a restart."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ranks
from parallel_training import full_state
from torchfast import EMAOptions, Plan, Trainer
from torchfast.parallel.buffers import Buffers

SHARDS = ["ddp", "fsdp"]


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("table", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.down(torch.relu(self.norm(self.up(x))))


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def pairs(count, seed):
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(count, 5, generator=drawn), torch.randn(count, 3, generator=drawn)


def trainer_of(shard, ema=None, model=None):
    torch.manual_seed(0)
    return Trainer(model or Normed(), adam, loss_fn, Plan(shard=shard), ema=ema)


def evaluated(rank, shard):
    ema = EMAOptions(decay=0.5, use_buffers=True)
    trainer = trainer_of(shard, ema=ema)
    for step in range(6):
        trainer.step(pairs(4, 10 * step + rank))
    saved = [full_state(model) for model in (trainer.model, trainer.ema_model)]
    held_out = [pairs(4, 100 + number) for number in range(4)]
    found = [trainer.evaluate(held_out, ema=ema)["loss"] for ema in (False, True)]
    truths = []
    for state in saved:
        model = Normed()
        model.load_state_dict(state)
        model.eval()
        with torch.no_grad():
            truths.append(sum(float(loss_fn(model, batch)) for batch in held_out) / 4)
    return found, truths


@pytest.mark.parametrize("shard", SHARDS)
def test_what_is_evaluated_is_what_is_saved(shard):
    (first, truth), (second, other) = ranks.run(evaluated, 2, shard)
    assert first == second == pytest.approx(truth, rel=1e-6)
    assert other != pytest.approx(truth, rel=1e-4)  # the second rank's own


def resumed(rank, shard, folder):
    def fit(steps, checkpoint=None):
        trainer = trainer_of(shard, ema=0.8)
        loader = DataLoader(TensorDataset(*pairs(40, 5)), 3)
        trainer.fit(loader, steps=steps, progress=False, checkpoint=checkpoint)
        return trainer

    whole = fit(12)
    fit(7, folder).close()
    again = fit(12, folder)
    return [
        name
        for one, other in ((whole.model, again.model), (whole.ema_model, again.ema_model))
        for (name, a), b in zip(full_state(one).items(), full_state(other).values(), strict=True)
        if not torch.equal(a, b)
    ]


@pytest.mark.parametrize("shard", [*SHARDS, "hsdp"])
def test_a_run_goes_on_exactly_on_each_rank(shard, tmp_path):
    assert ranks.run(resumed, 2, shard, tmp_path) == [[], []]


def forwards(rank, shard):
    """Each rank writes to all buffers; what it finds in the forward that follows is told."""
    model, found = Normed(), []
    trainer = trainer_of(shard, model=model)
    with torch.no_grad():
        for buffer in (model.norm.running_mean, model.norm.num_batches_tracked, model.table):
            buffer.fill_(rank + 1)
    held, kept = model.norm.running_mean, model.norm.running_mean._version

    def look(module, inputs):
        found.append([float(b.double().mean()) for b in (held, module.num_batches_tracked)])

    with model.norm.register_forward_pre_hook(look):
        trainer.step(pairs(4, rank))
    return found, float(model.table[0]), held is model.norm.running_mean, held._version - kept


def test_shards_begin_a_forward_with_the_buffers_of_the_first_rank():
    first, second = ranks.run(forwards, 2, "fsdp")
    assert first == ([[1.0, 1.0]], 1.0, True, 0)  # the first one's own are not written to
    assert second == ([[1.0, 1.0]], 2.0, True, 1)


def sent(rank):
    model = nn.Module()
    model.register_buffer("real", torch.tensor(float(rank)))
    model.register_buffer("low", torch.full((2, 3), rank, dtype=torch.bfloat16).T)
    model.register_buffer("flag", torch.tensor([rank == 0]))
    model.register_buffer("turned", torch.tensor([1j * rank]))
    model.register_buffer("wide", torch.ones(1).expand(3))
    model.register_buffer("empty", torch.empty(0))
    model.again = nn.Module()
    model.again.register_buffer("real", model.real)
    counters = nn.Module()
    counters.register_buffer("count", torch.tensor(rank))
    Buffers(model, device=torch.device("cpu")).send_from_first()
    Buffers(counters, device=torch.device("cpu")).send_from_first()
    return [buffer.tolist() for buffer in (*model.buffers(), *counters.buffers())]


def test_buffers_of_all_dtypes_and_shapes_are_sent():
    first, second = ranks.run(sent)
    assert second[:-1] == first[:-1] == [0.0, [[0.0, 0.0]] * 3, [True], [0j], [1.0] * 3, []]
    assert (first[-1], second[-1]) == (0, 1)  # a model of counters only: nothing is sent
