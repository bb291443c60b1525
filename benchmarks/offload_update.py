"""What an update on the host costs, and what clipping makes it wait for: a Llama with AdamW.

    PYTHONPATH=. python benchmarks/offload_update.py [--accumulate 1 8] [--arms device host]
        [--limit-s 500] [--size smoke] [--device cpu] [--out FILE]

A step is forward, backward, clipping and update, in a plain loop. "device" updates there; "host" by
an `OffloadedOptimizer`, behind the backward. Under "overlap" gradients are copied in the backward,
and the update of those that have come begins there, on the guess that clipping leaves them as they
are. It does in these arms, whose norm is below the limit, as that of most steps of a run is; those
that are "always clipped" change every gradient in each step, and in those that are "unclipped"
nothing waits for a norm. The plain arm stays, and each other one takes turns with it: a time is the
median of its turns, the ratio the median of the quotients turn by turn. Those under "overlap" take
turns with themselves, too, where the same update waits for the backward ("waiting"): two optimizers
differ by some per cent through where their memory lies. "update" is what clipping and update take
in steps of their own, in which the device is waited for before: there is nothing that an update
could begin beside.

"same" says of an arm on the host that losses are those of the first there whose gradients are
alike, bit for bit; of that one it says nothing. "begun" are updates that began in the backward,
"taken back" those of them whose guess was wrong. Each row is written as it comes, beside those of
earlier runs (`benchmarks.result_rows`). What the limit leaves no time for is named in the file.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.arms import (
    Arm,
    median_and_quartiles,
    parser_of,
    settings_of,
    steps_of_a_turn,
    take_turns,
    use_deterministic_algorithms,
)
from benchmarks.result_rows import ResultRows
from benchmarks.workloads import Workload, workload
from torchfast import OffloadedOptimizer

FIRST_STEPS = 6  # memory is pinned, libraries make their workspaces; the first guesses are taken
FEW = 3  # steps whose update is timed by itself


class How(NamedTuple):
    """How an arm updates."""

    on_host: bool
    overlaps: bool = False
    max_norm: float | None = 1e9

    @property
    def changes_gradients(self) -> bool:
        """Whether clipping makes them smaller."""
        return self.max_norm == ALWAYS


ALWAYS = 1e-3  # the largest norm: that of these gradients is far above
ARMS = {
    "device": How(on_host=False),
    "host": How(on_host=True),
    "host, overlap": How(on_host=True, overlaps=True),
    "host, overlap, unclipped": How(on_host=True, overlaps=True, max_norm=None),
    "host, always clipped": How(on_host=True, max_norm=ALWAYS),
    "host, overlap, always clipped": How(on_host=True, overlaps=True, max_norm=ALWAYS),
}


class Waiting(Arm):
    """Training whose overlap is off meanwhile.

    Args:
        training: With an overlap.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(training.device)
        self._training = training

    def turn(self, steps: int) -> None:
        """Time some steps."""
        self._training.optimizer.overlap = False
        super().turn(steps)
        self._training.optimizer.overlap = True

    def run(self) -> Tensor:
        """Train one step."""
        return self._training.run()


class Training(Arm):
    """Training with an update in one place."""

    def __init__(self, name: str, made: Workload, accumulate: int, device: str) -> None:
        super().__init__(device)
        self.name, self.how, self.accumulate = name, ARMS[name], accumulate
        self.loss_fn = made.loss_fn
        torch.manual_seed(0)
        self.batch = tuple(tensor.to(torch.device(device)) for tensor in made.batches()[0])
        self.model = made.build().to(device)
        make = partial(torch.optim.AdamW, lr=made.lr, fused=True)
        parameters = self.model.parameters()
        self.optimizer: Any = (
            OffloadedOptimizer(parameters, make, overlap=self.how.overlaps)
            if self.how.on_host
            else make(parameters)
        )
        self.losses = [self.run() for _ in range(FIRST_STEPS)]

    def run(self) -> Tensor:
        """Train one step, in which nobody waits but who has to."""
        loss = self._forward_backward()
        self._update()
        return loss

    def update_ms(self) -> float:
        """Return what the update takes by itself, once the backward is over."""
        times_ms = []
        for _ in range(FEW):
            self._forward_backward()
            self.synchronize()
            start = time.perf_counter()
            self._update()
            self.synchronize()
            times_ms.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times_ms)

    def _forward_backward(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(self.accumulate):
            with self._autocast():
                loss = self.loss_fn(self.model, self.batch)
            (loss / self.accumulate).backward()
        return loss.detach().clone()

    def _update(self) -> None:
        if self.how.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.how.max_norm)
        self.optimizer.step()

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.device == "cuda" else nullcontext()

    def peak_bytes(self) -> int:
        """Return what lives at the peak of a step; 0 where the device does not tell."""
        if self.device != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats()
        self.run()
        return torch.cuda.max_memory_allocated()

    def close(self) -> None:
        """Take hooks off."""
        if self.how.on_host:
            self.optimizer.close()


def measured(
    args: argparse.Namespace, accumulate: int, deadline: float
) -> Iterator[dict[str, Any]]:
    """Yield a row for each arm; one with "left_out" for what there was no time for."""
    first: dict[bool, list[Tensor]] = {}
    for name in ARMS:
        if name not in args.arms:
            continue
        if time.monotonic() > deadline:
            yield {"arm": name, "left_out": "no time was left"}
            continue
        found = measured_arm(name, args, accumulate, first)
        gc.collect()  # what the next arm's peak is measured beside
        yield found


def measured_arm(
    name: str, args: argparse.Namespace, accumulate: int, first: dict[bool, list[Tensor]]
) -> dict[str, Any]:
    """Return the row of an arm, which takes turns with the plain one.

    Args:
        name: Which.
        args: How it is measured.
        accumulate: Micro-batches of a step.
        first: The losses of the first arm on the host that changes gradients, and of the first that
            does not.
    """
    made = workload("llama", args.size)
    arm = Training(name, made, accumulate, args.device)
    peak_bytes = arm.peak_bytes()
    same_bits = None  # an update on the device is another implementation, the first is itself
    if arm.how.on_host and arm.how.changes_gradients in first:
        same_bits = all(map(torch.equal, first[arm.how.changes_gradients], arm.losses))
    elif arm.how.on_host:
        first[arm.how.changes_gradients] = arm.losses
    # Two at a time, or memory on the host would not do.
    plain = arm if name == "device" else Training("device", made, accumulate, args.device)
    waiting = Waiting(arm) if arm.how.overlaps else None
    arms: list[Arm] = [*dict.fromkeys((plain, arm)), *([waiting] if waiting else [])]
    try:
        steps = steps_of_a_turn(plain, args.block_s, fewest=2, most=50)
        take_turns(arms, args.rounds, 1 if args.size == "smoke" else steps)
        update_ms = arm.update_ms()
    finally:
        for each in arms:
            each.close()
    ratio, quartiles = _quotients(arm, plain)
    waiting_ratio, waiting_quartiles = _quotients(arm, waiting) if waiting else (None, None)
    return {
        "arm": arm.name,
        "accumulate": arm.accumulate,
        "threads": torch.get_num_threads() if arm.how.on_host else None,
        "ms": statistics.median(arm.times_ms),
        "time_ratio": ratio,
        "time_ratio_quartiles": quartiles,
        "waiting_ratio": waiting_ratio,
        "waiting_ratio_quartiles": waiting_quartiles,
        "update_ms": update_ms,
        "peak_bytes": peak_bytes,
        "same_bits": same_bits,
        "counters": arm.optimizer.counters() if arm.how.on_host else None,
        "turns_ms": list(arm.times_ms),
    }


def _quotients(arm: Arm, other: Arm) -> tuple[float, list[float]]:
    pairs = zip(arm.times_ms, other.times_ms, strict=True)
    return median_and_quartiles([arm_ms / other_ms for arm_ms, other_ms in pairs])


def main() -> None:
    """Measure every arm, print a table and write the figures."""
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--size", choices=("full", "smoke"), default="full")
    parser.add_argument("--accumulate", nargs="+", type=int, default=[1], metavar="N")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--block-s", type=float, default=2.0, help="seconds of a turn")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin nothing later")
    args = parser.parse_args()
    deadline = time.monotonic() + args.limit_s
    use_deterministic_algorithms()
    rows = ResultRows(args.out, ("arm", "accumulate"), settings_of(args))
    about = {"title": workload("llama", args.size).title}
    print(
        f"{'accumulate':>10} {'arm':<29} {'ms':>9} {'ratio':>7} {'waiting':>8} {'update ms':>10} "
        f"{'peak GB':>8}"
    )
    for accumulate in args.accumulate:
        for found in measured(args, accumulate, deadline):
            if "left_out" in found:
                rows.leave_out(found["arm"], str(accumulate), found["left_out"], **about)
                print(f"left out: {found['arm']}, {accumulate}: {found['left_out']}")
                continue
            rows.add(found, **about)  # after each: whoever interrupts keeps what there is
            waiting = "" if found["waiting_ratio"] is None else f"{found['waiting_ratio']:.3f}"
            bits = {None: "", True: "same", False: "OTHER"}[found["same_bits"]]
            print(
                f"{accumulate:>10} {found['arm']:<29} {found['ms']:>9.2f} "
                f"{found['time_ratio']:>7.3f} {waiting:>8} {found['update_ms']:>10.2f} "
                f"{found['peak_bytes'] / 1e9:>8.2f}  {bits} {found['counters'] or ''}",
                flush=True,
            )


if __name__ == "__main__":
    main()
