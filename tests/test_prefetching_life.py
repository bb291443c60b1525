"""How iterations over a PrefetchingLoader begin, break off and end; and what is left."""

from __future__ import annotations

import gc
import multiprocessing
import os
import textwrap
import threading
import time
import weakref

import pytest
import torch
from torch.utils.data import DataLoader

import warm_python
from models import mean_loss
from simulated_device import Prompt, numbered, numbers, read_all, stagers, wait_until
from torchfast import ClosedError, IterationError, MicroBatches, PrefetchingLoader, Trainer

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
def test_groups_are_of_as_many_steps_as_the_loop_asks_for():
    upstream = iter(numbered(40))
    loader = PrefetchingLoader(upstream, "cpu", accumulate=2, unroll=4)
    asked = iter([1, 4, 9, 2, 4, 3])
    groups = loader.iterate(max_steps=14, at_once=lambda: next(asked))
    places, sizes = [], []
    for group in groups:
        sizes.append(len(group))
        for place in range(len(group)):
            loader.go_to(place)
            places.append(loader.state_dict()["num_batches"])
    assert sizes == [1, 4, 4, 2, 3]  # never more than there are slots for, nor than max_steps
    assert places == list(range(2, 30, 2))
    assert int(next(upstream)[0][0]) == 28


@pytest.mark.usefixtures("every_way")
def test_fit_leaves_in_a_generator_what_it_did_not_train_on():
    model = torch.nn.Linear(3, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_loss, accumulate=2)
    upstream = ((torch.ones(2, 3), torch.ones(2, 1)) for _ in range(30))
    trainer.fit(upstream, steps=3, progress=False)
    trainer.fit(upstream, steps=4, progress=False)
    assert len(list(upstream)) == 30 - 2 * 7
    assert stagers() == []


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
    print([t.name for t in threading.enumerate()])
    print(time.monotonic(), flush=True)
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
    done = warm_python.run(script, timeout=60)
    over = time.monotonic()
    assert "torchfast-stager" in done.stdout
    assert done.returncode in (code, -2 if code == 130 else code)
    assert "Fatal" not in done.stderr
    assert over - float(done.stdout.split()[-1]) < 20  # not to a timeout, nor for ever


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
