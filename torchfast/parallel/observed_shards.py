"""The collectives of shards, as a timer of steps sees them.

`fully_shard` gathers a piece on a stream of its own, and the step waits where it needs the piece.
It reduces gradients on another, and the step waits for those before the last ones, whose memory it
needs again, and at the end for all. For a step that is looked at, each piece is given calls that
note this and do what they did; other steps run as if there were none of it.

Where the step waits stands in methods that torch does not document. Where a torch has others, only
the collectives are told.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, final

from torch import Tensor, nn

from torchfast._core.collectives import Collective, Observation
from torchfast._core.fsdp_pieces import pieces_of
from torchfast._core.reading import Mark

_COLLECTIVES: Final = ("_all_gather_comm", "_reduce_scatter_comm")
_WAITS: Final = ("wait_for_unshard", "post_backward", "finalize_backward")


@final
class ObservedShards:
    """Tells of the collectives of a sharded model, from `observe` until it is over.

    Args:
        model: What `fully_shard` has sharded.
        is_replicated: Whether shards are reduced over replicas, too.
    """

    def __init__(self, model: nn.Module, *, is_replicated: bool) -> None:
        self._model, self._is_replicated = model, is_replicated
        self._pieces: list[Any] | None = None  # as soon as it is sharded
        self._observed: list[_Piece] = []

    def observe(self, observation: Observation | None) -> None:
        """Note there what is issued from now on; None ends it."""
        for piece in self._observed:
            piece.restore()
        self._observed = []
        if observation is None:
            return
        if self._pieces is None:
            found = pieces_of(self._model)
            self._pieces = [p for p in found if all(hasattr(p, name) for name in _COLLECTIVES)]
        pieces = self._pieces
        if not all(hasattr(piece, name) for piece in pieces for name in _WAITS):
            observation.knows_waits = False
        backward = _Backward(observation)
        self._observed = [_Piece(p, backward, self._is_replicated) for p in pieces]


@final
class _Backward:
    """What the pieces of a model have reduced, and how much of it the step has waited for."""

    def __init__(self, observation: Observation) -> None:
        self.observation = observation
        self._reduced: list[Collective] = []
        self._num_waited_for = 0
        self._over_replicas: list[Collective] = []

    def reduces(self, collective: Collective) -> None:
        """Note what has been issued."""
        self._reduced.append(collective)

    def reduces_over_replicas(self, collective: Collective) -> None:
        """Note what has been issued behind that, which nobody waits for before the end."""
        self._over_replicas.append(collective)

    def wait_for_earlier(self, num_kept: int) -> None:
        """Note that the step waits until one less than so many are on their way."""
        number = len(self._reduced) - num_kept + 1
        if number > self._num_waited_for:
            self.observation.wait_for(self._reduced[self._num_waited_for : number])
            self._num_waited_for = number

    def wait_for_all(self) -> None:
        """Note that it waits for all."""
        left = [*self._reduced[self._num_waited_for :], *self._over_replicas]
        if left:
            self.observation.wait_for(left)
        self._num_waited_for, self._over_replicas = len(self._reduced), []


@final
class _Piece:
    """A piece with its calls replaced by ones that note what they do."""

    def __init__(self, piece: Any, backward: _Backward, is_replicated: bool) -> None:
        self._piece, self._backward = piece, backward
        self._gathered: Collective | None = None
        self._reducing: Mark | None = None  # from when on gradients can be reduced over replicas
        self._held = {name: getattr(piece, name) for name in _COLLECTIVES}
        self._methods = {n: getattr(piece, n) for n in _WAITS if hasattr(piece, n)}
        piece._all_gather_comm = _Noted(self._held["_all_gather_comm"], self._gather)
        piece._reduce_scatter_comm = _Noted(self._held["_reduce_scatter_comm"], self._reduce)
        for name in self._methods:
            setattr(piece, name, getattr(self, f"_{name}"))
        if is_replicated and hasattr(piece, "_all_reduce_hook"):
            self._held["_all_reduce_hook"] = piece._all_reduce_hook
            piece._all_reduce_hook = self._reduced_over_replicas

    def restore(self) -> None:
        """Give the piece back what it had."""
        for name, value in self._held.items():
            setattr(self._piece, name, value)
        for name in self._methods:
            vars(self._piece).pop(name, None)

    def _gather(self, issue: Callable[[], Any], is_beside: bool) -> Any:
        result, self._gathered = self._noted(issue, is_beside)
        return result

    def _reduce(self, issue: Callable[[], Any], is_beside: bool) -> Any:
        result, found = self._noted(issue, is_beside)
        if found is not None:
            self._reducing = found.end
            self._backward.reduces(found)
        return result

    def _noted(self, issue: Callable[[], Any], is_beside: bool) -> tuple[Any, Collective | None]:
        observation = self._backward.observation
        return observation.start(issue) if is_beside else observation.run(issue)

    def _reduced_over_replicas(self, gradient: Tensor) -> None:
        if self._reducing is not None:
            found = self._backward.observation.ran_until_now(self._reducing)
            if found is not None:
                self._backward.reduces_over_replicas(found)
        if (hook := self._held["_all_reduce_hook"]) is not None:
            hook(gradient)

    def _wait_for_unshard(self) -> None:
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            self._backward.observation.wait_for([gathered])
        self._methods["wait_for_unshard"]()

    def _post_backward(self, *arguments: Any) -> None:
        kept = getattr(self._piece.comm_ctx, "reduce_scatter_max_input_buffers", 1)
        self._backward.wait_for_earlier(kept)
        if "_all_reduce_hook" in self._held:  # of a piece that each replica has whole
            self._reducing = self._backward.observation.moment()
        self._methods["post_backward"](*arguments)

    def _finalize_backward(self) -> None:
        self._backward.wait_for_all()
        self._methods["finalize_backward"]()


@final
class _Noted:
    """A collective of a piece, in whose memory nothing changes."""

    def __init__(self, inner: Any, note: Callable[[Callable[[], Any], bool], Any]) -> None:
        self._inner, self._note = inner, note

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        issue = partial(self._inner, *arguments, **named)
        return self._note(issue, bool(named.get("async_op")))

    def allocate(self, *arguments: Any, **named: Any) -> Any:
        return self._inner.allocate(*arguments, **named)
