"""How iterations over a PrefetchingLoader begin, break off, fail and end; and what is left."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import textwrap
import threading
import time
import weakref

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import warm_python
from models import mean_loss
from simulated_device import Prompt, numbered, read_all, stagers, wait_until
from torchfast import (
    BatchStructureError,
    ClosedError,
    IterationError,
    MicroBatches,
    PrefetchingLoader,
    Trainer,
    build_dataloader,
)


def numbers(batches):
    return [int(x[0]) for x, y in batches]


# --- the end of an epoch, and its middle --------------------------------------------------------


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize("depth", [1, 3])
def test_epochs_follow_each_other(depth):
    loader = PrefetchingLoader(numbered(7), "cpu", depth=depth)
    for _ in range(40):
        assert numbers(loader) == list(range(7))
    assert stagers() == []


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize("count", range(1, 8))
def test_a_break_leaves_no_thread_and_the_next_epoch_whole(count):
    loader = PrefetchingLoader(numbered(7), "cpu", depth=2)
    for _ in range(3):
        for number, (x, _) in enumerate(loader, start=1):
            assert int(x[0]) == number - 1
            if number == count:
                break
        assert stagers() == []
    assert numbers(loader) == list(range(7))


def test_memory_does_not_grow_over_epochs(device):
    loader = PrefetchingLoader(iter(numbered(0)), "cpu")
    loader = PrefetchingLoader(numbered(7), "cpu", depth=2)
    for epoch in range(40):
        for number, _ in enumerate(loader):
            if number == epoch % 7:
                break
    assert device.transports[0].num_allocations == 3
    assert loader._ring.free.qsize() == 3


@pytest.mark.usefixtures("every_way")
def test_what_was_fetched_from_an_iterator_is_not_lost_by_a_break():
    loader = PrefetchingLoader(iter(numbered(30)), "cpu", depth=4)
    seen = []
    for stop in (1, 1, 5, 8, 100):
        for number, (x, _) in enumerate(loader, start=1):
            seen.append(int(x[0]))
            if number == stop:
                break
    assert seen == list(range(30))


@pytest.mark.usefixtures("every_way")
def test_no_more_is_fetched_than_was_asked_for():
    upstream = iter(numbered(30))
    loader = PrefetchingLoader(upstream, "cpu", depth=4)
    assert numbers(loader.iterate(max_steps=7)) == list(range(7))
    assert int(next(upstream)[0][0]) == 7
    assert numbers(loader.iterate(max_steps=3)) == [8, 9, 10]
    assert numbers(loader) == list(range(11, 30))


@pytest.mark.usefixtures("every_way")
def test_fit_leaves_in_a_generator_what_it_did_not_train_on():
    model = torch.nn.Linear(3, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_loss, accumulate=2)
    upstream = ((torch.ones(2, 3), torch.ones(2, 1)) for _ in range(30))
    trainer.fit(upstream, steps=3, progress=False)
    trainer.fit(upstream, steps=4, progress=False)
    assert len(list(upstream)) == 30 - 2 * 7
    assert stagers() == []


class Collected(list):
    pass


@pytest.mark.parametrize("last", [5, 2])
def test_an_iteration_that_is_let_go_takes_its_thread_along(device, last):
    loader = PrefetchingLoader(iter(numbered(50)), "cpu")
    batches = iter(loader)
    for _ in range(last):
        next(batches)
    assert len(stagers()) == 1
    dead = weakref.ref(loader)
    del batches, loader
    gc.collect()
    assert dead() is None
    wait_until(lambda: not stagers())


class OutOfMemoryOnce(Prompt):
    fail_at = 5

    def renew(self, slot):
        self.fail_at -= 1
        if self.fail_at == 0:
            raise torch.OutOfMemoryError("no memory")
        super().renew(slot)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_want_of_memory_loses_no_slot(device, depth):
    device.kind = OutOfMemoryOnce
    loader = PrefetchingLoader(numbered(20), "cpu", depth=depth)
    with pytest.raises(torch.OutOfMemoryError):
        list(loader)
    assert loader._ring.free.qsize() == depth + 1
    assert numbers(loader) == list(range(20))
    assert stagers() == []


def test_an_end_that_is_interrupted_does_not_hold_the_next_iteration(device, monkeypatch):
    device.kind = Prompt
    loader = PrefetchingLoader(numbered(20), "cpu", depth=2)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    thread = loader._feed._thread
    join = thread.join

    def interrupted(timeout=None):
        monkeypatch.setattr(thread, "join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        batches.close()
    assert numbers(loader) == list(range(20))
    wait_until(lambda: not stagers())


def test_what_an_iterator_gave_last_stays_valid_behind_a_break(device):
    device.kind = Prompt
    loader = PrefetchingLoader(iter(numbered(30)), "cpu", depth=2, reuse=True)
    for x, _ in loader:
        if int(x[0]) == 5:
            break
    time.sleep(0.1)  # the thread goes on as far as it may
    assert x.unique().tolist() == [5]
    assert numbers(loader) == list(range(6, 30))


@pytest.mark.parametrize("background", [True, False])
def test_a_loop_that_waits_hears_of_the_close_of_another_thread(device, background):
    go = threading.Event()
    closed = []

    def slow():
        yield from numbered(4)
        waits.set()
        go.wait(20)
        yield from numbered(9)

    waits = threading.Event()
    loader = PrefetchingLoader(slow(), "cpu", background=background)

    def close():
        waits.wait(20)
        threading.Timer(0.2, go.set).start()
        loader.close()
        closed.append(True)

    thread = threading.Thread(target=close)
    thread.start()
    with pytest.raises(IterationError, match="or it was closed"):
        list(loader)
    thread.join()
    assert closed == [True]
    assert not stagers()


def test_while_paused_nothing_is_enqueued(device):
    loader = PrefetchingLoader(iter(numbered(1000)), "cpu", depth=4)
    with loader.paused():  # before there is anything
        pass
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    transport = device.transports[0]
    wait_until(lambda: transport.num_copies >= 7)  # the ring is full
    with loader.paused():
        next(batches)  # it was staged before
        next(batches)
        before = transport.num_copies
        time.sleep(0.1)
        assert transport.num_copies == before
    wait_until(lambda: transport.num_copies > before)
    loader.close()


@pytest.mark.parametrize("end", [lambda loader: loader.close(), lambda loader: None])
def test_memory_is_let_go_behind_the_copies_that_are_under_way(device, end):
    device.copy_delay_s = 0.1
    loader = PrefetchingLoader(numbered(50), "cpu", depth=8)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    transport = device.transports[0]
    wait_until(lambda: transport.num_copies >= 10)
    end(loader)
    del batches, loader
    gc.collect()
    # What the consumer's stream does next comes after all copies into memory that is its own now.
    transport.consumer.synchronize()
    assert transport.num_copied == transport.num_copies


# --- closing ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("every_way")
def test_a_closed_loader_says_so():
    loader = PrefetchingLoader(numbered(9), "cpu")
    with loader:
        batches = iter(loader)
        next(batches)
        next(batches)
    assert stagers() == []
    loader.close()  # twice
    with pytest.raises(ClosedError, match="this PrefetchingLoader is closed; make another"):
        iter(loader)
    with pytest.raises(IterationError, match="or it was closed"):
        next(batches)


@pytest.mark.usefixtures("every_way")
def test_of_two_iterations_the_second_wins_and_the_first_says_so():
    loader = PrefetchingLoader(numbered(9), "cpu")
    first, second = iter(loader), iter(loader)
    assert int(next(first)[0][0]) == 0
    assert int(next(first)[0][0]) == 1
    assert int(next(second)[0][0]) == 0
    with pytest.raises(IterationError, match="another iteration over this PrefetchingLoader"):
        next(first)
    assert numbers(second) == list(range(1, 9))
    assert stagers() == []


def test_a_fork_cannot_go_on_with_its_parents_iteration(device):
    device.kind = Prompt
    loader = PrefetchingLoader(iter(numbered(20)), "cpu")
    batches = iter(loader)
    for _ in range(3):
        next(batches)

    def child(pipe):
        try:
            next(batches)
        except ClosedError as error:
            pipe.send(str(error))
        pipe.close()

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
    process.start()
    assert ours.poll(20)
    assert "cannot go on in its fork" in ours.recv()
    process.join(20)
    assert process.exitcode == 0
    assert numbers(batches) == list(range(3, 20))


SCRIPT = """
    import sys, threading, time
    sys.path.insert(0, {tests!r})
    import torch
    from simulated_device import Prompt, numbered
    from torchfast import PrefetchingLoader
    from torchfast.data import loader as loader_module
    transport = Prompt()
    loader_module.transport_for = lambda device: transport
    endless = (b for _ in range(10**6) for b in numbered(1))
    loader = PrefetchingLoader(endless, "cpu", background=True)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    print([t.name for t in threading.enumerate()], flush=True)
    {end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("raise KeyboardInterrupt", 130),
        ("loader.close(); loader.close()", 0),
        ("del loader", 0),
    ],
)
def test_python_exits_with_a_live_iteration(end, code):
    script = textwrap.dedent(SCRIPT).format(tests=os.path.dirname(__file__), end=end)
    start = time.monotonic()
    done = warm_python.run(script, timeout=60)
    assert "torchfast-stager" in done.stdout
    assert done.returncode in (code, -2 if code == 130 else code)
    assert "Fatal" not in done.stderr
    assert time.monotonic() - start < 30


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


# --- what a trainer takes -----------------------------------------------------------------------


def trainer(**options):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_loss, **options)


def samples(count=12):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator))
        for _ in range(count)
    ]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_fit_through_the_ring_trains_what_a_plain_loop_trains(device, accumulate):
    plain = trainer(accumulate=accumulate)
    batches = samples()
    for _ in range(2):
        for i in range(0, 12, accumulate):
            group = batches[i : i + accumulate]
            plain.step(group[0] if accumulate == 1 else MicroBatches(group))
    device.kind = Prompt
    for loader_of in (lambda t: batches, lambda t: t.prefetch(batches, depth=3, reuse=True)):
        other = trainer(accumulate=accumulate)
        other.fit(loader_of(other), epochs=2, progress=False)
        assert other.num_steps == plain.num_steps
        for a, b in zip(plain.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.usefixtures("every_way")
def test_an_evaluation_applies_the_transform_and_takes_single_batches():
    t = trainer(accumulate=2)
    batches = samples(5)
    expected = t.evaluate([(2 * x, y) for x, y in batches])
    loader = t.prefetch(batches, transform=lambda batch: (2 * batch[0], batch[1]))
    assert t.evaluate(loader) == expected
    assert stagers() == []


def test_fit_takes_a_loader_that_serves_it():
    t = trainer(accumulate=2)
    loader = PrefetchingLoader(samples(), "cpu")
    with pytest.raises(ValueError, match="has accumulate='1' and the trainer accumulate='2'; make"):
        t.fit(loader, steps=1)
    loader = PrefetchingLoader(samples(), torch.device("meta"), accumulate=2)
    with pytest.raises(ValueError, match="has device='meta' and the trainer device='cpu'; make"):
        t.fit(loader, steps=1)


def test_a_fork_reads_on(device):
    """Workers that fork while a staging thread runs do not inherit its trouble."""
    device.kind = Prompt
    outer = PrefetchingLoader(iter(numbered(30)), "cpu")
    inner = PrefetchingLoader(DataLoader(torch.arange(8.0), 2, num_workers=1), "cpu")
    seen = 0
    for number, _ in enumerate(outer):
        if number % 10 == 5:
            seen += len(list(inner))
    assert seen == 12
    assert read_all(iter(()), device) == []


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
        ({"loader": 3}, TypeError, r"loader must be an iterable of batches, got 3"),
        ({"dept": 3}, TypeError, r"PrefetchingLoader\(\) has no argument 'dept'; did you mean 'de"),
    ],
)
def test_bad_input(given, error, said):
    with pytest.raises(error, match=said):
        PrefetchingLoader(**{"loader": [], "device": "cpu", **given})
