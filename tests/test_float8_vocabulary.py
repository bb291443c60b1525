"""Which layer gives the logits of a vocabulary, and so stays in bf16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from float8_models import EMULATED
from torchfast.precision.float8_layers import survey

SURE = "it gives the logits of the vocabulary"
GUESSED = (
    "it may give the logits of the vocabulary, as the last layer of an embedding's shape; "
    "vocabulary=True converts it"
)


def reasons(model):
    return {layer.name: layer.reason for layer in survey(model, EMULATED)}


def logits_layers(model):
    return [name for name, reason in reasons(model).items() if reason in (SURE, GUESSED)]


@pytest.mark.parametrize("tied", [False, True])
def test_a_guess_by_the_shape_is_told_as_one(tied):
    assert reasons(Model(tied=tied))["head"] == (SURE if tied else GUESSED)


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


class Adapted(nn.Module):
    """Has the weight of the layer that it stands before, as adapters do."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(32, 32)
        self.weight = self.base.weight
        self.down, self.up = nn.Linear(32, 16), nn.Linear(16, 32)

    def forward(self, x):
        return F.linear(x, self.weight, self.base.bias) + self.up(self.down(x))


class Decoding(nn.Module):
    """An autoencoder whose decoder multiplies by the weight of its encoder."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(32, 32)
        self.tied = self.encoder.weight

    def forward(self, x):
        return F.linear(self.encoder(x), self.tied.t())


@pytest.mark.parametrize("model", [Adapted(), Decoding()])
def test_a_weight_that_another_module_multiplies_by_is_no_table(model):
    assert set(reasons(model).values()) == {None}


def test_an_answer_that_needs_a_question_is_passed_over():
    class Asked(Model):
        def get_output_embeddings(self, language):
            return self.head_first if language else None

    assert logits_layers(Asked()) == ["head"]


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
