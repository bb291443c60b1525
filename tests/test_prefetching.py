"""The ring and its staging thread, on a device whose streams are late.

What comes out must be what went in, whatever the streams do.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from containers import CONTAINERS, Movable, Ordinary, Rooted
from simulated_device import Prompt, Reader, SimulatedTransport, numbered, read_all
from torchfast import MicroBatches, PrefetchingLoader, StepBatches
from torchfast._core.rng import seed_everything

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


def test_batches_of_several_steps_have_slots_of_their_own(device):
    device.copy_delay_s = device.consumer_delay_s = 0.001
    loader = PrefetchingLoader(
        iter(numbered(50)), "cpu", depth=2, reuse=True, accumulate=2, unroll=3
    )
    reader, sizes = None, []
    for steps in loader:
        reader = reader or Reader(device.transports[0])
        assert type(steps) is StepBatches
        sizes.append([len(group) for group in steps])
        reader([list(batch) for group in steps for batch in group])
    assert sizes == [[2, 2, 2]] * 8 + [[2]]
    assert [number for group in reader.result() for (number,) in group[::2]] == list(range(50))
    assert device.transports[0].num_allocations == 3 * 6


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


@pytest.mark.parametrize("reuse", [True, False])
def test_a_mapping_that_moves_itself_is_moved_whole(device, reuse):
    class Elsewhere(Rooted):
        def to(self, device):
            return Elsewhere({"a": torch.ones(3)}, device)

    # No tensor of it can be moved by itself, and what is put into it changes.
    batch = Elsewhere({"a": torch.ones(3, device="meta")}, torch.device("meta"))
    out = list(PrefetchingLoader([batch] * 4, "cpu", reuse=reuse))
    assert [type(each) for each in out] == [Elsewhere] * 4
    assert all(torch.equal(each["a"], torch.ones(3)) for each in out)
    assert batch["a"].is_meta


def test_memory_is_usable_outside_of_inference_mode(device):
    loader = PrefetchingLoader(numbered(12), "cpu", reuse=True)
    with torch.inference_mode():
        assert len(list(loader)) == 12
    assert len(list(loader)) == 12
