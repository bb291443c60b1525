"""The loss over a large vocabulary: the numbers of linear and cross entropy, and never its logits."""

from __future__ import annotations

import copy
import importlib
import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from benchmarks import losses as benchmark
from tape import Twins
from torchfast.losses import LinearCrossEntropy, causal_lm_loss, linear_cross_entropy
from torchfast.losses import chunks as parts

loss_module = importlib.import_module("torchfast.losses.linear_cross_entropy")


def plain(
    hidden,
    weight,
    targets,
    bias=None,
    *,
    class_weight=None,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
    chunk_size=None,
):
    """The two functions, with z-loss and softcap as one would write them."""
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    flat = targets.flatten()
    options = {"ignore_index": ignore_index, "weight": class_weight}
    loss = F.cross_entropy(
        logits, flat, reduction=reduction, label_smoothing=label_smoothing, **options
    )
    if z_loss:
        valid = flat != ignore_index
        counts = valid.to(logits.dtype)
        if class_weight is not None:
            counts = counts * class_weight[torch.where(valid, flat, 0)]
        squares = z_loss * counts * torch.logsumexp(logits, -1).square()
        loss = loss + {
            "none": lambda: squares,
            "sum": lambda: squares.sum(),
            "mean": lambda: squares.sum() / counts.sum(),
        }[reduction]()
    return loss.reshape(targets.shape) if reduction == "none" else loss


def make(shape=(3, 7), vocabulary=53, features=16, dtype=torch.float64, seed=0, ignored=3):
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    hidden = draw(*shape, features).to(dtype).requires_grad_()
    weight = (draw(vocabulary, features) * 0.5).to(dtype).requires_grad_()
    bias = draw(vocabulary).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, shape, generator=generator)
    targets.view(-1)[:ignored] = -100
    return hidden, weight, targets, bias


def results(function, hidden, weight, targets, bias, incoming=None, **options):
    """Return the loss and the gradients of what asks for one."""
    loss = function(hidden, weight, targets, bias, **options)
    asked = [t for t in (hidden, weight, bias) if t is not None and t.requires_grad]
    incoming = torch.ones_like(loss) if incoming is None else incoming.to(loss.dtype)
    return [loss.detach(), *torch.autograd.grad(loss, asked, incoming)]


def assert_same(found, expected, tolerance):
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        bound = tolerance * (b.abs().max().item() if b.numel() else 0) + 1e-300
        worst = (a.double() - b.double()).abs().max().item() if b.numel() else 0
        assert worst <= bound, (index, worst, bound)
        assert a.shape == b.shape


OPTIONS = {
    "bare": {},
    "smoothing": {"label_smoothing": 0.2},
    "classes": {"class_weight": torch.linspace(0.1, 2, 53, dtype=torch.float64)},
    "z": {"z_loss": 0.01},
    "softcap": {"softcap": 3.0},
    "all": {
        "label_smoothing": 0.2,
        "class_weight": torch.linspace(0.1, 2, 53, dtype=torch.float64),
        "z_loss": 0.01,
        "softcap": 3.0,
    },
}


def options_in(name, dtype):
    kept = dict(OPTIONS[name])
    if "class_weight" in kept:
        kept["class_weight"] = kept["class_weight"].to(dtype)
    return kept


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
@example(rows=0, vocabulary=5, features=3, chunk_size=4, ignore_index=-1, num_ignored=0, reduction="mean", label_smoothing=0.0, z_loss=0.0, softcap=None, weighted=False, biased=True, multiple=1)
@example(rows=4, vocabulary=5, features=3, chunk_size=4, ignore_index=-1, num_ignored=9, reduction="mean", label_smoothing=0.1, z_loss=0.0, softcap=None, weighted=True, biased=True, multiple=8)
@example(rows=4, vocabulary=1, features=1, chunk_size=4, ignore_index=0, num_ignored=2, reduction="sum", label_smoothing=1.0, z_loss=0.1, softcap=2.0, weighted=True, biased=False, multiple=8)
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
        gradients = torch.autograd.grad(loss, [narrow[0], narrow[1], narrow[3]], torch.ones_like(loss))
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
@pytest.mark.parametrize("incoming", [1.0, 2.0**16])
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


# -- Never the whole logits --------------------------------------------------------------------------


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


def products(hidden, weight, targets, bias, backward=True, **options):
    with Largest() as seen:
        loss = linear_cross_entropy(hidden, weight, targets, bias, chunk_size=7, **options)
        if backward:
            loss.sum().backward()
    return seen.products


def test_only_what_is_asked_for_is_computed():
    hidden, weight, targets, bias = make()  # three chunks
    assert products(hidden, weight, targets, bias) == 9
    assert products(hidden, weight, targets, bias, reduction="none") == 12  # the logits again
    with torch.no_grad():
        assert products(hidden, weight, targets, bias, backward=False) == 3
    assert products(hidden, weight.detach(), targets, bias) == 6
    assert products(hidden.detach(), weight, targets, bias) == 6
    assert products(hidden.detach(), weight.detach(), targets, bias) == 3
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
    def rows(num_rows, vocabulary, features):
        weight = torch.empty(vocabulary, features, device="meta")
        return loss_module._chunk_rows("auto", num_rows, weight)

    assert rows(32 * 1024, 50257, 768) == 4096
    assert rows(16384, 32000, 2048) == 8192
    assert rows(16384, 128256, 2048) == 2048
    assert rows(16384, 128256, 4096) == 4096  # as much as the weight
    assert rows(16384, 2_000_000, 16) == 1024  # never fewer
    assert rows(10**6, 128256, 2048) == 32768  # never more than 32
    assert loss_module._chunk_rows(100, 10**6, torch.empty(2, 2)) == 100


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
    monkeypatch.setattr(parts, "_has_wide_products", lambda device: True)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    assert_same(results(linear_cross_entropy, *inputs, chunk_size=7), expected, 1e-6)
    assert calls == ["mm", "addmm", "mm", "addmm", "mm"]


def test_the_calls_for_products_in_fp32_exist():
    left = torch.empty(4, 4, dtype=torch.bfloat16, device="meta")
    total = torch.empty(4, 4, device="meta")
    assert torch.mm(left, left, out_dtype=torch.float32).dtype is torch.float32
    found = torch.addmm(total, left, left, out_dtype=torch.float32, out=total)
    assert found.dtype is torch.float32


# -- In a training step ------------------------------------------------------------------------------


class Tiny(nn.Module):
    """A model whose output layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(60, 8)
        self.mix = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens):
        return torch.tanh(self.mix(self.dropout(self.embedding(tokens))))


def tied_loss(model, batch, function=partial(linear_cross_entropy, chunk_size=16)):
    tokens, targets = batch
    return function(model(tokens), model.embedding.weight, targets)


def token_batches(count):
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randint, 60, (4, 12), generator=generator)
    return [(draw(), draw()) for _ in range(count)]


def test_a_tied_weight_gets_both_gradients():
    torch.manual_seed(0)
    model = Tiny().double().eval()
    (batch,) = token_batches(1)
    gradients = []
    for function in (plain, partial(linear_cross_entropy, chunk_size=16)):
        model.zero_grad()
        tied_loss(model, batch, function).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert_same(gradients[1], gradients[0], 1e-12)


@pytest.mark.usefixtures("tape")
def test_a_step_with_it_is_captured_and_trains_as_the_plain_loop():
    twins = Twins(Tiny, partial(torch.optim.AdamW, lr=0.01, fused=True), tied_loss)
    twins.run(token_batches(8))
    assert twins.counts[1] == 5
    twins.check(gradients=False)


def test_the_host_reads_nothing_from_the_device():
    with FakeTensorMode() as mode:
        hidden, weight, targets, bias = (mode.from_tensor(t) for t in make())
        for reduction in ("mean", "none"):
            for name in OPTIONS:
                options = {
                    k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v
                    for k, v in OPTIONS[name].items()
                }
                loss = linear_cross_entropy(
                    hidden, weight, targets, bias, reduction=reduction, chunk_size=4, **options
                )
                loss.sum().backward()
        with pytest.raises(Exception, match=r"data.dependent|_local_scalar_dense|item"):
            targets[0, 0].item()


def test_under_recompute():
    hidden, weight, targets, bias = make()
    for reduction in ("mean", "none"):
        expected = results(linear_cross_entropy, hidden, weight, targets, bias, reduction=reduction)

        def again(*args, reduction=reduction, **_):
            function = partial(linear_cross_entropy, reduction=reduction)
            return checkpoint(function, *args, use_reentrant=False)

        assert_same(results(again, hidden, weight, targets, bias), expected, 0)


def test_a_backward_may_come_twice():
    for reduction in ("mean", "none"):
        hidden, weight, targets, bias = make()
        loss = linear_cross_entropy(hidden, weight, targets, bias, reduction=reduction).sum()
        loss.backward(retain_graph=True)
        once = weight.grad.clone()
        loss.backward()
        assert torch.equal(weight.grad, 2 * once)


def test_a_second_derivative_is_refused_where_it_is_asked_for():
    hidden, weight, targets, _ = make()
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction).sum()
        (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
        expected = results(plain, hidden, weight, targets, None, reduction="mean")
        if reduction == "mean":
            assert_same([gradient.detach()], expected[1:2], 1e-13)
        with pytest.raises(RuntimeError, match="first derivative only.*F.cross_entropy"):
            gradient.square().sum().backward()


def test_the_same_bits_each_time():
    inputs = make((200,), 99, 16, torch.float32)
    once = results(linear_cross_entropy, *inputs, chunk_size=32)
    torch.use_deterministic_algorithms(True)
    try:
        again = results(linear_cross_entropy, *inputs, chunk_size=32)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, once, again))


def test_shapes_and_strides():
    _, weight, targets, bias = make()
    wide = torch.randn(3, 16, 7, dtype=torch.float64, requires_grad=True)
    tall = weight.detach().t().contiguous().requires_grad_()

    def turned(function):
        return results(function, wide.transpose(1, 2), tall.t(), targets.t().contiguous().t(), bias)

    assert_same(turned(linear_cross_entropy), turned(plain), 1e-13)
    one = wide[0, :, 0].detach().requires_grad_()
    loss = linear_cross_entropy(one, weight, targets[2, 0], reduction="none")
    assert loss.shape == ()
    assert_same([loss], [plain(one[None], weight, targets[2, :1])], 1e-13)


def test_inputs_are_left_as_they_are():
    inputs = make()
    before = copy.deepcopy(inputs)
    for reduction in ("mean", "none"):
        results(linear_cross_entropy, *inputs, reduction=reduction, **OPTIONS["all"])
    assert all(map(torch.equal, inputs, before))


def test_autocast_leaves_fp64_alone():
    inputs = make()
    with torch.autocast("cpu", torch.bfloat16):
        found = results(linear_cross_entropy, *inputs)
    assert_same(found, results(plain, *inputs), 1e-13)


# -- The module --------------------------------------------------------------------------------------


def test_the_module_keeps_the_options():
    inputs = make()
    module = LinearCrossEntropy(chunk_size=5, reduction="sum", **OPTIONS["all"])
    expected = results(linear_cross_entropy, *inputs, chunk_size=5, reduction="sum", **OPTIONS["all"])
    assert_same(results(module, *inputs), expected, 0)
    assert list(module.state_dict()) == []
    assert module.float().class_weight.dtype is torch.float32
    assert "label_smoothing=0.2, z_loss=0.01, softcap=3.0, chunk_size=5" in repr(module)
    with pytest.raises(ValueError, match="reduction must be one of"):
        LinearCrossEntropy(reduction="average")


# -- What is refused ---------------------------------------------------------------------------------


def raising(*args, **kwargs):
    raise RuntimeError("out of something else")


class Sharded(torch.Tensor):
    device_mesh = "a mesh"


BAD = {
    "features": ({"weight": torch.ones(53, 15).double()}, ValueError, r"\(3, 7, 16\) and \(53, 15\)"),
    "weight of one": ({"weight": torch.ones(16).double()}, ValueError, r"\(3, 7, 16\) and \(16,\)"),
    "no class": ({"weight": torch.ones(0, 16).double()}, ValueError, "at least one row"),
    "targets": ({"targets": torch.ones(3, 6).long()}, ValueError, r"\(3, 7\), got \(3, 6\)"),
    "int32": ({"targets": torch.ones(3, 7).int()}, TypeError, r"int64, got torch.int32.*long\(\)"),
    "floats": ({"targets": torch.ones(3, 7)}, TypeError, "got torch.float32.*F.cross_entropy"),
    "too large": ({"targets": torch.full((3, 7), 53)}, IndexError, "target 53 is no.* 0 to 52"),
    "negative": ({"targets": torch.full((3, 7), -1)}, IndexError, "target -1 is no.*-100"),
    "bias": ({"bias": torch.ones(52).double()}, ValueError, r"bias must have shape \(53,\).*\(52,\)"),
    "classes": ({"class_weight": torch.ones(5)}, ValueError, r"class_weight must .* \(53,\)"),
    "dtypes": ({"weight": torch.ones(53, 16)}, ValueError, "one dtype outside of autocast"),
    "integers": ({"hidden": torch.ones(3, 7, 16).int()}, TypeError, "floating-point, got torch.int32"),
    "device": ({"weight": torch.ones(53, 16, device="meta")}, ValueError, "weight is on meta and"),
    "its device": ({"class_weight": torch.ones(53, device="meta")}, ValueError, "is on meta and"),
    "list": ({"hidden": [1.0]}, TypeError, "hidden must be a tensor, got list"),
    "sharded": ({"weight": torch.ones(53, 16).as_subclass(Sharded)}, TypeError, "DTensor.*FSDP"),
    "reduction": ({"reduction": "avg"}, ValueError, "reduction must be one of"),
    "smoothing": ({"label_smoothing": 1.5}, ValueError, "label_smoothing .* at most 1, got 1.5"),
    "smoothing's kind": ({"label_smoothing": True}, TypeError, "label_smoothing must be a number"),
    "z": ({"z_loss": -1.0}, ValueError, "z_loss must be at least 0, got -1.0"),
    "softcap": ({"softcap": 0.0}, ValueError, "softcap must be > 0"),
    "chunk": ({"chunk_size": 0}, ValueError, "chunk_size must be >= 1"),
    "chunk's word": ({"chunk_size": "small"}, ValueError, "'auto' or an int >= 1, got 'small'"),
    "ignored": ({"ignore_index": None}, TypeError, "ignore_index must be an int"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name):
    change, error, message = BAD[name]
    hidden, weight, targets, bias = make()
    given = {"hidden": hidden, "weight": weight, "targets": targets, "bias": bias} | change
    with pytest.raises(error, match=message):
        linear_cross_entropy(**given)


def test_a_target_in_the_padding_is_refused_by_the_device(monkeypatch):
    monkeypatch.setattr(parts, "_column_multiple", lambda device, dtype: 64)
    hidden, weight, targets, bias = make()
    targets[0, 5] = 60
    with pytest.raises(IndexError, match="target 60 is no class: expected 0 to 52") as caught:
        linear_cross_entropy(hidden, weight, targets, bias)
    assert "out of bounds" in str(caught.value.__cause__)


def test_other_errors_are_left_as_they_are():
    hidden, weight, targets, bias = make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "run_chunks", raising)
        with pytest.raises(RuntimeError, match="out of something else"):
            linear_cross_entropy(hidden, weight, targets, bias)


# -- Models of transformers --------------------------------------------------------------------------


def build_model(kind, **changes):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 99}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=99, n_embd=16, n_layer=1, n_head=2, **changes)
        return transformers.GPT2LMHeadModel(config).eval()
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes, **heads, **changes)
        return transformers.LlamaForCausalLM(config).eval()
    if kind == "gemma2":
        config = transformers.Gemma2Config(
            **sizes, **heads, head_dim=8, final_logit_softcapping=0.5, **changes
        )
        return transformers.Gemma2ForCausalLM(config).eval()
    config = transformers.GraniteConfig(**sizes, **heads, logits_scaling=4.0, **changes)
    return transformers.GraniteForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2"])
def test_the_loss_of_a_transformers_model_is_its_own(kind):
    model = build_model(kind).double()
    input_ids = torch.randint(99, (2, 12))
    labels = input_ids.clone()
    labels[0, 8:] = -100
    mask = (labels != -100).long()
    found = []
    for function in (
        lambda: model(input_ids=input_ids, labels=labels, attention_mask=mask).loss,
        lambda: causal_lm_loss(model, input_ids, labels, attention_mask=mask, chunk_size=5),
    ):
        model.zero_grad()
        loss = function()
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    # The models take the softmax in fp32 whatever they are in.
    assert_same(found[1], found[0], 2e-5)
    unshifted = linear_cross_entropy(
        model.base_model(input_ids)[0], model.get_output_embeddings().weight, labels
    )
    assert abs(unshifted - found[0][0]) > 1e-3


class Sliding(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.module = model


def test_models_of_another_kind_are_refused():
    ids = torch.ones(1, 4).long()
    with pytest.raises(TypeError, match="of a wrapper pass the model inside"):
        causal_lm_loss(Sliding(build_model("gpt2")), ids, ids)
    with pytest.raises(ValueError, match="GraniteForCausalLM changes its logits by config.logits_"):
        causal_lm_loss(build_model("granite"), ids, ids)
    model = build_model("llama")
    model.set_output_embeddings(nn.Identity())
    with pytest.raises(TypeError, match="must be an nn.Linear, got Identity"):
        causal_lm_loss(model, ids, ids)
    model = build_model("llama")
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="a loss of its router"):
        causal_lm_loss(model, ids, ids)


# -- The measurement ---------------------------------------------------------------------------------


def test_the_measurement_runs_without_a_gpu(tmp_path, monkeypatch, capsys):
    out = tmp_path / "losses.json"
    options = ["--device", "cpu", "--smoke", "--rounds", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["losses.py", *options])
    benchmark.main()
    rows = json.loads(out.read_text())["rows"]
    names = {row["method"] for row in rows}
    assert {"plain eager", "torchfast eager"} <= names
    assert all(row["ms"] > 0 and row["error"] < 0.05 for row in rows)
    assert "torchfast eager" in capsys.readouterr().out
