"""Operations and bytes of operators, against torch's own count of them; the rest is not known."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from synthetic_trace import SyntheticTrace, read
from torchfast.profiling.ceilings import Ceilings, float8_product
from torchfast.profiling.operator_costs import cost_of
from torchfast.profiling.report import report_on
from torchfast.profiling.trace import read_trace

GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"
PLACED = (
    "aten::convolution",
    "aten::convolution_backward",
    "aten::mm",
    "aten::bmm",
    "aten::_scaled",
)


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def convolve():
    return F.conv2d(leaf(2, 4, 9, 7), leaf(6, 4, 3, 2), stride=(2, 1), padding=1, dilation=(1, 2))


def convolve_groups():
    return F.conv1d(leaf(2, 4, 9), leaf(6, 2, 3), groups=2, padding=2)


def convolve_transposed():
    return F.conv_transpose2d(leaf(2, 4, 5, 5), leaf(4, 3, 3, 3), stride=2, output_padding=1)


def convolve_transposed_groups():
    return F.conv_transpose2d(leaf(2, 4, 5, 5), leaf(4, 3, 3, 3), stride=2, groups=2)


def convolve_weight_only():
    return F.conv3d(torch.randn(2, 3, 4, 4, 4), leaf(5, 3, 2, 2, 2))


def attend():
    q, k, v = leaf(2, 4, 16, 8), leaf(2, 4, 12, 8), leaf(2, 4, 12, 8)
    return F.scaled_dot_product_attention(q, k, v)


def multiply():
    return leaf(5, 6) @ leaf(6, 7)


# Of groups torch counts the gradient of the weights as if there were none.
CASES = (convolve, convolve_transposed, convolve_weight_only, multiply)
GROUPED = (convolve_groups, convolve_transposed_groups)


def traced(function, path):
    with torch.profiler.profile(record_shapes=True) as run:
        function()
    run.export_chrome_trace(str(path))
    spans = read_trace(path).spans
    return {
        (span.name, span.start): cost
        for span in spans
        if span.name.startswith(PLACED) and (cost := cost_of(span)) is not None
    }


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_operations_are_those_that_torch_counts(function, tmp_path):
    costs = traced(lambda: function().sum().backward(), tmp_path / "trace.json")
    with FlopCounterMode(display=False) as counter:
        function().sum().backward()
    assert counter.get_total_flops() > 0
    assert sum(cost.operations for cost in costs.values()) == counter.get_total_flops()


@pytest.mark.parametrize("function", GROUPED, ids=lambda f: f.__name__)
def test_a_backward_pass_of_groups_is_twice_the_forward_pass(function, tmp_path):
    costs = traced(lambda: function().sum().backward(), tmp_path / "trace.json")
    with FlopCounterMode(display=False) as counter:
        function()
    assert sum(cost.operations for cost in costs.values()) == 3 * counter.get_total_flops()


def test_attention_is_two_products_and_five_on_the_way_back(tmp_path):
    costs = traced(lambda: attend().sum().backward(), tmp_path / "trace.json")
    product = 2 * (2 * 4) * 16 * 12 * 8
    assert sorted(cost.operations for cost in costs.values()) == [2 * product, 5 * product]
    queries, keys = 2 * 4 * 16 * 8, 2 * 4 * 12 * 8
    assert sorted(cost.num_bytes for cost in costs.values()) == [
        4 * (2 * queries + 2 * keys),
        4 * (4 * queries + 4 * keys),
    ]


def test_bytes_of_a_convolution_are_those_of_its_tensors(tmp_path):
    given, weight = leaf(2, 4, 9, 7), leaf(6, 4, 3, 3)
    result = F.conv2d(given, weight, stride=2)

    def function():
        F.conv2d(given, weight, stride=2).sum().backward()

    costs = traced(function, tmp_path / "trace.json")
    moved = {name: cost.num_bytes for (name, _), cost in costs.items()}
    tensors = given.numel() + weight.numel()
    assert moved["aten::convolution"] == 4 * (tensors + result.numel())
    assert moved["aten::convolution_backward"] == 4 * (2 * tensors + result.numel())


def test_a_scaled_product_writes_the_type_it_is_asked_for(tmp_path):
    a = torch.randn(32, 16).to(torch.float8_e4m3fn)
    b = torch.randn(48, 16).to(torch.float8_e4m3fn)
    one = torch.ones(())

    def function():
        torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)

    costs = traced(function, tmp_path / "trace.json")
    (cost,) = [cost for (name, _), cost in costs.items() if name == "aten::_scaled_mm"]
    assert cost == (2 * 32 * 16 * 48, 32 * 16 + 16 * 48 + 4 * 32 * 48)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_products_of_float8_are_held_against_float8(dtype, tmp_path):
    name = str(dtype).removeprefix("torch.")
    made = SyntheticTrace()
    types = [f"c10::{name.capitalize()}", "c10::Float8_e4m3fn"]
    made.op("aten::_scaled_mm", 0, 20, dims=[[1024, 1024], [1024, 1024]], types=types)
    made.events[-1]["args"]["Concrete Inputs"] = [""] * 8
    made.kernel(30, 40, GEMM, at=5)
    ceilings = Ceilings(device="x", flops={"bfloat16": 4e14, name: 8e14}, bytes_a_second=3e15)

    (row,) = report_on(read(made, tmp_path), None, ceilings).roofline

    assert (row.dtype, row.bound) == (name, "compute")
    assert row.of_ceiling == pytest.approx(2 * 1024**3 / 10e-6 / 8e14)
    # What the ceiling is measured by is a product of that type.
    product = float8_product(32, dtype, torch.device("cpu"))
    assert product.args[0].dtype is dtype
    expected = product.args[0].float() @ product.args[1].float()
    torch.testing.assert_close(product().float(), expected, rtol=0.02, atol=0.05)


def test_without_the_numbers_of_a_convolution_nothing_is_said():
    from torchfast.profiling.trace import HostSpan

    facts = {"Input Dims": [[2, 3, 8, 8], [6, 3, 3, 3]], "Input type": ["float", "float"]}
    assert cost_of(HostSpan("aten::convolution", "op", 0, 1, "1", facts)) is None


def test_kernels_of_replays_and_of_the_compiler_are_not_known(tmp_path):
    made = SyntheticTrace()
    made.op("aten::mm", 0, 20, dims=[[64, 64], [64, 64]], types=["float", "float"])
    made.kernel(30, 40, GEMM, at=5)
    made.kernel(50, 70, GEMM, at=45, call="cudaGraphLaunch")
    made.kernel(80, 95, "triton_tem_fused_mm_0", at=75, call="cuLaunchKernel")
    made.kernel(100, 105, "triton_poi_fused_add_0", at=99, call="cuLaunchKernel")
    made.kernel(110, 118, GEMM, at=108)

    report = report_on(read(made, tmp_path))

    known, *unknown = report.roofline
    assert known.is_known
    assert [(row.name, row.num, row.total_us) for row in unknown] == [
        ("in compiled kernels", 1, 15.0),
        ("in replays of CUDA graphs", 1, 20.0),
        ("of other operators", 1, 8.0),
    ]
    assert all(math.isnan(row.flops) and not row.is_known for row in unknown)
    told = json.loads(json.dumps(report.to_dict()["roofline"]))
    assert [row["flops"] for row in told[1:]] == [None] * 3
    assert str(report).count("not known: the trace has no shapes") == 3
    report.write_html(tmp_path / "page.html")
    assert "not known" in (tmp_path / "page.html").read_text()
