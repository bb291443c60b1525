"""Result files of the programs beside the yardstick, made up."""

from __future__ import annotations

from benchmark_results import MACHINE


def sweep():
    """Return a sweep of models that ran, with every verdict on parity, and one that failed."""

    def ran(gain, **parity):
        return {
            "status": "ran",
            "parity": parity,
            "eager_ms": 9.5,
            "plan_ms": 9.5 / gain,
            "gain": gain,
            "gain_quartiles": [gain - 0.01, gain + 0.01],
            "form": "eager",
            "host_waits": {"eager": 1.0, "plan": 0.5},
        }

    models = {
        "timm resnet18": ran(1.0, held=True, exact=True),
        "timm vit": ran(2.0, held=True, exact=False),
        "transformers gpt2": ran(1.5, held=False, exact=False, reason="ParityError: differs"),
        "transformers t5": {"status": "failed", "reason": "RuntimeError: no | such shape"},
    }
    del models["timm vit"]["host_waits"]
    models["timm vit"]["stepped_aside"] = ["cuda_graph: a *copy* at my_model.py:3 in <module>"]
    models["transformers gpt2"]["form"] = "captured, compiled"
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/sweep.py",
        "machine": dict(MACHINE),
        "settings": {"plan": "fast", "device": "cuda", "limit_s": 60.0, "num_pairs": 10},
        "jobs": 2,
        "elapsed_s": 412.3,
        "models": models,
    }


def branches():
    """Return what branches on one and on two streams took."""
    row = {"name": "few", "experts": 4, "tokens": 8, "width": 16, "same_bits": True}
    rows = [
        {**row, "mode": mode, "streams": n, "ms": 2.5 / n, "gain": n * 0.9, "pool_bytes": n << 20}
        for mode in ("eager", "graph")
        for n in (1, 2)
    ]
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/branches.py",
        "machine": dict(MACHINE),
        "rows": rows,
    }


def recompute():
    """Return what recompute saves and costs."""
    row = {"name": "GPT", "ms": 25.0, "cost": 1.25, "cost_quartiles": [1.2, 1.3]}
    row |= {"planned_bytes": 300 << 20, "planned_cost": 1.275}
    row |= {"kept_bytes": 310 << 20, "peak_bytes": None}
    ways = [(False, True), ("blocks", True), ("selective", False)]
    rows = [{**row, "mode": "graph", "recompute": w, "same_bits": same} for w, same in ways]
    # The planner chooses among blocks.
    stages = {"recompute": "stages", "planned_cost": None, "planned_bytes": None}
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/recompute.py",
        "machine": dict(MACHINE),
        "rows": [*rows, {**rows[0], **stages}],
    }


def below_bf16():
    """Return what float8 and low-bit state give."""
    timed = {"group": "float8", "ms": 195.0, "items_per_s": 84021.0, "held_bytes": 48 << 30}
    timed |= {"reference": "by hand, float8", "ratio": 1.0, "ratio_quartiles": [1.0, 1.0]}
    timed |= {"losses": [4.0, 3.9]}
    ours = {"ratio": 0.985, "ratio_quartiles": [0.98, 0.99], "state_bytes": 8 << 30}
    state = {**timed, "group": "state", "reference": "fused AdamW"}
    curves = {
        "bf16": [4.0] * 18 + [2.0, 2.0],
        "bf16, weights 1": [4.0] * 18 + [2.0, 1.98],
        "bf16, weights 2": [4.0] * 18 + [2.0, 2.04],
        "8 bit": [4.0] * 16 + [4.2, 4.2, 2.0, 2.02],
        "4 bit": [4.0] * 18 + [2.0, 2.08],
        "float8": [4.0] * 8 + [4.0, 4.04],  # cut off
        "float8, weights 1": [4.0] * 18 + [2.0, 2.0],
    }
    warm = {"bf16, weights 1": [4.0] * 20, "float8, weights 1": [4.0] * 18 + [4.0, 4.16]}
    rows = [
        {**timed, "method": "by hand, float8"},
        {**timed, **ours, "method": "torchfast float8"},
        {**state, "method": "fused AdamW", "state_bytes": 8 << 30},
        {**state, **ours, "method": "8 bit", "state_bytes": 2 << 30},
        *({"group": "curves", "method": name, "losses": own} for name, own in curves.items()),
        *(
            {"group": group, "method": name, "losses": own}
            for group in ("warm-up", "decay")
            for name, own in warm.items()
        ),
    ]
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/below_bf16.py",
        "machine": dict(MACHINE),
        "rows": rows,
    }


def float8_choice():
    """Return what the measured choice of float8 takes beside bf16."""
    row = {"step": "captured", "items": 8192, "unit": "tokens", "bf16_ms": 25.0}
    kept = {"model": "one", "choice": "8 of 29 linear layers (8 tensorwise); in bf16: 'a' (why)"}
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/float8_choice.py",
        "machine": dict(MACHINE),
        "rows": [
            {**row, **kept, "ms": 20.0, "ratio": 0.8, "ratio_quartiles": [0.79, 0.81]},
            {**row, "model": "other", "choice": "no layer; in bf16: 'a' (why)"}
            | {"ms": 25.75, "ratio": 1.03, "ratio_quartiles": [1.02, 1.04]},
        ],
    }


def offload():
    """Return what offloading saves and costs."""
    row = {"blocks": 8, "width": 4096, "batch": 4, "length": 2048, "mode": "eager", "ms": 125.0}
    row |= {"time_ratio": 1.05, "peak_bytes": 6_250_000_000, "sent_bytes": 4_000_000_000}
    arms = [("plain", None), ("offload", 0.85)]
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/offload.py",
        "machine": dict(MACHINE),
        "bus_bytes_per_s": 55e9,
        "rows": [{**row, "arm": a, "bus_share": share, "same_bits": True} for a, share in arms],
    }


def offload_training():
    """Return what offloading saves and costs in training."""
    row = {"mode": "eager", "ms": 310.0, "time_ratio": 1.07, "time_ratio_quartiles": [1.06, 1.08]}
    row |= {"peak_bytes": 41_250_000_000, "of_plain_peak": 0.55, "sent_bytes": 12_340_000_000}
    arms = [("plain", None), ("offload auto", 0.83)]
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/offload_training.py",
        "machine": dict(MACHINE),
        "title": "Llama, made up",
        "bus_bytes_per_s": 55e9,
        "rows": [
            *({**row, "arm": a, "of_allowed": share, "same_bits": True} for a, share in arms),
            {**row, "arm": "offload optimizer", "of_allowed": None}
            | {"same_bits": None, "loss_difference": 0.00123},
        ],
    }


def offload_update():
    """Return what an update on the host costs."""
    row = {"accumulate": 8, "ms": 2500.0, "time_ratio": 1.25, "time_ratio_quartiles": [1.2, 1.3]}
    row |= {"update_ms": 450.0, "peak_bytes": 41_250_000_000, "threads": 16}
    row |= {"waiting_ratio": 0.95, "waiting_ratio_quartiles": [0.94, 0.96]}
    row["counters"] = {"offload_updates_begun_early": 7, "offload_updates_taken_back": 1}
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/offload_update.py",
        "machine": dict(MACHINE),
        "title": "Llama, made up",
        "rows": [{**row, "arm": "host", "same_bits": None, "counters": None, "waiting_ratio": None}]
        + [{**row, "arm": "host, overlap", "same_bits": same} for same in (True, False)],
    }


def fragmentation():
    """Return what an allocator has reserved with a preset and without, once on a full device."""
    row = {"after_steps": [50, 5000], "peak_bytes": 1_025_000_000}
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/fragmentation.py",
        "machine": dict(MACHINE),
        "settings": {"steps": 5000},
        "rows": [
            {**row, "arm": "torch's own settings", "reserved_by_peak": [1.18, 3.61], "retries": 2},
            {**row, "arm": "variable-shapes", "reserved_by_peak": [1.07, 1.068], "retries": 0},
        ],
    }


def out_of_memory():
    """Return how near accounts were, of one that was and of one after which nothing trained."""
    row = {"in_use_bytes": 156_264_448, "in_use_error": 0.0, "seen_error": -0.0123, "ms": 81.0}
    row |= {"reserved_error": 0.0004, "goes_on": True}
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/out_of_memory.py",
        "machine": dict(MACHINE),
        "settings": {"room_bytes": 1, "asked": 2},
        "rows": [{**row, "stage": "forward"}, {**row, "stage": "capture", "goes_on": False}],
    }


def largest():
    """Return the largest batch and model, one of each that was not settled or not found."""
    shape = {"layers": 16, "width": 2048, "batch": 1, "context": 4096}
    row = {"shape": shape, "settled": True, "peak_bytes": 130_000_000_000}
    row["host_bytes"] = 137_400_000_000
    found = {
        ("batch", "plain"): (12, 1_140_000_000, 51_000.0),
        ("batch", "recompute"): (42, 1_140_000_000, 43_210.0),
        ("model", "plain"): (20, 4_500_000_000, 9_000.0),
        ("model", "recompute"): (0, None, None),
    }
    rows = [
        {**row, "search": search, "levers": levers, "largest": n}
        | {"num_parameters": p, "tokens_per_s": t}
        for (search, levers), (n, p, t) in found.items()
    ]
    rows[1]["settled"] = False
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/largest.py",
        "machine": dict(MACHINE),
        "settings": {"limit_gb": None},
        "rows": rows,
    }


def checkpoint_cost():
    """Return what checkpoints cost a training."""
    save = {"saves": 3, "call_s": 0.2, "written_s": 12.5, "bytes": 13_700_000_000}
    stall = {
        kind: {**save, "stall_s": stall_s, "stalls_s": [stall_s - 0.01, stall_s, stall_s + 0.02]}
        for kind, stall_s in {"first": 9.0, "running": 0.25, "blocking": 14.0}.items()
    }
    cost = {"every": 50, "pairs": 5, "cost": 0.0175, "quartiles": [0.015, 0.0225], "held": True}
    large = {"steps": 6, "bytes": 13_700_000_000, "read_s": 5.0, "load_s": 8.5, "same": True}
    resume = {"cuts": 11, "twice": 8, "live_graph": 9, "same": 11, "held": True, "large": large}
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/checkpoint_cost.py",
        "machine": dict(MACHINE),
        "settings": {"plan": "fast", "every": 50},
        "num_parameters": 1_140_000_000,
        "place": {"file_system": "ext4", "free_bytes": 50_000_000_000, "write_gb_s": 1.25},
        "sections": {
            "stall": {"status": "ran", "step_ms": 290.0, "rows": [], "summary": stall},
            "throughput": {"status": "ran", "step_ms": 290.0, "rows": [], "summary": cost},
            "resume": {"status": "ran", "rows": [], "summary": resume},
        },
    }


def loader():
    """Return what was measured of the loader, every verdict and status among it."""
    form = {"ratio": 0.5, "depth": 2, "reuse": True, "recycled": True, "graphed": True}
    late = {"status": "left out", "reason": "no time was left"}
    sizes = {"bytes": 38_500_000, "transfer_ms": 0.7125, "gb_s": 54.0, "workers": 12}
    fed = {
        **form,
        **sizes,
        "status": "ran",
        "actual_ratio": 0.52,
        "upstream": "ready",
        "supply_ms": 0.5,
        "supply_over_demand": 2.8,
        "resident_ms": 1.4,
        "loader_ms": 1.41,
        "eta": 0.9925,
        "eta_quartiles": [0.99, 0.995],
        "verdict": "held",
    }
    starved = {"ratio": 0.8, "supply_over_demand": 0.9, "eta": 0.6, "verdict": "supply-bound"}
    at_hand = {"upstream": "pinned list", "recycled": False, "supply_ms": 0.0, "eta": 0.98}
    eta = [
        fed,
        {**fed, **at_hand, "supply_over_demand": 1e6, "verdict": "missed"},
        {**fed, **starved},
        {**fed, "depth": 1, "verdict": "WRONG BYTES"},
        {**form, "depth": 4, **late},
    ]
    traced = {
        "measure": "overlap",
        "upstream": "copy, recycled",
        "reuse": True,
        "status": "ran",
        "overlap": 0.975,
        "copies_a_step": 2.0,
        "copy_ms_a_step": 0.71,
        "copy_gb_s": 54.2,
        "all_pinned": True,
        "kernel_ms_a_step": 1.4,
        "span_ms_a_step": 1.45,
        "host_waits_of_the_loop": {},
        "held": True,
    }
    guarded = {"measure": "no synchronisation", "reuse": True, "status": "ran", "steps": 100}
    control = {"upstream": "control: one stream", "overlap": 0.0, "held": False}
    overlap = [
        traced,
        {**traced, "upstream": "copy", "overlap": 0.5, "held": False, "all_pinned": False},
        {**traced, "upstream": "ready", "overlap": 0.03, "held": False, "kernel_ms_a_step": 0.2},
        {**traced, **control, "host_waits_of_the_loop": {"cudaStreamSynchronize": 3}},
        {"measure": "overlap", "upstream": "late", "reuse": False, **late},
        {**guarded, "upstream": "copy", "error": None, "held": True},
        {**guarded, "upstream": "control: .item()", "error": "a | b", "held": False},
    ]
    call = {"upstream": "list", "reuse": True, "pause": "sleep", "status": "ran"}
    costs = [
        {**call, "median_us": 41.25, "p90_us": 60.0, "held": True},
        {**call, "reuse": False, "median_us": 51.0, "p90_us": 70.0, "held": False},
        {**call, "pause": "spin", "median_us": 300.0, "p90_us": 500.0, "held": None},
        {**call, "upstream": "pieces", "pieces_us": {"event.record": 10.5}},
        {**call, "upstream": "workers", **late},
    ]
    step = {
        "upstream": "list",
        "how": "reuse=True",
        "status": "ran",
        "supply_over_demand": None,
        "resident_ms": 0.139,
        "loader_ms": 0.152,
        "more_us": 13.0,
        "eta": 0.914,
        "eta_quartiles": [0.91, 0.92],
    }
    launch = [step, {**step, "upstream": "workers", "supply_over_demand": 0.12}]
    held = {"reserved_bytes": 0, "pinned_bytes": 0, "open_files": 2, "threads": 0}
    last = {"reserved_bytes": 121_600_000, "pinned_bytes": None, "open_files": 64, "threads": 5}
    epochs = {
        "reuse": True,
        "across_epochs": False,
        "control_keeps_batches": False,
        "status": "ran",
        "epochs": 40,
        "seen": [{**last, "resident_set_bytes": 899_000_000}],
        "grown": {**held, "resident_set_bytes": 500_000},
        "held": True,
    }
    memory = [
        epochs,
        {**epochs, "across_epochs": True, "held": False},
        {**epochs, "control_keeps_batches": True},
    ]
    times = {"resident": 10.0, "by hand": 15.0, "timm": 14.5, "torchfast": 11.6}
    beside = {
        "kind": "images",
        "status": "ran",
        "bytes": 38_500_000,
        "supply_ms": 5.9,
        "supply_pinned_ms": 7.5,
        "left_out": {"Accelerate": "accelerate is\nnot here"},
        "methods": {name: {"median_ms": ms} for name, ms in times.items()},
        "best_peer": "timm",
        "ratio_to_best_peer": {"torchfast": {"median": 0.8, "quartiles": [0.79, 0.81]}},
    }
    panel = {"status": "ran", "window_ms": 200.0, "fetch": [[0, 0.0, 20.0]], "copy": [[20.0, 25.0]]}
    timeline = [
        {**panel, "title": title, "compute": [[25.0, 25.0 + 200 * busy]], "busy": busy}
        for title, busy in (("a naive loop", 0.5), ("with the loader", 0.75))
    ]
    rows = {
        "eta": eta,
        "overlap": overlap,
        "next": costs,
        "launch": launch,
        "memory": memory,
        "timeline": timeline,
        "peers": [beside],
        "eta again 2": [{**fed, "eta": 0.9915}],
    }
    sections = {name: {"status": "ran", "rows": found} for name, found in rows.items()}
    sections["peers"] |= {"status": "failed", "reason": "it took | too long"}
    sections["eta again 3"] = {**late, "rows": []}
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/loader.py",
        "machine": dict(MACHINE),
        "sections": sections,
    }


def main_job():
    """Return what the number formats did to the main job."""
    row = {"mean": 1.55, "mean_difference_from_fp32": 0.0, "within_noise": True}
    formats = {fmt: dict(row) for fmt in ("fp32", "tf32", "bf16", "fp16")}
    formats["fp32"]["differences"] = [0.0, 0.0]
    return {
        "date": "2026-11-21",
        "command": "PYTHONPATH=. python benchmarks/main_job_curves.py",
        "machine": dict(MACHINE),
        "summary": {"seed_noise_bits_per_byte": 0.0134, **formats},
    }
