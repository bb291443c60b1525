"""A function compiled as one graph, or not at all: for what must never run twice, nor in half.

An optimizer's update changes what it reads. Were it compiled in part, or begun and then given up,
nobody could say what of it has been done. So a graph break counts as a failure here, and the
caller is told that nothing has run; he then runs the function in a way of his own.
"""

from __future__ import annotations

import builtins
import itertools
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, final

import torch
from torch._dynamo.backends.registry import lookup_backend
from torch.fx import GraphModule, Node
from typing_extensions import override

from torchfast._core.closing import Closing
from torchfast.compiler.causes import OTHERWISE, explained
from torchfast.compiler.conversion import FrameConversion, GaveUpError
from torchfast.compiler.options import CompileOptions
from torchfast.compiler.switched_off import why_off

# As for regions: torch counts compiled versions by the code they are of.
_NUMBERS = itertools.count()

# How a graph says that a value goes to the host.
_READS = ("item", "tolist")
_WHOLE = "it is compiled in one graph or not at all, so leave it out"
_REMEDIES = (
    ("Unsupported", _WHOLE),
    ("UserError", _WHOLE),
    ("HostRead", _WHOLE),
    (
        "FailOnRecompileLimitHit",
        "let no number but the learning rate change at each step (cycle_momentum=False in a "
        "OneCycleLR), or leave it out",
    ),
)


def _call(function: Any, *args: Any) -> None:
    function(*args)


class HostReadError(Exception):
    """A value is read on the host in the middle."""


def _without_reads(backend: Any) -> Callable[..., Any]:
    """Return a backend that refuses a graph with reads in it.

    In one graph torch takes them up, and what a function then keeps of them in plain attributes,
    such as a running number, may be lost without a word.
    """

    def compiled(graph: GraphModule, inputs: Any) -> Any:
        if any(map(_reads_a_value, graph.graph.nodes)):
            raise HostReadError(
                "it reads a value of a tensor on the host (.item(), float(), .tolist()), which "
                "one graph may lose"
            )
        return lookup_backend(backend)(graph, inputs)

    return compiled


def _reads_a_value(node: Node) -> bool:
    if node.op != "call_method" or node.target not in _READS:
        return False
    # A Python number that changed comes in as a tensor, and is read where it was a number.
    source = node.args[0]
    given = source.meta.get("grapharg") if isinstance(source, Node) else None
    return not getattr(given, "pass_arg_as_tensor", False)


@final
class OneGraph(Closing):
    """A function compiled as one graph.

    Args:
        function: What is compiled; what it returns is dropped.
        name: What it is, in words for a report.
        options: Whose backend, ``dynamic`` and ``timeout_s`` hold.

    Attributes:
        failure: Why it cannot be compiled, with a remedy; None if it can, or if nobody knows yet.
        error: What the compiler raised.

    Numerics: May differ by rounding.
    Synchronizes: While it compiles only.
    """

    def __init__(self, function: Callable[..., Any], name: str, options: CompileOptions) -> None:
        self.failure: str | None = None
        self.error: BaseException | None = None
        self._function = function
        self._timeout_s = options.timeout_s
        code_name = f"region_update_{next(_NUMBERS)}_{name}"
        code = _call.__code__.replace(co_name=code_name, co_qualname=code_name)
        self._conversion = FrameConversion(
            code, num_regions=1, timeout_s=options.timeout_s, fullgraph=True, is_update=True
        )
        self._compiled: Callable[..., Any] | None = None
        # Where torch keeps what it has made: in those of this file it would outlive this object.
        own_globals = {"__builtins__": builtins, "__name__": __name__}
        try:
            self._compiled = torch.compile(
                FunctionType(code, own_globals, code_name),
                backend=_without_reads(options.backend),
                fullgraph=True,
                dynamic=options.dynamic,
            )
        except Exception as error:
            self._fail(error)
        else:
            self._conversion.attach(self._compiled)
        self._forget = weakref.finalize(self, self._conversion.retire)
        self._forget.atexit = False

    def __call__(self, *args: Any) -> bool:
        """Run it, and return whether it ran; if not, nothing of it has.

        Raises:
            Exception: What the function itself raises.
        """
        conversion = self._conversion
        if self.failure is not None or self._compiled is None:
            return False
        if not conversion.graphs and self.off_because is not None:
            return False
        try:
            self._compiled(self._function, *args)
        except GaveUpError:
            error = conversion.failure
            conversion.end_call()
            assert error is not None
            self._fail(error)
            return False
        except RuntimeError as error:
            conversion.end_call(by_exception=True)
            # Said behind the call: torch has run it as it is, once, as under a dispatch mode.
            if "found no compiled frames" in str(error):
                return True
            raise
        except BaseException:
            conversion.end_call(by_exception=True)
            raise
        conversion.end_call()
        return True

    @property
    def off_because(self) -> str | None:
        """What keeps torch from compiling anything at this moment; None if nothing does."""
        return why_off()

    @property
    def graphs(self) -> int:
        """How many graphs were compiled; more than one where something has changed."""
        return self._conversion.graphs

    @property
    def seconds(self) -> float:
        """The time that compiling has taken."""
        return self._conversion.seconds

    @override
    def close(self) -> None:
        """Free what was compiled."""
        self._compiled = None
        self._forget()
        self._conversion.forget_others()

    def _fail(self, error: BaseException) -> None:
        cause, remedy = explained(error, self._timeout_s)
        # What helps with a module is not to be had here.
        inner = getattr(error, "inner_exception", None) or error
        remedy = next((r for sign, r in _REMEDIES if sign in type(inner).__name__), remedy)
        if remedy == OTHERWISE:
            remedy = "on_failure='raise' shows the whole error; update=False leaves it out"
        self.error, self.failure = error, f"{cause}. Remedy: {remedy}"
        self._compiled = None
