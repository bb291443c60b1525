"""In what a kind of call is captured, and in what it is tried again where that has failed.

A capture of the step as it is comes first, of which nobody is told. What is in the way of it tells
what may help: constants in place of copies from the host, draws on the host that are noted, answers
on the host to what never changes; and, last, whoever asks is told of the capture.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from torchfast.graphs.constants import HostConstants, has_compiled_code
from torchfast.graphs.failures import IF_CONSTANT, LETS_GO, NOT_NOW, Failure
from torchfast.graphs.host_draws import HostDraws
from torchfast.graphs.host_shadows import HostShadows
from torchfast.graphs.options import CUDAGraphOptions
from torchfast.graphs.replay_check import Told
from torchfast.graphs.secrecy import Secret

# Captures of one kind of call that may fail.
ATTEMPTS = 3
# So many times gradients of before may be in the way.
_PATIENCE = 10


@final
@dataclass(eq=False)
class Manner:
    """How a kind of call is captured.

    Attributes:
        attempts: Captures that failed since the latest that did not.
        num_not_now: Times that it was to be captured and gradients of before were in the way.
        secret: That it is being captured; None where that is told to whoever asks.
        told: That it was told, and how near it is to a step that was not.
        has_shadows: Whether reads on the host are answered where they can be.
        shadows: What answered them in the latest capture.
        constants: What it copies from the host, once a capture has failed for that.
        draws: What it draws on the host, likewise.
        refusal: That failure.
        is_one: Whether it is one step, so that another attempt costs the Python of one.
    """

    attempts: int = 0
    num_not_now: int = 0
    secret: Secret | None = field(default_factory=Secret)
    told: Told | None = None
    has_shadows: bool = False
    shadows: HostShadows | None = None
    constants: HostConstants | None = None
    draws: HostDraws | None = None
    refusal: Failure | None = None
    is_one: bool = True

    @contextmanager
    def surroundings(self, device: torch.device) -> Iterator[None]:
        """Let the step run in a capture as it would without."""
        self.shadows = None
        with ExitStack() as stack:
            if self.secret is not None:
                stack.enter_context(self.secret.kept())
                if self.has_shadows:
                    self.shadows = stack.enter_context(HostShadows(device))
            if self.constants is not None and self.constants.is_recorded:
                stack.enter_context(self.constants.standing_in())
            if self.draws is not None:
                stack.enter_context(self.draws.noting())
            yield

    @property
    def note(self) -> str:
        """When it is not replayed, and what is frozen in it, in words."""
        found = ", where draws on the host come out as in the capture" if self.draws else ""
        if number := len(self.constants or ()):
            found += f"; constants copied from the host: {number}"
        if self.shadows is not None and self.shadows.num_reads:
            found += f"; constants read on the host: {self.shadows.num_reads}"
        if self.told is not None and self.told.gap is not None:
            found += f"; told of the capture, it returns what is {self.told.gap:.1e} apart"
        return found

    def take_after(self, one: Manner, num_steps: int) -> None:
        """Let several steps begin with what is known of one."""
        self.is_one = False
        if one.secret is None:
            self.secret, self.told = None, Told()
        self.has_shadows = one.has_shadows
        known = one.constants
        self.constants = None if known is None else known.of_steps(num_steps)

    def before_another(
        self,
        failure: Failure,
        options: CUDAGraphOptions,
        device: torch.device,
        inputs: Sequence[Tensor],
        *,
        is_alone: bool,
    ) -> AbstractContextManager[None] | None:
        """Return in what this step is to run before another attempt; None if none is to come."""
        if self._notes_draws(failure, is_alone=is_alone):
            return nullcontext()
        if failure.reason in (NOT_NOW, LETS_GO) and self.is_one:
            self.num_not_now += 1
            return nullcontext() if self.num_not_now < _PATIENCE else None
        if is_alone and self._may_be_shadowed(failure):
            self.has_shadows = True
            return nullcontext()
        # Before it is told of the capture: whoever is told may compute otherwise.
        is_to_record = self._may_be_constants(failure, options)
        if not is_to_record and not failure.is_passing and self._is_to_be_told(failure):
            self.secret = self.constants = None  # which were those of the other way
            self.told = Told()
            return nullcontext()
        self.attempts += 1
        if self.attempts >= ATTEMPTS:
            return None
        if failure.is_passing:
            gc.collect()
            return nullcontext()
        if is_to_record:
            self.constants = HostConstants(device, vouched_for=options.host_constants is True)
            return self.constants.recording(inputs)
        return None

    def _may_be_shadowed(self, failure: Failure) -> bool:
        """Whether what the host waits for may be known there, so that nobody need be told.

        Not from the first: some of torch's layers compute another way under a mode.
        """
        is_kept = self.secret is not None and self.secret.was_kept
        is_untried = self.is_one and not self.has_shadows
        # Collectives write to what they get, and not all of them pass through torch's functions.
        is_alone = not (dist.is_available() and dist.is_initialized())
        return failure.is_wait and is_kept and is_untried and is_alone and not has_compiled_code()

    def _may_be_constants(self, failure: Failure, options: CUDAGraphOptions) -> bool:
        """Whether what is copied from the host may be taken for constants, and was not yet."""
        is_tried = self.constants is not None and self.constants.is_recorded
        if not failure.is_copy or is_tried or not self.is_one:
            return False
        if options.host_constants == "auto":
            return not has_compiled_code()
        return options.host_constants

    def _is_to_be_told(self, failure: Failure) -> bool:
        """Whether telling of the next capture may help: who asked, or compiled code that asks."""
        return self.secret is not None and (self.secret.was_kept or failure.is_recompile)

    def _notes_draws(self, failure: Failure, *, is_alone: bool) -> bool:
        """Whether the next capture may succeed by noting draws on the host; then it does."""
        if self.draws is not None or not failure.is_draw or not self.is_one:
            return False
        self.draws, self.refusal = HostDraws(is_alone=is_alone), failure
        return True

    def explained(self, failure: Failure) -> Failure:
        """Return the failure to be told of: compiled code may mind only that draws are noted."""
        if self.refusal is not None and failure.is_recompile:
            return self.refusal
        is_untried = self.constants is None and self.is_one
        if failure.is_copy and failure.remedy is not None and is_untried:
            return replace(failure, remedy=f"{failure.remedy}; or, {IF_CONSTANT}")
        return failure
