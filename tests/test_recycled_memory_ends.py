"""How a loader ends whose workers use shared memory again: nothing is left of it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

import warm_python
from torchfast import MonitoredDataLoader, build_dataloader


class Large(Dataset):
    """Batches of two elements, 400 kB, that tell their number in every byte."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.full((50_000,), index // 2, dtype=torch.int32)


class Dies(Dataset):
    """Its worker is killed when it makes the ninth batch."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        if index == 16:
            time.sleep(0.5)  # what was sent arrives
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((50_000,), index // 2, dtype=torch.int32)


class Fails(Large):
    def __getitem__(self, index):
        if index == 5:
            raise LookupError("sample 5 is broken")
        return super().__getitem__(index)


@pytest.fixture(autouse=True)
def nothing_is_left():
    gc.collect()
    before = set(multiprocessing.active_children())
    yield
    gc.collect()
    assert set(multiprocessing.active_children()) == before


def test_an_error_of_the_data_set_is_the_same():
    said = []
    for recycles in (False, True):
        loader = MonitoredDataLoader(Fails(), 2, num_workers=1, recycle_memory=recycles)
        with pytest.raises(LookupError) as raised:
            list(loader)
        said.append(str(raised.value))
        raised.value.__traceback__ = None  # it holds the workers
        del raised, loader
    theirs, ours = said
    assert ours.splitlines()[0] == theirs.splitlines()[0]
    assert ours.splitlines()[-1] == theirs.splitlines()[-1] == "LookupError: sample 5 is broken"


def test_a_dead_worker_is_named_and_the_loader_goes_on():
    loader = build_dataloader(Dies(), 2, num_workers=1, recycle_memory=True, timeout=30)
    kept = []
    with pytest.raises(RuntimeError, match=r"worker 0 .* by SIGKILL"):
        kept.extend(loader)
    assert [int(batch[0, 0]) for batch in kept] == list(range(len(kept)))
    assert kept
    batches = iter(loader)
    assert int(next(batches)[0, 0]) == 0  # of another worker, in memory of its own
    assert kept[0].unique().tolist() == [0]
    batches.end()


LEAVES_NOTHING = """
import sys, time, torch
import torch.multiprocessing
from torchfast import MonitoredDataLoader
class Large:
    def __len__(self):
        return 400
    def __getitem__(self, index):
        return torch.full((50_000,), index // 2, dtype=torch.int32)
if __name__ == "__main__":
    torch.multiprocessing.set_sharing_strategy(sys.argv[1])
    loader = MonitoredDataLoader(
        Large(), 2, num_workers=2, recycle_memory=True, persistent_workers=True
    )
    batches = iter(loader)
    kept = [next(batches) for _ in range(6)]
    print(*[w.pid for w in loader._iterator._workers], flush=True)
    if sys.argv[2] == "error":
        raise KeyError("on purpose")
    if sys.argv[2] == "killed":
        time.sleep(60)
    print([int(b[0, 0]) for b in kept] + [int(b[0, 0]) for b in batches] == list(range(200)))
"""


def shared_files():
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("torch_")}


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory in the file system")
@pytest.mark.parametrize(
    ("strategy", "ending"),
    [("file_system", "normal"), ("file_descriptor", "error"), ("file_system", "killed")],
)
def test_nothing_is_left_in_shared_memory(strategy, ending, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LEAVES_NOTHING)
    before = shared_files()
    with (tmp_path / "errors").open("w") as file:
        process = warm_python.Process(script, strategy, ending, stderr=file)
    pids = process.stdout.readline().split()
    if ending == "killed":
        process.kill()
    with process.stdout:
        said = process.stdout.read()
    process.wait(60)
    errors = (tmp_path / "errors").read_text()
    if ending == "normal":
        assert (said.strip(), process.returncode) == ("True", 0), errors
    if ending == "error":
        assert errors.strip().endswith("KeyError: 'on purpose'")
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids) or shared_files() - before:
        assert time.monotonic() < deadline, (pids, shared_files() - before)
        time.sleep(0.05)


def test_no_thread_is_left():
    before = threading.active_count()
    for batch in MonitoredDataLoader(Large(), 2, num_workers=1, recycle_memory=True):
        del batch
    gc.collect()
    deadline = time.monotonic() + 10
    while threading.active_count() > before:  # one that ends needs a processor for it
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.02)
