"""The place where torch turns Python frames into compiled code, watched and bounded.

``torch.compile(function)`` asks a converter for each frame that runs below the function and has no
compiled code that fits: the function's own frame, and after a graph break those that it calls. A
`FrameConversion` stands in front of the converter of one function. So it knows whether anything was
compiled, and why not; how long that took, with a limit on it; and when the compiler fails, it has
that one frame run as it is, within the same call. Nothing runs twice, so neither statistics of a
BatchNorm nor random numbers are drawn twice. A call whose frames are all compiled does not come by
here, so none of this costs anything in the steady state.

Settings that hold while a frame is converted, and at no other time:

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

All that is private to torch is touched in this file only.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, NamedTuple, cast, final

import torch
from torch import nn

from torchfast.compiler.breaks import APART
from torchfast.compiler.refusal import is_refused, refuse
from torchfast.compiler.timeout import CallTimeoutError, call_within

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


class GaveUpError(BaseException):
    """Ends a call under ``fullgraph`` of which nothing has run."""


@final
class FrameConversion:
    """What torch's converter does for one function.

    Args:
        code: The function's.
        num_regions: How many regions share it.
        timeout_s: Limit on the compile time within one call.
        fullgraph: Whether the function is one graph or an error.
        apart: What it calls and others compile; None if it is compiled with all that it calls.
        is_update: Whether it is an optimizer's, whose parameters and state would be constants.

    Attributes:
        graphs: Graphs compiled.
        seconds: Time spent on it.
        failure: What went wrong in the running call.
        skip_reason: Why torch left the function's own frame alone.
        reached_limit: Whether the recompile limit was reached in the running call.
        has_news: Whether the converter was asked in the running call.
        others: Functions of the user's that have code of this one's, or were left alone by it.
            Each is kept alive, so that no other takes its identity.
    """

    def __init__(
        self,
        code: CodeType,
        *,
        num_regions: int,
        timeout_s: float,
        fullgraph: bool,
        apart: Apart | None = None,
        is_update: bool = False,
    ) -> None:
        self.graphs = 0
        self.seconds = 0.0
        self.failure: BaseException | None = None
        self.skip_reason: str | None = None
        self.reached_limit = False
        self.has_news = False
        self.others: dict[int, CodeType] = {}  # by identity, as equal ones have caches of their own
        self._code = code
        self._num_regions = num_regions
        self._timeout_s = timeout_s
        self._fullgraph = fullgraph
        self._apart = apart
        self._is_update = is_update
        self._spent_s = 0.0
        self._leaves_own_frame = False
        # What became of functions that torch left alone, by identity; those of the running call.
        self._left_alone: dict[int, Any] = {}
        self._left_in_call: list[int] = []
        self._convert: Callable[..., Any] | None = None
        # Torch follows this to the backend, to tell compiled code of one backend from another's.
        self._torchdynamo_orig_backend: Any = None
        self._backend: Any = None

    def attach(self, compiled: Callable[..., Any]) -> bool:
        """Stand in front of the converter of what ``torch.compile`` returned.

        Returns:
            False if it has none, as where the compiler is switched off.
        """
        names = getattr(getattr(compiled, "__code__", None), "co_freevars", ())
        cells = getattr(compiled, "__closure__", None) or ()
        cell = dict(zip(names, cells, strict=True)).get("callback")
        converter: Any = cell.cell_contents if cell is not None else None
        if cell is None or not hasattr(converter, "_torchdynamo_orig_backend"):
            return False
        self._convert = converter
        compiler = converter._torchdynamo_orig_backend._torchdynamo_orig_backend
        # At the end of the path stands an object of this conversion's own. Torch would otherwise
        # run the code that another one had made of the user's functions, behind a graph break: no
        # graph would be counted, and that one's end would be this one's too.
        self._backend = functools.partial(compiler)
        self._backend.is_closed = False
        self._torchdynamo_orig_backend = SimpleNamespace(_torchdynamo_orig_backend=self._backend)
        cell.cell_contents = self
        return True

    def end_call(self, *, by_exception: bool = False) -> None:
        """Forget what belongs to one call.

        Args:
            by_exception: Whether the call did not return. What torch left alone in it, since it saw
                the exception coming, is for the next call to try again.
        """
        if by_exception:
            for key in self._left_in_call:
                self._left_alone.pop(key, None)
        self._left_in_call.clear()
        self.failure = None
        self.reached_limit = False
        self.has_news = False
        self._spent_s = 0.0

    def retire(self) -> None:
        """Free what was compiled of the function itself, and leave the rest to be freed.

        Of the user's functions torch frees all versions or none. Those of one that has retired keep
        nobody from freeing his own.
        """
        forget(self._code)
        if self._backend is not None:
            self._backend.is_closed = True

    def forget_others(self) -> None:
        """Free what was compiled of the user's functions, and let them be compiled again.

        What others, who have not retired, compiled of one keeps all that there is of it.
        Not for a finalizer: the garbage collector may come in the middle of a lookup in what is
        freed here.
        """
        for code in self.others.values():
            if not _num_of_others(code, self._backend, in_use=True):
                forget(code)
        self.others.clear()
        self._left_alone.clear()

    def leave_own_frame(self) -> None:
        """Ask no more for the function's own frame, which cannot be compiled."""
        self._leaves_own_frame = True

    def __call__(self, frame: FrameType, cache_entry: Any, frame_state: Any) -> Any:
        """Convert a frame, as torch asks for it."""
        from torch._dynamo.trace_rules import check
        from torch._dynamo.types import ConvertFrameReturn

        assert self._convert is not None
        is_own = frame.f_code is self._code
        if self.failure is not None:
            return _eagerly()
        if is_own and self._leaves_own_frame:
            return ConvertFrameReturn()
        if self._apart is not None and frame.f_code is self._apart.code:
            return _left_to_others()
        known = None if is_own else self._left_alone.get(id(frame.f_code))
        if known is not None:
            return _this_once(known)
        if is_refused():
            refuse(frame)
            # By default for the whole process, and without tensors it may not be the next time.
            return _this_once(ConvertFrameReturn().frame_exec_strategy)
        self.has_news = True
        if active_dispatch_mode() is not None:
            # Torch would leave the code alone for ever.
            return _eagerly()
        if not is_own and check(frame.f_code):
            return self._convert(frame, cache_entry, frame_state)
        if not is_own:
            self.others[id(frame.f_code)] = frame.f_code
        result = self._converted(frame, cache_entry, frame_state)
        if result is None:
            if self._fullgraph:
                raise GaveUpError
            return _eagerly()
        if result.guarded_code is None:
            self._note_left_alone(result, frame.f_code, is_own=is_own)
        return result

    def _converted(self, frame: FrameType, cache_entry: Any, frame_state: Any) -> Any:
        """Return what the converter does; None if it fails or takes too long."""
        assert self._convert is not None
        graphs, start = _num_graphs(), time.perf_counter()
        try:
            # Versions of others use up no limit.
            num_regions = self._num_regions + _num_of_others(frame.f_code, self._backend)
            with (
                _settings(num_regions),
                _rare_collections(),
                _stopping_before(self._apart),
                _state_as_inputs(self._is_update),
            ):
                left_s = self._timeout_s - self._spent_s
                return call_within(left_s, self._convert, frame, cache_entry, frame_state)
        except (Exception, CallTimeoutError) as error:
            # The frames of the compiler hold the arguments of the call.
            self.failure = error.with_traceback(None)
            return None
        finally:
            taken_s = time.perf_counter() - start
            self._spent_s += taken_s
            self.seconds += taken_s
            if self.failure is None:
                self.graphs += max(_num_graphs() - graphs, 0)

    def _note_left_alone(self, result: Any, code: CodeType, *, is_own: bool) -> None:
        strategy = result.frame_exec_strategy
        # Under its own name it is C++ that has no types.
        if strategy.cur_action.name == "RUN_ONLY":
            self.reached_limit = True
        elif is_own:
            self.skip_reason = getattr(result, "skip_reason", None)
            # An exception of the user's makes torch leave the code alone for ever; the owner
            # knows better once the call has returned.
            result.apply_to_code = False
        if self._apart is not None and not is_own:
            # Torch would leave the code alone for the whole process, and whoever compiles it in one
            # piece, past the breaks that are meant here, would get nothing, silently.
            result.apply_to_code = False
            self._left_alone[id(code)] = strategy
            self._left_in_call.append(id(code))


def forget(code: CodeType) -> None:
    """Free what was compiled of a function.

    It would stay: it lies in the function's code object and refers to it, where the garbage
    collector does not look.
    """
    from torch._dynamo import utils
    from torch._dynamo.eval_frame import remove_from_cache

    remove_from_cache(code)
    getattr(utils, "guard_failures", {}).pop(code, None)


def _num_of_others(code: CodeType, backend: object, *, in_use: bool = False) -> int:
    """Return how many compiled versions of a function are another backend's.

    Args:
        code: The function's.
        backend: Whose versions are not counted.
        in_use: Whether those of a conversion that has retired are not counted either.
    """
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    backends = [getattr(e, "backend", backend) for e in _debug_get_cache_entry_list(code)]
    others = [other for other in backends if other is not backend]
    return sum(not (in_use and getattr(other, "is_closed", False) is True) for other in others)


def why_off() -> str | None:
    """Return what keeps torch from compiling anything now; None if nothing does."""
    from torch._dynamo import config, eval_frame

    if config.disable:
        return "the compiler is switched off (TORCH_COMPILE_DISABLE or torch._dynamo.config)"
    stance = getattr(getattr(eval_frame, "_stance", None), "stance", "default")
    if stance != "default":
        return f"torch.compiler.set_stance({stance!r}) is in force"
    mode = active_dispatch_mode()
    if mode is not None:
        return f"the TorchDispatchMode {mode} is active, under which torch compiles nothing"
    return None


def active_dispatch_mode() -> str | None:
    """Return the class of a user's dispatch mode that is active; None if there is none."""
    if not torch._C._len_torch_dispatch_stack():
        return None
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    for mode in _get_current_dispatch_mode_stack():
        own = [getattr(type(mode), n, None) for n in ("is_infra_mode", "ignore_compile_internals")]
        if not any(asks is not None and asks() for asks in own):
            return type(mode).__name__
    return None


def is_graph_break(error: BaseException) -> bool:
    """Whether an error says that a forward is not one graph."""
    from torch._dynamo.exc import Unsupported, UserError

    return isinstance(error, Unsupported | UserError)


def _eagerly() -> Any:
    """Return the answer that a frame and all below it run as they are, this once."""
    from torch._dynamo import types

    # Reexported there from C++.
    action, strategy_of = types.FrameAction, types.FrameExecStrategy  # type: ignore[attr-defined]
    return _this_once(strategy_of(action.SKIP, action.SKIP))


def _this_once(strategy: Any) -> Any:
    """Return the answer that a frame runs so, and that others may have something else of it."""
    from torch._dynamo.types import ConvertFrameReturn

    return ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=False)


def _left_to_others() -> Any:
    """Return the answer that a frame and all below it run as they are, and not to ask again.

    What is compiled below on somebody else's behalf is so all the same.
    """
    from torch._dynamo import types

    action, strategy_of = types.FrameAction, types.FrameExecStrategy  # type: ignore[attr-defined]
    return types.ConvertFrameReturn(frame_exec_strategy=strategy_of(action.SKIP, action.SKIP))


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
def _stopping_before(apart: Apart | None) -> Iterator[None]:
    """Have the compiler end its graph where a module is called that others compile."""
    if apart is None:
        yield
        return
    from torch._dynamo.convert_frame import compile_lock
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    traced: Any = UnspecializedNNModuleVariable

    def call_or_stop(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if apart.holds(self.value):
            name = type(self.value).__name__
            unimplemented(gb_type=APART, context=name, explanation=f"{name} is apart", hints=[])
        return call_function(self, tx, args, kwargs)

    # Torch's own lock, as what it traces with is replaced for all threads.
    with compile_lock:
        call_function = traced.call_function
        traced.call_function = call_or_stop
        try:
            yield
        finally:
            traced.call_function = call_function


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


def _num_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@contextlib.contextmanager
def _settings(num_regions: int) -> Iterator[None]:
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
