"""The way of compiling a step that is fastest on this model, batch and machine, found by trying.

Each way is put in force in turn, and the step's own forward and backward run on the first batch
that the step is given. What was found is kept beside the compile cache, where one is named, and the
next run begins with it.

Where a graph will hold the step, what is timed are replays of graphs of its forward and backward:
launched kernel by kernel, compiled code, which launches less, would look better or worse than it
will be.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from torchfast._core.blocks import find_blocks
from torchfast._core.decisions import Outcome
from torchfast.compiler import Compiled, CompiledModule, CompileOptions
from torchfast.compiler.candidates import Candidate, ModeChoice, OutError, mode_choices
from torchfast.compiler.causes import is_of_the_machine
from torchfast.compiler.options import WHERE_AND_IF
from torchfast.compiler.receipt_files import find_receipt, save_receipt
from torchfast.compiler.receipts import Receipt, ReceiptKey
from torchfast.compiler.region_kind import has_global_hooks
from torchfast.compiler.replays import Graphs
from torchfast.compiler.search import search
from torchfast.compiler.switched_off import why_off
from torchfast.compiler.timeout import call_within

logger = logging.getLogger(__name__)

Make = Callable[[CompileOptions], Compiled]
Use = Callable[[Compiled | None], None]


class Found(NamedTuple):
    """What a search has found.

    Attributes:
        receipt: What was measured, now or in an earlier run.
        when: That, and where there was no receipt to begin with, why.
    """

    receipt: Receipt
    when: str

    @property
    def outcome(self) -> Outcome:
        """What became of ``mode="auto"``."""
        return "applied" if self.receipt.is_answer else "stepped aside"

    def __str__(self) -> str:
        """Return what is in force, and why that."""
        receipt = self.receipt
        if receipt.is_answer:
            return f"mode 'auto' took {receipt.choice}, {self.when}: {receipt.why}"
        return f"mode 'auto' found no answer, so {receipt.choice} is in force: {receipt.why}"


@final
class _Way:
    """One way of compiling, made when it is first tried, and the same object ever after."""

    def __init__(self, make: Make, use: Use, options: CompileOptions) -> None:
        self._make = make
        self._use = use
        self._options = options
        self.compiled: Compiled | None = None

    def apply(self) -> Callable[[], None]:
        """Put it in force; return what takes it back."""
        if self.compiled is None:
            self.compiled = self._make(self._options)
        else:
            self.compiled.resume()
        self._use(self.compiled)
        return self._undo

    def _undo(self) -> None:
        assert self.compiled is not None
        self.compiled.suspend()
        self._use(None)

    def failure(self) -> str | None:
        """Return why it is not what it is called, if it is not.

        Raises:
            OutError: It may be another time.
        """
        assert self.compiled is not None
        if self.compiled.is_compiled:
            return None
        told = self.compiled.decisions()
        if isinstance(self.compiled, CompiledModule):
            told = told[1:]  # the first says what was asked for
        aside = [d.detail for d in told if d.outcome == "stepped aside"]
        reason = "; ".join(aside) or "nothing was compiled"
        if why_off() is not None or has_global_hooks() or is_of_the_machine(reason):
            raise OutError("not now", reason)
        return reason


def search_mode(
    model: nn.Module,
    options: CompileOptions,
    make: Make,
    use: Use,
    work: Callable[[], Tensor],
    batch: object,
    device: torch.device,
    *,
    in_graph: bool,
    plan: str,
    loss: str,
    graphs: Graphs | None = None,
) -> Found:
    """Return the fastest way to compile that computes what eager does, in force.

    Args:
        model: What the step trains.
        options: What was asked for, with ``mode="auto"``.
        make: Compiles as options say.
        use: Lets the step call what was compiled, or with None what was given.
        work: The step's forward and backward on ``batch``; returns the loss.
        batch: The first batch.
        device: Where.
        in_graph: Whether a graph will hold the step.
        plan: What is done to the step beside compiling, as text.
        loss: The `function_fingerprint` of the loss function.
        graphs: What captures the work as the step will be, where it will be.

    Numerics: State, gradients and generators are as before.
    Synchronizes: Often.
    """
    choices = _choices(model, options, device, in_graph=in_graph)
    names = [choice.name for choice in choices]
    when = "measured now"
    asked = json.dumps(options.changed_without(WHERE_AND_IF), sort_keys=True)
    key = ReceiptKey.of(model, batch, device, {"compile": asked, "plan": plan}, loss=loss)
    ways = {c.name: _Way(make, use, _options_of(options, c)) for c in choices if c.mode is not None}
    if options.cache is not None:
        known, reason = find_receipt(options.cache, key, names)
        if known is not None:
            _put_in_force(ways, known.choice)
            return Found(known, f"measured {known.created}, from its receipt")
        when = f"measured now ({reason})"
    candidates = [
        Candidate(name=name, apply=ways[name].apply, failure=ways[name].failure)
        if name in ways
        else Candidate(name=name, apply=lambda: lambda: None)
        for name in names
    ]
    try:
        receipt = search(
            candidates,
            work,
            model=model,
            device=device,
            budget_s=options.budget_s,
            batch=batch,
            key=key,
            graphs=graphs,
            call_within=call_within,
        )
    except BaseException:
        _close_all_but(None, ways)
        raise
    if options.cache is not None:
        save_receipt(options.cache, receipt)
    for name, way in ways.items():
        if way.compiled is not None and name != receipt.choice:
            # The choice's entry has all that this process compiled.
            way.compiled.keep_nothing()
    _close_all_but(receipt.choice, ways)
    _put_in_force(ways, receipt.choice)
    found = Found(receipt, when)
    if not receipt.is_answer:
        logger.warning("%s. It is not kept: the next run searches again.", found)
    return found


def _choices(
    model: nn.Module, options: CompileOptions, device: torch.device, *, in_graph: bool
) -> list[ModeChoice]:
    has_blocks = bool(find_blocks(model))
    found = mode_choices(device, has_blocks=has_blocks, outer_graph=in_graph)
    if options.regions == "auto":
        return found
    # As asked: one of the two, or the regions that were named.
    wanted = options.regions if options.regions == "blocks" and has_blocks else "whole"
    found = [choice for choice in found if choice.regions in (None, wanted)]
    if isinstance(options.regions, str):
        return found
    return [c if c.mode is None else c._replace(name=f"regions: {c.mode}") for c in found]


def _options_of(options: CompileOptions, choice: ModeChoice) -> CompileOptions:
    changes: dict[str, Any] = {"mode": choice.mode}
    if options.regions == "auto":
        changes["regions"] = choice.regions
    return dataclasses.replace(options, **changes)


def _close_all_but(choice: str | None, ways: dict[str, _Way]) -> None:
    for name, way in ways.items():
        if way.compiled is not None and name != choice:
            way.compiled.close()


def _put_in_force(ways: dict[str, _Way], choice: str) -> None:
    if choice in ways:  # else it is eager
        ways[choice].apply()
