"""Single faults that a trace shows, each with its line, its figure and the lever to try.

The verdict says what limits the step as a whole; a finding names one thing that costs time whatever
the limit is. Each rule has a threshold below which it says nothing, since every step has a few
casts, small kernels and copies that are not worth a change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from torchfast._core.shell import size
from torchfast.profiling import kernels
from torchfast.profiling.figures import (
    Figures,
    inside_steps,
    is_cast,
    is_fp32_product,
    is_tiny,
)
from torchfast.profiling.gaps import find_gaps
from torchfast.profiling.kernels import TINY_US
from torchfast.profiling.places import Places, heaviest, most_common
from torchfast.profiling.projection import Launched, phase_of, project
from torchfast.profiling.trace import Trace
from torchfast.profiling.waits import WaitSite, pageable_copies, wait_sites

# Parts of the window below which a cause of idle time is not worth a line.
_IDLE_SHARE: Final = 0.02
# One wait a step, at its end, costs next to nothing if the device is idle for less than this.
_WAIT_SHARE: Final = 0.02
# More waits in a step than a log line needs are a fault, even where the profiler hides their cost.
_WAITS_A_STEP: Final = 3.0
_DATA_SHARE: Final = 0.05
# Autocast around all of a transformer, as it is meant to be, takes up to a tenth.
_CAST_SHARE: Final = 0.15
_FP32_SHARE: Final = 0.10
_LAYOUT_SHARE: Final = 0.02
_PAGEABLE_SHARE: Final = 0.01
_PAGEABLE_BYTES_A_STEP: Final = 1_000_000
# A learning rate or a few indices are cheaper to copy than to pin.
_PAGEABLE_LEAST: Final = 16_384
_TINY_SHARE: Final = 0.5
# Beside the graph of a step that is captured a few kernels run: for the batch, for what is read.
_REPLAYED: Final = 0.8
_TINY_A_STEP: Final = 100
# A fused update is a handful of launches; a loop over parameters is several for each of them.
_UPDATE_SHARE: Final = 0.05
_UPDATE_LAUNCHES: Final = 20
_PYTHON_SHARE: Final = 0.05
# What goes to the host for a log is a few numbers; from here on it is the tensors themselves.
_LOG_BYTES_A_STEP: Final = 1_000_000


class Finding(NamedTuple):
    """One fault.

    Attributes:
        kind: Its name, such as ``"host-sync"``.
        line: ``file:line``, None where the trace does not tell.
        figure: How much of it there is, in the unit that `text` names.
        share: About how much of the step it takes, 0 to 1.
        text: What was seen, for a person.
        lever: What to try.
    """

    kind: str
    line: str | None
    figure: float
    share: float
    text: str
    lever: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return self._asdict()


def find_faults(trace: Trace, figures: Figures, lined: Trace | None = None) -> list[Finding]:
    """Return the faults that a trace shows, those that cost most first.

    Args:
        trace: The trace that the figures are of.
        figures: Its figures.
        lined: A trace of the same loop with the lines of the user's calls; may be `trace`.
    """
    seen = _Seen(trace, figures, lined)
    unfused = seen.unfused()
    found = [
        *seen.slow_data(),
        *seen.waits(),
        *seen.busy_python(),
        *seen.recompiles(),
        *seen.pageable(),
        *unfused,
        *seen.tiny(with_update=not unfused),
        *seen.casts(),
        *seen.fp32(),
        *seen.layout(),
    ]
    return sorted(found, key=lambda finding: -finding.share)


def is_replayed(figures: Figures) -> bool:
    """Return whether nearly all kernels came from CUDA graphs: nothing is left to capture."""
    return figures.num_replayed > _REPLAYED * figures.num_kernels


class _Seen:
    """A trace and its figures, and the rules over them."""

    def __init__(self, trace: Trace, figures: Figures, lined: Trace | None) -> None:
        self.trace = trace
        self.figures = figures
        self.lined = lined
        self.places = Places(lined) if lined is not None else None
        self.lined_work = inside_steps(lined, project(lined)) if lined is not None else []
        self.update_starts = {e.work.start for e in figures.launched if e.phase == "update"}

    def slow_data(self) -> list[Finding]:
        f = self.figures
        if f.launched:
            share = f.share(f.idle_by_cause.get("data", 0.0))
        else:
            share = f.share(f.host_phases.get("data_wait", 0.0))
        if share < _DATA_SHARE:
            return []
        us = share * f.window_us
        what = "the device is idle" if f.launched else "the host waits"
        ahead = "trainer.prefetch(loader), which makes the next batch meanwhile"
        remedy = "more workers (torchfast.build_dataloader, sweep_workers), a cheaper transform"
        # Without a device the step is the host's own, and nothing is made meanwhile.
        remedy += f", or {ahead}" if f.launched else ""
        return [
            Finding(
                "slow-data",
                self._data_line(),
                f.per_step_ms(us),
                share,
                f"{what} for {f.per_step_ms(us):.2f} ms a step while the next batch is made",
                remedy,
            )
        ]

    def waits(self) -> list[Finding]:
        f = self.figures
        found: list[Finding] = []
        sites = wait_sites(self.trace, f.gaps, f.launched, self.lined, cost_us=f.waits_us)
        for site in sites:
            a_step = site.num / f.num_steps
            share = f.share(site.idle_us)
            if share < _WAIT_SHARE and a_step < _WAITS_A_STEP:
                continue
            found.append(_wait(site, a_step, share, f))
        return found

    def busy_python(self) -> list[Finding]:
        f = self.figures
        us = f.idle_by_cause.get("python", 0.0) * f.own_part
        if f.share(us) < _PYTHON_SHARE:
            return []
        return [
            Finding(
                "slow-python",
                self._gap_line("python"),
                f.own_ms(us),
                f.share(us),
                f"the device is idle for {f.own_ms(us):.2f} ms a step while the host runs "
                "Python that launches nothing",
                "move the line out of the loop, into a worker of the loader, or to the device",
            )
        ]

    def recompiles(self) -> list[Finding]:
        f = self.figures
        if not f.num_compiles:
            return []
        spans = [s for s in self.trace.spans if s.name == "_compile.compile_inner (dynamo_timed)"]
        us = sum(s.end - s.start for s in spans)
        return [
            Finding(
                "recompiles",
                self._line_of("_compile.compile_inner (dynamo_timed)"),
                f.num_compiles / f.num_steps,
                min(1.0, f.share(us)),
                f"torch.compile compiled {f.num_compiles} times in {f.num_steps} steps, "
                f"{f.per_step_ms(us):.1f} ms a step",
                "keep shapes fixed, mark what changes by torch._dynamo.mark_dynamic, and see "
                "torchfast.CompileRecord for what changed",
            )
        ]

    def pageable(self) -> list[Finding]:
        f = self.figures
        sites = pageable_copies(f.launched, self.lined, self.lined_work)
        sites = [s for s in sites if kernels.copy_direction(s.name) == "HtoD"]
        us, num_bytes = sum(s.device_us for s in sites), sum(s.num_bytes for s in sites)
        least = _PAGEABLE_LEAST if f.share(us) >= _PAGEABLE_SHARE else _PAGEABLE_BYTES_A_STEP
        if num_bytes / f.num_steps < least:
            return []
        return [
            Finding(
                "pageable-copies",
                sites[0].line,
                num_bytes / f.num_steps,
                f.share(us),
                f"{size(int(num_bytes / f.num_steps))} a step are copied from memory that is "
                f"not pinned, in {f.per_step_ms(us):.2f} ms; the host waits meanwhile",
                "DataLoader(pin_memory=True) and .to(device, non_blocking=True), or "
                "trainer.prefetch(loader)",
            )
        ]

    def tiny(self, *, with_update: bool) -> list[Finding]:
        """Tell of small kernels; those of the update only where no finding of its own tells."""
        f = self.figures
        run = [e for e in f.launched if e.work.kind == "kernel"]
        if not with_update:
            run = [e for e in run if e.phase != "update"]
        small = [e for e in run if is_tiny(e)]
        if len(small) < _TINY_A_STEP * f.num_steps or len(small) < _TINY_SHARE * len(run):
            return []
        late = [g for g in f.gaps if g.cause == "launch"]
        late = [g for g in late if with_update or g.end not in self.update_starts]
        launch_us = sum(g.length for g in late) * f.own_part
        seen = f"take less than {TINY_US:.0f} us, less than their launch"
        lever = (
            "launch the step as one CUDA graph (plan='exact'), or fuse them by torch.compile "
            "(plan='fast')"
        )
        if is_replayed(f):
            seen, lever = (
                f"take less than {TINY_US:.0f} us",
                "fuse them by torch.compile (plan='fast')",
            )
        return [
            Finding(
                "tiny-kernels",
                self._line_of_work(is_tiny, by_count=True),
                len(small) / len(run),
                f.share(sum(e.work.end - e.work.start for e in small) + launch_us),
                f"{len(small) / len(run):.0%} of {len(run) / f.num_steps:.0f} kernels a step "
                f"{seen}",
                lever,
            )
        ]

    def unfused(self) -> list[Finding]:
        f = self.figures
        update = [e for e in f.launched if e.phase == "update" and e.work.kind == "kernel"]
        step = [e for e in update if _in_optimizer_step(e)] or update
        if not step or any(kernels.is_fused_update(e.work.name) for e in step):
            return []
        kernel_us = sum(e.work.end - e.work.start for e in step)
        late = [g for g in f.gaps if g.cause in ("launch", "python")]
        late_us = f.own_part * sum(g.length for g in late if g.end in self.update_starts)
        us, ms = kernel_us + late_us, f.per_step_ms(kernel_us) + f.own_ms(late_us)
        launches = len({e.work.correlation for e in step}) / f.num_steps
        if f.share(us) < _UPDATE_SHARE or launches < _UPDATE_LAUNCHES:
            return []
        return [
            Finding(
                "unfused-optimizer",
                self._line_of_update(),
                launches,
                f.share(us),
                f"the update takes {launches:.0f} launches a step and {ms:.2f} ms",
                "fused=True in the optimizer, or Plan(optimizer='fused'), which plan='fast' has",
            )
        ]

    def casts(self) -> list[Finding]:
        f = self.figures
        share = f.of_kernels(f.cast_us)
        if share < _CAST_SHARE:
            return []
        return [
            Finding(
                "dtype-casts",
                self._line_of_work(is_cast),
                share,
                f.share(f.cast_us),
                f"{share:.0%} of the kernel time only changes the type of numbers",
                "keep one type from layer to layer: autocast around the whole forward rather than "
                "around parts, no .float() in between, or compile, which fuses casts",
            )
        ]

    def fp32(self) -> list[Finding]:
        f = self.figures
        share = f.of_kernels(f.fp32_product_us)
        if share < _FP32_SHARE:
            return []
        return [
            Finding(
                "fp32-matmul",
                self._line_of_work(is_fp32_product),
                share,
                f.share(f.fp32_product_us),
                f"{share:.0%} of the kernel time multiplies in float32 without tensor cores",
                "Plan(precision='bf16') or 'tf32'; by hand torch.autocast or "
                "torch.backends.fp32_precision = 'tf32'",
            )
        ]

    def layout(self) -> list[Finding]:
        f = self.figures
        us = f.by_category.get("layout", 0.0)
        if f.of_kernels(us) < _LAYOUT_SHARE:
            return []
        return [
            Finding(
                "channels-first-convolution",
                self._line_of_work(_is_layout),
                f.of_kernels(us),
                f.share(us),
                f"{f.of_kernels(us):.0%} of the kernel time turns NCHW into NHWC and back around "
                "convolutions",
                "model.to(memory_format=torch.channels_last), or Plan(channels_last=True)",
            )
        ]

    # --- lines ----------------------------------------------------------------------------------

    def _line_of(self, begin: str) -> str | None:
        """Return the line from which an annotation or operator is reached."""
        if self.lined is None or not self.places:
            return None
        spans = [s for s in self.lined.spans if s.kind != "line" and s.name.startswith(begin)]
        return most_common(self.places.at(s.thread, s.start) for s in spans)

    def _data_line(self) -> str | None:
        if self.lined is None or not self.places:
            return None
        # At its start, the line is that of the `for`; what a data set does has lines of its own.
        spans = [s for s in self.lined.spans if phase_of(s) == "data_wait"]
        return most_common(self.places.at(s.thread, s.start) for s in spans)

    def _gap_line(self, cause: str) -> str | None:
        if self.lined is None or not self.places:
            return None
        gaps = find_gaps(self.lined, self.lined_work) if self.lined_work else []
        return heaviest(
            (self.places.near(gap.thread, gap.start, gap.end), gap.length)
            for gap in gaps
            if gap.cause == cause
        )

    def _line_of_update(self) -> str | None:
        """Return the line of an optimizer of the user's own; of torch's that which calls it."""
        within = [e for e in self.lined_work if e.phase == "update" and _in_optimizer_step(e)]
        return self._line_that_launches(within) or self._line_of("Optimizer.step#")

    def _line_of_work(
        self, wanted: Callable[[Launched], bool], *, by_count: bool = False
    ) -> str | None:
        """Return the line whose kernels, of those wanted, take longest, or are the most.

        Of the forward, if some are: what a backward launches has the line of the backward.
        """
        run = [e for e in self.lined_work if e.work.kind == "kernel" and wanted(e)]
        own = [e for e in run if e.phase not in ("backward", "update")]
        return self._line_that_launches(own or run, by_count=by_count)

    def _line_that_launches(
        self, launched: Iterable[Launched], *, by_count: bool = True
    ) -> str | None:
        if not self.places:
            return None
        return heaviest(
            (
                self.places.at(each.call.thread, each.call.start),
                1 if by_count else each.work.end - each.work.start,
            )
            for each in launched
            if each.call is not None
        )


def _wait(site: WaitSite, a_step: float, share: float, figures: Figures) -> Finding:
    where = f"{site.operator or 'a call'} ({site.call})"
    idle = figures.own_ms(site.idle_us)
    times = f"{a_step:.1f}".removesuffix(".0")
    text = f"{where} makes the host wait {times} times a step; the device is idle {idle:.2f} ms"
    if site.sized_by_numbers:
        lever = (
            "keep the size fixed: torch.where, a multiplication by the mask, a loss's ignore_index"
        )
        return Finding("boolean-mask", site.line, a_step, share, text, lever)
    if site.num_bytes >= _LOG_BYTES_A_STEP * figures.num_steps:
        sent = size(int(site.num_bytes / figures.num_steps))
        text = f"{text}, and {sent} a step are copied to the host"
        lever = "compute what is logged on the device, and read that every so many steps"
        return Finding("big-log-sync", site.line, a_step, share, text, lever)
    lever = "keep it on the device and read it every so many steps, or after the loop"
    return Finding("host-sync", site.line, a_step, share, text, lever)


def _is_layout(each: Launched) -> bool:
    return kernels.category(each.work.name) == "layout"


def _in_optimizer_step(each: Launched) -> bool:
    return any(s.name.startswith("Optimizer.step#") for s in each.stack)
