"""Loads, stops and goes on under whatever this process is in; prints what came, for each way.

Usage: loading.py FOLDER WAY...

A way is how workers start, or ``here`` for none, or what happens to this process before the next:
``lost`` takes its working directory away, ``unknown`` gives it the id of a user that is not known.
"""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import sys

import pytest
import torch
from torch.utils.data import Dataset

from simulated_device import Prompt, simulated
from torchfast import PrefetchingLoader, build_dataloader
from torchfast._core.rng import seed_everything

NUM_SAMPLES, SAMPLE_BYTES = 13, 64


class Files(Dataset):
    """A file for each sample, and a draw, as of an augmentation."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        with open(os.path.join(self.folder, f"{index}.bin"), "rb") as file:
            values = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        return values, torch.rand(())


def write(folder):
    """Write the samples."""
    os.makedirs(folder)
    for index in range(NUM_SAMPLES):
        with open(os.path.join(folder, f"{index}.bin"), "wb") as file:
            file.write(bytes((index * 7 + i) % 256 for i in range(SAMPLE_BYTES)))


def prefetched(folder, start):
    """Return a loader through the ring of a simulated device, with a thread that stages."""
    with_workers = {"num_workers": 1, "multiprocessing_context": start, "timeout": 60}
    loader = build_dataloader(
        Files(folder),
        3,
        shuffle=True,
        generator=torch.Generator().manual_seed(3),
        device="cpu",
        **({"num_workers": 0} if start == "here" else with_workers),
    )
    return PrefetchingLoader(loader, "cpu", background=True)


def load(folder, start):
    """Stop in the middle of the first epoch, go on there, and load a second; return all that came.

    One loader does it, whose worker stays: to start one anew takes seconds.
    """
    seed_everything(5)
    log = []
    with prefetched(folder, start) as loader:
        for number, batch in enumerate(loader):
            log.append(builtins(batch))
            if number == 1:
                break
        file = io.BytesIO()
        torch.save(loader.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        log.append(builtins(state))
        loader.load_state_dict(state)
        log += [builtins(batch) for _ in range(2) for batch in loader]
        log.append(builtins(loader.state_dict()))
    return log


def builtins(value):
    """Return a batch or a state as JSON can have it."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): builtins(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [builtins(item) for item in value]
    return value


def digest(folder, start):
    """Return a short name of all that `load` returns."""
    with pytest.MonkeyPatch.context() as patch, simulated(patch) as device:
        device.kind = Prompt
        log = load(folder, start)
    return hashlib.sha256(json.dumps(log).encode()).hexdigest()


def enter(way):
    """Bring this process into a state of which there is no way back."""
    if way == "lost":
        os.mkdir("gone")
        os.chdir("gone")
        os.rmdir(os.getcwd())
    elif way == "unknown":
        os.setgroups([])
        os.setgid(54321)
        os.setuid(54321)
    else:
        return False
    return True


if __name__ == "__main__":
    # Or each worker would import torch again.
    multiprocessing.set_forkserver_preload(["torch", "torchfast"])
    found = [digest(sys.argv[1], way) for way in sys.argv[2:] if not enter(way)]
    sys.stdout.write(json.dumps(found))
