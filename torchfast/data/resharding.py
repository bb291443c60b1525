"""The same place in the data for another number of ranks, where there is one.

Dealt out by `ShardedSampler`, the samples that all ranks have had by the end of a step are the
first ones of the order, however many ranks there are. So a position can be counted in samples, and
goes over to another number of ranks, with another batch size too, wherever that comes out even: no
sample is left out and none comes twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_COUNTED: Final = ("num_replicas", "dealt_to", "batch_size")


def resharded(state: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a position for a loader that deals out otherwise; as it is where there is none.

    Args:
        state: What ``PositionedLoader.state_dict`` returned.
        own: The fingerprint of the loader that is to go on.
    """
    saved = state["fingerprint"]
    differing = {name for name, value in saved.items() if value != own.get(name)}
    # As many ranks with another batch size are a mistake rather than another machine.
    if "dealt_to" not in differing or not differing <= set(_COUNTED):
        return state
    before, now = _samples_a_step(saved), _samples_a_step(own)
    if before is None or now is None:
        return state
    done = int(state["num_batches"]) * before
    total = saved.get("num_samples")
    # Behind a last batch that was not full, samples are not what was counted.
    if done % now or total is None or done > total:
        return state
    return {**state, "num_batches": done // now, "fingerprint": {**saved, **own}}


def _samples_a_step(fingerprint: Mapping[str, Any]) -> int | None:
    """Return the samples of a step on all ranks together, if they are the next ones of an order."""
    batch_size, dealt_to = fingerprint.get("batch_size"), fingerprint.get("dealt_to")
    if batch_size is None or fingerprint.get("num_replicas") != dealt_to:
        return None
    return int(batch_size) * int(dealt_to or 1)
