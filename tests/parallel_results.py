"""Result files of the benchmarks on several GPUs, made up."""

from benchmark_results import MACHINE


def many_gpus():
    """Return steps on two GPUs: arms beside the one by hand, one that failed, one GPU alone."""

    def row(arm, ms, *, is_alone=False, **others):
        ranks = 1 if is_alone else 2
        return {
            "arm": arm,
            "is_alone": is_alone,
            "turns_ms": [ms],
            "loss": 5.0,
            "ms": ms,
            "peak_gb": 1.5,
            "items_per_s": ranks * 8192 / ms * 1e3,
            **others,
        }

    talk = {"step_ms": 41.0, "communication_ms": 20.0, "exposed_communication_ms": 1.0}
    rows = [
        row("ddp, no graph by hand", 60.0),
        row("ddp, graph by hand", 40.0),
        row("ddp, torchfast", 41.0, communication=[talk, {**talk, "communication_ms": 0.0}]),
        {"arm": "fsdp, Lightning", "is_alone": False, "turns_ms": [], "failed": "Error: a | b\n"},
        row("one GPU, torchfast", 39.0, is_alone=True, peak_gb=None),
    ]
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/many_gpus.py",
        "machine": dict(MACHINE),
        "ranks": 2,
        "size": "full",
        "workloads": {"gpt2": rows},
    }
