"""What a rank raises that hears, in the middle of a step, that another one ran out of memory."""

from __future__ import annotations

from typing import final


@final
class OtherRankRanOut(Exception):  # noqa: N818
    """Ends a try that another rank cannot go on with; whoever began the try catches it."""
