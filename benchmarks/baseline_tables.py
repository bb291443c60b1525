"""The tables of ``baseline_CARD.json``, in Markdown, of whatever workloads and methods it has."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks import anchors
from benchmarks.compare import REFERENCE

Result = dict[str, Any]
# The columns in order, with heads that a page has room for; other methods follow by their names.
HEADS = {
    "naive": "naive",
    "tuned": "tuned",
    "Lightning": "Lightning",
    "Accelerate": "Accelerate",
    "transformers Trainer": "transf.",
    "compile default": "comp.",
    "compile reduce-overhead": "comp. r-o",
    "compile max-autotune-no-cudagraphs": "comp. m-a-n",
    "compile max-autotune": "comp. m-a",
    "by hand: graph": "hand",
    "by hand: graph + compile by block": "hand, block",
    "by hand: graph + compile whole": "hand, whole",
    "by hand: graph + float8 + compile by block": "hand, float8",
    "torchfast eager": "tf eager",
    "torchfast exact": "tf exact",
    "torchfast exact + vocabulary loss": "tf exact, voc.",
    "torchfast fast, not compiled": "tf fast, no comp.",
    "torchfast fast": "tf fast",
    "torchfast fast, unrolled": "tf fast, unrolled",
    "torchfast fast + vocabulary loss": "tf fast, voc.",
    "torchfast fast, searched": "tf fast, searched",
}
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def headline(result: Result) -> list[str]:
    """Return what a newcomer wants to know: trainers, the best by hand and torchfast's presets."""
    kinds = {
        "Lightning": "Lightning",
        "Accelerate": "Accelerate",
        "`torch.compile`, best mode": "compile .*",
        "best loop by hand": r"by hand: (?!.*float8).*",
        '`plan="exact"`': "torchfast exact",
        '`plan="fast"`': "torchfast fast",
    }
    lines = [
        f"| ms a step | {' | '.join(kinds)} | `fast` takes, of the best by hand "
        "| `fast` is faster than Lightning by |",
        f"|---|{'---:|' * (len(kinds) + 2)}",
    ]
    for name, about in result["workloads"].items():
        if "torchfast fast" not in about["methods"]:
            continue
        best, cells = _bests(about["methods"], kinds.values())
        peer, hand, fast = best[0], best[3], best[-1]
        own = _share(fast, hand)
        gain = f"{_quotient(peer, fast):.2f} ×" if peer and fast else "–"
        lines.append(f"| {name} | {' | '.join(cells)} | {own} | {gain} |")
    return lines


def searched(result: Result) -> list[str]:
    """Return what compiling gains by hand, and what the search for a way to compile finds of it."""
    kinds = {
        "captured by hand": "by hand: graph",
        "compiled too, the best": r"by hand: graph \+ compile .*",
        '`plan="fast"`': "torchfast fast",
        "searched": "torchfast fast, searched",
    }
    lines = [
        f"| ms a step | {' | '.join(kinds)} | compiled ÷ captured, by hand "
        "| searched ÷ best by hand | search and cold start, s |",
        f"|---|{'---:|' * (len(kinds) + 3)}",
    ]
    for name, about in result["workloads"].items():
        best, cells = _bests(about["methods"], kinds.values())
        graph, hand, _, found = best
        fastest = min((m for m in (graph, hand) if m), key=lambda m: m["median_ms"], default=None)
        cells += [_share(hand, graph), _share(found, fastest)]
        cells.append(figure(found["cold_start_s"]) if found else "–")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _bests(
    methods: dict[str, Result], patterns: Iterable[str]
) -> tuple[list[Result | None], list[str]]:
    """Return the fastest of each kind, and its milliseconds as a cell."""
    best = [_best(methods, pattern) for pattern in patterns]
    return best, [figure(one["median_ms"]) if one else "–" for one in best]


def _best(methods: dict[str, Result], pattern: str) -> Result | None:
    """Return the fastest of the methods whose name fits, of those that ran and trained."""
    fitting = [m for name, m in methods.items() if re.fullmatch(pattern, name) and trains(m)]
    return min(fitting, key=lambda method: float(method["median_ms"]), default=None)


def _share(one: Result | None, other: Result | None) -> str:
    """Return the cell of one method's time divided by another's."""
    return f"{_quotient(one, other):.3f}" if one and other else "–"


def _quotient(one: Result, other: Result) -> float:
    """Return one method's time divided by another's.

    Where both are of one run that is done round by round, else by the reference of each one's run.
    """
    if one["run"] == other["run"]:
        rounds = zip(one["blocks_ms"], other["blocks_ms"], strict=True)
        return statistics.median(a / b for a, b in rounds)
    return statistics.median(relative(one)) / statistics.median(relative(other))


def summary(result: Result) -> list[str]:
    """Return workloads by methods, in milliseconds a step."""
    workloads = result["workloads"]
    measured = dict.fromkeys(name for about in workloads.values() for name in about["methods"])
    methods = [name for name in HEADS if name in measured]
    methods += [name for name in measured if name not in HEADS]
    notes: dict[str, int] = {}  # each reason once, with its number
    lines = [
        f"| ms a step | {' | '.join(HEADS.get(method, method) for method in methods)} |",
        f"|---|{'---:|' * len(methods)}",
    ]
    for name, workload in workloads.items():
        trained = [m["median_ms"] for m in workload["methods"].values() if trains(m)]
        fastest = min(trained, default=None)
        cells = [_cell(workload["methods"].get(method), fastest, notes) for method in methods]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    renamed = [
        f"{HEADS[method]}: {method}" for method in methods if HEADS.get(method, method) != method
    ]
    footnotes = [f"{_superscript(number)} {text}" for text, number in notes.items()]
    legend = (
        "Bold: the fastest that trains. Broken: it runs, but its loss does not fall as it should."
    )
    return [
        *lines,
        "",
        _sentence(legend, renamed),
        *(["", "; ".join(footnotes) + "."] * bool(notes)),
    ]


def _sentence(start: str, details: list[str]) -> str:
    return f"{start} {'; '.join(details)}." if details else start


def _cell(method: Result | None, fastest: float | None, notes: dict[str, int]) -> str:
    if method is None:
        return ""
    if method["status"] != "ran":
        return "–" + _superscript(notes.setdefault(why_not(method), len(notes) + 1))
    if not trains(method):
        return "broken"
    ms = figure(method["median_ms"])
    return f"**{ms}**" if method["median_ms"] == fastest else ms


def _superscript(number: int) -> str:
    return str(number).translate(SUPERSCRIPTS)


def workload(result: Result, name: str) -> list[str]:
    """Return everything that was measured of a workload."""
    if name not in result["workloads"]:
        return ["Not measured."]
    about = result["workloads"][name]
    lines = [
        f"{about['title']}; {about['items_per_step']:,} {about['unit']} a step, "
        f"{about['num_parameters']:,} parameters, {about['precision']}.",
        "",
        f"| method | ms (spread) | × {REFERENCE} (quartiles) | host ms | device ms | peak GB | "
        "cold start s | host syncs | kernels | launches | loss |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for method_name, method in about["methods"].items():
        if method["status"] == "ran":
            lines.append(f"| {method_name} | {' | '.join(_figures(method))} |")
        else:
            lines.append(f"| {method_name} | {why_not(method)} |{' |' * 9}")
    return lines


def _figures(method: Result) -> list[str]:
    ratios = relative(method)
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    losses = method["losses"]
    loss = f"{losses[0]:.3f} → {losses[-1]:.3f} after {len(losses)} steps" if losses else ""
    peak = method["peak_bytes"]
    return [
        f"{figure(method['median_ms'])} ({method['spread']:.1%})",
        f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})",
        figure(method["host_ms"]),
        figure(method["device_ms"]),
        figure(None if peak is None else peak / 1e9),
        figure(method["cold_start_s"]),
        *(_count(method[key]) for key in ("host_syncs", "num_kernels", "num_launches")),
        loss if trains(method) else f"**broken**: {loss}",
    ]


def anchor_table(result: Result) -> list[str]:
    """Return what was measured against figures that it must attain."""
    lines = ["| workload | what | anchor, ms | here, ms | difference |", "|---|---|---:|---:|---:|"]
    for anchor in (*anchors.BESTS, *anchors.PEERS):
        here = measured(result, anchor)
        compared = "none ran and trained |"
        if here is not None:
            compared = f"{figure(here)} | {here / anchor.ms - 1:+z.1%}"  # z: no -0.0
        lines.append(f"| {anchor.workload} | {anchor.what} | {anchor.ms:g} | {compared} |")
    return [*lines, "", f"Anchors: {anchors.SOURCE}."]


def measured(result: Result, anchor: anchors.Anchor) -> float | None:
    """Return the milliseconds of the fastest method that is what the anchor is, if any ran."""
    methods = result["workloads"].get(anchor.workload, {}).get("methods", {})
    return min(
        (
            method["median_ms"]
            for name, method in methods.items()
            if re.search(anchor.methods, name) and trains(method)
        ),
        default=None,
    )


# -- What a method's figures say -------------------------------------------------------------------


def trains(method: Result) -> bool:
    """Return whether a method ran and trained."""
    return method["status"] == "ran" and bool(method["trains"])


def relative(method: Result) -> list[float]:
    """Return a method's times relative to the reference, round by round."""
    pairs = zip(method["blocks_ms"], method["reference_blocks_ms"], strict=True)
    return [own / reference for own, reference in pairs]


def why_not(method: Result) -> str:
    """Return why a method did not run, as the text of a table's cell."""
    reason = " ".join(method.get("reason", "").replace("|", "/").split())
    return f"{method['status']}: {reason}" if reason else str(method["status"])


def figure(value: float | None, digits: int = 3) -> str:
    """Return a number with so many significant digits, never in scientific notation."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits}g}")  # first, since it may gain a digit: 9.999
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{max(0, decimals)}f}"


def _count(value: float | None) -> str:
    """Return a count per step, with a decimal only if it is no whole number."""
    return "" if value is None else f"{value:,.1f}".removesuffix(".0")
