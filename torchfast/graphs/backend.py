"""What captures and replays: CUDA here; in the tests a tape with the same semantics on the CPU.

A capture that fails leaves a mess behind: the stream is still capturing, the allocator still
records, the capture's stream is current, and whatever was drawn or bound in Python stays. So the
stream, the pool and the end of the capture are handled here and not by ``torch.cuda.graph``, whose
exit raises out of the middle of that.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol, final

import torch

from torchfast._core.errors import CaptureError, UnsupportedDeviceError
from torchfast.graphs.cached_memory import CachedMemory
from torchfast.graphs.moments import Moment

# From 2.14 on registering does nothing, and warns.
_REGISTERS_BY_ITSELF = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


class RoomMadeError(CaptureError):
    """A capture ran out of memory, of which the next one finds more."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Run it again, on the current stream."""

    def reset(self) -> None:
        """Let go of it and of its memory."""


class Backend(Protocol):
    """A device that can capture what runs on it.

    Attributes:
        device: Where.
    """

    device: torch.device

    def side_stream(self) -> AbstractContextManager[None]:
        """Run the body where captures run, behind what came before and ahead of what follows."""

    def capture(
        self, body: Callable[[], Any], generators: Sequence[torch.Generator]
    ) -> tuple[Graph, Any]:
        """Capture ``body``, which computes nothing yet; return the graph and what it returned.

        Raises:
            Exception: What stopped it. Device, stream and allocator are as they were before.
        """

    def moment(self) -> Moment:
        """Return what can be put into a capture, and tells when a replay has come to it."""

    def pool_bytes(self) -> int:
        """Return the memory that the graphs hold."""

    def release_scratch(self) -> None:
        """Let go of memory that is kept for eager steps, none of which is to come soon."""


@final
class CUDABackend:
    """Captures into CUDA graphs that share one memory pool.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._num_graphs: Counter[Any] = Counter()  # by pool
        self._cache = CachedMemory(device)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Run the body on the capture's stream.

        AccumulateGrad remembers its stream, so warm-up steps run where the capture will.
        """
        current = torch.cuda.current_stream(self.device)
        if current == self._stream:
            yield
            return
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def capture(
        self, body: Callable[[], Any], generators: Sequence[torch.Generator]
    ) -> tuple[Graph, Any]:
        """Capture ``body`` on the side stream, this thread's calls only."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = self._new_graph(generators)
        torch.cuda.synchronize(self.device)
        # So that the capture makes those it needs in the graph's own pool: others would be freed
        # under a live graph by whoever else lets go of them, as torch.compile's graphs do.
        self._clear_workspaces()
        self._cache.before_capture()
        result = None
        failure: BaseException | None = None
        with self.side_stream(), _no_collection(), _no_recompile():
            try:
                # A loader's thread goes on pinning memory meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                result = body()
            except BaseException as error:
                failure = error
            try:
                graph.capture_end()
            except Exception as error:
                failure = failure or error
        self._clear_workspaces()  # to the pool: what is not captured shall not write there
        if failure is not None:
            self._clean_up(graph, generators)
            try:
                if isinstance(failure, torch.OutOfMemoryError) and self._cache.has_run_out():
                    raise RoomMadeError from failure
                raise failure
            finally:
                del failure  # its traceback refers to this frame
        self._num_graphs[self._pool] += 1
        return _PooledGraph(graph, partial(self._let_go, self._pool)), result

    def moment(self) -> Moment:
        """Return an event that a replay records."""
        return _ExternalEvent(self.device)

    def pool_bytes(self) -> int:
        """Return the bytes that the pool has reserved."""
        if not self._num_graphs:
            return 0
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if s["segment_pool_id"] in self._num_graphs)

    def release_scratch(self) -> None:
        """Let go of what eager steps have left, to libraries and in torch's cache."""
        self._clear_workspaces()
        self._cache.after_check()

    def _clear_workspaces(self) -> None:
        """Let go of the workspaces of cuBLAS: 32 MiB on Hopper for each thread and stream."""
        torch._C._cuda_clearCublasWorkspaces()

    def _let_go(self, pool: Any) -> None:
        """Note that a graph is gone; with the last one its pool is, and cannot be used again."""
        self._num_graphs[pool] -= 1
        if not self._num_graphs[pool]:
            del self._num_graphs[pool]
            if pool == self._pool:
                self._pool = None

    def _clean_up(self, graph: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator]) -> None:
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
        with contextlib.suppress(Exception):
            graph.reset()
        # Never again: what the allocator believes of this pool may be wrong.
        self._pool = None
        gc.collect()
        torch.cuda.synchronize(self.device)
        self._leave_capture_mode(generators)

    def _new_graph(self, generators: Sequence[torch.Generator]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        if _REGISTERS_BY_ITSELF:
            return graph
        for generator in generators:
            if self._is_here(generator):  # torch does not ask, and crashes
                graph.register_generator_state(generator)
        return graph

    def _is_here(self, generator: torch.Generator) -> bool:
        device = generator.device
        if device.type != self.device.type:
            return False
        index = torch.cuda.current_device() if device.index is None else device.index
        return index == self.device.index

    def _leave_capture_mode(self, generators: Sequence[torch.Generator]) -> None:
        """Capture next to nothing: generators believe that the failed capture is still going on."""
        graph = self._new_graph(generators)
        with self.side_stream(), contextlib.suppress(RuntimeError):
            graph.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=self.device)
            graph.capture_end()
        graph.reset()


@final
class _PooledGraph:
    """A CUDA graph that says when it lets go of its pool."""

    def __init__(self, graph: torch.cuda.CUDAGraph, let_go: Callable[[], None]) -> None:
        self.replay = graph.replay
        self._graph = graph
        self._let_go: Callable[[], None] | None = let_go

    def reset(self) -> None:
        if self._let_go is not None:
            self._graph.reset()
            self._let_go()
        self._let_go = None


@final
class _ExternalEvent:
    """An event that is work of the graph, and no mark for the capture alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event(enable_timing=True, external=True)

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def has_passed(self) -> bool:
        return bool(self._event.query())

    def ms_since(self, earlier: Moment) -> float | None:
        assert isinstance(earlier, _ExternalEvent)
        try:
            return float(earlier._event.elapsed_time(self._event))
        except RuntimeError:  # a replay is on its way to one of them
            return None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from freeing other people's device memory in the middle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _no_recompile() -> AbstractContextManager[Any]:
    """Let what torch.compile has not compiled by now fail, where it is in use at all."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("fail_on_recompile")
    return stance


def backend_for(device: torch.device) -> Backend:
    """Return what captures on a device.

    Raises:
        UnsupportedDeviceError: Nothing does.
    """
    if device.type != "cuda":
        raise UnsupportedDeviceError(
            f"there are no graphs on {device.type!r}, only on CUDA; call the step itself, or use "
            "Trainer, which steps aside where there are none"
        )
    return CUDABackend(device)
