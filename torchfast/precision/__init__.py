"""In which number format a step computes, and how its tensors lie in memory.

Five formats and one layout, behind one door:

- ``fp32``: full fp32 products. ``tf32``: fp32 tensors, products on the tf32 units.
- ``bf16``: autocast of the forward; parameters, gradients and optimizer state stay fp32.
- ``fp16``: the same with loss scaling, whose skipped steps are counted on the device.
- ``fp8``: bf16, with the products of large linear layers in float8 (`Float8Linears`).
- channels_last: 4-d tensors as NHWC, which is what convolution kernels want.

`LowBitAdamW` keeps the optimizer's moments in 8 or 4 bits.

And what happens where a format, or a batch, yields no number: `UpdateGuard` calls the update off.

Global switches are set for the length of a step and put back after it, so nothing outside the
step sees them, however many trainers a process has.
"""

from typing import TYPE_CHECKING

from torchfast._core.later import later
from torchfast.precision.convolutions import Convolutions
from torchfast.precision.float8_foreign import check_none_foreign, foreign_decisions
from torchfast.precision.float8_options import Float8Options
from torchfast.precision.low_bit_kind import as_low_bit, check_replicas
from torchfast.precision.low_bit_options import WORDS as LOW_BIT_WORDS
from torchfast.precision.low_bit_options import LowBitOptions
from torchfast.precision.nonfinite import NonfiniteOptions, UpdateGuard
from torchfast.precision.options import PrecisionOptions, precision_from
from torchfast.precision.policy import PrecisionPolicy
from torchfast.precision.scaler import LossScaler
from torchfast.precision.skip_counts import SkipCounts
from torchfast.precision.skipping import Snapshot

if TYPE_CHECKING:
    from torchfast.precision.float8 import Float8Linears
    from torchfast.precision.float8_choice import Float8Receipt, ShapeChoice
    from torchfast.precision.float8_drift import Drift, LayerNumbers
    from torchfast.precision.float8_watch import Float8Watch
    from torchfast.precision.low_bit import LowBitAdamW
    from torchfast.precision.low_bit_sources import low_bit_source

__all__ = [
    "LOW_BIT_WORDS",
    "Convolutions",
    "Drift",
    "Float8Linears",
    "Float8Options",
    "Float8Receipt",
    "Float8Watch",
    "LayerNumbers",
    "LossScaler",
    "LowBitAdamW",
    "LowBitOptions",
    "NonfiniteOptions",
    "PrecisionOptions",
    "PrecisionPolicy",
    "ShapeChoice",
    "SkipCounts",
    "Snapshot",
    "UpdateGuard",
    "as_low_bit",
    "check_none_foreign",
    "check_replicas",
    "foreign_decisions",
    "low_bit_source",
    "precision_from",
]

# What only float8 and low-bit state need.
_HOMES = {
    "torchfast.precision.float8": ("Float8Linears",),
    "torchfast.precision.float8_choice": ("Float8Receipt", "ShapeChoice"),
    "torchfast.precision.float8_drift": ("Drift", "LayerNumbers"),
    "torchfast.precision.float8_watch": ("Float8Watch",),
    "torchfast.precision.low_bit": ("LowBitAdamW",),
    "torchfast.precision.low_bit_sources": ("low_bit_source",),
}
__getattr__ = later(globals(), _HOMES)
