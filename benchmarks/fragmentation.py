"""What 5,000 steps of growing shapes leave unused of the device, with a preset and without.

    PYTHONPATH=. python benchmarks/fragmentation.py [--steps 5000] [--out FILE]

A small network trains on batches whose longest gets longer every hundredth step, as where lengths
are raised over a run, and others of any length between. "reserved by peak" is what the allocator
has taken from the device by the most that tensors ever needed, after so many steps: 1 is none too
much. Each arm is a process of its own, whose allocator has the settings of its plan. Where the
device was full, the allocator has given back what it could, and the run says nothing: "retries"
counts that.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import results
from torchfast import Plan, Trainer
from torchfast.memory.allocator_environment import VARIABLES

ARMS = {"torch's own settings": None, "variable-shapes": "variable-shapes"}
STEPS = 5000
# Shares of the run. Most that an allocator without the preset takes too much, it takes early.
MARKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean square of the output."""
    return model(batch).square().mean()


def marked(steps: int) -> list[int]:
    """Return after how many steps of a run it is looked what is kept."""
    return sorted({max(1, round(share * steps)) for share in MARKS})


def train(preset: Any, steps: int) -> dict[str, Any]:
    """Train in this process; return what was kept."""
    trainer = Trainer(
        nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        loss_fn,
        Plan(allocator=preset),
        device="cuda",
    )
    draw = random.Random(0)
    marks = marked(steps)
    kept = []
    for step in range(steps):
        # Rows of 1 KB: 16 MB a tensor, and 2 MB more each time.
        longest = 16_384 + step // 100 * 2_048
        rows = longest if step % 100 == 0 else draw.randrange(1024, longest)
        trainer.step(torch.randn(rows, 256, device="cuda"))
        if step + 1 in marks:
            kept.append(torch.cuda.memory_reserved() / torch.cuda.max_memory_allocated())
    stats = torch.cuda.memory_stats()
    return {
        "after_steps": marks,
        "reserved_by_peak": kept,
        "retries": stats["num_alloc_retries"],
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def run(arm: str, steps: int = STEPS) -> dict[str, Any]:
    """Return what an arm keeps, trained in a process of its own."""
    module = [sys.executable, "-m", "benchmarks.fragmentation"]
    environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [*module, "--steps", str(steps), "--alone", arm],
        env=environ,
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run both arms, print and write what they keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--alone", choices=ARMS, help="train one arm, and print what it keeps")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.alone is not None:
        print(json.dumps(train(ARMS[args.alone], args.steps)))
        return
    rows = []
    print(f"{'after steps':<22} {' '.join(f'{mark:>4}' for mark in marked(args.steps))}")
    for arm in ARMS:
        found = {"arm": arm, **run(arm, args.steps)}
        rows.append(found)
        kept = " ".join(f"{share:.2f}" for share in found["reserved_by_peak"])
        print(f"{arm:<22} {kept}  retries: {found['retries']}", flush=True)
    if args.out is not None:
        results.write(args.out, {"settings": {"steps": args.steps}, "rows": rows})


if __name__ == "__main__":
    main()
