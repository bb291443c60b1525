"""A compiled model trains as the eager one, and its equal blocks share their code."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn, optim

from compile_models import Net, compiled, tokens
from torchfast.compiler import CompiledModule

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 16)

    def forward(self, tokens):
        images = tokens.float().view(-1, 3, 4, 4)
        return self.head(self.body(images).mean((2, 3)))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)))


def losses_and_grads(model, steps=2):
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(tokens(2 + step)).float().pow(2).mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return losses, [p.grad for p in model.parameters()]


def assert_trains_the_same(model, handle_of):
    eager = copy.deepcopy(model)
    expected = losses_and_grads(eager)
    with handle_of(model) as handle:
        actual = losses_and_grads(model)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert set(handle.status.values()) == {"compiled"}
    return handle


@pytest.mark.parametrize(
    ("make", "regions"),
    [(Net, "blocks"), (Net, "whole"), (ConvNet, "whole"), (Encoder, "blocks")],
)
def test_training_is_the_same(make, regions):
    assert_trains_the_same(make(), lambda m: compiled(m, regions=regions))


def test_training_through_inductor_is_the_same(tmp_path, monkeypatch):
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    eager = copy.deepcopy(model := Net(depth=2))
    # One thread leaves no pool of processes behind. By torch's own patch: pytest's puts the setting
    # back by deleting it, after which torch says that it does not exist.
    with (
        config.patch(compile_threads=1),
        CompiledModule(model, regions="blocks") as handle,
    ):
        loss = model(tokens()).pow(2).mean()
        loss.backward()
        eager(tokens()).pow(2).mean().backward()
        grads, expected = ([p.grad for p in m.parameters()] for m in (model, eager))
        torch.testing.assert_close(grads, expected)
        assert set(handle.status.values()) == {"compiled"}


def tiny(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=16, n_layer=3, n_head=2, vocab_size=16, n_positions=64,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    if name == "llama":
        config = transformers.LlamaConfig(
            **sizes, intermediate_size=32, vocab_size=16, num_key_value_heads=1
        )
        return transformers.LlamaForCausalLM(config)
    config = transformers.BertConfig(
        **sizes, intermediate_size=32, vocab_size=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_transformers_train_the_same(name):
    torch.manual_seed(0)
    model = tiny(name)
    eager = copy.deepcopy(model)
    with compiled(model) as handle:
        for twin in (model, eager):
            for _ in range(2):
                twin(input_ids=tokens(), labels=tokens()).loss.backward()
        assert len(handle.regions) == 3
        assert set(handle.status.values()) == {"compiled"}
    for (path, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=path)


def test_equal_blocks_share_their_code():
    model = Net(depth=24)
    with compiled(model) as handle:
        losses_and_grads(model, steps=1)
        assert handle.report().counters["graphs"] == 1
        # The first block's input needs no gradient now, that of the others does.
        model.embed.requires_grad_(False)
        model(tokens()).sum().backward()
        assert handle.report().counters["graphs"] == 2
        assert handle.report().counters["kinds"] == 1


def test_each_kind_has_code_of_its_own():
    # With one code object the ninth kind would reach torch's limit and run eagerly.
    widths = range(8, 20)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, n), nn.Linear(n, 8)) for n in widths))
    with compiled(model, regions=("*",)) as handle:
        model(torch.ones(2, 8))
        assert set(handle.status.values()) == {"compiled"}
        assert handle.report().counters["graphs"] == handle.report().counters["kinds"] == 12


def test_blocks_that_read_their_index_do_not_reach_the_limit():
    model = Net(depth=12, reads_idx=True)
    with compiled(model) as handle:
        losses_and_grads(model, steps=1)
        assert set(handle.status.values()) == {"compiled"}
        assert handle.report().counters["graphs"] == 12


def test_modules_of_torch_are_really_compiled():
    for module, x in (
        (nn.Linear(4, 4), torch.ones(2, 4)),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)),
        (nn.TransformerEncoderLayer(4, 2, 8), torch.ones(2, 3, 4)),
    ):
        with compiled(module, regions="whole") as handle:
            module(x)
            assert handle.report().counters["graphs"] == 1
            assert handle.status == {"": "compiled"}


def test_a_graph_that_is_kept_needs_its_saved_tensors_to_be_left_alone():
    """What the docs say of it: torch's error names the setting, and the setting is enough."""
    model, eager = Net(), Net()
    eager.load_state_dict(model.state_dict())
    expected = eager(tokens()).square().mean()
    for _ in range(2):
        expected.backward(retain_graph=True)
    with compiled(model):
        loss = model(tokens()).square().mean()
        with pytest.raises(
            RuntimeError, match=r"set torch\._functorch\.config\.donated_buffer=False"
        ):
            loss.backward(retain_graph=True)
    model.zero_grad()
    with torch._functorch.config.patch(donated_buffer=False), compiled(model) as handle:
        loss = model(tokens()).square().mean()
        for _ in range(2):
            loss.backward(retain_graph=True)
        assert set(handle.status.values()) == {"compiled"}
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
