"""What a trial of a compiled update has measured, kept beside the compile cache for the next run.

The key is the optimizer in place of a model: its class and code, its options without the learning
rates, and what its parameters look like. See `torchfast.compiler.receipts`.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from torchfast._core.fingerprint import optimizer_fingerprint
from torchfast._core.measure import Measurement
from torchfast._core.option_fields import json_ready
from torchfast.compiler import CompileOptions
from torchfast.compiler.machine import machine_of
from torchfast.compiler.receipt_files import find_receipt, save_receipt
from torchfast.compiler.receipts import CandidateResult, Receipt, ReceiptKey, new_date
from torchfast.update_trial import WAYS, UpdateTrial


def receipt_key(
    optimizer: Optimizer, options: CompileOptions, device: torch.device, *, is_in_graph: bool
) -> ReceiptKey:
    """Return what the answer depends on. The gradients must be there."""
    return ReceiptKey(
        machine=machine_of(device),
        model=optimizer_fingerprint(optimizer),
        batch="",
        options={
            "update": "auto",
            "in_graph": is_in_graph,
            "backend": json_ready(options.backend),
            "dynamic": options.dynamic,
            "budget_s": options.budget_s,
        },
    )


def remembered(options: CompileOptions, key: ReceiptKey) -> UpdateTrial | None:
    """Return what an earlier run has measured; None if there is nothing of use."""
    assert options.cache is not None
    receipt, _ = find_receipt(options.cache, key, WAYS)
    if receipt is None:
        return None
    why = f"{receipt.why}; measured {receipt.created}, from its receipt"
    return UpdateTrial(receipt.choice == "compiled", why)


def remember(
    options: CompileOptions, key: ReceiptKey, optimizer: Optimizer, found: UpdateTrial
) -> None:
    """Write down what was measured; nothing where a trial ended without a measurement."""
    assert options.cache is not None
    if found.measured is None:
        return
    receipt = Receipt(
        key=key,
        model_name=type(optimizer).__name__,
        candidates=tuple(_result(name, found.measured) for name in WAYS),
        choice="compiled" if found.is_better else "eager",
        why=found.why,
        notes=(),
        budget_s=options.budget_s,
        elapsed_s=found.measured.elapsed_s,
        created=new_date(),
    )
    save_receipt(options.cache, receipt)


def _result(name: str, measured: Measurement) -> CandidateResult:
    timing, ratio = measured.timing(name), measured.ratio(name)
    return CandidateResult(
        name=name,
        status="measured",
        median_ms=None if timing is None else timing.median_ms,
        low_ms=None if timing is None else timing.low_ms,
        high_ms=None if timing is None else timing.high_ms,
        ratio=ratio.ratio,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
    )
