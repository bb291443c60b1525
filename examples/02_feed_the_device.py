"""Find out that training waits for data, why, and cure it.

    python examples/02_feed_the_device.py [--steps N] [--device cpu|cuda]

Each sample takes 5 ms to load, as one that is read and decoded does. First a plain DataLoader: the
report says that the loop waits for it. Then the cure: worker processes, as many as a sweep finds to
pay; batches fetched and copied ahead; and images that cross to the device as uint8 and are
normalised there, a quarter of the bytes. On two CPU cores, where waiting can overlap but nothing
can be copied ahead:

    the stall: 185.1 ms a step
      supply-bound: 90% of the time goes into waiting for the loader, ...
    the sweep chooses 2 workers
    the cure: 79.6 ms a step, 2.3 times as fast
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from torchfast import PrefetchingLoader, Trainer, build_dataloader, sweep_workers

BATCH = 32
Batch = tuple[Tensor, Tensor]


class SlowImages(Dataset[Batch]):
    """Images that take 5 ms each to read."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Batch:
        time.sleep(0.005)
        image = torch.full((3, 64, 64), index % 256, dtype=torch.uint8)
        return image, torch.tensor(index % 10)


def normalised(batch: Batch) -> Batch:
    """Run on the device, behind the copy."""
    images, labels = batch
    return images.float().div_(127.5).sub_(1), labels


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def train(trainer: Trainer, loader: PrefetchingLoader, steps: int) -> float:
    """Train, and return milliseconds a step, the first batch not counted."""
    batches = iter(loader)
    trainer.step(next(batches))
    start = time.perf_counter()
    for _ in range(steps):
        loss = trainer.step(next(batches))
    loss.item()  # the device is done
    return (time.perf_counter() - start) / steps * 1e3


def main() -> None:
    """Show the stall, its cause and its cure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 64, 3, 2), nn.ReLU())
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    model.to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = Trainer(model, optimizer, loss_fn, "exact")

    plain = DataLoader(SlowImages(), BATCH, shuffle=True)
    with trainer.prefetch(plain, transform=normalised) as loader:
        stall_ms = train(trainer, loader, args.steps)
        print(f"the stall: {stall_ms:.1f} ms a step")
        print("  " + loader.report().decisions[0].detail)

    found = sweep_workers(SlowImages(), BATCH, shuffle=True, budget_s=6, device=args.device)
    print(f"the sweep chooses {found.num_workers} workers")

    fitting = build_dataloader(
        SlowImages(), BATCH, shuffle=True, num_workers=found.num_workers, device=args.device
    )
    with trainer.prefetch(fitting, transform=normalised, reuse=True) as loader:
        cure_ms = train(trainer, loader, args.steps)
        print(f"the cure: {cure_ms:.1f} ms a step, {stall_ms / cure_ms:.1f} times as fast")
        print(loader.report())


if __name__ == "__main__":
    main()
