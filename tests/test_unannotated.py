"""The batches of a DataLoader without its annotation: the same batches, unless somebody listens."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from torchfast import PrefetchingLoader, build_dataloader
from torchfast.data import unannotated as module
from torchfast.data.unannotated import unannotated


class Numbers(Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, index):
        if index == 5 and self.fails:
            raise ValueError("the sample cannot be read")
        return torch.tensor(float(index))

    fails = False


class Failing(Numbers):
    fails = True


class Shorter(IterableDataset):
    """Says that it has fewer samples than it has."""

    def __len__(self):
        return 2

    def __iter__(self):
        return iter(torch.arange(6.0))


class Endless(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(6.0))


@pytest.fixture
def annotated(monkeypatch):
    """The names that were told to torch's profiler, whether or not it listens."""
    names = []
    record_function = torch.autograd.profiler.record_function

    def noted(name):
        names.append(name)
        return record_function(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", noted)
    return names


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("data", [Numbers(), Endless()])
def test_they_are_the_same_batches(num_workers, data, annotated):
    loader = DataLoader(data, batch_size=2, num_workers=num_workers)
    expected = [batch.tolist() for batch in loader]
    assert annotated
    annotated.clear()
    iterator = iter(loader)
    found = [batch.tolist() for batch in unannotated(iterator)]
    assert found == expected
    assert iterator._num_yielded == len(expected)
    assert not annotated


def test_a_prefetching_loader_takes_them_so(annotated):
    loader = DataLoader(Numbers(), batch_size=2)
    with PrefetchingLoader(loader, "cpu") as batches:
        for _ in range(2):
            assert [len(batch) for batch in batches] == [2, 2, 2, 1]
    assert not annotated


@pytest.mark.parametrize("recycle_memory", [True, False])
@pytest.mark.parametrize("timeout", [0, 30])
def test_so_does_who_takes_them_from_a_loader_that_watches_its_workers(
    annotated, recycle_memory, timeout
):
    options = {"num_workers": 1, "recycle_memory": recycle_memory, "timeout": timeout}
    loader = build_dataloader(Numbers(), 2, device="cpu", **options)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6]]
        with PrefetchingLoader(loader, "cpu") as batches:
            assert [len(batch) for batch in batches] == [2, 2, 2, 1]
    assert not annotated


@pytest.mark.parametrize("num_workers", [0, 1])
def test_who_catches_an_error_may_go_on_behind_it(num_workers):
    iterator = iter(build_dataloader(Failing(), 2, device="cpu", num_workers=num_workers))
    assert [len(next(iterator)) for _ in range(2)] == [2, 2]
    with pytest.raises(ValueError, match="cannot be read"):
        next(iterator)
    assert next(iterator).tolist() == [6.0]
    with pytest.raises(StopIteration):
        next(iterator)


def test_workers_that_stay_serve_a_second_epoch():
    loader = DataLoader(Numbers(), batch_size=2, num_workers=1, persistent_workers=True)
    for _ in range(2):
        assert len([*unannotated(iter(loader))]) == 4


def test_a_profiler_hears_of_them():
    iterator = unannotated(iter(DataLoader(Numbers(), batch_size=2)))
    next(iterator)
    with profile(activities=[ProfilerActivity.CPU]) as heard:
        next(iterator)
    next(iterator)
    names = [event.key for event in heard.key_averages()]
    assert "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__" in names


def test_an_error_comes_through():
    iterator = unannotated(iter(DataLoader(Failing(), batch_size=2)))
    assert [len(next(iterator)) for _ in range(2)] == [2, 2]
    with pytest.raises(ValueError, match="cannot be read"):
        next(iterator)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_length_that_was_told_wrong_is_warned_of(is_known, monkeypatch):
    loader = DataLoader(Shorter(), batch_size=1)
    len(loader)
    if is_known:  # the control: without the guard nobody would hear of it
        monkeypatch.setattr(module, "_is_known", lambda _: True)
        assert len([*unannotated(iter(loader))]) == 6
        return
    with pytest.warns(UserWarning, match="was reported to be 2"):
        assert len([*unannotated(iter(loader))]) == 6


def doubled(self):
    """Stands in for torch's method, as some packages put their own there."""
    if isinstance(self._dataset, Numbers):
        data = 2 * self._next_data()
    self._num_yielded += 1
    return data


def test_a_method_that_somebody_put_there_is_called(monkeypatch):
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", doubled)
    iterator = unannotated(iter(DataLoader(Numbers(), batch_size=2)))
    assert next(iterator).tolist() == [0.0, 2.0]


def test_an_iterator_with_a_method_of_its_own_is_left_alone():
    class Own(_SingleProcessDataLoaderIter):
        __next__ = doubled

    iterator = Own(DataLoader(Numbers(), batch_size=2))
    assert unannotated(iterator) is iterator
    assert next(unannotated(iterator)).tolist() == [0.0, 2.0]
    plain = iter([1, 2])
    assert unannotated(plain) is plain


def test_torchs_method_is_known():
    """Where this fails, a new torch names other things, and each batch takes longer again."""
    assert unannotated(iterator := iter(DataLoader(Numbers()))) is not iterator
