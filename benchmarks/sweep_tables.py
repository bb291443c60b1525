"""The table of models from elsewhere under a plan."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from benchmarks.baseline_tables import figure, why_not


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


def _summary(result: dict[str, Any], ran: list[dict[str, Any]]) -> str:
    held = sum(model["parity"]["held"] for model in ran)
    text = (
        f"Plan ``{result['settings']['plan']}``: {len(ran)} of {len(result['models'])} models ran; "
        f"parity held for {held}"
    )
    if ran:
        exact = sum(model["parity"]["exact"] for model in ran)
        text += f", to the bit for {exact}" if exact else ""
        text += f"; median gain {statistics.median(model['gain'] for model in ran):.2f}"
        forms = Counter(model["form"] for model in ran)
        text += "".join(f"; {form}: {number}" for form, number in forms.most_common())
    if "elapsed_s" in result:
        text += f"; measured in {result['elapsed_s']:.0f} s, {result['jobs']} at a time"
    return f"{text}."


def _cells(model: dict[str, Any]) -> list[str]:
    parity, waits = model["parity"], model.get("host_waits")  # none are counted on a CPU
    agreed = "to the bit" if parity["exact"] else "held" if parity["held"] else "**not held**"
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
    """Return a reason as the text of a list: angle brackets and asterisks are no marks."""
    words = " ".join(reason.split())
    return words.replace("<", "\\<").replace("*", "\\*").replace("_", "\\_")
