"""The engine behind a captured step: warm-up, capture and replay of each kind of call.

What it must notice is told in `torchfast.graphs.step`. Its parts are the modules beside this one.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch

from torchfast._core.decisions import Decision
from torchfast._core.errors import CaptureError, ClosedError
from torchfast._core.no_context import NO_CONTEXT
from torchfast._core.phases import CAPTURE, phase
from torchfast._core.rank_group import RankGroup
from torchfast.graphs.backend import Backend, backend_for
from torchfast.graphs.entries import Aside, Entry, GraphStore, Ready
from torchfast.graphs.failures import LETS_GO, NOT_NOW, Failure, explain, unlike
from torchfast.graphs.gradients import GradientHabits, GradientsBefore, none_left
from torchfast.graphs.host_facts import HostFacts
from torchfast.graphs.learning_rates import CHANGED, LearningRates
from torchfast.graphs.manner import ATTEMPTS
from torchfast.graphs.named_state import NamedState
from torchfast.graphs.options import CUDAGraphOptions
from torchfast.graphs.outputs import StaticOutputs, safe_to_keep
from torchfast.graphs.replay_check import Mismatch, find_mismatch
from torchfast.graphs.signature import Call, Several, describe
from torchfast.graphs.static_inputs import StaticInputs
from torchfast.graphs.steady import Steady
from torchfast.graphs.together import EAGERLY, NEW_CAPTURE, OTHERS, Together
from torchfast.graphs.watch import FILL, StateWatch

logger = logging.getLogger(__name__)

# Changes with fewer replays than this between them are not worth another capture.
_SETTLED_REPLAYS = 10
_APART = "other ranks do not replay or capture the same"


@final
class GraphEngine:
    """Runs a step through graphs.

    Args:
        fn: The step.
        state: All that it reads and changes.
        options: How to capture.
        device: Where.
        rates: Learning rates that the updates in it read on the device; others are frozen.
        keep_gradients: Let ``.grad`` hold the gradients after each replay, for work outside the
            graph. Otherwise they may be None after it; each graph that is kept then needs memory
            for its own.
        make_safe: Makes safe to keep what ``fn`` returned, where no graph will hold such a call.
        after_failure: Called when a capture has failed, to let go of what ``fn`` has kept of it.
        together: What it tells the ranks with whom ``fn`` talks in collectives; None for none.
        backend: What captures, where its memory is to be shared with another engine's graphs.

    Attributes:
        store: What is known of each kind of call, and the graphs.
        why_eager: Why no step is captured any more, in words; None while some are.
        varies: Whether that is because hyperparameters go on changing.
        failure: Why the latest kind of call that is not captured is not.
        facts: While a step is captured, what the host held before.

    Raises:
        UnsupportedDeviceError: The device has no graphs.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        state: NamedState,
        options: CUDAGraphOptions,
        device: torch.device,
        *,
        rates: Sequence[LearningRates] = (),
        keep_gradients: bool = False,
        make_safe: Callable[[Any], Any] = safe_to_keep,
        after_failure: Callable[[], None] = lambda: None,
        together: Together | None = None,
        backend: Backend | None = None,
    ) -> None:
        self._fn, self._options = fn, options
        self._together = together or Together(RankGroup.alone())
        self._state = state
        self._watch = StateWatch(state, device)
        self._keeps_gradients, self._make_safe, self.device = keep_gradients, make_safe, device
        state.rates = list(rates)
        self.backend = backend or backend_for(device)
        self.store = GraphStore(options)
        self._steady = Steady(self._watch, self.store, self._together)
        self._frozen: list[Any] = []
        self._error: Exception | None = None
        self.failure: Failure | None = None
        self.facts: HostFacts | None = None
        self._habits, self._after_failure = GradientHabits(), after_failure
        self.why_eager: str | None = None
        self.varies = self._closed = False
        self._num_since_change, self._num_hasty = _SETTLED_REPLAYS, 0
        self._counts, self._capture_s = Counter[str](), 0.0
        self._warned: set[str] = set()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step and return what ``fn`` returns, detached and safe to keep."""
        found = self._found(inputs := (args, kwargs))
        if type(found) is Ready:
            if found.entry.manner.draws is None or found.draws():
                return self.replay(found)
            if self.store.refused(found.entry):
                self._steady.forget()
        with found.around:
            return self._run_eagerly(inputs)

    def prepared(self, steps: Several) -> Ready | Aside:
        """Return what replays several steps at once, captured now if it is time; none is done."""
        return self._found(((steps,), {}), are_several=True)

    def _found(self, inputs: Any, *, are_several: bool = False) -> Ready | Aside:
        if self._closed:
            raise ClosedError("this captured step was closed; build a new one")
        call = describe(*inputs)
        if self._steady.goes_on() and (known := self._steady.entries.get(call.key)) is not None:
            return self._agreed(known, call)
        if (why := self._steady.refused.why(call.key)) is not None:
            return Aside(why, self._steady.refused)
        if self.why_eager is None:
            self._notice_changes()
        if self.why_eager is not None:
            self._together.meet(EAGERLY)
            return Aside(self.why_eager)
        key = (self._watch.mode(), call.key)
        if are_several and (why := self.store.why_apart(key)) is not None:
            return Aside(why)
        entry, concern = self.store.entry(key)
        if concern is not None:
            self._warn("many", concern)
        if entry.graph is not None:
            self._steady.note(call.key, entry)
            return self._agreed(entry, call)
        is_due = entry.why_eager is None and not entry.warm_up_left
        if not self._together.meet(NEW_CAPTURE if is_due else EAGERLY) and is_due:
            return Aside(_APART)
        if entry.why_eager is not None:
            self._steady.refused.note(call.key, entry.why_eager)
            return Aside(entry.why_eager)
        if entry.warm_up_left:
            entry.warm_up_left -= 1
            self.store.release_gradients()  # before they are looked at
            return Aside("it warms up", self._habits.learning(self._state, self.device))
        with phase(CAPTURE):
            return self._capture(entry, call, inputs)

    def _agreed(self, entry: Entry, call: Call) -> Ready | Aside:
        """Return what replays a call, if all ranks are to replay graphs of that same capture."""
        if self._together.is_alone or self._together.meet(entry.number):
            return Ready(entry, call)
        if self.store.refused(entry):
            self._steady.forget()
        return Aside(_APART)

    def rates_on_device(self) -> AbstractContextManager[None]:
        """Let the optimizers see learning rates as graphs read them, if any may: on the device."""
        if self._steady.refused.is_running or self._state.changes_rates:
            return NO_CONTEXT
        self._state.fill_rates()
        return self._state.rates_on_device()

    def decisions(self) -> list[Decision]:
        """Return what was captured, and what was not and why."""
        return self.store.decisions(self.why_eager, self._watch.notes) + self._together.decisions()

    def changed(self) -> str | None:
        """Return what of modules is not as it was at the last replay; None if all is.

        The next step looks closer, and acts on it; here nothing comes of it.
        """
        if not self.store.graphs:
            return None
        if (moved := self._watch.moved()) is not None:
            return moved
        return self._watch.changed_value()

    def settle(self) -> None:
        """Bring buffers that were replaced outside the step back to their places."""
        self._state.settle_buffers()

    def counters(self) -> dict[str, int | float]:
        """Return graphs, replays, eager steps, captures, seconds and bytes."""
        return {
            "graphs": len(self.store.graphs),
            **{name: self._counts[name] for name in ("replays", "eager steps", "captures")},
            "capture_s": round(self._capture_s, 3),
            "pool_bytes": self.backend.pool_bytes(),
        }

    def close(self) -> None:
        """Let go of the graphs and their memory; a second call does nothing."""
        if not self._closed:
            self.store.drop_all()
            self.backend.release_scratch()
        self._closed = True

    # -- The three stations --------------------------------------------------------------------

    def _run_eagerly(self, inputs: Any) -> Any:
        args, kwargs = inputs
        self._counts["eager steps"] += 1
        if self._steady.refused.is_running:
            return self._make_safe(self._fn(*args, **kwargs))
        self.store.release_gradients()
        with self.backend.side_stream(), self.rates_on_device():
            outputs = self._fn(*args, **kwargs)
            if self.why_eager is None:
                self._state.settle_buffers()
        if self.store.graphs:
            self._watch.attributes.ran(describe(*inputs).key)
        return safe_to_keep(outputs)

    def _capture(self, entry: Entry, call: Call, inputs: Any) -> Ready | Aside:
        if self.store.has_too_many_kinds():
            for _ in range(2):  # the others wait to hear how it went, and whether to try again
                self._together.begin()
                self._together.fail()
            return self._fail(entry, Failure("more kinds of steps than max_graphs serves"))
        self.store.make_room()
        self.store.release_gradients()
        self._steady.forget()
        self._watch.refresh()
        self._frozen = self._watch.frozen()
        facts = HostFacts(self._state, self.device, self._watch.attributes, call.key)
        failure = self._attempt(entry, call, inputs, facts)
        # Outside of the handling of the error, which keeps alive what the capture has allocated.
        if failure is None:
            return Ready(entry, call)
        self._together.begin()
        surroundings = entry.manner.before_another(
            failure, self._options, self.device, call.tensors, is_alone=self._together.is_alone
        )
        if not self._together.all_agree(surroundings is not None) or surroundings is None:
            return self._fail(entry, failure)
        self._drop_error()
        return Aside(failure.reason, surroundings)

    def _drop_error(self) -> None:
        """Let go of an error that was kept to be raised, and of all that its frames hold."""
        if self._error is not None:
            traceback.clear_frames(self._error.__traceback__)
        self._error = None

    def _attempt(self, entry: Entry, call: Call, inputs: Any, facts: HostFacts) -> Failure | None:
        """Capture and check; where that fails all is as before, and the reason is returned."""
        started, together = time.perf_counter(), self._together
        together.begin()
        try:
            # What may fail before it, so that no rank captures while another does not.
            facts.check_capturable()
            static = StaticInputs(inputs, call.tensors, self.device)
            together.go_on()
            self._record(entry, call, static, facts)
            together.go_on()
            entry.number = together.num_captures
            self._capture_s += time.perf_counter() - started
            self._counts["captures"] += 1
            self.store.add(entry)
            self._watch.attributes.ran(call.key)
            self._frozen = self._watch.frozen()
            mismatch = self._mismatch(Ready(entry, call), facts)
            if together.all_agree(mismatch is None):
                entry.manner.attempts = 0
                return None
            if mismatch is None:
                raise CaptureError(OTHERS)
            failure = unlike(mismatch, entry.manner.told, self._options.parity)
        except BaseException as error:
            self._undo(entry, facts)
            if not isinstance(error, Exception):
                raise
            together.fail()
            failure, self._error = entry.manner.explained(explain(error)), error
            if self._options.on_failure != "raise":
                self._drop_error()
            return failure
        self._undo(entry, facts)
        return failure

    def _undo(self, entry: Entry, facts: HostFacts) -> None:
        if entry in self.store.graphs:
            self.store.remove(entry)
        entry.drop()
        facts.put_back()
        self.facts = None
        self._after_failure()

    def _record(self, entry: Entry, call: Call, static: StaticInputs, facts: HostFacts) -> None:
        """Capture the step on a copy of its inputs into the entry.

        Raises:
            Exception: What stopped it.
            CaptureError: It went through, but a replay would not do what the step does.
        """
        state = self._state
        static.fill(call.tensors)
        state.fill_rates()
        written = static.versions()
        entry.moments = self.store.moments(self.backend.moment)

        def body() -> StaticOutputs:
            torch.clear_autocast_cache()  # of weights as they were when it was filled
            args, kwargs = static.inputs
            with entry.surroundings(self.device):
                outputs = self._fn(*args, **kwargs)
            state.settle_buffers()
            torch.clear_autocast_cache()
            return StaticOutputs(outputs)

        before, self.facts = GradientsBefore(state), facts
        with state.rates_on_device(is_recorded=True):
            entry.graph, entry.outputs = self.backend.capture(body, state.generators)
        self.facts = None
        entry.inputs = static
        entry.kept, entry.notes = facts.left()
        self._habits.note(found := before.compared())
        entry.gradients, entry.added_to = found.made, found.added_to
        # An update behind the graph must find none there, whatever another kind of call has left.
        entry.gradients += none_left(state.updated_after) if self._keeps_gradients else []
        entry.from_none = self._habits.unsure(found)
        if found.let_go or found.gone:
            raise CaptureError(LETS_GO)
        if self._habits.adds_to_any(entry.from_none):
            raise CaptureError(NOT_NOW)
        facts.check_replayable(entry.manner.draws)
        if (moved := self._watch.moved()) is not None:
            raise CaptureError(f"{moved} by the step itself, so a replay would read what is gone")
        if static.versions() != written or static.has_gradients():
            raise CaptureError(
                "the step writes to its inputs or computes their gradients, which would land on "
                "the graph's own copies; return them from the step"
            )

    def replay(self, ready: Ready) -> Any:
        """Replay the graph that serves a call; return what ``fn`` returned, safe to keep."""
        entry, call, _ = ready
        assert entry.inputs is not None
        assert entry.outputs is not None
        for rates in self._state.rates:  # a call less than fill_rates()
            rates.fill()
        entry.inputs.fill(call.tensors)
        entry.replay()
        self.store.used(entry)
        self._counts["replays"] += 1
        self._num_since_change += 1
        if self._keeps_gradients or self.store.holds_others(entry):
            self.store.hold_gradients(entry)
        return entry.outputs.cloned()

    def _mismatch(self, ready: Ready, facts: HostFacts) -> Mismatch | None:
        """Return how replays differ from eager steps; None if they do not, or nobody looks."""
        entry, call, _ = ready
        static: Any = entry.inputs
        before = Counter(self._counts), entry.num_replays, self._num_since_change

        def eager() -> Any:
            static.fill(call.tensors)
            torch.clear_autocast_cache()
            return self._run_eagerly(static.inputs)

        try:
            if not self._options.check:
                return None
            return find_mismatch(
                self._state,
                self.device,
                replay=lambda: self.replay(ready) if ready.draws() else eager(),
                eager=eager,
                gradients=[gradient for _, gradient in entry.added_to],
                facts=facts,
                with_gradients=self._keeps_gradients,
                told=entry.manner.told if self._options.parity == "close" else None,
                any_says=self._together.any_says,
            )
        except torch.OutOfMemoryError:
            if self._together.is_open:
                raise  # the others cannot go on with the check alone
            self._warn("check", "no memory to compare the graph with eager steps; it is used as is")
            return None
        finally:
            self.backend.release_scratch()
            self._counts, entry.num_replays, self._num_since_change = before
            self.store.owner = entry

    # -- What happened meanwhile -----------------------------------------------------------------

    def _notice_changes(self) -> None:
        """Drop the graphs if what they were captured from has changed."""
        watch, store = self._watch, self.store
        if (reason := watch.moved()) is not None and store.graphs:
            self._state.settle_loaded()
            reason = watch.moved()
        if self._state.changes_rates:
            store.drop_all()
            self.varies = True  # so that what updates may run behind a graph of the rest
            self._give_up(CHANGED)
            return
        if not store.graphs:
            if reason is not None:
                watch.refresh()
            return
        if reason is None and not store.has_its_gradients():
            reason = "gradients that the step adds to were replaced"
        frozen = reason is None and (reason := watch.unlike(self._frozen)) is not None
        if reason is None:
            return
        store.drop_all()
        watch.refresh()
        self._num_hasty = self._num_hasty + 1 if self._num_since_change < _SETTLED_REPLAYS else 0
        if self._num_hasty >= (1 if frozen else ATTEMPTS):
            self.varies, after = frozen, f", again after {self._num_since_change} replays"
            self._give_up(reason + after + FILL * frozen)
        self._num_since_change = 0

    def _give_up(self, why: str) -> None:
        self.why_eager, message = why, f"the step runs eagerly from now on: {why}"
        if self._options.on_failure == "raise":
            raise CaptureError(message)
        self._warn(why, message)

    def _fail(self, entry: Entry, failure: Failure) -> Aside:
        entry.why_eager, self.failure = str(failure), failure
        if self._options.on_failure == "raise":
            error, self._error = self._error, None
            raise CaptureError(f"the step ({entry.shapes}) was not captured: {failure}") from error
        self.backend.release_scratch()  # left on the stream of the warm-up
        how = "run eagerly" if entry.num_steps == 1 else "run one by one"
        self._warn(failure.reason, f"steps of {entry.shapes} {how}: {failure}")
        return Aside(entry.why_eager)

    def _warn(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            logger.warning("cuda_graph: %s", message)
