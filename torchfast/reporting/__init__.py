"""What a run shows while it trains and leaves behind: a line, a log, a curve.

- `ProgressLine` keeps one line of the terminal up to date, or prints one line per update
  where there is no terminal. It never stops a run: a stream that breaks turns it off.
- `JSONLWriter` appends one strict JSON object per line, whole lines only, so that a killed
  run leaves a log that still reads; `read_jsonl` reads it back.
- `plot_lines` draws the curves of one or more runs into a self-contained SVG.

All three work on the host, with the standard library alone, on numbers that have already left
the device. They are for log steps: calling them on every step would bring back the wait that
the rest of the library removes.

Under several ranks, let one rank report; the others take ``ProgressLine("off")``.
"""

from typing import TYPE_CHECKING

from torchfast._core.later import later
from torchfast.reporting.jsonl import JSONLWriter, read_jsonl
from torchfast.reporting.progress import ProgressLine

if TYPE_CHECKING:
    from torchfast.reporting.plot import plot_lines

__all__ = ["JSONLWriter", "ProgressLine", "plot_lines", "read_jsonl"]

__getattr__ = later(globals(), {"torchfast.reporting.plot": ("plot_lines",)})
