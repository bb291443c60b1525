"""Whether compiled code pays that no graph can hold, found out on the training's own steps.

A graph of compiled code is hardly ever slower than what it was made of. Without one it may be: each
piece between two graph breaks has guards to check, and where the host is what a step waits for,
that costs more than fused kernels give. And the same step, not compiled, may be one that a graph
can hold: a number drawn on the host for a layer that is skipped now and then is understood in plain
code, and not in what torch has made of it.

So where ``compile="auto"`` has compiled a step that is not captured, some steps of the training are
timed: compiled, and as they are, captured if they can be. What is faster stays. No step is done
twice, and none is lost; between the two ways they differ by rounding, as they do in any case. Under
deterministic algorithms nothing is timed, since a choice by time is none that a second run repeats.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING, Final, final

import torch

from torchfast._core.device import drain
from torchfast.compiled_loss import CompiledLoss

if TYPE_CHECKING:
    from torchfast.graphs import GraphedUpdate

logger = logging.getLogger(__name__)

_ROUNDS: Final = 3
_TIMED: Final = 3  # steps of a round, each way
# A capture that failed in the update is tried once more without it.
_CAPTURES: Final = 2

Course = Generator[bool, float, None]


@final
class CompileTrial:
    """Surrounds each step, and times some of them.

    Args:
        compiled: What is compiled of the step.
        graph: What the step runs through; None if nothing is captured.
        device: Where it runs.

    Synchronizes: Around the steps that are timed: some twenty of the first forty, once.
    """

    def __init__(
        self, compiled: CompiledLoss, graph: GraphedUpdate | None, device: torch.device
    ) -> None:
        self._compiled, self._graph, self._device = compiled, graph, device
        is_due = compiled.may_step_aside and not torch.are_deterministic_algorithms_enabled()
        self._course: Course | None = self._run() if is_due else None
        self._is_timed = self._course is not None and next(self._course)
        self._started = 0.0

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be found out."""
        return self._course is None

    def __enter__(self) -> None:
        if self._is_timed:
            self._started = self._now()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._course is None or kind is not None:  # a step that failed is another one's affair
            return
        try:
            self._is_timed = self._course.send(
                self._now() - self._started if self._is_timed else 0.0
            )
        except StopIteration:
            self._course = None

    def _now(self) -> float:
        drain(self._device)
        return time.perf_counter()

    def _run(self) -> Course:
        """Yield before each step whether it is to be timed; take what it took."""
        warm_up = 1 if self._graph is None else self._graph.warm_up_steps + 1
        for _ in range(_CAPTURES * warm_up + 1):
            yield False
        why = self._why_due()
        if why is None:
            return
        as_compiled, as_it_is = list[float](), list[float]()
        yield from _timed(as_compiled)
        self._compiled.suspend()
        if self._graph is not None:
            self._graph.begin_anew()
        for _ in range(_CAPTURES * warm_up):
            yield False
        for number in range(_ROUNDS):
            if number:
                self._change(is_compiled=True)
                yield False
                yield from _timed(as_compiled)
                self._change(is_compiled=False)
            yield False
            yield from _timed(as_it_is)
        compiled_ms, plain_ms = (1e3 * statistics.median(t) for t in (as_compiled, as_it_is))
        is_captured = self._graph is not None and self._graph.failure is None
        form = "captured as it is" if is_captured else "as it is"
        times = f"{compiled_ms:.3g} ms compiled, {plain_ms:.3g} ms {form}"
        logger.info("a step took %s", times)
        if plain_ms < compiled_ms:
            self._compiled.step_aside(f"{times}. Compiled, it was {why}")
            return
        self._change(is_compiled=True)
        self._compiled.stay(times)
        if self._graph is not None:
            yield False  # whose gradients are in no graph's memory
            self._graph.pass_by(f"the step runs compiled, which is faster: {times}; {why}")

    def _why_due(self) -> str | None:
        """Return what is wrong with the compiled step; None if nothing is."""
        if self._graph is not None:
            return None if self._graph.failure is None else f"not captured: {self._graph.failure}"
        num_breaks = self._compiled.num_breaks
        return f"in pieces, by {num_breaks} graph breaks" if num_breaks else None

    def _change(self, *, is_compiled: bool) -> None:
        if self._graph is not None:
            self._graph.is_passed_by = is_compiled
        if is_compiled:
            self._compiled.resume()
        else:
            self._compiled.suspend()


def _timed(times: list[float]) -> Course:
    for _ in range(_TIMED):
        took_s = yield True
        times.append(took_s)
