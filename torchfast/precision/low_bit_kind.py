"""Whether an optimizer keeps its moments in low bits, asked without importing what would."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch.optim import Optimizer

if TYPE_CHECKING:
    from torchfast.precision.low_bit import LowBitAdamW


def as_low_bit(optimizer: Optimizer) -> LowBitAdamW | None:
    """Return the optimizer if it is a `LowBitAdamW`, else None.

    There is none in a process that has not imported the class, which few do.
    """
    module = sys.modules.get("torchfast.precision.low_bit")
    return optimizer if module is not None and isinstance(optimizer, module.LowBitAdamW) else None
