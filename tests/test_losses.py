"""The loss over a large vocabulary: that of linear and cross entropy, and never the logits."""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from large_vocabulary import OPTIONS, assert_same, make, options_in, plain, results
from torchfast.losses import chunks as parts
from torchfast.losses import linear_cross_entropy, products

# The package's attribute of this name is the function.
loss_module = importlib.import_module("torchfast.losses.linear_cross_entropy")


# -- The same numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_are_those_of_the_two_functions(name, reduction, dtype):
    inputs = make(dtype=dtype)
    incoming = torch.randn((3, 7) if reduction == "none" else ())
    options = options_in(name, dtype) | {"reduction": reduction}
    expected = results(plain, *inputs, incoming, **options)
    found = results(linear_cross_entropy, *inputs, incoming, chunk_size=4, **options)
    assert_same(found, expected, 1e-13 if dtype is torch.float64 else 3e-6)
    assert all(a.dtype is dtype for a in found)


@pytest.mark.parametrize("name", OPTIONS)
def test_padded_columns_change_nothing(name, monkeypatch):
    monkeypatch.setattr(parts, "_column_multiple", lambda device, dtype: 64)
    inputs = make()
    for reduction in ("mean", "none"):
        options = OPTIONS[name] | {"reduction": reduction}
        found = results(linear_cross_entropy, *inputs, chunk_size=4, **options)
        assert_same(found, results(plain, *inputs, **options), 1e-13)
    hidden, weight, targets, _ = inputs
    found = results(linear_cross_entropy, hidden, weight, targets, None, **OPTIONS[name])
    assert_same(found, results(plain, hidden, weight, targets, None, **OPTIONS[name]), 1e-13)


@settings(max_examples=60)
@given(
    rows=st.integers(0, 9),
    vocabulary=st.integers(1, 70),
    features=st.integers(1, 9),
    chunk_size=st.integers(1, 10),
    ignore_index=st.integers(-2, 3),
    num_ignored=st.integers(0, 9),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    z_loss=st.sampled_from([0.0, 0.1]),
    softcap=st.sampled_from([None, 2.0]),
    weighted=st.booleans(),
    biased=st.booleans(),
    multiple=st.sampled_from([1, 8]),
)
@example(
    rows=0,
    vocabulary=5,
    features=3,
    chunk_size=4,
    ignore_index=-1,
    num_ignored=0,
    reduction="mean",
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
    weighted=False,
    biased=True,
    multiple=1,
)
@example(
    rows=4,
    vocabulary=5,
    features=3,
    chunk_size=4,
    ignore_index=-1,
    num_ignored=9,
    reduction="mean",
    label_smoothing=0.1,
    z_loss=0.0,
    softcap=None,
    weighted=True,
    biased=True,
    multiple=8,
)
@example(
    rows=4,
    vocabulary=1,
    features=1,
    chunk_size=4,
    ignore_index=0,
    num_ignored=2,
    reduction="sum",
    label_smoothing=1.0,
    z_loss=0.1,
    softcap=2.0,
    weighted=True,
    biased=False,
    multiple=8,
)
def test_any_shape_and_options(
    rows, vocabulary, features, chunk_size, ignore_index, num_ignored, biased, weighted, multiple,
    **options,
):  # fmt: skip
    hidden, weight, targets, bias = make((rows,), vocabulary, features, ignored=0, seed=rows)
    targets[:num_ignored] = ignore_index
    options |= {"ignore_index": ignore_index}
    if weighted:
        options["class_weight"] = torch.linspace(0.5, 2, vocabulary, dtype=torch.float64)
    inputs = hidden, weight, targets, bias if biased else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "_column_multiple", lambda device, dtype: multiple)
        found = results(linear_cross_entropy, *inputs, chunk_size=chunk_size, **options)
    expected = results(plain, *inputs, **options)
    assert torch.equal(found[0].isnan(), expected[0].isnan())
    if not expected[0].isnan().any():
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    else:  # a mean over nothing
        assert all(not a.any() for a in found[1:])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(name, reduction):
    hidden, weight, targets, bias = make((5,), 53, 3, ignored=1)

    def function(hidden, weight, bias):
        return linear_cross_entropy(
            hidden, weight, targets, bias, reduction=reduction, chunk_size=2, **OPTIONS[name]
        )

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "pure"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["bare", "smoothing", "z"])
def test_bf16_is_as_near_to_fp64_as_the_two_functions(name, reduction, autocast):
    wide = make((400,), 999, 64, ignored=20)
    wide[0].data *= 0.5
    options = OPTIONS[name] | {"reduction": reduction}
    exact = [t.detach().bfloat16().double().requires_grad_(t.is_floating_point()) for t in wide[:2]]
    bias = wide[3].detach().bfloat16().double().requires_grad_()
    expected = results(plain, *exact, wide[2], bias, **options)
    dtype = torch.float32 if autocast else torch.bfloat16
    narrow = [t.detach().to(dtype).requires_grad_() for t in (*exact, bias)]
    narrow = narrow[0], narrow[1], wide[2], narrow[2]
    errors = []
    for function in (partial(linear_cross_entropy, chunk_size=128), plain):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = function(*narrow, **options)
        gradients = torch.autograd.grad(
            loss, [narrow[0], narrow[1], narrow[3]], torch.ones_like(loss)
        )
        found = [loss.detach(), *gradients]
        errors.append(
            [(a.double() - b).norm() / b.norm() for a, b in zip(found, expected, strict=True)]
        )
        assert [g.dtype for g in gradients] == [dtype] * 3
    ours, theirs = errors
    assert all(e < 0.02 for e in ours)
    # The loss of the two functions may happen to be very near.
    floor = [1e-4, 0, 0, 0]
    assert all(a <= 1.5 * b + c for a, b, c in zip(ours, theirs, floor, strict=True)), errors


def test_the_loss_of_bf16_is_fp32():
    inputs = make(dtype=torch.bfloat16)
    assert linear_cross_entropy(*inputs).dtype is torch.float32
    assert plain(*inputs).dtype is torch.bfloat16


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("incoming", [2.0**-14, 1.0, 2.0**16])
def test_fp16_gradients_neither_vanish_nor_overflow(reduction, incoming):
    # 1/4096 of a gradient would be below what fp16 can say; the sum over 4096 rows above.
    hidden, weight, targets, _ = make((4096,), 40, 8, torch.float32, ignored=0)
    targets[:] = 7
    hidden.data.fill_(30.0)
    weight.data[7] -= 3.0
    loss_scale = torch.full((4096,) if reduction == "none" else (), incoming)
    if reduction == "none":
        loss_scale = loss_scale / 4096
    expected = results(plain, hidden, weight, targets, None, loss_scale, reduction=reduction)
    with torch.autocast("cpu", torch.float16):
        found = results(
            linear_cross_entropy, hidden, weight, targets, None, loss_scale, reduction=reduction
        )
    assert_same(found, expected, 0.01)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("size", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2}])
def test_fp16_gradients_do_not_hang_on_how_large_class_weights_are(reduction, size, options):
    """As one over the number of tokens of each class, or that number itself."""
    hidden, weight, targets, _ = make((64,), 40, 8, torch.float32)
    loss_scale = torch.ones((64,) if reduction == "none" else ()) / size
    class_weight = size * (0.5 + torch.rand(40))
    if not options:
        class_weight[39] *= 1e7  # as one over a count that is zero, with something added
        targets[targets == 39] = 0
    options = {**options, "reduction": reduction, "class_weight": class_weight}
    if reduction == "mean":
        loss_scale = loss_scale * size
    expected = results(linear_cross_entropy, hidden, weight, targets, None, loss_scale, **options)
    with torch.autocast("cpu", torch.float16):
        found = results(linear_cross_entropy, hidden, weight, targets, None, loss_scale, **options)
    assert_same(found, expected, 0.02)


def test_class_weights_that_are_trained_are_refused():
    hidden, weight, targets, _ = make()
    class_weight = torch.ones(len(weight), requires_grad=True)
    with pytest.raises(ValueError, match=r"pass class_weight\.detach\(\)"):
        linear_cross_entropy(hidden, weight, targets, class_weight=class_weight)
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, targets, class_weight=class_weight)


def test_the_gradient_of_the_loss_is_not_rounded_to_16_bits():
    inputs = make(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        once, more = (linear_cross_entropy(*inputs) for _ in range(2))
    first = torch.autograd.grad(once, inputs[0])[0]
    found = torch.autograd.grad(more, inputs[0], torch.tensor(1.003))[0]
    torch.testing.assert_close(found, first * 1.003, rtol=1e-5, atol=0)


def test_a_confident_row_keeps_its_gradient():
    # p = 0.9995 is 1 in bf16, and p - 1 would be zero.
    hidden, targets = torch.ones(1, 1, requires_grad=True), torch.tensor([0])
    weight = torch.tensor([[7.625], [0.0]], requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(hidden, weight, targets).backward()
    assert weight.grad[0].item() == pytest.approx(-4.88e-4, rel=0.01)


def test_an_impossible_class_at_column_zero_spoils_no_ignored_row():
    hidden, weight, targets, bias = make()
    bias.data[0] = -torch.inf
    targets[targets == 0] = 1
    found = results(linear_cross_entropy, hidden, weight, targets, bias, z_loss=0.1, chunk_size=4)
    assert all(f.isfinite().all() for f in found)


# -- Never the whole logits ------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Sees every tensor that an operator makes, and counts the products of matrices."""

    def __init__(self):
        super().__init__()
        self.numel = self.products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        self.products += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        self.products += function is torch.ops.aten.addmm_.default
        sizes = [t.untyped_storage().nbytes() // t.itemsize for t in tree_leaves(out)
                 if isinstance(t, torch.Tensor)]  # fmt: skip
        self.numel = max([self.numel, *sizes])
        return out


def largest(function, inputs, **options):
    with Largest() as seen:
        loss = function(*inputs, **options)
        forward = seen.numel
        loss.sum().backward()
    return forward, seen.numel


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_whole_logits_never_exist(name, reduction, autocast):
    inputs = make((64,), 53, 4, torch.float32)
    options = options_in(name, torch.float32) | {"reduction": reduction}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        forward, backward = largest(linear_cross_entropy, inputs, chunk_size=8, **options)
        assert max(forward, backward) == 8 * 53
        # The instrument sees them where they are.
        assert min(largest(plain, inputs, **options)) >= 64 * 53
        assert largest(linear_cross_entropy, inputs, chunk_size=64, **options)[1] == 64 * 53


def num_products(hidden, weight, targets, bias, backward=True, **options):
    with Largest() as seen:
        loss = linear_cross_entropy(hidden, weight, targets, bias, chunk_size=7, **options)
        if backward:
            loss.sum().backward()
    return seen.products


def test_only_what_is_asked_for_is_computed():
    hidden, weight, targets, bias = make()  # three chunks
    assert num_products(hidden, weight, targets, bias) == 9
    assert num_products(hidden, weight, targets, bias, reduction="none") == 12  # the logits again
    with torch.no_grad():
        assert num_products(hidden, weight, targets, bias, backward=False) == 3
    assert num_products(hidden, weight.detach(), targets, bias) == 6
    assert num_products(hidden.detach(), weight, targets, bias) == 6
    assert num_products(hidden.detach(), weight.detach(), targets, bias) == 3
    loss = linear_cross_entropy(hidden.detach(), weight.detach(), targets)
    assert not loss.requires_grad


@pytest.mark.parametrize("frozen", [(0,), (1,), (3,), (0, 1), (1, 3), (0, 3)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_is_frozen_gets_no_gradient(frozen, reduction):
    inputs = list(make())
    for index in frozen:
        inputs[index] = inputs[index].detach()
    expected = results(plain, *inputs, reduction=reduction)
    found = results(linear_cross_entropy, *inputs, reduction=reduction, chunk_size=4)
    assert len(found) == 4 - len(frozen)
    assert_same(found, expected, 1e-13)


def test_chunks_are_sized_by_bytes_by_weight_and_by_their_number():
    def rows(num_rows, vocabulary, features, factor=1):
        weight = torch.empty(vocabulary, features, device="meta")
        return loss_module._chunk_rows("auto", num_rows, weight, factor)

    assert rows(32 * 1024, 50257, 768) == 4096
    assert rows(16384, 32000, 2048) == 8192
    assert rows(16384, 128256, 2048) == 2048
    assert rows(16384, 128256, 4096) == 4096  # as much as the weight
    assert rows(16384, 2_000_000, 16) == 1024  # never fewer
    assert rows(10**6, 128256, 2048) == 32768  # never more than 32
    assert loss_module._chunk_rows(100, 10**6, torch.empty(2, 2), 2) == 100
    # What is compiled may take twice the bytes; the other bounds stay.
    assert rows(16384, 128256, 2048, 2) == 4096
    assert rows(16384, 128256, 4096, 2) == 8192
    assert rows(16384, 2_000_000, 16, 2) == 1024
    assert rows(10**6, 128256, 2048, 2) == 32768


def test_what_is_compiled_takes_twice_the_tokens_where_nothing_is_in_fp32(monkeypatch):
    def twice(dtype=torch.bfloat16, softcap=None):
        return loss_module._takes_twice_the_rows(torch.empty(2, 2), dtype, softcap)

    assert not twice()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not twice()  # products are in fp32 here
    monkeypatch.setattr(loss_module, "has_wide_products", lambda device: True)
    assert twice()
    assert not twice(softcap=30.0)
    assert not twice(torch.float16)
    assert not twice(torch.float32)


def test_a_product_stays_in_fp32_where_the_device_can_do_that(monkeypatch):
    """On CUDA: the form of the calls, as their kernels are nowhere else."""
    calls = []

    def mm(left, right, *, out_dtype):
        calls.append("mm")
        return left.to(out_dtype) @ right.to(out_dtype)

    def addmm(total, left, right, *, out_dtype, out):
        calls.append("addmm")
        assert out is total
        return out.add_(mm(left, right, out_dtype=out_dtype))

    inputs = make(dtype=torch.bfloat16)
    expected = results(linear_cross_entropy, *inputs, chunk_size=7)
    monkeypatch.setattr(products, "has_wide_products", lambda device: True)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    assert_same(results(linear_cross_entropy, *inputs, chunk_size=7), expected, 1e-6)
    assert calls == ["mm", "addmm", "mm", "addmm", "mm"]


def test_the_calls_for_products_in_fp32_exist():
    left = torch.empty(4, 4, dtype=torch.bfloat16, device="meta")
    assert torch.mm(left, left, out_dtype=torch.float32).dtype is torch.float32
    # Without data torch 2.11 cannot run this one.
    assert hasattr(torch.ops.aten.addmm, "dtype_out")
