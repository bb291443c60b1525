"""One optimizer update as a graph: with the update in it where that is possible, else before it.

Where the update cannot be captured, or where it would change a bit that must not change, the graph
ends with the clipped gradients and the optimizer runs behind it, as ever. So it does where a
capture has failed in the update: a hook of the optimizer's, say, makes the host wait, or counts.
And where a replay returns what it should and is wrong behind that.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from torchfast._core.closing import Closing
from torchfast._core.decisions import Decision
from torchfast._core.rank_group import RankGroup
from torchfast._core.reachable import held_by
from torchfast.graphs.engine import GraphEngine
from torchfast.graphs.failures import Failure
from torchfast.graphs.learning_rates import LearningRates
from torchfast.graphs.moments import Times
from torchfast.graphs.named_state import NamedState
from torchfast.graphs.options import CUDAGraphOptions, graph_decision
from torchfast.graphs.signature import Several
from torchfast.graphs.together import Together
from torchfast.graphs.trials import GraphTrials, captured_alone
from torchfast.graphs.unrolled_update import UnrolledUpdate

logger = logging.getLogger(__name__)

Half = Callable[[tuple[Any, ...]], Any]
InGraph = Callable[[Callable[[], object]], AbstractContextManager[Callable[[], object]]]


def _as_it_is(output: Any) -> Any:
    """Return what both halves return: they have made it safe to keep."""
    return output


@final
class GraphedUpdate(Closing):
    """Runs a step through a graph.

    Args:
        whole: The whole step on a group of micro-batches.
        until_update: The same without the optimizer's ``step()``; None where it cannot be parted.
        model: Trained by it.
        optimizer: Of the update.
        named: What else of state there is, such as a scaler.
        loss_fn: The user's, for what it refers to.
        options: How to capture.
        rate_dtype: Of learning rates on the device, where the optimizer is in a form whose update
            can be in the graph; None where it is not.
        device: Where.
        after_failure: Called when a capture has failed.
        after_trial: Called when one of `trials` has, and behind them: a step that was only tried
            lets go of what it has kept, and nobody is told.
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
        loss_fn: Callable[..., Any],
        options: CUDAGraphOptions,
        rate_dtype: torch.dtype | None,
        device: torch.device,
        after_failure: Callable[[], None],
        after_trial: Callable[[], None],
        ranks: RankGroup,
    ) -> None:
        self._whole, self._until_update = whole, until_update
        # One for all graphs of the step: what is parted here only is captured by all ranks anew.
        self._after_failure, self._together = after_failure, Together(ranks)
        ranks.holds_graphs(self)
        self._after_trial = after_trial
        self._is_updating = self._failed_in_update = False
        self._is_same_so_far = self._changed_in_update = False
        self._model, self._optimizer = model, optimizer
        self._named, self._loss_fn = named, loss_fn
        self._options, self._device = options, device
        self._decisions: list[Decision] = []
        self._before: Counter[str] = Counter()  # of graphs that are closed
        self._rate_dtype, self.is_passed_by = rate_dtype, False
        self._graph = self._begun()

    def _begun(self) -> GraphEngine:
        self.is_whole = self._rate_dtype is not None
        self._unrolled: UnrolledUpdate | None = None  # several steps at once, if it is whole
        if self._rate_dtype is None:
            assert self._until_update is not None
            return self._engine(self._until_update)
        rates = LearningRates(self._optimizer, self._rate_dtype)
        graph = self._engine(self._noting_updates, self._optimizer, rates=[rates])
        self._unrolled = UnrolledUpdate(graph, rates, self._noting_updates)
        return graph

    def run(self, group: tuple[Any, ...]) -> Any:
        """Run a step, but for the optimizer's ``step()`` unless `is_whole`."""
        self._failed_in_update = self._changed_in_update = False
        failed_before = self._graph.failure
        output = self._graph.run(group)
        if self.is_whole and self._until_update is not None:
            if self._graph.varies:
                # Hyperparameters change again and again: from the next step on it is outside.
                self._part(self._graph.why_eager)
            elif self._together.is_alone and self._graph.failure is not failed_before:
                self._part_if_it_helps()
        return output

    def _part_if_it_helps(self) -> None:
        """Part the update from the rest if it is what keeps this kind of call from a graph."""
        if (failure := self.failure) is None:
            return
        why = None
        is_of_update = self._failed_in_update or failure.is_of_update
        if is_of_update or (failure.is_change and self._changed_in_update):
            why = f"it could not be captured: {failure}"
        elif failure.is_later:
            why = f"in a graph it computes something else: {failure}"
        if why is not None:
            logger.warning("cuda_graph: forward and backward will be captured without the update")
            self._part(why)

    def update_begins(self) -> None:
        """Be told that the gradients are clipped, and what follows is the update."""
        if self.is_whole and (facts := self._graph.facts) is not None:
            self._is_same_so_far = facts.changes(before_update=True) is None
        self._is_updating = True

    def _noting_updates(self, group: tuple[Any, ...]) -> Any:
        if self._unrolled is not None and type(group) is Several:
            return self._unrolled(group)
        self._is_updating = self._is_same_so_far = False
        output = self._whole(group)
        self._is_updating = False
        return output

    def _note_failure(self) -> None:
        self._failed_in_update = self._is_updating
        self._changed_in_update = self._is_same_so_far
        self._is_updating = False
        self._after_failure()

    def _part(self, why: str | None) -> None:
        """Let the update run behind a graph of its own kind from the next step on."""
        detail = f"the update runs after the graph from now on: {why}"
        self._decisions = [graph_decision("stepped aside", detail)]
        self._close_graph()
        assert self._until_update is not None
        self._graph = self._engine(self._until_update)
        self.is_whole, self._unrolled = False, None

    @property
    def unrolled(self) -> UnrolledUpdate | None:
        """What runs several steps in one replay; None where nothing does."""
        return None if self.is_passed_by else self._unrolled

    @property
    def failure(self) -> Failure | None:
        """Why nothing is captured; None if some kind of call is, or may yet be."""
        return None if self._graph.store.graphs else self._graph.failure

    @property
    def warm_up_steps(self) -> int:
        """How many steps come before a capture."""
        return self._options.warm_up_steps

    def begin_anew(self) -> None:
        """Forget what could not be captured, since steps are other ones from now on."""
        self._decisions = []
        self._close_graph()
        self._graph = self._begun()

    def pass_by(self, why: str) -> None:
        """Let go of the graphs: nothing is replayed any more."""
        self.is_passed_by = True
        self._decisions = [graph_decision("stepped aside", why)]
        self._graph.close()

    def _close_graph(self) -> None:
        self._graph.close()
        self._before += Counter(self._graph.counters())

    def rates_on_device(self) -> AbstractContextManager[None]:
        """Let an update outside the graph read the learning rates that the graph reads."""
        return self._graph.rates_on_device() if self.is_whole else nullcontext()

    def side_stream(self) -> AbstractContextManager[None]:
        """Return the context of the stream that steps are captured on, and run on before."""
        return self._graph.backend.side_stream()

    def decisions(self) -> list[Decision]:
        """Return what was captured, and what was not and why."""
        return [*self._decisions, *([] if self.is_passed_by else self._graph.decisions())]

    def counters(self) -> dict[str, int | float]:
        """Return graphs, replays, eager steps, captures, seconds and bytes."""
        now = self._graph.counters()
        return {name: now[name] + self._before[name] for name in now}

    def phase_times(self) -> list[Times]:
        """Return what phases took in some of the latest replays, in ms, if that is noted."""
        return self._graph.store.phase_times()

    def trials(self, work: Half, group: tuple[Any, ...]) -> GraphTrials:
        """Return what captures a part of the step, done one way or another, to be timed.

        Args:
            work: Runs forward and backward of a group of micro-batches.
            group: The group.
        """
        return GraphTrials(
            work,
            group,
            model=self._model,
            found=held_by(self._loss_fn),
            options=self._options,
            device=self._device,
            after_failure=self._after_trial,
        )

    def update_alone(self) -> InGraph | None:
        """Return what captures ways to update by themselves; None where no graph holds updates."""
        if self.is_passed_by or not self.is_whole or self._graph.why_eager is not None:
            return None
        kinds = self._graph.store.entries.values()
        if kinds and all(kind.why_eager is not None for kind in kinds):
            return None
        return partial(captured_alone, device=self._device)

    def settle(self) -> None:
        """Bring what a step outside the graph has replaced back to its place."""
        self._graph.settle()

    @override
    def close(self) -> None:
        """Let go of the graphs; a second call does nothing."""
        self._graph.close()

    def _engine(
        self, fn: Half, *optimizers: Optimizer, rates: Sequence[LearningRates] = ()
    ) -> GraphEngine:
        after = () if optimizers else (self._optimizer,)
        return GraphEngine(
            fn,
            NamedState(
                [self._model, *optimizers, *self._named],
                found=held_by(self._loss_fn),
                updated_after=after,
                function=self._loss_fn,
            ),
            self._options,
            self._device,
            rates=rates,
            keep_gradients=not optimizers,
            make_safe=_as_it_is,
            after_failure=self._note_failure,
            together=self._together,
        )
