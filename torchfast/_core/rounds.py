"""An evaluation within which ranks meet, and that none of them waits in for nothing.

The forward of a sharded model needs all ranks, as often on each. So they agree before each batch
whether any of them has one, and who has none left runs a stand-in beside the others.

`RankGroup.together` lets a rank that failed wait until the others have come to the end. Where ranks
meet within the work they would wait for each other; so here a rank that failed says so and waits
for nobody, and the others hear of it before their next batch, or at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final, final

import torch
from torch import Tensor

from torchfast._core.batches import map_batch, to_device
from torchfast._core.errors import RankError
from torchfast._core.rank_group import RankGroup

# What a rank says before a batch; the least of what they say is what all go by. A rank that failed
# says its own number, below all of these.
_GOES_ON: Final = 0
_ENDED: Final = 1

_END: Final = object()


@final
class Rounds:
    """What ranks tell each other in an evaluation; all of them make the same calls.

    A context manager around it. A rank that ends it without an error has called `end`.

    Args:
        ranks: Who evaluate.

    Raises:
        RankError: From each method: another rank failed, or cannot be reached.

    Synchronizes: The ranks' hosts, not the device.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._is_over = False

    def __enter__(self) -> Rounds:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not self._is_over:
            self._is_over = True
            with suppress(RankError):  # the error that is on its way says more
                self._ranks.least(-1 - self._ranks.rank)

    def even(self, batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
        """Yield as many batches on each rank; with False what stands in for one that it lacks."""
        stand_in: Any = _END
        iterator = iter(batches)
        while True:
            batch = next(iterator, _END)
            has_one = batch is not _END
            if self._least(_GOES_ON if has_one else _ENDED) == _ENDED:
                return
            if stand_in is _END:
                stand_in = self._stand_in(batch)
            yield (batch if has_one else stand_in), has_one

    def end(self) -> None:
        """End it."""
        self._least(_ENDED)
        self._is_over = True

    def _stand_in(self, first: Any) -> Any:
        """Return a copy of the rank's first batch; of another one's if it has none at all."""
        has_one = first is not _END
        source = self._least(self._ranks.rank if has_one else self._ranks.size)
        if not self._least(int(has_one)):
            sends = self._ranks.rank == source
            sent = to_device(first, torch.device("cpu")) if sends else None
            other = self._ranks.gather(sent)[source]
        # The loader may write into its own once the next one is asked for.
        return map_batch(first, Tensor.clone) if has_one else other

    def _least(self, value: int) -> int:
        least = self._ranks.least(value).wait()
        if least < 0:
            self._is_over = True
            raise RankError(
                f"the evaluation of rank {-1 - least} raised an error, so no rank can go on; see "
                "that rank's output"
            )
        return least
