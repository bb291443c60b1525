"""The tables of the documentation, made from the raw figures.

    PYTHONPATH=. python benchmarks/tables.py [--check]

Each table stands in a page of docs/ between ``<!-- figures: NAME -->`` and ``<!-- end -->`` and is
rewritten from the file of that name in benchmarks/results/. With ``--check`` nothing is written,
and the exit status says whether a page differs from its figures.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable

# The folder above, not torch: tables are made where no torch is.
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"<!-- figures: ([\w ]+) -->\n.*?<!-- end -->", re.DOTALL)


def step_overhead(result: dict[str, Any]) -> list[str]:
    """Return the table of what the step costs."""
    lines = [
        '| workload | plain loop | `Trainer(plan="exact")` | ratio, quartiles | plain / plain |',
        "|---|---|---|---|---|",
    ]
    for name, figures in result["figures"].items():
        ours, noise = figures["trainer / plain"], figures["plain / plain"]
        plain_ms, ours_ms = ours["median_ms"]
        low, high = ours["quartiles"]
        lines.append(
            f"| {name} | {plain_ms:.3f} ms | {ours_ms:.3f} ms | **{ours['median_ratio']:.4f}** "
            f"({low:.3f} to {high:.3f}) | {noise['median_ratio']:.4f} |"
        )
    return lines


def outside_models(result: dict[str, Any]) -> list[str]:
    """Return the table of models from elsewhere."""
    lines = [
        "| model | `eager` | `exact` | host waits in 50 steps, plain loop | `Trainer` |",
        "|---|---|---|---|---|",
    ]
    for name, figures in result["figures"].items():
        if "error" in figures:
            lines.append(f"| {name} | {figures['error']} | | | |")
            continue
        verdicts = ["bitwise" if figures[p]["bitwise"] else "differs" for p in ("eager", "exact")]
        waits = figures["host_waits_of_50_steps"]
        lines.append(f"| {name} | {' | '.join(verdicts)} | {waits['plain']} | {waits['trainer']} |")
    return lines


def main_job(result: dict[str, Any]) -> list[str]:
    """Return the table of the main job by number format."""
    summary = result["summary"]
    seeds = len(summary["fp32"]["differences"])
    lines = [
        "| format | held-out bits per byte | difference from fp32, mean of "
        f"{seeds} seeds | within the noise of a seed "
        f"({summary['seed_noise_bits_per_byte']:.4f}) |",
        "|---|---|---|---|",
    ]
    for fmt in ("fp32", "tf32", "bf16", "fp16"):
        row = summary[fmt]
        lines.append(
            f"| {fmt} | {row['mean']:.4f} | {row['mean_difference_from_fp32']:+.4f} | "
            f"{'yes' if row['within_noise'] else 'no'} |"
        )
    return lines


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], list[str]]]] = {
    "step overhead": ("step_overhead_h200.json", step_overhead),
    "outside models": ("outside_models_h200.json", outside_models),
    "main job": ("main_job_curves_h200.json", main_job),
}


def render(name: str) -> str:
    """Return the block of this name, markers included."""
    file, table = TABLES[name]
    result = json.loads((RESULTS / file).read_text())
    machine = result["machine"]
    source = (
        f"Measured on one {machine['gpu']}, torch {machine['torch']}, {result['date']}, by "
        f"``{result['command']}``; raw figures in ``benchmarks/results/{file}``."
    )
    body = "\n".join(table(result))
    return f"<!-- figures: {name} -->\n\n{body}\n\n{source}\n\n<!-- end -->"


def rewritten(text: str) -> str:
    """Return a page with its tables made anew."""
    return BLOCK.sub(lambda match: render(match[1]), text)


def main() -> None:
    """Rewrite the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        if rewritten(text) != text:
            stale.append(str(page.relative_to(ROOT)))
            if not args.check:
                page.write_text(rewritten(text))
    print("\n".join(stale) or "every table is what its figures say")
    sys.exit(1 if args.check and stale else 0)


if __name__ == "__main__":
    main()
