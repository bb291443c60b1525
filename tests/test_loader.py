"""Batches on the device: what a container comes back as, grouping, length, epochs.

The other device is "meta", so tensors really move on a machine that has only a CPU.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from models import Pair, Sample, make_batches
from torchfast import DeviceLoader, MicroBatches
from torchfast._core.batches import count_samples, tensors, to_device

CPU = torch.device("cpu")
META = torch.device("meta")

Kept = collections.namedtuple("Kept", ["inputs", "name"])


@dataclass
class Plain:
    inputs: torch.Tensor
    name: str = "a"
    runs: list = field(default_factory=list)

    def __post_init__(self):
        self.runs.append("post_init")


@dataclass(slots=True)
class Slotted:
    inputs: torch.Tensor
    name: str = "a"


@dataclass(frozen=True, slots=True)
class FrozenSlotted:
    inputs: torch.Tensor
    name: str = "a"


class BatchEncoding(collections.UserDict):
    """As transformers has it: a UserDict with attributes, and a .to that works in place."""

    def __init__(self, data=None, encodings=None):
        super().__init__(data)
        self._encodings = encodings

    def __getitem__(self, item):
        if isinstance(item, str):
            return self.data[item]
        raise KeyError("only str")

    def __getattr__(self, item):
        try:
            return self.data[item]
        except KeyError:
            raise AttributeError(item) from None

    def __getstate__(self):
        return {"data": self.data, "encodings": self._encodings}

    def __setstate__(self, state):
        self.data, self._encodings = state["data"], state["encodings"]

    def to(self, device):
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class ListOf(list):
    label = "kept"


class TupleOf(tuple):
    __slots__ = ()


class Movable:
    """An object with a .to that returns a new one."""

    def __init__(self, inputs):
        self.inputs = inputs

    def to(self, device):
        return Movable(self.inputs.to(device))


class MovedInPlace(Movable):
    def to(self, device):
        self.inputs = self.inputs.to(device)


class Ordinary:
    pass


class Lazy(Mapping):
    """Makes its values when they are asked for, and holds none of them."""

    def __init__(self, held=None):
        self.held = held

    def __getitem__(self, key):
        if self.held is not None:
            return self.held[key]
        return torch.zeros(key + 1) if key % 2 == 0 else "name"

    def __iter__(self):
        return iter(range(9))

    def __len__(self):
        return 9


def ones():
    return torch.ones(3, 2)


def default():
    value = collections.defaultdict(list, {"a": ones()})
    assert value["b"] == []
    return value


CONTAINERS = {
    "tensor": (ones, lambda v: v),
    "tuple": (lambda: (ones(), 1), lambda v: v[0]),
    "list": (lambda: [ones(), None], lambda v: v[0]),
    "list subclass": (lambda: ListOf([ones()]), lambda v: v[0]),
    "tuple subclass": (lambda: TupleOf([ones()]), lambda v: v[0]),
    "dict": (lambda: {"a": ones(), 3: "s"}, lambda v: v["a"]),
    "namedtuple": (lambda: Kept(ones(), "a"), lambda v: v.inputs),
    "return type of torch": (lambda: torch.max(ones(), 0), lambda v: v.values),
    "dataclass": (lambda: Plain(ones()), lambda v: v.inputs),
    "frozen dataclass": (lambda: Sample(ones(), ones()), lambda v: v.inputs),
    "slots": (lambda: Slotted(ones()), lambda v: v.inputs),
    "frozen slots": (lambda: FrozenSlotted(ones()), lambda v: v.inputs),
    "OrderedDict": (lambda: collections.OrderedDict(b=ones(), a=1), lambda v: v["b"]),
    "defaultdict": (default, lambda v: v["a"]),
    "UserDict": (lambda: collections.UserDict(a=ones()), lambda v: v["a"]),
    "BatchEncoding": (lambda: BatchEncoding({"ids": ones()}, "kept"), lambda v: v.ids),
    "MappingProxyType": (lambda: types.MappingProxyType({"a": ones()}), lambda v: v["a"]),
    "PackedSequence": (
        lambda: pack_sequence([torch.ones(3), torch.ones(5)], enforce_sorted=False),
        lambda v: v.data,
    ),
    "object with to": (lambda: Movable(ones()), lambda v: v.inputs),
    "object with to in place": (lambda: MovedInPlace(ones()), lambda v: v.inputs),
    "nested": (
        lambda: {"a": [Pair(ones(), (ones(), Movable(ones())))], "b": None},
        lambda v: v["a"][0].targets[1].inputs,
    ),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_moves_and_keeps_its_exact_type(name):
    make, tensor_of = CONTAINERS[name]
    batch = make()
    moved = to_device(batch, META)
    assert type(moved) is type(batch)
    assert tensor_of(moved).device == META
    assert tensor_of(moved).shape == tensor_of(batch).shape


@pytest.mark.parametrize("name", [n for n in CONTAINERS if n != "object with to in place"])
def test_the_batch_that_was_given_is_left_alone(name):
    make, tensor_of = CONTAINERS[name]
    batch = make()
    assert to_device(batch, META) is not batch
    assert tensor_of(batch).device == CPU


@pytest.mark.parametrize("name", [n for n in CONTAINERS if "object with to" not in n])
def test_a_batch_that_is_there_is_the_same_object(name):
    batch = {"b": [1, CONTAINERS[name][0]()]}
    if name == "nested":
        batch = [Pair(ones(), (ones(), {"a": ones()}))]
    assert to_device(batch, CPU) is batch


def test_only_what_moved_is_rebuilt():
    here, there = [torch.ones(2)], [torch.ones(2, device=META)]
    moved = to_device({"here": here, "there": there}, META)
    assert moved["there"] is there
    assert moved["here"] is not here


@pytest.mark.parametrize("value", ["text", None, 3, 2.5, b"bytes", Ordinary(), {1, 2}, range(3)])
def test_what_is_no_tensor_passes_by_identity(value):
    assert to_device(value, META) is value
    assert to_device((ones(), value), META)[1] is value


def test_a_module_in_a_batch_is_not_moved():
    model = nn.Linear(2, 2)
    assert to_device([model, ones()], META)[0] is model
    assert model.weight.device == CPU


def test_a_class_with_to_is_not_called():
    assert to_device([Movable, ones()], META)[0] is Movable


def test_values_beside_the_tensors_are_kept():
    assert to_device(Kept(ones(), "b"), META).name == "b"
    assert to_device(ListOf([ones()]), META).label == "kept"
    assert to_device(BatchEncoding({"ids": ones()}, "kept"), META)._encodings == "kept"
    assert to_device(default(), META)["absent"] == []
    assert list(to_device(collections.OrderedDict(b=ones(), a=1), META)) == ["b", "a"]
    moved = to_device(Plain(ones(), "b"), META)
    assert (moved.name, moved.runs) == ("b", ["post_init"])


def test_a_dataclass_field_that_was_never_set_stays_unset():
    batch = Slotted(ones())
    del batch.name
    moved = to_device(batch, META)
    assert moved.inputs.device == META
    assert not hasattr(moved, "name")


def test_a_packed_sequence_keeps_its_lengths_on_the_host():
    packed = pack_sequence([torch.ones(3), torch.ones(5)], enforce_sorted=False)
    moved = to_device({"packed": packed}, META)["packed"]
    assert isinstance(moved, PackedSequence)
    assert moved.batch_sizes.device == CPU
    assert moved.sorted_indices.device == META


def test_one_tensor_twice_stays_one_tensor():
    tensor = ones()
    moved = to_device({"a": tensor, "b": [tensor, (tensor, ones())]}, META)
    assert moved["a"] is moved["b"][0] is moved["b"][1][0]
    assert moved["a"] is not moved["b"][1][1]


def test_tensors_that_a_mapping_makes_on_demand_are_not_mixed_up():
    moved = to_device(Lazy(), META)
    assert [moved[key].shape[0] for key in range(0, 9, 2)] == [1, 3, 5, 7, 9]


def test_odd_tensors_move():
    batch = [torch.tensor(1.0), torch.empty(0, 3), torch.ones(2, dtype=torch.bool)]
    moved = to_device(batch, META)
    assert [(t.shape, t.dtype) for t in moved] == [(t.shape, t.dtype) for t in batch]
    assert {t.device for t in moved} == {META}


def test_strides_are_kept():
    batch = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert to_device(batch, META).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("device", [CPU, META])
def test_channels_last_lays_out_images_only(device):
    image, tokens = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4)
    batch = {"image": image, "again": image, "tokens": tokens}
    moved = to_device(batch, device, channels_last=True)
    assert moved["image"].is_contiguous(memory_format=torch.channels_last)
    assert moved["again"] is moved["image"]
    assert moved["tokens"].is_contiguous()
    assert not image.is_contiguous(memory_format=torch.channels_last)
    if device == CPU:
        assert torch.equal(moved["image"], image)
        assert moved["tokens"] is tokens
        assert to_device(moved, device, channels_last=True) is moved


def test_channels_last_leaves_sparse_tensors_alone():
    sparse = torch.zeros(2, 3, 4, 4).to_sparse()
    assert to_device(sparse, CPU, channels_last=True) is sparse


def test_the_samples_of_a_batch_are_counted():
    assert count_samples({"scale": torch.tensor(1.0), "x": [torch.zeros(5, 2), ones()]}) == 5
    assert count_samples(pack_sequence([torch.ones(3), torch.ones(2)])) == 5
    assert count_samples(["text", 3]) is None
    assert len(list(tensors({"a": ones(), "b": (ones(), "c")}))) == 2


# --- MicroBatches -------------------------------------------------------------------------------


def test_micro_batches_hold_what_they_were_given():
    batches = make_batches(3)
    group = MicroBatches(batches)
    assert len(group) == 3
    assert list(group) == batches
    assert group[1] is batches[1]
    assert repr(group) == "MicroBatches(3 x tuple)"
    batches.clear()
    assert len(group) == 3


@pytest.mark.parametrize("wrong", [torch.ones(3, 2), "text", {"a": 1}, iter([1]), 3])
def test_micro_batches_take_a_sequence_of_batches(wrong):
    with pytest.raises(TypeError, match=f"list or tuple of batches, got {type(wrong).__name__}"):
        MicroBatches(wrong)


def test_micro_batches_are_never_empty():
    with pytest.raises(ValueError, match="at least one batch, got an empty sequence"):
        MicroBatches([])


# --- DeviceLoader -------------------------------------------------------------------------------


def test_batches_come_in_order_on_the_device():
    batches = make_batches(3, kind="dict")
    moved = list(DeviceLoader(batches, META))
    assert [m["inputs"].device for m in moved] == [META] * 3
    same = list(DeviceLoader(batches, CPU))
    assert all(a is b for a, b in zip(same, batches, strict=True))


@pytest.mark.parametrize(
    ("count", "accumulate", "sizes"), [(6, 3, [3, 3]), (7, 3, [3, 3, 1]), (2, 4, [2]), (0, 2, [])]
)
def test_groups_are_full_but_the_last(count, accumulate, sizes):
    batches = make_batches(count)
    loader = DeviceLoader(batches, CPU, accumulate=accumulate)
    groups = list(loader)
    assert [len(group) for group in groups] == sizes
    assert all(type(group) is MicroBatches for group in groups)
    assert [batch for group in groups for batch in group] == batches
    assert len(loader) == len(sizes)


def test_a_group_does_not_cross_an_epoch():
    loader = DeviceLoader(make_batches(3), CPU, accumulate=2)
    assert [len(group) for _ in range(2) for group in loader] == [2, 1, 2, 1]


def test_without_accumulation_a_list_is_a_batch():
    batch = [torch.ones(2), torch.ones(2)]
    assert list(DeviceLoader([batch], CPU)) == [batch]


def test_the_layout_reaches_every_batch():
    loader = DeviceLoader([torch.randn(2, 3, 4, 4)] * 3, CPU, accumulate=2, channels_last=True)
    for group in loader:
        assert all(b.is_contiguous(memory_format=torch.channels_last) for b in group)


class Unsized(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(4.0))


@pytest.mark.parametrize(
    ("loader", "name"),
    [((b for b in ()), "generator"), (DataLoader(Unsized()), "DataLoader")],
)
def test_a_length_is_never_guessed(loader, name):
    with pytest.raises(TypeError, match=rf"loader \({name}\) has no length; give steps="):
        len(DeviceLoader(loader, CPU))


@pytest.mark.parametrize("loader", [3, None, Ordinary(), torch.nn.ReLU(), len])
def test_what_is_not_iterable_is_refused(loader):
    with pytest.raises(TypeError, match=rf"must be an iterable.*\({type(loader).__name__}\)"):
        DeviceLoader(loader, CPU)


def test_the_old_sequence_protocol_is_iterable():
    class Old:
        def __getitem__(self, index):
            if index == 2:
                raise IndexError
            return torch.full((), float(index))

    assert len(list(DeviceLoader(Old(), CPU))) == 2


class Watched:
    """Counts what is done to it."""

    def __init__(self, batches):
        self.batches = batches
        self.calls = []

    def __iter__(self):
        self.calls.append("iter")
        for batch in self.batches:
            self.calls.append("next")
            yield batch

    def __len__(self):
        self.calls.append("len")
        return len(self.batches)


def test_construction_starts_nothing():
    watched = Watched(make_batches(2))
    loader = DeviceLoader(watched, CPU)
    assert not loader.is_one_shot
    assert watched.calls == []
    batches = iter(loader)
    next(batches)
    assert watched.calls == ["iter", "next"]


def test_construction_draws_no_random_number():
    before = torch.get_rng_state()
    DeviceLoader(DataLoader(TensorDataset(ones()), shuffle=True), CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_random_numbers_and_order_are_those_of_the_loader():
    data = TensorDataset(torch.arange(10.0))
    torch.manual_seed(3)
    plain = [b for _ in range(2) for (b,) in DataLoader(data, batch_size=3, shuffle=True)]
    after = torch.get_rng_state()
    torch.manual_seed(3)
    loader = DeviceLoader(DataLoader(data, batch_size=3, shuffle=True), CPU)
    ours = [b for _ in range(2) for (b,) in loader]
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert torch.equal(torch.get_rng_state(), after)


def test_an_iterator_serves_once():
    loader = DeviceLoader((b for b in make_batches(2)), CPU)
    assert loader.is_one_shot
    assert [len(list(loader)) for _ in range(2)] == [2, 0]


def test_an_error_of_the_loader_comes_through_after_the_batches_before_it():
    def failing():
        yield from make_batches(2)
        raise OSError("disk")

    got = []
    with pytest.raises(OSError, match=r"^disk$") as caught:
        got.extend(DeviceLoader(failing(), CPU))
    assert len(got) == 2
    assert caught.traceback[-1].name == "failing"


class EpochAware:
    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def test_each_holder_is_told_of_the_epoch_once():
    loader, batch_sampler = EpochAware(), EpochAware()
    loader.__class__ = type("Loader", (EpochAware,), {"__iter__": lambda self: iter(())})
    batch_sampler.sampler = loader.sampler = EpochAware()  # one object in two places
    loader.batch_sampler, loader.dataset = batch_sampler, EpochAware()
    device_loader = DeviceLoader(loader, CPU)
    device_loader.set_epoch(2)
    device_loader.set_epoch(3)
    for holder in (loader, loader.sampler, batch_sampler, loader.dataset):
        assert holder.epochs == [2, 3]


def test_a_loader_that_asks_for_no_epoch_is_left_alone():
    DeviceLoader([1, 2], CPU).set_epoch(1)
    DeviceLoader(DataLoader(TensorDataset(ones())), CPU).set_epoch(1)
