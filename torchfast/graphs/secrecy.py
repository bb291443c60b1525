"""A capture that nobody is told of, so that a model computes in it what it computes without.

Some code asks torch whether it is being captured, and then computes another way, mostly to keep the
host from waiting: transformers makes another attention mask, for which another kernel runs, with
other bits. A graph of that is not the step. So while a step is captured, whoever asks is told no.
torch is told the truth, and so is this library: their checks are about captures.

Where the host then waits, or whatever else ends the capture, the next one is told of.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch

_TOLD = ("torch", "torchfast")


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
        """Keep it within the body. Other threads capture nothing, and hear so."""
        truth = torch.cuda.is_current_stream_capturing

        @functools.wraps(truth)
        def is_current_stream_capturing() -> bool:
            is_true = truth()
            asks = str(sys._getframe(1).f_globals.get("__name__", ""))
            if not is_true or asks.partition(".")[0] in _TOLD:
                return is_true
            self.was_kept = True
            return False

        torch.cuda.is_current_stream_capturing = is_current_stream_capturing
        try:
            yield
        finally:
            torch.cuda.is_current_stream_capturing = truth
