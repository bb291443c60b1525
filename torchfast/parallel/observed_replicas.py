"""The collectives of replicas, as a timer of steps sees them.

`DistributedDataParallel` issues its collectives in C++, by calls of a process group. For a step
that is looked at it is given one that notes them and passes them on: the calls, their order and
what is sent are the same, so no number changes, and other steps run as if there were none of this.

A communication hook would see each bucket too, but of every step, and would take the division by
the number of ranks out of the copy into the bucket. What torch itself measures, it reads with a
wait.
"""

from __future__ import annotations

from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from torchfast._core.collectives import Collective, Observation, Wait


@final
class ObservedReplicas:
    """Tells of the collectives of a wrapped model, from `observe` until it is over.

    Args:
        wrapped: What issues them.
    """

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        self._wrapped = wrapped
        self._group = wrapped.process_group
        self._observed = _ObservedGroup(self._group)

    def observe(self, observation: Observation | None) -> None:
        """Note there what is issued from now on; None ends it."""
        self._observed.begin(observation)
        group = self._group if observation is None else self._observed
        # Its own method would have it build its buckets anew.
        self._wrapped.process_group = group
        self._wrapped.reducer._update_process_group(group)


class _ObservedGroup(dist.ProcessGroup):
    """A process group that notes what it passes on to another: all that replicas ask for."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # as C++ has it
        self._group = group
        self.begin(None)

    def begin(self, observation: Observation | None) -> None:
        """Note there what comes."""
        self._observation = observation
        self._gradients: list[Collective] = []  # those of the backward that runs
        self._wait: Wait | None = None

    def getBackendName(self) -> str:  # noqa: N802 - what C++ calls
        return "observed"

    def allreduce(self, *arguments: Any) -> Any:
        work, found = self._started(partial(self._group.allreduce, *arguments))
        if found is not None and torch._C._current_graph_task_id() != -1:
            if not self._gradients:
                # Called when the backward has been computed, before what waits for the gradients:
                # that is put there with the last of them.
                Variable._execution_engine.queue_callback(self._begin_wait)
            self._gradients.append(found)
        return work

    def broadcast(self, *arguments: Any) -> Any:
        work, found = self._started(partial(self._group.broadcast, *arguments))
        if found is not None and self._observation is not None:
            self._observation.wait_for([found])  # of buffers, which are waited for at once
        return work

    def allgather(self, *arguments: Any) -> Any:
        return self._group.allgather(*arguments)

    def barrier(self, *arguments: Any) -> Any:
        return self._group.barrier(*arguments)

    def _started(self, issue: Any) -> tuple[Any, Collective | None]:
        return (issue(), None) if self._observation is None else self._observation.start(issue)

    def _begin_wait(self) -> None:
        gradients, self._gradients = self._gradients, []
        if self._observation is not None:
            self._wait = self._observation.wait_for(gradients)
            if torch._C._current_graph_task_id() != -1:
                Variable._execution_engine.queue_callback(self._end_wait)

    def _end_wait(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None and self._observation is not None:
            self._observation.go_on(wait)
