"""Whether a graph computes what the step computes.

A capture can succeed and still be wrong: a counter in Python, a branch on the host, a tensor that
the step makes and keeps in an attribute. None of these raises. So after a capture two replays and
two eager steps start from the same state, and must end in the same. Two, since a step that depends
on how often it ran agrees the first time.

Where the step itself is not deterministic (atomics, cuDNN), two eager runs differ as well, and the
replays have to lie about as near to them as they lie to each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchfast._core.batches import tensors
from torchfast.graphs.named_state import NamedState
from torchfast.graphs.saved_state import Distance, SavedState, distance

# How often eager runs are repeated to learn how far apart they are, and how much farther than
# that a replay may be: the largest of a few distances is a low guess.
_EAGER_RUNS = 3
_MARGIN = 4.0
_STEPS = 2


class Verdict(NamedTuple):
    """What a check found.

    Attributes:
        mismatch: In words, or None.
        exact: Whether replay and eager steps agreed in every bit.
    """

    mismatch: str | None
    exact: bool


def check_replays(
    state: NamedState,
    device: torch.device,
    replay: Callable[[], Any],
    eager: Callable[[], Any],
    *,
    with_gradients: bool = False,
) -> Verdict:
    """Run replays and eager steps from the present state, and leave it as it is.

    Args:
        state: All that the step reads and changes.
        device: Where it runs.
        replay: Replays on the batch at hand, and returns what the step returns.
        eager: Runs the step on that batch.
        with_gradients: Compare gradients too, where no update shows what they were.

    Synchronizes: Yes.
    """
    start = SavedState(state, device)

    def run(step: Callable[[], Any]) -> list[Tensor]:
        try:
            outputs = [list(tensors(step())) for _ in range(_STEPS)]
            found = [t for output in outputs for t in output]
            if with_gradients:
                found += [p.grad.clone() for p in state.parameters if p.grad is not None]
            return [*found, *SavedState(state, device).tensors()]
        finally:
            start.put_back()

    replayed = run(replay)
    runs = [run(eager)]
    found = distance(replayed, runs[0])
    if found.is_equal:
        return Verdict(None, exact=True)
    apart = Distance(True, 0.0)
    while len(runs) < _EAGER_RUNS:
        runs.append(run(eager))
        for other in runs[:-1]:
            here = distance(other, runs[-1])
            apart = Distance(False, max(apart.relative, here.relative))
        found = min((distance(replayed, r) for r in runs), key=lambda d: d.relative)
        if found.is_equal or found.relative <= _MARGIN * apart.relative:
            return Verdict(None, exact=False)
    return Verdict(
        f"{_STEPS} replays and {_STEPS} eager steps from the same state end {found.relative:.1e} "
        f"apart (relative to the largest value), eager steps among themselves {apart.relative:.1e}",
        exact=False,
    )
