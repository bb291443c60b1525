"""What limits the step: one word, the figures that say so, and what to try.

The device is either idle or busy. If it is idle for a good part of the time, the largest cause of
that is the limit: batches (input-bound), waits of the host for the device (sync-bound), or a host
that does not launch fast enough (launch-bound). No graph can hold a wait, so that waits come before
late launches where they cost at least half as much. If it is busy, but with collectives that
nothing hides, communication is; with copies of batches beside which nothing runs, the input.
Otherwise its own work is: arithmetic (compute-bound) or moving data (bandwidth-bound). A step that
is busy with arithmetic, on which no fault was found, is fine: there the machine is the limit. A
device that is idle is never called fine. If most of that idle time has no cause in the host, the
verdict goes by what the kernels are, and says that the cause is unknown.

A profiler makes the host slower, so that a step may look launch-bound which is not. Where it is
known what a step took before the profiler began, the host's idle time is that of its own pace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

from torchfast.profiling.figures import BY_HOST, Figures
from torchfast.profiling.findings import Finding, is_replayed
from torchfast.profiling.gaps import Gap

Class = Literal[
    "input-bound",
    "sync-bound",
    "launch-bound",
    "communication-bound",
    "bandwidth-bound",
    "compute-bound",
    "fine",
]

# Below this the gaps between kernels are what every eager step has; a graph closes them too.
IDLE_SHARE: Final = 0.10
# Waits that cost this much of what late launches cost are what to take out first.
WAITS_FIRST: Final = 0.5
# Collectives that hide behind the backward pass cost nothing.
EXPOSED_SHARE: Final = 0.10
# A model whose kernels are half arithmetic gains more from faster arithmetic than from fusion.
ARITHMETIC_SHARE: Final = 0.5
# A line that no fault was found at is named where it costs this much of the idle time of a class.
LINE_SHARE: Final = 0.5
# On a machine without a device: a host that waits longer for batches than this is short of them.
HOST_DATA_SHARE: Final = 0.2

_IDLE_CLASSES: Final[dict[Class, tuple[str, ...]]] = {
    "input-bound": ("data",),
    "launch-bound": ("launch", "python", "compile", "allocation"),
}
_CAUSES: Final[dict[Class, tuple[str, ...]]] = {**_IDLE_CLASSES, "sync-bound": ("sync",)}
_KINDS: Final[dict[str, tuple[str, ...]]] = {
    "input-bound": ("slow-data", "pageable-copies"),
    "sync-bound": ("host-sync", "boolean-mask", "big-log-sync"),
    "launch-bound": ("recompiles", "slow-python", "unfused-optimizer", "tiny-kernels"),
    "bandwidth-bound": ("dtype-casts", "channels-first-convolution", "unfused-optimizer"),
    "compute-bound": ("fp32-matmul", "channels-first-convolution"),
}
_LEVERS: Final[dict[str, str]] = {
    "input-bound": "more workers (torchfast.sweep_workers), or trainer.prefetch(loader)",
    "sync-bound": "read values every so many steps rather than in each",
    "launch-bound": "launch the step as one CUDA graph: plan='exact' or 'fast'",
    "communication-bound": "larger buckets, more overlap with the backward pass, fewer bytes "
    "(bf16 gradients), or more work per step on each device",
    "bandwidth-bound": "fuse: torch.compile (plan='fast'), a fused optimizer, bf16",
    "compute-bound": "lower precision (plan='fast' for bf16, float8 where the device has it)",
    "fine": "nothing: the device computes all the time, on its fastest units",
}
# The host launches one graph a step, and is late with that: what is left is to launch fewer.
_REPLAYED_LEVER: Final = (
    "run several steps in each replay: trainer.fit(unroll=8), or trainer.steps over "
    "trainer.prefetch(loader, unroll=8); or give the device more work in a step"
)
_UNKNOWN_LEVER: Final = (
    "look at the gaps in the timeline of the page: work that waits for another stream or device, "
    "or kernels so short that the time between them counts (fuse them: plan='fast')"
)
_HOST_LEVER: Final = "look at the operators that take most time; on a GPU, profile it there"


class Verdict(NamedTuple):
    """What limits the step.

    Attributes:
        name: The class; ``"class"`` in JSON.
        line: ``file:line`` that is to blame most, if one is.
        evidence: The figures that say so, by name.
        text: The same for a person.
        lever: What to try.
    """

    name: Class
    line: str | None
    evidence: dict[str, float]
    text: str
    lever: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "class": self.name,
            "line": self.line,
            "evidence": self.evidence,
            "text": self.text,
            "lever": self.lever,
        }


def judge(figures: Figures, findings: Sequence[Finding]) -> Verdict:
    """Return what limits the step, from the figures and faults of a trace."""
    if not figures.launched:
        return _judge_host(figures, findings)
    f = figures
    late = {
        name: sum(f.idle_by_cause.get(cause, 0.0) for cause in causes)
        for name, causes in _IDLE_CLASSES.items()
    }
    # What is late without the waits, at the host's own pace, is divided by who was seen to be.
    seen = sum(late.values())
    classes: dict[Class, float] = {
        name: f.late_us * us / seen if seen else 0.0 for name, us in late.items()
    }
    classes["launch-bound"] += 0.0 if seen else f.late_us
    classes["sync-bound"] = f.waits_us
    # What no late host explains: the work was launched in time, or its launch is not in the trace.
    unexplained = f.idle_us - sum(f.idle_by_cause.get(cause, 0.0) for cause in BY_HOST)
    idle_us = sum(classes.values()) + unexplained
    worst = max(classes, key=lambda name: classes[name])
    exposed = f.exposed_communication_us
    evidence = {
        "step_ms": f.step_us / 1e3,
        "busy_share": f.share(f.busy_us),
        "idle_share": f.share(f.idle_us),
        **{f"idle_{cause}_share": f.share(us) for cause, us in sorted(f.idle_by_cause.items())},
        "waits_share": f.share(f.waits_us),
        "late_share": f.share(f.late_us),
        "pace": f.pace,
        "exposed_communication_share": f.share(exposed),
        "exposed_h2d_share": f.share(f.exposed_h2d_us),
        "arithmetic_share": f.of_kernels(f.arithmetic_us),
        "tensor_core_share": f.tensor_core_us / f.arithmetic_us if f.arithmetic_us else 0.0,
        "launches_a_step": f.num_launches / f.num_steps,
        "tiny_kernel_share": f.num_tiny / f.num_kernels if f.num_kernels else 0.0,
    }
    enough = IDLE_SHARE * f.window_us
    first = max(enough, WAITS_FIRST * classes[worst])
    if worst == "launch-bound" and classes["sync-bound"] >= first:
        worst = "sync-bound"
    if exposed >= enough and exposed > classes[worst]:
        name: Class = "communication-bound"
    elif f.exposed_h2d_us >= enough and f.exposed_h2d_us > classes[worst]:
        name = "input-bound"
        text = (
            f"for {f.share(f.exposed_h2d_us):.0%} of the time batches are copied to the device "
            f"and nothing else runs ({f.per_step_ms(f.exposed_h2d_us):.2f} ms a step)"
        )
        return _verdict(name, evidence, text, findings)
    elif idle_us >= enough and classes[worst] > 0 and classes[worst] >= unexplained:
        name = worst
    else:
        moves_data = f.of_kernels(f.arithmetic_us) < ARITHMETIC_SHARE
        name = "bandwidth-bound" if moves_data else "compute-bound"
        if idle_us >= enough:
            evidence["cause_unknown_share"] = f.share(unexplained)
            found = _verdict(name, evidence, _text_unknown(f, unexplained), findings)
            return found._replace(lever=_UNKNOWN_LEVER)
        if not moves_data and not findings:
            name = "fine"
    found = _verdict(name, evidence, _text(name, f, classes), findings)
    if name == "launch-bound" and is_replayed(f):
        found = found._replace(lever=_lever_of_replays(findings))
    return found if found.line else found._replace(line=_line_of_most(f, _CAUSES.get(name, ())))


def _lever_of_replays(findings: Sequence[Finding]) -> str:
    """Return what to try where the host is late with replays: to do less else, or fewer of them."""
    others = ("recompiles", "slow-python")
    own = next((finding.lever for finding in findings if finding.kind in others), None)
    return _REPLAYED_LEVER if own is None else f"{own}; or {_REPLAYED_LEVER}"


def _line_of_most(figures: Figures, causes: Sequence[str]) -> str | None:
    """Return the line that costs most idle time of some causes, if it costs a good part of it."""
    gaps = [gap for gap in figures.gaps if gap.cause in causes]
    totals: dict[str | None, float] = defaultdict(float)
    for gap in gaps:
        totals[gap.line] += gap.length
    line = max(totals, key=lambda line: totals[line], default=None)
    return line if totals[line] >= LINE_SHARE * sum(gap.length for gap in gaps) else None


def in_order(findings: Sequence[Finding], verdict: Verdict) -> list[Finding]:
    """Return findings in the order in which they matter: those first that the verdict speaks of."""
    first = _KINDS.get(verdict.name, ())
    return sorted(findings, key=lambda finding: finding.kind not in first)


def _judge_host(figures: Figures, findings: Sequence[Finding]) -> Verdict:
    f = figures
    waiting = f.host_phases.get("data_wait", 0.0)
    evidence = {
        "step_ms": f.step_us / 1e3,
        "data_wait_share": f.share(waiting),
        **{f"host_{phase}_share": f.share(us) for phase, us in f.host_phases.items()},
    }
    if f.share(waiting) >= HOST_DATA_SHARE:
        text = f"the host waits for batches {f.share(waiting):.0%} of the time"
        return _verdict("input-bound", evidence, text, findings)
    text = (
        "no work of a device is in this trace; the host computes, and waits for batches "
        f"{f.share(waiting):.0%} of the time"
    )
    found = _verdict("compute-bound", evidence, text, findings)
    return found._replace(lever=_HOST_LEVER)


def _verdict(
    name: Class, evidence: dict[str, float], text: str, findings: Sequence[Finding]
) -> Verdict:
    fitting = [f for f in findings if f.kind in _KINDS.get(name, ())]
    line = next((f.line for f in fitting if f.line), None)
    lever = fitting[0].lever if fitting else _LEVERS[name]
    return Verdict(name, line, {k: round(v, 6) for k, v in evidence.items()}, text, lever)


def _text(name: Class, f: Figures, classes: dict[Class, float]) -> str:
    if name in classes:
        us = classes[name]
        what = {
            "input-bound": "waiting for batches",
            "sync-bound": "idle because the host had waited for it, or made what it waited for",
            "launch-bound": "waiting for the host to launch",
        }[name]
        at_pace = " under the profiler; at the host's own pace, " if f.pace < 1.0 else "; "
        return (
            f"the device is idle {f.share(f.idle_us):.0%} of the time{at_pace}for "
            f"{f.share(us):.0%} it is {what} ({f.own_ms(us):.2f} ms a step)"
        )
    if name == "communication-bound":
        us = f.exposed_communication_us
        return (
            f"collectives run {f.share(f.communication_us):.0%} of the time, and for "
            f"{f.share(us):.0%} of it nothing else does ({f.per_step_ms(us):.2f} ms a step)"
        )
    part = f.of_kernels(f.arithmetic_us)
    return (
        f"the device is busy {f.share(f.busy_us):.0%} of the time; {part:.0%} of its kernel time "
        f"is products, convolutions and attention, {1 - part:.0%} moves data"
    )


def _text_unknown(f: Figures, unexplained: float) -> str:
    part = f.of_kernels(f.arithmetic_us)
    return (
        f"the device is idle {f.share(f.idle_us):.0%} of the time; for {f.share(unexplained):.0%} "
        "the cause is unknown: the host was not late, or the trace does not say; of its kernel "
        f"time {part:.0%} is products, convolutions and attention"
    )


def largest_gaps(figures: Figures, number: int = 10) -> list[Gap]:
    """Return the longest gaps, the longest first."""
    return sorted(figures.gaps, key=lambda gap: -gap.length)[:number]
