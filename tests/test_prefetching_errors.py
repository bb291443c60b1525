"""Errors of the data, of what is moved and of what is given come where they belong."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest
import torch
from torch.utils.data import Dataset

from simulated_device import Prompt, numbered, numbers, stagers, wait_until
from torchfast import (
    BatchStructureError,
    PrefetchingLoader,
    UnsupportedDeviceError,
    build_dataloader,
)

# --- errors -------------------------------------------------------------------------------------


class DataError(Exception):
    pass


def failing(count, error):
    yield from numbered(count)
    raise error


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("error", [DataError("disk"), StopAsyncIteration("odd"), SystemExit(4)])
def test_an_error_comes_once_behind_the_batches_before_it(count, error):
    loader = PrefetchingLoader(failing(count, error), "cpu", depth=3)
    batches, seen = iter(loader), []
    with pytest.raises(type(error)) as caught:
        seen.extend(int(x[0]) for x, _ in batches)
    assert seen == list(range(count))
    assert caught.value is error
    assert caught.traceback[-1].name == "failing"
    assert list(batches) == []
    assert stagers() == []


class Breaks(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 7:
            raise DataError("sample 7")
        return torch.full((2,), float(index))


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_set_that_fails_can_be_iterated_again(num_workers):
    loader = PrefetchingLoader(build_dataloader(Breaks(), 1, num_workers=num_workers), "cpu")
    for _ in range(2):
        seen = []
        with pytest.raises(DataError, match="sample 7"):
            seen.extend(loader)
        assert len(seen) == 0 or len(seen) == 7
        assert stagers() == []


@pytest.mark.usefixtures("every_way")
def test_an_error_of_the_transform_comes_where_it_belongs():
    def transform(batch):
        if int(batch[1][0]) == 5:
            raise DataError("batch 5")
        return batch

    loader = PrefetchingLoader(iter(numbered(9)), "cpu", transform=transform)
    seen = []
    with pytest.raises(DataError, match="batch 5"):
        seen.extend(numbers([batch])[0] for batch in loader)
    assert seen == list(range(5))
    assert stagers() == []


def test_an_interrupt_while_waiting_leaves_no_thread(device):
    asked, done = threading.Event(), threading.Event()

    def stuck():
        yield from numbered(4)
        asked.set()
        assert done.wait(20)
        yield from numbered(1)

    def interrupt():
        asked.wait(20)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)  # the loop hears of it, and waits for the fetch that is under way
        done.set()

    thread = threading.Thread(target=interrupt)
    # A process that runs in the background may have been started to ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in PrefetchingLoader(stuck(), "cpu"):
                pass
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    wait_until(lambda: not stagers())


# --- strict -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("every_way")
def test_strict_names_the_leaf_that_cannot_be_moved():
    batches = [{"x": torch.ones(2), "meta": [1, {"y": object()}]}]
    with pytest.raises(TypeError, match=r"batch\['meta'\]\[1\]\['y'\] is of type object"):
        list(PrefetchingLoader(batches, "cpu", strict=True))
    assert len(list(PrefetchingLoader(batches, "cpu"))) == 1


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"x": torch.ones(3)}, r"batch\['y'\] is missing"),
        ({"x": torch.ones(3), "y": 1, "z": 2}, r"batch\['z'\] is new"),
        ({"x": torch.ones(3), "z": 1}, r"batch\['z'\] \(int\) stands where batch\['y'\] .* was"),
        ({"x": None, "y": 1}, r"batch\['x'\] \(NoneType\) stands where .* \(Tensor\) was"),
    ],
)
def test_strict_names_the_first_difference(second, said):
    first = {"x": torch.ones(2), "y": 1}
    loader = PrefetchingLoader([first, first, second], "cpu", strict=True)
    with pytest.raises(BatchStructureError, match=f"batch 3 of the epoch .* {said}; build"):
        list(loader)
    assert len(list(PrefetchingLoader([first, {"x": torch.ones(5), "y": 2}], "cpu"))) == 2


def test_a_transform_that_forgets_to_return_is_named(device):
    def normalise(batch):
        batch[0].div_(255)

    loader = PrefetchingLoader(numbered(9), "cpu", transform=normalise)
    with pytest.raises(TypeError, match=r"normalise.* returned None; .* forget `return`"):
        next(iter(loader))
    loader.close()


def test_a_transform_that_forgets_to_return_on_the_cpu_is_named():
    loader = PrefetchingLoader([None, torch.ones(2)], "cpu", transform=lambda batch: None)
    batches = iter(loader)
    assert next(batches) is None  # as it came
    with pytest.raises(TypeError, match=r"transform \(.*lambda.*\) returned None"):
        next(batches)


def test_a_transform_that_forgets_to_return_in_the_thread_is_named(device):
    def sometimes(batch):
        return batch if float(batch[0][0]) < 5 else None

    device.kind = Prompt
    loader = PrefetchingLoader(numbered(9), "cpu", transform=sometimes)
    seen = []
    with pytest.raises(TypeError, match=r"sometimes.* returned None"):
        seen.extend(loader)
    assert len(seen) == 5
    loader.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_told_what_a_loader_can_do():
    with pytest.raises(UnsupportedDeviceError, match=r"has no cuda; use device='cpu'$"):
        PrefetchingLoader([], "cuda")


def test_strict_does_not_ask_for_an_order_of_keys():
    first, second = {"x": torch.ones(2), "y": 1}, {"y": 1, "x": torch.ones(2)}
    assert len(list(PrefetchingLoader([first, second], "cpu", strict=True))) == 2
    with pytest.raises(BatchStructureError, match=r"batch\['y'\] \(str\) stands where .* \(int\)"):
        list(PrefetchingLoader([first, {"y": "1", "x": torch.ones(2)}], "cpu", strict=True))


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize("fails", [False, True])
def test_a_loop_over_a_used_up_iterator_is_told_once(fails):
    def generated():
        yield torch.ones(2)
        if fails:
            raise KeyError("x")

    loader = PrefetchingLoader(generated(), "cpu")
    with pytest.raises(KeyError) if fails else contextlib.nullcontext():
        assert len(list(loader)) == 1
    with pytest.warns(UserWarning, match=r"\(generator\) is an iterator, .* is used up"):
        assert list(loader) == []
    assert list(loader) == []
    assert list(PrefetchingLoader(iter([]), "cpu")) == []


def test_a_loader_of_a_loader_has_one_transform():
    def other(batch):
        return batch

    inner = PrefetchingLoader([1], "cpu", transform=len, transfer_dtype=torch.bfloat16)
    PrefetchingLoader(inner, "cpu", transform=len, transfer_dtype=torch.bfloat16)
    for given in ({"transform": other}, {"transfer_dtype": torch.float16}):
        (name,) = given
        with pytest.raises(ValueError, match=f"{name} was given here as .* has {name}=.*; give it"):
            PrefetchingLoader(inner, "cpu", **given)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"depth": 2.0}, TypeError, r"depth must be an int >= 1, got 2.0 \(float\)"),
        ({"depth": True}, TypeError, r"depth must be an int >= 1, got True \(bool\)"),
        ({"depth": 0}, ValueError, r"depth must be >= 1, got 0"),
        ({"reuse": 1}, TypeError, r"reuse must be True or False, got 1 \(int\)"),
        ({"strict": None}, TypeError, r"strict must be True or False, got None"),
        ({"across_epochs": "yes"}, TypeError, r"across_epochs must be True or False, got 'yes'"),
        ({"background": 0}, TypeError, r"background must be True, False or .auto., got 0"),
        ({"channels_last": 0}, TypeError, r"channels_last must be True or False, got 0"),
        ({"transform": 3}, TypeError, r"transform must be callable as transform\(batch\), got 3"),
        (
            {"transfer_dtype": "bf16"},
            TypeError,
            r"must be a floating-point .* got 'bf16'",
        ),
        ({"transfer_dtype": torch.int8}, TypeError, r"must be a floating-point .* got torch.int8"),
        ({"device": "gpu"}, ValueError, r"did you mean 'cuda'"),
        ({"device": object()}, TypeError, r"device must be a string such as .* got <object"),
        ({"device": None}, TypeError, r"device must be a string such as .* got None"),
        ({"ranks": 3}, TypeError, r"ranks must be the RankGroup of a Trainer or None, got 3"),
        ({"loader": "abc"}, TypeError, r"an iterable of batches, .* of a str is none"),
        ({"loader": {"x": torch.ones(2)}}, TypeError, r"an iterable of batches, .* of a dict is"),
        ({"loader": 3}, TypeError, r"loader must be an iterable of batches, got 3"),
        ({"dept": 3}, TypeError, r"PrefetchingLoader\(\) has no argument 'dept'; did you mean 'de"),
    ],
)
def test_bad_input(given, error, said):
    with pytest.raises(error, match=said):
        PrefetchingLoader(**{"loader": [], "device": "cpu", **given})
