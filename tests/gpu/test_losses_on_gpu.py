"""The loss over a large vocabulary on a real device: numbers, memory, graphs, and no sync."""

from __future__ import annotations

import importlib
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn, optim

from gpu.syncs import no_syncs
from large_vocabulary import OPTIONS, assert_same, make, plain, results
from torchfast import Plan, Trainer
from torchfast.losses import linear_cross_entropy

# The package's attribute of this name is the function.
loss_module = importlib.import_module("torchfast.losses.linear_cross_entropy")
in_chunks = partial(linear_cross_entropy, chunk_size=128)


def on_gpu(shape=(4, 128), vocabulary=1003, features=64, dtype=torch.float32, ignored=20):
    made = make(shape, vocabulary, features, dtype, ignored=ignored)
    return [t.detach().cuda().requires_grad_(t.is_floating_point()) for t in made]


def options_of(name, vocabulary=1003):
    options = dict(OPTIONS[name])
    if "class_weight" in options:
        options["class_weight"] = torch.linspace(0.1, 2, vocabulary, device="cuda")
    return options


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_fp32_is_that_of_the_two_functions(name, reduction):
    inputs = on_gpu()
    options = options_of(name) | {"reduction": reduction}
    assert_same(results(in_chunks, *inputs, **options), results(plain, *inputs, **options), 3e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [1003, 1024])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["bare", "all"])
def test_16_bits_are_as_near_to_fp64_as_the_two_functions(name, reduction, vocabulary, dtype):
    narrow = on_gpu(vocabulary=vocabulary)
    for tensor in (narrow[0], narrow[1], narrow[3]):
        tensor.data = tensor.data.to(dtype).float()
    options = options_of(name, vocabulary) | {"reduction": reduction}
    wide = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in narrow]
    exact = dict(options)
    if "class_weight" in exact:
        exact["class_weight"] = exact["class_weight"].double()
    expected = results(plain, *wide, **exact)
    scale = 2.0**10 if dtype is torch.float16 else 1.0  # so that the plain way does not vanish
    errors = []
    for function in (in_chunks, plain):
        with torch.autocast("cuda", dtype):
            loss = function(*narrow, **options)
        asked = [narrow[0], narrow[1], narrow[3]]
        gradients = torch.autograd.grad(loss, asked, torch.full_like(loss, scale))
        found = [loss.detach(), *(g / scale for g in gradients)]
        errors.append(
            [
                ((a.double() - b).norm() / b.norm()).item()
                for a, b in zip(found, expected, strict=True)
            ]
        )
    ours, theirs = errors
    floor = [1e-4, 0, 0, 0]
    assert all(a <= 1.5 * b + c for a, b, c in zip(ours, theirs, floor, strict=True)), errors


@pytest.mark.parametrize("name", ["bare", "all"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_host_never_waits(name, reduction):
    inputs = on_gpu()
    options = options_of(name) | {"reduction": reduction}
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            results(in_chunks, *inputs, **options)
    with no_syncs(), torch.autocast("cuda", torch.bfloat16):
        found = results(in_chunks, *inputs, **options)
    assert found[0].isfinite().all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_same_bits_under_deterministic_algorithms(deterministic, reduction):
    inputs = on_gpu()
    with torch.autocast("cuda", torch.bfloat16):
        found = [results(in_chunks, *inputs, reduction=reduction) for _ in range(3)]
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )


def peak_bytes(function, inputs):
    for tensor in inputs:
        tensor.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", torch.bfloat16):
        loss = function(*inputs)
    loss.backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("compiled", [False, True])
def test_the_peak_is_that_of_a_chunk(compiled):
    torch._dynamo.reset()
    inputs = on_gpu((8192,), 32003, 64)[:3]
    function = partial(linear_cross_entropy, chunk_size=1024)
    if compiled:
        function = torch.compile(function, fullgraph=True)
    for _ in range(2):
        peak_bytes(function, inputs)
        peak_bytes(plain, inputs)
    logits_bytes = 8192 * 32003 * 2
    gradients_bytes = sum(t.numel() * 4 for t in inputs[:2])
    # A chunk in bf16, in fp32, and its gradient in bf16 are half of the logits in bf16.
    assert peak_bytes(function, inputs) < 0.7 * logits_bytes + 4 * gradients_bytes
    assert peak_bytes(plain, inputs) > 2.5 * logits_bytes
    torch._dynamo.reset()


@pytest.mark.parametrize("chunk_size", [1024, "auto"])
def test_compiled_chunks_add_to_one_gradient_as_eager_ones_do(chunk_size, monkeypatch):
    """Eight chunks whose weight is as large as their logits: eight gradients would be seen."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 1)  # "auto": 1024 tokens, compiled 2048
    torch._dynamo.reset()
    inputs = on_gpu((8192,), 32000, 1024)[:3]
    function = partial(linear_cross_entropy, chunk_size=chunk_size)
    compiled = torch.compile(function, fullgraph=True)
    for _ in range(2):
        peak_bytes(function, inputs)
        peak_bytes(compiled, inputs)
    eager_bytes = peak_bytes(function, inputs)
    logits, weight = 1024 * 32000, 32000 * 1024
    # The weight in bf16, its gradient in fp32; logits in bf16, in fp32, and their log-softmax.
    assert eager_bytes > 6 * weight + 9 * logits
    assert peak_bytes(compiled, inputs) < 1.1 * eager_bytes
    torch._dynamo.reset()


def test_compiled_computes_the_same():
    torch._dynamo.reset()
    inputs = on_gpu()
    for name in ("bare", "all"):
        function = partial(in_chunks, **options_of(name))
        with torch.autocast("cuda", torch.bfloat16):
            expected = results(function, *inputs)
            found = results(torch.compile(function, fullgraph=True), *inputs)
        assert_same(found, expected, 0.02)
    torch._dynamo.reset()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1003, 64)
        self.mix = nn.Linear(64, 64)

    def forward(self, tokens):
        return torch.tanh(self.mix(self.embedding(tokens)))


def train(loss, plan, steps=12):
    torch.manual_seed(0)
    model = Tied().cuda()

    def loss_fn(model, batch):
        return loss(model(batch[0]), model.embedding.weight, batch[1])

    make_optimizer = partial(optim.AdamW, lr=1e-2, fused=True)
    trainer = Trainer(model, make_optimizer, loss_fn, plan, max_grad_norm=1.0)
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randint, 1003, (4, 64), generator=generator)
    losses = [trainer.step((draw().cuda(), draw().cuda())).item() for _ in range(steps)]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    replays = trainer.report().counters.get("replays", 0)
    trainer.close()
    return losses, state, replays


@pytest.mark.usefixtures("deterministic")
def test_a_captured_step_trains_as_an_eager_one():
    eager, captured = (train(in_chunks, plan) for plan in ("eager", "exact"))
    assert captured[2] == 9
    assert eager[0] == captured[0]
    assert all(torch.equal(eager[1][key], captured[1][key]) for key in eager[1])


def test_training_follows_the_two_functions():
    plan = Plan(precision="bf16")
    ours, theirs = train(in_chunks, plan)[0], train(plain, plan)[0]
    assert ours == pytest.approx(theirs, rel=0.01)
    assert ours[-1] < ours[0]


WRONG = """
import torch
from torchfast.losses import linear_cross_entropy
hidden = torch.ones(4, 16, device="cuda", dtype=torch.bfloat16)
weight = torch.ones(1003, 16, device="cuda", dtype=torch.bfloat16)
linear_cross_entropy(hidden, weight, torch.full((4,), 1010, device="cuda"))
torch.cuda.synchronize()
"""


def test_a_target_in_the_padding_is_refused_by_the_device():
    # In a process of its own: a device-side assertion ends the use of CUDA in this one.
    done = subprocess.run(
        [sys.executable, "-c", WRONG], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode != 0
    assert "device-side assert" in done.stderr
