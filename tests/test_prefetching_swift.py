"""Batches that lie ready are fetched in the loop's own thread; others in a thread of their own."""

import time

import pytest
import torch

from simulated_device import (
    Prompt,
    SimulatedTransport,
    numbered,
    simulated,
    stagers,
    wait_until,
)
from torchfast import PrefetchingLoader
from torchfast.data import stager


@pytest.fixture
def device(monkeypatch):
    with simulated(monkeypatch, stager.TOO_SLOW_S) as device:
        device.kind = Prompt
        yield device


@pytest.fixture
def clock(monkeypatch):
    """Fetching takes what a test says, whatever else this machine does."""

    class Clock:
        now = 0.0

    monkeypatch.setattr("torchfast.data.feed.time", Clock)
    monkeypatch.setattr("torchfast.data.stager.time", Clock)
    Clock.perf_counter = staticmethod(lambda: Clock.now)
    Clock.monotonic, Clock.sleep = time.monotonic, time.sleep
    return Clock


def taking(clock, seconds, count=40):
    for number, batch in enumerate(numbered(count)):
        clock.now += seconds(number)
        yield batch


def threads_seen(loader):
    return [bool(stagers()) for _ in loader]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (lambda number: 0.0, "never"),
        (lambda number: stager.SWIFT_S, "never"),
        (lambda number: 0.5 if number < 2 else 0.0, "never"),  # what a start costs
        (lambda number: 0.5 if number in (5, 20) else 0.0, "never"),  # a hiccup
        (lambda number: 0.5 if number % 8 == 7 else 0.0, "late"),  # so many that they count
        (lambda number: 0.005, "soon"),
        (lambda number: 0.005 if number > 20 else 0.0, "late"),
        (lambda number: stager.SWIFT_S * 2, "late"),
    ],
)
def test_a_thread_starts_when_fetching_is_seen_to_be_slow(device, clock, seconds, expected):
    loader = PrefetchingLoader(taking(clock, seconds), "cpu")
    seen = threads_seen(loader)
    first = seen.index(True) if any(seen) else len(seen)
    assert {"never": first == 40, "soon": 2 < first < 8, "late": 10 < first < 40}[expected]
    detail = str(loader.report())
    assert ("too little time to be worth a thread" in detail) == (expected == "never")
    assert ("so it runs ahead in a thread" in detail) == (expected != "never")


def test_what_was_slow_once_has_a_thread_from_the_start_of_the_next_epoch(device, clock):
    class Slow:
        def __iter__(self):
            return taking(clock, lambda number: 0.005, count=12)

    loader = PrefetchingLoader(Slow(), "cpu")
    assert not all(threads_seen(loader)[:3])
    assert any(threads_seen(loader)[:3])


def test_staging_counts_as_much_as_fetching(device, clock, monkeypatch):
    stage = stager.stage

    def slow(*args):
        clock.now += 0.005
        return stage(*args)

    monkeypatch.setattr("torchfast.data.feed.stage", slow)
    assert any(threads_seen(PrefetchingLoader(iter(numbered(40)), "cpu")))


def test_a_loop_that_is_ahead_of_the_device_is_no_slow_loader(device, clock):
    class Behind(Prompt):
        under_way = frozenset()

        def upload(self, slot, *copies):
            self.under_way |= {id(slot)}
            return super().upload(slot, *copies)

        def settle(self, slot):
            if id(slot) in self.under_way:
                clock.now += 0.5
            self.under_way -= {id(slot)}
            super().settle(slot)

    device.kind = Behind
    assert not any(threads_seen(PrefetchingLoader(iter(numbered(40)), "cpu")))
    assert clock.now > 10


class Busy(Prompt):
    """Has something left to do whenever it is asked."""

    def is_idle(self, slot):
        return False


@pytest.mark.parametrize(
    ("kind", "copy_s", "expected"),
    [(Prompt, 1e-3, True), (Prompt, 2e-4, False), (Busy, 1.0, False)],
)
def test_copies_beside_nothing_count_as_much_as_fetching(
    device, clock, monkeypatch, kind, copy_s, expected
):
    batches = numbered(40)
    num_bytes = sum(tensor.nbytes for tensor in batches[0])
    monkeypatch.setattr("torchfast.data.feed.BUS_BYTES_PER_S", num_bytes / copy_s)
    device.kind = kind
    assert any(threads_seen(PrefetchingLoader(batches, "cpu"))) == expected


def test_a_loop_that_waits_for_the_device_has_the_next_batch_copied_meanwhile(
    device, clock, monkeypatch
):
    class Quick(SimulatedTransport):
        """Its consumer's stream, which has nothing to do, passes an event before it is asked."""

        def is_idle(self, slot):
            slot.free.synchronize()
            return True

    monkeypatch.setattr("torchfast.data.feed.BUS_BYTES_PER_S", 1e5)
    device.kind = Quick
    for number, _ in enumerate(PrefetchingLoader(numbered(40), "cpu"), start=1):
        transport = device.transports[0]
        transport.consumer.synchronize()  # as of a loss that is read at each step
        assert transport.num_copied >= number
        if number == 30:
            wait_until(lambda: device.transports[0].num_copied > 30)


@pytest.mark.parametrize(("background", "expected"), [(True, True), (False, False)])
def test_who_knows_better_says_so(device, clock, background, expected):
    seconds = 0.0 if background else 0.005
    loader = PrefetchingLoader(taking(clock, lambda number: seconds), "cpu", background=background)
    assert any(threads_seen(loader)) == expected


def test_epochs_that_begin_ahead_need_the_thread(device, clock):
    loader = PrefetchingLoader(list(numbered(12)), "cpu", across_epochs=True)
    assert any(threads_seen(loader))


def test_it_yields_what_the_thread_yields(device, clock):
    for seconds in (0.0, 0.001):  # without a thread, and with one that starts in the middle
        found, seen = [], set()
        for batch in PrefetchingLoader(taking(clock, lambda number, s=seconds: s), "cpu"):
            found.append(batch)
            seen.add(bool(stagers()))
        assert seen == ({False, True} if seconds else {False})
        for number, (x, y) in enumerate(found):
            assert torch.equal(x, torch.full((64,), float(number)))
            assert torch.equal(y, torch.full((3,), number))
        assert len(found) == 40


def test_epochs_of_two_batches_are_seen_to_be_slow(device, clock):
    class Short:
        def __iter__(self):
            return taking(clock, lambda number: 0.005, count=2)

    loader = PrefetchingLoader(Short(), "cpu")
    for _ in range(8):
        list(loader)
    assert "so it runs ahead in a thread" in str(loader.report())


def test_an_interrupt_while_the_loop_is_ahead_costs_no_slot(device):
    class Interrupted(Prompt):
        is_due = False

        def settle(self, slot):
            super().settle(slot)
            if self.is_due:
                self.is_due = False
                raise KeyboardInterrupt

    device.kind = Interrupted
    loader = PrefetchingLoader(list(numbered(10)), "cpu")
    for _ in range(4):  # with a slot less each time the last would wait for ever
        batches = iter(loader)
        next(batches)
        device.transports[0].is_due = True
        with pytest.raises(KeyboardInterrupt):
            list(batches)
    assert len(list(loader)) == 10


def test_what_draws_by_the_time_it_is_slow_stays_in_its_turn(device, clock):
    """The fetch before the thread would start is watched."""

    class Augments:
        is_on = False

        def __iter__(self):
            for x, y in taking(clock, lambda number: 0.001 if self.is_on else 0.0, count=60):
                yield (x + torch.rand(()) if self.is_on else x), y

    def epochs(loader, upstream):
        torch.manual_seed(0)
        for upstream.is_on in (False, True):
            for x, _ in loader:
                yield float(x[0]), float(torch.rand(()))

    plain, own = Augments(), Augments()
    loader = PrefetchingLoader(own, "cpu")
    assert list(epochs(loader, own)) == list(epochs(plain, plain))
    assert "keeps its turn" in str(loader.report())


def test_what_draws_now_and_then_stays_in_its_turn_when_it_is_slow(device, clock):
    def source():
        for number, (x, y) in enumerate(taking(clock, lambda number: 0.001, count=60)):
            yield (x + torch.rand(()) if number % 20 == 1 else x), y

    loader = PrefetchingLoader(source(), "cpu")
    assert not any(threads_seen(loader))
    assert "keeps its turn" in str(loader.report())
