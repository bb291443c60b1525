"""A capture that nobody is told of, so that a model computes in it what it computes without.

Some code asks torch whether it is being captured, and then computes another way, mostly to keep the
host from waiting: transformers makes another attention mask, for which another kernel runs, with
other bits. A graph of that is not the step. So while a step is captured, whoever asks is told no.
torch is told the truth, and so is this library: their checks are about captures.

Where the host then waits, or whatever else ends the capture, the next one is told of. So it is
where compiled code asks: it was compiled for the other function, and would be compiled again.

A graph of what the step computes once it is told is held against eager steps that are told as well,
so that what else may be wrong with it is seen as ever.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import final

import torch

_TOLD = ("torch", "torchfast")
_TRUTH = "torchfast_truth"


@final
class Secret:
    """That a capture is under way.

    Attributes:
        was_kept: Whether anybody asked, and was told no.
    """

    def __init__(self) -> None:
        self.was_kept = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep it within the body, in all threads, since autograd's are part of the capture."""
        self.was_kept = False

        def deny(is_true: bool) -> bool:
            self.was_kept |= is_true
            return False

        with _answering(deny):
            yield


def pretended() -> AbstractContextManager[None]:
    """Return a context in which whoever asks is told of a capture, though there may be none."""
    return _answering(lambda _: True)


@contextmanager
def _answering(answer: Callable[[bool], bool]) -> Iterator[None]:
    """Answer others than torch and this library by a function of the truth."""
    now = torch.cuda.is_current_stream_capturing
    truth: Callable[[], bool] = vars(now).get(_TRUTH, now)

    @functools.wraps(truth)
    def is_current_stream_capturing() -> bool:
        is_true = truth()
        asks = str(sys._getframe(1).f_globals.get("__name__", ""))
        return is_true if asks.partition(".")[0] in _TOLD else answer(is_true)

    vars(is_current_stream_capturing)[_TRUTH] = truth
    torch.cuda.is_current_stream_capturing = is_current_stream_capturing
    try:
        yield
    finally:
        # Unless another thread, which captures too, has put its own there: that one will.
        if torch.cuda.is_current_stream_capturing is is_current_stream_capturing:
            torch.cuda.is_current_stream_capturing = truth
