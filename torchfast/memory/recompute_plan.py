"""Which recompute a model needs to fit into a memory, and what it costs: measured, not guessed.

The choices are: nothing recomputed, all blocks, every second one, every fourth, whole or selective.

What a step keeps follows from one forward with all blocks recomputed, so it is known of a model
that does not fit without, too. What it takes is measured, as launched or as replayed
(`recompute_times`).

Bytes are counted on the tensors that autograd saves, each storage once. What a step needs beside
them and beside parameters, gradients and optimizer state (temporary results, such as the gradient
of logits, and workspaces of libraries) a CUDA device tells: there each way runs forward and
backward, whose peak is looked up, and that decides what fits. Elsewhere it is not counted, and
neither are fragmentation and what the update needs for itself anywhere. Leave a tenth of a device
for these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchfast._core.arguments import check_callable, check_int, check_positive
from torchfast._core.batches import to_device
from torchfast._core.device import resolve_device
from torchfast._core.loss import check_differentiable, unpack_loss
from torchfast._core.modes import preserved_modes
from torchfast._core.untouched import untouched
from torchfast.memory.block_costs import BlockCosts, Storages
from torchfast.memory.kept_results import choose_kept
from torchfast.memory.recompute import block_forwards, chosen_blocks, why_not
from torchfast.memory.recompute_options import RecomputeOptions, Regions
from torchfast.memory.recompute_probe import BlockProbe, ProbedCall
from torchfast.memory.recompute_times import MakeGraphs, device_bytes, peak_rises, timed, wait
from torchfast.memory.state_bytes import state_bytes

_EVERY = (4, 2, 1)


@dataclass(frozen=True, kw_only=True)
class RecomputeChoice:
    """One way to recompute, and what it comes to.

    Attributes:
        name: In words.
        recompute: What ``Plan(recompute=...)`` takes.
        saved_bytes: What a forward keeps for the backward.
        step_ms: What forward and backward take.
        fits: Whether a step fits into the memory. One that has run out of memory here does not,
            unless there is to be more than the device has.
        is_measured: Whether ``step_ms`` is measured; it is estimated where a step did not fit into
            the device.
        needed_bytes: What lives at the peak of a forward and backward, parameters, gradients and
            optimizer state included; None where no device tells it, or the step did not fit into
            it.
    """

    name: str
    recompute: bool | str | float | RecomputeOptions
    saved_bytes: int
    step_ms: float
    fits: bool
    is_measured: bool = True
    needed_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class RecomputePlan:
    """What each choice saves and costs; ``str`` is a table.

    Attributes:
        choices: From the fastest.
        fixed_bytes: Parameters, buffers, gradients and optimizer state.
        memory_bytes: What there is.
        is_eager: Whether the times are of eager steps, and not of replays of graphs. In a graph
            recompute costs less, since no host has to launch the second forward.
    """

    choices: tuple[RecomputeChoice, ...]
    fixed_bytes: int
    memory_bytes: int
    is_eager: bool = True

    @property
    def choice(self) -> RecomputeChoice | None:
        """The fastest choice that fits; None if none does."""
        return next((choice for choice in self.choices if choice.fits), None)

    def __str__(self) -> str:
        """Return a table for a person."""
        plain = self._plain
        tells = any(choice.needed_bytes is not None for choice in self.choices)
        lines = [
            f"{'recompute':<24} {'saved GiB':>10} {'of none':>8} {'ms':>9} {'of none':>8}"
            f"{'   peak GiB' if tells else ''}"
        ]
        for choice in self.choices:
            share = choice.saved_bytes / max(1, plain.saved_bytes)
            mark = "  <- chosen" if choice is self.choice else "" if choice.fits else "  too large"
            mark = mark if choice.is_measured else f"{mark}  (time estimated)"
            lines.append(
                f"{choice.name:<24} {choice.saved_bytes / 2**30:>10.4f} {share:>8.2f} "
                f"{choice.step_ms:>9.2f} {choice.step_ms / plain.step_ms:>8.2f}"
                f"{_peak(choice) if tells else ''}{mark}"
            )
        fixed, memory = self.fixed_bytes / 2**30, self.memory_bytes / 2**30
        lines.append(
            f"beside what is saved: {fixed:.4f} GiB of parameters, gradients and optimizer state; "
            f"memory: {memory:.4f} GiB"
        )
        if self.is_eager:
            lines.append("times are of eager steps; in a graph recompute costs less")
        else:
            lines.append("times are of replays of CUDA graphs; eagerly recompute costs more")
        if self.choice is None:
            needs = [(_needed(choice, self.fixed_bytes), choice.name) for choice in self.choices]
            # Of what should fit and has run out of memory nobody knows what it needs.
            known = [need for need in needs if need[0] > self.memory_bytes]
            needed, name = min(known, default=(0, ""))
            why = f"{name} needs {needed / 2**30:.4f} GiB" if name else "all ran out of memory"
            lines.append(f"nothing fits: {why}; take smaller micro-batches")
        return "\n".join(lines)

    @property
    def _plain(self) -> RecomputeChoice:
        return next(choice for choice in self.choices if choice.recompute is False)


def measure_recompute(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    *,
    memory_gb: float,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None,
    autocast: torch.dtype | None,
    device: torch.device | str | int | None,
    repeats: int,
    regions: Regions = "blocks",
    graphs: MakeGraphs | None = None,
) -> RecomputePlan:
    """Return what each choice saves and costs; see `torchfast.plan_recompute`.

    Args:
        model: What is trained.
        loss_fn: Its loss.
        batch: What it is measured on.
        memory_gb: What there is.
        optimizer: Whose state takes memory too, or what makes it.
        autocast: The dtype of autocast.
        device: Where.
        repeats: How many turns of each choice are timed.
        regions: What is recomputed.
        graphs: Makes what captures steps, where replays are to be timed.
    """
    check_callable("loss_fn", loss_fn, "loss_fn(model, batch)")
    size = check_positive("memory_gb", memory_gb)
    check_int("repeats", repeats, minimum=1)
    is_format = isinstance(autocast, torch.dtype) and autocast.is_floating_point
    if autocast is not None and not is_format:
        raise TypeError(
            "autocast must be a dtype such as torch.bfloat16, or None, got "
            f"{autocast!r} ({type(autocast).__name__})"
        )
    asked = RecomputeOptions(regions=regions)
    if reason := why_not(model, asked, "regions"):
        raise ValueError(f"model cannot be recomputed: {reason}")
    made = _made(optimizer, model)
    where = resolve_device(device, model)
    moved = to_device(batch, where)
    blocks = chosen_blocks(model, asked)
    probe = BlockProbe(model, blocks, where, moved)

    def step(inputs: Any) -> None:
        model.zero_grad(set_to_none=True)
        with _autocast(where, autocast):
            loss = unpack_loss(loss_fn(model, inputs)).loss
        check_differentiable(loss)
        loss.backward()

    with preserved_modes(model):
        model.train()
        with untouched(model, where, loss_fn):
            with probe.counting():
                step(moved)
                wait(where)
            ways = [None, *_options(asked, len(blocks))]
            arms = [
                [] if way is None else block_forwards(blocks[:: way.every], way) for way in ways
            ]
            rises = peak_rises(step, moved, model, arms, where)
            times = timed(step, moved, arms, probe, where, repeats, graphs)
    fixed, memory_bytes = fixed_bytes(model, made), int(min(size, 1e9) * 1e9)
    most_bytes = device_bytes(where)
    # The step makes the gradients, so that the peak has those that are there by then.
    gradient_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    found = []
    for options, ms, rise in zip(ways, times.by_way, rises, strict=True):
        chosen = set(probe.paths[:: options.every]) if options is not None else set()
        saved, more_ms = _predicted(probe, times.by_call, chosen, options)
        ran_out = rise == math.inf
        needed = None if rise is None or ran_out else fixed - gradient_bytes + int(rise)
        found.append(
            RecomputeChoice(
                name=_name(options),
                recompute=False if options is None else options.shortest,
                saved_bytes=saved,
                step_ms=times.plain_ms + more_ms if ms is None else ms,
                # What is more than this device has may still fit into a larger one.
                fits=(fixed + saved if needed is None else needed) <= memory_bytes
                and not (ran_out and memory_bytes <= most_bytes),
                is_measured=ms is not None,
                needed_bytes=needed,
            )
        )
    # Of those that take the same "none", which is simpler, and then what keeps least.
    found.sort(key=lambda c: (c.step_ms, c.recompute is not False, c.saved_bytes))
    return RecomputePlan(
        choices=tuple(found),
        fixed_bytes=fixed,
        memory_bytes=memory_bytes,
        is_eager=times.is_eager,
    )


def _needed(choice: RecomputeChoice, fixed: int) -> int:
    """Return what a step takes, as far as it is known."""
    return fixed + choice.saved_bytes if choice.needed_bytes is None else choice.needed_bytes


def _peak(choice: RecomputeChoice) -> str:
    """Return a column."""
    needed = choice.needed_bytes
    return f" {'-':>10}" if needed is None else f" {needed / 2**30:>10.4f}"


def _made(optimizer: object, model: nn.Module) -> Optimizer | None:
    """Return an optimizer, made of the model's parameters if it is not there yet."""
    made = optimizer
    if callable(optimizer) and not isinstance(optimizer, Optimizer):
        made = optimizer(list(model.parameters()))
    if made is None or isinstance(made, Optimizer):
        return made
    raise TypeError(
        "optimizer must be an Optimizer, a callable that makes one of parameters such as "
        f"functools.partial(AdamW, lr=1e-3), or None, got {made!r} ({type(made).__name__})"
    )


def _options(asked: RecomputeOptions, num_blocks: int) -> Iterable[RecomputeOptions]:
    for selective in (True, False):
        for every in _EVERY:
            if every <= num_blocks:
                yield replace(asked, selective=selective, every=every)


def _name(options: RecomputeOptions | None) -> str:
    if options is None:
        return "none"
    word = "selective" if options.selective else "blocks"
    return word if options.every == 1 else f"{word}, one of {options.every}"


def _predicted(
    probe: BlockProbe,
    times: list[float],
    chosen: set[str],
    options: RecomputeOptions | None,
) -> tuple[int, float]:
    """Return the bytes that a forward keeps, and the time that is spent on top of none."""
    passed = {key for call in probe.calls for held in call.inputs for key in held}
    passed.update(key for call in probe.calls for key in call.outputs)
    shared: Storages = dict(probe.outside)
    own_bytes, more_ms = 0, 0.0
    for call, ms in zip(probe.calls, times or [0.0] * len(probe.calls), strict=True):
        cost = probe.costs[call.kind]
        if call.path in chosen:
            assert options is not None
            for held in call.inputs:
                shared.update(held)
            more_ms += ms
            if options.selective:
                kept = choose_kept(
                    cost.results, cost.saved_bytes, cost.input_bytes, options.share
                ).kept
                for keep, result, held in zip(
                    kept, cost.results, cost.result_storages, strict=True
                ):
                    if keep:
                        own_bytes += _own_bytes(held, passed, probe.outside)
                        more_ms -= min(result.ms, ms)
        else:
            own_bytes += _own_bytes(cost.saved, passed, probe.outside)
            shared.update(_saved_by(call, probe.looked_into[call.kind], cost))
    return sum(shared.values()) + own_bytes, max(0.0, more_ms)


def _own_bytes(held: Storages, passed: set[int], outside: Storages) -> int:
    """Return the bytes that stay within the block."""
    return sum(size for key, size in held.items() if key not in passed and key not in outside)


def _saved_by(call: ProbedCall, known: ProbedCall, cost: BlockCosts) -> Storages:
    """Return what goes in and out of a call and is saved in it, as in the known one of its kind."""
    saved: Storages = {}
    for place, held in enumerate(call.inputs):
        if place >= len(known.inputs) or any(key in cost.saved for key in known.inputs[place]):
            saved.update(held)
    if any(key in cost.saved for key in known.outputs):
        saved.update(call.outputs)
    return saved


def fixed_bytes(model: nn.Module, optimizer: Optimizer | None) -> int:
    """Return what parameters, buffers, gradients and optimizer state take."""
    parameters = list(model.parameters())
    total = sum(p.nbytes for p in (*parameters, *model.buffers()))
    total += sum(p.nbytes for p in parameters if p.requires_grad)
    return total if optimizer is None else total + state_bytes(optimizer)


def _autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)
