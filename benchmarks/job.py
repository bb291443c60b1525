"""What a method is given: a model, a loader, and a clock that it calls after each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.workloads import Batch, Workload

# More than any run takes: a loader that ends would end the run.
NUM_BATCHES = 1_000_000
MAX_GRAD_NORM = 1.0


class ReadyBatches(Dataset[Batch]):
    """A few batches in host memory, over and over, so that a loader costs next to nothing."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return NUM_BATCHES

    def __getitem__(self, index: int) -> Batch:
        return self.batches[index % len(self.batches)]


class Sequential:
    """The order 0, 1, 2, …: what every method trains on."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_BATCHES))

    def __len__(self) -> int:
        return NUM_BATCHES


@dataclass
class Job:
    """One workload for one method.

    Attributes:
        workload: What is trained.
        model: The workload's model, on ``device``, the same weights for every method.
        device: Where it is trained.
        tick: To be called with the loss after each step. It is the clock of the measurement: it
            may wait, and it ends the run by an exception, which a method lets through.
    """

    workload: Workload
    model: nn.Module
    device: torch.device
    tick: Callable[[Tensor], None]

    @cached_property
    def batches(self) -> list[Batch]:
        """The ready batches, made once."""
        return self.workload.batches()

    @property
    def on_cuda(self) -> bool:
        """Whether there is a GPU to be fast on."""
        return self.device.type == "cuda"

    def autocast(self) -> torch.autocast:
        """Return the number format of every method: bf16 on a GPU, fp32 on a CPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_cuda)

    def loss_fn(self, model: Any, batch: Batch) -> Tensor:
        """Return the workload's loss in that format."""
        with self.autocast():
            return self.workload.loss_fn(model, batch)

    def loader(self, *, pinned: bool) -> DataLoader[Batch]:
        """Return the batches in host memory, pageable or pinned beforehand.

        Pinning beforehand costs a method nothing, so nobody's loader is the weak spot, unless the
        workload brings a loader of its own, whose batches are pinned as they come.
        """
        if self.workload.loader is not None:
            return self.workload.loader(pin_memory=pinned and self.on_cuda)
        return DataLoader(self.ready(pinned=pinned), batch_size=None, sampler=Sequential())

    def ready(self, *, pinned: bool) -> ReadyBatches:
        """Return the batches as a data set of which each item is a batch."""
        if not (pinned and self.on_cuda):
            return ReadyBatches(self.batches)
        return ReadyBatches([tuple(t.pin_memory() for t in batch) for batch in self.batches])

    def to_device(self, batch: Batch, *, non_blocking: bool) -> Batch:
        """Return the batch on the device."""
        return tuple(tensor.to(self.device, non_blocking=non_blocking) for tensor in batch)

    def adamw(self, model: nn.Module, **form: bool) -> torch.optim.AdamW:
        """Return the optimizer of every method, in torch's default form or in another."""
        return torch.optim.AdamW(model.parameters(), lr=self.workload.lr, **form)

    def tuned_model(self) -> nn.Module:
        """Return the model with the settings that every guide to convolutions names."""
        if self.workload.channels_last:
            torch.backends.cudnn.benchmark = True
            self.model.to(memory_format=torch.channels_last)
        return self.model
