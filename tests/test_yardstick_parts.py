"""What the harness of the benchmarks is made of: methods, figures, traces and loaders."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch

from benchmarks import figures, trace
from benchmarks.job import Job
from benchmarks.methods import METHODS, plans
from benchmarks.workloads import NAMES, workload
from benchmarks.yardstick import slowdown
from torchfast import Plan


def test_what_the_methods_of_torchfast_are():
    fast, plain = (plans.plan_of("fast", compiled=compiled) for compiled in (True, False))
    assert fast == Plan.preset("fast")
    assert fast.compile_options is not None
    assert plain == fast.replace(compile=False)
    assert plain != fast
    waits = {name for name, method in METHODS.items() if method.compiles and "torchfast" in name}
    more = {
        "torchfast fast + vocabulary loss",
        "torchfast fast, searched",
        "torchfast fast, unrolled",
    }
    assert waits == {"torchfast fast", *more}


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_over_a_vocabulary_is_the_loss_of_the_workload(name):
    load = workload(name, "smoke")
    method = METHODS["torchfast exact + vocabulary loss"]
    is_left_out = method.obstacle(load, on_cuda=False) is not None
    assert is_left_out is (name not in {"gpt-small", "gpt2", "moe", "llama"})
    if not is_left_out:
        torch.manual_seed(0)
        model, batch = load.build(), load.batches()[0]
        losses = [load.loss_fn(model, batch), plans.vocabulary_loss(model, batch)]
        gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([2.0, 1.5, 1.0, 1.0, 1.0, 1.0], True),
        ([2.0, 1.6, 1.1, 1.1, 1.1, 1.1], True),  # 90 % of the fall
        ([2.0, 1.6, 1.2, 1.2, 1.2, 1.2], False),  # 80 %
        ([2.0, 2.0, 2.0, 2.0, 2.0, 2.0], False),
        ([2.0, 3.0, 4.0, 4.0, 4.0, 4.0], False),
        ([2.0, float("nan"), 1.0, 1.0, 1.0, 1.0], False),
        ([2.0, 1.5, float("nan"), 1.0, 1.0, 1.0], False),
        ([2.0, 1.5, 1.0, float("inf"), 1.0, 1.0], False),
    ],
)
def test_what_trains_is_told_by_the_fall_of_the_loss(losses, expected):
    assert figures.trains(losses, [2.0, 1.5, 1.0, 1.0, 1.0, 1.0]) is expected


def test_a_single_step_that_differs_is_not_broken_and_two_are():
    expected = [2.0, 1.5, *[1.0] * 8]
    for spike, trains in {(9.0,): True, (9.0, 9.0): False, (math.inf,): False}.items():
        losses = [*expected[:5], *spike, *expected[5 + len(spike) :]]
        assert figures.trains(losses, expected) is trains


def test_a_reference_that_does_not_learn_proves_nothing():
    methods = {
        "tuned": {"status": "ran", "losses": [2.0] * 6},
        "other": {"status": "ran", "losses": [2.0] * 6},
        "none": {"status": "failed", "reason": "x"},
    }
    figures.judge(methods, "tuned")
    assert methods["tuned"]["trains"] is methods["other"]["trains"] is False
    assert "trains" not in methods["none"]


def test_the_cold_start_leaves_out_the_steps_themselves():
    warm_up = {"elapsed_s": 5.0, "losses": [1.0] * 20, "peak_bytes": 1, "reserved_bytes": 2}
    blocks = [{"ms": ms, "host_ms": 1.0, "best_ms": 0.9 * ms} for ms in (90.0, 100.0, 130.0)]
    found = figures.summary(warm_up, blocks, blocks)
    assert found["median_ms"] == 100.0
    assert found["cold_start_s"] == pytest.approx(3.0)
    assert found["spread"] == pytest.approx((115 - 95) / 100)


def test_a_trace_is_read(tmp_path):
    def call(name, ts, cat="cuda_runtime", tid=1):
        return {"cat": cat, "name": name, "ts": ts, "dur": 1, "tid": tid}

    events = [
        call("cudaLaunchKernel", 1),
        call("cudaLaunchKernelExC", 2, tid=2),  # as the backward does
        call("cuLaunchKernelEx", 3, "cuda_driver"),
        call("cudaGraphLaunch", 4),
        call("cudaMemcpyAsync", 5),
        call("cudaStreamSynchronize", 6),
        call("cudaDeviceSynchronize", 7),
        call("cudaStreamSynchronize", 8, tid=2),
        call("cudaEventSynchronize", 9, tid=3),  # a thread that copies only
        call("cudaDeviceSynchronize", 30),  # the measurement's
        call("cudaDeviceSynchronize", 31),  # the profiler's
        {"cat": "kernel", "name": "a", "ts": 10, "dur": 2000},
        {"cat": "kernel", "name": "b", "ts": 1010, "dur": 2000},  # beside it
        {"cat": "gpu_memcpy", "name": "c", "ts": 5010, "dur": 1000},
        {"cat": "cpu_op", "name": "aten::add", "ts": 0, "dur": 9000},
        {"name": "no category", "ts": 0, "dur": 9000},
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events[::-1]}))
    assert trace.read(file, steps=2) == {
        "device_ms": 2.0,
        "num_kernels": 1.0,
        "num_launches": 2.0,
        "host_syncs": 1.5,
    }


def test_what_a_loop_is_given_is_alike_for_all():
    for name in NAMES:
        job = workload(name, "smoke")
        with torch.device("meta"):
            assert next(job.build().parameters()).is_meta, name
    for name, method in METHODS.items():
        assert method.name == name
        assert method.given


def test_the_loader_goes_round_and_round_the_batches():
    job = Job(workload("mlp", "smoke"), torch.nn.Identity(), torch.device("cpu"), print)
    batches = job.workload.batches()
    drawn = list(itertools.islice(job.loader(pinned=True), 2 * len(batches)))
    assert len(batches) > 1
    for batch, expected in zip(drawn, [*batches, *batches], strict=True):
        assert all(map(torch.equal, batch, expected))
    assert not torch.equal(batches[0][0], batches[1][0])


def test_a_slowdown_names_a_method():
    assert slowdown("torchfast fast=0.03") == ("torchfast fast", 0.03)
    with pytest.raises(Exception, match="names no method"):
        slowdown("torchfast=0.03")
