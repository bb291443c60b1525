"""profile: a few steps of a loop under torch.profiler, and what they say.

Steps are run in three stretches. First some without any profiler, in which caches fill, things are
compiled and graphs captured. Then those that are measured: torch.profiler notes kernels, operators,
shapes and memory, which costs the host some microseconds for each operator; what a step of the
first stretch took says how many. Last, two steps with the calls of Python noted. These are slow,
and no time is taken from them; they tell which line made the host wait. Everything is written into
a folder, and the report is made when it is asked for.

It helps to know where time goes. It does not tell how fast the loop is: measure that without it.
"""

from __future__ import annotations

import gzip
import itertools
import logging
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar, final

import torch
import torch.distributed as dist

from torchfast._core.arguments import check_batches, check_flag, check_int, explain_keywords
from torchfast._core.errors import TraceError
from torchfast._core.rank_group import is_distributed
from torchfast.profiling.ceilings import Ceilings, measure_ceilings
from torchfast.profiling.held_memory import HeldMemory
from torchfast.profiling.lines import UserLines
from torchfast.profiling.other_profilers import OtherProfilers
from torchfast.profiling.report import ProfileReport, report_on
from torchfast.profiling.trace import read_trace

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
TRACE: Final = "trace.json.gz"
LINES: Final = "lines.json.gz"
PAGE: Final = "report.html"
# torch.profiler starts to note in one step and drops it: its first is slow.
_DROPPED: Final = 1
_LINED: Final = 2
_TEARDOWN: Final = "TEARDOWN_CUPTI"
_CUT: Final = "the loop ended before, or the other profiler began"
_ANOTHER: Final = (
    "another torch.profiler ran, and torch has room for one at a time: no step was measured "
    "while it did; take it out to have all of them"
)


@explain_keywords
def profile(
    folder: str | os.PathLike[str] = "torchfast-profile",
    *,
    steps: int = 10,
    warmup: int = 5,
    lines: bool = True,
    memory: bool = True,
    shapes: bool = True,
    ceilings: bool = False,
) -> Profile:
    """Profile a loop: where the time of its steps goes, and what to try.

    Put it around the loop, and say when a step ends: by `Profile.step`, or by looping over
    `Profile.iterate`, which also ends the loop when enough steps were seen. `Trainer.profile` does
    both. For a script as it stands there is ``python -m torchfast profile SCRIPT``.

    Args:
        folder: Where the traces and the page are written; on several ranks each has a folder of
            its own in it, ``rank0`` and so on.
        steps: How many steps are measured.
        warmup: Steps before; at least one. Take more than are needed to compile and to capture.
        lines: Run three steps more to learn the lines of what is found.
        memory: Note what memory is taken for; costs a little for each tensor.
        shapes: Note the shapes of inputs, for the roofline; costs a little for each operator.
        ceilings: Measure what the device can do at the end, for the roofline; takes a second and
            some memory of the device.

    Returns:
        A context manager; its ``report`` is there when it ends.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: A count that is too small.

    Numerics: Bitwise equal to the loop alone.
    Synchronizes: When torch.profiler begins and ends, and before the first step that is measured.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(8, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with profile(folder, steps=2, warmup=1, lines=False) as profiling:
        ...         for batch in profiling.iterate([torch.ones(4, 8)] * 10):
        ...             model(batch).sum().backward()
        ...     report = profiling.report
        >>> report.figures.num_steps
        2
    """
    own = f"rank{dist.get_rank()}" if is_distributed() else ""
    return Profile(
        Path(folder) / own,
        steps=check_int("steps", steps, minimum=1),
        warmup=check_int("warmup", warmup, minimum=1),
        lines=check_flag("lines", lines),
        memory=check_flag("memory", memory),
        shapes=check_flag("shapes", shapes),
        ceilings=check_flag("ceilings", ceilings),
    )


@final
class Profile:
    """A profile in progress; made by `profile`.

    Attributes:
        folder: Where its files are.
        num_steps: The steps seen so far.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        warmup: int,
        lines: bool,
        memory: bool,
        shapes: bool,
        ceilings: bool,
    ) -> None:
        self.folder = folder
        self.num_steps = 0
        self._steps, self._warmup, self._lines = steps, warmup, lines
        self._memory, self._shapes, self._ceilings = memory, shapes, ceilings
        self._running: torch.profiler.profile | None = None
        self._calls: UserLines | None = None
        self._held: HeldMemory | None = None
        self._first_noted = self._end_of_stretch = 0
        self._num_measured = 0
        self._stretch = ""
        self._measured: Ceilings | None = None
        self._report: ProfileReport | None = None
        self._written: set[str] = set()
        self._entered = False
        self._process = 0
        self._remarks: list[str] = []
        self._others = OtherProfilers(self._give_way)
        self._ended_at: list[float] = []  # when each step ended that no profiler saw

    def __enter__(self) -> Self:
        self._entered, self._process = True, os.getpid()
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (TRACE, LINES, PAGE):
            (self.folder / name).unlink(missing_ok=True)
        self._others.start()
        self._begin_if_due()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._entered = False
        if os.getpid() != self._process:
            return  # a fork of the one that profiles: the files are not its own
        self._others.stop()
        self._end_stretch()
        if self._ceilings and kind is None and torch.cuda.is_available():
            try:
                self._measured = measure_ceilings()
            except Exception as error:  # what was profiled is worth more than the ceilings
                self._lose("the ceilings could not be measured", error)

    @property
    def is_done(self) -> bool:
        """Whether all steps that are wanted were seen."""
        return self.num_steps >= self.num_wanted

    @property
    def num_wanted(self) -> int:
        """The steps that are run in all: before, measured, and for the lines."""
        return self._warmup + self._steps + (_DROPPED + _LINED if self._lines else 0)

    def step(self) -> None:
        """Say that a step has ended; after the last that is wanted it does nothing."""
        if not self._entered:
            raise RuntimeError(
                "step() was called outside of the with block of profile(); move it in"
            )
        self.num_steps += 1
        if self._running is None and self.num_steps < self._warmup:
            self._ended_at.append(time.perf_counter())
        if self._running is not None:
            if self.num_steps == self._first_noted and torch.cuda.is_initialized():
                _drain_devices()
            self._note_memory()
            with self._others.ours():
                self._running.step()
            if self.num_steps >= self._end_of_stretch:
                self._end_stretch()
            elif self._stretch == LINES and self.num_steps == self._first_noted:
                self._note_lines()
        self._begin_if_due()

    def iterate(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Yield batches, counting a step for each, until enough were seen.

        The time in which the next batch is fetched is marked as ``torchfast.data_wait``.
        """
        check_batches("batches", batches)
        iterator = iter(batches)
        while not self.is_done:
            # Free where no profiler runs, which is in most steps of the warm-up.
            if self._running is None:
                batch = next(iterator, _END)
            else:
                with torch.profiler.record_function("torchfast.data_wait"):
                    batch = next(iterator, _END)
            if batch is _END:
                return
            if self._held is not None:
                self._held.note_batch(batch)
            yield batch  # type: ignore[misc]
            self.step()

    @property
    def report(self) -> ProfileReport:
        """What was found; the page is written when it is first asked for.

        Raises:
            TraceError: The loop ended before a step was measured.
        """
        if self._report is None:
            self._report = self._analyse()
            self._report.write_html(self.folder / PAGE)
        return self._report

    def _analyse(self) -> ProfileReport:
        if TRACE not in self._written:
            if self._remarks:
                raise TraceError(f"nothing was profiled: {'; '.join(self._remarks)}")
            raise TraceError(
                f"the loop made {self.num_steps} steps, and the first {self._warmup} are not "
                "measured; run more steps, or give a smaller warmup"
            )
        trace = read_trace(self.folder / TRACE)
        lined = read_trace(self.folder / LINES) if LINES in self._written else None
        trace.remarks += self._remarks
        if self._num_measured < self._steps:
            trace.keep_steps(self._num_measured)
            trace.remarks.append(
                f"{self._steps} steps were wanted and {self._num_measured} were measured: "
                + (_CUT if _ANOTHER in self._remarks else "the loop ended before")
            )
        return report_on(trace, lined, self._measured, self._untraced_us())

    def _untraced_us(self) -> float | None:
        """Return what a step took the host before the profiler began, if it made enough.

        The first takes longer than others, so the time from its end on counts. A host that does
        not wait is ahead of the device here, and this is what it needs for itself.
        """
        steps_us = [(b - a) * 1e6 for a, b in itertools.pairwise(self._ended_at)]
        return statistics.median(steps_us) if steps_us else None

    # --- stretches ------------------------------------------------------------------------------

    def _begin_if_due(self) -> None:
        """Start the profiler one step before those that it is to note."""
        if self._running is not None:
            return
        if self._others.is_on:
            self._postpone()
        elif self.num_steps == self._warmup - _DROPPED:
            self._begin(TRACE, self._steps)
        elif self._lines and self.num_steps == self._warmup + self._steps:
            self._begin(LINES, _LINED)

    def _give_way(self) -> None:
        """End what runs, since a profiler of the user's begins: what it has seen is kept."""
        if self._running is not None:
            self._end_stretch()
            self._postpone()

    def _postpone(self) -> None:
        """Measure later what is due while another profiler is on."""
        if self.num_steps < self._warmup - _DROPPED:
            return
        if not self._num_measured:
            self._warmup = self.num_steps + 1 + _DROPPED
        if _ANOTHER not in self._remarks and not self.is_done:
            self._remarks.append(_ANOTHER)

    def _begin(self, name: str, steps: int) -> None:
        is_lined = name == LINES
        self._stretch = name
        self._first_noted = self.num_steps + _DROPPED
        self._end_of_stretch = self._first_noted + steps
        self._running = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=0, warmup=_DROPPED, active=steps, repeat=1),
            record_shapes=self._shapes and not is_lined,
            profile_memory=self._memory and not is_lined,
        )
        with warnings.catch_warnings():
            # torch 2.11 tells of later cycles when the first begins; there is only one.
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            with self._others.ours():
                self._running.start()

    def _note_memory(self) -> None:
        """Note what the loop holds when the first step begins that is measured."""
        if self._stretch != TRACE or not self._memory:
            return
        try:
            if self.num_steps == self._first_noted:
                self._held = HeldMemory()
                self._held.note_all()
            elif self._held is not None:
                self._held.note_end_of_step()
        except Exception as error:
            self._held = None
            self._lose("what memory holds from before is not known", error)

    def _note_lines(self) -> None:
        self._calls = UserLines()
        if not self._calls.start():
            self._remarks.append(
                "the lines of the code are not known: a debugger holds sys.settrace"
            )

    def _end_stretch(self) -> None:
        """Stop and write; where that fails, the loop goes on and the report says so."""
        running, self._running = self._running, None
        if self._calls is not None:
            self._calls.stop()
        if running is None:
            return
        try:
            self._write(running)
        except Exception as error:
            self._lose(f"{self._stretch} could not be written", error)
        finally:
            self._held = None

    def _lose(self, what: str, error: Exception) -> None:
        self._remarks.append(f"{what} ({type(error).__name__}: {error})")
        logger.warning("the profile is not whole: %s (%s)", what, error)

    def _write(self, running: torch.profiler.profile) -> None:
        is_last = self.is_done or not (self._entered and self._lines)
        with nullcontext() if is_last else _tracing_kept(), self._others.ours():
            running.stop()
        whole = min(self.num_steps, self._end_of_stretch) - self._first_noted
        if whole < 1:
            return
        if self._stretch == TRACE:
            self._num_measured = whole
        plain = self.folder / self._stretch.removesuffix(".gz")
        try:
            running.export_chrome_trace(str(plain))
            if self._stretch == LINES and self._calls is not None:
                self._calls.write_into(plain)
                self._remarks += [
                    f"the function at {each} runs very many lines: what it costs is told at the "
                    "line that calls it"
                    for each in self._calls.left_out
                ]
                if self._calls.is_full:
                    self._remarks.append(
                        "your code ran more lines than a trace has room for: what came after the "
                        "first of them has no line"
                    )
            if self._stretch == TRACE and self._held is not None:
                self._held.write_into(plain)
            with (
                plain.open("rb") as source,
                gzip.open(self.folder / self._stretch, "wb", compresslevel=1) as target,
            ):
                shutil.copyfileobj(source, target, 1 << 20)
            self._written.add(self._stretch)
        finally:
            plain.unlink(missing_ok=True)
            if self._stretch not in self._written:
                (self.folder / self._stretch).unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"Profile({str(self.folder)!r}, {self.num_steps} of {self.num_wanted} steps)"


_END: Final = object()


@contextmanager
def _tracing_kept() -> Iterator[None]:
    """Keep torch.profiler from detaching CUPTI where a user asks for that by TEARDOWN_CUPTI=1.

    It does so in a thread of its own, in the midst of the stretch that begins: that one then sees
    no device, or the process dies. The last one detaches it.
    """
    before = os.environ.get(_TEARDOWN)
    os.environ[_TEARDOWN] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_TEARDOWN]
        else:
            os.environ[_TEARDOWN] = before


def _drain_devices() -> None:
    """Wait for every device that torch has memory on.

    What was launched before would run among what is measured, and be nobody's.
    """
    for device in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(device):  # to ask the others would have CUDA begin there
            torch.cuda.synchronize(device)
