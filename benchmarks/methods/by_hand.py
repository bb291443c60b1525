"""The best loop that a person can write: the bar that nothing may fall below.

The whole step, from zero_grad to the update, is one CUDA graph, so the host launches one thing a
step. While it runs, the next batch travels on a side stream into a staging buffer; a copy on the
device brings it from there into the graph's own input. The loss stays on the device.

What it costs is why people do not write it: a learning rate, a shape, a mode or a random generator
that changes is not noticed; the first steps have to be written twice; and nothing says whether the
graph still computes what the loop did.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.job import MAX_GRAD_NORM, Job
from benchmarks.workloads import Batch

LossFn = Callable[[nn.Module, Batch], Tensor]
WARM_UP_STEPS = 5


def graph(job: Job) -> None:
    """Capture the step as it is."""
    train_in_one_graph(job, job.tuned_model(), job.loss_fn)


def graph_and_blocks(job: Job) -> None:
    """Capture the step of a model whose repeated blocks are compiled one by one."""
    model = job.tuned_model()
    compile_blocks(job, model)
    train_in_one_graph(job, model, job.loss_fn)


def graph_and_whole(job: Job) -> None:
    """Capture the step of a model that is compiled as a whole, loss included."""
    train_in_one_graph(job, job.tuned_model(), torch.compile(job.loss_fn, dynamic=False))


def graph_and_float8(job: Job) -> None:
    """Capture the step of a model with float8 matrix products and compiled blocks."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = convert_to_float8_training(
        job.tuned_model(),
        config=Float8LinearConfig.from_recipe_name("tensorwise"),
        # The output layer decides the loss, and stays as it is in every recipe.
        module_filter_fn=lambda module, name: "blocks" in name and isinstance(module, nn.Linear),
    )
    compile_blocks(job, model)
    train_in_one_graph(job, model, job.loss_fn)


def compile_blocks(job: Job, model: nn.Module) -> None:
    """Compile what repeats: as fast as the whole mostly, in a fraction of the time."""
    for block in job.workload.regions(model):
        block.compile(dynamic=False)


def train_in_one_graph(job: Job, model: nn.Module, loss_fn: LossFn) -> None:
    """Train for ever, a graph replay a step."""
    optimizer = job.adamw(model, fused=True, capturable=True)
    loader = iter(job.loader(pinned=True))
    first = next(loader)
    loader = itertools.chain([first], loader)
    inputs = tuple(torch.empty_like(tensor, device=job.device) for tensor in first)
    staged = tuple(torch.empty_like(tensor) for tensor in inputs)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model, inputs)
        loss.backward()
        clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        return loss.detach()

    # Libraries choose their kernels, and compilers compile, in steps before the capture. They are
    # steps of the training as any other.
    warm_up_stream = torch.cuda.Stream()
    for _ in range(WARM_UP_STEPS):
        copy_into(inputs, next(loader))
        warm_up_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up_stream):
            loss = step()
        torch.cuda.current_stream().wait_stream(warm_up_stream)
        job.tick(loss)

    optimizer.zero_grad(set_to_none=True)
    captured = torch.cuda.CUDAGraph()
    # Only this thread's calls are captured: a loader's thread goes on pinning memory meanwhile.
    whole_step = torch.cuda.graph(captured, capture_error_mode="thread_local")
    with whole_step, torch.compiler.set_stance("fail_on_recompile"):
        loss = step()

    copy_stream = torch.cuda.Stream()
    arrived, taken = torch.cuda.Event(), torch.cuda.Event()

    def send_next() -> None:
        copy_stream.wait_event(taken)
        with torch.cuda.stream(copy_stream):
            copy_into(staged, next(loader))
            arrived.record()

    taken.record()
    send_next()
    while True:
        torch.cuda.current_stream().wait_event(arrived)
        copy_into(inputs, staged)
        taken.record()
        captured.replay()
        send_next()
        job.tick(loss)


def copy_into(targets: Batch, sources: Batch) -> None:
    """Copy a batch into another's memory, in the current stream."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
