"""Figures measured once by loops written by hand: what the methods of the yardstick must attain.

They come from loops of a few dozen lines, written before the yardstick and sharing no code with it.
A method of the same name that is much slower here is a badly written method, not a slow peer.
"""

from __future__ import annotations

from typing import NamedTuple

# What was measured on another card cannot be held against them.
CARD = "h200"
SOURCE = "measured on one H200, torch 2.11.0+cu130, 2026-11-20, by hand-written loops"

COMPILED = r"^by hand: graph \+ compile"


class Anchor(NamedTuple):
    """A figure to attain.

    Attributes:
        workload: Its name.
        what: What was measured, for the reader.
        ms: Milliseconds a step.
        methods: A regular expression of methods that are the same; the fastest of them counts.
    """

    workload: str
    what: str
    ms: float
    methods: str


BESTS = (
    Anchor("mlp", "one graph", 0.185, r"^by hand: graph$"),
    Anchor("gpt-small", "one graph, compiled", 1.99, COMPILED),
    Anchor("moe", "one graph, compiled by block", 17.1, COMPILED),
    Anchor("gpt2", "one graph, compiled", 81.2, COMPILED),
    Anchor("resnet50", "one graph, compiled", 38.5, COMPILED),
    Anchor("llama", "compiled by block, without a graph", 228.6, COMPILED),
    Anchor("llama", "one graph, float8, compiled by block", 194.2, r"^by hand: .*float8"),
)

# By workload, in the order of these methods; None where nothing was measured.
PEER_METHODS = (
    "naive",
    "tuned",
    "Accelerate",
    "Lightning",
    "compile default",
    "compile reduce-overhead",
)
_PEERS_MS: dict[str, tuple[float | None, ...]] = {
    "mlp": (2.38, 1.67, 1.98, 2.64, 5.95, 1.41),
    "gpt-small": (13.1, 13.9, 12.0, 12.1, 8.23, 3.62),
    "moe": (214, 198, 201, 209, None, None),
    "gpt2": (None, 95.5, 96.6, 93.8, 81.3, 83.2),
    "resnet50": (80.9, 57.8, None, 62.0, 40.9, 40.7),
    "llama": (None, 289.7, None, None, None, None),
}
PEERS = tuple(
    Anchor(workload, method, ms, f"^{method}$")
    for workload, row in _PEERS_MS.items()
    for method, ms in zip(PEER_METHODS, row, strict=True)
    if ms is not None
)
