"""Settings that hold while torch converts a frame, and at no other time.

- Hooks are looked at by guards. By default torch never notices a hook that is added to a compiled
  module later.
- The backward is compiled together with the forward, where a failure can still be answered by
  running eagerly; in the middle of ``backward()`` it could not.
- The recompile limit counts per region, though equal regions share their code: 24 blocks that read
  their own ``layer_idx`` are 24 compiles, not a silent fallback after 8.
- Python's garbage collector comes less often. A compiler makes millions of objects that live, and
  the collector would look through all of them and the program's again and again.
- What is compiled around other regions stops before each of them, by a graph break. Torch would
  compile what stands inside a region again, as a part of what calls it: it goes straight to a
  module's ``forward``, past the place where a region stands.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from torchfast.compiler.breaks import APART

# While a frame is converted; Python's own default is 700.
OBJECTS_BETWEEN_COLLECTIONS = 20_000


class Apart(NamedTuple):
    """What is left to others by what is compiled around it.

    Attributes:
        holds: Whether a module is such a one.
        code: The function that runs it.
    """

    holds: Callable[[nn.Module], bool]
    code: CodeType


@contextlib.contextmanager
def settings(
    num_regions: int,
    apart: Apart | None,
    *,
    is_update: bool,
    inlined: Callable[[nn.Module], object],
    skipped: Callable[[str], object],
) -> Iterator[None]:
    """Hold all of them.

    Args:
        num_regions: How many regions share the code, and how many versions of it others have.
        apart: What is called and others compile.
        is_update: Whether it is an optimizer's update.
        inlined: Called with each module that becomes a part of the graph.
        skipped: Called with torch's reason to leave a frame alone, where it keeps that to itself.
    """
    with (
        _torchs_own(num_regions),
        _rare_collections(),
        _calls_of_modules(apart, inlined),
        _state_as_inputs(is_update),
        _reasons(skipped),
    ):
        yield


@contextlib.contextmanager
def _reasons(skipped: Callable[[str], object]) -> Iterator[None]:
    """Hear the reasons of torch 2.11, which drops them; later ones stand in what it returns."""
    from torch._dynamo import exc, types

    if "skip_reason" in types.ConvertFrameReturn.__dataclass_fields__:
        yield
        return
    original = exc.SkipFrame.__init__

    def told(self: Any, *args: Any) -> None:
        original(self, *args)
        skipped(str(self))

    exc.SkipFrame.__init__ = told  # type: ignore[method-assign]
    try:
        yield
    finally:
        exc.SkipFrame.__init__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _torchs_own(num_regions: int) -> Iterator[None]:
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch

    wanted = {
        "skip_nnmodule_hook_guards": False,
        "recompile_limit": dynamo.recompile_limit + num_regions - 1,
        "accumulated_recompile_limit": dynamo.accumulated_recompile_limit + num_regions - 1,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(dynamo.patch({k: v for k, v in wanted.items() if hasattr(dynamo, k)}))
        eager_backward = "force_non_lazy_backward_lowering"
        if torch.is_grad_enabled() and hasattr(functorch, eager_backward):
            stack.enter_context(functorch.patch({eager_backward: True}))
        stack.enter_context(warnings.catch_warnings())
        # With warnings as errors, those of the compiler's own code would end the compile.
        filters = cast(list[Any], warnings.filters)
        filters[:] = [("default", *f[1:]) if f[0] == "error" else f for f in filters]
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor")
        yield


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Let the garbage collector come when more has been made than by default."""
    before = gc.get_threshold()
    if not 0 < before[0] < OBJECTS_BETWEEN_COLLECTIONS:
        yield  # as somebody wants it
        return
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextlib.contextmanager
def _calls_of_modules(
    apart: Apart | None, inlined: Callable[[nn.Module], object]
) -> Iterator[None]:
    """Have the compiler end its graph where a module is called that others compile.

    The others are told of, if the frame is converted: the graph goes past where regions stand, so
    that nothing else would know.
    """
    from torch._dynamo.convert_frame import compile_lock
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    traced: Any = UnspecializedNNModuleVariable

    def call_or_stop(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if apart is not None and apart.holds(self.value):
            name = type(self.value).__name__
            unimplemented(gb_type=APART, context=name, explanation=f"{name} is apart", hints=[])
        if tried and tried[-1][0] is not tx.output:
            # Torch has come to a break and begins again: what was tried before came to nothing.
            tried.clear()
        tried.append((tx.output, self.value))
        return call_function(self, tx, args, kwargs)

    tried: list[tuple[Any, nn.Module]] = []
    # Torch's own lock, as what it traces with is replaced for all threads.
    with compile_lock:
        call_function = traced.call_function
        traced.call_function = call_or_stop
        try:
            yield
        finally:
            traced.call_function = call_function
    for output, module in tried:
        if output.output_instructions:  # or it has begun again, and called no module since
            inlined(module)


@contextlib.contextmanager
def _state_as_inputs(is_update: bool) -> Iterator[None]:
    """Let an optimizer's parameters and state be inputs of its graph, as any tensors are.

    Torch marks them, with an attribute that files would keep, and makes them constants of the
    graph, which are alive for as long as the process is.
    """
    if not is_update:
        yield
        return
    from torch._dynamo import decorators
    from torch._dynamo.convert_frame import compile_lock

    with compile_lock:  # as above
        mark = decorators.mark_static_address
        decorators.mark_static_address = lambda t, guard=False: None  # noqa: ARG005
        try:
            yield
        finally:
            decorators.mark_static_address = mark
