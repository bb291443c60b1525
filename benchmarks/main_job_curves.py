"""Does a number format change what the main job learns?

    PYTHONPATH=. python benchmarks/main_job_curves.py [--steps N] [--out FILE] [--plot FILE]

The byte-level GPT of ``examples/00_plain_loop.py`` is trained on the standard library's sources in
each format, from several seeds; a seed fixes the weights and the batches. The noise is what a seed
does: the spread of the held-out loss between fp32 runs. A format is within it if its mean
difference from fp32, seed by seed, is smaller.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from benchmarks import results
from torchfast import Plan, Trainer
from torchfast.reporting import plot_lines

FORMATS = ("fp32", "tf32", "bf16", "fp16")
BITS = 1 / math.log(2)


def example() -> ModuleType:
    """Return the plain example as a module: its GPT is the main job."""
    path = results.ROOT / "examples" / "00_plain_loop.py"
    spec = importlib.util.spec_from_file_location("plain_loop_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Windows:
    """An endless run of batches of random windows, resident on the device, the same by seed."""

    def __init__(self, data: Tensor, batch: int, context: int, seed: int) -> None:
        self.data, self.batch, self.seed = data, batch, seed
        self.offsets = torch.arange(context + 1, device=data.device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        last = len(self.data) - len(self.offsets)
        while True:
            starts = torch.randint(last, (self.batch, 1), generator=generator)
            windows = self.data[starts.to(self.data.device) + self.offsets].long()
            yield windows[:, :-1], windows[:, 1:]


def warm_up_then_cosine(step: int, *, steps: int, warm_up: int = 50) -> float:
    """Return the factor of the learning rate at a step."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def train(job: Any, texts: tuple[Tensor, Tensor], fmt: str, seed: int, args: Any) -> dict[str, Any]:
    """Train once; return the curve, the held-out bits per byte and what fp16 skipped."""
    size = job.SIZES[args.size]
    torch.manual_seed(seed)
    model = job.GPT(size).to(args.device)
    held_out = iter(Windows(texts[1], size.batch, size.context, seed=99))
    trainer = Trainer(
        model,
        partial(torch.optim.AdamW, lr=size.lr, weight_decay=0.1),
        job.loss_fn,
        Plan(precision=fmt),
        max_grad_norm=1.0,
        lr_scheduler=partial(LambdaLR, lr_lambda=partial(warm_up_then_cosine, steps=args.steps)),
    )
    result = trainer.fit(
        Windows(texts[0], size.batch, size.context, seed),
        steps=args.steps,
        evaluate=[next(held_out) for _ in range(20)],
        evaluate_every=args.steps,
        log_every=20,
        progress=False,
        count_items=lambda batch: int(batch[0].numel()),
        unit="bytes",
    )
    return {
        "format": fmt,
        "seed": seed,
        "held_out_bits_per_byte": result.evaluation["loss"] * BITS,
        "train_bits_per_byte": [
            (record["step"], record["loss"] * BITS) for record in result.history if "loss" in record
        ],
        "num_skipped": trainer.num_skipped,
        "seconds": result.seconds,
    }


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each format's mean, and its difference from fp32 against the noise of the seeds."""
    held_out = {(run["format"], run["seed"]): run["held_out_bits_per_byte"] for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    noise = statistics.stdev(held_out["fp32", seed] for seed in seeds)
    summary: dict[str, Any] = {"seed_noise_bits_per_byte": noise}
    for fmt in FORMATS:
        gaps = [held_out[fmt, seed] - held_out["fp32", seed] for seed in seeds]
        curves = [run["train_bits_per_byte"] for run in runs if run["format"] == fmt]
        plain = [run["train_bits_per_byte"] for run in runs if run["format"] == "fp32"]
        summary[fmt] = {
            "mean": statistics.mean(held_out[fmt, seed] for seed in seeds),
            "mean_difference_from_fp32": statistics.mean(gaps),
            "differences": gaps,
            "within_noise": abs(statistics.mean(gaps)) <= noise,
            "largest_curve_difference": max(
                abs(a - b)
                for ours, theirs in zip(curves, plain, strict=True)
                for (_, a), (_, b) in zip(ours, theirs, strict=True)
            ),
        }
    return summary


def main() -> None:
    """Train every format from every seed, print a table, write the raw curves and a plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--size", default="small")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    job = example()
    train_text, held_out_text = (text.to(args.device) for text in job.read_standard_library())
    runs = [
        train(job, (train_text, held_out_text), fmt, seed, args)
        for seed in range(args.seeds)
        for fmt in FORMATS
    ]
    summary = summarise(runs)
    print(f"noise of a seed: {summary['seed_noise_bits_per_byte']:.4f} bits per byte")
    for fmt in FORMATS:
        row = summary[fmt]
        print(
            f"{fmt}: {row['mean']:.4f} bits per byte, {row['mean_difference_from_fp32']:+.4f} "
            f"from fp32, within noise: {row['within_noise']}, "
            f"curves differ by at most {row['largest_curve_difference']:.4f}"
        )
    if args.out:
        results.write(args.out, {"summary": summary, "runs": runs})
    if args.plot:
        curves = {run["format"]: run["train_bits_per_byte"] for run in runs if run["seed"] == 0}
        plot_lines(
            args.plot, curves, title="Main job, one seed, four formats", y_label="bits per byte"
        )


if __name__ == "__main__":
    main()
