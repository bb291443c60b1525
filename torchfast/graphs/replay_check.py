"""Whether a graph computes what the step computes.

A capture can succeed and still be wrong: a counter in Python, a branch on the host, a tensor that
the step makes and keeps in an attribute. None of these raises. So after a capture two replays and
two eager steps start from the same state, and must end in the same. Two, since a step that depends
on how often it ran agrees the first time.

Where the step itself is not deterministic (atomics, cuDNN), eager runs differ as well. Then each
tensor of a replay has to lie about as near to the eager ones as they lie to each other. Some steps
are that only now and then: two atomic sums of a hundred meet in another order, once in ten runs.
So what differs by no more than rounding is taken for that where it was seen to come and to go: an
eager run ended bit for bit as the replay, or another replay did not. In low precision a second step
makes more than rounding of it: nearly all of what the order of sums changes is rounded away, and
now and then a value rounds the other way, in one run of forty, which moves the gradients behind it
by a thousandth. What rounding can do is measured, by replays from parameters that are a rounding
off (`torchfast._core.rounding`): where they end about as far away, it is no error if some eager
runs do so and another one ends as the replays, nor if the first replay does and the next do not.
Elsewhere more replays have to differ as far as eager runs, as those of a step that counts or draws
never do. Runs behind the first two are beside other work (`torchfast.graphs.side_load`): alone,
atomics may meet in one order in every replay and in another one in every eager step.

Some models compute another way where they are told of a capture (`torchfast.graphs.secrecy`). Where
what is close will do, a graph of that may differ from eager steps as their own two ways do. It must
be, by the rules above, what eager steps compute that are told as well; and such steps have to be
close to plain ones: in what they return, and in where they lead what they change.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from operator import add
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from torchfast._core.batches import tensors
from torchfast._core.rounding import disturb, take_back
from torchfast.graphs.host_facts import HostFacts
from torchfast.graphs.named_state import NamedState
from torchfast.graphs.reached import Copies
from torchfast.graphs.run_ends import Left, left
from torchfast.graphs.saved_named_state import SavedNamedState, bytes_of, have_room
from torchfast.graphs.secrecy import pretended
from torchfast.graphs.side_load import SideLoad
from torchfast.graphs.signature import describe, without_tensors

# How often eager runs are repeated to learn how far apart they are, how many replays run from
# parameters that are a rounding off, and how many more as they are; and how much farther than eager
# runs are apart a replay may be. The largest of a few distances is a low guess: where the true
# gradient is zero, as of a bias before a normalisation, Adam makes whole updates out of atomics'
# rounding errors, and a replay's kernels follow each other more closely than an eager step's. Up to
# 14 times was seen with models of timm, whose replays are bit for bit the eager steps under
# deterministic algorithms; what a graph gets wrong is farther off by orders of magnitude.
_EAGER_RUNS = 5
_DISTURBED = 4
_MORE_REPLAYS = 8
_MARGIN = 16.0
_STEPS = 2
# Relative to the largest value of a tensor: some roundings of float32. What a counter or a number
# that is drawn changes is more.
_ROUNDING = 1e-6
# What is taken for rounding, where rounding is seen to make as much: up to so many times what it
# made in a few runs (2.6 was seen in a thousand tensors), and no more than two neighbours of
# bfloat16 are apart, squared, as Adam keeps them. And how far from replays, in what they differ by
# themselves, an eager run is that has not rounded so.
_OF_ROUNDING, _LOW_ROUNDING = 4.0, 2.0**-6
_AS_REPLAYS = 2.0
# How far apart, likewise, two ways to compute the same may be in what the steps return: losses in
# bf16, with another kernel for attention. And how far in half of what they change, relative to the
# change: not in all, for where a gradient is zero but for rounding, Adam makes whole updates of it.
_CLOSE, _TURN = 1e-2, 0.5


class Mismatch(NamedTuple):
    """How replays differ from eager steps.

    Attributes:
        detail: In words.
        is_later: Whether the first step returned what it should: what is wrong is written behind
            what it returns, as an update is.
        place: Of the tensor that differs most, among those of a run; None where tensors are not
            what differs.
    """

    detail: str
    is_later: bool
    place: int | None = None


class _Run(NamedTuple):
    """What some steps have left: every output, then the state; and outputs that are no tensors.

    The first outputs, so many, are those of the first step. Behind the outputs comes the state, and
    behind that may come gradients.
    """

    tensors: list[Left]
    others: tuple[Any, ...]
    num_first: int
    num_outputs: int
    num_state: int


@final
class Told:
    """That a step was told of its capture, and how near it is to a step that was not.

    Attributes:
        gap: How far apart are what two such steps return, relative to the largest value; None where
            they are the same, or it is not known yet.
    """

    def __init__(self) -> None:
        self.gap: float | None = None

    def compared(self, plain: _Run, as_told: _Run, start: Sequence[Left]) -> Mismatch | None:
        """Take the gap between eager runs from one start; return what differs if it is wide."""
        if len(plain.tensors) != len(as_told.tensors) or plain.others != as_told.others:
            return Mismatch("told of the capture, the step returns other things", is_later=False)
        outputs = range(plain.num_outputs)
        gap = max((plain.tensors[i].distance(as_told.tensors[i]) for i in outputs), default=0.0)
        turns, whole = [], [0.0, 0.0, 0.0]
        begun: list[Left | None] = [*start[: plain.num_state]]
        begun += [None] * (len(plain.tensors) - len(outputs) - len(begun))
        ends = plain.tensors[len(outputs) :], as_told.tensors[len(outputs) :], begun
        for near, far, before in zip(*ends, strict=True):
            distance = near.distance(far)
            if not distance:
                turns.append(0.0)
            elif near.is_counted() or distance == math.inf:
                turns.append(math.inf)
            else:
                apart, own, others = near.ways(far, before)
                # Noise moves a tensor both times: what moves once is trained one way only.
                turns.append(apart / max(own, others) if own and others else math.inf)
                whole = [a + b * b for a, b in zip(whole, (apart, own, others), strict=True)]
        turn = max(
            statistics.median(turns or [0.0]),
            math.sqrt(whole[0] / max(whole[1:])) if any(whole[1:]) else 0.0,
            max((t for t in turns if not math.isfinite(t)), default=0.0),
        )
        if not (gap <= _CLOSE and turn <= _TURN) or not plain.tensors:
            detail = (
                "told of the capture, the step computes something else: what it returns is "
                f"{gap:.1e} apart (relative to the largest value; {_CLOSE:.0e} would be close), "
                f"and what it changes {turn:.1e} (relative to the change)"
            )
            return Mismatch(detail, is_later=gap <= _CLOSE)
        self.gap = gap
        return None


def find_mismatch(
    state: NamedState,
    device: torch.device,
    replay: Callable[[], Any],
    eager: Callable[[], Any],
    *,
    gradients: Sequence[Tensor] = (),
    facts: HostFacts | None = None,
    with_gradients: bool = False,
    told: Told | None = None,
    any_says: Callable[[bool], bool] = bool,
) -> Mismatch | None:
    """Run replays and eager steps from the present state, and leave it as it is.

    Args:
        state: All that the step reads and changes.
        device: Where it runs.
        replay: Replays on the batch at hand, and returns what the step returns.
        eager: Runs the step on that batch.
        gradients: Gradients that the step adds to; they are state too.
        facts: What the host held before the step was captured, and what the step reaches now.
        with_gradients: Compare all gradients, where no update shows what they were.
        told: That the step was told of its capture, where what is close to an untold one will do;
            gets to know how close it is, where it is not the same.
        any_says: Returns whether any rank says yes.

    Returns:
        How they differ; None if they do not.

    Synchronizes: Yes.
    """
    written, come, unsure = list(gradients), [], []
    everything = state.everything()
    if facts is not None and facts.reached is not None and facts.after is not None:
        before, now = facts.reached, facts.after
        known = {id(t) for t in (*everything, *state.tensors, *gradients)}
        written += [t for t in before.written() if id(t) not in known]
        come = [t for t in now.come(before) if id(t) not in known]
        known.update(map(id, (*written, *come)))
        unsure = [t for t in now.unsure(device) if id(t) not in known]
    start = SavedNamedState(state, device, (*written, *come), facts, everything)
    copies = Copies(unsure)
    any_says(True)  # or steps would begin though there is no memory for this on another rank
    num_bytes = bytes_of(start.tensors())
    if with_gradients:
        num_bytes += bytes_of(state.parameters)
    # Two replays and the eager runs are kept until the verdict; where it was told, a plain one and
    # the start too.
    whole = have_room(device, (2 + _EAGER_RUNS + 2 * (told is not None)) * num_bytes)

    load = SideLoad(device)
    # What is not trained gets nothing of what rounds in gradients.
    trained = {id(p) for p in state.parameters if p.requires_grad}
    places = [i for i, t in enumerate(everything) if id(t) in trained]
    parameters, values = ([some[i] for i in places] for some in (everything, start.tensors()))
    are_disturbed = range(2 + _EAGER_RUNS, 2 + _EAGER_RUNS + _DISTURBED)
    names: list[str] = []  # of what a run has left: some of it is gone behind that

    def run(step: Callable[[], Any], number: int) -> _Run:
        try:
            if number in are_disturbed:
                disturb(parameters, seed=number)
            with load if number > 1 else nullcontext():
                outputs = [step() for _ in range(_STEPS)]
            if number in are_disturbed:
                take_back(parameters, values, seed=number)
            found = left(list(tensors(outputs)))
            others = without_tensors(describe(outputs).key)
            ends = [*state.everything(), *written]
            num_state = len(ends)
            if with_gradients:
                ends += [p.grad for p in state.parameters if p.grad is not None]
            if not names:
                names.extend(state.names_of(ends))
            num_first = len(list(tensors(outputs[0])))
            kept = left(ends, whole=whole)
            return _Run(found + kept, others, num_first, len(found), num_state)
        finally:
            start.put_back()
            copies.put_back()

    def compare(eager: Callable[[], Any]) -> tuple[Mismatch | None, _Run]:
        judging, verdict, is_open, found = _judge(), None, True, None
        next(judging)
        at_last = (_EAGER_RUNS - 1) * [eager] + (_DISTURBED + _MORE_REPLAYS) * [replay]
        for number, step in enumerate((replay, eager, replay, *at_last)):
            latest = run(step, number)
            if step is eager:
                found = found or latest
            if is_open:
                try:
                    judging.send(latest)
                except StopIteration as end:
                    verdict, is_open = end.value, False
            # A rank that knows goes on for those that do not yet: each step needs all of them.
            if number not in (0, 2) and not any_says(is_open):
                break
        assert found is not None
        return verdict and named(verdict, found), found

    def named(verdict: Mismatch, found: _Run) -> Mismatch:
        """Say which tensor it is."""
        if verdict.place is None:
            return verdict
        place = verdict.place - found.num_outputs
        what = "what it returns" if place < 0 else names[place]
        return verdict._replace(detail=f"{verdict.detail}; farthest in {what}")

    if told is not None:
        told.gap = None  # of an earlier capture
    verdict, plain = compare(eager)
    if not any_says(verdict is not None) or not any_says(told is not None):
        return verdict

    def eager_and_told() -> Any:
        with nullcontext() if told is None else pretended():
            return eager()

    other, as_told = compare(eager_and_told)
    if told is None or other is not None:
        return verdict
    return told.compared(plain, as_told, left(start.tensors(), whole=whole))


def _judge() -> Generator[None, _Run, Mismatch | None]:
    """Take runs, and return what differs.

    They are of a replay, an eager one, a replay, eager ones, disturbed replays, and more replays.
    """
    replayed = yield
    runs = [(yield)]
    if len(replayed.tensors) != len(runs[0].tensors) or replayed.others != runs[0].others:
        detail = (
            "a step returns other things than its replay: a number, or another number of tensors"
        )
        return Mismatch(detail, is_later=False)
    first = range(replayed.num_first)
    gaps = _distances(replayed, runs[0])
    if not any(gaps):
        return None
    each_gap = [gaps]  # of an eager run; the least is the gap
    spreads = [0.0] * len(gaps)
    second = yield
    moved = _distances(replayed, second)
    # More than noise is no measure of any.
    between_replays = moved if max(moved) <= _ROUNDING else [0.0] * len(gaps)
    while len(runs) < _EAGER_RUNS:
        runs.append((yield))
        if len(runs[-1].tensors) != len(gaps):
            detail = "eager steps from the same state return another number of tensors each time"
            return Mismatch(detail, is_later=False)
        for other in runs[:-1]:
            spreads = [*map(max, spreads, _distances(other, runs[-1]))]
        each_gap.append(_distances(replayed, runs[-1]))
        gaps = [*map(min, *each_gap)]
        if _unmoved(moved, spreads):
            if max(spreads) <= _ROUNDING and not all(map(any, each_gap)):
                return None
            continue
        if all(_are_near(gaps, spreads, between_replays)):
            return None
    off = [i for i, near in enumerate(_are_near(gaps, spreads, between_replays)) if not near]
    rounded = [0.0] * len(gaps)

    def unexcused() -> list[int]:
        """Return where replays move too little, and it is not the eager runs that rounded."""
        found = _unmoved(moved, spreads)
        if not any(
            all(d <= _AS_REPLAYS * m for d, m in zip(gap, moved, strict=True)) for gap in each_gap
        ):
            return found
        return [i for i in found if not _is_rounding(spreads[i], rounded[i])]

    for _ in range(_DISTURBED):
        disturbed = yield
        # The first replay may be off itself.
        nearest = map(min, _distances(replayed, disturbed), _distances(second, disturbed))
        rounded = [
            max(r, d) if math.isfinite(d) else r for r, d in zip(rounded, nearest, strict=True)
        ]
        if not off and not unexcused():
            return None
    is_excusable = all(_is_rounding(gaps[i], rounded[i]) for i in off)
    num_heard, votes = 1, [0] * len(gaps)  # replays, but for the second; and those that are near
    while True:
        still = unexcused()
        if not still and all(2 * votes[i] > num_heard for i in off):
            return None
        if num_heard > _MORE_REPLAYS or not (still or is_excusable):
            break
        latest_replay = yield
        num_heard += 1
        moved = [*map(max, moved, _distances(replayed, latest_replay))]
        if off and is_excusable:
            apart = zip(*(_distances(latest_replay, run) for run in runs), strict=True)
            is_near = _are_near([*map(min, apart)], spreads, between_replays)
            votes = [*map(add, votes, is_near)]
    if still:
        farthest = max(still, key=spreads.__getitem__)
        there = moved[farthest]
        how = f"differ by {there:.1e} there" if there else "do not differ"
        detail = (
            f"eager steps from the same state end {spreads[farthest]:.1e} apart (relative to the "
            f"largest value) and replays {how}: the step depends on something that is not "
            "named, such as a counter or a generator"
        )
        return Mismatch(detail, not any(gaps[i] or spreads[i] for i in first), farthest)
    off = [i for i in off if 2 * votes[i] <= num_heard]
    worst = max(off, key=lambda i: gaps[i] - _MARGIN * spreads[i])
    detail = (
        f"{_STEPS} replays and {_STEPS} eager steps from the same state end {gaps[worst]:.1e} "
        f"apart (relative to the largest value), eager steps among themselves {spreads[worst]:.1e}"
    )
    return Mismatch(detail, not any(i in off for i in first), worst)


def _unmoved(moved: Sequence[float], spreads: Sequence[float]) -> list[int]:
    """Return where eager runs are about as far apart as anywhere, and replays much less."""
    least = max(spreads) / _MARGIN
    pairs = enumerate(zip(moved, spreads, strict=True))
    return [i for i, (m, s) in pairs if s >= least and not _MARGIN * m >= s]


def _is_rounding(distance: float, rounded: float) -> bool:
    """Return whether a tensor of two runs may be so far apart by rounding."""
    return distance <= min(_LOW_ROUNDING, _OF_ROUNDING * rounded)


def _are_near(
    gaps: Sequence[float], spreads: Sequence[float], between_replays: Sequence[float]
) -> list[bool]:
    """Return of each tensor whether a replay's is about as near as eager runs' to each other."""
    noise = [*map(max, spreads, between_replays)]
    # Small tensors may agree by luck, so each is allowed what is usual among those that do not.
    usual = statistics.median([s for s in noise if s] or [0.0])
    return [g <= _MARGIN * max(s, usual) for g, s in zip(gaps, noise, strict=True)]


def _distances(first: _Run, second: _Run) -> list[float]:
    pairs = itertools.zip_longest(first.tensors, second.tensors)
    return [a.distance(b) for a, b in pairs]
