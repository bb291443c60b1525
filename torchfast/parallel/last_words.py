"""What a rank raised in a forward or backward, told to the others that waited for it there.

They wait in a collective, in C++, where nothing reaches them but the end of that rank's process:
then the connection breaks, and they raise an error that names an address. So a rank that fails
leaves word in the store through which the ranks have found each other, and those whose connection
breaks look there and say which rank it was, and what it raised. A step without an error asks
nobody.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, final

from torch.distributed import distributed_c10d

from torchfast._core.errors import RankError

logger = logging.getLogger(__name__)

# In what torch raises where another rank is gone.
_OF_COLLECTIVES: Final = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe")
_STORE_TIMEOUT_S: Final = 5.0
_MOST_CHARACTERS: Final = 500


@final
class LastWords:
    """The errors of the ranks of a training, which all of them build in the same order.

    What those of an earlier one have left, all ranks having failed and gone on, is not read.

    Args:
        rank: This one.
        world_size: How many there are.
    """

    _numbers = itertools.count()

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._number = next(self._numbers)
        self._is_left = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Tell the others if the body fails, or say who else has failed, if it fails for that.

        Raises:
            RankError: Another rank is gone, and has said why.
        """
        if self._is_left:  # and the training goes on all the same
            self._set("")
            self._is_left = False
        try:
            yield
        except Exception as error:
            if not _is_of_collectives(error):
                self._set(f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS])
                self._is_left = True
                raise
            words = self._of_others()
            if not words:
                raise
            told = "; ".join(f"rank {rank}: {text}" for rank, text in words.items())
            raise RankError(
                f"another rank raised an error in its forward or backward, so no rank can go on: "
                f"{told}"
            ) from error

    def _set(self, text: str) -> None:
        try:
            _store().set(self._key(self._rank), text)
        except Exception as error:  # of any store; what is raised here must be the user's own
            logger.debug("no word could be left for the other ranks: %s", error)

    def _key(self, rank: int) -> str:
        return f"{self._number}/{rank}"

    def _of_others(self) -> dict[int, str]:
        found = {}
        for rank in range(self._world_size):
            try:
                store = _store()
                if rank != self._rank and store.check([self._key(rank)]):
                    found[rank] = store.get(self._key(rank)).decode()
            except Exception as error:  # the store is gone with the rank that held it
                logger.debug("rank %d cannot be asked: %s", rank, error)
        return {rank: text for rank, text in found.items() if text}


def _store() -> Any:
    store: Any = distributed_c10d._get_default_store()
    if hasattr(store, "clone"):  # the connection of the training may be in use
        store = store.clone()
        store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
    return distributed_c10d.PrefixStore("torchfast/last_words", store)


def _is_of_collectives(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, RuntimeError) and any(part in text for part in _OF_COLLECTIVES)
