"""A step that all ranks drop together where one of them runs out of memory.

The others are about to enter a collective by then, which that rank will never join, and where
nothing reaches them. So in a step that may not fit they agree on the host before each collective of
its forwards and backwards. Who has run out says no, once, where its own next collective would have
been. The others hear it and end the step there. All of them stand at the same place, with no
collective left open, and can begin again.

That costs the host an exchange for each collective, so it is for sizes that no step has had yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar, final

import torch

from torchfast._core.errors import OutOfMemoryError
from torchfast._core.no_context import NO_CONTEXT
from torchfast._core.ran_out import OtherRankRanOut
from torchfast._core.rank_group import RankGroup

T = TypeVar("T")


class Shared(Protocol):
    """How a model is spread over the ranks, as far as a shared try has to know it."""

    def shared(self, ask: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context in which ``ask`` is called before each collective of the model."""

    def drop_try(self) -> None:
        """Make the model as it was before a try that ended in the middle."""


@final
class SharedTry:
    """Tells ranks in the middle of a step that one of them has run out of memory.

    Args:
        group: Who agree.

    Attributes:
        model: What is spread over the ranks; None where nothing is.
        is_on: Whether the step that runs is a shared try.
        is_told: Whether the latest one was ended on all ranks, since one has run out.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.model: Shared | None = None
        self.is_on = self.is_told = False
        self._is_open = False

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self._group.rank

    def all_agree(self, yes: bool) -> bool:
        """Return whether all ranks say yes. Synchronizes: The ranks' hosts, not the device."""
        return self._group.all_agree(yes)

    def gather(self, value: T) -> list[T]:
        """Return what each rank gave, by rank. Synchronizes: As `all_agree`."""
        return self._group.gather(value)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Make what runs in the body a shared try; on all ranks."""
        self.is_told, model = False, self.model
        with NO_CONTEXT if model is None else model.shared(self.ask):
            self.is_on = True
            try:
                yield
            finally:
                self.is_on = False

    def opened(
        self, errors: type[Exception] = torch.OutOfMemoryError
    ) -> AbstractContextManager[None]:
        """Return the context of what all ranks do alike; with the same collectives, in one order.

        Args:
            errors: What ends the try on all ranks, raised on one of them; others do not.
        """
        return self._opened(errors) if self.is_on else NO_CONTEXT

    @contextmanager
    def _opened(self, errors: type[Exception]) -> Iterator[None]:
        self._is_open = True
        try:
            yield
            self.ask()  # for one that has run out behind its last collective
        except errors as error:
            # Else the others have said it; or it is that of a step within, which is not repeated.
            if self._is_open and not isinstance(error, OutOfMemoryError):
                self._is_open, self.is_told = False, True
                self._group.all_agree(False)
            raise
        finally:
            self._is_open = False

    def ask(self) -> None:
        """Go on if all ranks can; call it right before a collective, with nothing in between.

        Raises:
            OtherRankRanOut: One cannot.
        """
        if self._is_open and not self._group.all_agree(True):
            self._is_open, self.is_told = False, True
            raise OtherRankRanOut

    def drop(self) -> None:
        """Make the model ready for another try, on all ranks."""
        if self.model is not None:
            self.model.drop_try()
