"""Without a device: batches come as from a ring, so nothing of them is also upstream's."""

from __future__ import annotations

import dataclasses
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from simulated_device import Prompt, simulated
from torchfast import PadToLengths, PrefetchingLoader, Trainer


@pytest.fixture(params=["cpu", "ring"])
def both(request, monkeypatch):
    """The CPU, and a device that a CPU plays."""
    if request.param == "cpu":
        yield request.param
        return
    with simulated(monkeypatch) as device:
        device.kind = Prompt
        yield request.param


def refilled(*sizes):
    """A generator that fills one buffer for each batch."""
    buffer = torch.zeros(sizes or (2,))
    for number in range(4):
        yield buffer.fill_(number)


@pytest.mark.parametrize("options", [{}, {"transform": lambda batch: batch}])
def test_a_buffer_that_is_filled_again_changes_no_batch(both, options):
    batches = list(PrefetchingLoader(refilled(), "cpu", **options))
    assert [float(batch[0]) for batch in batches] == [0, 1, 2, 3]


def test_a_group_holds_each_of_its_batches(both):
    loader = PrefetchingLoader(refilled(), "cpu", accumulate=2, reuse=True)
    groups = [[float(batch[0]) for batch in group] for group in loader]
    assert groups == [[0, 1], [2, 3]]


def scaled(batch):
    batch["x"] = batch["x"].float() / 255
    batch["of"]["count"] += 1
    batch["names"].append("seen")
    return batch


def bytes_of_255():
    x = torch.full((2,), 255, dtype=torch.uint8)
    return {"x": x, "again": x, "of": {"count": 0}, "names": []}


@pytest.mark.parametrize("make", [dict, UserDict])
def test_a_transform_does_not_change_the_batches_of_a_list(both, make):
    data = [make(bytes_of_255()) for _ in range(2)]
    loader = PrefetchingLoader(data, "cpu", transform=scaled)
    for _ in range(3):
        seen = [(float(b["x"][0]), dict(b["of"]), b["names"]) for b in loader]
        assert seen == [(1.0, {"count": 1}, ["seen"])] * 2
    assert [(b["of"], b["names"]) for b in data] == [({"count": 0}, [])] * 2
    loader.close()


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    epoch: int = 0


def counted(pair):
    pair.x.div_(2)
    pair.epoch += 1
    return pair


def test_a_transform_that_writes_in_place_is_the_same_in_each_epoch(both):
    data = [Pair(torch.full((2,), 10.0))]
    loader = PrefetchingLoader(data, "cpu", transform=counted)
    for _ in range(2):
        (pair,) = list(loader)
        assert (pair.x.tolist(), pair.epoch) == ([5.0, 5.0], 1)
    loader.close()


def test_what_a_loop_writes_into_a_batch_is_not_in_the_next_epoch(both):
    loader = PrefetchingLoader([[torch.full((2,), 10.0)]], "cpu")
    for _ in range(2):
        for (x,) in loader:
            assert x.tolist() == [10.0, 10.0]
            x.div_(2)
    loader.close()


def test_what_is_copied_stays_as_it_was():
    image = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    weight = torch.ones(2, requires_grad=True)
    text = ("a", {"b": 1})
    ((same, again, leaf, sparse, other),) = PrefetchingLoader(
        [(image, image, weight, torch.eye(2).to_sparse(), text)], "cpu"
    )
    assert same is again
    assert same is not image
    assert torch.equal(same, image)
    assert same.stride() == image.stride()
    assert leaf.is_leaf
    assert leaf.requires_grad
    assert sparse.is_sparse
    assert other[0] == "a"


class Held(Dataset):
    """Has its samples, and hands them out as they are."""

    def __init__(self):
        self.samples = [torch.full((2,), 10.0) for _ in range(4)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class Repeating(DataLoader):
    """Yields a batch again, as one that caches does."""

    def __iter__(self):
        batch = next(super().__iter__())
        yield from [batch, batch]


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Held(), batch_size=None),
        DataLoader(Held(), batch_size=1, collate_fn=lambda samples: samples[0]),
        Repeating(Held(), batch_size=2),
    ],
    ids=["not collated", "collated by hand", "repeated"],
)
def test_a_dataloader_that_may_hold_its_batches_keeps_them(loader):
    batches = PrefetchingLoader(loader, "cpu", transform=lambda batch: batch.div_(2))
    for _ in range(2):
        assert all(batch.unique().tolist() == [5.0] for batch in batches)


@pytest.mark.parametrize("collate_fn", [None, PadToLengths((2, 4), (0,))])
def test_what_a_dataloader_collates_is_not_copied(collate_fn, monkeypatch):
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2, collate_fn=collate_fn)
    monkeypatch.setattr(torch.Tensor, "clone", None)
    assert len(list(PrefetchingLoader(loader, "cpu"))) == 2
    assert len(list(PrefetchingLoader(loader, "cpu", transform=lambda batch: batch))) == 2
    with pytest.raises(TypeError):  # as what a list holds is
        list(PrefetchingLoader([torch.ones(2)], "cpu"))


@pytest.mark.parametrize("way", ["prefetch", "fit", "transform"])
def test_parameters_in_a_batch_are_trained(way):
    """Latent codes or prompts, which the optimizer holds: of a copy nothing would come back."""

    def trained(way):
        torch.manual_seed(0)
        model, codes = nn.Linear(4, 2), [nn.Parameter(torch.randn(8, 4)) for _ in range(3)]
        batches = [(code, torch.randn(8, 2)) for code in codes]
        optimizer = torch.optim.SGD([*model.parameters(), *codes], lr=0.1)
        trainer = Trainer(model, optimizer, lambda m, b: nn.functional.mse_loss(m(b[0]), b[1]))
        if way == "fit":
            trainer.fit(batches, epochs=1, progress=False)
        else:
            same = (lambda batch: batch) if way == "transform" else None
            loader = PrefetchingLoader(batches, "cpu", transform=same)
            for batch in batches if way == "plain" else loader:
                trainer.step(batch)
        return codes

    for own, expected in zip(trained(way), trained("plain"), strict=True):
        assert torch.equal(own, expected)
