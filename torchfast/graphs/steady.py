"""What need not be found out anew in a steady run.

From one step to the next nothing changes but the values of the batch, mostly. So what the engine
has found out about a kind of call is kept for as long as a glance shows that nothing has changed.
"""

from __future__ import annotations

from typing import Any, final

from torchfast.graphs.entries import Entry, GraphStore
from torchfast.graphs.together import Together
from torchfast.graphs.watch import Glance, StateWatch

# A glance takes a few looks to be taken. One that did not last so long did not pay, and so many
# calls go by before the next.
_LASTS = 10
# Steps between two looks at what is not captured.
_NOT_LOOKED_AT = 32


@final
class Steady:
    """The graphs that serve as things stand.

    Args:
        watch: What looks closer.
        store: Whose graphs.
        together: Whom each step is agreed upon with.

    Attributes:
        refused: What runs eagerly as things stand.
        entries: What serves a call, by what `describe` says of its inputs; to be read where all
            `goes_on`. What is not there is to be found out.
    """

    def __init__(self, watch: StateWatch, store: GraphStore, together: Together) -> None:
        self._watch, self._store = watch, store
        self.refused = Refused(store, together)
        self.entries: dict[Any, Entry] = {}
        self._glance: Glance | None = None
        self._num_lasted, self._wait = 0, 0

    def goes_on(self) -> bool:
        """Whether nothing has changed since the first `note`; if not, all that was noted goes."""
        glance, store = self._glance, self._store
        if glance is None:
            return False
        if glance.is_as_it_was() and (not store.adds_to_gradients or store.has_its_gradients()):
            self._num_lasted += 1
            return True
        self.forget()
        self._wait = 0 if self._num_lasted >= _LASTS else _LASTS
        return False

    def note(self, key: Any, entry: Entry) -> None:
        """Keep what serves such calls, found by a look at everything in this very call."""
        if self._glance is None:
            if self._wait:
                self._wait -= 1
                return
            self._glance = self._watch.glance()
            self._num_lasted = 0
            if self._glance is None:
                self._wait = _LASTS
                return
        self.entries[key] = entry

    def forget(self) -> None:
        """Let go of it, before the state is taken as it is then, or a graph goes for another."""
        self._glance = None
        self.entries = {}


@final
class Refused:
    """Kinds of calls that no graph will hold, while there is no graph at all.

    Why one is not captured was found out with all that steers the step's control flow. To look at
    that before each step would cost what nothing gains, so it is looked at now and then: what comes
    of it may be a capture some steps later, and never another result.

    It is entered around such a step, which runs as if nothing were to be captured: on the stream
    that is current, with learning rates that are floats.

    Args:
        store: Of the graphs that there are not.
        together: Whom each step is agreed upon with; then nothing is kept.

    Attributes:
        is_running: Whether such a step runs now.
    """

    def __init__(self, store: GraphStore, together: Together) -> None:
        self._store, self._together = store, together
        self._why: dict[Any, str] = {}
        self._left = 0
        self.is_running = False

    def __enter__(self) -> None:
        self.is_running = True

    def __exit__(self, *_: object) -> None:
        self.is_running = False

    def why(self, key: Any) -> str | None:
        """Return why such a call runs eagerly; None if that is to be found out, perhaps anew."""
        if not self._why:
            return None
        if self._store.graphs or not self._left:
            self._why.clear()
            return None
        self._left -= 1
        return self._why.get(key)

    def note(self, key: Any, why: str) -> None:
        """Keep what was found out by a look at everything in this very call."""
        if self._store.graphs or not self._together.is_alone:
            return
        if not self._why:
            self._left = _NOT_LOOKED_AT
        self._why[key] = why
