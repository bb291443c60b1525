"""Which layer gives the logits of a vocabulary, and so stays in bf16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from float8_models import EMULATED
from torchfast.precision.float8_layers import survey

REASON = "it gives the logits of the vocabulary"


def logits_layers(model, options=EMULATED):
    return [layer.name for layer in survey(model, options) if layer.reason == REASON]


class ScaledEmbedding(nn.Embedding):
    def forward(self, tokens):
        return super().forward(tokens) * 4.0


class Model(nn.Module):
    """A table, blocks whose inner layers are as wide as it has rows, and a head."""

    def __init__(self, table=nn.Embedding, words=96, inner=96, tied=False):
        super().__init__()
        self.head_first = nn.Linear(32, inner)
        self.embed = table(words, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, inner), nn.Linear(inner, 32)) for _ in range(2)
        )
        self.head = nn.Linear(32, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("inner", [64, 96])
@pytest.mark.parametrize("table", [nn.Embedding, ScaledEmbedding])
def test_the_head_of_any_embedding_is_known_among_layers_of_its_shape(table, inner, tied):
    assert logits_layers(Model(table, inner=inner, tied=tied)) == ["head"]


def test_a_tied_head_is_known_wherever_it_stands():
    model = Model(inner=96)
    model.head_first.weight = model.embed.weight
    model.head = nn.Linear(32, 48)
    assert logits_layers(model) == ["head_first"]


def test_a_head_that_is_tied_to_a_parameter_is_known():
    class Looked(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Parameter(torch.randn(96, 32))
            self.inner = nn.Linear(32, 96)
            self.head = nn.Linear(32, 96, bias=False)
            self.head.weight = self.words

        def forward(self, tokens):
            return self.head(F.embedding(tokens, self.words))

    assert logits_layers(Looked()) == ["head"]


def test_a_head_that_the_model_names_is_known():
    class Named(Model):
        def get_output_embeddings(self):
            return self.head_first

    assert logits_layers(Named()) == ["head_first"]
    assert logits_layers(nn.ModuleDict({"net": Named()})) == ["net.head_first"]

    class Silent(Model):
        def get_output_embeddings(self):
            raise NotImplementedError

    assert logits_layers(Silent()) == ["head"]


def test_several_tables_have_several_heads():
    model = nn.ModuleDict(
        {
            "tables": nn.ModuleList(nn.Embedding(96, 32) for _ in range(3)),
            "inner": nn.Linear(32, 96),
            "heads": nn.ModuleList(nn.Linear(32, 96) for _ in range(3)),
        }
    )
    assert logits_layers(model) == ["heads.0", "heads.1", "heads.2"]


@pytest.mark.parametrize("family", ["Gemma3", "Bart", "M2M100", "Llama"])
def test_heads_of_transformers_are_known(family):
    transformers = pytest.importorskip("transformers")
    if family in ("Gemma3", "Llama"):
        kind = "Gemma3Text" if family == "Gemma3" else family
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,  # as wide as the vocabulary
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    else:
        config = getattr(transformers, f"{family}Config")(
            vocab_size=128,
            d_model=64,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
        )
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    assert logits_layers(model) == ["lm_head"]
