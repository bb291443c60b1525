"""The place where torch turns Python frames into compiled code, watched and bounded.

``torch.compile(function)`` asks a converter for each frame that runs below the function and has no
compiled code that fits: the function's own frame, and after a graph break those that it calls. A
`FrameConversion` stands in front of the converter of one function. So it knows whether anything was
compiled, and why not; how long that took, with a limit on it; and when the compiler fails, it has
that one frame run as it is, within the same call. Nothing runs twice, so neither statistics of a
BatchNorm nor random numbers are drawn twice. A call whose frames are all compiled does not come by
here, so none of this costs anything in the steady state.

What is private to torch is touched here, and in `while_converting` and `switched_off`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, final

from torch import nn

from torchfast.compiler.breaks import without_fake
from torchfast.compiler.refusal import is_refused, refuse
from torchfast.compiler.remarks import NO_OPERATION
from torchfast.compiler.switched_off import active_dispatch_mode
from torchfast.compiler.timeout import CallTimeoutError, call_within
from torchfast.compiler.while_converting import Apart, settings

# Each costs a trace, so a block that is skipped by chance in every run is not asked about for ever.
_MOST_EMPTY = 64


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
        inlined: Called with each module that was compiled as a part of the function.

    Attributes:
        graphs: Graphs compiled.
        seconds: Time spent on it.
        failure: What went wrong in the running call.
        skip_reason: Why torch left the function's own frame alone.
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
        inlined: Callable[[nn.Module], object] = lambda _: None,
    ) -> None:
        self.graphs = 0
        self.seconds = 0.0
        self.failure: BaseException | None = None
        self.skip_reason: str | None = None
        self.has_news = False
        self.others: dict[int, CodeType] = {}  # by identity, as equal ones have caches of their own
        self._code = code
        self._num_regions = num_regions
        self._timeout_s = timeout_s
        self._fullgraph = fullgraph
        self._apart = apart
        self._is_update = is_update
        self._inlined = inlined
        self._spent_s = 0.0
        self._num_empty = 0
        self._reason: str | None = None
        self._leaves_own_frame = False
        # What became of functions that torch left alone, by identity; those of the running call.
        self._left_alone: dict[int, Any] = {}
        self._left_in_call: list[int] = []
        # What torch answered for functions at the recompile limit, by identity; those of them that
        # ran as they are in the running call; and all functions that have graphs.
        self._at_limit: dict[int, Any] = {}
        self._limited: set[int] = set()
        self._with_graphs: set[int] = set()
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
        link: Any = functools.partial(compiler)  # torch asks of all on the path that they be called
        link._torchdynamo_orig_backend = self._backend
        self._torchdynamo_orig_backend = link
        cell.cell_contents = self
        return True

    @property
    def is_at_limit(self) -> bool:
        """Whether the recompile limit forbids further versions of a function."""
        return bool(self._at_limit)

    @property
    def reached_limit(self) -> bool:
        """Whether a function ran as it is in the running call, as no version of it fits."""
        return bool(self._limited)

    @property
    def ran_as_it_is(self) -> bool:
        """Whether that is true of all that could have run compiled."""
        is_own = id(self._code) in self._limited
        return is_own or (self.reached_limit and self._with_graphs <= self._limited)

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
        self._limited.clear()
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
        self._at_limit.clear()
        self._with_graphs.clear()

    def had_nothing_to_compile(self) -> bool:
        """Whether torch found no operation in the call, as where a block is skipped by chance.

        It says nothing of later calls, which are looked at as well, unless there were many.
        """
        is_empty = NO_OPERATION in (self.skip_reason or "")
        if not is_empty or self._num_empty >= _MOST_EMPTY:
            return False
        self._num_empty += 1
        self.skip_reason = None
        return True

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
        limit = self._limit_of(frame.f_code)
        if limit is not None:
            self._note_limit(frame.f_code)
            return _this_once(limit)
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
        self._reason = None
        graphs, start = _num_graphs(), time.perf_counter()
        left_s = self._timeout_s - self._spent_s
        try:
            # Versions of others use up no limit.
            num_regions = self._num_regions + _num_of_others(frame.f_code, self._backend)
            with settings(
                num_regions,
                self._apart,
                is_update=self._is_update,
                inlined=self._inlined,
                skipped=self._note_reason,
            ):
                return call_within(left_s, self._convert, frame, cache_entry, frame_state)
        except (Exception, CallTimeoutError) as error:
            if isinstance(error, CallTimeoutError) and time.perf_counter() - start < left_s:
                raise  # it is of a limit around this one, as a search has
            # The frames of the compiler hold the arguments of the call.
            self.failure = error.with_traceback(None)
            return None
        finally:
            taken_s = time.perf_counter() - start
            self._spent_s += taken_s
            self.seconds += taken_s
            if self.failure is None and _num_graphs() > graphs:
                self.graphs += _num_graphs() - graphs
                self._with_graphs.add(id(frame.f_code))

    def _note_left_alone(self, result: Any, code: CodeType, *, is_own: bool) -> None:
        strategy = result.frame_exec_strategy
        # Under its own name it is C++ that has no types.
        if strategy.cur_action.name == "RUN_ONLY":
            # Torch would ask no more, and nobody would know whether a version fits a later call.
            result.apply_to_code = False
            self._at_limit[id(code)] = strategy
            self._note_limit(code)
            return
        if is_own:
            self.skip_reason = getattr(result, "skip_reason", None) or self._reason
            # An exception of the user's makes torch leave the code alone for ever; the owner
            # knows better once the call has returned.
            result.apply_to_code = False
        if self._apart is not None and not is_own:
            # Torch would leave the code alone for the whole process, and whoever compiles it in one
            # piece, past the breaks that are meant here, would get nothing, silently.
            result.apply_to_code = False
            self._left_alone[id(code)] = strategy
            self._left_in_call.append(id(code))

    def _note_reason(self, reason: str) -> None:
        if NO_OPERATION in reason:
            self._reason = reason

    def _note_limit(self, code: CodeType) -> None:
        self.has_news = True
        self._limited.add(id(code))

    def _limit_of(self, code: CodeType) -> Any:
        """Return what is answered for a function at the limit; None if it is not."""
        limit = self._at_limit.get(id(code))
        if limit is not None and not _versions(code):
            # As after torch._dynamo.reset(): all begins anew.
            del self._at_limit[id(code)]
            return None
        return limit


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
    backends = [getattr(e, "backend", backend) for e in _versions(code)]
    others = [other for other in backends if other is not backend]
    return sum(not (in_use and getattr(other, "is_closed", False) is True) for other in others)


def _versions(code: CodeType) -> list[Any]:
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return list(_debug_get_cache_entry_list(code))


def is_graph_break(error: BaseException) -> bool:
    """Whether an error says that a forward is not one graph, as torch traces it."""
    from torch._dynamo.exc import Unsupported, UserError

    return isinstance(error, Unsupported | UserError) or without_fake(str(error)) is not None


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


def _num_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
