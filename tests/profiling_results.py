"""Made-up results of what watching costs, and of what is seen."""

from __future__ import annotations

from benchmark_results import MACHINE


def watching():
    """Return what being watched costs."""
    more = {"against": "no times", "cost": 0.0025, "cost_quartiles": [0.001, 0.004], "floor": 0.002}
    more |= {"usual": 0.003, "usual_interval": [0.002, 0.005], "within": 0.0022}
    rows = [{"mode": "eager", "arm": "no times", "ms": 5.0}]
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/watching.py",
        "machine": dict(MACHINE),
        "rows": [*rows, {"mode": "eager", "arm": "as it is", "ms": 5.02, **more}],
    }


def graph_events():
    """Return what timing events cost in a graph."""
    parts = {"forward": 1.0, "backward": 2.0, "update": 0.5}
    more = {"cost": 0.004, "cost_quartiles": [0.003, 0.005]}
    events = {"parts_ms": parts, "eager_ms": parts, "whole_ms": 3.5}
    late = {"late": {"wrong": 0.0, "refused": 1.0}}
    arms = {"plain": {}, "events": more | events | late, "again": more}
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/graph_events.py",
        "machine": dict(MACHINE),
        "rows": [{"workload": "mlp", "arm": arm, "ms": 3.5, **row} for arm, row in arms.items()],
    }


def compare_check():
    """Return what the comparison said of the same code and of a slowdown."""
    kinds = {"same": ("no difference", "no difference", "slower"), "planted": ("slower",)}
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/compare_check.py",
        "machine": dict(MACHINE),
        "planted": 0.03,
        "rows": [
            {"workload": "mlp", "kind": kind, "verdict": verdict}
            for kind, verdicts in kinds.items()
            for verdict in verdicts
        ],
    }


def first_replay():
    """Return how soon a step was replayed."""
    times = {"eager_ms": 8.0, "first_replay_ms": 12.0, "first_replay_steps": 1.5}
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/first_replay.py",
        "machine": dict(MACHINE),
        "rows": [
            {"workload": "gpt-small", **times, "checked_steps": 3.25},
            {"workload": "mlp", **times, "checked_steps": 3.25, "by_hand_ms": 11.0},
        ],
    }


def slow_scripts():
    """Return what the profiler said of scripts, every status among it."""
    expected = {"classes": ["sync-bound"], "kind": "host-sync", "why": "it reads a number"}
    right = {"verdict": True, "kind": True, "line": True, "elsewhere": False}
    answer = {"verdict": "sync-bound", "findings": [{"kind": "host-sync", "line": 7}]}
    rows = {
        "one": {"expected": expected, "status": "right", "answer": answer, "judgement": right},
        "other": {
            "expected": expected,
            "status": "wrong",
            "answer": {"verdict": "fine", "findings": []},
            "judgement": dict.fromkeys(right, False),
        },
        "last": {"expected": expected, "status": "failed", "reason": "not done in 60 s"},
    }
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python -m benchmarks.slow_scripts.check",
        "machine": dict(MACHINE),
        "summary": {"scripts": 3, "right": 1, "verdict": 1, "kind": 1, "line": 1},
        "rows": rows,
    }


def slow_to_fast():
    """Return a slow loop whose faults are taken out: on a GPU, and where nothing tells busy."""
    stages = [("slow", "nothing", 20.0, 0.65, 3.0), ("fast", "plan='fast'", 2.5, None, 0.0)]
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/slow_to_fast.py",
        "machine": dict(MACHINE),
        "rows": [
            {
                "stage": stage,
                "change": change,
                "ms": ms,
                "utilisation": used,
                "host_waits": waits,
                "verdict": "sync-bound",
            }
            for stage, change, ms, used, waits in stages
        ],
    }
