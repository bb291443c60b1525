"""A function compiled as a whole, with all that it calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, final

import torch
from torch import nn

from torchfast._core.arguments import check_callable, check_type
from torchfast._core.closing import Closing
from torchfast._core.compiled_code import is_compiled_by_torch
from torchfast._core.decisions import Decision, Report
from torchfast._core.errors import ClosedError
from torchfast.compiler.account import CompileAccount
from torchfast.compiler.in_place import Region
from torchfast.compiler.options import CompileOptions
from torchfast.compiler.region_kind import RegionKind, decision_of, name_of


@final
class CompiledCallable(Closing):
    """A function compiled as a whole, such as one that calls a model and its loss.

    Args:
        function: What is compiled; it is not changed.
        options: How; `CompileOptions.regions` has no meaning here.
        model: Whose structure names the place in the cache; needed with one.
        context: What else the place depends on, as text.

    Raises:
        TypeError: Something that cannot be called.
        CompileError: As for `CompiledModule`.

    Numerics: May differ by rounding, as for `CompiledModule`.
    Synchronizes: While it compiles only.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: CompileOptions,
        *,
        model: nn.Module | None = None,
        context: str = "",
    ) -> None:
        check_callable("function", function, "function(...)")
        if not isinstance(options, CompileOptions):
            raise TypeError(
                "options must be CompileOptions or None, such as CompileOptions(dynamic=True), "
                f"got {options!r} ({type(options).__name__})"
            )
        if model is not None:
            check_type("model", model, nn.Module)
        _check_resolved(options)
        if is_compiled_by_torch(function):
            raise ValueError(
                f"function {name_of(function)} is compiled already: it is what torch.compile "
                "returned; pass the function that was given to torch.compile"
            )
        self.options = options
        self._function = function
        self._account = CompileAccount(model, options, context)
        self._kind = RegionKind(name_of(function), "", options, calls=function, is_function=True)
        self._region = Region("", None, self._kind)
        self._is_closed = False
        self._is_suspended = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        if self._is_suspended or self._is_closed or torch.compiler.is_compiling():
            return self._function(*args, **kwargs)
        return self._kind.run(self._region, self._function, args, kwargs)

    @property
    def function(self) -> Callable[..., Any]:
        """The function, as it was given."""
        return self._function

    @property
    def status(self) -> str:
        """``"not called"``, ``"compiled"``, or ``"eager: "`` and why."""
        return self._region.status

    def decisions(self) -> list[Decision]:
        """Return what became of it."""
        return [
            decision_of(self._kind, [self._region]),
            *self._account.decisions([self._kind.code_name]),
        ]

    def before_step(self) -> None:
        """Say that a step of the training begins, so that what it compiles is told from others'."""
        self._account.before_step()

    def after_step(self) -> None:
        """Say that a step of the training is done: see `CompiledModule.after_step`."""
        self._account.after_step()

    def report(self) -> Report:
        """Return the decisions and the counts, for a person or as JSON."""
        return Report(
            title=f"CompiledCallable({name_of(self._function)})",
            decisions=tuple(self.decisions()),
            counters=self._account.counters([self._kind.code_name]),
        )

    @property
    def is_compiled(self) -> bool:
        """Whether it has been compiled."""
        return self._region.is_compiled

    def suspend(self) -> None:
        """Call the function as it is until `resume`; what was compiled is kept."""
        self._is_suspended = True

    def resume(self) -> None:
        """Call what was compiled again.

        Raises:
            ClosedError: After `close`.
        """
        if self._is_closed:
            raise ClosedError("this CompiledCallable is closed; make another one to compile again")
        self._is_suspended = False

    def keep_nothing(self) -> None:
        """Leave the cache as it is from now on."""
        self._account.keep_nothing()

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied and pickled.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "a CompiledCallable stands for code of this process and cannot be copied or pickled: "
            f"copy or pickle its function, {name_of(self._function)}, and compile that"
        )

    def close(self) -> None:
        """Call the function as it is from now on."""
        self._is_closed = True
        self._account.close()
        self._kind.close()


def compile_callable(
    function: Callable[..., Any],
    options: CompileOptions | None = None,
    *,
    model: nn.Module | None = None,
    context: str = "",
) -> CompiledCallable:
    """Compile a function as a whole, with all that it calls.

    Regions inside it are compiled as parts of it.

    Args:
        function: Such as ``loss_fn(model, batch)``.
        options: How; by default as `CompileOptions` is.
        model: The model that it calls; its structure names the place in the cache.
        context: What else the place depends on, as text.

    Example:
        >>> double = compile_callable(lambda x: x * 2, CompileOptions(backend="eager"))
        >>> double(torch.ones(2)).tolist(), double.status
        ([2.0, 2.0], 'compiled')
    """
    return CompiledCallable(function, options or CompileOptions(), model=model, context=context)


def _check_resolved(options: CompileOptions) -> None:
    if options.mode == "auto":
        raise ValueError(
            "mode='auto' has to be measured first, which a plan does, and CompiledModule.search(); "
            "give one of the other modes"
        )
