"""A position that is saved at any batch is taken up at the very next one."""

from __future__ import annotations

import copy
import io
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import resuming
from fitting import fit
from loader_states import (
    BATCH_SIZE,
    CPU,
    LOADERS,
    NUM_BATCHES,
    NUM_SAMPLES,
    WITH_WORKERS,
    Stateful,
    begun,
    drain,
    own_generator,
    resumed,
    saved,
    uninterrupted,
)
from models import make_batches
from torchfast import PrefetchingLoader, Trainer
from torchfast._core.rng import seed_everything, set_rng_state

pytestmark = pytest.mark.usefixtures("every_way")


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("stop_after", range(1, NUM_BATCHES + 1))
def test_a_run_goes_on_at_the_next_batch(name, stop_after):
    expected = uninterrupted(LOADERS[name])
    loader, log = begun(LOADERS[name]), []
    drain(loader, log)
    drain(loader, log, stop_after)
    other = resumed(LOADERS[name], saved(loader))
    drain(other, log)  # at the end of the epoch, it yields nothing and ends
    drain(other, log)
    assert log == expected


@pytest.mark.parametrize("name", WITH_WORKERS)
def test_a_run_with_workers_goes_on_at_the_next_batch(name):
    expected = uninterrupted(WITH_WORKERS[name], epochs=2)
    loader, log = begun(WITH_WORKERS[name]), []
    drain(loader, log, stop_after=4)
    other = resumed(WITH_WORKERS[name], saved(loader))
    drain(other, log)
    drain(other, log)
    assert log == expected


def assert_same(log, expected, name):
    if name == "workers that stay":
        # Their generators have gone on since the first epoch, in processes that are gone now:
        # the samples are the same, the noise is not.
        log, expected = (
            [values[: len(values) // 2] for values, *_ in run] for run in (log, expected)
        )
    assert log == expected


@pytest.mark.parametrize("name", WITH_WORKERS)
def test_a_later_epoch_with_workers_goes_on_at_the_next_batch(name):
    expected = uninterrupted(WITH_WORKERS[name], epochs=2)
    loader, log = begun(WITH_WORKERS[name]), []
    drain(loader, log)
    drain(loader, log, stop_after=4)
    drain(resumed(WITH_WORKERS[name], saved(loader)), log)
    assert_same(log, expected, name)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("epochs_done", [0, 1])
def test_a_run_goes_on_with_the_next_epoch(name, epochs_done):
    expected = uninterrupted(LOADERS[name], epochs=2)
    loader, log = begun(LOADERS[name]), []
    for _ in range(epochs_done):
        drain(loader, log)
    other = resumed(LOADERS[name], saved(loader))
    for _ in range(2 - epochs_done):
        drain(other, log)
    assert log == expected


@pytest.mark.parametrize("name", WITH_WORKERS)
def test_a_run_with_workers_goes_on_with_the_next_epoch(name):
    expected = uninterrupted(WITH_WORKERS[name], epochs=2)
    loader, log = begun(WITH_WORKERS[name]), []
    drain(loader, log)
    drain(resumed(WITH_WORKERS[name], saved(loader)), log)
    assert_same(log, expected, name)


@pytest.mark.parametrize("name", ["global shuffle", "own generator"])
def test_a_run_goes_on_twice_in_one_epoch(name):
    expected = uninterrupted(LOADERS[name], epochs=2)
    loader, log = begun(LOADERS[name]), []
    drain(loader, log, stop_after=2)
    second = resumed(LOADERS[name], saved(loader))
    drain(second, log, stop_after=2)
    third = resumed(LOADERS[name], saved(second))
    drain(third, log)
    drain(third, log)
    assert log == expected


@pytest.mark.parametrize("name", ["global shuffle", "own generator"])
def test_micro_batches_that_were_not_yielded_come_again(name):
    expected = uninterrupted(LOADERS[name], epochs=2, accumulate=4)
    loader, log = begun(LOADERS[name], accumulate=4), []
    drain(loader, log, stop_after=1)
    state = saved(loader)
    assert state["loader"]["num_batches"] == 4
    other = resumed(LOADERS[name], state, accumulate=4)
    drain(other, log)
    drain(other, log)
    assert log == expected


def test_without_the_epochs_generators_another_shuffle_comes():
    """The negative control: a count alone is not enough."""
    expected = uninterrupted(LOADERS["global shuffle"], epochs=1)
    loader, log = begun(LOADERS["global shuffle"]), []
    drain(loader, log, stop_after=3)
    state = saved(loader)
    state["loader"]["epoch_start"]["rng"] = state["rng"]
    drain(resumed(LOADERS["global shuffle"], state), log)
    assert log != expected


def test_a_resumed_epoch_leaves_the_global_generators_alone():
    seed_everything(1)
    loader = PrefetchingLoader(LOADERS["in order"](), CPU)
    next(iter(loader))
    state = saved(loader)
    other = PrefetchingLoader([torch.ones(1)] * 3, CPU)
    next(iter(other))
    position = other.state_dict()
    set_rng_state(state["rng"], CPU)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    other.load_state_dict(position)
    assert len(list(other)) == 2
    after = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_an_epoch_that_was_left_early_starts_anew():
    loader = PrefetchingLoader(LOADERS["list"](), CPU)
    for _ in loader:
        break
    assert loader.state_dict()["num_batches"] == 1
    assert len(list(loader)) == NUM_BATCHES
    assert loader.state_dict()["num_batches"] == 0


def test_a_state_does_not_change_while_the_run_goes_on():
    seed_everything(1)
    loader = PrefetchingLoader(own_generator(), CPU)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    kept = copy.deepcopy(state)
    list(batches)
    list(loader)
    assert state["num_batches"] == kept["num_batches"] == 1
    for now, then in zip(
        state["epoch_start"]["generators"], kept["epoch_start"]["generators"], strict=True
    ):
        assert torch.equal(now, then)


# -- In fit ----------------------------------------------------------------------------------------


class Numbered(Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return torch.full((3,), index / 10)


def make_trainer():
    seed_everything(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return Trainer(model, optimizer, lambda model, batch: model(batch).square().mean())


def shuffled():
    generator = torch.Generator().manual_seed(2)
    return DataLoader(Numbered(), BATCH_SIZE, shuffle=True, generator=generator)


@pytest.mark.parametrize("steps", range(1, 2 * NUM_BATCHES + 1))
def test_fit_goes_on_where_another_fit_was_stopped(steps):
    losses, resumed_losses = [], []

    def note(log):
        return lambda event: log.append(event.loss.item()) if event.kind == "step" else None

    trainer = make_trainer()
    trainer.fit(shuffled(), epochs=3, callbacks=[note(losses)], progress=False)
    expected = copy.deepcopy(trainer.model.state_dict())

    trainer = make_trainer()
    loader = trainer.prefetch(shuffled())
    trainer.fit(loader, steps=steps, callbacks=[note(resumed_losses)], progress=False)
    file = io.BytesIO()
    torch.save({"trainer": trainer.state_dict(), "loader": loader.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)

    trainer = make_trainer()
    loader = trainer.prefetch(shuffled())
    trainer.load_state_dict(state["trainer"])
    loader.load_state_dict(state["loader"])
    left = 3 * NUM_BATCHES - steps
    trainer.fit(loader, steps=left, callbacks=[note(resumed_losses)], progress=False)
    assert resumed_losses == losses
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_an_epoch_that_ends_at_once_is_an_epoch_if_it_was_resumed():
    trainer = make_trainer()
    loader = trainer.prefetch([torch.ones(3)] * 2)
    for batch in loader:
        trainer.step(batch)
        state = loader.state_dict()  # after the last batch, before the end was seen
    loader.load_state_dict(state)
    assert loader.will_resume
    result = trainer.fit(loader, epochs=2, progress=False)
    assert (result.num_steps, result.num_epochs) == (2, 2)


# -- Loaders that carry state ----------------------------------------------------------------------


@pytest.mark.parametrize("stop_after", range(1, NUM_BATCHES + 1))
def test_a_loader_that_carries_state_is_given_it_back(stop_after):
    expected = uninterrupted(Stateful)
    loader, log = begun(Stateful), []
    drain(loader, log)
    drain(loader, log, stop_after)
    other = resumed(Stateful, saved(loader))
    drain(other, log)
    drain(other, log)
    assert log == expected


def test_a_loader_that_carries_state_is_given_it_back_between_epochs():
    expected = uninterrupted(Stateful, epochs=2)
    loader, log = begun(Stateful), []
    drain(loader, log)
    drain(resumed(Stateful, saved(loader)), log)
    assert log == expected


def test_samplers_are_told_the_epoch_again():
    class Sampler:
        epoch = 0

        def __iter__(self):
            return iter([self.epoch, self.epoch + 1])

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return 2

    data = [torch.tensor(float(i)) for i in range(9)]
    loader = PrefetchingLoader(DataLoader(data, sampler=Sampler()), CPU)
    loader.set_epoch(5)
    assert next(iter(loader)).item() == 5
    other = PrefetchingLoader(DataLoader(data, sampler=Sampler()), CPU)
    other.load_state_dict(loader.state_dict())
    assert [batch.item() for batch in other] == [6]


@pytest.mark.parametrize("stop_after", [1, 2, 4])
@pytest.mark.parametrize("name", ["own generator", "batch sampler", "global shuffle"])
def test_an_epoch_that_breaks_off_has_drawn_what_a_plain_loop_has(name, stop_after):
    def run(loader):
        log = []
        drain(loader, log)
        drain(loader, log, stop_after)
        drain(loader, log)
        return log

    seed_everything(1)
    expected = run(LOADERS[name]())
    assert run(begun(LOADERS[name], depth=NUM_BATCHES)) == expected


class Unsized(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (pair for number in range(3) for pair in zip(*make_batches(3)[number], strict=True))

    def __len__(self):
        raise NotImplementedError


@pytest.mark.usefixtures("every_way")
def test_a_data_set_whose_length_is_not_implemented_has_none():
    loader = PrefetchingLoader(torch.utils.data.DataLoader(Unsized(), 4), CPU)
    next(iter(loader))
    state = loader.state_dict()
    assert state["fingerprint"]["num_samples"] is None
    loader.load_state_dict(state)
    assert next(iter(loader)) is not None
    with pytest.raises(TypeError, match="has no length"):
        len(loader)
    assert len(list(loader)) > 1
    rows = DataLoader(Unsized(), 8, collate_fn=resuming.pairs)
    assert fit(rows, steps=2).num_steps == 2
