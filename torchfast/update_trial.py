"""Whether a compiled update is faster than the one as it is, and computes the same.

Both run on the real parameters, state and gradients, and all of these are put back, bit for bit.
The result is judged by what an update changes, not by the parameters, in which a wrong update of a
small learning rate would not be seen. Where a graph will hold the update, both are timed as
replays of graphs of their own: launched kernel by kernel, the host may set the pace.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

from torchfast._core.building import optimized
from torchfast._core.errors import CompileError
from torchfast._core.measure import Measurement, measure
from torchfast.graphs import NamedState, SavedNamedState

if TYPE_CHECKING:
    from torchfast.graphs import InGraph

logger = logging.getLogger(__name__)

# Of the largest change in a tensor, how much a compiled update may be off; and so many roundings of
# the values themselves.
UPDATE_TOLERANCE: Final = 1e-3
ROUNDINGS: Final = 4.0
# The most that timing is worth.
_MOST_TIMING_S: Final = 30.0
WAYS: Final = ("eager", "compiled")
# Values that nothing changes in place.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class UpdateTrial(NamedTuple):
    """What was found out.

    Attributes:
        is_better: Whether the compiled update is right, and faster beyond the noise; None where
            that cannot be told now, but perhaps at a later update.
        why: In words.
        measured: The times of the two ways, where it came to that; None where they were not timed
            as they are to run, which another run may manage.
    """

    is_better: bool | None
    why: str
    measured: Measurement | None = None


def try_update(
    optimizer: Optimizer,
    *,
    eager: Callable[[], object],
    compiled: Callable[[], bool],
    why_failed: Callable[[], str | None],
    device: torch.device,
    budget_s: float,
    in_graph: InGraph | None = None,
) -> UpdateTrial:
    """Compare two ways to run an update, and leave everything as it was.

    An update that makes state, which the next one finds, tells nothing, nor do values that are not
    finite. Where memory runs out, the update stays as it is.

    Args:
        optimizer: With state and gradients.
        eager: Runs the update as it is.
        compiled: Runs it compiled, and returns whether it ran.
        why_failed: Returns why it cannot be compiled; None if it can.
        device: Where.
        budget_s: The longest that timing may take.
        in_graph: Captures a way by itself; None times them launched kernel by kernel. So they are,
            too, where one cannot be captured.

    Synchronizes: Often.
    """
    if (name := _lost(optimizer)) is not None:
        return UpdateTrial(
            False,
            f"not measured, as {name!r} of the optimizer could not be put back; True compiles it",
        )
    with suppress(torch.OutOfMemoryError):
        return _compare(
            optimizer, eager, compiled, why_failed, device, min(budget_s, _MOST_TIMING_S), in_graph
        )
    # Out here, where nothing holds the frames of what has failed.
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return UpdateTrial(
        False, "not measured, as memory ran out beside two copies of the state; True compiles it"
    )


def _compare(
    optimizer: Optimizer,
    eager: Callable[[], object],
    compiled: Callable[[], bool],
    why_failed: Callable[[], str | None],
    device: torch.device,
    budget_s: float,
    in_graph: InGraph | None,
) -> UpdateTrial:
    """Run both, and put everything back, also where one raises."""
    gradients = [p.grad for p in optimized(optimizer) if p.grad is not None]
    facts = dict(vars(optimizer))  # a count of updates, say
    state = NamedState([optimizer])
    start = SavedNamedState(state, device, gradients)

    def after(update: Callable[[], object]) -> list[Tensor]:
        try:
            update()
            return SavedNamedState(state, device).tensors()
        finally:
            put_back()

    # Those of a graph are watched for changes, and the update does not change them.
    rates = tuple(g["lr"] for g in optimizer.param_groups if isinstance(g["lr"], Tensor))

    def put_back() -> None:
        with _unsafe_preserve_version_counter(rates):
            start.put_back()
        vars(optimizer).clear()
        vars(optimizer).update(facts)

    try:
        expected = after(eager)
        if len(expected) + len(gradients) != len(start.tensors()):
            return UpdateTrial(None, "an update made state of the optimizer's")
        if not all(bool(t.isfinite().all()) for t in expected):
            return UpdateTrial(
                None, "the gradients, or what an update makes of them, are not finite"
            )
        has_run: list[bool] = []
        found = after(lambda: has_run.append(compiled()))
        if not has_run[0]:
            return UpdateTrial(False, why_failed() or "nothing was compiled")
        if (objection := _objection(start.tensors(), expected, found)) is not None:
            return UpdateTrial(False, f"compiled it computes something else: {objection}")

        def surely_compiled() -> None:
            if not compiled():  # which takes no time at all
                raise CompileError(why_failed())

        with ExitStack() as graphs:
            ways, why_launched = _timed((eager, surely_compiled), in_graph, graphs)
            measured = measure(
                dict(zip(WAYS, ways, strict=True)),
                reference=WAYS[0],
                device=device,
                budget_s=budget_s,
            )
    finally:
        put_back()
    if "compiled" in measured.failed:
        return UpdateTrial(False, f"compiled it failed: {measured.failed['compiled']}")
    ratio = measured.ratio("compiled")
    if math.isinf(ratio.high):
        return UpdateTrial(
            False, f"not measured, as {budget_s:g} s did not suffice to tell; True compiles it"
        )
    figures = f"{ratio.ratio:.3f} of the time as it is ({ratio.low:.3f} to {ratio.high:.3f})"
    if why_launched is not None:
        figures += f" launched kernel by kernel, since no graph held it ({why_launched})"
    elif in_graph is not None:
        figures += " in a graph"
    kept = measured if why_launched is None else None
    if ratio.verdict == "faster":
        return UpdateTrial(True, f"it takes {figures}", kept)
    return UpdateTrial(False, f"compiled it was not faster beyond the noise: {figures}", kept)


def _timed(
    ways: tuple[Callable[[], object], ...], in_graph: InGraph | None, graphs: ExitStack
) -> tuple[tuple[Callable[[], object], ...], str | None]:
    """Return what is to be timed, and the error for which that is no replays, if there is one."""
    if in_graph is None:
        return ways, None
    try:
        with ExitStack() as captured:
            replays = tuple(captured.enter_context(in_graph(way)) for way in ways)
            graphs.push(captured.pop_all())
        return replays, None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of the optimizer, the compiler or the device
        # The step's own capture will tell what is wrong, if it is.
        logger.debug("an update is timed launched kernel by kernel", exc_info=error)
        return ways, type(error).__name__


def _lost(optimizer: Optimizer) -> str | None:
    """Return what an optimizer holds of its own that an update may change for good; or None."""
    known = vars(Optimizer([torch.zeros(1)], {}))
    for name, value in vars(optimizer).items():
        if name not in known and not callable(value) and not isinstance(value, _PLAIN):
            return name
    return None


def _objection(start: list[Tensor], expected: list[Tensor], found: list[Tensor]) -> str | None:
    """Return what differs by more than rounding; None if nothing does."""
    # The start has the gradients behind the state.
    for before, wanted, got in zip(start, expected, found, strict=False):
        if not wanted.is_floating_point():
            if not torch.equal(wanted, got):
                return "a counter or flag differs"
            continue
        if not wanted.numel():
            continue
        wanted_64, got_64, before_64 = (t.double() for t in (wanted, got, before))
        gap = float((got_64 - wanted_64).abs().amax())
        change = float((wanted_64 - before_64).abs().amax())
        rounding = ROUNDINGS * torch.finfo(wanted.dtype).eps * float(wanted_64.abs().amax())
        # Written so that a NaN is not within anything.
        if not gap <= UPDATE_TOLERANCE * change + rounding:
            return f"it is {gap:.2g} off where the update as it is changes {change:.2g}"
    return None
