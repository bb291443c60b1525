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

All that is private to torch is touched in this file only.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, cast, final

import torch

from torchfast.compiler.timeout import CallTimeoutError, call_within


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

    Attributes:
        graphs: Graphs compiled.
        seconds: Time spent on it.
        failure: What went wrong in the running call.
        skip_reason: Why torch left the function's own frame alone.
        reached_limit: Whether the recompile limit was reached in the running call.
        has_news: Whether the converter was asked in the running call.
    """

    def __init__(
        self, code: CodeType, *, num_regions: int, timeout_s: float, fullgraph: bool
    ) -> None:
        self.graphs = 0
        self.seconds = 0.0
        self.failure: BaseException | None = None
        self.skip_reason: str | None = None
        self.reached_limit = False
        self.has_news = False
        self._code = code
        self._num_regions = num_regions
        self._timeout_s = timeout_s
        self._fullgraph = fullgraph
        self._spent_s = 0.0
        self._leaves_own_frame = False
        self._convert: Callable[..., Any] | None = None
        # Torch follows this to the backend, to tell compiled code of one backend from another's.
        self._torchdynamo_orig_backend: Any = None
        self._backend: object = None

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
        self._torchdynamo_orig_backend = SimpleNamespace(_torchdynamo_orig_backend=self._backend)
        cell.cell_contents = self
        return True

    def end_call(self) -> None:
        """Forget what belongs to one call."""
        self.failure = None
        self.reached_limit = False
        self.has_news = False
        self._spent_s = 0.0

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
        self.has_news = True
        if active_dispatch_mode() is not None:
            # Torch would leave the code alone for ever.
            return _eagerly()
        if not is_own and check(frame.f_code):
            return self._convert(frame, cache_entry, frame_state)
        result = self._converted(frame, cache_entry, frame_state)
        if result is None:
            if self._fullgraph:
                raise GaveUpError
            return _eagerly()
        if result.guarded_code is None:
            self._note_left_alone(result, is_own)
        return result

    def _converted(self, frame: FrameType, cache_entry: Any, frame_state: Any) -> Any:
        """Return what the converter does; None if it fails or takes too long."""
        assert self._convert is not None
        graphs, start = _num_graphs(), time.perf_counter()
        try:
            with _settings(self._num_regions + self._num_of_others(frame.f_code)):
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

    def _num_of_others(self, code: CodeType) -> int:
        """Return how many compiled versions of a function are not ours; they use up no limit."""
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list

        return sum(
            getattr(entry, "backend", self._backend) is not self._backend
            for entry in _debug_get_cache_entry_list(code)
        )

    def _note_left_alone(self, result: Any, is_own: bool) -> None:
        # Under its own name it is C++ that has no types.
        if result.frame_exec_strategy.cur_action.name == "RUN_ONLY":
            self.reached_limit = True
        elif is_own:
            self.skip_reason = getattr(result, "skip_reason", None)
            # An exception of the user's makes torch leave the code alone for ever; the owner
            # knows better once the call has returned.
            result.apply_to_code = False


def forget(code: CodeType) -> None:
    """Free what was compiled of a function.

    It would stay: it lies in the function's code object and refers to it, where the garbage
    collector does not look.
    """
    from torch._dynamo import utils
    from torch._dynamo.eval_frame import remove_from_cache

    remove_from_cache(code)
    getattr(utils, "guard_failures", {}).pop(code, None)


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
    strategy = strategy_of(action.SKIP, action.SKIP)
    return types.ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=False)


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
