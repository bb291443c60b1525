"""torchfast, by each of its plans."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.job import MAX_GRAD_NORM, Job
from benchmarks.workloads import Batch
from torchfast import CompileOptions, Plan, Trainer
from torchfast.losses import linear_cross_entropy


def train(
    job: Job,
    plan: str,
    *,
    compiled: bool = True,
    search_s: float = 0.0,
    loss_over_vocabulary: bool = False,
    unroll: int | None = None,
) -> None:
    """Train by ``Trainer.step``, as the README shows it, or by ``Trainer.steps``.

    Args:
        job: What is trained.
        plan: The name of a preset.
        compiled: Whether what the preset compiles is compiled.
        search_s: How long it may search for the fastest way to compile; 0: it does not.
        loss_over_vocabulary: Whether a language model's loss is computed without its logits.
        unroll: How many steps are given to it at once, in place of one.
    """
    # "eager" and "exact" keep the user's number format, optimizer and layout, so they are given
    # what the tuned loop is given. "fast" chooses for itself.
    fast = plan == "fast"
    model = job.model if fast else job.tuned_model()
    loss_fn = vocabulary_loss if loss_over_vocabulary else job.workload.loss_fn

    def under_autocast(model: Any, batch: Batch) -> Tensor:
        with job.autocast():
            return loss_fn(model, batch)

    trainer = Trainer(
        model,
        job.adamw(model) if fast else job.adamw(model, fused=True),
        loss_fn if fast else under_autocast,
        plan_of(plan, compiled=compiled, search_s=search_s),
        max_grad_norm=MAX_GRAD_NORM,
    )
    if unroll is not None:
        for group in trainer.prefetch(job.loader(pinned=True), unroll=unroll, reuse=True):
            for loss in trainer.steps(group).unbind():
                job.tick(loss)
    # As Trainer.fit does it: each batch is done with when the next one is asked for.
    for batch in trainer.prefetch(job.loader(pinned=True), reuse=True):
        job.tick(trainer.step(batch))


def plan_of(name: str, *, compiled: bool, search_s: float = 0.0) -> Plan:
    """Return a preset, or a preset without what it compiles, or that searches how to compile."""
    plan = Plan.preset(name)
    if search_s:
        return plan.replace(compile=CompileOptions(mode="auto", budget_s=search_s))
    return plan if compiled else plan.replace(compile=False)


def vocabulary_loss(model: Any, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the next token, of a model that has its head apart."""
    tokens, targets = batch
    return linear_cross_entropy(model.hidden(tokens), model.output_weight, targets)
