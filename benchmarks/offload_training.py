"""What offloading saves and costs in training: the 1.1B Llama with its head and AdamW.

    PYTHONPATH=. python benchmarks/offload_training.py [--limit-s 500] [--modes eager graph]
        [--size smoke] [--device cpu] [--out FILE]

A step is forward, backward, clipping and update by a `TrainStep`, on 4 x 4096 tokens. The plain arm
stays, and each other one takes turns with it: a time is the median of its turns, the ratio the
median of the quotients turn by turn. Peak memory is all that an arm takes, parameters and
optimizer state included; of a graph it is what lives between its steps and all of its pool. What is
sent is that of the last forward, in a graph of the one that was captured. What the bus allows is
what pinned copies carry to the host during the plain forward, or back during the plain backward,
whichever is less, and no more than is saved, as "offload" tells: a run without that arm does not
tell it. "offload auto, 10%" may wait for copies for a tenth of forward and backward, and so send
more than that.
"same" says that losses and gradient norms of the first steps are the plain arm's, bit for bit. An
update on the host has other bits than one on the device; of arms that have it, the file tells how
far their losses are from the plain arm's at most. What they send includes the gradients.

Each row is written as it comes, beside those of earlier runs (`benchmarks.result_rows`). What the
limit leaves no time for is named in the file.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.arms import (
    Arm,
    median_and_quartiles,
    parser_of,
    settings_of,
    steps_of_a_turn,
    take_turns,
    use_deterministic_algorithms,
)
from benchmarks.offload import bus_bytes_per_s
from benchmarks.result_rows import ResultRows
from benchmarks.taking_turns import free
from benchmarks.workloads import Workload, workload
from torchfast import CUDAGraphOptions, OffloadOptions, Plan, TrainStep

SETTLED = 13  # steps after which what is chosen by measurement has been
WARM_UP_STEPS = SETTLED + 3  # and the graph is replayed
MODES = ("eager", "graph")
LEVERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "offload": {"offload": "activations"},
    "offload auto": {"offload": "auto"},
    "offload auto, 10%": {"offload": OffloadOptions(activations="auto", max_slowdown=0.1)},
    "recompute": {"recompute": "blocks"},
    "recompute, offload": {"recompute": "blocks", "offload": "activations"},
    "offload optimizer": {"offload": "optimizer"},
    "offload all": {"offload": "all"},
    "offload parameters": {"offload": "parameters"},
}
UPDATED_ON_HOST = ("offload optimizer", "offload all", "offload parameters")
NOT_IN_A_GRAPH = ("offload parameters",)


class Training(Arm):
    """Training with one set of levers."""

    def __init__(self, name: str, made: Workload, mode: str, device: str) -> None:
        super().__init__(device)
        self.name, self.mode = name, mode
        self.is_cuda = device == "cuda"
        free()  # a graph that is gone has left the segments of its pool
        self.base_bytes = held_bytes() if self.is_cuda else 0
        torch.manual_seed(0)
        batch = made.batches()[0]
        self.batch = tuple(tensor.to(torch.device(device)) for tensor in batch)
        # The eager steps of a check would count as sent in the step that captures.
        graphs = CUDAGraphOptions(warm_up_steps=SETTLED, check=False)
        plan = Plan(
            precision="bf16" if self.is_cuda else "as_given",
            cuda_graph=graphs if mode == "graph" else False,
            **LEVERS[name],
        )
        model = made.build().to(device)
        optimizer = partial(torch.optim.AdamW, lr=made.lr, fused=True)
        self.step = TrainStep(model, optimizer, made.loss_fn, plan, max_grad_norm=1.0)
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.activation_bytes = 0
        for _ in range(WARM_UP_STEPS):
            before = self._sent_so_far()
            self.losses.append(self.step(self.batch))
            self.norms.append(torch.as_tensor(self.step.metrics["grad_norm"]).clone())
            # A replay sends without a count; what it sends was counted in the capture.
            sent = self._sent_so_far() - before
            if sent or mode == "eager":
                self.activation_bytes = sent
        self.sent_bytes = self._sent()
        self.peak_bytes = self._peak() if self.is_cuda else None

    def run(self) -> object:
        """Train one step."""
        return self.step(self.batch)

    def _sent_so_far(self) -> int:
        return int(self.step.report().counters.get("offload_sent_bytes", 0))

    def _sent(self) -> int:
        """Return what a step sends to the host, for its backward or for its update."""
        sent = self.activation_bytes
        if self.name in UPDATED_ON_HOST and self.is_cuda:
            parameters = list(self.step.model.parameters())
            waiting = [parameter for parameter in parameters if parameter.device.type == "cpu"]
            sent += sum(parameter.nbytes for parameter in waiting or parameters)
        return sent

    def _peak(self) -> int:
        """Return what this arm takes at the peak of a step."""
        free()
        torch.cuda.synchronize()
        if self.mode == "graph":  # whose replays allocate nothing
            return held_bytes() - self.base_bytes
        torch.cuda.reset_peak_memory_stats()
        self.run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self.base_bytes

    def halves_s(self) -> tuple[float, float]:
        """Return what an eager forward takes, and its backward."""
        forwards, both = [], []
        for _ in range(4):
            forwards.append(self._timed(lambda: self.step.compute_loss(self.batch)))
            both.append(self._timed(lambda: self.step.forward_backward(self.batch)))
        forward_s, both_s = min(forwards), min(both)
        return forward_s, max(0.0, both_s - forward_s)

    def _timed(self, work: Any) -> float:
        self.synchronize()
        start = time.perf_counter()
        result = work()
        self.synchronize()
        del result
        return time.perf_counter() - start

    def close(self) -> None:
        """Put the model back, and let go of host memory."""
        self.step.close()


def held_bytes() -> int:
    """Return what tensors hold, and all that the pools of graphs have taken."""
    return sum(
        segment["allocated_size" if tuple(segment["segment_pool_id"]) == (0, 0) else "total_size"]
        for segment in torch.cuda.memory_snapshot()
    )


def measured(mode: str, args: argparse.Namespace, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each arm; one with "left_out" for what there was no time for."""
    made = workload("llama", args.size)
    names = [name for name in LEVERS if name in args.arms]
    plain: Training | None = None
    halves = 0.0, 0.0
    saved = 0
    try:
        for name in names:
            if time.monotonic() > deadline:
                yield {"arm": name, "left_out": "no time was left"}
                continue
            if mode == "graph" and name in NOT_IN_A_GRAPH:
                yield {"arm": name, "left_out": "no graph can hold it"}
                continue
            if plain is None:
                plain = Training("plain", made, mode, args.device)
                halves = plain.halves_s()
                steps = steps_of_a_turn(plain, args.block_s, fewest=2, most=50)
                steps = 1 if args.size == "smoke" else steps
            try:
                arm = plain if name == "plain" else Training(name, made, mode, args.device)
            except torch.OutOfMemoryError as error:
                yield {"arm": name, "left_out": str(error).splitlines()[0]}
                continue
            try:
                plain.times_ms.clear()
                take_turns(list(dict.fromkeys((plain, arm))), args.rounds, steps)
                if name == "offload":  # which sends all that may go
                    saved = arm.sent_bytes
                yield row(arm, plain, args.bus, halves, saved)
            finally:
                if arm is not plain:
                    arm.close()
                del arm
                gc.collect()
    finally:
        if plain is not None:
            plain.close()


def row(
    arm: Training, plain: Training, bus: float | None, halves: tuple[float, float], saved: int
) -> dict[str, Any]:
    """Return the figures of one arm."""
    at_best = arm.name in ("offload", "offload auto", "offload auto, 10%")
    pairs = zip(plain.times_ms, arm.times_ms, strict=True)
    ratio, quartiles = median_and_quartiles([after / before for before, after in pairs])
    # Without the arm that sends all, nobody knows how much of it could be sent.
    allowed = min(int(bus * min(halves)), saved) if bus is not None and at_best and saved else None
    seen = (*plain.losses, *plain.norms), (*arm.losses, *arm.norms)
    same_bits = all(map(torch.equal, *seen))
    losses = [
        (float(own), float(other)) for own, other in zip(arm.losses, plain.losses, strict=True)
    ]
    both = (arm.peak_bytes, plain.peak_bytes)
    peaks = [peak for peak in both if peak is not None]
    return {
        "mode": arm.mode,
        "arm": arm.name,
        "ms": statistics.median(arm.times_ms),
        "time_ratio": ratio,
        "time_ratio_quartiles": quartiles,
        "peak_bytes": arm.peak_bytes,
        "saved_bytes": peaks[1] - peaks[0] if len(peaks) == 2 else None,
        "of_plain_peak": peaks[0] / peaks[1] if len(peaks) == 2 else None,
        "sent_bytes": arm.sent_bytes,
        "forward_s": halves[0],
        "backward_s": halves[1],
        "allowed_bytes": allowed,
        "of_allowed": arm.sent_bytes / allowed if allowed else None,
        "same_bits": None if arm.name in UPDATED_ON_HOST else same_bits,
        "loss_difference": max(abs(own - other) / abs(other) for own, other in losses),
        "turns_ms": list(arm.times_ms),  # the plain arm's are of the last pair only
    }


def main() -> None:
    """Measure every arm, print a table and write the figures."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--size", choices=("full", "smoke"), default="full")
    parser.add_argument("--arms", nargs="+", choices=LEVERS, default=list(LEVERS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["eager"])
    parser.add_argument("--block-s", type=float, default=1.0, help="seconds of a turn")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin nothing later")
    args = parser.parse_args()
    deadline = time.monotonic() + args.limit_s
    use_deterministic_algorithms()
    args.bus = bus_bytes_per_s(args.device)
    title = workload("llama", args.size).title
    print(title if args.bus is None else f"{title}; the bus reaches {args.bus / 1e9:.1f} GB/s")
    rows = ResultRows(args.out, ("arm", "mode"), settings_of(args))
    about = {"title": title, "bus_bytes_per_s": args.bus}
    print(
        f"{'mode':<6} {'arm':<20} {'ms':>9} {'ratio':>7} {'peak GB':>8} {'saved GB':>9} "
        f"{'sent GB':>8} {'of allowed':>10}  bits"
    )
    for mode in args.modes:
        if mode == "graph" and args.device != "cuda":
            continue
        for found in measured(mode, args, deadline):
            if "left_out" in found:
                rows.leave_out(found["arm"], mode, found["left_out"], **about)
                print(f"left out: {found['arm']}, {mode}: {found['left_out']}")
            else:
                rows.add(found, **about)
                print(line(found), flush=True)


def line(found: dict[str, Any]) -> str:
    """Return a row for the terminal."""
    peak, saved = (gigabytes(found[key]) for key in ("peak_bytes", "saved_bytes"))
    share = "-" if found["of_allowed"] is None else f"{found['of_allowed']:.0%}"
    return (
        f"{found['mode']:<6} {found['arm']:<20} {found['ms']:>9.2f} {found['time_ratio']:>7.3f} "
        f"{peak:>8} {saved:>9} {gigabytes(found['sent_bytes']):>8} {share:>10}  "
        f"{alike(found)}"
    )


def alike(found: dict[str, Any]) -> str:
    """Return for a column whether an arm has the plain arm's numbers."""
    if found["same_bits"] is None:
        return f"to {found['loss_difference']:.1e}"
    return "same" if found["same_bits"] else "OTHER"


def gigabytes(num_bytes: int | None) -> str:
    """Return bytes for a column, or a dash where the device does not tell."""
    return "-" if num_bytes is None else f"{num_bytes / 1e9:.2f}"


if __name__ == "__main__":
    main()
