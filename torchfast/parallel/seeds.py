"""Random numbers of the ranks: the same at the start, others in the steps.

A script that seeds does so alike on every rank, and its model begins the same everywhere, as it
must. Dropout must not: with equal masks on every rank a large batch has the noise of a small one.
"""

from __future__ import annotations

import hashlib

import torch

from torchfast.parallel.ranks import Ranks


def part_seeds(ranks: Ranks, device: torch.device) -> str:
    """Give each rank random numbers of its own, if they are the same now; say what was done.

    The first rank's stay as they are, so that one rank draws what a run without ranks draws.
    Generators that differ between ranks were seeded so by the user and are left alone.

    Synchronizes: Yes.
    """
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    digest = hashlib.sha256(b"".join(state.numpy().tobytes() for state in states)).digest()
    if not ranks.have_equal(digest):
        return "each rank has the random numbers that the script gave it"
    if not ranks.is_first:
        torch.manual_seed((torch.initial_seed() + ranks.rank) % 2**63)
    return "each rank draws random numbers of its own"
