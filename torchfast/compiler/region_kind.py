"""Equal regions and the code that they share: compiled once, run, and given up where it fails.

What is compiled is a function of this file that takes the module as an argument, so that

- modules of torch's own classes are compiled. ``Linear().compile()`` does nothing, silently, since
  torch leaves frames of its own files alone.
- equal modules share compiled code: parameters come in as inputs of the graph.

Each kind of region gets a code object of its own. With one for all, torch would count their graphs
together and run the ninth kind eagerly, silently.

Global module hooks (`torch.nn.modules.module.register_module_forward_hook`), which compiled code
cannot notice, make regions run eagerly while there are any.
"""

from __future__ import annotations

import itertools
import logging
import re
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, final

import torch
from torch.nn.modules import module as torch_module

from torchfast._core.closing import Closing
from torchfast._core.decisions import Decision
from torchfast._core.errors import CompileError
from torchfast._core.left_to_python import leave_to_python
from torchfast._core.untouched import EAGER_LOOK
from torchfast.compiler.causes import explained
from torchfast.compiler.conversion import FrameConversion, GaveUpError, is_graph_break
from torchfast.compiler.in_place import AS_A_PART, Region, is_region, note_part
from torchfast.compiler.options import CompileOptions, compile_decision
from torchfast.compiler.parameters import note_parameters
from torchfast.compiler.refusal import run_refusing, stance_forbids
from torchfast.compiler.remarks import (
    ASKED_NO_MORE,
    AT_LIMIT,
    COPIED,
    HOOKED,
    NO_OPERATION,
    NOTHING,
    NOTHING_AROUND,
    NOTHING_IN_CALL,
    SKIPPED,
)
from torchfast.compiler.steady_watch import SteadyWatch
from torchfast.compiler.switched_off import is_traced, why_bypassed, why_off
from torchfast.compiler.while_converting import Apart

logger = logging.getLogger(__name__)

_GLOBAL_HOOKS = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)
# Torch remembers the sizes that it has seen by file, line and name of a function: two of one name
# would make each other's sizes dynamic.
_NUMBERS = itertools.count()


def _call_module(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _call_function(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@final
class RegionKind:
    """Equal regions, which share their compiled code and their fate.

    Args:
        class_name: What they are.
        names: The regions in words.
        options: How they are compiled.
        calls: What is called of them, whose arguments reports name: a function, or the forward of
            a module.
        num_regions: How many there are.
        is_function: Whether they are functions and not modules.
        is_around: Whether what stands around other regions is compiled, and these are left out.

    Attributes:
        code_name: The name under which torch reports on their code.
        eager_because: Why they run as they are, and what to do about it; None if they do not.
        eager_for_now: Why the last call ran eagerly, where later ones may not.
        is_empty: Whether no graph came of what stands around regions.
        remarks: What was said once, by warnings.
    """

    def __init__(
        self,
        class_name: str,
        names: str,
        options: CompileOptions,
        *,
        calls: Callable[..., Any],
        num_regions: int = 1,
        is_function: bool = False,
        is_around: bool = False,
    ) -> None:
        template = _call_function if is_function else _call_module
        word = re.sub(r"\W", "_", class_name)
        self.code_name = f"region_{next(_NUMBERS)}_{word}"
        note_parameters(self.code_name, calls)
        code = template.__code__.replace(co_name=self.code_name, co_qualname=self.code_name)
        self.class_name = class_name
        self.names = names
        self.num_regions = num_regions
        self.eager_because: str | None = None
        self.eager_for_now: str | None = None
        self.is_empty = False
        self.remarks: list[str] = []
        self.conversion = FrameConversion(
            code,
            num_regions=num_regions,
            timeout_s=options.timeout_s,
            fullgraph=options.fullgraph,
            apart=Apart(is_region, Region.__call__.__code__) if is_around else None,
            inlined=note_part,
        )
        self._is_around = is_around
        self._options = options
        self._record: Closing | None = None
        self._sizes: SteadyWatch | None = None
        if options.mark_dynamic:
            from torchfast.compiler.record import CompileRecord

            self._record = record = CompileRecord()
            name, dynamic = self.code_name, options.dynamic
            self._sizes = SteadyWatch(record, mark_dynamic=True, name=name, dynamic=dynamic)
        self._raises = False
        self._cause: BaseException | None = None  # of what is raised from then on
        self._eager: Callable[..., Any] = template
        self._is_watched = False
        # A trace that began there would not know who has called, and follow all that is done to
        # compile the region.
        leave_to_python(Region.__call__.__code__)
        self._compiled: Callable[..., Any] = template
        self._function = FunctionType(code, template.__globals__, self.code_name)
        try:
            self._compiled = _compiled(self._function, options)
        except Exception as error:
            self._fail(error)
        else:
            self._is_watched = self.conversion.attach(self._compiled)
        # Also where nobody closes it.
        self._forget = weakref.finalize(self, self.conversion.retire)
        self._forget.atexit = False

    def __str__(self) -> str:
        return f"{self.names} ({self.class_name})" if self.names else self.class_name

    @property
    def why_bypassed(self) -> str | None:
        """What keeps code that is compiled from being run at this moment; None if nothing does."""
        return HOOKED if has_global_hooks() else why_bypassed()

    def close(self) -> None:
        """Free what was compiled; a call after that compiles anew."""
        self._forget()
        self.conversion.forget_others()
        if self._record is not None:
            self._record.close()

    def run(self, region: Region | None, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a region of this kind; ``region`` is what is to know what came of it."""
        if EAGER_LOOK.is_on or is_traced():
            return self._eager(target, *args, **kwargs)
        if self.eager_because is not None or has_global_hooks():
            return self._run_eagerly(region, target, args, kwargs)
        conversion = self.conversion
        if self._sizes is not None:
            self._sizes.mark({"args": args, "kwargs": kwargs})
        try:
            is_past_torch = self._is_around or conversion.is_at_limit
            if is_past_torch and self._is_watched and stance_forbids():
                result = run_refusing(conversion, self._function, target, *args, **kwargs)
                conversion.end_call()  # nothing was converted: no news
                return result
            result = self._compiled(target, *args, **kwargs)
        except GaveUpError:
            return self._run_after_giving_up(target, args, kwargs)
        except RuntimeError as error:
            conversion.end_call(by_exception=True)
            if self._options.fullgraph and "found no compiled frames" in str(error):
                self._explain(error)
                message = self._error()
                self.eager_because = None  # it may be off for now only
                raise message from error
            raise
        except BaseException:
            # The user's own: whatever failed before it in the compiler is its echo.
            conversion.end_call(by_exception=True)
            raise
        if conversion.has_news or (region is not None and region.state != "compiled"):
            self._settle(region)
        return result

    def note_copy(self) -> None:
        """Note that a shallow copy of a region is called as it is."""
        self._remark(COPIED)

    def _run_eagerly(self, region: Region | None, target: Any, args: Any, kwargs: Any) -> Any:
        if self._raises:
            raise self._error() from self._cause
        if self.eager_because is None:
            self._leave_for_now(region, HOOKED)
        elif region is not None:
            region.state = "eager"
        return self._eager(target, *args, **kwargs)

    def _run_after_giving_up(self, target: Any, args: Any, kwargs: Any) -> Any:
        error = self.conversion.failure
        self.conversion.end_call()
        # An error of the user's code comes out as itself.
        result = self._eager(target, *args, **kwargs)
        assert error is not None
        if is_graph_break(error):
            self._explain(error)
            self._raises, self._cause = True, error
            raise self._error() from error
        self._fail(error)
        return result

    def _settle(self, region: Region | None) -> None:
        """Take account of a call that has returned."""
        conversion = self.conversion
        failure, reached_limit = conversion.failure, conversion.reached_limit
        ran_as_it_is = conversion.ran_as_it_is
        conversion.end_call()
        if self._sizes is not None:
            self._sizes.check()
        if failure is not None:
            self._fail(failure)
            return
        off, is_empty_call = why_off(), not self._is_around and conversion.had_nothing_to_compile()
        if off is not None:
            self._leave_for_now(region, f"{off}; it is tried again at each call")
        elif is_empty_call and not conversion.graphs:
            self.eager_for_now = NOTHING_IN_CALL
            if region is not None:
                region.state = "eager"
        elif not conversion.graphs:
            if region is not None:
                region.state = "eager"
            # The further lines of torch's are for its own developers.
            reason = (conversion.skip_reason or "").partition("\n")[0]
            around = NOTHING_AROUND + (f" (torch: {reason})" if reason else "")
            reason = SKIPPED.get(reason, reason) or NOTHING
            self.eager_because = f"{reason}. Remedy: compile other regions, to leave it out"
            self.is_empty = self._is_around  # where regions are all that there is, all is well
            if self.is_empty:
                self.eager_because = around
            else:
                logger.warning("%s is not compiled: %s.", self, self.eager_because)
        elif ran_as_it_is:
            self._leave_for_now(region, AT_LIMIT)
        else:
            if reached_limit:
                self._remark(AT_LIMIT)
            self.eager_for_now = None
            if region is not None:
                region.state = "compiled"
            if conversion.skip_reason is not None:
                conversion.leave_own_frame()
                if NO_OPERATION in conversion.skip_reason:
                    self._remark(ASKED_NO_MORE)

    def _fail(self, error: BaseException) -> None:
        """Run eagerly from now on, or raise, as the options say."""
        self._explain(error)
        self._compiled = self._eager  # what was compiled is of no more use
        if self._options.on_failure == "raise":
            self._cause = error
            raise self._error() from error
        logger.warning("%s runs eagerly: %s.", self, self.eager_because)

    def _explain(self, error: BaseException) -> None:
        cause, remedy = explained(error, self._options.timeout_s)
        self.eager_because = f"{cause}. Remedy: {remedy}"
        self._raises = self._options.on_failure == "raise"

    def _error(self) -> CompileError:
        return CompileError(f"{self} cannot be compiled: {self.eager_because}.")

    def _leave_for_now(self, region: Region | None, why: str) -> None:
        """Note a call that has run eagerly, where later ones may not."""
        self.eager_for_now = why
        self._remark(why)
        if region is not None:
            region.state = "eager"

    def _remark(self, text: str) -> None:
        """Say something once."""
        if text not in self.remarks:
            self.remarks.append(text)
            logger.warning("%s: %s.", self, text)


def decision_of(kind: RegionKind, regions: list[Region]) -> Decision:
    """Return what became of the regions of a kind."""
    states = [region.state for region in regions]
    conversion = kind.conversion
    if kind.is_empty:
        return compile_decision("left alone", f"{kind}: {kind.eager_because}")
    eager = [why for region in regions if (why := region.why_eager) is not None]
    if eager or kind.remarks:
        why = eager[0] if eager else "; ".join(kind.remarks)
        is_all = eager and len(eager) >= len(states) - states.count("not called")
        part = "" if is_all else " in part"
        return compile_decision("stepped aside", f"{kind} runs eagerly{part}: {why}")
    if AS_A_PART in states and "compiled" not in states:
        return compile_decision("applied", f"{kind}: {AS_A_PART}")
    if "compiled" not in states:
        # The user's own torch.compile of what calls them goes past them, unseen.
        why = "not called yet, unless within what torch.compile(...) has compiled"
        return compile_decision("applied", f"{kind}: {why}")
    uncalled = states.count("not called")
    return compile_decision(
        "applied",
        f"{kind}: compiled in {conversion.seconds:.1f} s, graphs: {conversion.graphs}"
        + (f"; {uncalled} not called yet" if uncalled else ""),
    )


def name_of(function: Callable[..., Any]) -> str:
    """Return what a function is called."""
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) else type(function).__name__


def has_global_hooks() -> bool:
    """Whether there are hooks for which regions run eagerly."""
    first, second, third, fourth = _GLOBAL_HOOKS
    return bool(first or second or third or fourth)


def _compiled(function: Callable[..., Any], options: CompileOptions) -> Callable[..., Any]:
    backend = options.backend
    if backend == "inductor":
        # Here, since it registers an operator.
        from torchfast.compiler.kept_reads import KeptReads

        backend = KeptReads(options.mode, options.dynamic)
    compiled: Callable[..., Any] = torch.compile(
        function, backend=backend, fullgraph=options.fullgraph, dynamic=options.dynamic
    )
    return compiled
