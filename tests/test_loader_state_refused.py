"""A position that is another loader's is refused, and so is what is none."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from loader_states import BATCH_SIZE, CPU, LOADERS, Augmented, Stateful, drain, own_generator
from torchfast import PrefetchingLoader
from torchfast._core.errors import IterationError, StateMismatchError

pytestmark = pytest.mark.usefixtures("every_way")


class Several(Augmented):
    def __getitem__(self, indices):
        return torch.stack([Augmented.__getitem__(self, index)[1] for index in indices])


def position_of(make, batches=2):
    loader = PrefetchingLoader(make(), CPU)
    drain(loader, [], stop_after=batches)
    return loader.state_dict()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: DataLoader(Augmented(), 3), "batch_size 2, and this loader has 3"),
        (lambda: DataLoader(Augmented(), 2, drop_last=True), "drop_last False, and this loader"),
        (lambda: DataLoader(Augmented(), 2, num_workers=1), "num_workers 0, and this loader has 1"),
        (lambda: DataLoader(range(5), 2), "num_samples 11, and this loader has 5"),
        (
            lambda: DataLoader(Augmented(), 2, generator=torch.Generator()),
            "0 generators of the loader's own, and this loader has 1",
        ),
        (own_generator, "samplers SequentialSampler, BatchSampler, and this loader has RandomS"),
        (Stateful, "a loader that is counted, and this Stateful carries its own state"),
    ],
)
def test_the_position_of_another_loader_is_refused(other, words):
    state = position_of(LOADERS["in order"])
    loader = PrefetchingLoader(other(), CPU)
    with pytest.raises(StateMismatchError, match=words):
        loader.load_state_dict(state)
    assert next(iter(loader)) is not None
    assert loader.state_dict()["num_batches"] == 1  # it went on as if nothing had been


@pytest.mark.parametrize("is_batch_sampler", [True, False])
def test_a_position_in_other_batches_of_a_sampler_is_refused(is_batch_sampler):
    def make(size):
        several = BatchSampler(RandomSampler(Several()), size, drop_last=False)
        if is_batch_sampler:
            return DataLoader(Augmented(), batch_sampler=several)
        return DataLoader(Several(), batch_size=None, sampler=several)

    loader = PrefetchingLoader(make(3), CPU)
    with pytest.raises(StateMismatchError, match="sampler_batch_size 2, and this loader has 3"):
        loader.load_state_dict(position_of(lambda: make(2)))
    PrefetchingLoader(make(2), CPU).load_state_dict(position_of(lambda: make(2)))


def test_a_loader_that_has_become_shorter_says_so():
    state = position_of(lambda: generated(6), batches=5)
    loader = PrefetchingLoader(generated(3), CPU)
    loader.load_state_dict(state)
    with pytest.raises(StateMismatchError, match=r"after batch 5 .* ended after 3"):
        next(iter(loader))


@pytest.mark.parametrize("state", [None, 3, [("num_batches", 1)]])
def test_a_state_is_a_mapping(state):
    with pytest.raises(TypeError, match="state must be the mapping"):
        PrefetchingLoader([], CPU).load_state_dict(state)


def test_a_state_that_lacks_something_is_refused():
    with pytest.raises(StateMismatchError, match=r"state lacks \['carries_state', 'epoch_start'"):
        PrefetchingLoader([], CPU).load_state_dict({"num_batches": 1, "fingerprint": {}})


def distributed(**options):
    options = {"seed": 0, "shuffle": True, **options}
    sampler = DistributedSampler(Augmented(), 2, 0, **options)
    return lambda: DataLoader(Augmented(), BATCH_SIZE, sampler=sampler)


def listed(number):
    return lambda: [torch.full((2,), float(i)) for i in range(number)]


@pytest.mark.parametrize(
    ("make", "other", "words"),
    [
        (
            LOADERS["global shuffle"],
            LOADERS["in order"],
            "samplers RandomSampler, BatchSampler, and this loader has SequentialSampler",
        ),
        (distributed(), distributed(seed=1), "sampler_seed 0, and this loader has 1"),
        (distributed(), distributed(shuffle=False), "sampler_shuffle True, and this loader has"),
        (listed(5), listed(7), "num_batches 5, and this loader has 7"),
    ],
)
def test_a_position_in_another_order_is_refused(make, other, words):
    state = position_of(make)
    with pytest.raises(StateMismatchError, match=words):
        PrefetchingLoader(other(), CPU).load_state_dict(state)
    PrefetchingLoader(make(), CPU).load_state_dict(state)
    del state["fingerprint"]["samplers"], state["fingerprint"]["sampler_seed"]
    PrefetchingLoader(make(), CPU).load_state_dict(state)  # as one that is older tells


@pytest.mark.parametrize("in_order", [True, False])
def test_batches_in_no_order_have_no_position_within_an_epoch(in_order):
    def make():
        return DataLoader(Augmented(), BATCH_SIZE, num_workers=1, in_order=in_order)

    within, behind = position_of(make), position_of(make, batches=None)
    PrefetchingLoader(make(), CPU).load_state_dict(behind)
    if in_order:
        PrefetchingLoader(make(), CPU).load_state_dict(within)
    else:
        with pytest.raises(StateMismatchError, match="in_order=False"):
            PrefetchingLoader(make(), CPU).load_state_dict(within)


def generated(number=10):
    return (torch.tensor([i]) for i in range(number))


def test_an_iterator_goes_on_in_place_where_it_is_and_nowhere_else():
    loader = PrefetchingLoader(generated(), CPU, depth=3)
    iterator = iter(loader)
    states = [loader.state_dict()]
    for _ in range(3):
        next(iterator)
        states.append(loader.state_dict())
    for state in states[:3]:
        with pytest.raises(StateMismatchError, match="an iterator that has begun and is after"):
            loader.load_state_dict(state)
    loader.load_state_dict(states[3])
    with pytest.raises(IterationError):
        next(iterator)
    assert [batch.item() for batch in loader] == list(range(3, 10))


def test_an_iterator_of_another_process_goes_on_behind_what_was_had():
    state = position_of(generated, batches=3)
    loader = PrefetchingLoader(generated(), CPU, depth=3)
    loader.load_state_dict(state)
    loader.load_state_dict(state)
    assert [batch.item() for batch in loader] == list(range(3, 10))
