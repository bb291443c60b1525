"""ParallelBranches: independent branches of a computation, side by side on streams of their own.

A device runs what one stream asks for in order: a kernel that fills a tenth of the device keeps the
other nine tenths waiting. The experts of a mixture, the towers of a recommender or the heads of a
detector do not depend on each other, and on several streams their kernels run at the same time:

- **Fork.** An event on the current stream; each side stream waits for it.
- **Branches.** The functions run on the host in order, each on its side stream, in turn.
- **Join.** The current stream waits for all side streams, also when a branch raised.

Autograd runs each backward on the stream of its forward and orders streams where gradients cross,
so the backward forks and joins by itself. On the host it runs in the order of the forward turned
round, on one thread for the device, and so it adds up the gradients of what several branches use:
nothing in that depends on which stream is faster. Random numbers are dealt out on the host too.

Memory is what goes wrong without a word. The allocator gives freed memory to the next request of
the stream that it was allocated on, at once, and knows nothing of other streams that still read it.
The rules here:

- No branch runs on the current stream. So between fork and join nothing is allocated there, and
  what the branches read cannot be handed out again before the join.
- Each input is recorded for the streams that read it. The backward reads saved tensors on a side
  stream and then lets go of them, and no join comes before the next request of the other stream.
- Each output is recorded for the current stream: a backward on the side stream waits for its own
  gradient only, not for others that still read an output whose memory it takes.
- Gradients that cross from stream to stream are recorded by autograd itself. What is saved on a
  side stream is read and freed there.
- Autograd adds up in place, in the first gradient that arrives, once the host has no other use of
  it. A branch that passes a gradient on unchanged (``x + f(z)``) may still be reading it. So in the
  backward the current stream waits for each branch before the next one begins.

In a capture an event cannot tell that it has passed. So memory that was recorded and freed is not
used again in that graph: exact, but inputs, outputs and gradients of branches stay for themselves
in the graph's pool. ``PYTORCH_CUDA_ALLOC_CONF=graph_capture_record_stream_reuse:True`` lets the
allocator look at the graph instead. To leave the recording out would let two kernels of the graph
that have no order write and read the same memory.

It helps where single kernels leave most of the device idle, above all in a graph, where the host is
no limit. It does not help large kernels, and an eager step that waits for the host gets slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchfast._core import batches
from torchfast._core.arguments import (
    check_callable,
    check_int,
    check_iterable,
    explain_keywords,
)
from torchfast._core.reachable import held_by
from torchfast._core.stream_context import DeviceStreams

_MOST_STREAMS = 32


class SideStreams(Protocol):
    """What a device must do for branches to run side by side."""

    def new(self) -> Any:
        """Return another stream."""

    def current(self) -> Any:
        """Return the stream that this thread enqueues on."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Let the body enqueue on a stream."""

    def fork(self, current: Any, streams: Sequence[Any]) -> None:
        """Let streams wait for what is enqueued on the current one."""

    def join(self, current: Any, streams: Sequence[Any]) -> None:
        """Let the current stream wait for what is enqueued on the others."""

    def record(self, tensor: Tensor, stream: Any) -> None:
        """Keep the memory of a dense tensor, once freed, until the stream has come to there."""


@final
class CUDASideStreams(DeviceStreams):
    """Streams of a CUDA device.

    Args:
        device: With its index.
    """

    def fork(self, current: torch.cuda.Stream, streams: Sequence[torch.cuda.Stream]) -> None:
        """Let streams wait for the current one; in a capture this takes them into it."""
        ready = current.record_event()
        for stream in streams:
            stream.wait_event(ready)

    def join(self, current: torch.cuda.Stream, streams: Sequence[torch.cuda.Stream]) -> None:
        """Let the current stream wait; no capture may end before this."""
        for stream in streams:
            current.wait_stream(stream)

    def record(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Tell the allocator."""
        if tensor.is_cuda and tensor.device == self._device:
            tensor.record_stream(stream)


@final
class ParallelBranches:
    """Runs functions that do not depend on each other side by side on a CUDA device.

    Make one and give it to all modules that need it: torch has 32 streams for each device and then
    deals out the same ones again. It may be an attribute of a module; a copy of it, or what is
    unpickled, is a new one without streams. Streams are made at the first use.

    The functions must be independent: none writes what another reads or writes, in forward or
    backward, but for gradients, which autograd adds up in order. Inputs should be arguments; in
    closures, default values and ``functools.partial`` they are found too. A tensor that was
    computed on the current stream, reaches a branch by any other way (an attribute of a module), is
    needed for its backward and is dropped by everybody else, may be overwritten too early.

    On other devices, for one branch, with ``num_streams=1``, and in code that ``torch.compile``
    compiles, the functions run one after another where they are.

    Args:
        num_streams: How many branches at once, at most 32. Branch k runs on stream k modulo this,
            so that it has the same stream in each step. 1 turns it off.

    Raises:
        TypeError: ``num_streams`` is no int.
        ValueError: It is below 1 or above 32.

    Numerics: Bitwise equal to calling the functions one after another, gradients included, under
        deterministic algorithms. Under autocast each branch casts its weights anew, as with
        ``cache_enabled=False``: the gradient of a weight used several times is added up in the
        weight's own format.
    Synchronizes: Never.

    Example:
        >>> branches = ParallelBranches(num_streams=4)
        >>> experts = [torch.nn.Linear(8, 8) for _ in range(3)]
        >>> outputs = branches(experts, torch.ones(2, 8))
        >>> [tuple(output.shape) for output in outputs]
        [(2, 8), (2, 8), (2, 8)]
    """

    @explain_keywords
    def __init__(self, num_streams: int = 4) -> None:
        self.num_streams = check_int("num_streams", num_streams, minimum=1)
        if self.num_streams > _MOST_STREAMS:
            raise ValueError(
                f"num_streams must be <= {_MOST_STREAMS}, got {num_streams}; torch has no more "
                "streams than that, and would deal out the same ones again"
            )
        self._streams: dict[torch.device, list[Any]] = {}

    def __call__(
        self, functions: Iterable[Callable[..., Any]], /, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Call each function with the same arguments.

        Args:
            functions: The branches, such as an ``nn.ModuleList``.
            *args: Passed to each. Tensors in tuples, lists, mappings, dataclasses and what is
                registered with torch's pytree; in other objects they are not seen.
            **kwargs: Likewise.

        Returns:
            What they return, in order, for use on the current stream; nested as arguments are.

        Raises:
            TypeError: ``functions`` cannot be iterated, or one of them not be called.
            Exception: What a branch raised; those behind it do not run.
        """
        if torch.compiler.is_compiling():
            return [function(*args, **kwargs) for function in functions]
        check_iterable("functions", functions, "callables")
        branches = list(functions)
        for position, branch in enumerate(branches):
            check_callable(f"functions[{position}]", branch, "function(*args, **kwargs)")
        shared = _tensors_in((args, kwargs))
        reads = [[*shared, *_tensors_held_by(branch)] for branch in branches]
        return self._run([partial(branch, *args, **kwargs) for branch in branches], reads)

    def map(self, function: Callable[..., Any], /, *iterables: Iterable[Any]) -> list[Any]:
        """Call one function with each item, or with the items of several iterables of one length.

        Args:
            function: Called once for each item.
            *iterables: As for the builtin ``map``; nested as above.

        Returns:
            What it returns, in order, for use on the current stream.

        Raises:
            TypeError: ``function`` cannot be called.
            ValueError: The iterables are not of one length.
            Exception: What a branch raised; those behind it do not run.
        """
        if torch.compiler.is_compiling():
            return [function(*items) for items in zip(*iterables, strict=True)]
        check_callable("function", function, "function(*items)")
        calls = list(zip(*iterables, strict=True))
        held = _tensors_held_by(function)
        reads = [[*_tensors_in(items), *held] for items in calls]
        return self._run([partial(function, *items) for items in calls], reads)

    def __reduce__(self) -> tuple[type[ParallelBranches], tuple[int]]:
        # Streams are this process's, and a copy is to run beside the original.
        return ParallelBranches, (self.num_streams,)

    def __repr__(self) -> str:
        return f"ParallelBranches(num_streams={self.num_streams})"

    def _run(self, calls: list[partial[Any]], reads: list[list[Tensor]]) -> list[Any]:
        """Run the branches, of which each reads these tensors and perhaps others."""
        device = _device_of(reads)
        side = streams_for(device)
        if side is None or len(calls) < 2 or self.num_streams < 2:
            with _no_shared_casts():
                return [call() for call in calls]
        current = side.current()
        streams = self._side_streams(device, side, current, len(calls))
        backward = _BackwardOrder(side, current)
        outputs, returned = [], []
        side.fork(current, streams)
        try:
            with _no_shared_casts():
                for position, call in enumerate(calls):
                    stream = streams[position % len(streams)]
                    with side.on(stream):
                        outputs.append(call())
                    made = _tensors_in(outputs[-1])
                    backward.follow(made, stream)
                    returned += made
        except BaseException:
            # Recompute ends by an error, too, as soon as it has what it needs. And a capture that
            # broke lets nobody wait, while it is the first error that says why.
            with suppress(Exception):
                side.join(current, streams)
                _record(side, reads, streams, returned, current)
            raise
        side.join(current, streams)
        # Only now: the device has its work, and ``calls`` has kept all of it alive until here.
        _record(side, reads, streams, returned, current)
        return outputs

    def _side_streams(
        self, device: torch.device, side: SideStreams, current: Any, num_branches: int
    ) -> list[Any]:
        """Return the streams for so many branches; the same ones each time."""
        made = self._streams.setdefault(device, [])
        while len(made) < min(self.num_streams, num_branches):
            made.append(side.new())
        # In a branch of a branch, or by torch's dealing, the current one can be among them.
        return [stream for stream in made if stream != current][:num_branches]


def _record(
    side: SideStreams,
    reads: list[list[Tensor]],
    streams: list[Any],
    returned: list[Tensor],
    current: Any,
) -> None:
    """Tell the allocator who reads what: side streams the inputs, the current one the outputs."""
    for first, stream in enumerate(streams):
        read = {id(t): t for tensors in reads[first :: len(streams)] for t in tensors}
        for tensor in read.values():
            for part in _dense_parts(tensor):
                side.record(part, stream)
    for tensor in returned:
        for part in _dense_parts(tensor):
            side.record(part, current)


@final
class _BackwardOrder:
    """Lets the stream of the fork wait for one branch's backward before the next one begins.

    It has nothing else to do meanwhile, so no branch is held up. Autograd has launched all of a
    branch when it comes to the branch before it: it goes by the order of the forward.
    """

    def __init__(self, side: SideStreams, current: Any) -> None:
        self._side = side
        self._current = current
        self._last: Any = None

    def follow(self, returned: Iterable[Tensor], stream: Any) -> None:
        """Note what a branch has returned, which is where its backward begins."""
        for tensor in returned:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(partial(self._begin, stream))

    def _begin(self, stream: Any, _gradients: Any) -> None:
        if self._last is not None and self._last is not stream:
            self._side.join(self._current, [self._last])
        self._last = stream


def streams_for(device: torch.device) -> SideStreams | None:
    """Return what gives streams on a device, or None where branches run one after another."""
    return CUDASideStreams(device) if device.type == "cuda" else None


def _device_of(reads: list[list[Tensor]]) -> torch.device:
    """Return where branches run that read these tensors."""
    devices = {tensor.device: None for tensors in reads for tensor in tensors}
    for device in devices:
        if device.type != "cpu":
            return device
    if not devices and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _tensors_held_by(function: Callable[..., Any]) -> list[Tensor]:
    if isinstance(function, nn.Module):  # its parameters and buffers outlive the step
        return []
    return [value for value in held_by(function) if isinstance(value, Tensor)]


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a nested value: of containers, of what is registered with torch."""
    found: list[Tensor] = []
    for leaf in _pytree.tree_leaves(value):
        found += (leaf,) if isinstance(leaf, Tensor) else batches.tensors(leaf)
    return found


def _dense_parts(tensor: Any) -> Iterator[Tensor]:
    """Yield the tensors that hold the memory of one: itself, if it is dense."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):  # since torch 2.13 a DTensor names its mesh, too
                yield from _dense_parts(part)
        return
    if tensor.layout is torch.strided:
        yield tensor
        return
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


@contextmanager
def _no_shared_casts() -> Iterator[None]:
    """Keep autocast from giving a branch the cast of a weight that another stream has made.

    Nothing would order the two, in forward or backward. It holds wherever branches run, so that
    they compute the same on every device.
    """
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)
