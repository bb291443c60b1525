"""The nearest entry of a dynamic map, against torchao's search, to the last code."""

from __future__ import annotations

import math

import pytest
import torch
from torchao.optim import quant_utils

from torchfast import LowBitAdamW
from torchfast.precision.low_bit_codes import codecs
from torchfast.precision.low_bit_nearest import finds_all, nearest_code, thresholds

SIGNED = pytest.mark.parametrize("signed", [True, False])
COMPILED = pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])


def entries(signed):
    return torch.tensor(quant_utils.create_dynamic_map(signed=signed))


def neighbours(values, num=4):
    """Return values and the fp32 numbers next to them, on both sides."""
    found = [values]
    for end in (2.0, -2.0):
        nearby = values
        for _ in range(num):
            nearby = torch.nextafter(nearby, torch.tensor(end))
            found.append(nearby)
    return torch.cat(found)


def hard_values(signed):
    """Where a code changes, where a power of ten begins, and what is very small."""
    table = entries(signed)
    tens = torch.tensor([10.0**-power for power in range(9)])
    around = tens[:, None] * torch.linspace(0.98, 1.02, 20001)
    small = torch.tensor([0.0, 1e-45, 1e-38, 1e-30, 1e-12, 5e-8])
    values = torch.cat((neighbours(thresholds(table)[:-1]), neighbours(table), tens, small))
    values = torch.cat((values, around.flatten(), 10 ** -torch.linspace(0, 9, 200_003)))
    values = torch.cat((values, -values)) if signed else values
    # A device that adds in another order where it divides may leave a little more than one.
    most = torch.tensor([1 + 2**-23, 1 + 1e-6])
    return torch.cat((values.clamp(-1 if signed else 0, 1), most, -most if signed else most))


@SIGNED
@COMPILED
def test_the_code_is_that_of_the_search(signed, is_compiled):
    table, values = entries(signed), hard_values(signed)
    function = torch.compile(nearest_code, fullgraph=True) if is_compiled else nearest_code
    found = function(values, thresholds(table), signed=signed)
    assert found.dtype == torch.uint8
    assert torch.equal(found, quant_utils.quantize_8bit_with_qmap(values, table))
    assert len(found.unique()) == 256


@SIGNED
def test_each_threshold_is_the_first_value_with_the_next_code(signed):
    table = entries(signed)
    limits = thresholds(table)
    assert limits.shape == (256,)
    assert math.isinf(limits[-1])
    first = quant_utils.quantize_8bit_with_qmap(limits[:-1], table)
    last = torch.nextafter(limits[:-1], torch.tensor(-2.0))
    assert torch.equal(first, torch.arange(1, 256, dtype=torch.uint8))
    found = quant_utils.quantize_8bit_with_qmap(last, table)
    assert torch.equal(found, torch.arange(255, dtype=torch.uint8))


@SIGNED
def test_what_is_computed_is_never_more_than_one_code_off(signed):
    """Nor would it be for a value a fifth of an entry away: no rounding of a device matters."""
    table, limits = entries(signed), thresholds(entries(signed))
    values = hard_values(signed)
    always, never = limits.new_full((256,), -2.0), limits.new_full((256,), 2.0)
    always[-1] = never[-1]
    most = nearest_code(values, always, signed=signed).int()
    least = nearest_code(values, never, signed=signed).int()
    code = quant_utils.quantize_8bit_with_qmap(values, table).int()
    assert ((least <= code) & (code <= most)).all()
    decade = torch.floor(-torch.log10(values.abs())).clamp(0, 6)
    gap = 0.9 / (64 if signed else 128) * 5**-decade
    for shift in (-0.2, 0.2):
        near = values + shift * gap
        assert (nearest_code(near, never, signed=signed).int() <= code).all()
        assert (nearest_code(near, always, signed=signed).int() >= code).all()


@SIGNED
def test_what_is_no_number_stays_within_the_table(signed):
    values = torch.tensor([math.nan, math.inf, -math.inf] * 20)
    assert nearest_code(values, thresholds(entries(signed)), signed=signed).shape == (60,)


@SIGNED
def test_a_map_that_is_made_otherwise_is_searched(signed, monkeypatch):
    """The control: of such a map the arithmetic gives other codes."""
    linear = torch.linspace(-1 if signed else 0, 1, 256)
    monkeypatch.setattr(quant_utils, "create_dynamic_map", lambda signed: linear.tolist())
    codec = codecs("8bit")[0 if signed else 1]
    values = torch.linspace(-1 if signed else 0, 1, 2560).view(10, 256)
    scaled, scales = quant_utils.scale_tensor(values, 256)
    expected = quant_utils.quantize_8bit_with_qmap(scaled, linear)
    found, found_scales = codec.encode(values, torch.tensor(codec.tables))
    assert torch.equal(found, expected)
    assert torch.equal(found_scales, scales)
    assert not finds_all(linear, thresholds(linear), signed=signed)
    assert not torch.equal(nearest_code(scaled, thresholds(linear), signed=signed), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["8bit", "4bit", "fp8"])
def test_the_dtype_that_models_are_built_in_is_not_that_of_the_tables(kind, dtype):
    expected = codecs(kind)
    torch.set_default_dtype(dtype)
    try:
        found = codecs(kind)
        assert torch.get_default_dtype() == dtype
        weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.float32))
        weight.grad = torch.ones_like(weight)
        optimizer = LowBitAdamW([weight], state=kind)
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert [codec.tables for codec in found] == [codec.tables for codec in expected]
    assert optimizer.state[weight]["exp_avg_scale"].dtype == torch.float32
