"""What stands around the blocks of a model, compiled in pieces between them.

A model that is compiled by its blocks spends the rest of its step in code that is not: above all
in the loss, which over a large vocabulary reads and writes more memory than a block does. Compiled,
the casts and sums of a cross entropy are one kernel, and its backward another.

`CodeAround` compiles that code and leaves the blocks alone. Its graphs end before each block and
begin again behind it, by graph breaks that are meant. This adds a few small graphs, whatever the
depth: the head and the loss of a GPT are two.

Where torch cannot go on after a break, such as in a loop over the blocks, that one function runs as
it is, and the functions that it calls are compiled by themselves. So what the forward of a model
computes outside of its blocks, if it has the loop too, is compiled only where it stands in a
function or a module class of the user's own. Modules of torch's own classes run eagerly there.

Nothing of it raises an error of its own: what cannot be compiled runs as it would without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

import torch
from typing_extensions import override

from torchfast._core.closing import Closing
from torchfast._core.decisions import Decision
from torchfast.compiler.in_place import Region
from torchfast.compiler.options import CompileOptions
from torchfast.compiler.region_kind import RegionKind, decision_of, name_of


@final
class CodeAround(Closing):
    """Calls a function that calls regions, with what stands around them compiled.

    Args:
        function: Such as ``loss_fn(model, batch)``; it is not changed.
        options: How the regions are compiled. A graph break is no error here, and neither is what
            cannot be compiled, whatever they say.

    Attributes:
        is_in_force: Whether the function is called compiled, or as it is. Regions that do not stand
            in their places would be compiled along with it.

    Numerics: May differ by rounding.
    Synchronizes: While it compiles only.
    """

    def __init__(self, function: Callable[..., Any], options: CompileOptions) -> None:
        self.is_in_force = True
        self._function = function
        self._kind = self._kind_of(options)
        self._region = Region("", None, self._kind)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        if not self.is_in_force or torch.compiler.is_compiling():
            return self._function(*args, **kwargs)
        return self._kind.run(self._region, self._function, args, kwargs)

    @property
    def code_name(self) -> str:
        """The name under which torch reports on the code."""
        return self._kind.code_name

    def decision(self) -> Decision:
        """Return what became of it."""
        return decision_of(self._kind, [self._region])

    def compile_as(self, options: CompileOptions) -> None:
        """Compile as these say from now on, which were found after this was made."""
        self._kind.close()
        self._kind = self._kind_of(options)
        self._region = Region("", None, self._kind)

    @override
    def close(self) -> None:
        """Free what was compiled, and call the function as it is."""
        self.is_in_force = False
        self._kind.close()

    def _kind_of(self, options: CompileOptions) -> RegionKind:
        # Until a search has found the mode this is not in force, and torch knows no "auto".
        mode = "default" if options.mode == "auto" else options.mode
        return RegionKind(
            name_of(self._function),
            "what stands around them",
            replace(options, mode=mode, fullgraph=False, on_failure="eager"),
            calls=self._function,
            is_function=True,
            is_around=True,
        )
