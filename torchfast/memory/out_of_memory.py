"""What happens when a step does not fit into memory: an account, and, if wanted, another try.

Torch's own error says how much was asked for and how much was free. What one needs to know is what
the rest was taken for. So the step's `OutOfMemoryGuard` takes an account at that moment and raises
`OutOfMemoryError` with it. The error that torch raised is let go of: its traceback holds the frames
of the step, and these hold its tensors, so whoever caught it would find that nothing was freed.

With ``"split"`` a step that ran out in its forward or backward is done again with each micro-batch
in halves, then in quarters, and so on (see `splitting`). The gradient is the same within rounding,
which is tried out on some samples before (see `split_check`). Nothing has been updated by then;
what the failed try has changed is put back (see `before_step`).
The size that failed is remembered, so later steps of that size begin in parts. A step costs the
time of all its tries, so this is for the rare batch that is too large, and for finding out what
fits; where every batch is too large, a smaller batch with ``accumulate`` does the same without the
copies of the buffers that each step then takes.

An update that ran out is never tried again: it may have updated some parameters already.

Where ranks train together, all of them drop the step of which one has run out, and begin again in
equally many parts (see `split_ranks`).

A capture that ran out has an account as well. Nothing was computed in it, so the step goes on
eagerly, or `CaptureError` is raised, as the options of the graph say.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import CodeType
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfast._core.decisions import Decision
from torchfast._core.errors import CaptureError, OutOfMemoryError
from torchfast._core.loss import LossParts
from torchfast._core.ran_out import OtherRankRanOut
from torchfast.memory.account import MemoryAccount
from torchfast.memory.before_step import BeforeStep
from torchfast.memory.failure import AccountTaker, cause_of, let_go, why_alone, why_never
from torchfast.memory.moment import MomentSource, NoMoments, moments_of
from torchfast.memory.out_of_memory_options import OutOfMemoryOptions
from torchfast.memory.split_ranks import (
    Counts,
    OtherRanks,
    SplitRanks,
    Wish,
    counts_of,
    most_parts,
    pieces_of_all,
)
from torchfast.memory.split_verdicts import SplitVerdicts
from torchfast.memory.splitting import (
    SplitBatch,
    num_elements,
    num_parts,
    parts_of,
    split,
    why_whole,
)

logger = logging.getLogger(__name__)

R = TypeVar("R")
Group = tuple[Any, ...]


class _Failure(NamedTuple):
    """That a try ran out of memory; with no account where it was another rank that did."""

    account: MemoryAccount | None


@final
class OutOfMemoryGuard:
    """Runs a step, and says what was in memory if there was not enough.

    Args:
        model: Whose tensors are named, and whose buffers are put back before another try.
        optimizer: Whose state is named, and whose gradients are dropped after a failure.
        device: Where the step runs.
        options: What to do.
        stages: ``"forward"``, ``"backward"`` or ``"update"`` by the code of the function that does
            it: what a traceback tells the stage by.
        facts: The plan's fields, for the advice.
        others: Returns more tensors by category.
        after_failure: Lets go of what the step has kept of a try.
        loss_of: Runs the loss function on a batch, to find out whether parts make the whole.
        used: Returns what the loss function uses, whose state is put back like buffers.
        in_float8: Whether layers compute in it, which rounds parts otherwise.
        source: Where moments come from, in place of the device.
        ranks: Who runs each step together with this rank; None where nobody does.

    Numerics: Bitwise the step that is run; in parts, the same gradient within rounding.
    Synchronizes: Only where memory ran out; to split with ``ranks``, their hosts in each step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        options: OutOfMemoryOptions,
        *,
        stages: Mapping[CodeType, str],
        facts: Mapping[str, Any] | None = None,
        others: Callable[[], Mapping[str, Iterable[Tensor]]] = dict,
        after_failure: Callable[[], None] = lambda: None,
        loss_of: Callable[[Any], LossParts] | None = None,
        used: Callable[[], Iterable[object]] = tuple,
        in_float8: bool = False,
        source: MomentSource | None = None,
        ranks: OtherRanks | None = None,
    ) -> None:
        self._ranks = None if ranks is None else SplitRanks(ranks)
        self._model, self._optimizer, self._device = model, optimizer, device
        self._options = options
        self._after_failure = after_failure
        self._before = partial(BeforeStep, model, device, used)
        self._verdicts = loss_of and SplitVerdicts(
            loss_of, model, device, in_float8=in_float8, used=used
        )
        history = options.history if options.snapshot is not None else 0
        self._moments = source or moments_of(device, lines=options.lines, history=history)
        self._limit: int | None = None  # elements of the smallest part that did not fit
        self._num_failures = 0
        self._num_split_steps = 0
        self._most_parts = 1
        self._last_account: MemoryAccount | None = None
        # Of the try that is under way: its micro-batches, and what was being handled before.
        self._pieces: Group = ()
        self._outer: BaseException | None = None
        self._num_failed_captures = 0
        self._accounts = AccountTaker(
            model,
            optimizer,
            device,
            options,
            self._moments,
            stages=stages,
            facts=facts or {},
            others=others,
        )
        self._moments.start()

    def run(
        self,
        attempt: Callable[[Group], R],
        group: Group,
        *,
        keeps_gradients: bool = False,
        is_step: bool = True,
    ) -> R:
        """Return ``attempt(group)``.

        Args:
            attempt: A step, or its first half, on micro-batches, each of which may be a
                `SplitBatch`.
            group: The micro-batches.
            keeps_gradients: After a failure ``.grad`` stays: the attempt is an update alone.
            is_step: Whether it counts as a step, should it run in parts.

        Raises:
            OutOfMemoryError: It does not fit, and splitting is not wanted or of no use.
        """
        splits = self._options.action == "split" and not keeps_gradients
        if splits and self._ranks is not None:
            return self._run_with_others(attempt, group, self._ranks, is_step=is_step)
        pieces = self._in_parts(group) if splits else group
        if pieces is not group and self._why_not_alike(group, pieces) is not None:
            pieces = group  # it may fit, and if it does not, that says more
        limit = self._limit
        while True:
            before = self._before() if splits else None
            result, failure = self._try(attempt, pieces)
            if failure is None:
                self._num_split_steps += is_step and pieces is not group
                return result  # type: ignore[return-value]  # a cast is a call, in every step
            # Out here, where the error that torch raised is no longer being handled.
            self._clean_up(keeps_gradients=keeps_gradients)
            account = failure.account
            if before is None or account is None:
                raise self._error(account)
            if why_never(account) is None:
                before.put_back()
            del before
            smaller = self._smaller(group, pieces, account)
            if not isinstance(smaller, str):
                smaller = self._why_not_alike(group, smaller) or smaller
            if isinstance(smaller, str):
                self._limit = limit  # or steps that do fit would run in parts from now on
                raise self._error(account, smaller)
            pieces = smaller
            self._say_again(account.stage, num_parts(pieces))

    def _run_with_others(
        self, attempt: Callable[[Group], R], group: Group, others: SplitRanks, *, is_step: bool
    ) -> R:
        """Return ``attempt(group)``, in as many parts as on the other ranks; see `split_ranks`."""
        limit, ranks = self._limit, others.ranks
        counts, has_fitted, is_split = others.begin(group, limit)
        if is_split and self._why_ranks_not(others, group, counts) is not None:
            counts, has_fitted = (1,) * len(group), False
        is_shared = is_step and not has_fitted
        while True:
            pieces = pieces_of_all(group, counts)
            before = self._before()
            result, failure = self._try(attempt, pieces, ranks.on if is_shared else nullcontext)
            if failure is None:
                self._num_split_steps += is_step and pieces is not group
                if is_shared:
                    others.fits(group, counts)
                return result  # type: ignore[return-value]
            is_told, account = is_shared and ranks.is_told, failure.account
            if is_told:
                ranks.drop()
            self._clean_up(keeps_gradients=False)
            if not is_told:
                raise self._error(account, why_alone(account, is_shared=is_shared))
            before.put_back()
            del before
            wish = self._wish(group, pieces, counts, account)
            counts, accounts, why = others.smaller(wish, self._options.max_parts)
            why = why or self._why_ranks_not(others, group, counts)
            if why is not None:
                self._limit = limit
                raise self._error(account, why, accounts)
            stage = "step of another rank" if account is None else account.stage
            self._say_again(stage, max(counts))

    def after_failed_capture(self) -> None:
        """Take an account if it was memory that a capture has run out of; call as it is handled."""
        error = cause_of(sys.exception(), self._outer)
        if error is None:
            return
        self._num_failed_captures += 1
        self._last_account = self._accounts.take(error, self._pieces, in_capture=True)
        if self._num_failed_captures == 1:  # others are of other shapes, and for the same reason
            logger.warning("%s", self._last_account)

    @property
    def last_account(self) -> MemoryAccount | None:
        """What was in memory when a step or a capture last ran out of it; None if none has."""
        return self._last_account

    def decisions(self) -> list[Decision]:
        """Return what to say in a report; nothing where there is nothing to say."""
        if self._options == OutOfMemoryOptions() and not self._num_failures:
            return []
        detail = "a step that does not fit raises OutOfMemoryError with an account"
        if self._options.action == "split":
            detail = (
                "a step that does not fit is done again in parts; each step copies the buffers"
                f"{self._not_alike()}"
            )
        if self._limit is not None:
            detail += f"; batches of {self._limit} elements and more run in parts"
        if isinstance(self._moments, NoMoments) and (self._options.lines or self._options.snapshot):
            detail += f"; lines and snapshots are not to be had on {self._device}"
        return [Decision(lever="out_of_memory", outcome="applied", detail=detail)]

    def counters(self) -> dict[str, int]:
        """Return tries and captures that ran out, and steps in parts; empty if there were none."""
        counters = {}
        if self._num_failures:
            counters = {
                "out_of_memory": self._num_failures,
                "split_steps": self._num_split_steps,
                "most_parts": self._most_parts,
            }
        if self._num_failed_captures:
            counters["captures_out_of_memory"] = self._num_failed_captures
        return counters

    def close(self) -> None:
        """End the noting of lines; a second call does nothing."""
        self._moments.stop()

    # --- a try -----------------------------------------------------------------------------------

    def _try(
        self,
        attempt: Callable[[Group], R],
        pieces: Group,
        around: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> tuple[R | None, _Failure | None]:
        """Return what the try returned, or that it ran out of memory, here or on another rank."""
        outer = self._outer = sys.exception()
        self._pieces = pieces
        self._moments.open()
        try:
            if around is None:
                return attempt(pieces), None
            with around():
                return attempt(pieces), None
        except OutOfMemoryError:
            raise
        except (torch.OutOfMemoryError, OtherRankRanOut) as error:
            account = None
            if isinstance(error, torch.OutOfMemoryError):
                # While the frames of the try are still alive.
                account = self._last_account = self._accounts.take(error, pieces)
            self._num_failures += 1
            let_go(error, outer)
        except CaptureError as error:
            if (cause := cause_of(error.__cause__, outer)) is not None:
                error.account = self._last_account
                error.add_note(str(self._last_account))
                let_go(cause, outer)
            raise
        except Exception as error:
            if any(isinstance(piece, SplitBatch) for piece in pieces):
                error.add_note(
                    f"raised in a step that runs in {num_parts(pieces)} parts, since it did not "
                    "fit into memory, under out_of_memory='split'"
                )
            raise
        finally:
            self._pieces, self._outer = (), None
            self._moments.close()
        return None, _Failure(account)

    def _clean_up(self, *, keeps_gradients: bool) -> None:
        """Free what a failed try has left: half a gradient is of no use to anybody."""
        self._after_failure()
        torch.clear_autocast_cache()
        if not keeps_gradients:
            self._optimizer.zero_grad(set_to_none=True)
        if self._device.type != "cpu":  # whose memory is not what is short
            gc.collect()

    def _error(
        self, account: MemoryAccount | None, why: str | None = None, of_ranks: str = ""
    ) -> OutOfMemoryError:
        parts = [of_ranks or str(account)]
        if why is not None:
            parts.append(f"  out_of_memory='split' is of no use here: {why}")
        if account is not None and account.stage == "update":
            parts.append(
                "  the update was interrupted, so some parameters may be updated and others not: "
                "load a checkpoint to go on"
            )
        error = OutOfMemoryError("\n".join(parts))
        error.account = account
        return error

    # --- with other ranks ------------------------------------------------------------------------

    def _wish(
        self, group: Group, pieces: Group, counts: Counts, account: MemoryAccount | None
    ) -> Wish:
        """Return what to say behind a try that was dropped: smaller parts, if it was for us."""
        most = most_parts(group)
        if account is None:
            return Wish(wanted=counts, most=most)
        largest = self._limit = max(num_elements(part) for p in pieces for part in parts_of(p))
        wanted, why = tuple(map(max, counts_of(group, largest), counts)), None
        for batch in group:
            if num_elements(batch) >= largest and why is None:
                why = why_whole(batch)
        if why is None and wanted == counts:
            why = "a single sample does not fit"
        return Wish(wanted=wanted, most=most, account=str(account), why_not=why)

    def _why_ranks_not(self, others: SplitRanks, group: Group, counts: Counts) -> str | None:
        """Return why parts would give another gradient on any rank; all ask together."""
        if self._verdicts is None:
            return None
        in_parts = [b for b, count in zip(group, counts, strict=True) if count > 1]
        return self._verdicts.why_not_on_ranks(others, in_parts)

    # --- in parts --------------------------------------------------------------------------------

    def _in_parts(self, group: Group) -> Group:
        """Return the group with what is known not to fit in parts; itself, if all of it may fit."""
        limit = self._limit
        if limit is None:
            return group
        pieces = tuple(
            batch if why_whole(batch) is not None else split(batch, limit) for batch in group
        )
        return group if all(a is b for a, b in zip(pieces, group, strict=True)) else pieces

    def _smaller(self, group: Group, pieces: Group, account: MemoryAccount) -> Group | str:
        """Return the group in smaller parts than those that failed, or why that cannot be."""
        if (why := why_never(account)) is not None:
            return why
        largest = max(num_elements(part) for piece in pieces for part in parts_of(piece))
        self._limit = largest
        for batch in group:
            if num_elements(batch) >= largest and (why := why_whole(batch)) is not None:
                return why
        smaller = self._in_parts(group)
        parts = [part for piece in smaller for part in parts_of(piece)]
        if max(map(num_elements, parts)) >= largest:
            return "a single sample does not fit"
        if (num := num_parts(smaller)) > self._options.max_parts:
            return f"it would take {num} parts, and max_parts={self._options.max_parts}"
        return smaller

    def _why_not_alike(self, group: Group, pieces: Group) -> str | None:
        """Return why parts would give another gradient than the whole; None if none is known."""
        if self._verdicts is None:
            return None
        return self._verdicts.why_not([a for a, b in zip(group, pieces, strict=True) if a is not b])

    def _say_again(self, stage: str, num: int) -> None:
        self._most_parts = max(self._most_parts, num)
        logger.warning(
            "out of memory in the %s; the step is done again in %d parts, and later ones of its "
            "size in as many%s",
            stage,
            num,
            self._not_alike(),
        )

    def _not_alike(self) -> str:
        """Say in what parts differ from the whole, or might."""
        notes = ""
        norm = nn.modules.batchnorm._BatchNorm
        if any(isinstance(m, norm) and m.training for m in self._model.modules()):
            notes = "; BatchNorm in it then sees the statistics of a part, not of the batch"
        latest = self._verdicts.latest if self._verdicts is not None else None
        if latest is not None and latest.other_metrics:
            notes += (
                "; a metric is the mean of those of its parts, which is not that of the whole for "
                f"{', '.join(latest.other_metrics)}"
            )
        why = latest and latest.why_unknown
        if why is not None:
            notes += (
                "; its loss must be a mean over samples or (sum, metrics, weight), which could not "
                f"be tried out: {why}"
            )
        return notes
