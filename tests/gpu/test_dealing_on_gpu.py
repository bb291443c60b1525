"""Dealing out training data beside a real device: its generator and its streams are left alone."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from gpu.requirements import requires
from gpu.syncs import no_syncs
from test_sharded_batches import MAKERS
from test_sharded_loader import Homemade
from torchfast import PrefetchingLoader, shard_loader

pytestmark = requires(gpus=1)


@pytest.mark.parametrize("name", ["sampler", "at once", "buffered", "workers"])
def test_an_epoch_leaves_the_devices_generator_alone(name):
    """Else dropout would begin anew with each epoch, and be the same on all ranks."""
    data = range(12)
    makers = MAKERS | {"sampler": lambda: DataLoader(data, 2, sampler=Homemade(data))}
    torch.cuda.manual_seed(7)
    torch.rand(3, device="cuda")
    before = torch.cuda.get_rng_state()
    loader = shard_loader(makers[name](), rank=1, world_size=2)
    expected = [[batch.tolist() for batch in loader] for _ in range(2)]
    assert torch.equal(torch.cuda.get_rng_state(), before)
    again = shard_loader(makers[name](), rank=1, world_size=2)
    with PrefetchingLoader(again, "cuda", background=True) as batches:
        assert [[batch.tolist() for batch in batches] for _ in range(2)] == expected
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_what_lies_on_the_device_is_not_read():
    given = [torch.full((4,), float(number), device="cuda") for number in range(8)]
    with no_syncs():
        batches = list(shard_loader(given, rank=1, world_size=2))
    assert torch.equal(torch.stack(batches)[:, 0].cpu(), torch.tensor([1.0, 3.0, 5.0, 7.0]))
