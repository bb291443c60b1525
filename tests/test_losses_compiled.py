"""The loss over a large vocabulary under torch.compile: one graph, its numbers, and its memory."""

from __future__ import annotations

import importlib
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.profiler import ProfilerActivity, profile

from torchfast.losses import LinearCrossEntropy, linear_cross_entropy, products
from torchfast.losses import chunks as parts

# The package's attribute of this name is the function.
loss_module = importlib.import_module("torchfast.losses.linear_cross_entropy")

# torch's own: Dynamo makes an instance of the class Function when it traces one.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

OPTIONS = {
    "bare": {},
    "all": {"label_smoothing": 0.2, "z_loss": 0.01, "softcap": 3.0},
    "none": {"reduction": "none"},
    "sum": {"reduction": "sum"},
}


@pytest.fixture(autouse=True)
def fresh(fresh_dynamo):
    """Each test's code is generated anew; what it is built into may be there from another."""
    with config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


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


@pytest.mark.parametrize("name", OPTIONS)
def test_numbers_among_the_options_may_be_dynamic(name):
    inputs = make()
    function = partial(linear_cross_entropy, chunk_size=8, **OPTIONS[name])
    compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=True)
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


# -- The gradient of the weight is summed in place -------------------------------------------------


def generated(function, inputs):
    """Return what inductor has written for the forward and the backward, and their results."""
    found, (forward, backward) = run_and_get_code(results, function, inputs)
    return forward, backward, found


def sums_of(code):
    """Return the name of what each product of a chunk after the first is added to."""
    return re.findall(r"torch\.ops\.torchfast\.add_product_\.default\((\w+),", code)


def buffers_of(rows, columns, code):
    """Return the names of what is allocated in this shape and fp32."""
    shape = rf"\({rows}, {columns}\), \({columns}, 1\), torch.float32"
    return re.findall(rf"(\w+) = empty_strided_cpu\({shape}\)", code)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_all_chunks_add_to_one_buffer(dynamic, autocast):
    inputs = make((3, 32), 203, 24)[:3]
    function = partial(linear_cross_entropy, chunk_size=32)
    if autocast:
        function = partial(in_autocast, linear_cross_entropy, chunk_size=32)
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    forward, backward, found = generated(compiled, inputs)
    sums = sums_of(forward)
    assert len(sums) == 2
    assert len(set(sums)) == 1
    assert "extern_kernels.addmm(" not in forward
    # The backward multiplies by the loss's gradient, and overwrites what it gets.
    assert "add_product_" not in backward
    if dynamic is None:  # otherwise sizes have names
        assert buffers_of(203, 24, forward) == sums[:1]
        assert buffers_of(203, 24, backward) == []
    expected = results(function, inputs)
    tolerance = 0.02 if autocast else 2e-5
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=tolerance * b.abs().max().item())


def test_the_instrument_sees_sums_that_are_made_anew():
    def function(left, right):
        total = left[:, :8] @ right[:8]
        for start in (8, 16):
            total = total.addmm(left[:, start : start + 8], right[start : start + 8])
        return total

    inputs = torch.randn(203, 24), torch.randn(24, 24)
    _, codes = run_and_get_code(torch.compile(function, fullgraph=True), *inputs)
    assert len(buffers_of(203, 24, "".join(codes))) == 2  # one to read, one to write


@pytest.fixture
def as_on_cuda(monkeypatch):
    """16-bit products with a result in fp32, which are CUDA's, without copies of the factors."""

    @torch.library.custom_op("torchfast_tests::wide_product", mutates_args=())
    def wide_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (left @ right).float()

    @wide_product.register_fake
    def _(left, right):
        return left.new_empty(left.shape[0], right.shape[1], dtype=torch.float32)

    def product(left, right, dtype):
        return torch.ops.torchfast_tests.wide_product.default(left, right)

    monkeypatch.setattr(parts, "product", product)
    monkeypatch.setattr(products, "_add", lambda total, left, right: total.add_(left @ right))
    monkeypatch.setattr(loss_module, "has_wide_products", lambda device: True)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "z_loss": 0.01}], ids=len)
def test_auto_takes_twice_the_tokens_and_no_more_memory_than_eager(options, monkeypatch):
    vocabulary, rows = 4001, 64
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", rows * vocabulary * 4)
    monkeypatch.setattr(loss_module, "FEWEST_ROWS", 1)
    inputs = make((2, 256), vocabulary, 8)[:3]
    function = partial(in_autocast, linear_cross_entropy, **options)
    compiled = torch.compile(function, fullgraph=True)
    forward, backward, found = generated(compiled, inputs)
    assert len(sums_of(forward)) == 3  # of four chunks the first makes the sum
    assert len(set(sums_of(forward))) == 1
    assert "add_product_" not in backward
    for a, b in zip(found, results(function, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=0.02 * b.abs().max().item())
    eager_bytes = peak_bytes(function, inputs)
    assert eager_bytes > 9 * rows * vocabulary  # the instrument: bf16, fp32, and log-softmax
    assert peak_bytes(compiled, inputs) <= eager_bytes


def test_the_operator_keeps_to_what_it_says():
    operator = torch.ops.torchfast.add_product_.default
    narrow = torch.randn(3, 5).bfloat16(), torch.randn(3, 4).bfloat16()
    for left, right in ((torch.randn(5, 3), torch.randn(3, 4)), (narrow[0].t(), narrow[1])):
        total, loss = torch.randn(5, 4), torch.randn(3)
        torch.library.opcheck(operator, (total, left, right, loss))
        expected = total + left.float() @ right.float()
        assert operator(total, left, right, loss).equal(loss)
        torch.testing.assert_close(total, expected)


def test_the_module_can_be_loaded_again():
    importlib.reload(products)
    inputs = make()
    function = partial(linear_cross_entropy, chunk_size=8)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_close(results(compiled, inputs), results(function, inputs))


@pytest.mark.parametrize("functions", [False, True])
def test_what_is_compiled_is_found_again(functions, tmp_path, monkeypatch):
    """In torch's caches; that of AOTAutograd takes no autograd functions unless it is told to."""
    inputs = make((2, 12), 53)[:3]
    function = partial(linear_cross_entropy, chunk_size=8)
    found = []
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with (
        config.patch(fx_graph_cache=True),
        functorch_config.patch(
            enable_autograd_cache=True, autograd_cache_allow_custom_autograd_functions=functions
        ),
    ):
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            results(torch.compile(function, fullgraph=True), inputs)
            found.append({**counters["inductor"], **counters["aot_autograd"]})
    first, second = found
    assert (first["fxgraph_cache_miss"], second["fxgraph_cache_hit"]) == (2, 2)
    assert not any(seen.get("fxgraph_cache_bypass") for seen in found)
    if functions:
        assert second["autograd_cache_hit"] == 1
        assert not any(seen.get("autograd_cache_bypass") for seen in found)


@pytest.mark.parametrize(
    ("chunk_size", "sizes", "most"),
    [(64, (4, 6, 9, 11, 17, 23, 29, 31, 37, 41), 2), (8, (18, 19, 21, 22, 23), 2)],
    ids=["one chunk", "two and a rest"],
)
@pytest.mark.parametrize("dynamic", [None, True])
def test_other_numbers_of_tokens_are_not_compiled_anew(dynamic, chunk_size, sizes, most):
    """As batches of other lengths have them; each number of chunks is compiled once."""
    counter = CompileCounter()
    loss = partial(linear_cross_entropy, chunk_size=chunk_size)
    compiled = torch.compile(loss, backend=counter, dynamic=dynamic)
    torch.manual_seed(0)
    weight = torch.randn(50, 8, requires_grad=True)
    for size in sizes:
        hidden, targets = torch.randn(size, 8, requires_grad=True), torch.randint(50, (size,))
        found, expected = compiled(hidden, weight, targets), loss(hidden, weight, targets)
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(each, (hidden, weight)) for each in (found, expected)]
        torch.testing.assert_close(*gradients)
    assert counter.frame_count <= most
