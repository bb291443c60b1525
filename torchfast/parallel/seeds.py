"""Random numbers of the ranks: the same at the start, others in the steps.

A script that seeds does so alike on every rank, and its model begins the same everywhere, as it
must. Dropout must not: with equal masks on every rank a large batch has the noise of a small one.
Nor must what a data set draws without worker processes, be it from torch, Python or NumPy.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

from torchfast._core.rng import get_rng_state
from torchfast.parallel.ranks import Ranks


def part_seeds(ranks: Ranks, device: torch.device) -> str:
    """Give each rank random numbers of its own, if they are the same now; say what was done.

    The first rank's stay as they are, so that one rank draws what a run without ranks draws.
    Generators that differ between ranks were seeded so by the user and are left alone.

    Synchronizes: Yes.
    """
    state = get_rng_state(device)
    # The device's with the host's: torch seeds both at once.
    of_torch = [state["torch"], *([state["cuda"]] if "cuda" in state else [])]
    told = {
        "torch": b"".join(part.numpy().tobytes() for part in of_torch),
        "python": repr(state["python"]).encode(),
        "numpy": repr([*state["numpy"][2:], state["numpy"][1].tolist()]).encode(),
    }
    digests = {name: hashlib.sha256(each).digest() for name, each in told.items()}
    equal = [name for name, each in digests.items() if ranks.have_equal(each)]
    if not equal:
        return "each rank has the random numbers that the script gave it"
    if not ranks.is_first:
        for name in equal:
            _seed(name, digests[name], ranks.rank)
    return "each rank draws random numbers of its own"


def _seed(name: str, state: bytes, rank: int) -> None:
    if name == "torch":
        torch.manual_seed((torch.initial_seed() + rank) % 2**63)
        return
    # Unlike torch's they do not tell what they were seeded with.
    words = hashlib.sha256(state + rank.to_bytes(8, "big")).digest()
    if name == "python":
        random.seed(int.from_bytes(words, "big"))
    else:
        np.random.seed(int.from_bytes(words[:4], "big"))
