"""The loss over a large vocabulary in steps and models, what it refuses, and its measurement."""

from __future__ import annotations

import copy
import importlib
import json
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from benchmarks import losses as benchmark
from large_vocabulary import OPTIONS, assert_same, make, plain, results
from tape import Twins
from torchfast.losses import LinearCrossEntropy, causal_lm_loss, linear_cross_entropy
from torchfast.losses import chunks as parts

loss_module = importlib.import_module("torchfast.losses.linear_cross_entropy")


# -- In a training step ----------------------------------------------------------------------------


class Tiny(nn.Module):
    """A model whose output layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(60, 8)
        self.mix = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens):
        return torch.tanh(self.mix(self.dropout(self.embedding(tokens))))


in_chunks = partial(linear_cross_entropy, chunk_size=16)


def tied_loss(model, batch, function=in_chunks):
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
    for function in (plain, in_chunks):
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
        with pytest.raises(RuntimeError, match=r"first derivative only.*F\.cross_entropy"):
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


# -- The module ------------------------------------------------------------------------------------


def test_the_module_keeps_the_options():
    inputs = make()
    module = LinearCrossEntropy(chunk_size=5, reduction="sum", **OPTIONS["all"])
    expected = results(
        linear_cross_entropy, *inputs, chunk_size=5, reduction="sum", **OPTIONS["all"]
    )
    assert_same(results(module, *inputs), expected, 0)
    assert list(module.state_dict()) == []
    assert module.float().class_weight.dtype is torch.float32
    assert "label_smoothing=0.2, z_loss=0.01, softcap=3.0, chunk_size=5" in repr(module)
    with pytest.raises(ValueError, match="reduction must be one of"):
        LinearCrossEntropy(reduction="average")


# -- What is refused -------------------------------------------------------------------------------


def raising(*args, **kwargs):
    raise RuntimeError("out of something else")


class Sharded(torch.Tensor):
    device_mesh = "a mesh"


BAD = {
    "features": (
        {"weight": torch.ones(53, 15).double()},
        ValueError,
        r"\(3, 7, 16\) and \(53, 15\)",
    ),
    "weight of one": ({"weight": torch.ones(16).double()}, ValueError, r"\(3, 7, 16\) and \(16,\)"),
    "no class": ({"weight": torch.ones(0, 16).double()}, ValueError, "at least one row"),
    "targets": ({"targets": torch.ones(3, 6).long()}, ValueError, r"\(3, 7\), got \(3, 6\)"),
    "int32": ({"targets": torch.ones(3, 7).int()}, TypeError, r"int64, got torch.int32.*long\(\)"),
    "floats": ({"targets": torch.ones(3, 7)}, TypeError, "got torch.float32.*F.cross_entropy"),
    "too large": ({"targets": torch.full((3, 7), 53)}, IndexError, "target 53 is no.* 0 to 52"),
    "negative": ({"targets": torch.full((3, 7), -1)}, IndexError, "target -1 is no.*-100"),
    "bias": (
        {"bias": torch.ones(52).double()},
        ValueError,
        r"bias must have shape \(53,\).*\(52,\)",
    ),
    "classes": ({"class_weight": torch.ones(5)}, ValueError, r"class_weight must .* \(53,\)"),
    "dtypes": ({"weight": torch.ones(53, 16)}, ValueError, "one dtype outside of autocast"),
    "integers": (
        {"hidden": torch.ones(3, 7, 16).int()},
        TypeError,
        "floating-point, got torch.int32",
    ),
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


# -- Models of transformers ------------------------------------------------------------------------


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
    if kind == "recurrent gemma":
        sizes["num_hidden_layers"] = 3  # the third has attention
        config = transformers.RecurrentGemmaConfig(
            **sizes, **heads, logits_soft_cap=0.5, lru_width=16, attention_window_size=8, **changes
        )
        return transformers.RecurrentGemmaForCausalLM(config).eval()
    if kind == "bert":
        config = transformers.BertConfig(**sizes, num_attention_heads=2, is_decoder=True, **changes)
        return transformers.BertLMHeadModel(config).eval()
    if kind == "bart":
        config = transformers.BartConfig(
            vocab_size=99, d_model=16, decoder_layers=1, decoder_attention_heads=2,
            decoder_ffn_dim=32, **changes
        )  # fmt: skip
        return transformers.BartForCausalLM(config).eval()
    config = transformers.GraniteConfig(**sizes, **heads, logits_scaling=4.0, **changes)
    return transformers.GraniteForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "recurrent gemma"])
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
    with pytest.raises(ValueError, match=r"GraniteForCausalLM changes its logits by config\."):
        causal_lm_loss(build_model("granite"), ids, ids)
    model = build_model("llama")
    model.set_output_embeddings(nn.Identity())
    with pytest.raises(TypeError, match=r"must be an nn\.Linear, got Identity"):
        causal_lm_loss(model, ids, ids)
    model = build_model("llama")
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="a loss of its router"):
        causal_lm_loss(model, ids, ids)
    with pytest.raises(ValueError, match="num_items_in_batch changes the loss that Llama"):
        causal_lm_loss(build_model("llama"), ids, ids, num_items_in_batch=3)


class Bent(nn.Linear):
    def forward(self, x):
        return 0.5 * super().forward(x)


def changed_llama(change):
    model = build_model("llama")
    model.config.output_router_logits = False  # which hides nothing of the text part's
    model.config.logits_scaling = 1.0
    change(model)
    return model


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m.config, "z_loss_coefficient", 0.1), "a z-loss of its own"),
        (lambda m: setattr(m.config, "unpadded_vocab_size", 90), "cuts its logits to"),
        (lambda m: m.lm_head.register_forward_hook(lambda *_: None), "has hooks"),
        (lambda m: m.lm_head.register_forward_pre_hook(lambda *_: None), "has hooks"),
        (lambda m: m.lm_head.register_full_backward_pre_hook(lambda *_: None), "has hooks"),
        (lambda m: setattr(m, "loss_function", lambda **_: 7.0), "another loss_function"),
        (lambda m: m.set_output_embeddings(Bent(16, 99)), "got Bent with a forward of its own"),
        (lambda m: setattr(m.lm_head, "forward", torch.sin), "got Linear with a forward of its"),
        *(
            (lambda m, n=name, v=value: setattr(m.config, "text_config", Settings(n, v)), words)
            for name, value, words in (
                ("logits_scaling", 8.0, r"changes its logits by config\.logits_scaling"),
                ("output_multiplier", 2.0, r"changes its logits by config\.output_multiplier"),
                ("output_router_logits", True, "a loss of its router"),
            )
        ),
    ],
)
def test_what_makes_other_logits_or_another_loss_is_refused(change, words):
    with pytest.raises((TypeError, ValueError), match=words):
        causal_lm_loss(changed_llama(change), *2 * [torch.ones(1, 4).long()])


class Settings:
    def __init__(self, name, value):
        setattr(self, name, value)


def test_the_softcap_of_a_text_part_is_taken():
    ids = torch.randint(99, (2, 8))
    model = build_model("gemma2")
    model.lm_head.weight.data *= 30  # or no logit is near the cap
    expected = model(input_ids=ids, labels=ids).loss
    text = copy.deepcopy(model.config)
    model.config.final_logit_softcapping = None
    assert (causal_lm_loss(model, ids, ids) - expected).abs() > 1e-3
    model.config.text_config = text
    torch.testing.assert_close(causal_lm_loss(model, ids, ids), expected)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("bart", "BartForCausalLM has a loss of its own"),
        ("bert", r"parameters outside of its base_model .* \(in cls\)"),
    ],
)
def test_models_with_another_loss_are_refused(kind, words, is_compiled):
    """Of both the output layer is an nn.Linear, and what came out was another loss."""
    model = build_model(kind)
    ids = torch.randint(3, 99, (2, 8))
    function = causal_lm_loss
    if is_compiled:
        torch._dynamo.reset()
        function = torch.compile(causal_lm_loss, backend="eager")
    with pytest.raises(ValueError, match=words):
        function(model, ids, ids)


def test_the_checks_of_a_model_break_no_graph():
    model = build_model("llama")
    ids = torch.randint(99, (2, 12))
    torch._dynamo.reset()
    function = torch.compile(causal_lm_loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(function(model, ids, ids), causal_lm_loss(model, ids, ids))


# -- The measurement -------------------------------------------------------------------------------


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
