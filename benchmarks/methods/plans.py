"""torchfast, by each of its plans."""

from __future__ import annotations

from benchmarks.job import MAX_GRAD_NORM, Job
from torchfast import Trainer


def train(job: Job, plan: str) -> None:
    """Train by ``Trainer.step``, as the README shows it."""
    # "eager" and "exact" keep the user's number format, optimizer and layout, so they are given
    # what the tuned loop is given. "fast" chooses for itself.
    fast = plan == "fast"
    model = job.model if fast else job.tuned_model()
    trainer = Trainer(
        model,
        job.adamw(model) if fast else job.adamw(model, fused=True),
        job.workload.loss_fn if fast else job.loss_fn,
        plan,
        max_grad_norm=MAX_GRAD_NORM,
    )
    # As Trainer.fit does it: each batch is done with when the next one is asked for.
    for batch in trainer.prefetch(job.loader(pinned=True), reuse=True):
        job.tick(trainer.step(batch))
