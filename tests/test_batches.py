"""A batch on the device: what each container comes back as, its layout, its samples."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from containers import (
    CONTAINERS,
    CPU,
    META,
    BatchEncoding,
    Kept,
    Lazy,
    ListOf,
    Movable,
    Ordinary,
    Plain,
    Rooted,
    Slotted,
    Standing,
    default,
    ones,
)
from models import Pair
from torchfast._core.batches import count_samples, map_batch, tensors, to_device


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


class Tagged(tuple):
    """A tuple that may have attributes."""


class Named(collections.namedtuple("Named", "x y")):
    """A named tuple that may have attributes."""


@pytest.mark.parametrize("value", [Tagged([ones(), "b"]), Named(ones(), "b")])
def test_a_tuple_keeps_its_attributes(value):
    value.tag = ["kept"]
    moved = to_device(value, META)
    assert type(moved) is type(value)
    assert moved[0].device == META
    assert moved.tag is value.tag
    moved.other = 1
    assert not hasattr(value, "other")


def test_a_dataclass_field_that_was_never_set_stays_unset():
    batch = Slotted(ones())
    del batch.name
    moved = to_device(batch, META)
    assert moved.inputs.device == META
    assert not hasattr(moved, "name")


def test_what_has_its_tensors_elsewhere_is_moved_as_a_whole():
    moved = to_device({"a": Rooted({"x": ones()}), "b": Standing(ones())}, META)
    assert moved["a"].device == moved["a"]["x"].device == META
    assert moved["b"].inputs.device == moved["b"].first().device == META


def test_a_field_that_stands_for_another_is_written_where_that_is():
    batch = Standing(ones())
    changed = map_batch(batch, lambda tensor: tensor * 5)
    assert changed.inputs[0, 0] == changed.first()[0] == 5
    assert batch.inputs[0, 0] == batch.first()[0] == 1


def test_a_frozen_field_that_its_class_has_is_kept():
    @dataclass(frozen=True)
    class Numbered:
        inputs: torch.Tensor
        number: int = field(init=False, default=3)

    moved = to_device(Numbered(ones()), META)
    assert (moved.inputs.device, moved.number) == (META, 3)


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
