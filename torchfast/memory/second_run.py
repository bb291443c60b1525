"""One call of a block, and the second run of it that the backward asks for.

What autograd would save in the call is not saved: in its place stands a small `Saved`, which knows
the shape. The first of them that the backward opens lets the block run again, and that run gives
each the tensor that autograd saves in the same place. It ends as soon as none is missing.

What is saved at the end of a call often costs nothing to keep (see `saved_tensor`). So the second
run of a block that ends in a norm or a ReLU ends before these.

Torch's ``checkpoint(use_reentrant=False)`` does the same. Where the host sets the pace, what it
does beside the block's own work is felt, and this does less of it. Every guarantee stands:
gradients of gradients, a graph that is kept for a second backward, a backward within the forward,
blocks within blocks, other hooks around (what a block is called with goes through them), arguments
that are one tensor stay one, an input that is overwritten is an error, and so is a second run that
computes other tensors than the first one.

Random numbers are drawn again: the generators of the host and of the block's device, and those that
it holds or is called with, are noted before each call, in which a copy of 5 kB and one of 16 bytes
are less than to find out whether any are drawn; those of Python and NumPy only where the block's
first call has drawn from them. Autocast, ``torch.device`` contexts and the back-ends that attention
may take are as they were.

Neither run is compiled for the sake of a function around it: of a backward that stands within a
compiled function torch would compile the second run alone, which saves other tensors than the
first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn, TypeVar, final

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from torchfast._core.autocast import autocast_as, autocast_state
from torchfast._core.generators import has_state
from torchfast._core.rng import DrawnFrom
from torchfast.memory.attention import attention_as, attention_state
from torchfast.memory.deferred import Deferred, fail_written
from torchfast.memory.held_arguments import HeldArgument, is_held
from torchfast.memory.saved_tensor import Packed, Saved, keep_end, keep_returned

R = TypeVar("R")

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
# Their operators are given a tensor to fill, which autograd saves before they do.
_FILLS_WHAT_IS_SAVED = ("RreluWithNoiseBackward",)


class _Enough(BaseException):  # not an Exception: a block may catch those
    """Ends a second run that has computed all that is waited for."""


@final
class TwiceRun:
    """A call that can run again.

    Args:
        again: What a second run calls, with this object and the arguments of the first.
        args: Of the call.
        kwargs: Of the call.
        device: Where the block is, if not where its inputs are; None on the host.
        generators: That the block draws from, beside torch's default ones and those in its
            arguments.
        end: How many tensors are saved before those at the end that cost nothing to keep, as an
            equal block has found; None where that is to be found.
        ends_later: Whether what is saved may be filled only behind that, as an equal block has
            found.

    Attributes:
        end: That number, once the first run is through.
        ends_later: Whether that is so, then.
        has_backward: Whether there was a backward within the forward. It goes through the graph of
            each run, in which nothing may be left out, then.
    """

    __slots__ = (
        "_again", "_attention", "_autocast", "_device_context", "_drawn", "_inputs", "_is_first",
        "_last", "_run", "_saved", "_taken", "end", "ends_later", "has_backward",
    )  # fmt: skip

    def __init__(
        self,
        again: Callable[..., Any],
        args: Any,
        kwargs: Any,
        device: torch.device | None = None,
        generators: Sequence[Any] = (),
        end: int | None = None,
        *,
        ends_later: bool = False,
    ) -> None:
        self._run = again
        self.end, self.ends_later = end, ends_later
        self._inputs = _Inputs(args, kwargs)
        self._saved: list[weakref.ref[Saved]] = []
        self._again: _Again | None = None
        # While it is a list, the first run puts what autograd saves there as well.
        self._taken: list[tuple[Saved, Tensor]] | None = None
        self._last: list[Packed] | None = None  # of the first run, behind `end`
        self._is_first = self.has_backward = False
        devices = self._inputs.devices
        if device is not None and device not in devices:
            devices.append(device)
        self._drawn = DrawnFrom(*devices, generators=[*generators, *self._inputs.generators])
        self._autocast = autocast_state(devices[0].type if devices else "cpu")
        self._attention = attention_state()
        self._device_context = _device_context()

    def first(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run for the first time, and save nothing but the inputs and what is kept."""
        torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
        self._is_first = True
        # Before it runs: it may write to what it is given.
        given = set(_nodes_of((args, kwargs))) if self.end is None else set()
        last: list[Packed] = []
        self._last = last
        try:
            result = _uncompiled(partial(run, *args, **kwargs))
        finally:
            self._is_first, self._last = False, None
            torch._C._autograd._pop_saved_tensors_default_hooks()
        if self.end is None:
            self.ends_later |= _fills_what_is_saved(result, given)
        self.end = len(self._saved) - keep_end(last, result)
        return result

    def drew(self, states: list[tuple[Any, Any]]) -> None:
        """Note generators that the first run turned out to draw from, as they were before it."""
        self._drawn.add(states)

    @property
    def position(self) -> int:
        """How many tensors autograd has saved so far, in the run that is under way."""
        return len(self._saved) if self._again is None else self._again.position

    @property
    def num_needed(self) -> int:
        """How many of the saved tensors the second run that is under way has to come to."""
        assert self._again is not None
        return self._again.num_needed

    def give(self, tensors: list[Tensor | None]) -> None:
        """In a second run, give the next tensors that the first one saved; None is kept already."""
        assert self._again is not None
        self._again.give(tensors)

    def taking(self, run: Callable[[], Any]) -> tuple[Any, int, list[tuple[Saved, Tensor]]]:
        """Run a part of the first run.

        Returns:
            Its result, how many tensors autograd had saved before, and what it saved in it.
        """
        position = self.position
        taken = self._taken = []
        try:
            return run(), position, taken
        finally:
            self._taken = None

    def waits(self, deferred: Deferred) -> None:
        """Note what the second run leaves out and somebody may still look at when it is over."""
        assert self._again is not None
        self._again.deferred.append(weakref.ref(deferred))

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        self._saved.append(weakref.ref(saved))
        if self._taken is not None:
            self._taken.append((saved, tensor))
        if self._last is not None and (self.end is None or len(self._saved) > self.end):
            self._last.append(Packed(saved, tensor, tensor._version))
        return saved

    def _unpack(self, saved: Saved) -> Tensor:
        self.has_backward |= self._is_first
        kept = saved.there()
        if kept is not None:
            return kept
        value = saved.value
        if value is None:
            _uncompiled(self._run_again)
            value = saved.value
            assert value is not None
        # Another backward computes it again: what is kept for one would be kept for none as well.
        saved.value = None
        return value

    def _run_again(self) -> None:
        before, self._again = self._again, _Again(self._saved, ends_later=self.ends_later)
        again = self._again
        args, kwargs = self._inputs.restored()
        torch._C._autograd._push_saved_tensors_default_hooks(again.pack, again.unpack)
        try:
            with (
                torch.enable_grad(),
                self._drawn.again(),
                autocast_as(self._autocast),
                attention_as(self._attention),
                self._device_context,
            ):
                self._run(self, *args, **kwargs)
        except _Enough as ended:
            if ended.args[0] is not again:  # of a block around this one
                raise
        except RuntimeError:
            if not again.is_complete:  # TorchScript passes on no exception of Python
                raise
        else:
            again.check_complete()
        finally:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            again.values.clear()
            self._again = before
        # Somebody has taken it along, as a hook does that keeps features: soon the parameters will
        # be others.
        for reference in again.deferred:
            deferred = reference()
            if deferred is not None:
                deferred.computed()


def _uncompiled(run: Callable[[], R]) -> R:
    """Call a run, with nothing in it compiled for the sake of a compiled function around."""
    # In this order: the compiler, if it follows this function, knows the first alone.
    if not torch.compiler.is_compiling() and get_eval_frame_callback() is None:
        return run()
    from torch._dynamo import disable

    alone: Callable[[], R] = disable(run)
    return alone()


@final
class _Again:
    """A second run that is under way."""

    __slots__ = (
        "_ends_later", "_saved", "deferred", "is_complete", "num_needed", "position", "values",
    )  # fmt: skip

    def __init__(self, saved: list[weakref.ref[Saved]], *, ends_later: bool) -> None:
        self._saved, self._ends_later = saved, ends_later
        # Up to the last one that is waited for; who was let go of is not.
        needed = len(saved)
        while needed and ((last := saved[needed - 1]()) is None or last.kept is not None):
            needed -= 1
        self.num_needed = needed
        self.position, self.is_complete = 0, False
        self.deferred: list[weakref.ref[Deferred]] = []
        # A backward within the block goes through the graph of this run.
        self.values: list[Tensor] = []

    def pack(self, tensor: Tensor) -> int | Tensor:
        if type(tensor) is Deferred:
            tensor = tensor.computed()
        if self._ends_later:
            self._end_if_complete()
        position = self.position
        if position >= len(self._saved):
            _fail(f"it saved more than {len(self._saved)} tensors")
        self.position = position + 1
        saved = self._saved[position]()
        if saved is None:
            return tensor.detach()
        if (
            saved.shape != tensor.shape
            or saved.dtype is not tensor.dtype
            or saved.device != tensor.device
        ):
            _fail(
                f"saved tensor {position} was {saved.dtype} of shape {tuple(saved.shape)} on "
                f"{saved.device} and is {tensor.dtype} of shape {tuple(tensor.shape)} on "
                f"{tensor.device}"
            )
        if saved.kept is None:
            saved.value = tensor
        if not self._ends_later:
            self._end_if_complete()
        self.values.append(tensor)
        return len(self.values) - 1

    def unpack(self, packed: int | Tensor) -> Tensor:
        return self.values[packed] if isinstance(packed, int) else packed

    def give(self, tensors: list[Tensor | None]) -> None:
        for tensor in tensors:
            saved = self._saved[self.position]()
            self.position += 1
            if saved is not None and saved.kept is None:
                saved.value = tensor
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        if self.position >= self.num_needed:
            self.is_complete = True
            raise _Enough(self)

    def check_complete(self) -> None:
        if self.position < self.num_needed:
            _fail(f"it saved {self.position} tensors instead of {len(self._saved)}")


def _fills_what_is_saved(result: Any, seen: set[Any]) -> bool:
    """Whether an operator between what was seen and a result has been given a tensor to fill."""
    ways = _nodes_of(result)
    while ways:
        node = ways.pop()
        if node in seen:
            continue
        if node.name().startswith(_FILLS_WHAT_IS_SAVED):
            return True
        seen.add(node)
        ways += [before for before, _ in node.next_functions if before is not None]
    return False


def _nodes_of(values: Any) -> list[Any]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]


def _fail(found: str) -> NoReturn:
    raise RuntimeError(
        f"a block computed something else when it ran again in the backward: {found}; let its "
        "forward depend on its inputs, parameters and torch's random numbers alone, or leave the "
        "block out of recompute"
    )


@final
class _Inputs:
    """What a block was called with, as autograd would save it.

    Attributes:
        devices: Of its tensors, without the host; each once.
        generators: That are among its arguments.
    """

    __slots__ = ("_leaves", "_structure", "_unpack", "devices", "generators")

    def __init__(self, args: Any, kwargs: Any) -> None:
        self._structure: Any = None
        self.devices: list[torch.device] = []
        self.generators: list[Any] = []
        leaves: Any = (*args, *kwargs.values())
        if all(isinstance(leaf, Tensor) or type(leaf) in _PLAIN for leaf in leaves):
            names = tuple(kwargs)
            self._structure = len(args), names
        else:
            leaves, self._structure = tree_flatten((args, kwargs))
            self.generators += [leaf for leaf in leaves if has_state(leaf)]
        # What other hooks do to what is saved, they do to this: a block around this one computes
        # it again, offload sends it to the host.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._unpack = None if hooks is None else hooks[1]
        # Each tensor once: a block may ask whether two of its arguments are the same one.
        kept: dict[int, _Input] = {}
        self._leaves: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                there = kept.get(id(leaf))
                if there is None:
                    there = kept[id(leaf)] = self._kept(leaf, hooks)
                self._leaves.append(there)
            else:
                is_object = not isinstance(self._structure, tuple) and is_held(leaf)
                self._leaves.append(HeldArgument(leaf) if is_object else leaf)

    def _kept(self, tensor: Tensor, hooks: Any) -> _Input:
        device = tensor.device
        if device not in self.devices and device.type not in ("cpu", "meta"):
            self.devices.append(device)
        requires_grad = tensor.requires_grad
        if hooks is not None:
            with torch.no_grad():  # as autograd calls them
                return _Input(hooks[0](tensor), None, requires_grad)
        keep_returned(tensor)
        version = None if tensor.is_inference() else tensor._version
        # Without its place in the graph, in which a block that writes to it would put itself.
        return _Input(tensor.detach() if requires_grad else tensor, version, requires_grad)

    def restored(self) -> tuple[Any, Any]:
        inputs = dict.fromkeys(leaf for leaf in self._leaves if type(leaf) is _Input)
        tensors = {one: one.restored(self._unpack) for one in inputs}
        leaves = [tensors[leaf] if type(leaf) is _Input else leaf for leaf in self._leaves]
        leaves = [leaf.restored() if type(leaf) is HeldArgument else leaf for leaf in leaves]
        if isinstance(self._structure, tuple):
            num_args, names = self._structure
            return leaves[:num_args], dict(zip(names, leaves[num_args:], strict=True))
        args, kwargs = tree_unflatten(leaves, self._structure)
        return args, kwargs


@final
class _Input:
    __slots__ = ("_packed", "_requires_grad", "_version")

    def __init__(self, packed: Any, version: int | None, requires_grad: bool) -> None:
        self._packed, self._version, self._requires_grad = packed, version, requires_grad

    def restored(self, unpack: Any) -> Tensor:
        tensor: Tensor = self._packed if unpack is None else unpack(self._packed)
        if self._version is not None and tensor._version != self._version:
            fail_written("an input of a block", tensor, self._version)
        return tensor.detach().requires_grad_() if self._requires_grad else tensor


def _device_context() -> AbstractContextManager[Any]:
    """Return the ``torch.device`` context that is entered, if there is one."""
    if torch._C._len_torch_function_stack():
        from torch.overrides import _get_current_function_mode_stack
        from torch.utils._device import DeviceContext

        for mode in reversed(_get_current_function_mode_stack()):
            if isinstance(mode, DeviceContext):
                return mode  # type: ignore[no-any-return, unused-ignore]
    return nullcontext()
