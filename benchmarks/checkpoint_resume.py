"""Whether a run that is taken up from a checkpoint computes the bits of the run that went on.

A small model is cut at every step, and again one step later where that is in the same epoch: with
dropout, a shuffle, BatchNorm and a schedule, and with a checkpoint after each step, saved between
replays of its graph. The large model is cut once; there the time to load counts too.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.checkpoint_work import Settings, Training, Write
from torchfast import CUDAGraphOptions, FitEvent, Plan, Trainer
from torchfast._core.compare import differences
from torchfast._core.rng import seed_everything

Row = dict[str, Any]

BATCH = 8
EPOCHS = 2
EPOCH_STEPS = {"full": 6, "smoke": 3}
STEPS_AFTER = 6  # the graph of the resumed run is live in the last ones


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Let kernels add in one order.

    Strictly: where they may only warn, attention takes the order that is fastest all the same.
    """
    mode = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


def rows(settings: Settings, scratch: Path, seconds_left: Callable[[], float]) -> Iterator[Row]:
    """Yield a row for each cut of the small model, then one for the large model."""
    with deterministic():
        yield from small(settings, scratch, seconds_left)
        # As little as two builds, a save, a load and some steps have ever taken.
        if settings.size == "full" and seconds_left() < 20:
            yield {"model": "large", "status": "left out", "reason": "no time was left"}
        else:
            yield large(settings, scratch)


# -- The small model -------------------------------------------------------------------------------


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean squared error of a batch."""
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


class Run:
    """One run of the small model, from the beginning or from what its folder has.

    Args:
        settings: Where, and by which plan.
        folder: For checkpoints; none are saved without one.
        stop_at: The step to stop behind.
    """

    def __init__(self, settings: Settings, folder: Path | None, stop_at: int | None = None) -> None:
        seed_everything(0)
        device = torch.device(settings.device)
        model = nn.Sequential(
            nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 4)
        ).to(device)
        # Live from the second step on, so that nearly all cuts come between replays.
        graph = CUDAGraphOptions(warm_up_steps=1)
        trainer = Trainer(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
            loss_fn,
            Plan.preset(settings.plan).replace(cuda_graph=graph),
            max_grad_norm=1.0,
            lr_scheduler=partial(StepLR, step_size=4, gamma=0.5),
        )
        self.losses: dict[int, Tensor] = {}

        def note(event: FitEvent) -> None:
            assert event.loss is not None or event.kind != "step"
            if event.kind == "step" and event.loss is not None:
                self.losses[event.num_steps] = event.loss.clone()
                if event.num_steps == stop_at:
                    event.stop()

        with trainer:
            trainer.fit(
                DataLoader(samples(settings), batch_size=BATCH, shuffle=True),
                epochs=EPOCHS,
                callbacks=[note],
                progress=False,
                checkpoint=folder,
                checkpoint_every=None if folder is None else 1,
            )
            self.state = trainer.state_dict()
            self.replays = int(trainer.report().counters.get("replays", 0))


def samples(settings: Settings) -> TensorDataset:
    """Return inputs and targets for some batches, the same each time."""
    generator = torch.Generator().manual_seed(1)
    count = BATCH * EPOCH_STEPS[settings.size]
    inputs = torch.randn(count, 16, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].square())


def small(settings: Settings, scratch: Path, seconds_left: Callable[[], float]) -> Iterator[Row]:
    """Yield what came of each cut."""
    epoch = EPOCH_STEPS[settings.size]
    last = EPOCHS * epoch
    whole = Run(settings, None)
    for cut in range(1, last):
        row: Row = {"model": "small", "cuts": [cut], "steps": last}
        if seconds_left() < 0:
            yield {**row, "status": "left out", "reason": "no time was left"}
            return
        if (cut - 1) // epoch == cut // epoch and cut + 1 < last:
            row["cuts"].append(cut + 1)
        folder = scratch / f"small-{cut}"
        losses: dict[int, Tensor] = {}
        replays = []
        for stop_at in (*row["cuts"], None):
            part = Run(settings, folder, stop_at)
            losses |= part.losses
            replays.append(part.replays)
        yield {
            **row,
            "status": "ran",
            "live_graph": replays[0] > 0,
            **verdict(whole.losses, losses, whole.state, part.state),
        }


def verdict(wanted: object, found: object, wanted_state: object, found_state: object) -> Row:
    """Return whether losses and state are the same to the bit, and what of the state is not."""
    differing = differences(wanted_state, found_state)
    return {
        "same_losses": not differences(wanted, found),
        "same_state": not differing,
        "differing": [str(difference)[:200] for difference in differing[:3]],
        "num_differing": len(differing),
    }


# -- The large model -------------------------------------------------------------------------------


def large(settings: Settings, scratch: Path) -> Row:
    """Save, go on, load into a fresh trainer with other weights, and do the same steps again."""
    folder = scratch / "large"
    first = Training(settings, folder)
    try:
        first.warm_up()
        first.save()
        write = Write(first.manager)
        losses = first.run(STEPS_AFTER)  # while the save is being written
        first.drain()
        write.finish()
        row: Row = {
            "model": "large",
            "status": "ran",
            "steps": STEPS_AFTER,
            "bytes": first.saved_bytes(),
            "live_graph": first.replays > 0,
        }
        state = first.trainer.state_dict()
    finally:
        first.close()
    del first
    gc.collect()
    if settings.device == "cuda":
        torch.cuda.empty_cache()
    second = Training(settings, folder, seed=1)
    try:
        start = time.perf_counter()
        found = second.manager.load()
        assert found is not None
        row["read_s"] = time.perf_counter() - start
        second.trainer.load_state_dict(found.state)
        second.loader.load_state_dict(found.state["loader"])
        second.drain()
        row["load_s"] = time.perf_counter() - start
        del found
        again = second.run(STEPS_AFTER)
        second.drain()
        row["live_graph"] = row["live_graph"] and second.replays > 0
        return row | verdict(losses, again, state, second.trainer.state_dict())
    finally:
        second.close()
