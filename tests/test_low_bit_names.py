"""Names of torchao that low-bit state stands on, where they are gone."""

from __future__ import annotations

import importlib

import pytest

from torchfast.precision.low_bit_codes import codecs, rounder


@pytest.mark.parametrize(
    ("make", "module", "name"),
    [
        (lambda: codecs("8bit"), "quant_utils", "create_dynamic_map"),
        (lambda: codecs("4bit"), "quant_utils", "quantize_4bit_with_qmap"),
        (lambda: codecs("fp8"), "subclass_fp8", "quantize_fp8"),
        (rounder, "quant_utils", "_fp32_to_bf16_sr"),
    ],
)
def test_a_name_that_torchao_has_no_longer_is_told(make, module, name, monkeypatch):
    monkeypatch.delattr(importlib.import_module(f"torchao.optim.{module}"), name)
    with pytest.raises(ImportError, match=rf"optim\.{module}\.{name}, .* too old or too new"):
        make()
