"""The next epoch, begun while the last batches of this one are consumed."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from simulated_device import Prompt, stagers, wait_until
from torchfast import PrefetchingLoader, Trainer
from torchfast._core.rng import get_rng_state, same_rng_state, seed_everything, set_rng_state

CPU = torch.device("cpu")


class Numbers(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor(float(index))


def shuffled(dataset=None, **options):
    return DataLoader(dataset or Numbers(), 2, shuffle=True, **options)


def own_generator(**options):
    return shuffled(generator=torch.Generator().manual_seed(4), **options)


LOADERS = {
    "shuffled": shuffled,
    "own generator": own_generator,
    "workers": lambda: shuffled(num_workers=1),
    "workers that stay": lambda: own_generator(num_workers=1, persistent_workers=True),
    "list": lambda: list(torch.arange(10.0).split(2)),
}


@pytest.fixture(autouse=True)
def prompt(device):
    device.kind = Prompt


def epochs(loader, count):
    return [[batch.tolist() for batch in patiently(loader)] for _ in range(count)]


def patiently(loader, batches=None):
    """Iterate as a slow training does: what can be fetched ahead is there after a batch."""
    for number, batch in enumerate(loader if batches is None else batches):
        if number == 1 and isinstance(loader, PrefetchingLoader):
            wait_until(lambda: loader._feed.num_ahead is not None)
        yield batch


def ahead(loader, depth=6, **options):
    """More depth than an epoch has batches, so that its end is seen while it is consumed."""
    return PrefetchingLoader(loader, "cpu", across_epochs=True, depth=depth, **options)


@pytest.mark.parametrize("name", LOADERS)
def test_epochs_and_generators_are_those_of_a_plain_loop(name):
    seed_everything(1)
    expected, state = epochs(LOADERS[name](), 4), get_rng_state(CPU)
    seed_everything(1)
    with ahead(LOADERS[name]()) as loader:
        assert epochs(loader, 4) == expected
        assert same_rng_state(get_rng_state(CPU), state)  # though a fifth has begun
        report = str(loader.report())
        assert not loader._fetching.training_draws  # its own setting of generators is no draw
    assert "4 epochs were begun ahead" in report
    assert "otherwise" not in report
    assert stagers() == []


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", LOADERS)
def test_a_short_ring_begins_epochs_ahead_or_not_and_all_is_the_same(name, depth):
    seed_everything(1)
    expected, state = (
        [[b.tolist() for b in make] for make in [LOADERS[name]()] * 4],
        get_rng_state(CPU),
    )
    seed_everything(1)
    with ahead(LOADERS[name](), depth=depth) as loader:
        assert [[b.tolist() for b in loader] for _ in range(4)] == expected
        assert same_rng_state(get_rng_state(CPU), state)
    assert stagers() == []


def test_the_next_epoch_begins_before_this_one_is_consumed():
    told = Told()
    with ahead(told) as loader:
        for number, _ in enumerate(patiently(loader)):
            if number == 2:
                assert len(told.iterations) == 2


def test_a_training_that_draws_meanwhile_is_told():
    loader = ahead(shuffled())
    seen = []
    for _ in range(3):
        for number, batch in enumerate(patiently(loader)):
            seen += batch.tolist()
            if number == 4:  # the last one: the next epoch has begun
                # And is there, or the draw could be taken for that of a fetch under way.
                wait_until(lambda: loader._ahead.feed.num_ahead is not None)
                torch.rand(())
    assert sorted(seen) == sorted(list(range(10)) * 3)
    assert "a plain loop would have shuffled them otherwise" in str(loader.report())
    loader.close()


def test_a_training_that_draws_amid_a_fetch_of_the_next_epoch_gets_all_of_it():
    """Nobody can tell whose draw it was: fetching ahead waits for the epoch to find that out."""
    begun, asked, drawn = (threading.Event() for _ in range(3))
    samples = itertools.count()

    class Held(Numbers):
        def __getitem__(self, index):
            if threading.current_thread().name == "torchfast-stager" and loader._ahead.has_begun:
                assert begun.wait(20)  # or generators that the loader sets could explain the draw
                if next(samples) >= 2:  # of the second batch
                    asked.set()
                    assert drawn.wait(20)
            return super().__getitem__(index)

    loader = ahead(shuffled(dataset=Held()))
    seen = []
    for epoch in range(3):
        for number, batch in enumerate(patiently(loader) if epoch == 0 else loader):
            seen += batch.tolist()
            if epoch == 0 and number == 4:
                begun.set()
                assert asked.wait(20)
                torch.rand(())
                drawn.set()
                wait_until(lambda: loader._ahead.feed._stager.suspects)
            elif epoch > 0:
                torch.rand(())
    assert sorted(seen) == sorted(list(range(10)) * 3)
    assert loader._fetching.training_draws
    assert "runs ahead in a thread" in str(loader.report())
    loader.close()


@pytest.mark.parametrize("name", LOADERS)
def test_a_break_drops_the_epoch_that_had_begun(name):
    def run(loader):
        seed_everything(1)
        first = epochs(loader, 1)
        for number, batch in enumerate(patiently(loader)):
            first.append(batch.tolist())
            if number == 3:  # of 5: the next one has begun
                break
        return first + epochs(loader, 2)

    expected = run(LOADERS[name]())
    with ahead(LOADERS[name]()) as loader:
        assert run(loader) == expected
        assert "4 epochs were begun ahead" in str(loader.report())


@pytest.mark.parametrize("name", ["shuffled", "own generator", "list"])
def test_a_position_between_epochs_is_that_of_a_plain_loop(name):
    seed_everything(1)
    expected = epochs(PrefetchingLoader(LOADERS[name](), "cpu", depth=6), 4)
    seed_everything(1)
    loader = ahead(LOADERS[name]())
    assert epochs(loader, 2) == expected[:2]
    state, rng = loader.state_dict(), get_rng_state(CPU)
    loader.close()
    seed_everything(99)
    other = ahead(LOADERS[name]())
    set_rng_state(rng, CPU)
    other.load_state_dict(state)
    assert epochs(other, 2) == expected[2:]
    other.close()


def test_a_loaded_position_drops_the_epoch_that_had_begun():
    seed_everything(1)
    loader = ahead(own_generator())
    batches = iter(loader)
    first = next(batches).tolist()
    state = loader.state_dict()
    rest = [batch.tolist() for batch in patiently(loader, batches)]
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == rest
    assert first not in rest
    loader.close()
    assert stagers() == []


class Told:
    def __init__(self):
        self.epochs, self.iterations = [], []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        self.iterations.append(self.epochs[-1] if self.epochs else None)
        yield from torch.arange(6.0).split(2)


def test_the_loader_is_told_its_epoch_before_it_begins():
    told = Told()
    with ahead(told) as loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            assert len(list(patiently(loader))) == 3
    assert told.iterations == [0, 1, 2, 3]
    assert told.epochs == [0, 1, 2, 3, 2]  # the last one was dropped


def test_another_epoch_than_the_next_one_begins_anew():
    told = Told()
    with ahead(told) as loader:
        for epoch in (0, 5, 6):
            loader.set_epoch(epoch)
            assert len(list(patiently(loader))) == 3
    assert told.iterations == [0, 1, 5, 6, 7]


def test_a_distributed_sampler_shuffles_as_in_a_plain_loop():
    def make():
        sampler = DistributedSampler(Numbers(), num_replicas=2, rank=0, shuffle=True)
        return DataLoader(Numbers(), 1, sampler=sampler)

    def run(loader, holder):
        seen = []
        for epoch in range(4):
            holder.set_epoch(epoch)
            seen.append([batch.tolist() for batch in patiently(loader)])
        return seen

    plain = make()
    expected = run(plain, plain.sampler)
    with ahead(make()) as loader:
        assert run(loader, loader) == expected


class Broken:
    def __init__(self):
        self.count = itertools.count()

    def __iter__(self):
        if next(self.count) == 2:
            raise OSError("the third epoch")
        yield from torch.arange(6.0).split(2)


def test_an_error_of_the_next_epoch_comes_when_it_is_asked_for():
    loader = ahead(Broken())
    assert len(list(patiently(loader))) == 3
    assert len(list(patiently(loader))) == 3
    with pytest.raises(OSError, match="the third epoch"):
        list(loader)
    assert len(list(patiently(loader))) == 3
    loader.close()


def trained(batches, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    loss = lambda model, batch: model(batch[:, None]).square().mean()  # noqa: E731
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), loss)
    loader = trainer.prefetch(batches, depth=6, **options)

    def wait(event):
        if event.kind == "step" and event.num_steps % 5 == 2:
            wait_until(lambda: loader._feed.num_ahead is not None)

    result = trainer.fit(loader, epochs=3, progress=False, callbacks=[wait])
    loader.close()
    return result, list(model.parameters()), loader


def test_fit_begins_no_epoch_behind_its_last():
    expected, parameters, _ = trained(own_generator())
    result, own, loader = trained(own_generator(), across_epochs=True)
    assert result.num_steps == expected.num_steps
    assert all(torch.equal(a, b) for a, b in zip(parameters, own, strict=True))
    assert "2 epochs were begun ahead" in str(loader.report())


def test_steps_that_end_with_the_epoch_begin_none():
    told = Told()
    with ahead(told) as loader:
        assert len(list(loader.iterate(last=True))) == 3
        assert len(list(loader.iterate(max_steps=3))) == 3
        assert len(told.iterations) == 2
        assert len(list(patiently(loader, loader.iterate(max_steps=4)))) == 3
        assert len(told.iterations) == 4
