"""What each rank draws at random: its own, from whatever a data set draws with."""

import functools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, get_worker_info

import ranks
from torchfast import Plan, PrefetchingLoader, Trainer, build_dataloader, shard_loader

KINDS = ("torch", "python", "numpy", "seed")


class Augmented(Dataset):
    """Samples that are what was drawn for them."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        info = get_worker_info()
        drawn = float(torch.rand(())), random.random(), np.random.rand()
        return torch.tensor([*drawn, 0.0 if info is None else info.seed % 2**31 / 2**31, index])


def seeded(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def trained_on(rank, num_workers):
    seeded(0)
    seen = []

    def loss_fn(model, batch):
        seen.append(batch.double())
        return F.mse_loss(model(batch), batch)

    trainer = Trainer(
        nn.Linear(5, 5), lambda p: torch.optim.SGD(p, 0.1), loss_fn, Plan(shard="ddp")
    )
    order = torch.Generator().manual_seed(1)
    loader = DataLoader(Augmented(), 4, shuffle=True, num_workers=num_workers, generator=order)
    trainer.fit(loader, epochs=1, progress=False)
    return torch.cat(seen).T.tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_that_are_seeded_alike_augment_differently(num_workers):
    first, second = ranks.run(trained_on, 2, num_workers)
    for kind, one, other in zip(KINDS, first, second, strict=False):
        if num_workers > 0 or kind != "seed":
            assert not set(one) & set(other), kind
    assert sorted(first[-1] + second[-1]) == list(range(16))


def test_what_a_user_has_seeded_by_rank_stays():
    def drawn(rank):
        seeded(rank)
        optimizer = functools.partial(torch.optim.SGD, lr=0.1)
        Trainer(nn.Linear(1, 1), optimizer, lambda m, b: m(b).sum(), Plan(shard="ddp"))
        return float(torch.rand(())), random.random(), np.random.rand()

    for rank, found in enumerate(ranks.run(drawn)):
        seeded(rank)
        nn.Linear(1, 1)
        assert found == (float(torch.rand(())), random.random(), np.random.rand())


def loader_of(rank, size, **options):
    made = options.pop("make", DataLoader)(
        Augmented(), 2, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(1),
        **options,
    )  # fmt: skip
    return shard_loader(made, rank=rank, world_size=size)


@pytest.mark.parametrize("make", [DataLoader, build_dataloader])
def test_the_first_rank_draws_what_one_process_draws(make):
    (alone,) = ranks.run(lambda rank: torch.stack([*loader_of(rank, 1, make=make)]).tolist(), 1)
    mine, other = (torch.cat([*loader_of(rank, 2, make=make)]) for rank in range(2))
    order = torch.tensor(alone).flatten(0, 1)[:, -1]
    assert torch.equal(torch.stack([mine[:, -1], other[:, -1]], 1).flatten(), order)
    assert mine[0, :4].tolist() == alone[0][0][:4]
    assert not set(mine[:, 0].tolist()) & set(other[:, 0].tolist())


def of_user(worker):
    """Seeds from what torch gave the worker, as its documentation has it."""
    np.random.seed((torch.initial_seed() + worker) % 2**32)


def test_a_rank_goes_on_exactly_with_what_its_workers_drew():
    def made():
        return PrefetchingLoader(loader_of(1, 2, worker_init_fn=of_user), "cpu")

    whole = made()
    expected = [batch.tolist() for _ in range(2) for batch in whole]
    part = made()
    batches = iter(part)
    seen = [next(batches).tolist() for _ in range(3)]
    state = part.state_dict()
    rest = made()
    rest.load_state_dict(state)
    seen += [batch.tolist() for _ in range(2) for batch in rest]
    assert seen == expected
