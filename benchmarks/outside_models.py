"""Models that nobody here wrote: a registry of timm and transformers architectures.

All are small, have random weights and are built without a download; ``benchmarks/sweep.py`` trains
each of them. Neither package is imported before a model is built, and every entry can be pickled,
so that a process of its own can build it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

optimizer = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
scheduler = partial(CosineAnnealingLR, T_max=10)

VOCAB = 1000
CLASSES = 10


@dataclass(frozen=True)
class OutsideModel:
    """A model, its batches and its loss function."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    loss_fn: Callable[[Any, Any], Tensor]


def without_dropout(model: nn.Module) -> nn.Module:
    """Return the model with nothing random left in its forward."""
    # transformers models read some rates from their configuration in the forward.
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    for holder in (*model.modules(), *configs):
        for name, value in list(vars(holder).items()):
            if isinstance(value, float) and (name == "p" or "drop" in name):
                setattr(holder, name, 0.0)
    return model


# --- loss functions -----------------------------------------------------------------------------


def hf_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the loss that a transformers model computes itself."""
    return model(**batch).loss


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of an image classifier."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


# --- batches ------------------------------------------------------------------------------------


def _tokens(generator: torch.Generator, length: int = 64) -> Tensor:
    return torch.randint(VOCAB, (4, length), generator=generator)


def _labels(generator: torch.Generator, count: int) -> Tensor:
    return torch.randint(CLASSES, (count,), generator=generator)


def _causal(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens}


def _masked(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = _tokens(generator)
    mask = torch.ones_like(tokens)
    mask[0, 40:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def _seq2seq(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator, 32)}


def _images(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
    images = torch.randn(8, 3, size, size, generator=generator)
    return images, _labels(generator, 8)


def _pixels(generator: torch.Generator) -> dict[str, Tensor]:
    images, labels = _images(generator, 64)
    return {"pixel_values": images, "labels": labels}


def _captions(generator: torch.Generator) -> dict[str, Any]:
    pixels = torch.randn(4, 3, 64, 64, generator=generator)
    return {"input_ids": _tokens(generator), "pixel_values": pixels, "return_loss": True}


def _waves(generator: torch.Generator) -> dict[str, Tensor]:
    waves = torch.randn(4, 4000, generator=generator)  # a quarter of a second at 16 kHz
    return {"input_values": waves, "labels": _labels(generator, 4)}


def _spectra(generator: torch.Generator) -> dict[str, Tensor]:
    spectra = torch.randn(4, 80, 128, generator=generator)
    return {"input_features": spectra, "labels": _tokens(generator, 32)}


# --- timm ---------------------------------------------------------------------------------------


def _build_timm(name: str, options: dict[str, Any]) -> nn.Module:
    timm = importlib.import_module("timm")
    return timm.create_model(name, num_classes=CLASSES, **options)


def _timm(name: str, size: int = 64, **options: Any) -> OutsideModel:
    return OutsideModel(partial(_build_timm, name, options), partial(_images, size=size), classify)


_TIMM = {
    # Convolutions
    "ResNet": _timm("resnet18"),
    "ResNeXt": _timm("resnext26ts"),
    "RegNet": _timm("regnetx_002"),
    "DenseNet": _timm("densenet121", growth_rate=8),
    "RepVGG": _timm("repvgg_a0"),
    "HRNet": _timm("hrnet_w18_small"),
    "NFNet": _timm("nf_regnet_b0"),
    "EfficientNet": _timm("efficientnet_b0", drop_rate=0.2),
    "MobileNetV3": _timm("mobilenetv3_small_050"),
    "MobileNetV4": _timm("mobilenetv4_conv_small_050"),
    "GhostNet": _timm("ghostnet_050"),
    "ConvNeXt": _timm("convnext_atto", drop_path_rate=0.1),
    "ConvNeXt V2": _timm("convnextv2_atto"),
    # Attention
    "ViT": _timm("vit_tiny_patch16_224", img_size=64, drop_rate=0.1),
    "DeiT distilled": _timm("deit_tiny_distilled_patch16_224", img_size=64),
    "BEiT": _timm("beit_base_patch16_224", img_size=64, embed_dim=192, num_heads=3),
    "EVA-02": _timm("eva02_tiny_patch14_224", size=56, img_size=56),
    "CaiT": _timm("cait_xxs24_224", img_size=64, depth=8),
    "XCiT": _timm("xcit_nano_12_p16_224", img_size=64),
    "CrossViT": _timm("crossvit_tiny_240", size=120, img_size=120),
    "VOLO": _timm("volo_d1_224", img_size=64),
    "Swin": _timm("swin_tiny_patch4_window7_224", img_size=64, window_size=4),
    "Swin V2": _timm("swinv2_tiny_window8_256", img_size=64, window_size=4),
    # Both, or neither
    "MLP-Mixer": _timm("mixer_s32_224", img_size=64),
    "PoolFormer": _timm("poolformer_s12"),
    "LeViT": _timm("levit_128s", img_size=64),
    "EdgeNeXt": _timm("edgenext_xx_small"),
    "MobileViT": _timm("mobilevit_xxs"),
    "CoAtNet": _timm("coatnet_nano_rw_224", img_size=64),
    "MaxViT": _timm("maxvit_pico_rw_256", img_size=64),
}

# --- transformers -------------------------------------------------------------------------------


def _build_transformers(config: str, head: str, options: dict[str, Any]) -> nn.Module:
    transformers = importlib.import_module("transformers")
    auto = getattr(transformers, head)
    return auto.from_config(getattr(transformers, config)(**options))


def _transformers(
    config: str,
    head: str,
    batch: Callable[[torch.Generator], Any],
    **options: Any,
) -> OutsideModel:
    return OutsideModel(partial(_build_transformers, config, head, options), batch, hf_loss)


# Two layers of width 64, under the names that configurations share.
_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_GROUPED = {**_SMALL, "vocab_size": VOCAB, "num_key_value_heads": 2, "head_dim": 16}
_EXPERTS = {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_CODER = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

_CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2Config", {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "GPT-NeoX": ("GPTNeoXConfig", _SMALL),
    "OPT": ("OPTConfig", {**_SMALL, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "BLOOM": ("BloomConfig", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "Falcon": ("FalconConfig", _SMALL),
    "Phi": ("PhiConfig", _SMALL),
    "Llama": ("LlamaConfig", _GROUPED),
    "Mistral": ("MistralConfig", {**_GROUPED, "sliding_window": 32}),
    "Mixtral": ("MixtralConfig", {**_GROUPED, "num_local_experts": 4}),
    "Qwen2": ("Qwen2Config", _GROUPED),
    "Qwen2-MoE": ("Qwen2MoeConfig", {**_EXPERTS, "shared_expert_intermediate_size": 64}),
    "Qwen3": ("Qwen3Config", _GROUPED),
    "Gemma": ("GemmaConfig", _GROUPED),
    "Gemma 2": ("Gemma2Config", _GROUPED),
    "Mamba": ("MambaConfig", {"hidden_size": 64, "num_hidden_layers": 2}),
    "Mamba 2": (
        "Mamba2Config",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "n_groups": 2},
    ),
}
_MASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("BertConfig", _SMALL),
    "RoBERTa": ("RobertaConfig", _SMALL),
    "ELECTRA": ("ElectraConfig", {**_SMALL, "embedding_size": 64}),
    "ALBERT": ("AlbertConfig", {**_SMALL, "embedding_size": 64}),
    "DeBERTa-v2": ("DebertaV2Config", {**_SMALL, "relative_attention": True}),
    "DistilBERT": ("DistilBertConfig", {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4}),
}


def _language_models(
    table: dict[str, tuple[str, dict[str, Any]]],
    head: str,
    batch: Callable[[torch.Generator], Any],
) -> dict[str, OutsideModel]:
    return {
        name: _transformers(config, head, batch, **{**_SPECIAL, "vocab_size": VOCAB, **options})
        for name, (config, options) in table.items()
    }


_TRANSFORMERS = {
    **_language_models(_CAUSAL, "AutoModelForCausalLM", _causal),
    **_language_models(_MASKED, "AutoModelForMaskedLM", _masked),
    "T5": _transformers(
        "T5Config",
        "AutoModelForSeq2SeqLM",
        _seq2seq,
        vocab_size=VOCAB,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "BART": _transformers(
        "BartConfig", "AutoModelForSeq2SeqLM", _seq2seq, vocab_size=VOCAB, **_CODER
    ),
    "Whisper": _transformers(
        "WhisperConfig",
        "AutoModelForSpeechSeq2Seq",
        _spectra,
        vocab_size=VOCAB,
        max_source_positions=64,
        decoder_start_token_id=1,
        **_SPECIAL,
        **_CODER,
    ),
    "Wav2Vec2": _transformers(
        "Wav2Vec2Config",
        "AutoModelForAudioClassification",
        _waves,
        num_labels=CLASSES,
        conv_dim=[32] * 7,
        num_conv_pos_embeddings=16,
        apply_spec_augment=False,
        **_SMALL,
    ),
    "ViT": _transformers(
        "ViTConfig",
        "AutoModelForImageClassification",
        _pixels,
        num_labels=CLASSES,
        image_size=64,
        patch_size=8,
        **_SMALL,
    ),
    "SegFormer": _transformers(
        "SegformerConfig", "AutoModelForImageClassification", _pixels, num_labels=CLASSES
    ),
    "CLIP": _transformers(
        "CLIPConfig",
        "AutoModel",
        _captions,
        projection_dim=64,
        text_config={**_SMALL, **_SPECIAL, "vocab_size": VOCAB, "max_position_embeddings": 64},
        vision_config={**_SMALL, "image_size": 64, "patch_size": 8},
    ),
}

MODELS = {
    **{f"timm {name}": model for name, model in _TIMM.items()},
    **{f"transformers {name}": model for name, model in _TRANSFORMERS.items()},
}
