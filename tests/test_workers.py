"""Loaders with worker processes: what is chosen, what happens when one is lost, and the sweep."""

from __future__ import annotations

import _thread
import contextlib
import fcntl
import gc
import multiprocessing
import os
import random
import signal
import sys
import termios
import threading
import time
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    dataloader,
    get_worker_info,
)

from torchfast import (
    MonitoredDataLoader,
    UnsupportedDeviceError,
    WorkerMeasurement,
    WorkerSweep,
    build_dataloader,
    sweep_workers,
)
from torchfast._core.rng import get_rng_state
from torchfast.data import worker_sweep, workers

IN_MEMORY = TensorDataset(torch.arange(64.0).reshape(32, 2))


class Slow(Dataset):
    """5 ms a sample; counts what was drawn in this process."""

    drawn = 0

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self.drawn += 1
        time.sleep(0.005)
        return torch.tensor(float(index))


class Quick(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"x": torch.tensor(float(index)), "threads": torch.get_num_threads()}


class At(Quick):
    """Does something to its process at one sample."""

    def __init__(self, what, sample=5):
        self.what, self.sample = what, sample

    def __getitem__(self, index):
        if index == self.sample:
            self.what()
        return torch.tensor(float(index))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(12.0))


class Shards(Stream):
    num_shards = 3


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def stop_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


def hang():
    time.sleep(1000)


def fail():
    raise KeyError("sample 5 is broken")


@pytest.fixture(autouse=True)
def no_process_is_left():
    before = set(multiprocessing.active_children())
    yield
    gc.collect()  # an error of torch's holds its iterator in a cycle
    left = set(multiprocessing.active_children()) - before
    for process in left:
        process.kill()  # or the tests that follow fail too
        process.join()
    assert left == set()


def let_torch_count(monkeypatch, cores):
    """Let torch believe in so many cores; everyone else, torchfast too, sees the machine's."""
    counted = {"sched_getaffinity": lambda _: set(range(cores)), "cpu_count": lambda: cores}
    seen = types.SimpleNamespace(**vars(os) | counted)
    for module in (torch._utils, dataloader):  # where it counts them now, and where until 2.11
        monkeypatch.setattr(module, "os", seen)


@pytest.fixture(autouse=True)
def many_cores_for_torch(monkeypatch):
    # It warns of more workers than cores, whatever machine the tests are on.
    let_torch_count(monkeypatch, 64)


def test_torch_warns_by_the_cores_that_it_is_let_see(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataLoader(Quick(), num_workers=64)
    let_torch_count(monkeypatch, 1)
    with pytest.warns(UserWarning, match="This DataLoader will create 2 worker processes"):
        DataLoader(Quick(), num_workers=2)


@pytest.fixture
def cores(monkeypatch):
    def have(number, ranks=1):
        monkeypatch.setattr(workers, "usable_cores", lambda: number)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))

    return have


def options(loader):
    return {
        name: getattr(loader, name)
        for name in ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
    } | {"timeout": loader.timeout}


def reason(loader, lever):
    return next(d.detail for d in loader.report().decisions if d.lever == lever)


# --- what is chosen -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "ranks", "expected"), [(1, 1, 0), (2, 1, 1), (6, 1, 5), (64, 1, 8), (8, 4, 1)]
)
def test_one_core_is_left_to_the_main_process(cores, number, ranks, expected):
    cores(number, ranks)
    loader = build_dataloader(Quick(), 1, device="cpu")
    assert loader.num_workers == expected
    assert "core" in reason(loader, "num_workers")


def test_no_more_workers_than_batches(cores):
    cores(8)
    assert build_dataloader(Quick(), 4).num_workers == 4
    assert build_dataloader(Quick(), 16).num_workers == 0
    assert build_dataloader(Quick(), 3, drop_last=True).num_workers == 5


@pytest.mark.parametrize(
    "dataset",
    [IN_MEMORY, Subset(IN_MEMORY, [0, 1, 2]), ConcatDataset([IN_MEMORY] * 2), [1.0] * 9],
    ids=["tensors", "subset", "concatenation", "list"],
)
def test_samples_in_memory_get_no_workers(cores, dataset):
    cores(8)
    loader = build_dataloader(dataset, 2)
    assert options(loader) == {
        "num_workers": 0,
        "pin_memory": False,
        "persistent_workers": False,
        "prefetch_factor": None,
        "timeout": 0,
    }
    assert "in memory" in reason(loader, "num_workers")
    # A function that makes the batch may be the work.
    assert build_dataloader(dataset, 1, collate_fn=torch.stack).num_workers > 0


def test_an_iterable_data_set_gets_workers_only_if_it_divides_itself(cores):
    cores(8)
    loader = build_dataloader(Stream(), 4)
    assert loader.num_workers == 0
    assert "get_worker_info" in reason(loader, "num_workers")
    assert build_dataloader(Shards(), 4).num_workers == 3


def test_workers_stay_unless_that_would_be_wrong_or_waste(cores):
    cores(4)
    assert build_dataloader(Quick(), 2).persistent_workers
    told = Quick()
    told.set_epoch = lambda epoch: None
    loader = build_dataloader(told, 2)
    assert not loader.persistent_workers
    assert "set_epoch" in reason(loader, "persistent_workers")
    assert not build_dataloader(Quick(), 16, num_workers=2).persistent_workers


def test_memory_is_pinned_for_cuda_and_workers_only(monkeypatch):
    def pins(kind, count, recycle=False):
        device = None if kind is None else torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)
        loader = build_dataloader(Quick(), 2, num_workers=count, recycle_memory=recycle)
        return loader.pin_memory

    assert pins("cuda", 2)
    assert not pins("cuda", 2, recycle="auto")  # a PrefetchingLoader pins the workers' memory
    assert not pins("cuda", 0)
    assert not pins(None, 2)
    assert not pins("mps", 2)


def test_what_is_given_wins():
    given = {
        "num_workers": 2,
        "pin_memory": True,
        "persistent_workers": False,
        "prefetch_factor": 5,
        "timeout": 0,
    }
    loader = build_dataloader(IN_MEMORY, 2, **given)
    assert options(loader) == given
    assert isinstance(loader, DataLoader)
    assert str(loader.report()).count("as asked") == 5


def test_options_of_workers_step_aside_if_there_are_none():
    loader = build_dataloader(IN_MEMORY, 2, timeout=5, multiprocessing_context="spawn")
    assert [d.lever for d in loader.report().stepped_aside] == [
        "timeout",
        "multiprocessing_context",
    ]
    assert len(list(loader)) == 16


def test_a_loader_that_was_not_built_has_an_empty_report():
    assert MonitoredDataLoader(IN_MEMORY).report().decisions == ()


def shuffled(make):
    return make(IN_MEMORY, 4, shuffle=True, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "build",
    [
        shuffled,
        lambda make: make(Quick(), 3, num_workers=2, drop_last=True),
        lambda make: make(Quick(), batch_sampler=BatchSampler(range(9), 2, False), num_workers=1),
        lambda make: make(Quick(), None, num_workers=1),
        lambda make: make(Stream(), 5),
        lambda make: make(Quick(), 2, sampler=[3, 1, 2], collate_fn=list),
    ],
    ids=["shuffle", "drop_last", "batch_sampler", "batch_size=None", "iterable", "sampler"],
)
def test_the_batches_are_those_of_torch(build):
    # The number of threads in a sample is that of the process: 1 in either.
    assert repr(list(build(build_dataloader))) == repr(list(build(DataLoader)))


def test_a_worker_has_one_thread():
    torch.set_num_threads(2)
    try:
        batches = list(build_dataloader(Quick(), 4, num_workers=1))
    finally:
        torch.set_num_threads(1)
    assert {count for batch in batches for count in batch["threads"].tolist()} == {1}


def test_a_worker_starts_no_workers():
    inner = list(build_dataloader(At(lambda: None), None, num_workers=1, collate_fn=InWorker()))
    assert inner == [0] * 16


class InWorker:
    def __call__(self, sample):
        return build_dataloader(Quick(), 2).num_workers


# --- cores --------------------------------------------------------------------------------------


def group(root, name, **files):
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file.replace("__", ".")).write_text(text)


def test_a_quota_of_cgroups_2_is_that_of_the_narrowest_parent(tmp_path):
    group(tmp_path, "fs/pod/box", cpu__max="800000 100000\n")
    group(tmp_path, "fs/pod", cpu__max="350000 100000\n")
    (tmp_path / "self").write_text("0::/pod/box\n")
    assert workers._cgroup_cores(tmp_path / "self", tmp_path / "fs") == 3
    group(tmp_path, "fs/pod", cpu__max="max 100000\n")
    assert workers._cgroup_cores(tmp_path / "self", tmp_path / "fs") == 8


def test_a_quota_of_cgroups_1(tmp_path):
    group(tmp_path, "fs/cpu", cpu__cfs_quota_us="200000\n", cpu__cfs_period_us="100000\n")
    (tmp_path / "self").write_text("5:memory:/host\n4:cpu,cpuacct:/host/path\n")
    assert workers._cgroup_cores(tmp_path / "self", tmp_path / "fs") == 2
    group(tmp_path, "fs/cpu", cpu__cfs_quota_us="-1\n")
    assert workers._cgroup_cores(tmp_path / "self", tmp_path / "fs") > 1000


def test_cores_without_affinity_and_with_a_quota(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    monkeypatch.setattr(workers, "_cgroup_cores", lambda: 5)
    assert workers.usable_cores() == 5
    monkeypatch.setattr(workers, "_cgroup_cores", lambda: 0)
    assert workers.usable_cores() == 1


def test_no_cgroups_at_all(tmp_path):
    assert workers._cgroup_cores(tmp_path / "none", tmp_path) > 1000


# --- lost workers -------------------------------------------------------------------------------


def lose(what, **given):
    dataset = At(what)
    loader = build_dataloader(dataset, 2, num_workers=2, **{"timeout": 1, **given})
    pids, batches, iterator = [], [], iter(loader)
    pids += [child.pid for child in multiprocessing.active_children()]
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        batches.extend(iterator)
    if str(caught.value).startswith("DataLoader worker (pid "):
        # torch's signal handler raises wherever this thread is, between two batches too.
        with pytest.raises(RuntimeError) as caught:
            batches.extend(iterator)
    assert time.monotonic() - start < 5
    assert list(iterator) == []
    assert multiprocessing.active_children() == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    dataset.what = print  # the data are mended
    assert len(list(loader)) == 8
    loader._iterator = None
    return str(caught.value), pids


@pytest.mark.parametrize("persistent", [True, False])
def test_a_killed_worker_is_named(persistent):
    said, pids = lose(kill_itself, persistent_workers=persistent)
    assert any(f"(pid {pid}), by SIGKILL" in said for pid in pids)


@pytest.mark.parametrize(
    ("what", "state"), [(stop_itself, "is stopped"), (hang, "waits for something")]
)
def test_a_worker_that_hangs_is_named(what, state):
    said, pids = lose(what)
    # Sample 5 is in the third batch, which is the first worker's.
    assert said.startswith("no batch for 1 s from DataLoader worker 0 (pid ")
    assert f", {state})" in said
    assert sum(f"(pid {pid}, " in said for pid in pids) == 1


def wait_until(true, seconds=20):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Large(Quick):
    def __getitem__(self, index):
        return bytes(2**20)


def sent(dataset, num_bytes, **given):
    """Return an iterator and its worker, which has sent so much of a batch."""
    # Pinned, the batch would be taken from the pipe by a thread.
    loader = build_dataloader(dataset, 1, num_workers=1, timeout=1, pin_memory=False, **given)
    iterator = iter(loader)
    (worker,) = multiprocessing.active_children()
    pipe = iterator._iterator._worker_result_queue._reader.fileno()

    def waiting_bytes():
        return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)

    wait_until(lambda: waiting_bytes() >= num_bytes)
    return iterator, worker


# The tensors of a batch that was sent are fetched from its process, which no longer answers.
@pytest.mark.parametrize(
    ("dataset", "num_bytes"),
    [pytest.param(Quick(), 1, id="after"), pytest.param(Large(), 2**15, id="amid")],
)
def test_a_worker_that_was_stopped_when_it_sent_a_batch_is_named(dataset, num_bytes):
    iterator, worker = sent(dataset, num_bytes, collate_fn=list)
    os.kill(worker.pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"no batch for 1 s .* 0 \(pid {worker.pid}, is stop"):
        next(iterator)
    assert time.monotonic() - start < 5
    assert list(iterator) == []


def test_a_worker_that_was_killed_when_it_had_sent_a_batch_is_named():
    iterator, worker = sent(Tensors(), 1)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    with pytest.raises(RuntimeError, match=rf"worker 0 \(pid {worker.pid}\), by SIGKILL"):
        next(iterator)
    assert list(iterator) == []


@pytest.mark.parametrize("kind", [EOFError, FileNotFoundError, ConnectionResetError])
def test_such_errors_of_the_data_set_itself_go_through(kind):
    loader = build_dataloader(Raises(kind), 1, num_workers=1, timeout=1)
    start = time.monotonic()
    with pytest.raises(kind, match="its own"):
        next(iter(loader))
    assert time.monotonic() - start < 5


class Tensors(Quick):
    def __getitem__(self, index):
        return torch.ones(1000)


class Raises(Quick):
    def __init__(self, kind):
        self.kind = kind

    def __getitem__(self, index):
        raise self.kind("its own")


def test_the_watch_over_workers_ends_with_them():
    def watches():
        return [t for t in threading.enumerate() if t.name == "torchfast-worker-watch"]

    loader = build_dataloader(Quick(), 2, num_workers=1, timeout=1)
    assert len(list(loader)) == 8
    wait_until(lambda: not watches())
    iterator = iter(loader)
    next(iterator)
    assert len(watches()) == 1
    del iterator
    wait_until(lambda: not watches())


def test_a_slow_consumer_is_not_taken_for_a_slow_worker():
    iterator = iter(build_dataloader(Quick(), 2, num_workers=1, timeout=1))
    next(iterator)
    time.sleep(2.2)  # the step, longer than any patience
    assert len(list(iterator)) == 7


def test_torch_itself_does_not_name_a_worker_that_hangs():
    iterator = iter(DataLoader(At(hang), 2, num_workers=1, timeout=0.5))
    with pytest.raises(RuntimeError, match=r"timed out after 0\.5 seconds$"):
        list(iterator)
    for worker in iterator._workers:
        worker.terminate()
    iterator._shutdown_workers()


def test_an_error_of_the_data_set_goes_through():
    batches = []
    loader = build_dataloader(At(fail), 2, num_workers=1, persistent_workers=False)
    with pytest.raises(KeyError, match="sample 5 is broken"):
        batches.extend(loader)
    assert len(batches) == 2


def test_an_error_of_the_data_set_does_not_hold_the_workers():
    gc.disable()
    try:
        with contextlib.suppress(KeyError):
            list(build_dataloader(At(fail), 2, num_workers=1, persistent_workers=False))
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()


# --- the sweep ----------------------------------------------------------------------------------


def swept(dataset, batch_size=4, **given):
    return sweep_workers(dataset, batch_size, **{"budget_s": 0.8, "max_workers": 2, **given})


def by_number(result):
    return {m.num_workers: m for m in result.measurements}


def test_a_slow_data_set_gets_workers():
    dataset = Slow()
    result = swept(dataset, budget_s=2.5)
    assert result.num_workers > 0
    rates = {n: m.batches_per_s for n, m in by_number(result).items()}
    assert rates[0] == pytest.approx(50, rel=0.3)  # 4 samples of 5 ms
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
    assert swept(Slow(), demand=2, budget_s=0.6).num_workers == 0


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


def test_only_workers_crash():
    result = swept(At(lambda: get_worker_info() and kill_itself()))
    assert result.num_workers == 0
    assert by_number(result)[1].error


def test_a_hang_ends_at_the_timeout():
    start = time.monotonic()
    result = swept(At(lambda: get_worker_info() and hang()), timeout=0.3, budget_s=3)
    assert time.monotonic() - start < 3
    assert "no batch for 0.3 s from DataLoader worker" in by_number(result)[1].error
    assert by_number(result)[0].error is None


def test_a_hang_ends_with_the_budget():
    start = time.monotonic()
    result = swept(At(hang), budget_s=0.8)
    assert time.monotonic() - start < 2
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


@pytest.mark.parametrize("after_s", [0.1, 0.5])
def test_an_interrupt_leaves_no_process(after_s):
    timer = threading.Timer(after_s, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        swept(Slow(), budget_s=5)
    timer.join()
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


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [build_dataloader, sweep_workers])
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"dataset": 3}, TypeError, r"dataset must be a map-style .* got int 3"),
        ({"dataset": Quick}, TypeError, r"dataset must be .* got type <class"),
        ({"dataset": DataLoader(IN_MEMORY)}, TypeError, r"dataset must be .* got DataLoader"),
        ({"dataset": type("NoLen", (), {"__getitem__": max})()}, TypeError, r"has no __len__"),
        ({"batch_size": 2.0}, TypeError, r"batch_size must be an int >= 1, got 2.0"),
        ({"batch_size": 0}, ValueError, r"batch_size must be >= 1, got 0"),
        ({"shuffle": 1}, TypeError, r"shuffle must be True or False, got 1 \(int\)"),
        ({"pin_memory": "yes"}, TypeError, r"pin_memory must be 'auto', True or False, got 'yes'"),
        ({"prefetch_factor": 0}, ValueError, r"prefetch_factor must be >= 1, got 0"),
        ({"timeout": "long"}, TypeError, r"timeout must be 'auto' or a number .* got 'long'"),
        ({"timeout": -1}, ValueError, r"timeout must be a finite number .* got -1"),
        ({"timeout": float("nan")}, ValueError, r"timeout must be a finite number .* got nan"),
        ({"collate_fn": 3}, TypeError, r"collate_fn must be callable as collate_fn\(samples\)"),
        ({"generator": 7}, TypeError, r"generator must be a torch.Generator or None, got 7"),
        ({"device": "gpu"}, ValueError, r"did you mean 'cuda'"),
        ({"device": "xpu"}, UnsupportedDeviceError, r"has no xpu"),
        ({"num_worker": 3}, TypeError, r"has no argument 'num_worker'; did you mean"),
        ({"multiprocessing_context": "thread"}, ValueError, r"valid start method"),
    ],
)
def test_bad_input(call, given, error, message):
    given = {"dataset": Slow(), **given}
    if call is build_dataloader and "multiprocessing_context" in given:
        given["num_workers"] = 1
    with pytest.raises(error, match=message):
        call(**given)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"num_workers": "many"}, TypeError, r"num_workers must be 'auto' or an int .* got 'many'"),
        ({"num_workers": True}, TypeError, r"num_workers must be 'auto' or an int .* got True"),
        ({"num_workers": -1}, ValueError, r"num_workers must be >= 0, got -1"),
        ({"persistent_workers": 1}, TypeError, r"persistent_workers must be 'auto', True or False"),
        ({"num_workers": 0, "timeout": 9}, ValueError, r"timeout=9 needs worker processes, but"),
        ({"num_workers": 0, "persistent_workers": True}, ValueError, r"persistent_workers=True ne"),
    ],
)
def test_bad_input_to_build(given, error, message):
    with pytest.raises(error, match=message):
        build_dataloader(Slow(), **given)


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
