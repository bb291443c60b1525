"""Where in a block the results are made that selective recompute keeps, and keeping them there.

To see every operation of a block from Python costs more host time than the block. So a dispatch
mode stands only where a result is kept, and mostly none has to. A block is a row of stretches: the
calls of its leaves (modules without children), and what it does between one and the next. Its first
call, which runs without recompute, shows in which of them the results to keep are made.

- In a call of ``nn.Linear`` or a convolution nothing has to be seen: the result is noted as it
  comes out. The second run leaves the call out, and tells autograd's places for it what they wait
  for: the layer's input, which has been computed again by then, and its weight, cast where
  autocast did.
- Between leaves a call of torch's attention is noted alike, by `AtCalls`, and one of a ReLU that
  alone reads a batch norm. Where the inputs of attention are kept too, the layers that they come
  from are left out without a result: what stands for that is computed when somebody looks, and
  attention does not.
- Other results, of leaves of other kinds or between leaves, are seen by a dispatch mode, which
  stands for that stretch.

In a block that holds compiled parts the leaves are left alone, since the compiler looks at them:
the dispatch mode stands around all of it, and under it what is compiled stays compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from torchfast._core.rng import DrawnFrom
from torchfast.memory.block_costs import KeptInputs
from torchfast.memory.caller_mode import (
    AtCalls,
    draws,
    has_compiled,
    inputs_of,
    is_attention,
    is_in_parts,
    is_transformed,
)
from torchfast.memory.deferred import Deferred, Waiting
from torchfast.memory.kept_norms import BATCH_NORMS, Norm
from torchfast.memory.kept_results import KeptResults
from torchfast.memory.noted_call import NotedCall, can_be_noted, sources_of
from torchfast.memory.second_run import TwiceRun
from torchfast.memory.stretches import Stretch, in_the_way


@dataclass(frozen=True)
class KeptPlaces:
    """The results to keep, by where they are made.

    Attributes:
        kept: For each stretch that makes some, which of its expensive operations they are of.
        leaves: The paths of the leaves that begin or end one of these stretches, and their names.
        norms: The calls of norms that are left out; for those that are read when enough is saved,
            how much that is.
        readers: For each call that reads one of them, which.
        noted: The calls of leaves that are noted as they come out, if these are layers.
        attention: The stretches of which nothing is kept but what torch's attention returned.
        inputs: Those of them of which the inputs of attention are kept as well.
        feeders: For each call of a layer that nothing but these inputs are made from, which.
        activations: For each call of a ReLU whose result is kept, or the stretch between leaves in
            which it is, the norm that it reads.
    """

    kept: dict[Stretch, tuple[bool, ...]]
    leaves: tuple[tuple[str, list[str]], ...]
    norms: dict[Stretch, int | None]
    readers: dict[Stretch, Stretch]
    noted: frozenset[Stretch]
    attention: frozenset[Stretch]
    inputs: frozenset[Stretch]
    feeders: dict[Stretch, Stretch]
    activations: dict[Stretch, Stretch]

    @classmethod
    def of(
        cls,
        kept: Sequence[bool],
        made_in: Sequence[Stretch],
        order: Sequence[Stretch],
        norms: Sequence[Norm] = (),
        attention: Sequence[int] = (),
        kept_inputs: Sequence[KeptInputs] = (),
    ) -> KeptPlaces:
        """Return the places of results.

        Args:
            kept: For each expensive operation of a call, for each norm and for the inputs of each
                call of attention, whether its result is kept.
            made_in: The stretch of each operation.
            order: All stretches of the call.
            norms: The norms.
            attention: The numbers of the operations that are calls of torch's attention.
            kept_inputs: The inputs of such calls that can be kept.
        """
        by_stretch: dict[Stretch, list[bool]] = {}
        for keep, stretch in zip(kept, made_in, strict=False):
            by_stretch.setdefault(stretch, []).append(keep)
        places = {stretch: tuple(those) for stretch, those in by_stretch.items() if any(those)}
        behind = len(made_in) + len(norms)
        left_out = [n for n, keep in zip(norms, kept[len(made_in) : behind], strict=True) if keep]
        read = [one for one, keep in zip(kept_inputs, kept[behind:], strict=True) if keep]
        feeders = {layer: one.read_in for one in read for layer in one.layers}
        readers = {reader: norm.made_in for norm in left_out for reader in norm.readers}
        norms_out = {norm.made_in: norm.read_at for norm in left_out}
        activations = {
            norm.activation: norm.made_in
            for norm in left_out
            if norm.activation is not None and norm.activation not in by_stretch
        }
        leaves = {s.leaf for s in (*places, *readers, *norms_out, *feeders, *activations)}
        for before, after in pairwise(order):
            if (before in places or before in activations) and not before.is_inside:
                leaves.add(after.leaf)
        paths = tuple((path, path.split(".")) for path in sorted(leaves - {""}))
        one = {s for s, those in places.items() if s.is_inside and those == (True,)}
        noted = frozenset((*one, *readers, *norms_out, *feeders))
        called = {made_in[number] for number in attention}
        alone = frozenset(
            s for s, those in places.items() if s in called and not s.is_inside and len(those) == 1
        )
        inputs = frozenset(feeders.values())
        return cls(places, paths, norms_out, readers, noted, alone, inputs, feeders, activations)

    def leaves_in(self, block: nn.Module) -> dict[str, nn.Module]:
        """Return the leaves of one of the blocks, as they stand there now."""
        found = {}
        for path, names in self.leaves:
            module: nn.Module | None = block
            for name in names:
                module = None if module is None else module._modules.get(name)
            if module is not None:
                found[path] = module
        return found


@final
class KeptCalls:
    """What one call of a block keeps.

    Args:
        places: Where.
        block: The block.
    """

    __slots__ = ("_leaves", "_places", "_results")

    def __init__(self, places: KeptPlaces, block: nn.Module) -> None:
        self._places, self._leaves = places, places.leaves_in(block)
        self._results: dict[Stretch, KeptResults | NotedCall] = {}

    @contextmanager
    def keeping(self, twice: TwiceRun) -> Iterator[None]:
        """Keep the results that are made in the body."""
        run = _Run(self._places, self._results, twice, is_again=False)
        with run.under_way(self._leaves):
            yield

    @contextmanager
    def giving(self, twice: TwiceRun) -> Iterator[None]:
        """Give them, each once, instead of computing them."""
        if twice.has_backward:
            yield
            return
        run = _Run(self._places, self._results, twice, is_again=True)
        with run.under_way(self._leaves):
            yield


@final
class _Run:
    """A run of a block that is under way."""

    __slots__ = (
        "_depth", "_function_depth", "_is_again", "_kept", "_looking", "_mode", "_norms", "_now",
        "_numbers", "_places", "_results", "_twice", "_waiting",
    )  # fmt: skip

    def __init__(
        self,
        places: KeptPlaces,
        results: dict[Stretch, KeptResults | NotedCall],
        twice: TwiceRun,
        *,
        is_again: bool,
    ) -> None:
        self._places, self._results, self._twice = places, results, twice
        self._kept = places.kept
        # Of each norm what it returned, and what its readers keep of that, by the count of writes.
        self._norms: dict[Stretch, tuple[Any, dict[int, list[Tensor]]]] = {}
        self._is_again = is_again
        self._waiting = Waiting()
        self._numbers: dict[str, int] = {}
        self._mode: TorchDispatchMode | None = None
        self._depth = torch._C._len_torch_dispatch_stack()
        self._looking: AtCalls | None = None
        self._function_depth = torch._C._len_torch_function_stack()
        self._now = Stretch()

    @contextmanager
    def under_way(self, leaves: dict[str, nn.Module]) -> Iterator[None]:
        with in_the_way(leaves, self._around):
            try:
                self._begin(Stretch())
                yield
            finally:
                self._end()

    def _around(self, path: str, module: nn.Module, run: Any, args: Any, kwargs: Any) -> Any:
        if self._twice.has_backward:  # and this may be the second run for it
            return run(module, *args, **kwargs)
        self._end()
        number = self._numbers.get(path, 0)
        self._numbers[path] = number + 1
        # Under a mode that somebody has entered within the block, nothing is kept.
        if (
            torch._C._len_torch_dispatch_stack() != self._depth
            or torch._C._len_torch_function_stack() != self._function_depth
        ):
            return run(module, *args, **kwargs)
        inside = Stretch(path, number, is_inside=True)
        kept = self._kept.get(inside)
        if self._is_again:
            can = len(args) == 1 and not kwargs and type(self._results.get(inside)) is NotedCall
        else:
            can = inside in self._places.noted and can_be_noted(module, args, kwargs)
        if inside in self._places.activations and len(args) == 1 and not kwargs:
            result = self._activated(inside, args[0], partial(run, module, args[0]))
        elif can:
            noted = self._left_out if self._is_again else self._noted
            result = noted(inside, module, run, args[0])
        elif kept is None:
            result = run(module, *args, **kwargs)
        else:
            with self._mode_of(inside, kept):
                result = run(module, *args, **kwargs)
        self._begin(Stretch(path, number))
        return result

    def _noted(self, inside: Stretch, module: nn.Module, run: Any, x: Tensor) -> Any:
        twice = self._twice
        out, held = self._norms.get(self._places.readers.get(inside, inside), (None, {}))
        holds = held.setdefault(x._version, []) if out is x else None
        result, position, taken = twice.taking(partial(run, module, x))
        if type(result) is Tensor:
            self._results[inside] = NotedCall(
                sources_of(module, x), result, position, taken,
                keeps=self._kept.get(inside) == (True,), holds=holds,
                waits=inside in self._places.norms or inside in self._places.feeders,
                is_norm=inside in self._places.norms,
            )  # fmt: skip
            if inside in self._places.norms and self._places.norms[inside] is None:
                self._norms[inside] = result, {}
        return result

    def _left_out(self, inside: Stretch, module: nn.Module, run: Any, x: Tensor) -> Any:
        twice, there = self._twice, self._results.get(inside)
        noted = there if isinstance(there, NotedCall) and there.fits(twice, x) else None
        if type(x) is Deferred and (noted is None or not noted.holds):
            x = _looked_at(x)
        if noted is None:
            return run(module, x)
        if inside in self._places.norms:
            read_at = self._places.norms[inside]
            if read_at is not None and read_at < twice.num_needed:
                return run(module, x)  # what is read then is waited for, after all
            if type(module) in BATCH_NORMS and has_compiled():
                return run(module, x)  # what is compiled may read it, and is not seen
            deferred = noted.deferred(twice, module, x, run)
            self._norms[inside] = deferred, {}
            return deferred
        if inside in self._places.feeders:
            attention = self._results.get(self._places.feeders[inside])
            if isinstance(attention, NotedCall) and attention.keeps_inputs:
                return noted.deferred(twice, module, x, run, self._waiting)
        if not noted.keeps:
            return run(module, noted.fed(x))
        del self._results[inside]  # its memory is free as soon as the backward has used it
        return noted.given(twice, sources_of(module, x))

    def _at_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        at = self._at_attention if is_attention(func) else self._at_relu
        return at(func, args, kwargs)

    def _at_relu(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not args or self._now not in self._places.activations:
            return func(*args, **kwargs)
        return self._activated(self._now, args[0], partial(func, *args, **kwargs))

    def _activated(self, stretch: Stretch, x: Any, run: Callable[[], Any]) -> Any:
        """Run an activation, or give what it has returned if it is of the norm that is left out."""
        twice, there = self._twice, self._results.get(stretch)
        norm, _ = self._norms.get(self._places.activations[stretch], (None, {}))
        is_plain = not is_transformed() and torch.is_grad_enabled()
        if norm is not x or twice.has_backward or not is_plain:
            return run()
        del self._norms[self._places.activations[stretch]]
        if self._is_again:
            if type(there) is not NotedCall or not there.fits(twice, x):
                return run()
            del self._results[stretch]
            return there.given(twice, [x])
        result, position, taken = twice.taking(run)
        if type(result) is Tensor and taken:
            self._results[stretch] = NotedCall([x], result, position, taken, keeps=True)
        return result

    def _at_attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        twice, stretch = self._twice, self._now
        inputs, there = inputs_of(args, kwargs), self._results.get(stretch)
        is_plain = not is_transformed() and not torch.is_inference_mode_enabled()
        if inputs is None or twice.has_backward or not is_plain:
            return func(*args, **kwargs)
        if self._is_again:
            if type(there) is not NotedCall or not there.fits(twice, inputs[0]):
                # Plain ones, as in the first run: which kernel computes it depends on them.
                args, kwargs = tree_map_only(Deferred, _looked_at, (args, kwargs))
                return func(*args, **kwargs)
            del self._results[stretch]
            return there.given(twice, inputs)
        if there is not None or any(type(tensor) is Deferred for tensor in inputs):
            return func(*args, **kwargs)
        result, position, taken = twice.taking(partial(func, *args, **kwargs))
        saved_bytes = sum(tensor.nbytes for _, tensor in taken)
        if type(result) is Tensor and not is_in_parts(inputs, result, saved_bytes):
            drawn = DrawnFrom() if result.device.type == "cpu" else DrawnFrom(result.device)
            self._results[stretch] = NotedCall(
                inputs, result, position, taken, keeps=True,
                keeps_inputs=stretch in self._places.inputs,
                drawn=drawn if draws(args, kwargs) else None,
            )  # fmt: skip
        return result

    def _begin(self, stretch: Stretch) -> None:
        kept = self._kept.get(stretch)
        is_known = kept is not None or stretch in self._places.activations
        if not is_known or torch._C._len_torch_dispatch_stack() != self._depth:
            return
        if self._looks_at(stretch):
            if torch._C._len_torch_function_stack() == self._function_depth:
                self._now, self._looking = stretch, AtCalls(self._at_call)
                self._looking.__enter__()  # type: ignore[no-untyped-call]
            return
        if kept is not None:
            self._mode = self._mode_of(stretch, kept)
            self._mode.__enter__()

    def _looks_at(self, stretch: Stretch) -> bool:
        """Whether to look for calls there, and not for operations."""
        if stretch in self._places.activations:
            return not has_compiled() and (not self._is_again or stretch in self._results)
        if self._is_again:
            return not isinstance(self._results.get(stretch), KeptResults)
        return stretch in self._places.attention and not has_compiled()

    def _end(self) -> None:
        # Not below a mode that somebody has entered since.
        if self._mode is not None and torch._C._len_torch_dispatch_stack() == self._depth + 1:
            self._mode.__exit__(None, None, None)
            self._mode = None
        depth = self._function_depth + 1
        if self._looking is not None and torch._C._len_torch_function_stack() == depth:
            self._looking.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._looking = None

    def _mode_of(self, stretch: Stretch, kept: tuple[bool, ...]) -> TorchDispatchMode:
        if not self._is_again:
            new = self._results[stretch] = KeptResults(kept)
            return new.keeping()
        results = self._results.get(stretch)
        return (results if isinstance(results, KeptResults) else KeptResults(kept)).giving()


def _looked_at(x: Deferred) -> Tensor:
    return x.computed().detach().requires_grad_(x.requires_grad)
