"""Tensors that are computed when somebody looks at them.

A second run leaves out a norm whose readers have kept what they saw of it, and what leads to
attention whose inputs are kept. What stands for the results is a `Deferred`: a tensor with a shape
and without memory. Whatever looks at it computes it after all, so a block may do in a later call
what it did not do in the one that was measured.

What leads to attention is more than one call: queries and keys are turned by their positions, which
are a dozen operations. So those on a `Deferred` that belongs to a `Waiting` wait too, if they do
nothing but compute: autograd sees each, and no kernel runs. What writes computes all first.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from typing_extensions import override

# What moves elements and computes nothing, beside views: torch has no tag for it.
_MOVES = frozenset(
    f"aten::{name}"
    for name in (
        "_to_copy", "_unsafe_view", "cat", "constant_pad_nd", "flip", "repeat", "roll", "stack",
    )
)  # fmt: skip


@cache
def can_wait(func: Any) -> bool:
    """Whether an operation does nothing but to make tensors, and these cost little."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    schema, tags = func._schema, func.tags
    if schema.is_mutable or torch.Tag.nondeterministic_seeded in tags:
        return False
    return bool(torch.Tag.pointwise in tags or func.is_view or schema.name in _MOVES)


class Like(NamedTuple):
    """What a tensor will be."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        """Return what a tensor is."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


@final
class Deferred(Tensor):
    """A tensor that is computed when somebody looks at it.

    Args:
        compute: Computes it; called once, if at all.
        like: The shape, strides, dtype and device that it will have.
        requires_grad: Whether autograd is to take it for a part of the graph.
        waiting: What operations on it belong to, if they are to wait as well.

    Attributes:
        like: As given.
    """

    like: Like
    _compute: Callable[[], Tensor]
    _real: Tensor | None
    _waiting: Waiting | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        compute: Callable[[], Tensor],
        like: Like,
        *,
        requires_grad: bool,
        waiting: Waiting | None = None,
    ) -> Deferred:
        """Return a tensor without memory."""
        shape, strides, dtype, device = like
        made: Deferred = Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=device, requires_grad=requires_grad
        )
        made.like, made._compute, made._real, made._waiting = like, compute, None, waiting
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing: it is made."""

    def computed(self) -> Tensor:
        """Return what it stands for, outside of the graph."""
        if self._real is None:
            with torch.no_grad():
                self._real = self._compute().detach()
        return self._real

    def become(self, tensor: Tensor) -> None:
        """Stand for another tensor from now on: what an operation in place would have made."""
        if self._real is None:
            self._real = tensor.detach()
        else:  # of which there may be views
            with torch.no_grad():
                self._real.copy_(tensor)

    # What reads the memory and not the tensor, as kernels of other libraries do.

    @override
    def data_ptr(self) -> int:
        return self.computed().data_ptr()

    @override
    def untyped_storage(self) -> torch.UntypedStorage:
        return self.computed().untyped_storage()

    @override
    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.computed().numpy(*args, **kwargs)

    @override
    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.computed(), memo)

    @override
    def tolist(self) -> Any:
        return self.computed().tolist()

    @override
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.computed().__dlpack__(*args, **kwargs)

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            # What autograd does to it for its own sake.
            (deferred,) = args
            like, waiting = deferred.like, deferred._waiting
            return Deferred(deferred.computed, like, requires_grad=False, waiting=waiting)
        kwargs = kwargs or {}
        if can_wait(func):
            made = _made_later(func, args, kwargs)
            if made is not None:
                return made
        elif func._schema.is_mutable:
            for tensor in _Read(args, kwargs).tensors:
                if type(tensor) is Deferred and tensor._waiting is not None:
                    tensor._waiting.compute()
        args, kwargs = tree_map_only(Deferred, cls.computed, (args, kwargs))
        return func(*args, **kwargs)


class _InGraph(torch.autograd.Function):
    """Returns what is computed later, as the result of an operation: one may write to it.

    It has no backward: where a block calls one, nothing is left out of its second run.
    """

    @staticmethod
    def forward(_: Any, _anchor: Tensor, compute: Callable[[], Tensor], like: Like) -> Tensor:
        return Deferred(compute, like, requires_grad=False)


def in_graph(compute: Callable[[], Tensor], like: Like) -> Deferred:
    """Return a tensor that is computed when somebody looks at it, and no leaf of the graph.

    Args:
        compute: Computes it; called once, if at all.
        like: The shape, strides, dtype and device that it will have.
    """
    anchor = torch.empty((), requires_grad=True)
    made: Deferred = _InGraph.apply(anchor, compute, like)  # type: ignore[no-untyped-call]
    return made


@final
class Waiting:
    """The operations of a run that wait until somebody looks at what they make."""

    __slots__ = ("__weakref__", "_operations")

    def __init__(self) -> None:
        self._operations: list[weakref.ref[_Operation]] = []

    def deferred(
        self, compute: Callable[[], Tensor], read: Sequence[Tensor], like: Like, *, is_grad: bool
    ) -> Deferred:
        """Return the result of a call that waits.

        Args:
            compute: Makes the call.
            read: What it reads.
            like: What the result will be.
            is_grad: Whether the result requires a gradient.
        """
        operation = self.later(compute, read)
        return Deferred(operation.results, like, requires_grad=is_grad, waiting=self)

    def compute(self) -> None:
        """Compute all that waits and that somebody can still look at."""
        for operation in self._operations:
            there = operation()
            if there is not None:
                there.results()
        self._operations.clear()

    def later(self, compute: Callable[[], Any], read: Sequence[Tensor]) -> _Operation:
        """Return an operation that waits."""
        operation = _Operation(compute, read)
        self._operations.append(weakref.ref(operation))
        return operation


@final
class _Operation:
    """An operation that waits, and what it reads."""

    __slots__ = ("__weakref__", "_compute", "_read", "_results", "_versions")

    def __init__(self, compute: Callable[[], Any], read: Sequence[Tensor]) -> None:
        self._compute: Callable[[], Any] | None = compute
        self._read = read
        self._versions = [tensor._version for tensor in read]
        self._results: Any = None

    def results(self) -> Any:
        if self._compute is not None:
            for tensor, version in zip(self._read, self._versions, strict=True):
                if tensor._version != version:
                    fail_written("what is read in front of attention in a block", tensor, version)
            with torch.no_grad():
                self._results = self._compute()
            self._compute, self._read = None, ()
        return self._results

    def result(self, number: int) -> Tensor:
        made: Tensor = self.results()[number]
        return made


class _Read:
    """What an operation gets: its tensors, and all that what it makes depends on."""

    __slots__ = ("seen", "tensors")

    def __init__(self, args: Iterable[Any], kwargs: dict[str, Any]) -> None:
        self.tensors: list[Tensor] = []
        self.seen = (*self._see(args), *kwargs, *self._see(kwargs.values()))

    def _see(self, values: Iterable[Any]) -> list[Any]:
        seen: list[Any] = []
        for value in values:
            kind = type(value)
            if kind is Deferred:
                self.tensors.append(value)
                seen.append(value.like)
            elif isinstance(value, Tensor):
                self.tensors.append(value)
                seen += kind, (value.shape, value.stride(), value.dtype, value.device)
            elif kind is list or kind is tuple:
                seen.append(tuple(self._see(value)))
            else:  # 1 equals 1.0
                seen += kind, value
        return seen


# What operations make, by what they get: the same in each block and step. None: they have to run.
_known: dict[Any, Like | list[Like] | None] = {}
_MOST_KNOWN = 4096


def _made_later(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what an operation will make; None if it does not wait."""
    try:
        read = _Read(args, kwargs)
        waiting = next((t._waiting for t in read.tensors if type(t) is Deferred), None)
        if waiting is None or torch.is_inference_mode_enabled():
            return None
        key = func, read.seen
        try:
            likes = _known[key]
        except KeyError:
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            likes = _known[key] = _made_like(func, args, kwargs, read.tensors)
        if likes is None:
            return None
        operation = waiting.later(partial(_computed_by, func, args, kwargs), read.tensors)
    except (TypeError, RuntimeError):  # what cannot be hashed, or has no strides or count of writes
        return None
    if isinstance(likes, list):
        return [
            Deferred(partial(operation.result, n), like, requires_grad=False, waiting=waiting)
            for n, like in enumerate(likes)
        ]
    return Deferred(operation.results, likes, requires_grad=False, waiting=waiting)


def _made_like(func: Any, args: Any, kwargs: Any, read: list[Tensor]) -> Like | list[Like] | None:
    """Return what an operation makes; None if nothing but running it tells."""
    device = next(t.device for t in read if type(t) is Deferred)
    if kwargs.get("device") not in (None, device):
        return None
    if any(
        type(t) not in (Tensor, nn.Parameter, Deferred) or (t.device != device and t.dim())
        for t in read
    ):
        return None

    def on_meta(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    args, kwargs = tree_map_only(Tensor, on_meta, (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    try:
        with torch._C._DisableAutocast(), torch.no_grad():
            out = func(*args, **kwargs)
    except NotImplementedError:
        return None
    is_one = isinstance(out, Tensor)
    made = [Like(t.shape, t.stride(), t.dtype, device) for t in ([out] if is_one else out)]
    return made[0] if is_one else made


def _computed_by(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map_only(Deferred, Deferred.computed, (args, kwargs))
    with torch._C._DisableAutocast():  # what it casts was cast before the operation was seen
        return func(*args, **kwargs)


def fail_written(what: str, tensor: Tensor, version: int) -> NoReturn:
    """Raise what tells that a tensor has been written to which a second run reads."""
    raise RuntimeError(
        f"{what} that is recomputed has been modified by an inplace operation before its backward: "
        f"a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}, expected "
        f"{version}; write to a clone, within the block too"
    )
