"""Pieces of work captured to be timed: what they will take within the graph of a step.

Launched one by one, kernels cost the host; replayed, the device alone. So which of several ways to
do the same work is faster may be another one in a graph than outside of it, and has to be found out
there. `GraphTrials` captures each way as the step will be captured, once it is in force, and hands
out what replays it. `captured_alone` does so with what has no inputs and leaves gradients where
they are, as an optimizer's update.

All graphs of one `GraphTrials` have one memory pool, of their own and none of the step's: only one
of them is replayed at a time, and what a replay has computed is of no use to anybody. So together
they need what the largest needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, final

import torch
from torch import nn
from typing_extensions import override

from torchfast._core.closing import Closing
from torchfast._core.errors import CaptureError
from torchfast.graphs.backend import RoomMadeError, backend_for
from torchfast.graphs.engine import GraphEngine
from torchfast.graphs.named_state import NamedState
from torchfast.graphs.options import CUDAGraphOptions

# Warm-up, then attempts, each of which may run the work once more.
_MOST_CALLS = 8


@final
class GraphTrials(Closing):
    """Captures the same work again and again, as it is done at the time.

    Args:
        work: Runs forward and backward on ``inputs``, with gradients made anew.
        inputs: Nested; copied to memory that the graphs read.
        model: What ``work`` trains.
        found: Modules, tensors and generators that it refers to.
        options: How the step is captured.
        device: Where.
        after_failure: Lets go of what ``work`` has kept of a capture.

    Raises:
        UnsupportedDeviceError: The device has no graphs.

    Numerics: A capture runs the work, and a replay does: buffers and generators go on, gradients
        are none of the caller's. Save them before.
    """

    def __init__(
        self,
        work: Callable[[Any], Any],
        inputs: Any,
        *,
        model: nn.Module,
        found: Sequence[object],
        options: CUDAGraphOptions,
        device: torch.device,
        after_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._work, self._inputs = work, inputs
        self._model, self._found, self._device = model, found, device
        # Whether it does what the work does matters to the step, which compares it, and not here.
        self._options = dataclasses.replace(
            options, warm_up_steps=1, max_graphs=1, check=False, on_failure="raise"
        )
        self._after_failure = after_failure
        self._backend = backend_for(device)
        self._engines: list[GraphEngine] = []

    def capture(self) -> Callable[[], object]:
        """Capture the work as it is done now; return what replays it.

        Raises:
            CaptureError: It cannot be captured, with the reason.

        Synchronizes: Yes.
        """
        engine = GraphEngine(
            self._work,
            NamedState([self._model], found=self._found),
            self._options,
            self._device,
            after_failure=self._after_failure,
            backend=self._backend,
        )
        self._engines.append(engine)
        for _ in range(_MOST_CALLS):
            engine.run(self._inputs)
            if engine.store.graphs:
                break
        else:
            raise CaptureError(
                f"the step was not captured in {_MOST_CALLS} calls: "
                f"{engine.why_eager or 'something about it changes from call to call'}"
            )
        (entry,) = engine.store.graphs
        # Held, they would keep the next graph out of their memory.
        engine.store.release_gradients()
        entry.gradients = []
        return entry.replay

    @override
    def close(self) -> None:
        """Let go of all graphs and their memory; what was handed out must not be called after."""
        engines, self._engines = self._engines, []
        for engine in engines:
            engine.close()
        if engines:
            self._after_failure()


@contextmanager
def captured_alone(
    work: Callable[[], object], device: torch.device
) -> Iterator[Callable[[], object]]:
    """Capture what only reads and writes memory that is there; yield what replays it.

    Args:
        work: Run once before.
        device: Where.

    Raises:
        Exception: What stopped the capture. Nothing of it is left, but the run before it is.
        UnsupportedDeviceError: The device has no graphs.

    Synchronizes: At the capture.
    """
    backend = backend_for(device)
    with backend.side_stream():
        work()
    graph = None
    with suppress(RoomMadeError):  # for another attempt
        graph, _ = backend.capture(work, ())
    if graph is None:  # out here, where nothing holds what has failed
        graph, _ = backend.capture(work, ())
    try:
        yield graph.replay
    finally:
        graph.reset()
