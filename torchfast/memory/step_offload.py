"""What a plan's offloading is to a step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfast._core.decisions import Decision
from torchfast.memory.offload_options import OffloadOptions

if TYPE_CHECKING:
    from torchfast.memory.activation_offload import ActivationOffload
    from torchfast.memory.optimizer_offload import OffloadedOptimizer
    from torchfast.memory.parameter_offload import ParameterOffload


@final
class StepOffload:
    """What a plan's offloading is to a step.

    Args:
        options: What to offload, or None.
    """

    def __init__(self, options: OffloadOptions | None) -> None:
        self._options = options
        self._activations: ActivationOffload | None = None
        self._parameters: ParameterOffload | None = None
        self._is_settled = False

    @property
    def needs_factory(self) -> str | None:
        """Why the optimizer must be given as a callable; None if it need not."""
        if self._options is None or not self._options.optimizer:
            return None
        return "offload moves the optimizer's state to the host as the optimizer is built"

    def source(self, source: Any) -> Any:
        """Return what makes the optimizer: offloaded, if it is asked for."""
        is_maker = callable(source) and not isinstance(source, type | Optimizer)
        if not (is_maker and self.needs_factory):
            return source
        from torchfast.memory.optimizer_offload import offloaded

        assert self._options is not None
        options = self._options
        return offloaded(source, overlap=options.overlap, max_undo_bytes=options.max_undo_bytes)

    @property
    def no_graph(self) -> str | None:
        """Why no graph can hold a step; None if one can."""
        if self._parameters is not None and self._parameters.decision.outcome == "applied":
            return (
                "parameters of offloaded blocks come to the device as the step calls them, and "
                "their gradients are added up on the host, which no graph can hold"
            )
        if self._options is not None and self._options.overlap:
            return "the update on the host begins in the backward, by hooks that no graph replays"
        return None

    @property
    def moves_parameters(self) -> bool:
        """Whether `place` is to be called in place of what moves a model to its device."""
        return self._options is not None and self._options.parameters is not None

    def place(
        self,
        model: nn.Module,
        device: torch.device,
        optimizer: Optimizer | None = None,
        *,
        moves: bool,
    ) -> None:
        """Move parameters of offloaded blocks to the host, and all else to the device.

        Args:
            model: Changed in place; its parameters stay the same objects.
            device: Where to train.
            optimizer: Its optimizer, if that is there already: its state goes along.
            moves: Whether all else has yet to go there.

        Raises:
            ValueError: A block that the model does not have, or that cannot be offloaded.
        """
        options = self._options
        assert options is not None
        assert options.parameters is not None
        from torchfast.memory.parameter_offload import ParameterOffload

        self._parameters = ParameterOffload(
            model,
            options.parameters,
            device=device if moves else None,
            max_resident_blocks=options.max_resident_blocks,
        )
        if moves and self._parameters.decision.outcome != "applied":
            model.to(device)
        _take_along(optimizer)

    def averaged(self, model: nn.Module | None) -> nn.Module | None:
        """Return the average of the model, made ready to be called as the model is."""
        if self._parameters is not None and model is not None:
            self._parameters.also(model)
        return model

    def begin(self, model: nn.Module, device: torch.device) -> None:
        """Take the model, on its device and with its parameters."""
        options = self._options
        if options is None or not options.activations:
            return
        from torchfast.memory.activation_offload import ActivationOffload

        self._activations = ActivationOffload(
            model,
            min_bytes=options.min_bytes,
            window_bytes=options.window_bytes,
            max_bytes=options.max_bytes,
            max_host_bytes=options.max_host_bytes,
            auto=options.activations == "auto",
            max_slowdown=options.max_slowdown,
            device=device,
        )

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of a forward."""
        if self._parameters is not None:
            if not self._is_settled:
                self._is_settled = True  # channels_last, which lays parameters out anew, is applied
                self._parameters.settle()
            self._parameters.begin_forward()  # a loss may call parts of the model alone
        return nullcontext() if self._activations is None else self._activations

    def decisions(self, optimizer: Optimizer) -> list[Decision]:
        """Say what was done."""
        if self._options is None:
            detail = "activations and optimizer state stay where they are"
            return [Decision(lever="offload", outcome="left alone", detail=detail)]
        parts = (self._activations, self._parameters)
        return [
            *(part.decision for part in parts if part is not None),
            *([] if (held := self._held(optimizer)) is None else [held.decision]),
        ]

    def counters(self, optimizer: Optimizer) -> dict[str, int]:
        """Return what went to the host, and which updates began early."""
        parts = (self._activations, self._parameters, self._held(optimizer))
        counts = [part.counters() for part in parts if part is not None]
        return {name: count for found in counts for name, count in found.items()}

    def on_device(self) -> dict[str, list[Tensor]]:
        """Return what of parameters that wait on the host is on the device now."""
        return {} if self._parameters is None else self._parameters.on_device()

    def close(self, optimizer: Optimizer) -> None:
        """Let go of the pinned memory of activations and of hooks; put parameters back."""
        held = self._held(optimizer)
        if held is not None:
            held.close()
        if self._activations is not None:
            self._activations.close()
        self.put_back(optimizer)

    def put_back(self, optimizer: Optimizer | None = None) -> None:
        """Put parameters back, and the state that an optimizer has of them."""
        if self._parameters is not None and not self._parameters.is_closed:
            self._parameters.close()
            _take_along(optimizer)

    def _held(self, optimizer: Optimizer) -> OffloadedOptimizer | None:
        """Return the optimizer, if it was built with its state on the host."""
        if self.needs_factory is None:
            return None
        from torchfast.memory.optimizer_offload import OffloadedOptimizer

        return optimizer if isinstance(optimizer, OffloadedOptimizer) else None


def _take_along(optimizer: Optimizer | None) -> None:
    """Let the state of an optimizer be where its parameters are now."""
    if optimizer is not None and optimizer.state:
        # Loading its own state is how torch moves each entry by its own rule.
        optimizer.load_state_dict(optimizer.state_dict())
