"""torch.compile made dependable: by region, in place, undone, and never silently eager."""

from torchfast.compiler.account import measuring
from torchfast.compiler.compiled_callable import CompiledCallable, compile_callable
from torchfast.compiler.compiled_module import Compiled, CompiledModule
from torchfast.compiler.one_graph import OneGraph
from torchfast.compiler.options import CompileOptions, Mode, compile_decision
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
