"""What is wrong with memory, if anything: three ways to run out of it that look alike at the end.

- **A leak**: tensors are kept. What lives after a step rises from step to step; no setting helps.
- **Fragmentation**: as much lives as ever, but more and more is reserved for it, or much more than
  was ever in use at once. The settings of the allocator help.
- **A lack**: what is needed at once is nearly all that there is. A smaller step helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from torchfast.memory.samples import MemorySample, trend

Verdict = Literal["healthy", "leak", "fragmentation", "short", "unknown"]

LEAST_SAMPLES: Final = 16
_FULL: Final = 0.9  # of what there is; above, the next longer batch may not fit
_WASTE: Final = 0.25  # of what is reserved, beyond what was ever in use at once
_ROUNDED: Final = 0.2  # of what is allocated


@dataclass(frozen=True, kw_only=True)
class GrowingLine:
    """A line of code whose tensors stay.

    Attributes:
        line: ``file:line in function``.
        num_bytes: By how much what it allocated has grown while lines were noted.
    """

    line: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryDiagnosis:
    """What the samples say.

    Attributes:
        verdict: ``"healthy"``, ``"leak"``, ``"fragmentation"``, ``"short"``, or ``"unknown"`` as
            long as there are too few samples.
        evidence: The figures behind it.
        remedy: What to do; empty if nothing.
        slope_bytes: What lives after a step grows by, a step.
        reserved_slope_bytes: The same of what is reserved.
        lines: Of a leak, the lines whose tensors stay, most first; empty if not found out.
    """

    verdict: Verdict
    evidence: str
    remedy: str = ""
    slope_bytes: float = 0.0
    reserved_slope_bytes: float = 0.0
    lines: tuple[GrowingLine, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready builtins."""
        return {
            "verdict": self.verdict,
            "evidence": self.evidence,
            "remedy": self.remedy,
            "slope_bytes": self.slope_bytes,
            "reserved_slope_bytes": self.reserved_slope_bytes,
            "lines": [[each.line, each.num_bytes] for each in self.lines],
        }

    def __str__(self) -> str:
        """Return the verdict, the figures, the lines and the remedy."""
        said = f"{self.verdict}: {self.evidence}"
        for each in self.lines:
            said += f"; {mega(each.num_bytes)} more from {each.line}"
        return f"{said}; {self.remedy}" if self.remedy else said


def judge(
    samples: Sequence[MemorySample],
    *,
    limit_bytes: int | None,
    noise_bytes: int,
    has_segments: bool = True,
    expandable: bool = False,
    private_bytes: int = 0,
    pools_free_bytes: int = 0,
) -> MemoryDiagnosis:
    """Tell a leak from fragmentation from a lack of memory.

    Args:
        samples: In the order of their steps, taken at the same point of each.
        limit_bytes: What there is, if known.
        noise_bytes: Growth below it means nothing.
        has_segments: Whether memory is reserved in segments.
        expandable: Whether these grow.
        private_bytes: What pools of graphs have reserved.
        pools_free_bytes: What is reserved in each `MemoryPool` and in no tensor.
    """
    if len(samples) < LEAST_SAMPLES:
        return MemoryDiagnosis(
            verdict="unknown", evidence=f"{len(samples)} of {LEAST_SAMPLES} samples"
        )
    steps = [s.step for s in samples]
    lives = trend(steps, [s.allocated_bytes for s in samples])
    held = trend(steps, [s.reserved_bytes for s in samples])
    first, last = samples[0], samples[-1]
    span = last.step - first.step
    peak = max(s.peak_bytes for s in samples)
    retries = last.num_retries - first.num_retries
    ooms = last.num_ooms - first.num_ooms

    def verdict(kind: Verdict, evidence: str, remedy: str = "") -> MemoryDiagnosis:
        return MemoryDiagnosis(
            verdict=kind,
            evidence=evidence,
            remedy=remedy,
            slope_bytes=lives.slope,
            reserved_slope_bytes=held.slope,
        )

    if lives.rises and lives.growth >= noise_bytes:
        evidence = (
            f"what lives after a step has grown by {mega(lives.growth)} in {span} steps, "
            f"{lives.slope:,.0f} bytes a step"
        )
        if limit_bytes is not None:
            left = max(0, limit_bytes - max(last.reserved_bytes, peak))
            evidence += f", which fills what is left in about {left / lives.slope:,.0f} steps"
        return verdict(
            "leak",
            evidence,
            "look for tensors that are kept from step to step: a loss that is summed up or put "
            "into a list without .detach(), outputs in a list, a cache without a bound",
        )
    waste = last.reserved_bytes - max(peak, last.allocated_bytes)
    full = limit_bytes is not None and last.reserved_bytes >= _FULL * limit_bytes
    spreads = held.rises and held.growth >= noise_bytes
    if has_segments and waste >= _WASTE * last.reserved_bytes and (retries or full or spreads):
        evidence = (
            f"{mega(last.reserved_bytes)} are reserved, and never more than {mega(peak)} were in "
            f"use at once; {last.fragmentation:.0%} lies in pieces between tensors"
        )
        evidence += f", {retries} allocation retries in {span} steps" if retries else ""
        evidence += f", reserved grows by {held.slope:,.0f} bytes a step" if spreads else ""
        remedy = _setting(last, waste, expandable, private_bytes, pools_free_bytes)
        return verdict("fragmentation", evidence, remedy)
    needed = peak if has_segments else last.reserved_bytes
    if ooms or retries or (limit_bytes is not None and needed >= _FULL * limit_bytes):
        evidence = f"{mega(needed)} are in use at once"
        evidence += f", of {mega(limit_bytes)}" if limit_bytes is not None else ""
        evidence += f", {retries} allocation retries" if retries else ""
        evidence += f", out of memory {ooms} times" if ooms else ""
        remedy = "a smaller batch with accumulate=, bf16, or recomputing activations needs less"
        if limit_bytes is not None and needed < _FULL * limit_bytes:
            remedy = (
                "another process, or a library beside torch, may hold the rest of the device "
                f"(nvidia-smi shows it); {remedy}"
            )
        return verdict("short", evidence, remedy)
    return verdict(
        "healthy",
        f"{mega(last.allocated_bytes)} live after a step, {mega(last.reserved_bytes)} are reserved",
    )


def _setting(
    last: MemorySample, waste: int, expandable: bool, private_bytes: int, pools_free_bytes: int
) -> str:
    """Return which setting helps, for this kind of waste."""
    if pools_free_bytes > waste / 2:
        return (
            f"{mega(pools_free_bytes)} of it are free in memory pools, which keep what they have "
            "had: let go of a pool, and of its tensors, when it is of no use any more"
        )
    if private_bytes > waste / 2:
        return (
            f"{mega(private_bytes)} of it belong to pools of graphs, which keep what they captured "
            "with: fewer shapes, or graphs that share a pool"
        )
    if last.rounding >= _ROUNDED:
        return (
            f"{last.rounding:.0%} of what is allocated is rounding: lower roundup_power2_divisions "
            "costs, more of them cost less; or leave it out"
        )
    if expandable:
        return (
            "segments grow already: keep the largest shape from changing (pad, or bucket by "
            "length), and call torch.cuda.empty_cache() after an evaluation with other sizes"
        )
    return (
        "AllocatorConfig(expandable_segments=True) before the program starts, as "
        "python -m torchfast env --preset variable-shapes prints it; where that is not to be had, "
        "max_split_size_mb"
    )


def mega(num_bytes: float) -> str:
    """Return bytes for a person."""
    return f"{num_bytes / 1e9:.2f} GB" if abs(num_bytes) >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
