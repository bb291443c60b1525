"""Loaders that begin an epoch where they are: a stream that goes on from its own position.

What was fetched ahead of a loop that breaks off would be lost to the next one. If the loader
carries a state it can be given that of the last batch that the training had. But one that begins
each epoch anew must not be: it would go on in the middle. Which kind it is, only its next epoch
shows, by the states that it tells: one that goes on is not changed by ``iter()``, and does not tell
behind its first batch what it told behind the first one before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, final

import torch

from torchfast._core.compare import differences
from torchfast._core.rng import get_rng_state, set_rng_state
from torchfast.data.one_shot import begun

_CPU: Final = torch.device("cpu")
_END: Final = object()


@final
class BrokenOff(NamedTuple):
    """The states of a loader in an epoch of which more was fetched than the training had.

    Attributes:
        first: Behind the first batch of it.
        last: Behind what was fetched last.
        left: Behind the last batch that the training had.
    """

    first: Any
    last: Any
    left: Any

    def taken_up(self, loader: Any, rest: Iterator[Any]) -> Iterator[Any]:
        """Yield the loader's next epoch, from ``left`` on if it goes on from where it is.

        Args:
            loader: One with a state, whose generators fetching ahead does not draw from.
            rest: What ``iter(loader)`` has just returned.
        """
        before = get_rng_state(_CPU)
        is_as_it_was = _is_same(state_of_loader(loader), self.last)
        first = next(rest, _END)
        if is_as_it_was and not _is_same(state_of_loader(loader), self.first):
            set_rng_state(before, _CPU)  # of a batch that comes later, or is not to come at all
            loader.load_state_dict(copy.deepcopy(self.left))
            rest = begun(iter(loader))
            first = next(rest, _END)
        if first is not _END:
            yield first
            del first  # its memory may be used again
            yield from rest


def state_of_loader(loader: Any) -> Any:
    """Return a copy of its state: a loader may hand out what it goes on changing."""
    return copy.deepcopy(loader.state_dict())


def _is_same(state: Any, other: Any) -> bool:
    return not differences(state, other)
