"""Which attention a model's own steps run: seen in two forwards, and left alone afterwards."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchfast import CUDAGraphOptions, Plan, Trainer, attention_backends
from torchfast.memory import attention_watch
from torchfast.testing import assert_parity


@pytest.fixture(autouse=True)
def nothing_was_compiled(fresh_dynamo):
    """Or what other tests have compiled would be a reason not to look."""
    torch._dynamo.utils.counters.clear()


SGD = partial(torch.optim.SGD, lr=0.1)


class Attending(nn.Module):
    def __init__(self, layers=2, **options):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(layers))
        self.options = options

    def forward(self, x):
        for layer in self.layers:
            parts = layer(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(*parts, **self.options).transpose(1, 2).flatten(
                2
            )
        return x


def loss_fn(model, x):
    return model(x).square().mean()


def batches(count):
    return [torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(n)) for n in range(count)]


def told(model, plan="eager", steps=3, loss_fn=loss_fn):
    with Trainer(model, SGD, loss_fn, plan) as trainer:
        for batch in batches(steps):
            trainer.step(batch)
        return [d.detail for d in trainer.report().decisions if d.lever == "attention"]


def test_kernels_shapes_and_lines_are_told():
    (detail,) = told(Attending(is_causal=True))
    ran, calls = detail.split("; ")
    assert ran == "the first forward ran flash 2 times"
    assert calls.startswith("2 calls of (2, 2, 4, 8) float32, causal at ")
    assert "test_attention_watch.py:" in calls
    assert calls.endswith(": flash")


def test_kinds_are_told_apart_and_math_with_its_reason():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain, self.masked = Attending(3), Attending(1, dropout_p=0.5)

        def forward(self, x):
            return self.masked(self.plain(x))

    (detail,) = told(Two())
    ran, first, second = detail.split("; ")
    assert ran == "the first forward ran flash 3 times"  # and what is not fused has no name
    assert first.startswith("3 calls of (2, 2, 4, 8) float32 at ")
    assert second.startswith("1 call of (2, 2, 4, 8) float32, dropout 0.5 at ")
    assert ": math (not flash: Both fused kernels do not support non-zero dropout." in second


def test_the_dtype_is_that_of_autocast():
    class Exact(nn.Module):
        def forward(self, x):
            assert x.dtype is torch.float32
            return F.scaled_dot_product_attention(*x[:, None].expand(3, 2, 2, 4, 16).unbind())

    model = nn.Sequential(nn.LayerNorm(16), Exact())
    model[0].float()
    for plan, dtype in (("eager", "float32"), (Plan(precision="bf16"), "bfloat16")):
        (detail,) = told(model, plan)
        assert f"(2, 2, 4, 16) {dtype} at" in detail


@pytest.mark.parametrize("recompute", ["blocks", "selective"])
def test_with_recompute(recompute):
    def build():
        return nn.Sequential(*[Attending(1, is_causal=True) for _ in range(3)])

    (detail,) = told(build(), Plan(recompute=recompute))
    assert detail.startswith("the first forward ran flash 3 times; 3 calls of (2, 2, 4, 8)")
    assert assert_parity(build, SGD, loss_fn, batches(3), Plan(recompute=recompute)).exact


def test_a_choice_of_the_users_is_seen():
    def with_math(model, x):
        with attention_backends("math"):
            return loss_fn(model, x)

    (detail,) = told(Attending(), loss_fn=with_math)
    assert "ran" not in detail
    assert detail.startswith("2 calls of ")
    assert ": math" in detail


def test_nothing_is_said_where_nothing_attends():
    assert told(nn.Linear(16, 4)) == []


def test_two_forwards_are_looked_at_and_no_more(monkeypatch):
    asked = []
    report = attention_watch.attention_report

    def counted(*tensors, **options):
        asked.append(tensors[0].shape)
        return report(*tensors, **options)

    monkeypatch.setattr(attention_watch, "attention_report", counted)
    modes = []

    class Looking(Attending):
        def forward(self, x):
            modes.append(torch._C._len_torch_function_stack())
            return super().forward(x)

    told(Looking(), steps=5)
    assert modes == [0, 1, 0, 0, 0]
    assert len(asked) == 1  # for two calls of one kind


def test_looking_changes_no_number():
    build = partial(Attending, dropout_p=0.3)
    assert assert_parity(build, SGD, loss_fn, batches(4), "eager").exact


def test_what_goes_wrong_with_looking_is_told_and_no_step_fails(monkeypatch):
    def fails(*_, **__):
        raise KeyError("odd")

    monkeypatch.setattr(attention_watch, "attention_report", fails)
    (detail,) = told(Attending())
    assert detail == (
        "the first forward ran flash 2 times; shapes and reasons are not known: KeyError: 'odd'"
    )


def test_a_wrong_call_raises_torchs_own_error():
    class Late(Attending):
        num_calls = 0

        def forward(self, x):
            self.num_calls += 1
            if self.num_calls == 2:
                F.scaled_dot_product_attention("no tensor")
            return super().forward(x)

    with pytest.raises(TypeError, match="scaled_dot_product_attention"):
        told(Late())


def test_compiled_code_is_compiled_as_often_as_without():
    graphs = []

    def backend(module, _):
        graphs.append(module)
        return module.forward

    model = Attending()
    compiled = torch.compile(model, backend=backend)
    (detail,) = told(model, steps=5, loss_fn=lambda _, x: loss_fn(compiled, x))
    assert len(graphs) == 1
    assert "something was compiled" in detail


def test_what_compiled_code_hides_is_said():
    model = nn.Sequential(Attending(), Attending(3))
    hidden = torch.compile(model[1], backend="aot_eager")
    (detail,) = told(model, loss_fn=lambda m, x: hidden(m[0](x)).square().mean())
    ran, parts, unseen = detail.split("; ")
    assert ran == "the first forward ran flash 2 times"
    assert parts == "compiled parts (1) chose their own when they were compiled"
    assert "something was compiled" in unseen


def attend(x):
    """Nothing but the kernel, so that the inductor has no C++ to build."""
    return F.scaled_dot_product_attention(x, x, x)


def test_the_kernels_that_the_inductors_code_calls_are_told():
    attending = torch.compile(attend)

    def compiled_loss(model, x):
        heads = model(x).unflatten(-1, (2, 8)).transpose(1, 2)
        return attending(attending(heads)).square().mean()

    (detail,) = told(Attending(3), loss_fn=compiled_loss)
    ran, compiled, unseen = detail.split("; ")
    assert ran == "the first forward ran flash 3 times"
    assert compiled == "its compiled parts (2) ran flash 2 times"
    assert "something was compiled" in unseen


def test_compiled_code_without_attention_is_no_matter():
    project = torch.compile(lambda x, weight: x @ weight)
    assert told(nn.Linear(16, 16), loss_fn=lambda m, x: project(x, m.weight).mean()) == []


@pytest.mark.parametrize("warm_up_steps", [1, 3])
def test_a_capture_is_not_looked_at(tape, warm_up_steps):
    plan = Plan(cuda_graph=CUDAGraphOptions(warm_up_steps=warm_up_steps, check=False))
    with Trainer(Attending(), SGD, loss_fn, plan) as trainer:
        for batch in batches(8):
            trainer.step(batch)
        report = trainer.report()
    assert report.counters["replays"] >= 1
    (detail,) = [d.detail for d in report.decisions if d.lever == "attention"]
    ran, rest = detail.split("; ")
    assert ran == "the first forward ran flash 2 times"
    if warm_up_steps == 1:
        assert rest.endswith("not known: no second forward ran outside of a graph")
    else:
        assert rest.startswith("2 calls of ")
