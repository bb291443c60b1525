"""Find out why a loop is slow: the lines at which the host waits, and where the time goes.

    python examples/10_find_what_is_slow.py [--steps N] [--device cpu|cuda]

The loop is slow on purpose, as loops become: it reads the loss at each step, picks rows by a mask,
and its data set decodes each sample in the loop's own thread. A SyncGuard names the lines that make
the host wait; a profile says what the time goes into. Then the same training without those faults.
On a machine without CUDA the guard finds what would wait on one:

    the host would wait on CUDA 30 times
      10  boolean mask at ..., in slow_loss: kept = losses[weights > 0.1]
      10  nonzero (in torch.autograd.graph) at ..., in slow_loop: loss.backward()
      10  item at ..., in slow_loop: history.append(loss.item())
    the slow loop: input-bound
    without the faults the host waits at no line
"""

import argparse
import tempfile
import time
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from torchfast import Plan, Profile, SyncGuard, Trainer, profile

Batch = tuple[Tensor, Tensor, Tensor]


class Samples(Dataset[Batch]):
    """Rows with a label and a weight; to decode one takes a moment."""

    def __init__(self, decode_s: float) -> None:
        self.decode_s = decode_s
        self.rows = torch.randn(4096, 64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        time.sleep(self.decode_s)
        row = self.rows[index]
        return row, torch.tensor(index % 10), torch.tensor(index % 7 / 7)


def slow_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Leave light rows out; how many are left only the device knows, so the host asks it."""
    rows, labels, weights = batch
    losses = F.cross_entropy(model(rows), labels, reduction="none")
    kept = losses[weights > 0.1]
    return kept.mean()


def slow_loop(model: nn.Module, loader: Iterable[Batch], profiling: Profile, device: str) -> None:
    """Train, and read the loss at each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    history = []
    for batch in profiling.iterate(loader):
        rows, labels, weights = (tensor.to(device) for tensor in batch)
        loss = slow_loss(model, (rows, labels, weights))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())


def fast_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Do the same by a product with the mask: all sizes are fixed."""
    rows, labels, weights = batch
    losses = F.cross_entropy(model(rows), labels, reduction="none")
    kept = (weights > 0.1).to(losses.dtype)
    return (losses * kept).sum() / kept.sum()


def main() -> None:
    """Show the faults and the loop without them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    layers = (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    model = nn.Sequential(*layers).to(args.device)

    loader = DataLoader(Samples(decode_s=0.001), 16)
    steps = max(args.steps, 2)
    with tempfile.TemporaryDirectory() as folder:
        profiling = profile(folder, steps=steps, warmup=2, lines=False)
        with SyncGuard(device=args.device.partition(":")[0]) as guard, profiling:
            slow_loop(model, loader, profiling, args.device)
        print(guard.report())
        print(profiling.report)
        print(f"the slow loop: {profiling.report.verdict.name}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    quick = DataLoader(Samples(decode_s=0.0), 16, drop_last=True)  # decoded once, beforehand
    with Trainer(model, optimizer, fast_loss, Plan(sync_guard="record")) as trainer:
        result = trainer.fit(quick, steps=args.steps, progress=False)
        waits = trainer.sync_report
        print(f"{result.num_steps} steps without the faults")
        print(f"without the faults the host waits {waits or 'at no line'}")


if __name__ == "__main__":
    main()
