"""A training state that is known from its step, and a look at what a folder holds of it."""

from __future__ import annotations

import re

import torch

from torchfast import CheckpointManager
from torchfast.checkpoint import storage

# A checkpoint, what names it, and nothing that a killed save leaves.
WELCOME = re.compile(r"step-\d+|latest|folder-[0-9a-f]{32}\.id")


def several_files():
    """Divide even a small state into several files, as a large one is."""
    storage.SHARD_BYTES = 4096


def make(step):
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {f"{n}.weight": torch.randn(600, generator=generator) for n in range(4)},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step))}}, "betas": (0.9, 0.999)},
        "step": step,
    }


def spoil(state):
    """Overwrite every tensor, as the next optimizer step would."""
    for tensor in state["model"].values():
        tensor.fill_(-1.0)
    state["optimizer"]["state"][0]["step"].fill_(-1.0)


def are_equal(found, expected):
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            are_equal(found[key], value) for key, value in expected.items()
        )
    return type(found) is type(expected) and found == expected


def resume(folder, accept, contents=None, **options):
    """Go on in ``folder`` as the next run would; return the number of the state that it found.

    Args:
        folder: What a killed run has left.
        accept: The steps that it may go on from.
        contents: The states that it may find there; that of its step if left out.
        options: Of the manager.
    """
    with CheckpointManager(folder, **options) as checkpoints:
        found = checkpoints.load()
        assert found is not None, "no checkpoint is left"
        assert found.step in accept, f"resumed at {found.step}, expected one of {accept}"
        number = found.state["step"]
        assert number in (contents or [found.step]), f"step {found.step} holds state {number}"
        assert are_equal(found.state, make(number)), f"step {found.step} has other values"
        # Nothing is deleted before there is something in its place.
        least = min(options.get("keep_last", 1), found.step + 1)
        assert len(checkpoints.steps()) >= least, f"only {checkpoints.steps()} are left"
        names = sorted(path.name for path in folder.iterdir())
        strangers = [name for name in names if not WELCOME.fullmatch(name)]
        assert not strangers, f"leftovers: {strangers}"
        step = found.step + 1
        checkpoints.save(make(step), step, blocking=True)
        again = checkpoints.load()
        assert again is not None
        assert again.step == step
    return number
