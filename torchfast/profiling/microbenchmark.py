"""Which of two versions of a function is faster, and by how much.

A stopwatch around a call on a GPU times its launch, since the host does not wait. One call after
another times a moment of the machine, and a kernel that runs again over the same inputs finds them
in the L2 cache, where a training step would not have left them. So here

- **events** on the device's stream stand before and after each call, and the host waits for them
  only at the end of a block of calls;
- **the L2 cache is emptied** before each call, outside of its two events, by writing a buffer
  twice as large as the cache that the device reports;
- **the two take turns**, in random order, and what is compared is the quotient of the times of one
  round (`torchfast._core.measure` has the rounds, the interval and the verdict);
- **their results are compared** first: a version that is fast because it computes something else
  is found before it is timed.

On a CPU the clock of the host times blocks of calls, and no cache is emptied.

What it cannot do: functions so small that the host needs longer to launch their kernels than the
device to run them are timed at what the host takes, as they would be in an eager loop; capture
them into a graph to time the kernels. What a function puts on streams that it does not join at its
end is not timed. And a version that wins alone need not win in a whole step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal, final

import torch
from torch import Tensor

from torchfast._core.arguments import (
    check_callable,
    check_flag,
    check_positive,
    explain_keywords,
)
from torchfast._core.batches import map_batch, tensors
from torchfast._core.device import check_device, drain
from torchfast._core.measure import Measurement, Verdict, measure
from torchfast._core.rng import get_rng_state, set_rng_state
from torchfast.profiling.closeness import Outcome, check_close, differentiable, leaves_below

SpeedVerdict = Literal["first is faster", "second is faster", "no difference", "cannot tell"]

# Where a device does not say how large its L2 cache is; none is larger yet.
_UNKNOWN_L2_BYTES: Final = 128 * 2**20
_CPU: Final = torch.device("cpu")
_VERDICTS: Final[dict[Verdict, SpeedVerdict]] = {
    "faster": "first is faster",
    "slower": "second is faster",
    "no difference": "no difference",
    "cannot tell": "cannot tell",
}


@final
@dataclass(frozen=True, kw_only=True)
class SpeedComparison:
    """What `compare_speed` found. As a string it is one sentence.

    Attributes:
        first_ms: The median time of a call of the first function.
        second_ms: That of the second.
        speedup: How many times as fast the first is as the second, the median over rounds; below 1
            where it is slower.
        speedup_low: The lower bound of its interval, at 99 %.
        speedup_high: The upper bound.
        verdict: ``"first is faster"`` and ``"second is faster"`` where the interval does not reach
            1; ``"no difference"`` where all of it lies within ``smallest`` of 1; otherwise
            ``"cannot tell"``: the interval holds 1, but also differences that would matter.
        num_rounds: The rounds in which both were timed.
        calls_per_round: How often each was called in a round: of the first and of the second.
        device: Where.
        largest_difference: The largest difference of two results, over the largest magnitude of
            the first's; None if they were not compared.
    """

    first_ms: float
    second_ms: float
    speedup: float
    speedup_low: float
    speedup_high: float
    verdict: SpeedVerdict
    num_rounds: int
    calls_per_round: tuple[int, int]
    device: str
    largest_difference: float | None

    def __str__(self) -> str:
        times = f"first {self.first_ms:.4g} ms, second {self.second_ms:.4g} ms"
        factor, bounds = self.speedup, (self.speedup_low, self.speedup_high)
        if self.verdict == "second is faster":
            factor, bounds = 1 / factor, (1 / bounds[1], 1 / bounds[0])
            fact = f"second is {factor:.3g} times as fast as first"
        else:
            fact = f"first is {factor:.3g} times as fast as second"
        if self.verdict in ("no difference", "cannot tell"):
            fact = f"{self.verdict}: {fact}"
        return f"{fact} ({bounds[0]:.3g} to {bounds[1]:.3g}); {times}"

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON-ready builtins; None for a bound that is not known."""
        figures = dataclasses.asdict(self) | {"calls_per_round": list(self.calls_per_round)}
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in figures.items()
        }


@explain_keywords
def compare_speed(
    first: Callable[..., Any],
    second: Callable[..., Any],
    *args: Any,
    grad: bool = False,
    check: bool = True,
    tolerance: float | None = None,
    flush_l2: bool = True,
    smallest: float = 0.02,
    budget_s: float = 5.0,
    device: str | torch.device | None = None,
) -> SpeedComparison:
    """Time two versions of a function on the same arguments, in turns, until it is told.

    Both are called before anything is timed, which compiles what is compiled at its first
    call, and a few times more as a warm-up. State that they keep (BatchNorm's statistics, an
    argument that is changed in place) is changed by every call; global random generators are put
    back. Functions of keyword arguments are given as ``functools.partial``.

    Args:
        first: A function, module or compiled callable.
        second: Another that does the same.
        *args: What both are called with: tensors, nested containers of them, anything else.
        grad: Time the backward too: the gradients of whatever in the results can be
            differentiated, with respect to every leaf that it depends on. No ``.grad`` is written.
        check: Compare the results, and with ``grad`` the gradients of what both share, before the
            timing. Each gets a copy of the arguments for it, and the same random numbers.
        tolerance: The largest difference that is accepted, over the largest magnitude that the
            first computes. By default 1e-2 for bf16 and fp16, 1e-3 for fp32 (tf32 is within it)
            and 1e-7 for fp64; integers have to be equal.
        flush_l2: On CUDA, empty the L2 cache before each call. Without it calls follow each other
            as fast as they can, on warm caches.
        smallest: The smallest difference that matters, as a part.
        budget_s: When to end, told or not. The first calls and the check come on top.
        device: Where the work is done; by default where the arguments are, or else the results.

    Returns:
        Medians in milliseconds, and how many times as fast the first is, with an interval.

    Raises:
        TypeError: An argument of another type.
        ValueError: The functions differ in what they compute, ``grad=True`` finds nothing to
            differentiate, or the budget does not suffice for a few rounds.
        RuntimeError: A function that ran before failed while it was timed.

    Synchronizes: Before and after each block of calls, never between two calls.

    Example:
        >>> import torch
        >>> def once(x):
        ...     return x @ x
        >>> def four_times(x):
        ...     return [x @ x for _ in range(4)][0]
        >>> result = compare_speed(once, four_times, torch.ones(256, 256))
        >>> result.verdict
        'first is faster'
    """
    check_callable("first", first, "first(*args)")
    check_callable("second", second, "second(*args)")
    for name, flag in (("grad", grad), ("check", check), ("flush_l2", flush_l2)):
        check_flag(name, flag)
    for name, number in (("smallest", smallest), ("budget_s", budget_s)):
        check_positive(name, number)
    if tolerance is not None:
        check_positive("tolerance", tolerance)
    there = check_device(device) if device is not None else _device_of(first, args)
    if grad:
        args = map_batch(args, lambda t: t.detach().requires_grad_(t.requires_grad))
    works = {"first": _Work(first, args, grad=grad), "second": _Work(second, args, grad=grad)}
    rng = get_rng_state(there)
    try:
        with _in_force(there, grad=grad):
            outcomes = []
            for work in works.values():
                set_rng_state(rng, there)
                outcomes.append(work.run_once(copy_arguments=check))
            if grad:
                _check_differentiable(outcomes)
            difference = check_close(*outcomes, tolerance=tolerance) if check else None
            del outcomes  # the timing needs the memory
        measurement = measure(
            works,
            reference="second",
            device=there,
            budget_s=budget_s,
            smallest=smallest,
            around=lambda _: _in_force(there, grad=grad),
            synchronize=lambda: _drain(there),
            stopwatch=_EventStopwatch(there, flush_l2=flush_l2) if there.type == "cuda" else None,
        )
    finally:
        set_rng_state(rng, there)
    return _comparison(measurement, there, difference, budget_s)


@final
class _Work:
    """One of the two functions with its arguments: a call of it is what is timed."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], *, grad: bool) -> None:
        self._function = function
        self._args = args
        self._grad = grad
        self._leaves: list[Tensor] = []
        self._grad_outputs: list[Tensor] = []

    def __call__(self) -> None:
        result = self._function(*self._args)
        if self._grad:
            self._backward(differentiable(result))

    def run_once(self, *, copy_arguments: bool) -> Outcome:
        """Call the function, find out what can be differentiated, and return what it computes."""
        # Copies are made inside the graph: what is differentiated are the arguments themselves.
        args = map_batch(self._args, torch.clone) if copy_arguments else self._args
        result = self._function(*args)
        outputs = [t.detach() for t in tensors(result)]
        if not self._grad:
            return Outcome(outputs=outputs, gradients=[])
        roots = differentiable(result)
        self._leaves = leaves_below(roots)
        self._grad_outputs = [_direction(root) for root in roots]
        gradients = self._backward(roots) if roots else ()
        found = list(zip(self._leaves, gradients, strict=True))
        # What was asked for and is not reached stands there too: the other may reach it.
        known = {id(leaf) for leaf in self._leaves}
        asked = [t for t in tensors(self._args) if t.requires_grad and id(t) not in known]
        return Outcome(outputs=outputs, gradients=found + [(leaf, None) for leaf in asked])

    def _backward(self, roots: list[Tensor]) -> tuple[Tensor | None, ...]:
        # Not backward(): it would write .grad, and add to it at the next call.
        return torch.autograd.grad(roots, self._leaves, self._grad_outputs, allow_unused=True)


@final
class _EventStopwatch:
    """Times calls by events on the current stream, with a cold L2 cache before each.

    Without the flush there is one pair of events around all calls of a block.
    """

    def __init__(self, device: torch.device, *, flush_l2: bool) -> None:
        self._device = device
        self._buffer: Tensor | None = None
        if flush_l2:
            size = torch.cuda.get_device_properties(device).L2_cache_size
            num_bytes = 2 * size or _UNKNOWN_L2_BYTES
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self, work: Callable[[], object], units: int) -> float:
        num_pairs = units if self._buffer is not None else 1
        # Made beforehand and kept: creating an event takes as long as launching a kernel.
        while len(self._events) < num_pairs:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events.append(pair)
        events = self._events[:num_pairs]
        if self._buffer is None:
            events[0][0].record()
            for _ in range(units):
                work()
            events[0][1].record()
        else:
            for start, end in events:
                self._buffer.zero_()
                start.record()
                work()
                end.record()
        _drain(self._device)
        elapsed_ms: float = sum(start.elapsed_time(end) for start, end in events)
        return elapsed_ms / 1e3


@contextmanager
def _in_force(device: torch.device, *, grad: bool) -> Iterator[None]:
    """Make a GPU the current one, for its streams; and let gradients be recorded if asked."""
    with (
        torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
        torch.enable_grad() if grad else nullcontext(),
    ):
        yield


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    else:
        drain(device)


def _device_of(function: Callable[..., Any], args: tuple[Any, ...]) -> torch.device:
    """Return where a function works: an accelerator among its arguments or results, or the CPU."""
    for device in _devices(args):
        if device.type != "cpu":
            return device
    # Parameters in a closure may be on a GPU, and random numbers drawn there.
    is_used = torch.cuda.is_initialized()
    likely = torch.device("cuda", torch.cuda.current_device()) if is_used else _CPU
    rng = get_rng_state(likely)
    try:
        with torch.no_grad():
            result = function(*map_batch(args, torch.clone))
    finally:
        set_rng_state(rng, likely)
    return next((device for device in _devices(result) if device.type != "cpu"), _CPU)


def _devices(value: object) -> Iterator[torch.device]:
    return (tensor.device for tensor in tensors(value))


def _direction(root: Tensor) -> Tensor:
    """Return what a result is differentiated along: 1 for a loss, else noise.

    Ones would do for the time, and hide wrong gradients: of a softmax they are zero.
    """
    if root.numel() == 1:
        return torch.ones_like(root)
    generator = torch.Generator(root.device).manual_seed(0)
    noise = torch.randn(root.shape, generator=generator, device=root.device)
    return torch.empty_like(root).copy_(noise)


def _check_differentiable(outcomes: list[Outcome]) -> None:
    for name, outcome in zip(("first", "second"), outcomes, strict=True):
        if all(gradient is None for _, gradient in outcome.gradients):
            raise ValueError(
                f"grad=True, but nothing that {name} returns depends on a tensor that requires a "
                "gradient; give an argument requires_grad=True, or leave grad out"
            )


def _comparison(
    measurement: Measurement, device: torch.device, difference: float | None, budget_s: float
) -> SpeedComparison:
    if "first" in measurement.failed:
        raise RuntimeError(
            f"first failed while it was timed, though it ran before: {measurement.failed['first']}"
        )
    ratio = measurement.ratio("first")
    first, second = measurement.timing("first"), measurement.timing("second")
    if first is None or second is None or math.isinf(ratio.high):
        raise ValueError(
            f"budget_s={budget_s:g} was used up after {ratio.num_rounds} rounds of the two, and "
            "three are needed; raise it, or time a smaller piece"
        )
    return SpeedComparison(
        first_ms=first.median_ms,
        second_ms=second.median_ms,
        speedup=1 / ratio.ratio,
        speedup_low=1 / ratio.high,
        speedup_high=1 / ratio.low,
        verdict=_VERDICTS[ratio.verdict],
        num_rounds=ratio.num_rounds,
        calls_per_round=(first.units_per_block, second.units_per_block),
        device=str(device),
        largest_difference=difference,
    )
