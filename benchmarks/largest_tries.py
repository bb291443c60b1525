"""One size of what `benchmarks.largest` makes larger, tried in a process of its own."""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import time
import traceback
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.simulated_memory import SimulatedMemory
from benchmarks.workloads.definition import Batch
from benchmarks.workloads.llama import Llama, LlamaSize, rotary_table
from benchmarks.workloads.tokens import next_token_loss
from torchfast import LowBitOptions, Plan, TrainStep
from torchfast.losses import linear_cross_entropy

LONG_STEP_S = 4.0  # is not done again: what it waits for memory from the driver is little of it
# What an allocation that failed is called by libraries that do not raise OutOfMemoryError.
SAID_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "MemoryAllocation")


class Levers(NamedTuple):
    """What is done about memory.

    Attributes:
        plan: Fields of the plan.
        chunked_loss: Whether logits are made in chunks.
        bf16_weights: Whether parameters are bf16 themselves.
    """

    plan: dict[str, Any]
    chunked_loss: bool = False
    bf16_weights: bool = False

    @property
    def home(self) -> str | None:
        """Where the model is built, if not on the device: that may have no room for all of it."""
        return "cpu" if self.plan.get("offload") == "parameters" else None


LEVERS = {
    "plain": Levers({}),
    "low-bit": Levers({"optimizer": "adamw8bit"}),
    "offload": Levers({"offload": "activations"}),
    "selective recompute": Levers({"recompute": "selective"}),
    "recompute": Levers({"recompute": "blocks"}),
    "recompute, offload": Levers({"recompute": "blocks", "offload": "activations"}),
    "recompute, chunked loss": Levers({"recompute": "blocks"}, chunked_loss=True),
    "recompute, chunked loss, low-bit": Levers(
        {"recompute": "blocks", "optimizer": "adamw8bit"}, chunked_loss=True
    ),
    "recompute, chunked loss, low-bit, bf16 weights": Levers(
        {"recompute": "blocks", "optimizer": LowBitOptions(stochastic_rounding=True)},
        chunked_loss=True,
        bf16_weights=True,
    ),
    "recompute, chunked loss, offload of all": Levers(
        {"recompute": "blocks", "offload": "all"}, chunked_loss=True
    ),
    "recompute, chunked loss, offload of parameters": Levers(
        {"recompute": "blocks", "offload": "parameters"}, chunked_loss=True
    ),
}


@dataclass(frozen=True)
class Search:
    """What grows.

    Attributes:
        size: The rest of the model and of its batch.
        field: "batch" or "layers".
        first: The size that is tried first.
        most: The size from which on nothing larger is tried.
    """

    size: LlamaSize
    field: str
    first: int
    most: int

    def at(self, number: int) -> LlamaSize:
        """Return the whole size."""
        return self.size._replace(**{self.field: number})


def chunked_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the next token, without the logits."""
    assert isinstance(model, Llama)
    tokens, targets = batch
    return linear_cross_entropy(
        model.hidden(tokens).flatten(0, 1), model.output_weight, targets.flatten()
    )


@dataclass(frozen=True)
class Try:
    """What became of a size.

    Attributes:
        number: The size.
        fits: Whether it does.
        why: If not, why.
        num_parameters: Of the model.
        step_s: What the last step took.
        peak_bytes: The most that tensors took.
        error: What it raised that is not about memory.
    """

    number: int
    fits: bool
    why: str = ""
    num_parameters: int = 0
    step_s: float = 0.0
    peak_bytes: int = 0
    error: str = ""


def built(size: LlamaSize, levers: Levers, device: str) -> Llama:
    """Return the model, where the levers want it.

    Its numbers are drawn on the device: billions of them would take the host minutes.
    """
    with torch.device("meta"):
        model = Llama(size)
    if levers.bf16_weights:
        model.to(torch.bfloat16)
    model.to_empty(device=levers.home or device)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            parameter.copy_(drawn.fill_(1.0) if drawn.dim() == 1 else drawn.normal_(std=0.02))
        for buffer, table in zip(
            (model.cos, model.sin),
            rotary_table(size.width // size.heads, size.context),
            strict=True,
        ):
            buffer.copy_(table)
    return model


def train(size: LlamaSize, levers: Levers, device: str) -> tuple[int, float]:
    """Train a few steps; return the number of parameters and what the last one took."""
    is_cuda = device == "cuda"
    torch.manual_seed(0)
    model = built(size, levers, device)
    tokens = torch.randint(size.vocabulary, (size.batch, size.context + 1), device=device)
    plan = Plan(precision="bf16" if is_cuda else "as_given", **levers.plan)
    # A low-bit optimizer takes the place of the one that is built here, and knows no other form.
    others = {} if "optimizer" in levers.plan else {"fused": True}
    optimizer = partial(torch.optim.AdamW, lr=size.lr, **others)
    loss_fn = chunked_loss if levers.chunked_loss else next_token_loss
    step = TrainStep(model, optimizer, loss_fn, plan, max_grad_norm=1.0, device=device)
    try:
        batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        step(tuple(part[:1] for part in batch))  # makes the state
        for _ in range(2):
            start = time.perf_counter()
            loss = float(step(batch))
            took = time.perf_counter() - start
            if took > LONG_STEP_S:
                break
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss is {loss}")
        return sum(parameter.numel() for parameter in model.parameters()), took
    finally:
        step.close()


def tried(number: int, search: Search, levers: Levers, device: str, limit_gb: float | None) -> Try:
    """Return whether a size fits, and free all that it took."""
    is_cuda = device == "cuda"
    simulated = None
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    elif limit_gb is not None:
        simulated = SimulatedMemory(int(limit_gb * 1e9))
    try:
        with simulated or contextlib.nullcontext():
            num_parameters, step_s = train(search.at(number), levers, device)
    except Exception as error:
        why = (str(error).splitlines() or [repr(error)])[0]
        is_known = isinstance(error, torch.OutOfMemoryError)
        if not is_known and not any(said in str(error) for said in SAID_OF_MEMORY):
            return Try(number, fits=False, error="".join(traceback.format_exception(error)))
        # Its frames hold the step.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        return Try(number, fits=False, why=why)
    finally:
        gc.collect()
        if is_cuda:
            torch.cuda.empty_cache()
    peak = torch.cuda.max_memory_allocated() if is_cuda else getattr(simulated, "peak_bytes", 0)
    return Try(number, True, "", num_parameters, step_s, peak)


def serve(pipe: Connection, search: Search, name: str, device: str, limit_gb: float | None) -> None:
    """Answer sizes with what became of them, until the other end is gone."""
    with contextlib.suppress(OSError):  # no Linux
        # Where the host's memory is short, this process shall end, and not the search.
        Path("/proc/self/oom_score_adj").write_text("1000")
    if device == "cuda" and limit_gb is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gb * 1e9 / total))
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            pipe.send(tried(pipe.recv(), search, LEVERS[name], device, limit_gb))


class Trier:
    """Tries sizes in another process, and in a new one after one that died or hung.

    Args:
        arguments: Of `serve`, after the pipe.
    """

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments
        self._process: Any = None
        self._pipe: Connection | None = None

    def __call__(self, number: int, limit_s: float) -> Try:
        """Return what became of a size."""
        if self._pipe is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, far_end = context.Pipe()
            self._process = context.Process(target=serve, args=(far_end, *self._arguments))
            self._process.start()
            far_end.close()
        self._pipe.send(number)
        if not self._pipe.poll(limit_s):
            self.stop()
            return Try(number, fits=False, why=f"not done in {limit_s:.0f} s")
        try:
            answer: Try = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            why = f"its process ended with {self._process.exitcode}"
            self.stop()
            return Try(number, fits=False, why=why)
        return answer

    def stop(self) -> None:
        """End the process."""
        if self._pipe is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._pipe = None
