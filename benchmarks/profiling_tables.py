"""The tables of what watching a training costs, and of what a profiler says."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from benchmarks.baseline_tables import figure


def watching(result: dict[str, Any]) -> list[str]:
    """Return the table of what being watched costs."""
    lines = [
        "| step | fit | ms | against | usual (95 of 100) | within | longer by (quartiles) |",
        "|---|---|---:|---|---:|---:|---:|",
    ]
    for row in result["rows"]:
        cells = ["", ""]
        within = f"{row['within']:.2%}" if "within" in row else ""
        if "cost" in row:
            cells = [
                f"{cost:+.2%} ({low:+.2%} to {high:+.2%})"
                for cost, (low, high) in (
                    (row["usual"], row["usual_interval"]),
                    (row["cost"], row["cost_quartiles"]),
                )
            ]
        lines.append(
            f"| {row['mode']} | {row['arm']} | {figure(row['ms'])} "
            f"| {row.get('against', '')} | {cells[0]} | {within} | {cells[1]} |"
        )
    return lines


def slow_scripts(result: dict[str, Any]) -> list[str]:
    """Return the table of what the profiler says of scripts with a fault each."""
    counts = result["summary"]
    lines = [
        f"Right in all: {counts['right']} of {counts['scripts']}; the class {counts['verdict']}, "
        f"its line {counts['line']}, the first fault {counts['kind']}.",
        "",
        "| script | what is wrong | verdict | first fault | line |",
        "|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        expected, answer = row["expected"], row.get("answer")
        if answer is None:
            lines.append(f"| {name} | {expected['why']} | {row['status']} |  |  |")
            continue
        right = row["judgement"]
        kind = answer["findings"][0]["kind"] if answer["findings"] else "none"
        found = [
            cell if right[part] else f"{cell}, **not right**"
            for part, cell in (("verdict", answer["verdict"]), ("kind", kind))
        ]
        line = "" if expected["kind"] == "none" else "right" if right["line"] else "**not right**"
        lines.append(f"| {name} | {expected['why']} | {' | '.join(found)} | {line} |")
    return lines


def slow_to_fast(result: dict[str, Any]) -> list[str]:
    """Return the table of a slow loop whose faults are taken out one by one."""
    lines = [
        "| stage | what is changed | ms a step | device busy | host waits a step | verdict |",
        "|---|---|---:|---:|---:|---|",
    ]
    for row in result["rows"]:
        used = row["utilisation"]
        lines.append(
            f"| {row['stage']} | {row['change']} | {figure(row['ms'])} "
            f"| {'' if used is None else f'{used:.1%}'} | {row['host_waits']:g} "
            f"| {row['verdict']} |"
        )
    return lines


def compare_check(result: dict[str, Any]) -> list[str]:
    """Return the table of what the comparison of two results says of known cases."""
    counted: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in result["rows"]:
        counted[row["workload"], row["kind"]][row["verdict"]] += 1
    what = {
        "same": "the same code twice",
        "planted": f"{result['planted']:.0%} planted",
        "taken away": "and taken away again",
    }
    lines = ["| workload | what was compared | verdicts |", "|---|---|---|"]
    for (name, kind), verdicts in counted.items():
        told = ", ".join(f"{verdict}: {num}" for verdict, num in verdicts.most_common())
        lines.append(f"| {name} | {what[kind]} | {told} |")
    return lines


def first_replay(result: dict[str, Any]) -> list[str]:
    """Return the table of how soon a step is replayed."""
    lines = [
        "| workload | eager step, ms | first replay after, ms | in eager steps "
        "| compared after, in eager steps | by hand, first replay after, ms |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    return lines + [
        f"| {row['workload']} | {figure(row['eager_ms'])} | {figure(row['first_replay_ms'])} "
        f"| {row['first_replay_steps']:.2f} | {row['checked_steps']:.2f} "
        f"| {figure(row['by_hand_ms']) if 'by_hand_ms' in row else ''} |"
        for row in result["rows"]
    ]


def graph_events(result: dict[str, Any]) -> list[str]:
    """Return the table of timing events inside of graphs."""
    rows = {(row["workload"], row["arm"]): row for row in result["rows"]}
    lines = [
        "| workload | a replay, ms | longer with events (quartiles) | the same without, again "
        "| forward, backward, update in a replay | in the eager step | their sum, of the whole "
        "| read late: wrong, refused |",
        "|---|---:|---:|---:|---|---|---:|---|",
    ]
    for name in dict.fromkeys(workload for workload, _ in rows):
        plain, events, again = (rows[name, arm] for arm in ("plain", "events", "again"))
        low, high = events["cost_quartiles"]
        parts, eager = events["parts_ms"], events["eager_ms"]
        lines.append(
            f"| {name} | {figure(plain['ms'])} | {events['cost']:+.2%} ({low:+.2%} to {high:+.2%}) "
            f"| {again['cost']:+.2%} | {' / '.join(map(figure, parts.values()))} "
            f"| {' / '.join(map(figure, eager.values()))} "
            f"| {sum(parts.values()) / events['whole_ms']:.1%} "
            f"| {events['late']['wrong']:.0%}, {events['late']['refused']:.0%} |"
        )
    return lines
