"""The sweep over numbers of workers: what it measures, what it chooses and what it leaves alone."""

from __future__ import annotations

import _thread
import multiprocessing
import random
import threading
import time

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset, get_worker_info

from torchfast import WorkerMeasurement, WorkerSweep, sweep_workers
from torchfast._core.rng import get_rng_state
from torchfast.data import worker_sweep
from worker_data import (
    IN_MEMORY,
    At,
    Quick,
    Slow,
    Stream,
    fail,
    hang,
    kill_itself,
    let_torch_count,
    no_process_left,
)


@pytest.fixture(autouse=True)
def no_process_is_left():
    with no_process_left():
        yield


@pytest.fixture(autouse=True)
def many_cores_for_torch(monkeypatch):
    # It warns of more workers than cores, whatever machine the tests are on.
    let_torch_count(monkeypatch, 64)


def swept(dataset, batch_size=4, **given):
    return sweep_workers(dataset, batch_size, **{"budget_s": 0.8, "max_workers": 2, **given})


def by_number(result):
    return {m.num_workers: m for m in result.measurements}


def test_a_slow_data_set_gets_workers():
    def plain_rate():
        began = time.perf_counter()
        for index in range(24):
            Slow()[index]
        return 24 / 4 / (time.perf_counter() - began)

    dataset = Slow()
    before = plain_rate()
    result = swept(dataset, budget_s=5.0)
    assert result.num_workers > 0
    rates = {n: m.batches_per_s for n, m in by_number(result).items()}
    # 4 samples of 5 ms, and no sleeper wakes early; a busy machine wakes them late, now or then.
    assert 0.6 * min(before, plain_rate()) < rates[0] <= 50
    assert rates[2] > 1.2 * rates[0]  # twice as much, where nobody else wants the cores
    assert result.batches_per_s == rates[result.num_workers]
    assert all(len(m.rounds) > 1 for m in result.measurements)
    assert dataset.drawn == 0  # samples are made elsewhere


def test_samples_in_memory_need_none():
    result = swept(IN_MEMORY)
    assert result.num_workers == 0
    assert "more than twice" in result.reason


def test_a_demand_ends_the_sweep():
    result = swept(Slow(), demand=10)  # a fifth of what one supplies, should the machine be busy
    assert result.num_workers == 1
    assert list(by_number(result)) == [0, 1]
    assert "1.2 times the demand" in result.reason
    # Without workers loading comes on top: 50 batches/s are not enough for 10, but for 2.
    # Long enough that one stall of a busy machine is not all that there is.
    assert swept(Slow(), demand=2, budget_s=3.0).num_workers == 0


def test_a_demand_that_none_meets():
    result = swept(Slow(), demand=1000, budget_s=2.0)
    assert result.num_workers == 2
    assert "none supplies enough" in result.reason


def test_a_crash_is_a_row():
    result = swept(At(kill_itself))
    rows = by_number(result)
    assert "died with exit code -9" in rows[0].error
    assert "by SIGKILL" in rows[1].error
    assert result.batches_per_s is None
    assert "nothing could be measured" in result.reason


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "DataLoader worker (pid 12) is killed by signal: Killed. ",
            "a DataLoader worker died: DataLoader worker (pid 12), by SIGKILL; SIGKILL is mostly",
        ),
        (
            "DataLoader worker (pid 12) exited unexpectedly with exit code 3. Details are lost.",
            "died: DataLoader worker (pid 12) exited unexpectedly with exit code 3. Details",
        ),
        ("sample 5 is killed by signal: Killed.", "Error: sample 5 is killed by signal: Killed."),
    ],
)
def test_a_crash_that_torch_tells_of_anywhere_is_a_row(monkeypatch, said, expected):
    """Its handler raises wherever the main thread is."""

    def raised(self, loader):
        raise RuntimeError(said)

    monkeypatch.setattr(worker_sweep.Trial, "drain", raised)
    found = by_number(swept(IN_MEMORY))
    assert all(expected in found[number].error for number in (1, 2))


def test_only_workers_crash():
    result = swept(At(lambda: get_worker_info() and kill_itself()))
    assert result.num_workers == 0
    assert by_number(result)[1].error


def test_a_hang_ends_at_the_timeout():
    start = time.monotonic()
    result = swept(At(lambda: get_worker_info() and hang()), timeout=0.3, budget_s=3)
    assert time.monotonic() - start < 20  # and not for ever
    assert "no batch for 0.3 s from DataLoader worker" in by_number(result)[1].error
    assert by_number(result)[0].error is None


def test_a_hang_ends_with_the_budget():
    start = time.monotonic()
    result = swept(At(hang), budget_s=0.8)
    assert time.monotonic() - start < 20
    assert "hangs, or budget_s is too short" in by_number(result)[0].error


def test_an_error_of_the_data_set_is_a_row():
    result = swept(At(fail))
    assert all("sample 5 is broken" in m.error for m in result.measurements)


def test_an_empty_data_set_is_a_row():
    assert "no batch" in swept(Slow(), 100, drop_last=True).reason


def test_generators_are_left_as_they_were():
    generator = torch.Generator().manual_seed(5)
    sampler = RandomSampler(IN_MEMORY, generator=torch.Generator().manual_seed(6))
    nested = BatchSampler(sampler, 4, drop_last=False)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    own = (generator, sampler.generator)

    def states():
        state = get_rng_state(torch.device("cpu"))
        tensors = [state["torch"], state["numpy"][1], *(g.get_state() for g in own)]
        return [state["python"], state["numpy"][2:], *(t.tolist() for t in tensors)]

    found = states()
    swept(IN_MEMORY, shuffle=True, generator=generator, budget_s=0.4)
    swept(IN_MEMORY, 1, batch_sampler=nested, budget_s=0.4)
    swept(IN_MEMORY, shuffle=True, budget_s=0.4)
    assert states() == found
    # The control: a loader does draw from them.
    for drawn_from in ({"generator": generator}, {"generator": sampler.generator}, {}):
        before = states()
        list(DataLoader(IN_MEMORY, shuffle=True, **drawn_from))
        assert states() != before


# An interrupt that Python loses, as one in what runs after a fork, is told of as unraisable.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("after_s", [0.1, 0.5])
def test_an_interrupt_leaves_no_process(after_s):
    over = threading.Event()

    def press():
        # Python loses an interrupt that comes while a destructor runs, such as that of a loader
        # that ends its workers; whoever presses the keys then presses them again.
        for wait_s in (after_s, 2.0, 2.0):
            if over.wait(wait_s):
                return
            _thread.interrupt_main()

    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            swept(Slow(), budget_s=5)
    finally:
        over.set()
        thread.join()
    assert multiprocessing.active_children() == []


def test_what_cannot_be_pickled_is_measured_here():
    class Local(Quick):
        pass

    result = swept(Local(), multiprocessing_context="spawn")
    assert result.num_workers == 0
    assert "pickle" in by_number(result)[1].error
    assert result.batches_per_s > 0
    assert any("measured in this process" in note for note in result.notes)


def test_an_iterable_data_set_is_measured_and_warned_of():
    result = swept(Stream(), 2)
    assert result.batches_per_s > 0
    assert any("each sample n times" in note for note in result.notes)


@pytest.mark.parametrize(
    ("dataset", "given"),
    [
        (Subset(IN_MEMORY, [0]), {}),
        (Quick(), {"batch_size": None}),
        (Quick(), {"batch_size": 1, "batch_sampler": [[0, 1], [2]]}),
    ],
    ids=["one sample", "batch_size=None", "batch_sampler"],
)
def test_short_epochs_are_repeated(dataset, given):
    assert swept(dataset, budget_s=0.5, **given).batches_per_s > 0


def test_more_workers_than_cores_are_tried_if_asked(monkeypatch):
    monkeypatch.setattr(worker_sweep, "usable_cores", lambda: 1)
    let_torch_count(monkeypatch, 1)
    assert list(by_number(swept(Slow(), max_workers=3, budget_s=2))) == [0, 1, 2, 3]
    result = swept(Slow(), max_workers=None, budget_s=0.5)
    assert list(by_number(result)) == [0, 1]
    assert result.cores == 1


def test_a_start_method_is_not_settled():
    before = multiprocessing.get_start_method(allow_none=True)
    swept(IN_MEMORY, max_workers=0, budget_s=0.1, multiprocessing_context="fork")
    assert multiprocessing.get_start_method(allow_none=True) == before


# --- the choice, on figures ---------------------------------------------------------------------


def chosen(rates, demand=None):
    sweep = worker_sweep._Sweep(Slow(), 1, {}, {}, [*rates], 1.0, demand)
    sweep.rates = {number: [rate] for number, rate in rates.items()}
    return sweep._choose(dict.fromkeys(rates, 0.0))[0]


@pytest.mark.parametrize(
    ("rates", "demand", "expected"),
    [
        ({0: 50, 1: 50, 2: 100, 4: 190, 8: 195}, None, 4),  # within 5 %
        ({0: 100, 1: 80}, None, 1),  # a worker loads beside the step
        ({0: 300, 1: 80}, None, 0),
        ({0: 50, 1: 50, 2: 100, 4: 190}, 80, 2),
        ({0: 50, 1: 50, 2: 95, 4: 190}, 80, 4),  # 95 is not 1.2 x 80
        ({0: 1600, 1: 50}, 80, 0),
        ({0: 1500, 1: 120}, 80, 1),
        ({0: 1000, 1: 10}, 80, 0),  # 13.5 ms a step, not 100
    ],
)
def test_the_choice(rates, demand, expected):
    assert chosen(rates, demand) == expected


def test_the_result_reads_as_a_table():
    def row(number, rate, error=None):
        return WorkerMeasurement(
            num_workers=number,
            batches_per_s=rate,
            rounds=(rate, rate) if rate else (),
            startup_s=0.5 if rate else None,
            error=error,
        )

    result = WorkerSweep(
        num_workers=1,
        reason="supplies the most",
        measurements=(row(0, 10.0), row(1, 20.0), row(2, None, "it broke; mend it")),
        demand=None,
        cores=2,
        elapsed_s=1.0,
        notes=("a note",),
    )
    assert str(result).splitlines() == [
        "workers  batches/s  noise  first batch",
        "      0       10.0     0%       0.50 s",
        "      1       20.0     0%       0.50 s  <- chosen",
        "      2  failed: it broke",
        "num_workers=1: supplies the most",
        "a note",
    ]
    assert result.to_dict()["measurements"][1]["batches_per_s"] == 20.0


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"demand": "much"}, TypeError, r"demand must be a number > 0, got 'much'"),
        ({"demand": 0}, ValueError, r"demand must be > 0, got 0"),
        ({"budget_s": -1}, ValueError, r"budget_s must be > 0, got -1"),
        ({"max_workers": 1.5}, TypeError, r"max_workers must be an int >= 0, got 1.5"),
        ({"sampler": iter([1])}, TypeError, r"sampler \(list_iterator\) is an iterator, which the"),
    ],
)
def test_bad_input_to_sweep(given, error, message):
    with pytest.raises(error, match=message):
        sweep_workers(Slow(), **given)
