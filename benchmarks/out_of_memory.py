"""How near the account of a lack of memory is to what the allocator counts, stage by stage.

    PYTHONPATH=. python benchmarks/out_of_memory.py [--out FILE]

A small network asks for a gigabyte that there is not, in its forward, its backward, its update and
its capture. "in use" and "reserved" are how far the lines of the account add up to other than what
the allocator says at that moment. "asked" is how far they are from what the network has read there
itself just before it asked. "ms" is what the account takes, and "goes on" says whether the next
step trains.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import results
from torchfast import CaptureError, CUDAGraphOptions, OutOfMemoryError, Plan, Trainer
from torchfast.memory.failure import AccountTaker

WIDTH, ROWS = 512, 4096
ASKED = 1 << 30
ROOM = 384 << 20  # what there is beside what is reserved
STAGES = ("forward", "backward", "update", "capture")


class Asks(torch.autograd.Function):
    """Asks for memory in its forward or its backward, if the network says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: Net) -> Tensor:
        """Return a copy."""
        ctx.net = net
        net.ask("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return the gradient."""
        ctx.net.ask("backward")
        return gradient, None


class Net(nn.Module):
    """Some layers, and a stage in which there is too little memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
        )
        self.where = ""

    def ask(self, where: str) -> None:
        """Ask for what there is not, in one stage."""
        if torch._C._cuda_isCurrentStreamCapturing():  # torch.cuda's function denies it
            where = "capture"
        if where == self.where:
            SEEN.put(torch.cuda.memory_allocated())
            torch.empty(ASKED, dtype=torch.uint8, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor shaped as ``x``."""
        return Asks.apply(self.layers(x), self)


# What was in use. Into a queue nobody looks: a list would be put back as a capture fails.
SEEN: SimpleQueue[int] = SimpleQueue()


class AskingAdamW(torch.optim.AdamW):
    """AdamW that asks for memory in its update."""

    net: Net

    def step(self, closure: Any = None) -> Any:
        """Update, if there is memory."""
        self.net.ask("update")
        return super().step(closure)


@contextmanager
def limited() -> Iterator[None]:
    """Leave little room on the device."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.get_per_process_memory_fraction()
    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + ROOM) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before)


def measured(stage: str) -> dict[str, Any]:
    """Return how near the account of one stage is."""
    torch.manual_seed(0)
    net = Net().cuda()
    optimizer = AskingAdamW(net.parameters(), lr=1e-3)
    optimizer.net = net
    graphs = CUDAGraphOptions(warm_up_steps=1, check=False, on_failure="raise")
    plan = Plan(cuda_graph=graphs if stage == "capture" else False)
    trainer = Trainer(net, optimizer, lambda model, x: model(x).square().mean(), plan)
    x = torch.randn(ROWS, WIDTH, device="cuda")
    trainer.step(x)
    take, seconds = AccountTaker.take, []

    def timed(self: AccountTaker, *args: Any, **options: Any) -> Any:
        started = time.perf_counter()
        account = take(self, *args, **options)
        seconds.append(time.perf_counter() - started)
        return account

    AccountTaker.take = timed  # type: ignore[method-assign]
    account: Any = None
    net.where = stage
    try:
        with limited():
            for _ in range(3):
                trainer.step(x)
    except (OutOfMemoryError, CaptureError) as error:
        account = error.account
        if account is None:
            raise
    finally:
        AccountTaker.take = take  # type: ignore[method-assign]
        net.where = ""
    if account is None or SEEN.empty():
        raise RuntimeError(f"{stage}: nothing ran out of memory where {ASKED} bytes were asked for")
    while not SEEN.empty():  # asked again: the last one raised
        seen = SEEN.get()
    in_use = sum(line.num_bytes for line in account.in_use)
    reserved = in_use + sum(line.num_bytes for line in account.not_in_use)
    row = {
        "stage": account.stage,
        "in_use_bytes": in_use,
        "allocated_bytes": account.allocated_bytes,
        "seen_bytes": seen,
        "reserved_bytes": account.reserved_bytes,
        "in_use_error": in_use / account.allocated_bytes - 1,
        "seen_error": in_use / seen - 1,
        "reserved_error": reserved / account.reserved_bytes - 1,
        "ms": seconds[-1] * 1e3,
    }
    del account
    before = trainer.num_steps
    trainer.step(x)
    trainer.close()
    return {**row, "goes_on": trainer.num_steps == before + 1}


def main() -> None:
    """Provoke a lack in every stage, print and write how near the accounts are."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    print(f"{'stage':<10} {'MB in use':>10} {'in use':>8} {'asked':>8} {'reserved':>9} {'ms':>7}")
    for stage in STAGES:
        row = measured(stage)
        rows.append(row)
        errors = (row[f"{what}_error"] for what in ("in_use", "seen", "reserved"))
        in_use, seen, reserved = (f"{error:.3%}" for error in errors)
        print(
            f"{row['stage']:<10} {row['in_use_bytes'] / 1e6:>10.1f} {in_use:>8} {seen:>8} "
            f"{reserved:>9} {row['ms']:>7.1f}  {'goes on' if row['goes_on'] else 'STOPS'}",
            flush=True,
        )
    if args.out is not None:
        results.write(args.out, {"settings": {"room_bytes": ROOM, "asked": ASKED}, "rows": rows})


if __name__ == "__main__":
    main()
