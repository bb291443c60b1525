"""In which number format a step computes, and how its tensors lie in memory.

Four formats and one layout, behind one door:

- ``fp32``: full fp32 products. ``tf32``: fp32 tensors, products on the tf32 units.
- ``bf16``: autocast of the forward; parameters, gradients and optimizer state stay fp32.
- ``fp16``: the same with loss scaling, whose skipped steps are counted on the device.
- channels_last: 4-d tensors as NHWC, which is what convolution kernels want.

And what happens where a format, or a batch, yields no number: `UpdateGuard` calls the update off.

Global switches are set for the length of a step and put back after it, so nothing outside the
step sees them, however many trainers a process has.
"""

from torchfast.precision.layout import ChannelsLast
from torchfast.precision.nonfinite import NonfiniteOptions, UpdateGuard
from torchfast.precision.options import PrecisionOptions
from torchfast.precision.policy import PrecisionPolicy
from torchfast.precision.scaler import LossScaler
from torchfast.precision.skip_counts import SkipCounts
from torchfast.precision.skipping import Snapshot

__all__ = [
    "ChannelsLast",
    "LossScaler",
    "NonfiniteOptions",
    "PrecisionOptions",
    "PrecisionPolicy",
    "SkipCounts",
    "Snapshot",
    "UpdateGuard",
]
