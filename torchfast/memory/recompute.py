"""Recompute: activations are computed again in the backward, and not kept until then.

What a forward computes is kept until the backward has used it, and in a deep model that is most of
the memory of a step. A block that recomputes keeps its input alone, and runs its forward again when
the backward comes to it: about a third more arithmetic for a fraction of the memory, which is worth
it where the memory buys a larger batch, a longer context, or the model at all. It is not worth it
where everything fits: it is never faster by itself.

``"selective"`` keeps what costs most to compute again (attention, matrix products, convolutions),
as far as half of the memory goes, and recomputes the rest, which is cheap. `plan_recompute`
measures what each choice saves and costs on a model.

The second run computes what the first one did, bit for bit: random numbers are drawn again from
where the generators were, autocast is as it was, and buffers that a forward writes to, such as the
running statistics of BatchNorm, are written to once. So training is the same, eagerly and in a
CUDA graph; what is compiled is close, as compilation is.

Nothing is recomputed in evaluation or without gradients. A block that keeps other state of its own,
such as a counter in Python, counts twice; a cache of keys and values is left out of training calls,
as transformers does, so the bits are those of the model called without it. Forbidden: to go on with
the cache that such a call has left empty, a model that recomputes by itself already, two handles on
one, and another mode or other parameters in the backward than in the forward (``eval``,
``functional_call``, an update between them).
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, Self, final

import torch
from torch import nn

from torchfast._core.blocks import abbreviated, equal_kinds
from torchfast._core.closing import Closing
from torchfast._core.decisions import Decision
from torchfast._core.errors import ClosedError, PlanError
from torchfast._core.selection import named_blocks
from torchfast.memory.block_forward import BlockForward, BlockKind, forward_of
from torchfast.memory.recompute_options import RecomputeOptions, Setting, recompute_decision

# Of transformers and diffusers, and of timm.
_SWITCHES = {
    "gradient_checkpointing": "gradient_checkpointing_disable()",
    "grad_checkpointing": "set_grad_checkpointing(False)",
}
_WRAPPERS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"


@final
class Recompute(Closing):
    """Recompute blocks of a model in the backward, in place.

    Args:
        model: The model; it stays the same object.
        what: ``"blocks"``, ``"selective"``, paths and module classes, or `RecomputeOptions`.

    Raises:
        TypeError: Not a module.
        ValueError: A model that recomputes by itself or has no blocks that repeat, or a region that
            it does not have.
        PlanError: A choice that does not exist, or a memory budget, which only a plan that compiles
            can have.

    Numerics: Bitwise equal to the model without, called with ``use_cache=False`` if it has caches.
    Synchronizes: In the first call of a block that has buffers, to see which of them it changes.

    Example:
        >>> block = lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = nn.Sequential(block(), block(), block())
        >>> with Recompute(model) as recompute:
        ...     model(torch.ones(2, 4, 8)).sum().backward()
        ...     print(recompute.regions)
        ('0', '1', '2')
    """

    def __init__(self, model: nn.Module, what: Setting = "blocks") -> None:
        options = RecomputeOptions.of(what)
        if options is None:
            raise PlanError(
                "recompute=False has nothing to do here, so leave it out, or name something: "
                "'blocks', 'selective', paths or classes"
            )
        if options.budget is not None:
            raise PlanError(
                f"recompute={what!r} has no meaning here: a memory budget is the compiler's, and "
                "needs Plan(recompute=..., compile=True); use 'blocks' or 'selective'"
            )
        if reason := why_not(model, options):
            raise ValueError(f"model cannot be recomputed: {reason}")
        self.options = options
        self._model = weakref.ref(model)
        self._name = type(model).__name__
        self._blocks = block_forwards(chosen_blocks(model, options), options)
        self._kinds = list(dict.fromkeys(block.kind for block in self._blocks))
        for block in self._blocks:
            block.install(self)
        self._is_closed = False

    @property
    def regions(self) -> tuple[str, ...]:
        """The paths of what is recomputed, ``""`` for the whole model."""
        return tuple(block.path for block in self._blocks)

    @property
    def is_closed(self) -> bool:
        """Whether the model is as it was."""
        return self._is_closed

    def decisions(self) -> list[Decision]:
        """Return what is recomputed, and what was seen."""
        decisions = []
        for kind in self._kinds:
            has_run = kind.num_recomputed > 0 or kind.is_compiled or kind.choice is not None
            if kind.num_in_eval and not has_run:
                detail = (
                    f"{kind.names} ran as they are in {kind.num_in_eval} calls: they were in eval "
                    "mode; put them in train mode, and only modules in them in eval mode that "
                    "must not drop out or update statistics"
                )
                decisions.append(recompute_decision("stepped aside", detail))
                continue
            detail = f"{kind.names}, run again in the backward"
            if not has_run:
                detail = (
                    f"{kind.names}, to run again in the backward, which has not happened yet: "
                    "nobody has called them, in train mode and with gradients"
                )
            if self.options.selective:
                chosen = "what is kept is chosen at the first call, or by the compiler"
                detail += f"; {chosen if kind.choice is None else f'each {kind.choice}'}"
            if kind.has_dropped_cache:
                detail += (
                    "; called without their cache of keys and values, to which a second run would "
                    "add again (use_cache=False says so to the model)"
                )
            decisions.append(recompute_decision("applied", detail))
            if kind.num_with_past or kind.has_compiled_past:
                why = "they were called with a cache that holds earlier tokens"
                remedy = "train without past_key_values to recompute them"
                calls = f"{kind.num_with_past} calls" if kind.num_with_past else "what is compiled"
                detail = f"{kind.names} ran as they are in {calls}: {why}"
                decisions.append(recompute_decision("stepped aside", f"{detail}; {remedy}"))
        return decisions

    def __enter__(self) -> Self:
        """Return this one, which is at work already.

        Raises:
            ClosedError: It was closed.
        """
        if self._is_closed:
            raise ClosedError("this Recompute was closed; make a new one")
        return self

    def close(self) -> None:
        """Give the model its own forwards back; a second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            for block in self._blocks:
                block.undo()

    def __repr__(self) -> str:
        """Return the model's class and what is recomputed of it."""
        names = "closed" if self._is_closed else ", ".join(kind.names for kind in self._kinds)
        return f"Recompute({self._name}: {names})"


def block_forwards(
    blocks: list[tuple[str, nn.Module]], options: RecomputeOptions
) -> list[BlockForward]:
    """Return what is to stand in modules, given with their paths; equal ones are of one kind."""
    found = []
    for members in equal_kinds(blocks):
        names = abbreviated(path for path, _ in members)
        number = f"{len(members)} blocks of " if len(members) > 1 else ""
        kind = BlockKind(f"{number}{type(members[0][1]).__name__} ({names})", options)
        # Wherever its result goes; a function is seen in the graph of the block's own result.
        kind.ends_later = any(isinstance(m, nn.RReLU) for m in members[0][1].modules())
        found += [BlockForward(path, module, kind) for path, module in members]
    return found


def chosen_blocks(
    model: nn.Module, options: RecomputeOptions, keyword: str = "recompute"
) -> list[tuple[str, nn.Module]]:
    """Return the modules that options name, with their paths; none if no blocks repeat.

    Raises:
        ValueError: A path or class that is not in the model.
    """
    return named_blocks(model, options.regions, keyword)[:: options.every]


def why_not(model: Any, options: RecomputeOptions, keyword: str = "recompute") -> str | None:
    """Return why a model cannot be recomputed, and what to do; None if it can.

    Args:
        model: The model.
        options: What of it.
        keyword: By which modules can be named.

    Raises:
        TypeError: Not a module.
        ValueError: A path or class that is not in the model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r} ({type(model).__name__})")
    wrapper: Any = getattr(sys.modules.get(_WRAPPERS), "CheckpointWrapper", ())
    for path, module in model.named_modules():
        where = f"its module {path}" if path else type(model).__name__
        for switch, off in _SWITCHES.items():
            if getattr(module, switch, False) is True:
                return (
                    f"it does so by itself: {switch} is on in {where}; turn it off, by the "
                    f"model's {off}, to leave it to torchfast"
                )
        if isinstance(module, wrapper):
            return f"it does so by itself: {where} is wrapped by torch's checkpoint_wrapper"
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            return (
                "nn.DataParallel makes shallow copies of its blocks for each device, which would "
                "run the blocks themselves; use DistributedDataParallel"
            )
        there = forward_of(module)
        if there is None:
            continue
        if not there.is_abandoned:
            return (
                f"another Recompute does so already ({where}); close that, or the Trainer that "
                "made it, first"
            )
        there.undo()
    chosen = chosen_blocks(model, options, keyword)
    if not chosen:
        names = tuple(name for name, _ in model.named_children())[:2] or ("encoder", "decoder")
        return f"no blocks of the model repeat; name modules instead: {keyword}={names}"
    script = next((path for path, m in chosen if isinstance(m, torch.jit.ScriptModule)), None)
    if script is not None:
        return f"its module {script} is TorchScript, whose forward is compiled; name others"
    return None
