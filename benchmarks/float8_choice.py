"""Does the measured choice of float8 ever lose to bf16? Ten models that nobody here wrote.

    PYTHONPATH=. python benchmarks/float8_choice.py [--steps captured compiled] [--models ...]
        [--limit-s 500] [--size smoke] [--device cpu] [--out FILE]

Models of transformers as wide as they were published, with four blocks, a small vocabulary and
random weights. Each trains with ``precision="bf16"`` and with ``precision="fp8"``, whose recipes
are measured at the first step, in turns: the ratio is the median of the quotients turn by turn. A
step is in one CUDA graph, and not compiled or compiled by block. On a CPU it is neither, float8 is
emulated, and what is measured leaves all layers in bf16.

Each row is written as it comes, beside those of earlier runs (`benchmarks.result_rows`). What the
limit leaves no time for, and what fails, is named in the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import time
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.arms import parser_of, settings_of
from benchmarks.outside_models import without_dropout
from benchmarks.result_rows import ResultRows
from benchmarks.taking_turns import Ours, measured
from benchmarks.workloads.definition import Batch, Workload
from torchfast import CompileOptions, Float8Options, Plan

STEPS = ("captured", "compiled")
BLOCKS = 4
VOCABULARY = 10240  # no layer of a block is as wide: it would have the shape of the head
CLASSES = 16
NARROWER = 8  # so many times, for --size smoke
WIDTHS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "ffn_dim",
    "word_embed_proj_dim",
    "head_dim",
    "d_model",
    "d_ff",
    "d_kv",
)


class Outside(NamedTuple):
    """A model: its configuration, its head, what it reads, and its sizes."""

    config: str
    head: str
    reads: str  # "tokens" or "pixels"
    options: dict[str, Any]


def _causal(config: str, width: int, hidden: int, heads: int, **more: Any) -> Outside:
    sizes = {"hidden_size": width, "intermediate_size": hidden, "num_attention_heads": heads}
    options = {**sizes, "num_hidden_layers": BLOCKS, "vocab_size": VOCABULARY, **more}
    return Outside(config, "AutoModelForCausalLM", "tokens", options)


_BERT = _causal("BertConfig", 1024, 4096, 16, max_position_embeddings=1024)
_VIT = _causal("ViTConfig", 1024, 4096, 16, num_labels=CLASSES)
MODELS = {
    "Llama 3.2 1B": _causal("LlamaConfig", 2048, 8192, 32, num_key_value_heads=8, head_dim=64),
    "Mistral 7B": _causal("MistralConfig", 4096, 14336, 32, num_key_value_heads=8, head_dim=128),
    "Qwen2 0.5B": _causal("Qwen2Config", 896, 4864, 14, num_key_value_heads=2),
    "Gemma 2 2B": _causal("Gemma2Config", 2304, 9216, 8, num_key_value_heads=4, head_dim=256),
    "Pythia 1B": _causal("GPTNeoXConfig", 2048, 8192, 8),
    "OPT 1.3B": _causal("OPTConfig", 2048, 8192, 32, ffn_dim=8192, word_embed_proj_dim=2048),
    "BLOOM 1.1B": _causal("BloomConfig", 1536, 6144, 16),
    "BERT large": _BERT._replace(head="AutoModelForMaskedLM"),
    "T5 large": Outside(
        "T5Config",
        "AutoModelForSeq2SeqLM",
        "tokens",
        {
            "d_model": 1024,
            "d_kv": 64,
            "d_ff": 4096,
            "num_heads": 16,
            "num_layers": BLOCKS,
            "vocab_size": VOCABULARY,
            "decoder_start_token_id": 0,
        },
    ),
    "ViT large": _VIT._replace(head="AutoModelForImageClassification", reads="pixels"),
}


def build(outside: Outside, size: str) -> nn.Module:
    """Return the model, without dropout."""
    transformers = importlib.import_module("transformers")
    options = dict(outside.options)
    if size == "smoke":
        options |= {name: options[name] // NARROWER for name in WIDTHS if name in options}
        options["num_layers" if "num_layers" in options else "num_hidden_layers"] = 2
        options |= {"image_size": 32} if outside.reads == "pixels" else {}
    config = getattr(transformers, outside.config)(**options, use_cache=False)
    return without_dropout(getattr(transformers, outside.head).from_config(config)).train()


def batches(outside: Outside, size: str) -> list[Batch]:
    """Return a batch on the host; rows of a layer are divisible by 16."""
    generator = torch.Generator().manual_seed(0)
    if outside.reads == "pixels":
        count, side = (2, 32) if size == "smoke" else (32, 224)
        pixels = torch.randn(count, 3, side, side, generator=generator)
        return [(pixels, torch.randint(CLASSES, (count,), generator=generator))]
    shape = (2, 16) if size == "smoke" else (8, 1024)
    tokens = torch.randint(1, VOCABULARY // NARROWER, shape, generator=generator)
    return [(tokens, tokens)]


def loss_fn(model: nn.Module, batch: Batch, *, reads: str) -> Tensor:
    """Return the loss that a model of transformers computes itself."""
    name = "pixel_values" if reads == "pixels" else "input_ids"
    loss: Tensor = model(**{name: batch[0], "labels": batch[1]}).loss
    return loss


def work_of(name: str, size: str) -> Workload:
    """Return a model and its batches as a workload."""
    outside = MODELS[name]
    return Workload(
        name=name,
        title=name,
        build=partial(build, outside, size),
        batches=partial(batches, outside, size),
        loss_fn=partial(loss_fn, reads=outside.reads),
        unit="tokens" if outside.reads == "tokens" else "images",
        items_per_step=batches(outside, size)[0][1].numel(),
        lr=1e-5,
    )


def plans(step: str, device: str) -> dict[str, Plan]:
    """Return the two plans that take turns."""
    base = Plan(precision="bf16", optimizer="fused")
    float8 = Float8Options(watch_at=())
    if device == "cuda":
        base = base.replace(cuda_graph=True)
        if step == "compiled":
            base = base.replace(compile=CompileOptions(regions="blocks", dynamic=False))
    else:
        float8 = dataclasses.replace(float8, emulate=True, budget_s=0.05)
    return {"bf16": base, "float8": base.replace(precision=float8)}


def row_of(name: str, step: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return what the measured choice takes of the time of bf16."""
    work = work_of(name, args.size)
    every = {
        kind: Ours(work, args, plan, work.loss_fn)
        for kind, plan in plans(step, args.device).items()
    }
    plain, float8 = measured(name, every, work, args)
    decisions = float8["report"]["decisions"]
    choice = next(found["detail"] for found in decisions if found["lever"] == "float8")
    return {
        "model": name,
        "step": step,
        "items": work.items_per_step,
        "unit": work.unit,
        "choice": choice,
        "bf16_ms": plain["ms"],
        **{key: float8[key] for key in ("ms", "ratio", "ratio_quartiles", "turns_ms", "report")},
    }


def main() -> None:
    """Measure every model, print a table and write the figures."""
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument("--size", choices=("full", "smoke"), default="full")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=["captured"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--turn-steps", type=int, default=10)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin nothing later")
    args = parser.parse_args()
    deadline = time.monotonic() + args.limit_s
    args.block_s, args.methods = None, None
    rows = ResultRows(args.out, ("model", "step"), settings_of(args))
    print(f"{'step':<9} {'model':<13} {'bf16 ms':>9} {'ms':>9} {'ratio':>7}  choice")
    for step in args.steps:
        for name in args.models:
            if time.monotonic() > deadline:
                rows.leave_out(name, step, "no time was left")
                print(f"left out: {name}, {step}: no time was left")
                continue
            try:
                found = row_of(name, step, args)
            except Exception as error:
                why = (str(error).splitlines() or [""])[0]
                rows.leave_out(name, step, f"{type(error).__name__}: {why}")
                print(f"left out: {name}, {step}: {type(error).__name__}: {why}", flush=True)
                gc.collect()
                continue
            rows.add(found)
            print(
                f"{step:<9} {name:<13} {found['bf16_ms']:>9.2f} {found['ms']:>9.2f} "
                f"{found['ratio']:>7.3f}  {found['choice'].partition(';')[0]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
