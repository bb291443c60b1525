"""Models that nobody here wrote, small and with random weights, trained as they are.

    PYTHONPATH=. python benchmarks/outside_models.py [--out FILE]

For each model: whether ``Trainer`` under the plans ``eager`` and ``exact`` ends bitwise where the
plain loop ends (deterministic algorithms, accumulation, clipping, a schedule), and how often fifty
steady steps make the host wait, in the plain loop and in the trainer, as torch's sync debug mode
counts it. The waits that both have are the model's own.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchmarks import results
from torchfast import Trainer
from torchfast.testing import assert_parity, plain_step

optimizer = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
scheduler = partial(CosineAnnealingLR, T_max=10)


@dataclass(frozen=True)
class OutsideModel:
    """A model, its batches and its loss function."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    loss_fn: Callable[[Any, Any], Tensor]


def hf_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss that a transformers model computes itself."""
    return model(**batch).loss


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of an image classifier."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def _tokens(generator: torch.Generator, length: int = 64) -> Tensor:
    return torch.randint(1000, (4, length), generator=generator)


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


def _images(size: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images = torch.randn(16, 3, size, size, generator=generator)
        return images, torch.randint(10, (16,), generator=generator)

    return batch


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=1000, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=1000,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
        )
    )


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1000,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=1000,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    )


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=10, **options)

    return build


MODELS = {
    "transformers GPT-2": OutsideModel(_gpt2, _causal, hf_loss),
    "transformers BERT": OutsideModel(_bert, _masked, hf_loss),
    "transformers Llama": OutsideModel(_llama, _causal, hf_loss),
    "transformers T5": OutsideModel(_t5, _seq2seq, hf_loss),
    "timm ResNet": OutsideModel(_timm("resnet18"), _images(64), classify),
    "timm ViT": OutsideModel(
        _timm("vit_tiny_patch16_224", img_size=64, drop_rate=0.1), _images(64), classify
    ),
    "timm ConvNeXt": OutsideModel(
        _timm("convnext_atto", drop_path_rate=0.1), _images(64), classify
    ),
    "timm EfficientNet": OutsideModel(
        _timm("efficientnet_b0", drop_rate=0.2), _images(64), classify
    ),
    "timm Swin": OutsideModel(_timm("swin_tiny_patch4_window7_224"), _images(224), classify),
    "timm MLP-Mixer": OutsideModel(_timm("mixer_s32_224"), _images(224), classify),
}


def without_dropout(model: nn.Module) -> nn.Module:
    """Return the model with nothing random left in its forward."""
    for module in model.modules():
        for name in ("p", "drop_prob", "drop_rate", "dropout", "dropout_p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def host_waits(step: Callable[[], Any], count: int = 50) -> int:
    """Return how often ``count`` steady steps make the host wait."""
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(count):
            step()
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(w.message) for w in caught)


def measure(outside: OutsideModel) -> dict[str, Any]:
    """Return parity and host waits of one model."""
    generator = torch.Generator().manual_seed(0)
    batches = [outside.batch(generator) for _ in range(7)]
    figures: dict[str, Any] = {}
    for plan in ("eager", "exact"):
        result = assert_parity(
            outside.build,
            optimizer,
            outside.loss_fn,
            batches,
            plan,
            accumulate=2,
            max_grad_norm=1.0,
            lr_scheduler=scheduler,
            device="cuda",
        )
        figures[plan] = {
            "bitwise": result.exact,
            "steps": result.num_steps,
            "losses": result.losses,
        }
    model = outside.build().cuda()
    made = optimizer(model.parameters())
    trainer = Trainer(model, made, outside.loss_fn, max_grad_norm=1.0)
    batch = next(iter(trainer.prefetch(batches)))
    figures["host_waits_of_50_steps"] = {
        "plain": host_waits(
            lambda: plain_step(model, made, outside.loss_fn, [batch], max_grad_norm=1.0)
        ),
        "trainer": host_waits(lambda: trainer.step(batch)),
    }
    return figures


def main() -> None:
    """Measure every model, print a table, and write the raw figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    for name, outside in MODELS.items():
        try:
            figures[name] = measure(outside)
            waits = figures[name]["host_waits_of_50_steps"]
            print(f"{name:26} bitwise  host waits {waits['plain']} -> {waits['trainer']}")
        except Exception as error:
            figures[name] = {"error": f"{type(error).__name__}: {error}"}
            print(f"{name:26} {figures[name]['error']}")
    if args.out:
        results.write(args.out, {"figures": figures})


if __name__ == "__main__":
    main()
