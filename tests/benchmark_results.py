"""Result files of the benchmarks, made up: seeded noise, every kind of status."""

from __future__ import annotations

import json
import math
import random
import statistics

# Milliseconds a step of the reference method.
WORKLOADS = {"mlp": 1.67, "gpt-small": 13.9, "resnet50": 57.8}
# Time relative to the reference.
METHODS = {
    "naive": 1.25,
    "tuned": 1.0,
    "Lightning": 1.1,
    "Accelerate": 1.05,
    "compile default": 0.8,
    "compile reduce-overhead": 0.5,
    "compile max-autotune": 0.45,
    "by hand: graph": 0.3,
    "by hand: graph + compile whole": 0.2,
    "torchfast eager": 1.01,
    "torchfast exact": 1.0,
    "torchfast fast": 0.9,
}
MACHINE = {
    "gpu": "NVIDIA H200",
    "cpu_cores": 16,
    "python": "3.12.3",
    "torch": "2.11.0+cu130",
    "torchfast": "0.1.0",
    "commit": "abc1234",
}


class Noise:
    """A machine: log-normal noise, a neighbour who is there for some blocks, unlike processes.

    Args:
        seed: Of everything that is drawn.
        noise: Standard deviation of a block that nothing slows down.
        busy: The part of the blocks that a neighbour slows down, by 5 % in the median.
        bias: Standard deviation of what two processes of the same code differ by.
    """

    def __init__(self, seed, noise=0.003, busy=0.2, bias=0.002):
        self.random = random.Random(seed)
        self.noise, self.busy, self.bias = noise, busy, bias
        self.slowed = 1.0

    def process(self):
        """Return the factor of a process, which is in all its blocks."""
        return math.exp(self.random.gauss(0, self.bias / math.sqrt(2)))

    def block(self):
        if self.random.random() < 0.5:  # else what was there in the block before still is
            slow = self.random.random() < self.busy
            self.slowed = 1 + 0.05 * self.random.lognormvariate(0, 0.7) if slow else 1.0
        return self.slowed * math.exp(self.random.gauss(0, self.noise))

    def turns(self, reference_ms, own_ms, rounds):
        """Return the blocks of the reference and of a method, which take turns."""
        pairs = [(reference_ms * self.block(), own_ms * self.block()) for _ in range(rounds)]
        return [list(blocks) for blocks in zip(*pairs, strict=True)]


def ran(noise, reference_ms, relative, rounds=20, reference=False):
    """Return a method that ran."""
    own_ms = reference_ms * relative * noise.process()
    reference_blocks, blocks = noise.turns(reference_ms, own_ms, rounds)
    if reference:
        blocks = reference_blocks
    low, _, high = statistics.quantiles(blocks, n=4)
    median = statistics.median(blocks)
    return {
        "status": "ran",
        "blocks_ms": blocks,
        "reference_blocks_ms": reference_blocks,
        "best_ms": blocks,
        "reference_best_ms": reference_blocks,
        "median_ms": median,
        "spread": (high - low) / median,
        "host_ms": median * 0.9,
        "device_ms": median * 0.5,
        "peak_bytes": 2_000_000_000,
        "reserved_bytes": 3_000_000_000,
        "cold_start_s": 1.9,
        "host_syncs": 1.0,
        "num_kernels": 812.0,
        "num_launches": 812.0,
        "losses": [5.54, 5.1, 4.8],
        "trains": True,
        "run": 0,
    }


def workload(name, reference_ms, methods):
    """Return a workload with these methods."""
    return {
        "title": f"{name}, made up",
        "unit": "items",
        "items_per_step": 256,
        "num_parameters": 1_000_000,
        "batch_bytes": 65536,
        "precision": "bf16",
        "methods": methods,
    }


def methods_of(name, reference_ms, relative, rounds, noise):
    """Return a workload whose methods all ran, against one process of the reference."""
    reference_ms *= noise.process()
    methods = {
        method: ran(noise, reference_ms, part, rounds, method == "tuned")
        for method, part in relative.items()
    }
    return workload(name, reference_ms, methods)


def result(seed=0, *, relative=METHODS, workloads=WORKLOADS, machine_speed=1.0, rounds=20, **noise):
    """Return a result in which every method ran."""
    source = Noise(seed, **noise)
    when = {"date": "2026-11-21", "command": "PYTHONPATH=. python benchmarks/yardstick.py"}
    return {
        **when,
        "machine": dict(MACHINE),
        "runs": [{**when, "commit": MACHINE["commit"]}],
        "settings": {
            "device": "cuda",
            "size": "full",
            "rounds": rounds,
            "block_s": 0.2,
            "lead_steps": 2,
            "train_steps": 24,
            "cold_start_limit_s": 90,
        },
        "workloads": {
            name: methods_of(name, reference_ms * machine_speed, relative, rounds, source)
            for name, reference_ms in workloads.items()
        },
    }


def result_of_every_status():
    """Return a result with every status, figures that a CPU lacks, and a lone workload."""
    made = result()
    mlp, gpt = (made["workloads"][name]["methods"] for name in ("mlp", "gpt-small"))
    # The fastest of all, and it does not train.
    mlp["by hand: graph + compile whole"]["trains"] = False
    mlp["by hand: graph + compile whole"]["losses"] = [2.3, 2.3, math.nan]
    mlp["transformers Trainer"] = {
        "status": "left out",
        "reason": "Trainer wants a model that\nreturns its loss | and a dict",
        "run": 0,
    }
    gpt["compile max-autotune"] = {"status": "failed", "reason": "not done in 90 s", "run": 0}
    gpt["naive"] |= dict.fromkeys(
        ("device_ms", "peak_bytes", "reserved_bytes", "host_syncs", "num_kernels", "num_launches")
    )
    del made["workloads"]["resnet50"]["methods"]["Lightning"]
    made["workloads"]["llama"] = workload("llama", 0.0, {"tuned": {"status": "failed", "run": 0}})
    return made


def of_card(template, card="h200"):
    """Return the name of the file of a card."""
    return template.replace("CARD", card)


def written(path, content):
    """Write a result as a file, and return the path."""
    path.write_text(json.dumps(content))
    return path
