"""Blocks of a model, measured in steps that recompute all of them but one or two of each kind.

So a model is measured in little more memory than it needs with recompute. The first call of each
kind of block runs as it is and is looked into: what it saves, and what its expensive operations
take. Of a call that is given the batch it cannot be seen whether it saves that, which is no
activation; so a later one that is given an activation there is looked into in its place. Of the
other calls the inputs are noted, which is all that recompute keeps of them.

Tensors that a count is about stay alive until the count is done, or another would get their memory
and be taken for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchfast._core.batches import tensors
from torchfast._core.blocks import equal_kinds
from torchfast._core.reading import Mark, Marks
from torchfast.memory.block_costs import BlockCosts, CostMeter, Storages, tensors_in
from torchfast.memory.kv_caches import without_cache


@dataclass
class ProbedCall:
    """One call of a block.

    Attributes:
        path: Of the block.
        kind: The number of its kind.
        inputs: Storages of the tensors that it was called with, in order.
        outputs: Storages of those that it returned.
    """

    path: str
    kind: int
    inputs: list[Storages] = field(default_factory=list)
    outputs: Storages = field(default_factory=dict)


@final
class BlockProbe:
    """Stands in the way of blocks while they are measured.

    Args:
        model: That holds them.
        blocks: The blocks with their paths.
        device: Where they run.
        batch: Whose tensors are there anyway.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: list[tuple[str, nn.Module]],
        device: torch.device,
        batch: object,
    ) -> None:
        self.calls: list[ProbedCall] = []
        self.outside: Storages = {}
        self.paths = [path for path, _ in blocks]
        self._blocks = blocks
        self._kind_of = {
            path: number for number, kind in enumerate(equal_kinds(blocks)) for path, _ in kind
        }
        self._meter = CostMeter(model, device, tensors(batch))
        self.costs: dict[int, BlockCosts] = {}
        self.looked_into: dict[int, ProbedCall] = {}  # by kind
        self._costs: dict[int, Callable[[], BlockCosts]] = {}
        self._looked_at: dict[int, tuple[int, int]] = {}  # its tensors, and activations of these
        self._alive: list[Tensor] = []
        self._marks = Marks(device)
        self._spans: list[tuple[Mark, Mark]] = []
        self._is_inside = False
        self._counts = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what the body's forward saves; the body waits for the device before it ends."""
        self._counts = True

        def pack(tensor: Tensor) -> Tensor:
            if not self._is_inside:
                self.outside.update(self._meter.counted([tensor]))
                self._alive.append(tensor.detach())
            return tensor

        with (
            self._in_the_way(),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            yield
        self._counts = False
        self.costs = {kind: costs() for kind, costs in self._costs.items()}
        self._costs.clear()
        self._alive.clear()

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time the blocks' forwards in the body."""
        with self._in_the_way():
            yield

    def take_times(self) -> list[float]:
        """Return the time of each call since the last time, in ms, in order."""
        times = [self._marks.between_ms(before, after) for before, after in self._spans]
        self._spans.clear()
        return times

    @contextmanager
    def _in_the_way(self) -> Iterator[None]:
        there = []
        try:
            for path, module in self._blocks:
                attributes = vars(module)
                before = (attributes["forward"],) if "forward" in attributes else ()
                run: Any = before[0] if before else module.forward
                there.append((attributes, before))
                attributes["forward"] = self._probed(path, module, run)
            yield
        finally:
            for attributes, before in there:
                del attributes["forward"]
                if before:
                    attributes["forward"] = before[0]

    def _probed(self, path: str, block: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
        kind = self._kind_of[path]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
                return run(*args, **kwargs)
            args, kwargs = without_cache(args, kwargs)
            call = ProbedCall(path, kind)
            if self._counts and self._tells_more(call, tensors_in((args, kwargs))):
                result, self._costs[kind] = self._meter.run(block, run, args, kwargs)
            else:
                was_inside, self._is_inside = self._is_inside, True
                before = self._marks.now()
                try:
                    result = checkpoint(run, *args, use_reentrant=False, **kwargs)
                finally:
                    self._is_inside = was_inside
                self._spans.append((before, self._marks.now()))
            if self._counts:
                inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
                self._alive += [tensor.detach() for tensor in (*inputs, *outputs)]
                call.inputs = [self._meter.counted([tensor]) for tensor in inputs]
                call.outputs = self._meter.counted(outputs)
                self.calls.append(call)
            return result

        return forward

    def _tells_more(self, call: ProbedCall, inputs: list[Tensor]) -> bool:
        """Whether to look into a call, which is then that of its kind."""
        num = sum(bool(self._meter.counted([tensor])) for tensor in inputs)
        known = self._looked_at.get(call.kind)
        # One that is given more tensors is another call, and one more that keeps all it saves.
        if known is not None and (len(inputs) != known[0] or num <= known[1]):
            return False
        self._looked_at[call.kind], self.looked_into[call.kind] = (len(inputs), num), call
        return True
