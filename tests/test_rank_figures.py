"""What the benchmark on several GPUs tells of its arms, and when it begins no more of them."""

import json
import time
from functools import partial

import pytest
import torch

import ranks
from benchmarks import many_gpus
from benchmarks.many_gpus import Clock
from benchmarks.rank_figures import OwnMemory, exactness
from benchmarks.workloads import workload
from parallel_training import OPTIMIZERS, batches, fresh, mean_loss
from torchfast import Plan, Trainer


class Played:
    """A GPU's allocator that tells what it was told."""

    def __init__(self):
        self.now = self.peak = 0

    def take(self, num_bytes):
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def reset(self):
        self.peak = self.now


@pytest.fixture
def gpu(monkeypatch):
    played = Played()
    for name, call in (
        ("synchronize", lambda: None),
        ("reset_peak_memory_stats", played.reset),
        ("memory_allocated", lambda: played.now),
        ("max_memory_allocated", lambda: played.peak),
    ):
        monkeypatch.setattr(torch.cuda, name, call)
    return played


def test_a_peak_is_an_arms_own(gpu):
    gpu.take(1000)  # of an arm that is there already
    gpu.take(500)
    gpu.take(-500)
    first, second = OwnMemory(True), OwnMemory(True)
    with first.making():
        gpu.take(300)
        gpu.take(-100)
    assert first.peak_bytes == 300
    with second.making():
        gpu.take(50)
    assert second.peak_bytes == 50
    with first.turn():
        gpu.take(400)
        gpu.take(-400)
    assert first.peak_bytes == 600  # the 200 that it holds, and these
    with second.turn():
        gpu.take(10)
        gpu.take(-10)
    assert second.peak_bytes == 60
    assert second.peak_gb == 60e-9


def test_a_cpu_tells_nothing():
    memory = OwnMemory(False)
    with memory.making(), memory.turn():
        pass
    assert memory.peak_gb is None


def made(build=fresh):
    return Trainer(build(), OPTIMIZERS["adamw"], mean_loss, Plan(shard="fsdp"))


def changed():
    model = fresh()
    with torch.no_grad():
        model.head.weight[0, 0] += 1e-6
    return model


def bits(rank):
    own = batches(rank)
    same = exactness([made, made], own, 3, needs_graph=False)
    other = exactness([made, partial(made, changed)], own, 3, needs_graph=False)
    with pytest.raises(RuntimeError, match="nothing was replayed"):
        exactness([made, made], own, 1, needs_graph=True)
    assert not torch.are_deterministic_algorithms_enabled()
    return same, other


def test_bits_of_two_trainings_are_compared_on_all_ranks():
    for same, other in ranks.run(bits):
        assert same["same_bits"]
        assert same["differs"] == []
        assert same["tensors"] > 3 + 3 * 10  # losses, parameters and two moments of each
        assert not other["same_bits"]
        assert other["differs"][0].startswith("rank 0: ")


def rounds(rank):
    clock = Clock(time.time() + 3.0)
    found = []
    for item, has_time in clock.rounds(["long", "short", "more"]):
        found.append((item, has_time))
        if item == "long" and rank == 1:
            time.sleep(2.0)  # which the other rank has not seen
    return found


def test_what_would_not_end_in_time_is_not_begun_on_any_rank():
    expected = [("long", True), ("short", False), ("more", False)]
    assert ranks.run(rounds) == [expected] * 2


def test_what_was_left_out_a_later_run_measures(tmp_path, monkeypatch):
    out = tmp_path / "many.json"
    common = f"many_gpus.py --device cpu --size smoke --rounds 1 --steps 1 --out {out}"
    names = ["ddp, torchfast", "ddp, graph by hand"]

    def run(*words):
        monkeypatch.setattr("sys.argv", [*common.split(), *words])
        many_gpus.main()
        found = json.loads(out.read_text())
        return {(row["group"], row["name"]): row for row in found["rows"]}, found["left_out"]

    rows, left_out = run("--workloads", "gpt2", "--limit-s", "0", "--arms", *names)
    assert not rows
    assert left_out[0] == "times, gpt2, ddp, graph by hand: no time was left"
    assert len(left_out) == 3
    rows, left_out = run("--workloads", "gpt2", "--exact-steps", "2", "--arms", *names)
    assert not left_out
    assert rows["exact", "gpt2, ddp, torchfast"]["same_bits"]
    whole = rows["times", "gpt2, ddp, graph by hand"]
    assert whole["ms"] > 0
    words = ("--samples", "1", "--exact-steps", "2", "--arms", names[1])
    rows, left_out = run("--workloads", "gpt2", *words)
    part = rows["times", "gpt2, 1 samples, ddp, graph by hand"]
    assert part["workload"] == "gpt2, 1 samples"
    assert rows["times", "gpt2, ddp, graph by hand"] == whole
    tokens = [round(row["items_per_s"] * row["ms"] / 1e3) for row in (part, whole)]
    assert tokens[1] == tokens[0] * len(workload("gpt2", "smoke").batches()[0][0])


def test_of_a_batch_there_is_no_more_than_all(capsys):
    item = workload("gpt2", "smoke")
    samples = len(item.batches()[0][0])
    for number in (samples, samples + 1, None):
        assert many_gpus.part_of(item, number) is item
    part = many_gpus.part_of(item, 1)
    assert part.name == "gpt2, 1 samples"
    assert part.items_per_step * samples == item.items_per_step
    assert {len(tensor) for batch in part.batches() for tensor in batch} == {1}
    with pytest.raises(SystemExit):
        many_gpus.arguments(["--samples", "0"])
    assert "--samples 0: a step needs at least one of each batch" in capsys.readouterr().err
