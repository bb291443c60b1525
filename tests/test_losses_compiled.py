"""The loss over a large vocabulary under torch.compile: one graph, its numbers, and its memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from torchfast.losses import LinearCrossEntropy, linear_cross_entropy

# torch's own: Dynamo makes an instance of the class Function when it traces one.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

OPTIONS = {
    "bare": {},
    "all": {"label_smoothing": 0.2, "z_loss": 0.01, "softcap": 3.0},
    "none": {"reduction": "none"},
    "sum": {"reduction": "sum"},
}


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(shape=(2, 10), vocabulary=53, features=8):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*shape, features, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, features, generator=generator, requires_grad=True)
    targets = torch.randint(vocabulary, shape, generator=generator)
    targets[0, :3] = -100
    bias = torch.randn(vocabulary, generator=generator, requires_grad=True)
    return hidden, weight, targets, bias


def results(function, inputs):
    loss = function(*inputs)
    asked = [t for t in inputs if t.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, asked, torch.full_like(loss, 3.0))]


def assert_close(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


def in_autocast(function, *inputs, **options):
    with torch.autocast("cpu", torch.bfloat16):
        return function(*inputs, **options)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_one_graph(name, autocast):
    inputs = make()
    function = partial(linear_cross_entropy, chunk_size=8, **OPTIONS[name])
    if autocast:
        function = partial(in_autocast, linear_cross_entropy, chunk_size=8, **OPTIONS[name])
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_close(results(compiled, inputs), results(function, inputs))


def test_whatever_asks_for_a_gradient_and_however_many_tokens():
    function = partial(linear_cross_entropy, chunk_size=8)
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    hidden, weight, targets, bias = make()
    for inputs in (
        (hidden, weight, targets, bias),
        (hidden.detach(), weight, targets, bias),
        (hidden, weight.detach(), targets, bias.detach()),
        make((2, 13)),
        make((2, 21)),
    ):
        assert_close(results(compiled, inputs), results(function, inputs))
    with torch.no_grad():
        assert_close([compiled(hidden, weight, targets)], [function(hidden, weight, targets)])


def test_the_module_within_a_model():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(53, 8)
            self.loss = LinearCrossEntropy(chunk_size=8)

        def forward(self, tokens):
            hidden = torch.tanh(self.embedding(tokens))
            return self.loss(hidden, self.embedding.weight, tokens.roll(-1, 1))

    torch.manual_seed(0)
    model, tokens = Model(), torch.randint(53, (2, 12))
    gradients = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        run(tokens).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert_close(gradients[1], gradients[0])


def peak_bytes(function, inputs):
    """Return what a forward and backward has allocated at once, above what stood before."""
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True, acc_events=True) as profiled:
        function(*inputs).backward()
    now = highest = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            highest = max(highest, now)
    return highest


def plain(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), targets.flatten())


def test_inductor_computes_the_same_and_keeps_no_more_than_a_chunk_at_a_time():
    inputs = make((2, 256), 2003)[:3]
    logits_bytes = 512 * 2003 * 4
    function = partial(linear_cross_entropy, chunk_size=128)
    compiled = torch.compile(function, fullgraph=True)
    assert_close(results(compiled, inputs), results(function, inputs))
    # Four chunks: the logits of one, its gradient, and little else.
    assert peak_bytes(compiled, inputs) < 0.62 * logits_bytes
    assert peak_bytes(function, inputs) < 0.62 * logits_bytes
    # The instrument sees the whole logits where they are.
    assert peak_bytes(plain, inputs) > 1.9 * logits_bytes
    assert peak_bytes(partial(function, chunk_size=512), inputs) > 1.9 * logits_bytes
