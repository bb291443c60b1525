"""Receipts of searches that never took place."""

from __future__ import annotations

import torch
from torch import nn

from torchfast.compiler.receipts import CandidateResult, Receipt, ReceiptKey

CPU = torch.device("cpu")
BATCH = torch.zeros(4, 2)
NAMES = ("eager", "blocks: default", "whole: default")


def make_key(model=None, batch=BATCH, options=None, loss="a"):
    model = nn.Linear(2, 3) if model is None else model
    options = {"dynamic": None} if options is None else options
    return ReceiptKey.of(model, batch, CPU, options, loss=loss)


def make_receipt(key=None, **changes):
    candidates = (
        CandidateResult(name="eager", status="measured", compile_s=0.0, median_ms=12.5, ratio=1.0),
        CandidateResult(
            name="blocks: default",
            status="measured",
            compile_s=21.5,
            median_ms=10.0,
            low_ms=9.5,
            high_ms=10.5,
            ratio=0.8,
            ratio_low=0.79,
            ratio_high=0.81,
            peak_bytes=123_000_000,
            loss_error=1e-7,
            gradient_error=2e-6,
        ),
        CandidateResult(name="whole: default", status="timed out", reason="not done in 60 s"),
    )
    values = {
        "key": make_key() if key is None else key,
        "model_name": "Linear",
        "candidates": candidates,
        "choice": "blocks: default",
        "why": "it is faster",
        "notes": ("a note",),
        "budget_s": 120.0,
        "elapsed_s": 100.0,
        "created": "2026-01-01T00:00:00Z",
    }
    return Receipt(**{**values, **changes})
