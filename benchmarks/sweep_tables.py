"""The table of models from elsewhere under a plan."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable
from typing import Any

from benchmarks.baseline_tables import figure, why_not

Record = dict[str, Any]
# How far a plan in bf16 may be from the plain loop in fp32, in errors of the plain loop in bf16,
# for it to be bf16 that does it. Another order of the same sums already moves these errors.
MOST_OF_ROUNDING = 1.25
PACKAGES = re.compile(r"(?<!\w)(?:/[^\s/]+)*/(?:site|dist)-packages/")


def sweep(result: dict[str, Any]) -> list[str]:
    """Return the table of a sweep, and why steps that are not captured are not."""
    models = result["models"]
    ran = {name: model for name, model in models.items() if model["status"] == "ran"}
    lines = [
        _summary(result, list(ran.values())),
        "",
        "| model | parity | plain ms | plan ms | gain (quartiles) | form "
        "| host waits, plain → plan |",
        "|---|---|---:|---:|---:|---|---:|",
    ]
    for name, model in models.items():
        if name in ran:
            lines.append(f"| {name} | {' | '.join(_cells(model))} |")
        else:
            lines.append(f"| {name} | {why_not(model)} |{' |' * 5}")
    aside = {
        name: model["stepped_aside"]
        for name, model in ran.items()
        if model.get("stepped_aside") and not model["form"].startswith("captured")
    }
    if aside:
        lines += ["", "Not captured, and why:", ""]
        lines += [f"- {name}: {'; '.join(_plain(why) for why in w)}" for name, w in aside.items()]
    return lines


# -- Parity that is not held under bf16 ------------------------------------------------------------


def rounded(parities: Iterable[Record]) -> str:
    """Return how many of those not held do what bf16 does; empty where that was not measured."""
    others = [parity for parity in parities if not parity["held"]]
    controlled = [parity for parity in others if "rounding" in parity]
    if not controlled:
        return ""
    within = sum(map(does_as_bf16, controlled))
    return (
        f"; not held, but within {MOST_OF_ROUNDING:g} times the plain bf16 loop: "
        f"{within} of {len(others)}"
    )


def does_as_bf16(parity: Record) -> bool:
    """Return whether what is beyond the tolerance is little more than bf16 does to a plain loop."""
    plain = parity["rounding"]
    if not (_is_finite(parity) and _is_finite(plain)):
        return False
    return all(parity[name] <= MOST_OF_ROUNDING * plain[name] for name in _beyond(parity))


def apart(parity: Record) -> str:
    """Return how far plan and plain loop in bf16 are from that in fp32; empty if not measured."""
    if "rounding" not in parity:
        return ""
    plain = parity["rounding"]
    if not _is_finite(parity):
        return f" (not finite; plain bf16 loop {'finite' if _is_finite(plain) else 'not finite'})"
    names = _beyond(parity)
    own = ", ".join(f"{name.removesuffix('_error')} {figure(parity[name], 2)}" for name in names)
    control = [figure(plain[name], 2) for name in names] if _is_finite(plain) else ["not finite"]
    return f" ({own}; plain bf16 loop {', '.join(control)})"


def _errors(parity: Record) -> dict[str, float]:
    return {f"{name}_error": limit for name, limit in parity["tolerance"].items()}


def _beyond(parity: Record) -> list[str]:
    return [name for name, limit in _errors(parity).items() if parity[name] > limit]


def _is_finite(errors: Record) -> bool:
    return "update_error" in errors


# -- Text ------------------------------------------------------------------------------------------


def _summary(result: dict[str, Any], ran: list[dict[str, Any]]) -> str:
    held = sum(model["parity"]["held"] for model in ran)
    text = (
        f"Plan ``{result['settings']['plan']}``: {len(ran)} of {len(result['models'])} models ran; "
        f"parity held for {held}"
    )
    if ran:
        exact = sum(model["parity"]["exact"] for model in ran)
        text += f", to the bit for {exact}" if exact else ""
        text += rounded(model["parity"] for model in ran)
        text += f"; median gain {statistics.median(model['gain'] for model in ran):.2f}"
        forms = Counter(model["form"] for model in ran)
        text += "".join(f"; {form}: {number}" for form, number in forms.most_common())
    if "elapsed_s" in result:
        text += f"; measured in {result['elapsed_s']:.0f} s, {result['jobs']} at a time"
    return f"{text}."


def _cells(model: dict[str, Any]) -> list[str]:
    parity, waits = model["parity"], model.get("host_waits")  # none are counted on a CPU
    agreed = "to the bit" if parity["exact"] else "held" if parity["held"] else "**not held**"
    agreed += apart(parity)
    low, high = model["gain_quartiles"]
    return [
        agreed,
        figure(model["eager_ms"]),
        figure(model["plan_ms"]),
        f"{model['gain']:.3f} ({low:.3f} to {high:.3f})",
        model["form"],
        f"{waits['eager']:g} → {waits['plan']:g}" if waits else "",
    ]


def _plain(reason: str) -> str:
    """Return a reason as the text of a list: angle brackets and asterisks are no marks.

    Of the path of a file in a package, what is above the package is left out.
    """
    words = " ".join(PACKAGES.sub("", reason).split())
    return words.replace("<", "\\<").replace("*", "\\*").replace("_", "\\_")
