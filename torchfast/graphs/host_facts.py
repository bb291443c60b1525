"""What Python holds around a step: put back if a capture fails, compared if it does not.

A capture runs the step's Python once and none of its kernels. So where it fails, everything that
Python has changed must go back; and where it succeeds, whatever Python has changed will not change
again at a replay.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from torchfast._core.errors import CaptureError
from torchfast._core.rng import get_rng_state, same_generator, set_rng_state
from torchfast._core.storages import Memory
from torchfast.graphs.attributes import Attributes
from torchfast.graphs.holders import is_tensor
from torchfast.graphs.host_draws import HostDraws
from torchfast.graphs.named_state import NamedState
from torchfast.graphs.reached import Notes, Reached

LATER = "the step made new state of its optimizer, and can be captured later"
_NUMBERS = (bool, int, float)
_TABLES = ("_parameters", "_buffers", "_modules")
CPU_GENERATOR = "torch's CPU generator"
_ON_HOST = {"python": "random", "numpy": "numpy.random"}  # wherever the step runs
CPU = torch.device("cpu")


@final
class HostFacts:
    """Everything of a named state that lives on the host, as it is now.

    Args:
        state: Whose.
        device: Whose default generator is kept too.
        attributes: Values that the step reads beside it, taken right before.
        kind: Of the call.
        reached: What the step reaches beside it now, if somebody has looked already.
        everything: What `NamedState.everything` returns now, likewise.

    Attributes:
        reached: What the step reached beside the state; None without ``attributes``.
        after: The same after the capture, once `left` has looked, until all is put back.
    """

    def __init__(
        self,
        state: NamedState,
        device: torch.device,
        attributes: Attributes | None = None,
        kind: Hashable = None,
        reached: Reached | None = None,
        everything: Sequence[Tensor] | None = None,
    ) -> None:
        self._device, self._read, self._kind = device, attributes, kind
        if reached is None and attributes is not None:
            reached = attributes.reached()
        self.reached = reached
        self.after: Reached | None = None
        beside = [] if self.reached is None else self.reached.tensors
        self._memory = Memory({id(t): t for t in (*state.tensors, *beside)}.values())
        self._rng = get_rng_state(device)
        self._generators = [(g, g.get_state()) for g in state.generators]
        self._attributes = [(m, _without_tables(m)) for m in state.every_module]
        tables: list[dict[Any, Any]] = [
            getattr(module, name) for module in state.every_module for name in _TABLES
        ]
        tables += [optimizer.state for optimizer in state.optimizers]
        tables += [scaler._per_optimizer_states for scaler in state.scalers]
        self._tables = [(table, dict(table)) for table in tables]
        self._of_optimizers = [
            (table, dict(table))
            for table in (
                *(group for optimizer in state.optimizers for group in optimizer.param_groups),
                *state.optimizer_states(),
            )
        ]
        self._sizes = [(o.state, [*map(len, o.state.values())]) for o in state.optimizers]
        self._schedulers = [(s, dict(vars(s))) for s in state.schedulers]
        self._gradients = [(p, p.grad) for p in state.parameters]
        if device.type == "cpu":
            everything = ()  # which are put back as what lies on the device is
        elif everything is None:
            everything = state.everything()
        on_host = [tensor for tensor in everything if tensor.is_cpu]
        self._on_host = [(tensor, tensor.clone()) for tensor in on_host]

    def afresh(self, state: NamedState, everything: Sequence[Tensor] | None = None) -> HostFacts:
        """Return the same as it is now, right behind `left`."""
        return HostFacts(state, self._device, self._read, self._kind, self.after, everything)

    def put_back(self) -> None:
        """Undo what Python has changed since."""
        self.after = None  # or it would keep what a failed capture has allocated
        for table, content in (*self._tables, *self._of_optimizers):
            if table.keys() != content.keys() or any(table[k] is not content[k] for k in content):
                table.clear()
                table.update(content)
        for module, attributes in self._attributes:
            held = vars(module)
            for name in held.keys() - attributes.keys() - {*_TABLES}:
                del held[name]
            held.update(attributes)
        for scheduler, held in self._schedulers:
            vars(scheduler).update(held)
        self._memory.put_back()  # before gradients, which have to fit
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for tensor, value in self._on_host:
                tensor.copy_(value)
        set_rng_state(self._rng, self._device)
        for generator, state in self._generators:
            generator.set_state(state)
        if self._read is not None:
            self._read.put_generators_back()
        if self.reached is not None:
            self.reached.put_back()

    def check_capturable(self) -> None:
        """Raise if Python draws from an iterator, as a capture would once more than steps do.

        Raises:
            CaptureError: It does, or reads what cannot be watched.
        """
        if self._read is not None and (name := self._read.elsewhere) is not None:
            raise CaptureError(
                f"the step reaches {name}, which another process keeps: a change there would not "
                "be noticed; read it outside of the step, and let it read a value of your own"
            )
        if self._read is not None and (found := self._read.iterator()) is not None:
            part, kind, place = found
            raise CaptureError(
                f"the {part} draws from an iterator ({kind}), {place}, and each replay would "
                "repeat what was drawn once; draw outside of it, and let it read what was drawn"
            )

    def check_replayable(self, noted: HostDraws | None = None) -> None:
        """Raise if Python did what no replay does.

        Args:
            noted: Draws that are made again before each replay.

        Raises:
            CaptureError: It drew random numbers, or changed state; `LATER` if that is only because
                the optimizer's state was made.
        """
        if (drawn := self.draws(noted)) is not None:
            raise CaptureError(
                f"the step draws from {drawn}, and each replay would repeat what was drawn once; "
                "draw on the device (torch.rand(..., device=...)) or outside the step"
            )
        if self._memory.has_moved():
            raise CaptureError(
                "the memory of a tensor was replaced (tensor.data = ...) by the step itself, so a "
                "replay would read what is gone; write to it in place (tensor.copy_(...))"
            )
        if (changed := self.changes()) is not None:
            told = f"the step changes what no replay changes: {changed}"
            raise CaptureError(LATER if changed is LATER else told)

    def draws(self, noted: HostDraws | None) -> str | None:
        """Return which generators of the host were drawn from since; None if none was.

        Args:
            noted: Draws that count as none, and are still to be made then.
        """
        now = get_rng_state(CPU)
        drawn = [n for key, n in _ON_HOST.items() if not same_generator(now, self._rng, key)]
        if has_own_generator(self._device):
            # Notes are asked also where it stands still: somebody may have set it back.
            is_same = same_generator(now, self._rng, "torch")
            if not (is_same if noted is None else noted.explain(self._rng["torch"])):
                drawn.append(CPU_GENERATOR)
            for generator, before in self._generators:
                if generator.device.type == "cpu" and not torch.equal(
                    generator.get_state(), before
                ):
                    drawn.append("a generator of its own on the host")
        drawn += [] if self._read is None else self._read.drawn()
        return " and ".join(drawn) or None

    def changes(self, *, before_update: bool = False) -> str | None:
        """Return what of the state on the host has changed since; None if nothing has.

        Args:
            before_update: Of a step whose update is still to come, so of all but its optimizers.
        """
        for module, attributes in self._attributes:
            held = vars(module)
            for name, value in attributes.items():
                if type(value) in _NUMBERS and _differs(held.get(name), value):
                    kind = type(module).__name__
                    return f"{name!r} of {kind}, a number on the host; make it a buffer"
        for scheduler, known in self._schedulers:
            if scheduler.last_epoch != known["last_epoch"]:
                return f"the count of {type(scheduler).__name__}; step it outside, after the step"
        if self._read is not None and (counted := self._read.counted(self._kind)) is not None:
            return f"{counted}, a number on the host; count outside the step, or in a named tensor"
        return None if before_update else self._changes_of_optimizers()

    def _changes_of_optimizers(self) -> str | None:
        for tensor, value in self._on_host:
            if not torch.equal(tensor, value):
                return "a tensor of the optimizer's or the model's state on the CPU"
        for table, content in self._of_optimizers:
            for key, value in content.items():
                if isinstance(value, _NUMBERS) and _differs(table.get(key), value):
                    return f"{key!r}, a number on the host, in the optimizer's state or groups"
        for of_optimizer, sizes in self._sizes:
            if [*map(len, of_optimizer.values())] != sizes:
                return LATER
        return None

    def left(self) -> tuple[list[Tensor], Notes | None]:
        """Return tensors that the step has replaced, and what it has written for others to read.

        The graph may read the former, and nobody else holds them.
        """
        if self._read is None or self.reached is None:
            return self._replaced(), None
        self.after = self._read.reached()
        gone = self._replaced() + self.reached.gone(self.after)
        return gone, self.after.notes(self.reached)

    def _replaced(self) -> list[Tensor]:
        # Detached, or what autograd has kept of an earlier step would be kept with them.
        return [
            value.detach()
            for module, attributes in self._attributes
            for held in (vars(module),)
            for name, value in attributes.items()
            if held.get(name) is not value and is_tensor(value)
        ]


def _without_tables(module: nn.Module) -> dict[str, Any]:
    held = dict(vars(module))
    for name in _TABLES:
        held.pop(name, None)
    return held


def has_own_generator(device: torch.device) -> bool:
    """Whether what a step draws on the host is not drawn from the generator of its device."""
    return device.type != "cpu"


def _differs(new: Any, old: Any) -> bool:
    return new is not old and bool(new != old)  # a NaN is no other than itself
