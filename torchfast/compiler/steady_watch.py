"""A watch for compilations in the middle of a run.

The first steps of a run compile; after them every step should find its code. One that does not
stops the run for seconds or minutes, and after eight such changes torch compiles no more and the
rest of the run is slow, all without a word. The watch says it once, with what changed.

It looks where the owner tells it to, once a step, for about half a microsecond. A change of mode
(train or eval, gradients recorded or not) is compiled once for each mode, which is as it should be:
of that it warns at the second time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import torch

from torchfast._core.arguments import check_flag, explain_keywords
from torchfast._core.batches import tensors
from torchfast.compiler.dynamic_dimensions import DynamicDimension, argument, mark_dimension

if TYPE_CHECKING:
    from torchfast.compiler.events import CodePlace, LimitReached, Recompile
    from torchfast.compiler.record import CompileRecord

logger = logging.getLogger(__name__)

_MODES = ("training", "global state", "inference mode")
_MARKED = (
    "Of an argument it is marked as dynamic from now on; elsewhere, as in an attribute, keep it "
    "fixed"
)
_ANY_SIZE = "Where it can, torch has made it dynamic"
# Sizes that torch compiles apart, as it says them.
_APART = ("0", "1", "0 or 1")


@final
class SteadyWatch:
    """Warns once when something is compiled again in the steady state of a run.

    Args:
        record: The record that listens.
        mark_dynamic: Note dimensions whose size changed, for `mark`.
        name: Only what belongs to the function whose code object has this name.
        dynamic: As ``torch.compile`` was given it. Unless it is False, torch itself makes a
            dimension dynamic when its size changes, and a mark would only have it compiled once
            more; so it is noted if it changes again.

    Example:
        >>> import torch
        >>> from torchfast import CompileRecord
        >>> record = CompileRecord()
        >>> double = torch.compile(lambda x: x * 2, backend="eager")
        >>> _ = double(torch.ones(3))
        >>> watch = SteadyWatch(record)
        >>> watch.begin()
        >>> _ = double(torch.ones(3))
        >>> watch.check()
        ()
        >>> record.close()
    """

    @explain_keywords
    def __init__(
        self,
        record: CompileRecord,
        *,
        mark_dynamic: bool = False,
        name: str | None = None,
        dynamic: bool | None = False,
    ) -> None:
        from torchfast.compiler.record import CompileRecord

        if not isinstance(record, CompileRecord):
            raise TypeError(f"record must be a CompileRecord, got {type(record).__name__}")
        self._record = record
        self._mark_dynamic = check_flag("mark_dynamic", mark_dynamic)
        self._name, self._dynamic = name, dynamic
        self._is_steady = False
        self._num_noted = 0
        self._num_recompiles = 0
        self._num_limits = 0
        self._recompiles: list[Recompile] = []
        self._dimensions: list[DynamicDimension] = []
        # From which size torch has made a dimension dynamic.
        self._made_dynamic: dict[tuple[CodePlace, DynamicDimension], str | None] = {}
        self._shapes: list[torch.Size] = []  # of the tensors of the last call
        self._changed: set[tuple[int, int]] = set()  # which tensor, which of its dimensions
        self._has_warned = False
        self._has_warned_of_limit = False

    @property
    def is_steady(self) -> bool:
        """Whether `begin` was called."""
        return self._is_steady

    @property
    def recompiles(self) -> tuple[Recompile, ...]:
        """What was compiled again since `begin`, as of the last `check`."""
        return tuple(self._recompiles)

    @property
    def dimensions(self) -> tuple[DynamicDimension, ...]:
        """Dimensions whose size changed, before `begin` too; empty without ``mark_dynamic``."""
        return tuple(self._dimensions)

    def begin(self) -> None:
        """Take the run as steady: what is compiled again from now on is warned of."""
        self._take()
        self._is_steady = True

    def has_news(self) -> bool:
        """Whether anything was compiled, or refused, since the last look."""
        return self._record.has_news() or self._record.num_noted != self._num_noted

    def pass_over(self) -> None:
        """Take what was compiled since the last look as another's, which is not warned of."""
        self._take()

    def check(self) -> tuple[Recompile, ...]:
        """Return what was compiled again since the last call, and warn of the first.

        Synchronizes: Never.
        """
        if not self.has_news():
            return ()
        recompiles, limits = self._take()
        if not self._is_steady:
            return recompiles
        self._recompiles += recompiles
        self._warn(limits)
        return recompiles

    def mark(self, arguments: Mapping[str, Any]) -> int:
        """Mark the dimensions that changed in the arguments of the next call.

        A recompile names one tensor. Others may have changed with it, as targets do with tokens;
        left unmarked, they would fix the size for it as well. So all that differ between calls are
        marked, once a size made something compile again. It takes some 20 microseconds a call.

        Args:
            arguments: By name, as the compiled function names them, such as ``{"batch": batch}``.

        Returns:
            How many were marked.
        """
        try:
            found = [t for t in tensors(dict(arguments)) if not t.is_nested]
        except RecursionError:  # a container that holds itself
            found = []
        shapes = [tensor.shape for tensor in found]
        if len(shapes) == len(self._shapes):
            for place, (shape, before) in enumerate(zip(shapes, self._shapes, strict=True)):
                if shape != before and len(shape) == len(before):
                    self._changed |= {
                        (place, number)
                        for number, (size, earlier) in enumerate(zip(shape, before, strict=True))
                        if size != earlier
                    }
        else:
            self._changed.clear()  # another structure
        self._shapes = shapes
        if not self._dimensions:
            return 0
        wanted = {(id(found[place]), number): found[place] for place, number in self._changed}
        for source, number in self._dimensions:
            tensor = argument(arguments, source)
            if tensor is not None:
                wanted[id(tensor), number] = tensor
        return sum(mark_dimension(tensor, number) for (_, number), tensor in wanted.items())

    def _take(self) -> tuple[tuple[Recompile, ...], tuple[LimitReached, ...]]:
        summary = self._record.summary()
        if self._name is not None:
            summary = summary.of(self._name)
        recompiles = summary.recompiles[self._num_recompiles :]
        limits = summary.limits[self._num_limits :]
        self._num_noted = self._record.num_noted
        self._num_recompiles += len(recompiles)
        self._num_limits += len(limits)
        if self._mark_dynamic:
            for event in recompiles:
                if event.change.kind == "size" and event.change.dimension is not None:
                    self._note(event)
        return recompiles, limits

    def _note(self, event: Recompile) -> None:
        change = event.change
        found = DynamicDimension(change.source, change.dimension or 0)
        if self._dynamic is not False and _is_automatic():
            if change.after in _APART:
                return
            # Equal regions compile one after the other, each from the same size.
            first = self._made_dynamic.setdefault((event.code, found), change.before)
            if change.before == first:
                return
        if found not in self._dimensions:
            self._dimensions.append(found)

    def _warn(self, limits: tuple[LimitReached, ...]) -> None:
        if limits and not self._has_warned_of_limit:
            self._has_warned_of_limit = True
            logger.warning("torch.compile compiles a function no more: %s", limits[0])
        if self._has_warned:
            return
        cause = self._unexpected()
        if cause is None:
            return
        self._has_warned = True
        change = cause.change
        # A size of 0 or 1 is compiled apart, whatever is marked.
        marked = self._mark_dynamic and change.kind == "size" and change.after not in _APART
        found = DynamicDimension(change.source, change.dimension or 0)
        how = _MARKED if found in self._dimensions else _ANY_SIZE
        logger.warning(
            "torch.compile compiled a function again in the middle of the run, which took %.1f s: "
            "%s. Further ones are counted, not warned of",
            cause.seconds,
            f"{cause.cause}. {how}" if marked else cause,
        )

    def _unexpected(self) -> Recompile | None:
        """Return the first recompile that is more than the compilation of another mode."""
        modes = Counter[tuple[object, ...]]()
        for event in self._recompiles:
            change = event.change
            if change.kind not in _MODES:
                return event
            modes[event.code, change.kind] += 1
            if modes[event.code, change.kind] > 1:
                return event
        return None


def _is_automatic() -> bool:
    """Whether torch makes a dimension dynamic when its size changes."""
    from torch._dynamo import config

    return bool(config.automatic_dynamic_shapes)
