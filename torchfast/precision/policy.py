"""The number format of a step, resolved for one device.

Autocast covers the forward alone, as torch advises: the backward of an autocast operation runs in
the type its forward chose. The fp32 switches (``fp32_precision``, ieee or tf32) are process-wide
and matter in the backward too, so they are set around the whole step and put back after it.

Autocast caches the casts of fp32 weights until the outermost autocast context ends. Inside a
context of the user's own that is held across steps, the casts would outlive the update and the
next forward would see old weights, silently: `after_update` drops them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch

from torchfast._core.decisions import Decision
from torchfast._core.device import has_fast_bf16, has_tf32
from torchfast._core.errors import PlanError
from torchfast._core.fp32_switches import fp32_precision
from torchfast.precision.options import PrecisionOptions

_NOTHING = nullcontext()  # holds nothing, so one serves every step
_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


@final
class PrecisionPolicy:
    """Enters the contexts of one number format.

    Args:
        options: What was asked for.
        device: Where the step runs.

    Raises:
        PlanError: fp16 on a device type that torch cannot autocast.

    Numerics: ``as_given`` and ``fp32`` on a machine with default switches are exact; tf32, bf16
        and fp16 are close.
    Synchronizes: Never.
    """

    def __init__(self, options: PrecisionOptions, device: torch.device) -> None:
        self.format, self.decision = _resolve(options, device)
        dtype = _AUTOCAST_DTYPES.get(self.format)
        if dtype is not None and not torch.amp.is_autocast_available(device.type):
            raise PlanError(
                f"precision={self.format!r} needs autocast, which torch does not have for "
                f"{device.type!r}; use precision='fp32'"
            )
        self._dtype = dtype
        self._fp32 = {"fp32": "ieee", "tf32": "tf32"}.get(self.format)
        self._kind = device.type

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of one forward."""
        if self._dtype is None:
            return _NOTHING
        # A new one each time: an autocast object that is entered twice does not find its way out.
        return torch.autocast(self._kind, dtype=self._dtype)

    def step(self) -> AbstractContextManager[None]:
        """Return the context of forward, backward and update together."""
        if self._fp32 is None:
            return _NOTHING
        return fp32_precision(self._fp32, self._kind)

    @staticmethod
    def after_update() -> None:
        """Drop casts of weights that the update has just changed."""
        torch.clear_autocast_cache()


def _resolve(options: PrecisionOptions, device: torch.device) -> tuple[str, Decision]:
    def decided(fmt: str, outcome: Any, detail: str) -> tuple[str, Decision]:
        return fmt, Decision(lever="precision", outcome=outcome, detail=detail)

    asked = options.format
    if asked == "as_given":
        return decided("as_given", "left alone", "number formats and fp32 switches as given")
    if asked == "auto":
        if has_fast_bf16(device):
            return decided("bf16", "applied", f"bf16 autocast: {device.type} computes it natively")
        why = f"{device.type} here has no matrix units for bf16, so it would be slower"
        return decided("as_given", "left alone", f"number formats as given: {why}")
    if asked == "fp32" and device.type not in ("cuda", "cpu"):
        return decided("as_given", "left alone", f"{device.type} has no fp32 switches to set")
    if asked == "tf32" and not has_tf32(device):
        why = f"{device.type} here has no tf32 units; 'bf16' is the format to try instead"
        return decided("as_given", "stepped aside", f"fp32 as given: {why}")
    details = {
        "fp32": "fp32 products in full precision (ieee)",
        "tf32": "fp32 tensors, products and convolutions in tf32",
        "bf16": "bf16 autocast of the forward; parameters and optimizer state stay as they are",
        "fp16": "fp16 autocast of the forward, with loss scaling",
        "fp8": "bf16 autocast of the forward, around linear layers in float8",
    }
    return decided(asked, "applied", details[asked])
