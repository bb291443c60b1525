"""Result files of the benchmarks on several GPUs, made up."""

from benchmark_results import MACHINE

RUN = {
    "date": "2026-11-21",
    "command": "PYTHONPATH=. python benchmarks/many_gpus.py",
    "commit": "abc1234",
}


def many_gpus():
    """Return steps on two GPUs: arms beside the one by hand, one that failed, one GPU alone."""

    def row(group, arm, **others):
        return {
            "group": group,
            "name": f"gpt2, {arm}",
            "workload": "gpt2",
            "arm": arm,
            "run": RUN,
            **others,
        }

    def times(arm, ms, *, is_alone=False, peak_gb=1.5):
        ranks = 1 if is_alone else 2
        return row(
            "times",
            arm,
            is_alone=is_alone,
            turns_ms=[ms],
            loss=5.0,
            ms=ms,
            peak_gb=peak_gb,
            items_per_s=ranks * 8192 / ms * 1e3,
        )

    talk = {"step_ms": 41.0, "communication_ms": 20.0, "exposed_communication_ms": 1.0}
    rows = [
        times("ddp, graph by hand", 40.0),
        times("ddp, torchfast", 41.0),
        times("ddp, no graph by hand", 60.0),
        row("times", "fsdp, Lightning", is_alone=False, turns_ms=[], failed="Error: a | b\n"),
        times("one GPU, torchfast", 39.0, is_alone=True, peak_gb=None),
        row("exact", "ddp, torchfast", steps=24, replays=12, tensors=1500, same_bits=True),
        row(
            "exact",
            "fsdp, torchfast",
            steps=24,
            replays=12,
            tensors=1500,
            same_bits=False,
            differs=["rank 1: head.weight"],
        ),
        row("exact", "hsdp, torchfast", failed="Error: c | d\n"),
        row("communication", "ddp, torchfast", ranks=[talk, {**talk, "communication_ms": 0.0}]),
        row("communication", "fsdp, torchfast", failed="Error: e | f\n"),
    ]
    return {
        "date": "2026-11-21",
        "command": RUN["command"],
        "machine": dict(MACHINE),
        "settings": {"size": "full", "ranks": 2, "rounds": 5, "steps": 20},
        "ranks": 2,
        "left_out": ["times, llama, ddp, torchfast: no time was left"],
        "rows": rows,
    }
