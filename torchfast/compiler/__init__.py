"""torch.compile made dependable: by region, in place, undone, and never silently eager."""

from typing import TYPE_CHECKING

from torchfast._core.later import later
from torchfast.compiler.account import measuring
from torchfast.compiler.compiled_callable import CompiledCallable, compile_callable
from torchfast.compiler.compiled_module import Compiled, CompiledModule
from torchfast.compiler.one_graph import OneGraph
from torchfast.compiler.options import CompileOptions, Mode, compile_decision
from torchfast.compiler.regions import choose_regions

if TYPE_CHECKING:
    from torchfast.compiler.record import CompileRecord

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

# What a record knows of is many small classes, and a step that is not compiled has none.
_HOMES = {"torchfast.compiler.record": ("CompileRecord",)}
__getattr__ = later(globals(), _HOMES)
