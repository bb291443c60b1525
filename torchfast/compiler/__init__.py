"""torch.compile made dependable: by region, in place, undone, and never silently eager."""

from typing import TYPE_CHECKING

from torchfast._core.later import later
from torchfast.compiler.options import CompileOptions, Mode, compile_decision

if TYPE_CHECKING:
    from torchfast.compiler.account import measuring
    from torchfast.compiler.compiled_callable import CompiledCallable, compile_callable
    from torchfast.compiler.compiled_module import Compiled, CompiledModule
    from torchfast.compiler.one_graph import OneGraph
    from torchfast.compiler.record import CompileRecord
    from torchfast.compiler.regions import choose_regions

__all__ = [
    "CompileOptions",
    "CompileRecord",
    "Compiled",
    "CompiledCallable",
    "CompiledModule",
    "Mode",
    "OneGraph",
    "choose_regions",
    "compile_callable",
    "compile_decision",
    "measuring",
]

# A step that is not compiled needs none of it, and it is a sixth of what a trainer is made of.
_HOMES = {
    "torchfast.compiler.account": ("measuring",),
    "torchfast.compiler.compiled_callable": ("CompiledCallable", "compile_callable"),
    "torchfast.compiler.compiled_module": ("Compiled", "CompiledModule"),
    "torchfast.compiler.one_graph": ("OneGraph",),
    "torchfast.compiler.record": ("CompileRecord",),
    "torchfast.compiler.regions": ("choose_regions",),
}
__getattr__ = later(globals(), _HOMES)
