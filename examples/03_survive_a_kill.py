"""Kill a training run in the middle, start it again, and see that nothing was lost.

    python examples/03_survive_a_kill.py [--steps N] [--device cpu|cuda]

The same command is run twice as a job of its own: once in peace, once killed with SIGKILL, which no
program can catch, at a step that nobody told it, and then started again. The loss of every step and
the weights are the same to the last bit, with dropout, a shuffle and AdamW:

    in peace: 60 steps
    killed after step 31; started again: it does steps 31 to 60
    the losses of all 60 steps are the same: True
    the weights are the same: True
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchfast import FitEvent, Trainer

Batch = tuple[Tensor, ...]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def train(folder: Path, steps: int, device: str) -> None:
    """Train, or go on; append each loss to ``losses.txt``."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 20)
    data = TensorDataset(inputs, inputs.square().sum(1).argsort().argsort() % 4)
    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))
    model.to(device)
    trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss_fn)

    with open(folder / "losses.txt", "a") as file:

        def note(event: FitEvent) -> None:
            if event.kind == "step" and event.loss is not None:
                print(event.num_steps, float(event.loss).hex(), file=file, flush=True)
                time.sleep(0.02)  # so that there is something to kill

        trainer.fit(
            DataLoader(data, batch_size=32, shuffle=True),
            steps=steps,
            checkpoint=folder / "checkpoints",
            checkpoint_every=5,
            callbacks=[note],
            progress=False,
        )
    torch.save(model.state_dict(), folder / "model.pt")


def start(folder: Path, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start the job as a process of its own."""
    folder.mkdir(exist_ok=True)
    options = ["--steps", str(args.steps), "--device", args.device, "--folder", str(folder)]
    return subprocess.Popen([sys.executable, __file__, *options])


def finish(job: subprocess.Popen[bytes]) -> None:
    """Wait for a job that nobody kills."""
    if job.wait() != 0:
        raise SystemExit(f"the job failed with exit code {job.returncode}")


def count_lines(path: Path) -> int:
    """Return how many losses were noted."""
    return path.read_text().count("\n") if path.exists() else 0


def losses(folder: Path) -> dict[int, str]:
    """Return the loss of each step; of a step that was repeated, the later one."""
    lines = (folder / "losses.txt").read_text().splitlines()
    return {int(line.split()[0]): line.split()[1] for line in lines}


def main() -> None:
    """Run in peace, run and kill, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path, help="train here; given to the job itself")
    args = parser.parse_args()
    if args.folder is not None:
        train(args.folder, args.steps, args.device)
        return

    with tempfile.TemporaryDirectory() as scratch:
        peace, killed = Path(scratch, "peace"), Path(scratch, "killed")
        finish(start(peace, args))
        print(f"in peace: {len(losses(peace))} steps")

        job = start(killed, args)
        log = killed / "losses.txt"
        while job.poll() is None and count_lines(log) <= args.steps // 2:
            time.sleep(0.01)
        job.kill()
        job.wait()
        before = max(losses(killed))
        lines = count_lines(log)
        finish(start(killed, args))
        again = [line.split()[0] for line in log.read_text().splitlines()[lines:]]
        print(f"killed after step {before}; started again: it does steps {again[0]} to {again[-1]}")

        same = losses(peace) == losses(killed)
        print(f"the losses of all {args.steps} steps are the same: {same}")
        first, second = (torch.load(f / "model.pt", weights_only=True) for f in (peace, killed))
        print(f"the weights are the same: {all(torch.equal(first[k], second[k]) for k in first)}")


if __name__ == "__main__":
    main()
