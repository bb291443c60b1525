"""Made-up results of what compiling costs and what the loss over a vocabulary does."""

from __future__ import annotations

from benchmark_results import MACHINE


def compile_cost():
    """Return what compiling costs: every section, with a row of each kind that failed."""

    def ran(first_step_s, **more):
        return {"status": "ran", "first_step_s": first_step_s, "form": "captured, compiled", **more}

    def compiled(**counts):
        return {"graphs": 2, "graph_breaks": 0, "recompiles": 0, "s": 7.5, **counts}

    late = {"status": "failed", "reason": "not done in | 60 s"}
    cold = [
        ran(8.0, compiled="by blocks", compile=compiled(), step_ms=20.0, rounds_ms=[20.0]),
        ran(1.0, compiled="not compiled", step_ms=30.0, rounds_ms=[30.0]),
        ran(40.0, compiled="whole", compile=compiled(), step_ms=19.8, rounds_ms=[19.8]),
    ]
    found = {"cache_autograd_hits": 4, "cache_graph_hits": 4}
    warm = [
        ran(20.0, cache="cold", compile=compiled(cache_autograd_misses=4), cache_bytes=5_000_000),
        ran(1.5, cache="warm", compile=compiled(**found), cache_bytes=5_000_000),
    ]
    work = [
        ran(9.0, workload="mlp", compile=compiled(graph_breaks=1), step_ms=0.125),
        {"workload": "moe", **late},
    ]
    sections = {
        "cold": {"rows": cold, "summary": {"start": 0.2, "slower": 0.01, "held": True}},
        "warm": {"rows": warm, "summary": {"start": 0.075, "proved": True, "held": True}},
        "curves": {
            "rows": [],
            "summary": {
                "compiled": [2.5, 2.52],
                "not_compiled": [2.49, 2.53],
                "difference": -0.0025,
                "noise": 0.04,
                "held": True,
            },
        },
        "workloads": {"rows": work, "summary": {"ran": 1}},
    }
    for section in sections.values():
        section["status"] = "ran"
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/compile_cost.py",
        "machine": dict(MACHINE),
        "sections": sections,
    }


def losses():
    """Return what the loss over a large vocabulary costs, with and without a peak."""
    row = {"name": "GPT-2", "tokens": 32768, "width": 768, "vocabulary": 50257, "first_s": 1.25}
    row |= {"error": 0.00123, "pool_bytes": None}
    ways = [("plain eager", 20.0, 6 << 30), ("torchfast graph", 15.0, None)]
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/losses.py",
        "machine": dict(MACHINE),
        "rows": [
            {**row, "method": name, "ms": ms, "turns_ms": [ms - 1, ms, ms + 1], "peak_bytes": peak}
            for name, ms, peak in ways
        ],
    }


def compiled_update():
    """Two optimizers, of which "auto" compiles one."""

    def row(optimizer, update, ms, graphs, *told):
        return {
            "workload": "gpt2",
            "optimizer": optimizer,
            "update": update,
            "ms": ms,
            "quartiles_ms": [ms - 0.1, ms + 0.1],
            "apart": 0.0 if update == "False" else 3e-5,
            "told": [*told],
            "update_graphs": graphs,
            "is_captured": True,
            "turns_ms": [ms, ms],
        }

    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/compiled_update.py",
        "machine": dict(MACHINE),
        "rows": [
            *(row("RMSprop", u, ms, g) for u, ms, g in (("False", 62.5, 0), ("True", 60.0, 1))),
            row("RMSprop", "auto", 60.1, 1, "the update of RMSprop: compiled in 10.4 s"),
            *(row("NAdam", u, ms, g) for u, ms, g in (("False", 62.0, 0), ("True", 63.0, 1))),
            # Compiled to be measured, and left.
            row("NAdam", "auto", 62.1, 1, "the update of NAdam runs as it is: it was not faster"),
        ],
    }
