"""Of two iterations over workers that stay the second is refused: it would end the first."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from torchfast import IterationError, PrefetchingLoader, Trainer, build_dataloader


class Numbers(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == self.fails_at:
            raise ValueError("cannot be read")
        return torch.tensor([float(index)])

    fails_at = None


class Failing(Numbers):
    fails_at = 5


def staying(data=None, **options):
    return DataLoader(data or Numbers(), 2, num_workers=1, persistent_workers=True, **options)


def firsts(batches):
    return [int(batch[0]) for batch in batches]


ALL = [0, 2, 4, 6, 8]


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize("build", [staying, lambda: build_dataloader(Numbers(), 2, num_workers=1)])
def test_a_second_iteration_is_refused_and_the_first_goes_on(build):
    loader = build()
    assert loader.persistent_workers
    first = PrefetchingLoader(loader, "cpu")
    found = []
    for number, batch in enumerate(first):
        found += firsts([batch])
        if number == 1:
            with pytest.raises(IterationError, match="is being iterated already, and its worker"):
                next(iter(PrefetchingLoader(loader, "cpu")))
    assert found == ALL
    assert firsts(PrefetchingLoader(loader, "cpu")) == ALL


def test_without_the_guard_the_first_would_lose_the_rest(monkeypatch):
    monkeypatch.setattr("torchfast.data.position.check_free", lambda _: None)
    loader, found = staying(), []
    for number, batch in enumerate(PrefetchingLoader(loader, "cpu")):
        found += firsts([batch])
        if number == 1:
            assert firsts(PrefetchingLoader(loader, "cpu")) == ALL
    assert found == [0, 2]


def test_an_evaluation_on_the_data_that_is_trained_on_says_so():
    model = torch.nn.Linear(1, 1)
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), 0.1), lambda m, b: m(b).mean(), "eager"
    )
    loader = staying()
    with pytest.raises(IterationError, match=r"DataLoader of its own, or persistent_workers=False"):
        trainer.fit(loader, epochs=1, evaluate=loader, evaluate_every=2, progress=False)
    own = DataLoader(Numbers(), 2)
    trainer.fit(loader, epochs=1, evaluate=own, evaluate_every=2, progress=False)


@pytest.mark.usefixtures("every_way")
def test_what_ended_in_any_way_is_over():
    loader = staying()
    for _batch in PrefetchingLoader(loader, "cpu"):
        break
    assert firsts(PrefetchingLoader(loader, "cpu")) == ALL
    let_go = iter(PrefetchingLoader(loader, "cpu"))
    next(let_go)
    del let_go
    closed = PrefetchingLoader(loader, "cpu")
    next(iter(closed))
    closed.close()
    again = PrefetchingLoader(loader, "cpu")
    next(iter(again))
    assert firsts(again) == ALL


@pytest.mark.usefixtures("every_way")
def test_an_error_that_is_still_held_is_no_iteration():
    loader = staying(Failing())
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be read") as held:
            list(PrefetchingLoader(loader, "cpu"))
        assert held.value.__traceback__ is not None


class KeepsItsIterator:
    """A loader of somebody's own, which has in ``_iterator`` what it likes."""

    def __iter__(self):
        self._iterator = iter([torch.tensor([float(i)]) for i in ALL])
        return self._iterator


class KeepsTheLast(DataLoader):
    """As torchdata's: no worker stays, and each epoch's iterator is kept."""

    def __iter__(self):
        self._iterator = super().__iter__()
        return self._iterator


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize("build", [KeepsItsIterator, partial(KeepsTheLast, Numbers(), 2)])
def test_a_loader_whose_workers_do_not_stay_is_iterated_at_will(build):
    loader, found = build(), []
    for number, batch in enumerate(PrefetchingLoader(loader, "cpu")):
        found += firsts([batch])
        if number == 1:
            assert firsts(PrefetchingLoader(loader, "cpu")) == ALL
    assert found == ALL


@pytest.mark.usefixtures("every_way")
def test_a_position_is_loaded_between_two_iterations():
    loader = PrefetchingLoader(staying(), "cpu")
    batches = iter(loader)
    assert firsts([next(batches), next(batches)]) == [0, 2]
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert firsts(loader) == [4, 6, 8]


@pytest.mark.usefixtures("every_way")
def test_epochs_that_begin_ahead_follow_each_other():
    with PrefetchingLoader(staying(), "cpu", across_epochs=True) as loader:
        for _ in range(3):
            assert firsts(loader) == ALL
