"""For which batches it is known that their parts make the whole, and which have to be tried.

The loss function stays what it is, so what has held for samples that are unlike holds for others
that are no more so. A mean over the tokens that are not padding passes as long as nothing is
padded; so a batch whose samples are further apart than those that have passed is tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import nn

from torchfast._core.batches import count_samples
from torchfast._core.loss import LossParts
from torchfast.memory.split_check import Verdict, check_split
from torchfast.memory.split_ranks import SplitRanks
from torchfast.memory.split_samples import SLIGHT, counts_in, unevenness


@final
class SplitVerdicts:
    """Tries batches, and remembers what was found, and of what.

    Args:
        loss_of: Runs the loss function on a batch.
        model: See `check_split`.
        device: Where it runs.
        in_float8: See `check_split`.
        used: See `check_split`.

    Attributes:
        latest: What was found last.
    """

    def __init__(
        self,
        loss_of: Callable[[Any], LossParts],
        model: nn.Module,
        device: torch.device,
        *,
        in_float8: bool = False,
        used: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        self.latest = Verdict()
        self._check = partial(
            check_split, loss_of, model=model, device=device, in_float8=in_float8, used=used
        )
        self._passed: dict[int, tuple[float, ...]] = {}  # by number of columns: another structure

    def why_not(self, batches: Sequence[Any]) -> str | None:
        """Return why parts of batches would give another gradient; None if none is known.

        Synchronizes: Yes.
        """
        untried = self._untried(batches)
        if untried is None:
            return None
        verdict = self._check(untried)
        self._note(untried, verdict)
        return verdict.why_not

    def why_not_on_ranks(self, others: SplitRanks, batches: Sequence[Any]) -> str | None:
        """Return why on any rank; all call it together, with their own batches or with none.

        Synchronizes: Yes, with the hosts of the other ranks.
        """
        untried = self._untried(batches)
        if others.ranks.all_agree(untried is None):
            return None
        # What another rank needs to have tried, all of them try.
        tried = next(iter(batches), None) if untried is None else untried
        opened = partial(others.ranks.opened, Exception)
        verdict = others.check(
            lambda batch, size: self._check(batch, size=size, around=opened), tried
        )
        self._note(tried, verdict)
        return verdict.why_not

    def _untried(self, batches: Sequence[Any]) -> Any | None:
        """Return the batch of which least is known; None where enough is known of all of them."""
        worst, furthest = None, SLIGHT
        for batch in batches:
            apart = _apart(batch)
            further = 2.0  # than samples can be
            if (passed := self._passed.get(len(apart))) is not None:
                further = max((a - b for a, b in zip(apart, passed, strict=True)), default=0.0)
            if further > furthest:
                worst, furthest = batch, further
        return worst

    def _note(self, batch: Any | None, verdict: Verdict) -> None:
        self.latest = verdict
        if batch is None or verdict.why_not is not None or not verdict.is_kept:
            return
        apart = _apart(batch)
        passed = self._passed.get(len(apart), apart)
        self._passed[len(apart)] = tuple(map(max, apart, passed))


def _apart(batch: Any) -> tuple[float, ...]:
    return unevenness(counts_in(batch, count_samples(batch) or 1))
