"""Plain PyTorch loops: as a first draft has it, tuned, and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.job import MAX_GRAD_NORM, Job


def naive(job: Job) -> None:
    """Train as a first draft does: blocking copies, and the loss read every step."""
    model = job.model
    optimizer = job.adamw(model)
    for host_batch in job.loader(pinned=False):
        batch = job.to_device(host_batch, non_blocking=False)
        optimizer.zero_grad()
        loss = job.loss_fn(model, batch)
        loss.backward()
        clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        loss.item()
        job.tick(loss)


def tuned(job: Job) -> None:
    """Train without host reads, from pinned memory, by the fused optimizer."""
    model = job.tuned_model()
    _tuned_loop(job, model, model, begin_step=lambda: None)


def compiled(job: Job, mode: str) -> None:
    """Train as ``tuned`` does, with the model compiled."""
    model = job.tuned_model()
    # Modes that use CUDA graphs are to be told when the outputs of the last step are done with.
    begin_step = torch.compiler.cudagraph_mark_step_begin
    _tuned_loop(job, model, torch.compile(model, mode=mode), begin_step)


def _tuned_loop(
    job: Job, model: nn.Module, forward: Callable[..., Any], begin_step: Callable[[], None]
) -> None:
    optimizer = job.adamw(model, fused=True)
    for host_batch in job.loader(pinned=True):
        batch = job.to_device(host_batch, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        begin_step()
        loss = job.loss_fn(forward, batch)
        loss.backward()
        clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        job.tick(loss)
