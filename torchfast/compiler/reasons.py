"""What a search says of its choice, in words."""

from __future__ import annotations

from collections.abc import Sequence

from torchfast._core.measure import Measurement
from torchfast.compiler.receipts import CandidateResult


def why_chosen(best: str, results: Sequence[CandidateResult], measurement: Measurement) -> str:
    """Return why a candidate that others were compared with is chosen.

    Args:
        best: Its name.
        results: What became of each candidate, the reference first.
        measurement: The times of those that were right.
    """
    reference = results[0].name
    order = [result.name for result in results if result.status == "measured"]
    if best == reference:
        why = f"nothing was faster than {reference} by more than the noise"
        untold = [result for result in results[1:] if _is_short_of_time(result)]
        return "; ".join([why, *([_fates(untold)] if untold else [])])
    ratio = measurement.ratio(best)
    why = (
        f"{best} takes {ratio.ratio:.3f} of the time of {reference} ({ratio.low:.3f} to "
        f"{ratio.high:.3f})"
    )
    after = order[order.index(best) + 1 :]
    close = [n for n in after if measurement.ratio(n, to=best).verdict != "slower"]
    if close:
        why += f"; {' and '.join(close)} cost more to compile and could not be told to be faster"
    return why


def why_none(results: Sequence[CandidateResult], *, budget_s: float, used_s: float) -> str:
    """Return why nothing was compared with the reference.

    Args:
        results: What became of each candidate, the reference first.
        budget_s: The time that there was.
        used_s: The time that was used.
    """
    reference, *others = results
    if not others:
        return f"nothing but {reference.name} was there to be tried"
    if any(map(_is_short_of_time, others)):
        why = (
            f"nothing could be compared with {reference.name} within budget_s={budget_s:g} "
            f"({used_s:.3g} s were used)"
        )
    elif any(other.status == "not now" for other in others):
        why = f"nothing could be compared with {reference.name}"
    else:
        why = f"nothing but {reference.name} ran and was right"
    return f"{why}: {_fates(others)}"


def _is_short_of_time(result: CandidateResult) -> bool:
    is_untimed = result.status == "measured" and not result.is_compared
    return is_untimed or result.status in ("timed out", "left out")


def _fates(results: Sequence[CandidateResult]) -> str:
    """Return what became of candidates, those of one fate together."""
    names: dict[str, list[str]] = {}
    for result in results:
        fate = f"{result.status}: {result.reason}"
        if result.status == "measured":
            fate = "ran and was right, but too little time was left to time it; raise budget_s"
        names.setdefault(fate, []).append(result.name)
    return "; ".join(f"{' and '.join(same)} {fate}" for fate, same in names.items())
