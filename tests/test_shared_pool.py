"""Shared memory that is used again: when it is free, and what lies in it, in one process."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

import warm_python
from pooling import Line, registry
from torchfast._core.storages import extent
from torchfast.data.pooled_collate import empty_batch, place
from torchfast.data.shared_memory import contiguous_strides, tensor_over
from torchfast.data.shared_pool import Pool


@pytest.fixture(autouse=True)
def torch_as_it_was():
    with registry():
        yield


def numbered(number, size=6):
    return [(torch.full((3,), float(number + i)), number + i) for i in range(size)]


# -- When memory is free ---------------------------------------------------------------------------


def saved_for_backward(tensor):
    weight = torch.ones(3, requires_grad=True)
    return (tensor * weight).sum()


HOLDERS = {
    "the tensor": lambda t: t,
    "a slice": lambda t: t[1:2],
    "a transposed view": lambda t: t.t(),
    "other elements": lambda t: t.view(torch.int32),
    "detached": lambda t: t.detach(),
    ".data": lambda t: t.data,
    "an array": lambda t: t.numpy(),
    "its storage": lambda t: t.untyped_storage(),
    "a view of its storage": lambda t: torch.empty(0).set_(t.untyped_storage(), 2, (2,)),
    "a graph of autograd": saved_for_backward,
    "DLPack": lambda t: torch.from_dlpack(t),
    "a memoryview": lambda t: memoryview(t.numpy()),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_memory_is_in_use_while_anything_sees_it(kind):
    line = Line()
    batch = line(numbered(0))
    held = HOLDERS[kind](batch[0])
    del batch
    gc.collect()
    assert line.in_use == 1
    for number in range(1, 6):  # others come and go meanwhile
        line(numbered(number))
    assert line.in_use == 1
    del held
    assert line.in_use == 0


def test_it_is_free_without_the_garbage_collector():
    line = Line()
    gc.disable()
    try:
        batch = line(numbered(0))
        assert line.in_use == 1
        del batch
        assert line.in_use == 0
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b)), lambda b: [b[0] + 0, b[1]]]
)
def test_copies_hold_nothing_and_stay_as_they_are(copied):
    line = Line()
    mine = copied(line(numbered(0)))
    line(numbered(50))
    del mine[1]
    for number in range(100, 105):
        line(numbered(number))
    assert line.in_use == 0
    assert mine[0][:, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_tensor_that_is_saved_takes_no_other_with_it():
    line = Line()
    line(numbered(0))
    inputs, numbers = line(numbered(0))
    file = io.BytesIO()
    torch.save(numbers, file)
    assert numbers.untyped_storage().nbytes() == 6 * 8
    assert len(file.getvalue()) < 3000
    inputs.mul_(2)  # writing to one is not writing to the other
    assert numbers._version <= 1
    assert not inputs._is_view()


def test_another_thread_may_drop_it():
    line = Line()
    held = [line(numbered(0))]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert line.in_use == 0


def test_a_forked_process_frees_nothing():
    line = Line()
    batch = line(numbered(0))
    child = os.fork()
    if child == 0:
        del batch
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert line.in_use == 1
    del batch
    assert line.in_use == 0


EXITS = """
import sys, torch
sys.path.insert(0, "tests")
from pooling import Line
line = Line()
batches = [line([torch.ones(3)]) for _ in range(3)]
torch.kept = batches[0]  # outlives most modules
cycle = [batches[1]]; cycle.append(cycle)
class Late:
    def __del__(self, batch=batches[2]): batch.add_(1)
sys.late = Late()
"""


def test_python_exits_with_batches_alive():
    done = warm_python.run(EXITS, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


# -- What a worker does ----------------------------------------------------------------------------


def addresses(line):
    return [(block.start, block.start + block.num_bytes) for block in line.blocks]


def lies_in(address, ranges):
    return any(start <= address < end for start, end in ranges)


def test_samples_are_stacked_where_they_are_read():
    seen = []

    def spied(samples):
        batch = default_collate(samples)  # by a collate_fn of the user's own, too
        seen.append(batch[0].data_ptr())
        return batch

    line = Line(spied)
    first = line(numbered(0))
    assert not lies_in(seen[0], addresses(line))  # nobody knew how large it is
    second = line(numbered(10))
    assert lies_in(seen[1], addresses(line))
    assert first[0][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert second[1].tolist() == [10, 11, 12, 13, 14, 15]


def test_arrays_of_numpy_are_stacked_there_too():
    line = Line()
    samples = [torch.full((3,), i).numpy() for i in range(4)]
    line(samples)
    assert line(samples)[:, 0].tolist() == [0, 1, 2, 3]
    assert line.statistics.num_recycled == 2


def test_a_registry_that_was_changed_is_left_alone():
    def mine(batch, *, collate_fn_map=None):
        return -torch.stack(batch)

    torch.utils.data._utils.collate.default_collate_fn_map[Tensor] = mine
    line = Line()
    assert line([torch.ones(2)]).tolist() == [[-1, -1]]
    assert line.statistics.num_recycled == 1  # copied there at the end


def test_memory_asked_for_is_not_copied():
    where = []

    def made(number):
        images = empty_batch((4, 5), torch.int32).fill_(number)
        where.append(images.data_ptr())
        return {"images": images}

    line = Line(made)
    for number in range(5):
        assert line(number)["images"].unique().item() == number
    assert [lies_in(address, addresses(line)) for address in where] == [False, *[True] * 4]


def test_elsewhere_it_is_an_ordinary_tensor():
    assert empty_batch((2, 3), torch.int8).fill_(1).sum() == 6


def test_what_the_data_set_keeps_is_not_written_again():
    kept = []

    def keeps(samples):
        batch = default_collate(samples)
        kept.append(batch[0])
        return batch

    line = Line(keeps, most_blocks=8)
    for number in range(6):
        line(numbered(10 * number))
    assert [int(t[0, 0]) for t in kept] == [0, 10, 20, 30, 40, 50]
    assert line.statistics.num_recycled == 6
    kept.clear()
    before = len(line.blocks)
    for number in range(6):
        line(numbered(10 * number))
        kept.clear()
    assert len(line.blocks) == before


def test_blocks_are_used_again():
    line = Line()
    for number in range(50):
        batch = line(numbered(number))
        assert batch[1].tolist() == list(range(number, number + 6))
    assert len(line.blocks) == 2  # one held while the next was made
    assert line.statistics.num_blocks == 2


def test_beyond_its_blocks_a_batch_goes_the_ordinary_way():
    line = Line(most_blocks=3)
    kept = [line(numbered(10 * number)) for number in range(7)]
    assert len(line.blocks) == 3
    assert (line.statistics.num_recycled, line.statistics.num_ordinary) == (3, 4)
    assert [int(batch[0][0, 0]) for batch in kept] == [0, 10, 20, 30, 40, 50, 60]
    kept.clear()
    line(numbered(0))
    assert line.statistics.num_recycled == 4


def test_larger_batches_get_larger_blocks():
    line = Line()
    for size in (1, 2, 40, 3, 4000, 1, 8000, 4000):
        batch = line(numbered(0, size))
        assert batch[1].tolist() == list(range(size))
        assert batch[0][:, 0].tolist() == list(range(size))
    assert line.statistics.num_ordinary == 0
    del batch
    gc.collect()
    assert line.statistics.num_bytes == sum(block.num_bytes for block in line.blocks)
    assert line.statistics.num_blocks == len(line.blocks) <= 3


def test_the_old_block_lives_as_long_as_its_batch():
    line = Line(most_blocks=1)
    small = line(numbered(5))[0][:2]
    del small
    held = line(numbered(7))
    view = held[0][0]
    del held
    assert line.in_use == 1
    assert view.tolist() == [7, 7, 7]
    mapped = line.statistics.num_blocks
    del view
    line(numbered(0, 4000))  # in place of the small one
    assert line.statistics.num_blocks == mapped


def test_intermediates_do_not_disturb():
    def halves(samples):
        whole = default_collate(samples)[0]
        return [whole.half(), whole[:2], whole[:2]]

    line = Line(halves)
    for number in range(4):
        half, some, same = line(numbered(number))
        assert half.dtype == torch.float16
        assert half[1, 0] == some[1, 0] == number + 1
        assert same is not some
        same.zero_()
        assert some.sum() == 0  # they see the same memory, as they did


def test_an_error_in_between_disturbs_nothing():
    def fails(samples):
        batch = default_collate(samples)
        if samples[0][1] == 3:
            raise KeyError("three")
        return batch

    line = Line(fails)
    for number in range(8):
        if number == 3:
            with pytest.raises(KeyError, match="three"):
                line(numbered(number))
        else:
            assert line(numbered(number))[1][0] == number
    assert line.in_use == 0
    assert len(line.blocks) == 1


def test_what_cannot_be_pickled_is_an_error_and_no_hang():
    line = Line(lambda samples: [torch.ones(3), lambda: None])
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        line(None)
    assert line.in_use == 0


def test_full_shared_memory_is_left_to_torch(monkeypatch):
    def full(_size):
        raise RuntimeError("unable to allocate shared memory")

    line = Line()
    monkeypatch.setattr("torchfast.data.shared_pool.Block.of_size", full)
    assert line(numbered(0))[1].tolist() == [0, 1, 2, 3, 4, 5]
    assert line.statistics.num_ordinary == 1


def test_where_there_is_no_room_for_another_block_one_is_waited_for(monkeypatch):
    def full(_size):
        raise RuntimeError("unable to allocate shared memory")

    line = Line()
    held = [line(numbered(0))]
    monkeypatch.setattr("torchfast.data.shared_pool.Block.of_size", full)
    timer = threading.Timer(0.05, held.clear)
    timer.start()
    assert line(numbered(3))[1][0] == 3
    timer.join()
    assert line.statistics.num_recycled == 2
    monkeypatch.setattr("torchfast.data.shared_pool.WAIT_S", 0.05)
    held.append(line(numbered(4)))
    assert line(numbered(5))[1][0] == 5
    assert line.statistics.num_ordinary == 1  # it is kept: torch has its turn


def test_samples_made_in_threads_get_places_of_their_own():
    pool = Pool(2)
    pool._expected = 1_000_000
    found = []

    def take():
        found.extend(pool.empty((10,), torch.int64) for _ in range(50))

    threads = [threading.Thread(target=take) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    starts = {tensor.data_ptr() for tensor in found}
    assert len(starts) == 200
    assert all(start % 64 == 0 for start in starts)


def test_a_message_opened_by_another_is_an_error():
    line = Line()
    message = line.collate(numbered(0))
    with pytest.raises(RuntimeError, match="opened by something else"):
        pickle.loads(message.payload)
    with pytest.raises(RuntimeError, match="recycle_memory=False"):
        place(0, "int8", (1,), (1,))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (2, 1, 4)])
def test_strides_and_extents_are_those_of_torch(shape):
    tensor = torch.zeros(shape)
    assert contiguous_strides(shape) == tensor.stride()
    assert extent(shape, tensor.stride()) == max(1, tensor.numel())


def test_a_tensor_over_memory_has_a_storage_that_ends_with_it():
    memory = torch.arange(256, dtype=torch.uint8).numpy()
    tensor = tensor_over(memory, 64, torch.uint8, (2, 3), (1, 2))
    assert tensor.tolist() == [[64, 66, 68], [65, 67, 69]]
    assert tensor.untyped_storage().nbytes() == 6
