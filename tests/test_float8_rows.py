"""float8 layers that get rows which the units do not take, or none at all."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn, optim

from float8_models import EMULATED, batches, bf16_loss, gpt, loss_fn
from torchfast import Float8Linears, Float8Options, Plan, PlanError, Trainer
from torchfast.precision import float8_forward
from torchfast.precision.float8_options import RECIPES
from torchfast.precision.torchao_modules import torchao_module


def layer_of(recipe, bias=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=bias))
    Float8Linears(model, Float8Options(recipe=recipe, smallest=16, emulate=True)).apply()
    return model


def gradients(call, model, shape):
    """Return what a call gives and the gradients of its input and parameters."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(*shape, 32, generator=generator).requires_grad_()
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call(inputs)
    out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    return [out.detach(), inputs.grad, *(p.grad for p in model.parameters())]


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (1,), (20,), (2, 5, 2), (16,)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_any_number_of_rows_gives_the_numbers_of_those_rows(recipe, shape):
    model = layer_of(recipe, bias=False)
    (layer,) = model
    product = torchao_module("torchao.float8.float8_linear", "").matmul_with_hp_or_float8_args

    def as_torchao(inputs):  # emulated it takes every number of rows as it is
        given = inputs.to(torch.bfloat16)
        return product.apply(given, layer.weight.t(), layer.linear_mm_config, layer.config)

    found, expected = gradients(model, model, shape), gradients(as_torchao, model, shape)
    # Each figure may round to the next bf16: sums over other numbers of rows have another order.
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        torch.testing.assert_close(one.float(), other.float(), rtol=2**-7, atol=1e-6)
    assert float(found[0].abs().sum()) > 0


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_rows_give_the_gradients_that_bf16_gives(recipe, shape):
    plain = nn.Sequential(nn.Linear(32, 64))
    expected = gradients(plain, plain, shape)
    model = layer_of(recipe)
    found = gradients(model, model, shape)
    assert_close(found, expected)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def test_emulation_refuses_what_the_units_would_refuse(monkeypatch):
    model = layer_of("tensorwise")
    monkeypatch.setattr(float8_forward, "rows_to_add", lambda rows, *, sums_rows: 0)
    with pytest.raises(RuntimeError, match=r"take rows divisible by 16, got 20 \(input \(20, 32\)"):
        model(torch.ones(20, 32))
    with pytest.raises(RuntimeError, match="take rows divisible by 16, got 0"):
        model(torch.ones(0, 32))
    model[0].weight = nn.Parameter(torch.ones(60, 32))
    with pytest.raises(RuntimeError, match="take outputs divisible by 16, got 60"):
        model(torch.ones(16, 32))
    # Without a float8 sum over the rows there is nothing to refuse.
    layer_of("rowwise_with_gw_hp")(torch.ones(20, 32))


@pytest.mark.parametrize("dynamic", [None, False], ids=["as it comes", "static"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_layers_take_any_number_of_rows(recipe, dynamic):
    model = layer_of(recipe)
    torch.compiler.reset()
    call = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (32, 20, 48, 7, 0, 33):
        assert_close(gradients(call, model, (rows,)), gradients(model, model, (rows,)))


@pytest.mark.parametrize("rows", [16, 20])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_output_may_be_written_to_as_in_bf16(rows, compiled):
    torch.manual_seed(0)
    inputs = torch.randn(rows, 32)

    def gradients_of(behind):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64, bias=False), behind, nn.Linear(64, 32))
        with Float8Linears(model, EMULATED):
            call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
            call(inputs).square().mean().backward()
        return [p.grad for p in model.parameters()]

    torch.compiler.reset()
    found, expected = gradients_of(nn.ReLU(inplace=True)), gradients_of(nn.ReLU())
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def jagged(model):
    rows = [torch.ones(3, 32), torch.ones(5, 32)]
    return model(torch.nested.nested_tensor(rows, layout=torch.jagged))


def per_sample(model):
    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).sum()

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return torch.func.grad(loss)(parameters, torch.ones(16, 32))


@pytest.mark.parametrize(
    ("call", "what"),
    [(jagged, "a nested tensor"), (per_sample, r"a call within a transform of torch\.func")],
)
def test_calls_that_the_products_do_not_take_name_the_layer(call, what):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    call(model)
    remedy = r"leave it out with Float8Options\(keep=\('0',\)\)"
    with (
        Float8Linears(model, EMULATED),
        pytest.raises(PlanError, match=f"layer '0' is in float8 and got {what}, .*; {remedy}"),
    ):
        call(model)


def test_a_last_batch_of_another_size_trains_as_in_bf16():
    whole, last = batches(1)[0], tuple(t[:3, :7] for t in batches(1, seed=1)[0])
    losses = {}
    for precision in ("bf16", EMULATED):
        trainer = Trainer(gpt(), partial(optim.AdamW, lr=3e-3), loss_fn, Plan(precision=precision))
        losses[precision] = [float(trainer.step(b)) for b in (whole, whole, last, whole, last)]
    assert losses[EMULATED] == pytest.approx(losses["bf16"], 0.02)
    assert losses[EMULATED] != losses["bf16"]


def test_an_expert_without_tokens_trains(caplog):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

        def forward(self, x):
            parts = x[:20], x[20:]
            return torch.cat([e(p) for e, p in zip(self.experts, parts, strict=True)])

    options = Float8Options(recipe="tensorwise", smallest=16, emulate=True, watch_at=(1, 2))
    trainer = Trainer(
        Experts(),
        partial(optim.SGD, lr=0.1),
        lambda model, x: model(x).float().square().mean(),
        Plan(precision=options),
    )
    trainer.step(torch.ones(20, 32))  # the second gets none
    trainer.step(torch.ones(30, 32))
    report = str(trainer.report())
    assert "update 2: loss" in report
    assert "experts.1 input" in report
    assert not [r for r in caplog.records if "float8" in r.getMessage()]


def test_rows_do_not_change_what_a_plain_model_gives():
    model, batch = gpt().eval(), tuple(t[:, :5] for t in batches(1)[0])
    plain = bf16_loss(model, batch)
    with Float8Linears(model, EMULATED):
        assert float(bf16_loss(model, batch).detach()) == pytest.approx(float(plain.detach()), 0.01)
