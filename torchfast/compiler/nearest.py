"""Which change made torch compile again, where each compiled version names another.

torch asks every version of a function whether it fits, and compiles another if none does. Each
names one thing that is not as it was compiled for, the first that it comes upon. Where blocks share
their code and the input of the first needs no gradient, a new length of the sequence is another
``requires_grad`` to the versions for that block, and another size to those for the rest.

What changed is what no version has been compiled for. Where that is true of several, or of none, it
is what was checked latest, since all that is checked before it was right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torchfast.compiler.recompiles import Change, read_guard, readable
from torchfast.compiler.torch_events import Version

# From what is checked last, as far as torch keeps to an order: of one tensor it looks at the dtype,
# whether it needs a gradient, and then at its sizes; at global states before all.
_LATEST_FIRST = (
    ("backend",),  # all guards of that version are right
    ("size", "stride"),
    ("value", "counter", "training", "structure"),
    ("rank", "requires_grad", "dtype", "device", "inference mode", "aliasing"),
    ("dynamic marking", "type", "object"),
    ("global state",),
    ("other",),
)
_RANKS = {kind: rank for rank, kinds in enumerate(_LATEST_FIRST) for kind in kinds}

# How the guards of a version, as text, say that it was compiled for something.
_COMPILED_FOR = {
    "size": r"check_tensor\({source}, .*size=\[(?:\w+, ){{{dimension}}}(?:None|{after})[,\]]",
    "requires_grad": r"check_tensor\({source}, .*requires_grad={after},",
    "dtype": r"check_tensor\({source}, .*torch\.{after},",
    "value": r"EQUALS_MATCH: {source} == {after}(?:\s|$)",
    "counter": r"EQUALS_MATCH: {source} == {after}(?:\s|$)",
}


def cause_of(
    reasons: Sequence[str], new: str, versions: Mapping[str, Version]
) -> tuple[Change, str]:
    """Return what made torch compile a function again, and the reason of torch's that says so.

    Args:
        reasons: What each version says, as in the compilation metrics; one at least.
        new: The id of the version that was compiled, or was to be.
        versions: The versions of the function that there are, by their ids.
    """

    def guards(version: str | None) -> str:
        found = versions.get(version or new)
        return "" if found is None else found.guards

    asked = [(reason, versions.get(reason.partition(":")[0])) for reason in reasons]
    if new in versions:
        # Those that other backends made do not count, unless this one has made none yet.
        backend = versions[new].backend
        asked = [a for a in asked if a[1] is not None and a[1].backend == backend] or asked
    read = [(read_guard(reason, guards), reason) for reason, _ in asked]
    if len(read) > 1:
        compiled = [readable(version.guards) for _, version in asked if version is not None]
        unknown = [r for r in read if not any(_is_compiled_for(r[0], text) for text in compiled)]
        read = unknown or read
    return min(read, key=lambda r: _RANKS[r[0].kind])


def _is_compiled_for(change: Change, guards: str) -> bool:
    """Whether a version with these guards was compiled for what something has changed to."""
    pattern = _COMPILED_FOR.get(change.kind)
    if pattern is None or change.after is None:
        return False
    source, after = re.escape(change.source), re.escape(change.after)
    pattern = pattern.format(source=source, after=after, dimension=change.dimension or 0)
    return re.search(pattern, guards) is not None
