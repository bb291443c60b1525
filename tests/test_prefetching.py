"""The ring and its staging thread, on a device whose streams are late.

What comes out must be what went in, whatever the streams do, and as a plain loop has it.
"""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from containers import CONTAINERS, Movable, Ordinary
from simulated_device import Prompt, Reader, SimulatedTransport, numbered, read_all
from torchfast import (
    MicroBatches,
    PrefetchingLoader,
)
from torchfast._core.rng import get_rng_state, same_rng_state, seed_everything

CPU = torch.device("cpu")


# --- the order of copies and reads --------------------------------------------------------------

DELAYS = {"late copies": (0.002, 0.0), "late reads": (0.0, 0.002), "both": (0.001, 0.001)}


@pytest.mark.parametrize("delays", DELAYS)
@pytest.mark.parametrize("depth", [1, 2, 8])
@pytest.mark.parametrize("reuse", [True, False])
def test_every_batch_is_read_as_it_was_sent(device, delays, depth, reuse):
    device.copy_delay_s, device.consumer_delay_s = DELAYS[delays]
    loader = PrefetchingLoader(iter(numbered(120)), "cpu", depth=depth, reuse=reuse)
    assert read_all(loader, device) == [[[float(i)], [i]] for i in range(120)]


class NoReady(SimulatedTransport):
    def receive(self, slot):
        slot.stream = self.consumer


class NoFree(SimulatedTransport):
    def upload(self, slot, copies, finish):
        slot.free = type(slot.free)()  # never recorded
        return super().upload(slot, copies, finish)


class NoSettle(SimulatedTransport):
    def settle(self, slot):
        pass


@pytest.mark.parametrize(
    ("kind", "delays"),
    [(NoReady, "late copies"), (NoFree, "late reads"), (NoSettle, "late copies")],
)
def test_without_an_event_batches_are_not_what_was_sent(device, kind, delays):
    device.kind = kind
    device.copy_delay_s, device.consumer_delay_s = DELAYS[delays]
    loader = PrefetchingLoader(iter(numbered(120)), "cpu", depth=1, reuse=True)
    assert read_all(loader, device) != [[[float(i)], [i]] for i in range(120)]


@pytest.mark.parametrize("size", [64, 2**15])
def test_without_reuse_batches_can_be_kept(device, size):
    device.copy_delay_s = 0.001
    kept = list(PrefetchingLoader(iter(numbered(40, size)), "cpu", depth=2))
    device.transports[0].consumer.synchronize()
    for number, (x, y) in enumerate(kept):
        assert x.unique().tolist() == [number]
        assert y.unique().tolist() == [number]


def test_who_keeps_the_labels_does_not_keep_the_images(device):
    device.kind = Prompt
    labels = [y for _, y in PrefetchingLoader(iter(numbered(40, 2**15)), "cpu", depth=2)]
    assert max(y.untyped_storage().nbytes() for y in labels) < 2**10
    assert [int(y[0]) for y in labels] == list(range(40))


def test_what_is_let_go_is_used_again(device):
    device.kind = Prompt
    for _ in PrefetchingLoader(iter(numbered(200, 2**15)), "cpu", depth=2):
        pass
    assert sum(map(len, device.transports[0]._blocks.values())) <= 4 * 2


def test_tensors_of_a_batch_can_be_changed_each_on_its_own(device):
    device.kind = Prompt
    weight = torch.ones(64, requires_grad=True)
    for x, y in PrefetchingLoader(numbered(5), "cpu"):
        loss = (x * weight).sum()
        y.zero_()  # it lies beside x, which the backward needs
        loss.backward()


def test_with_reuse_batches_lie_in_the_ring(device):
    loader = PrefetchingLoader(numbered(40), "cpu", depth=2, reuse=True)
    next(iter(loader))
    assert device.transports[0].num_allocations == 3  # all at once: pinning stalls a device
    blocks = {x.untyped_storage().data_ptr() for batch in loader for x in batch}
    assert len(blocks) == 3  # depth + 1
    assert device.transports[0].num_allocations == 3


def test_a_batch_crosses_in_one_copy(device):
    batches = [{f"x{i}": torch.ones(i + 1) for i in range(20)}] * 10
    assert len(list(PrefetchingLoader(batches, "cpu"))) == 10
    assert device.transports[0].num_copies == 10


def test_groups_have_slots_of_their_own(device):
    device.copy_delay_s = device.consumer_delay_s = 0.001
    loader = PrefetchingLoader(iter(numbered(50)), "cpu", depth=2, reuse=True, accumulate=4)
    reader, sizes = None, []
    for group in loader:
        reader = reader or Reader(device.transports[0])
        assert type(group) is MicroBatches
        sizes.append(len(group))
        reader([list(batch) for batch in group])
    assert sizes == [4] * 12 + [2]
    assert [number for group in reader.result() for (number,) in group[::2]] == list(range(50))
    assert device.transports[0].num_allocations == 3 * 4


# --- what a batch may be ------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_keeps_its_exact_type(device, name, reuse):
    make, tensor_of = CONTAINERS[name]
    batches = [make() for _ in range(6)]
    out = list(PrefetchingLoader(iter(batches), "cpu", reuse=reuse))
    device.transports[0].consumer.synchronize()
    assert len(out) == 6
    for given, got in zip(batches, out, strict=True):
        assert type(got) is type(given)
        assert torch.equal(tensor_of(got), tensor_of(given))


class Tagged(torch.Tensor):
    """As torchvision's tensors of images and boxes are."""


SHAPES = {
    "subclass": torch.randn(3, 2).as_subclass(Tagged),
    "0-d": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "transposed": torch.randn(3, 5).t(),
    "expanded": torch.randn(3, 1).expand(3, 5),
    "gaps": torch.randn(6, 6)[::2, ::2],
    "bool": torch.tensor([True, False]),
    "bf16": torch.randn(5).bfloat16(),
    "complex": torch.randn(3, dtype=torch.complex64),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "int8": torch.arange(7, dtype=torch.int8),
    "sparse": torch.eye(4).to_sparse(),
    "leaf that requires grad": torch.randn(3, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.randn(3)),
}


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_a_tensor_keeps_dtype_shape_and_strides(device, name, reuse):
    tensor = SHAPES[name]
    alias = [tensor, "text", tensor]
    for _ in range(2):
        out = list(PrefetchingLoader([(tensor, alias)] * 4, "cpu", reuse=reuse))
    device.transports[0].consumer.synchronize()
    for x, (first, text, second) in out:
        assert x is first is second
        assert text == "text"
        assert isinstance(x, Tagged) == isinstance(tensor, Tagged)
        assert x.dtype == tensor.dtype
        assert x.requires_grad == tensor.requires_grad
        if tensor.is_sparse:
            assert torch.equal(x.to_dense(), tensor.to_dense())
        else:
            assert torch.equal(x, tensor)
            assert x.stride() == torch.empty_like(tensor).stride()


def ragged(count):
    sizes = [5, 5, 3, 9, 1, 0, 40, 40, 2]
    return [torch.full((sizes[i % len(sizes)], 2), float(i)) for i in range(count)]


@pytest.mark.parametrize("reuse", [True, False])
def test_a_ragged_batch_has_its_own_shape(device, reuse):
    device.copy_delay_s = device.consumer_delay_s = 0.001
    batches = ragged(45)
    loader = PrefetchingLoader(iter(batches), "cpu", reuse=reuse)
    shapes, reader = [], None
    for batch in loader:
        reader = reader or Reader(device.transports[0])
        shapes.append(batch.shape)
        reader(batch)
    assert shapes == [b.shape for b in batches]
    assert reader.result() == [[b.unique().tolist()] for b in batches]
    # Each of the three slots grew to the largest batch, and then no more.
    assert device.transports[0].num_allocations <= 9


def test_lengths_that_grow_bit_by_bit_do_not_move_a_slot_each_time(device):
    batches = [torch.zeros(1000 + 20 * i) for i in range(200)]
    assert len(list(PrefetchingLoader(iter(batches), "cpu", reuse=True))) == 200
    assert device.transports[0].num_allocations < 40


def test_leaves_that_are_no_tensors_pass_by_identity(device):
    thing, array = Ordinary(), np.ones(3)
    out = list(PrefetchingLoader([{"a": thing, "b": array, "x": torch.ones(2)}] * 3, "cpu"))
    assert all(batch["a"] is thing and batch["b"] is array for batch in out)


def test_a_transform_runs_behind_the_copy(device):
    device.copy_delay_s = 0.002
    batches = [{"x": torch.full((8,), i, dtype=torch.uint8)} for i in range(30)]
    loader = PrefetchingLoader(
        iter(batches), "cpu", reuse=True, transform=lambda b: {"x": b["x"].float() / 2}
    )
    # The first one is transformed in this thread, at once, to see whether that draws.
    assert read_all(loader, device)[1:] == [[[i / 2]] for i in range(1, 30)]
    assert "transform" not in str(loader.report())


def test_a_transform_that_draws_takes_its_turn_with_the_training(device):
    device.kind = Prompt

    def run(loader):
        seed_everything(3)
        return [(batch + torch.rand(())).tolist() for batch in loader]

    def noisy(batch):
        return batch + torch.rand(())

    batches = [torch.full((2,), float(i)) for i in range(12)]
    expected = run(noisy(batch) for batch in batches)
    loader = PrefetchingLoader(batches, "cpu", transform=noisy)
    assert run(loader) == expected
    assert "draws random numbers" in str(loader.report())


def test_the_transfer_can_be_narrower(device):
    batch = (torch.full((4,), 1 + 2**-10), torch.ones(2, dtype=torch.int64))
    out = list(PrefetchingLoader([batch] * 4, "cpu", transfer_dtype=torch.bfloat16))
    device.transports[0].consumer.synchronize()
    for x, y in out:
        assert x.dtype == torch.bfloat16
        assert torch.equal(x, batch[0].bfloat16())
        assert torch.equal(y, batch[1])


def test_layout_follows_the_transform(device):
    loader = PrefetchingLoader(
        [torch.ones(2, 4, 4, 3)] * 4,
        "cpu",
        transform=lambda x: x.permute(0, 3, 1, 2).contiguous(),
        channels_last=True,
    )
    for batch in loader:
        assert batch.shape == (2, 3, 4, 4)
        assert batch.is_contiguous(memory_format=torch.channels_last)


def test_objects_that_move_themselves(device):
    for reuse in (True, False):
        out = list(PrefetchingLoader([Movable(torch.ones(3))] * 4, "cpu", reuse=reuse))
        assert all(type(batch) is Movable for batch in out)


def test_memory_is_usable_outside_of_inference_mode(device):
    loader = PrefetchingLoader(numbered(12), "cpu", reuse=True)
    with torch.inference_mode():
        assert len(list(loader)) == 12
    assert len(list(loader)) == 12


# --- random numbers -----------------------------------------------------------------------------


class Plain(Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        return torch.tensor(float(index))


class Augmented(Plain):
    def __getitem__(self, index):
        return index + torch.rand(()) + random.random() + np.random.rand()


class Rarely(Plain):
    """Draws late in the epoch only."""

    def __getitem__(self, index):
        return index + (random.random() if index == 15 else 0.0)


class Stream(IterableDataset):
    def __iter__(self):
        order = torch.randperm(23)
        return iter(order.float())


LOADERS = {
    "in order": lambda: DataLoader(Plain(), 2),
    "shuffled": lambda: DataLoader(Plain(), 2, shuffle=True),
    "augmented": lambda: DataLoader(Augmented(), 2, shuffle=True),
    "iterable": lambda: DataLoader(Stream(), 2),
    "workers": lambda: DataLoader(Augmented(), 2, shuffle=True, num_workers=2),
    "workers that stay": lambda: DataLoader(
        Augmented(), 2, shuffle=True, num_workers=1, persistent_workers=True
    ),
}


def trained(make, device, epochs=3, training_draws=True, **options):
    """Return what a loop saw and drew, and where the generators are in the end."""
    seed_everything(5)
    loader = make()
    if device is not None:
        loader = PrefetchingLoader(loader, "cpu", **options)
    log = []
    for _ in range(epochs):
        for batch in loader:
            if device is not None:
                device.transports[0].consumer.synchronize()
            log.append(batch.tolist())
            if training_draws:
                log.append((torch.rand(()).item(), random.random()))
    return log, get_rng_state(CPU), loader


@pytest.mark.parametrize("training_draws", [True, False])
@pytest.mark.parametrize("name", LOADERS)
def test_random_numbers_fall_as_in_a_plain_loop(device, name, training_draws):
    given = {"training_draws": training_draws}
    expected, state, _ = trained(LOADERS[name], None, **given)
    log, own, loader = trained(LOADERS[name], device, **given)
    assert log == expected
    assert same_rng_state(own, state)
    report = str(loader.report())
    assert ("keeps its turn" in report) == (name == "augmented")


def test_draws_that_come_late_are_noticed_and_told(device, monkeypatch):
    monkeypatch.setattr("torchfast.data.stager.LOOKS_EVERY", 1)
    _, _, loader = trained(lambda: DataLoader(Rarely(), 1), device, epochs=2, training_draws=False)
    report = str(loader.report())
    assert "keeps its turn" in report
    assert "had been fetched ahead before that was seen" in report


def test_training_that_draws_is_not_taken_for_fetching(device, monkeypatch):
    monkeypatch.setattr("torchfast.data.stager.LOOKS_EVERY", 1)

    class Slow(Plain):
        def __getitem__(self, index):
            time.sleep(0.002)
            return torch.tensor(float(index))

    loader = PrefetchingLoader(DataLoader(Slow(), 1), "cpu")
    for _ in range(3):
        for _ in loader:
            for _ in range(20):
                time.sleep(0.0002)
                torch.rand(())
    assert loader._fetching.training_draws
    assert "runs ahead in a thread" in str(loader.report())


def test_fetching_in_the_callers_thread(device):
    threads = set()

    def batches():
        for batch in numbered(8):
            threads.add(threading.current_thread())
            yield batch

    loader = PrefetchingLoader(batches(), "cpu", background=False)
    assert len(list(loader)) == 8
    assert threads == {threading.current_thread()}
    assert "background=False" in str(loader.report())


def test_an_epoch_begins_in_the_callers_thread_and_goes_on_in_another(device):
    threads = []

    class Upstream:
        def __iter__(self):
            threads.append(threading.current_thread().name)
            for batch in numbered(6):
                threads.append(threading.current_thread().name)
                yield batch

    loader = PrefetchingLoader(Upstream(), "cpu")
    list(loader)
    main = threading.current_thread().name
    assert threads == [main] * 3 + ["torchfast-stager"] * 4
    threads.clear()
    list(loader)
    assert threads == [main] * 2 + ["torchfast-stager"] * 5


def test_the_thread_sees_torch_as_the_caller_does(device):
    seen, made = [], numbered(6)

    def batches():
        for batch in made:
            seen.append((torch.is_grad_enabled(), torch.get_default_device()))
            yield batch

    with torch.no_grad(), torch.device("meta"):
        for _ in PrefetchingLoader(batches(), "cpu", reuse=True):
            pass
    assert seen == [(False, torch.device("meta"))] * 6


def test_the_thread_runs_a_transform_under_the_callers_autocast_and_inference_mode(device):
    device.kind = Prompt
    seen = []

    def transform(batch):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        seen.append((product.dtype, product.is_inference()))
        return batch

    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        for _ in PrefetchingLoader(iter(numbered(8)), "cpu", transform=transform):
            pass
    assert len(seen) >= 8
    assert set(seen) == {(torch.bfloat16, True)}


def test_a_thread_that_cannot_begin_says_so(device, monkeypatch):
    def broken(self):
        raise OSError("no settings")

    monkeypatch.setattr("torchfast.data.stager._Settings.applied", broken)
    with pytest.raises(OSError, match="no settings"):
        list(PrefetchingLoader(numbered(8), "cpu"))
