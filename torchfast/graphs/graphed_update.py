"""One optimizer update as a graph: with the update in it where that is possible, else before it.

Where the update cannot be captured, or where it would change a bit that must not change, the graph
ends with the clipped gradients and the optimizer runs behind it, as ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from torchfast._core.decisions import Decision
from torchfast._core.rank_group import RankGroup
from torchfast.graphs.engine import GraphEngine
from torchfast.graphs.learning_rates import LearningRates
from torchfast.graphs.moments import Times
from torchfast.graphs.named_state import NamedState
from torchfast.graphs.options import CUDAGraphOptions, graph_decision

Half = Callable[[tuple[Any, ...]], Any]


@final
class GraphedUpdate:
    """Runs a step through a graph.

    Args:
        whole: The whole step on a group of micro-batches.
        until_update: The same without the optimizer's ``step()``; None where it cannot be parted.
        model: Trained by it.
        optimizer: Of the update.
        named: What else of state there is, such as a scaler.
        found: Modules, tensors and generators that the loss refers to.
        options: How to capture.
        rate_dtype: Of learning rates on the device, where the optimizer is in a form whose update
            can be in the graph; None where it is not.
        device: Where.
        after_failure: Called when a capture has failed.
        ranks: With whom the step talks.

    Numerics: Bitwise the step, in the form that the optimizer has.
    Synchronizes: At captures.
    """

    def __init__(
        self,
        whole: Half,
        until_update: Half | None,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        named: Sequence[object],
        found: Sequence[object],
        options: CUDAGraphOptions,
        rate_dtype: torch.dtype | None,
        device: torch.device,
        after_failure: Callable[[], None],
        ranks: RankGroup,
    ) -> None:
        self._until_update = until_update
        self._after_failure, self._ranks = after_failure, ranks
        self._model, self._optimizer = model, optimizer
        self._named, self._found = named, found
        self._options, self._device = options, device
        self._decisions: list[Decision] = []
        self._before: Counter[str] = Counter()  # of the graph that had the update in it
        self.is_whole = rate_dtype is not None
        if rate_dtype is not None:
            rates = LearningRates(optimizer, rate_dtype)
            self._graph = self._engine(whole, optimizer, rates=[rates])
        else:
            assert until_update is not None
            self._graph = self._engine(until_update)

    def __call__(self, group: tuple[Any, ...]) -> Any:
        """Run a step, but for the optimizer's ``step()`` unless `is_whole`."""
        output = self._graph(group)
        if self.is_whole and self._graph.varies and self._until_update is not None:
            # Hyperparameters change again and again: from the next step on the update is outside.
            detail = f"the update runs after the graph from now on: {self._graph.why_eager}"
            self._decisions = [graph_decision("stepped aside", detail)]
            self._before = Counter(self._graph.counters())
            self._graph.close()
            self._graph = self._engine(self._until_update)
            self.is_whole = False
        return output

    def rates_on_device(self) -> AbstractContextManager[None]:
        """Let an update outside the graph read the learning rates that the graph reads."""
        return self._graph.rates_on_device() if self.is_whole else nullcontext()

    def decisions(self) -> list[Decision]:
        """Return what was captured, and what was not and why."""
        return [*self._decisions, *self._graph.decisions()]

    def counters(self) -> dict[str, int | float]:
        """Return graphs, replays, eager steps, captures, seconds and bytes."""
        now = self._graph.counters()
        return {name: now[name] + self._before[name] for name in now}

    def phase_times(self) -> list[Times]:
        """Return what phases took in some of the latest replays, in ms, if that is noted."""
        return self._graph.phase_times()

    def settle(self) -> None:
        """Bring what a step outside the graph has replaced back to its place."""
        self._graph.settle()

    def close(self) -> None:
        """Let go of the graphs."""
        self._graph.close()

    def _engine(
        self, fn: Half, *optimizers: Optimizer, rates: Sequence[LearningRates] = ()
    ) -> GraphEngine:
        after = () if optimizers else (self._optimizer,)
        return GraphEngine(
            fn,
            NamedState(
                [self._model, *optimizers, *self._named], found=self._found, updated_after=after
            ),
            self._options,
            self._device,
            rates=rates,
            keep_gradients=not optimizers,
            after_failure=self._after_failure,
            ranks=self._ranks,
        )
