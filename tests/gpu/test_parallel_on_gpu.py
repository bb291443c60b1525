"""The whole step of two GPUs in one graph, collectives included, against the same step eager."""

from __future__ import annotations

import pytest
import torch

from gpu import parallel_jobs
from gpu.requirements import requires

pytestmark = [requires(gpus=2), pytest.mark.timeout(600)]

WAITING = [name for name in parallel_jobs.JOBS if " waits in a " in name]
GRAPHED = [name for name in parallel_jobs.JOBS if name not in (*WAITING, "evaluation")]
LIMIT_S = 420


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return parallel_jobs.done(parallel_jobs.run, parallel_jobs.JOBS, folder, LIMIT_S)


def results_of(trained, name):
    results = [of_rank[name] for of_rank in trained]
    for result in results:
        assert isinstance(result, dict), result
    return results


@pytest.mark.parametrize("name", GRAPHED)
def test_a_captured_step_of_two_gpus_is_the_eager_one(name, trained):
    for result in results_of(trained, name):
        eager, graph = result[False], result[True]
        assert graph["counters"]["graphs"] == 1, graph["report"]
        assert graph["counters"]["replays"] >= 20, graph["report"]
        assert torch.equal(graph["losses"], eager["losses"])
        for key, value in eager["state"].items():
            assert torch.equal(graph["state"][key], value), key


@pytest.mark.parametrize("name", GRAPHED)
def test_ranks_capture_and_replay_in_the_same_steps(name, trained):
    first, second = results_of(trained, name)
    assert first[True]["ways"] == second[True]["ways"]


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_a_step_with_other_shapes_on_one_gpu_is_eager_on_both(shard, trained):
    for result in results_of(trained, f"{shard} odd shapes"):
        replays = [0, *(number for number, _ in result[True]["ways"])]
        assert [n for n in range(13, 40) if replays[n + 1] == replays[n]] == [14, 15, 20, 39]
        assert "4 steps ran eagerly on all ranks" in result[True]["report"]


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_a_graph_that_one_gpu_has_lost_is_captured_anew_by_both(shard, trained):
    for result in results_of(trained, f"{shard} lost graph"):
        assert result[True]["counters"]["captures"] == 2, result[True]["report"]
        replays = [number for number, _ in result[True]["ways"]]
        assert replays[25] == replays[30] < replays[45] < replays[59]
        assert "steps ran eagerly on all ranks" in result[True]["report"]


@pytest.mark.parametrize("name", GRAPHED)
def test_ranks_end_with_one_model(name, trained):
    first, second = results_of(trained, name)
    for key, value in first[True]["state"].items():
        # What the last forward has made of the first rank's statistics is each rank's own.
        if not key.endswith(("running_mean", "running_var")):
            assert torch.equal(second[True]["state"][key], value), key


@pytest.mark.parametrize("what", ["recompute", "offload", "offload recompute"])
@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_what_saves_memory_changes_no_bit(shard, what, trained):
    pairs = zip(results_of(trained, f"{shard} {what}"), results_of(trained, shard), strict=True)
    for found, expected in pairs:
        for graph in (False, True):
            assert torch.equal(found[graph]["losses"], expected[graph]["losses"])
            for key, value in expected[graph]["state"].items():
                assert torch.equal(found[graph]["state"][key], value), key
            if "offload" in what:
                assert found[graph]["counters"]["offload_sent_bytes"] > 0
    if what == "offload":
        # Weights that are gathered are no activations.
        sent, replicated = (
            [
                of_rank[False]["counters"]["offload_sent_bytes"]
                for of_rank in results_of(trained, f"{each} offload")
            ]
            for each in (shard, "ddp")
        )
        assert sent == replicated


def test_float8_weights_are_gathered_and_compared_within_a_captured_run(trained):
    first, second = results_of(trained, "fsdp float8")
    for result in (first, second):
        assert "the weights of 6 gathered in float8" in result[True]["report"]
        assert "update 30: loss" in result[True]["report"]
    compared = [r[True]["report"].split("beside bf16")[1].split("\n")[0] for r in (first, second)]
    assert compared[0] == compared[1]


@pytest.mark.parametrize("name", WAITING)
def test_a_rank_that_cannot_capture_brings_all_back(name, trained):
    for result in results_of(trained, name):
        assert result[True]["counters"]["graphs"] == 0, result[True]["report"]
        assert torch.equal(result[True]["losses"], result[False]["losses"])
        for key, value in result[False]["state"].items():
            assert torch.equal(result[True]["state"][key], value), key
    first, _ = results_of(trained, name)
    assert "another rank could not capture" in first[True]["report"]


def test_an_evaluation_is_that_of_one_gpu(trained):
    first, second = results_of(trained, "evaluation")
    assert first == second
    for shard in ("ddp", "fsdp"):
        assert first[shard] == pytest.approx(first["alone"], rel=1e-6)
