"""Whether a loader can go on at a saved position, and what has to be done for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch.utils.data import DataLoader, IterableDataset

from torchfast._core.errors import StateMismatchError
from torchfast.data.loader_fingerprint import check_same, fingerprint
from torchfast.data.own_generators import own_generators
from torchfast.data.resharding import resharded
from torchfast.data.sharded import dealt_by_sample
from torchfast.data.sharded_batches import carries_state

SAVED: Final = ("num_batches", "epoch_start", "loader_state", "generators")


def check_fits(state: object, loader: Iterable[Any]) -> None:
    """Raise unless ``state`` is a position in such a loader.

    Raises:
        TypeError: Not a mapping.
        StateMismatchError: The position is that of another kind of loader.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state must be the mapping that state_dict() returned, got {type(state).__name__}"
        )
    lacking = {*SAVED, "carries_state", "fingerprint"} - set(state)
    if lacking:
        raise StateMismatchError(
            f"state lacks {sorted(lacking)}; load what the loader's state_dict() returned"
        )
    carries = carries_state(loader)
    if state["carries_state"] != carries:
        kinds = {True: "carries its own state", False: "is counted"}
        raise StateMismatchError(
            f"the position is that of a loader that {kinds[state['carries_state']]}, and this "
            f"{type(loader).__name__} {kinds[carries]}; build the loader as it was built before"
        )
    if carries:
        return
    if (
        state["num_batches"]
        and getattr(loader, "num_workers", 0)
        and getattr(loader, "in_order", True) is False
    ):
        raise StateMismatchError(
            "the position is in the middle of an epoch whose batches come as workers are ready "
            "(in_order=False), so their number does not tell which ones have come; end the epoch "
            "first, or leave in_order as it is"
        )
    loader = fitting(loader, state)
    own, present = fingerprint(loader), len(own_generators(loader))
    check_same(fitted(state, loader)["fingerprint"], own)
    saved = len(state["epoch_start"]["generators"])
    if saved < present and own["dealt_to"] is not None:
        raise StateMismatchError(
            "the position was saved by one process, whose loader drew its order from the "
            f"global generator, and {own['dealt_to']} ranks draw another; end the epoch in one "
            "process, or give the loader a generator= before the run begins"
        )
    if saved != present:
        raise StateMismatchError(
            f"the position was saved with {saved} generators of the loader's own, and this "
            f"loader has {present}; give it a generator where it had one"
        )


def fitting(loader: Iterable[Any], state: Mapping[str, Any]) -> Iterable[Any]:
    """Return the loader that can go on: this one, or what draws an order as many ranks did.

    Dealt out among ranks, a loader has a generator for its order if it was given none. In one
    process it draws from the global one, so it is dealt out to one.
    """
    if (
        carries_state(loader)
        or not isinstance(loader, DataLoader)
        or isinstance(loader.dataset, IterableDataset)
        or state["fingerprint"].get("dealt_to") is None
        or not state["epoch_start"]["generators"]
        or own_generators(loader)
        or fingerprint(loader)["num_replicas"] is not None
    ):
        return loader
    return dealt_by_sample(loader, 0, 1)


def fitted(state: Mapping[str, Any], loader: Iterable[Any]) -> Mapping[str, Any]:
    """Return a position in batches of this loader."""
    return state if carries_state(loader) else resharded(state, fingerprint(loader))
