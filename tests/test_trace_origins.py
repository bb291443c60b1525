"""What the backward does has the line of the forward that made it do so."""

import inspect

import pytest
import torch

import torchfast
from synthetic_trace import AUTOGRAD, SyntheticTrace
from torchfast.profiling.findings import Finding
from torchfast.profiling.places import Origins, Places
from torchfast.profiling.report import analyse_trace
from torchfast.profiling.trace import read_trace
from torchfast.profiling.verdict import Verdict, in_order

STEPS = 4
GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN"


def masked(number):
    """Steps whose backward looks for what a mask has selected, and waits for it."""
    made = SyntheticTrace()
    for step in range(STEPS):
        begin, node = step * 1000.0, 10 * step + 7
        made.step(step, begin, begin + 999)
        made.line("model.py:24", begin + 1, begin + 9)
        made.op("aten::eq", begin + 2, begin + 8, node=number and node)  # has no gradient
        made.line("model.py:26", begin + 10, begin + 30)
        made.op("aten::index_put_", begin + 11, begin + 29, node=number and node)
        made.line("model.py:27", begin + 31, begin + 40)
        made.op("aten::mul", begin + 32, begin + 39, node=number and node + 1)
        made.kernel(begin + 45, begin + 200, GEMM, at=begin + 33)
        made.line("train.py:78", begin + 50, begin + 990)
        for i in range(3):
            at = begin + 210 + 250 * i
            name, how = "IndexPutBackward0", {"tid": AUTOGRAD, "node": number and node, "of": 1}
            made.op(f"autograd::engine::evaluate_function: {name}", at, at + 240, **how)
            made.op(name, at + 1, at + 239, **how)
            made.op("aten::nonzero", at + 2, at + 130, tid=AUTOGRAD)
            made.kernel(at + 10, at + 100, GEMM, at=at + 3, tid=AUTOGRAD)
            made.call("cudaStreamSynchronize", at + 12, at + 103, tid=AUTOGRAD)
    return made


@pytest.mark.parametrize(("number", "line"), [(1, "model.py:26"), (None, "train.py:78")])
def test_a_wait_of_the_backward(tmp_path, number, line):
    found = analyse_trace(masked(number).write(tmp_path / "trace.json"))
    assert found.verdict.name == "sync-bound"
    assert found.findings[0].kind == "boolean-mask"
    assert found.findings[0].line == found.verdict.line == line


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("sync-bound", ["host-sync", "boolean-mask", "dtype-casts", "tiny-kernels"]),
        ("launch-bound", ["tiny-kernels", "dtype-casts", "host-sync", "boolean-mask"]),
        ("fine", ["dtype-casts", "host-sync", "tiny-kernels", "boolean-mask"]),
    ],
)
def test_what_limits_the_step_comes_first(name, order):
    kinds = ["dtype-casts", "host-sync", "tiny-kernels", "boolean-mask"]
    findings = [Finding(kind, None, 1.0, 0.5 - 0.1 * at, "", "") for at, kind in enumerate(kinds)]
    verdict = Verdict(name, None, {}, "", "")
    assert [finding.kind for finding in in_order(findings, verdict)] == order


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        chosen = x > 0
        x = x[chosen].view(-1, 4)
        y = x * self.weight
        return y.sigmoid().sum()


def test_torch_numbers_nodes_as_is_thought(tmp_path):
    model = Scaled()
    with torchfast.profile(tmp_path, steps=1, warmup=1) as profiling:
        for batch in profiling.iterate([torch.ones(2, 4)] * 20):
            model(batch).backward()
    trace = read_trace(tmp_path / "lines.json.gz")
    origins = Origins(trace, Places(trace))
    source, first = inspect.getsourcelines(Scaled.forward)
    expected = {"MulBackward0": "x * self.weight", "SigmoidBackward0": "y.sigmoid()"}
    for name, text in expected.items():
        nodes = [span for span in trace.spans if span.name == name]
        assert nodes
        line = first + next(at for at, code in enumerate(source) if text in code)
        for node in nodes:
            assert origins.of([node]).endswith(f"test_trace_origins.py:{line}")
    assert origins.of([span for span in trace.spans if span.name == "aten::mul"][:1]) is None
