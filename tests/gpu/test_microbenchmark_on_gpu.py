"""compare_speed on a real device: the device's time, cold caches, and the same gradients."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpu.requirements import requires
from torchfast import compare_speed
from torchfast.profiling.microbenchmark import _EventStopwatch

pytestmark = requires(gpus=1)


def spinning(cycles):
    """Return work of a known length, which the host launches in an instant."""

    def work(x):
        torch.cuda._sleep(cycles)
        return x

    return work


def test_a_planted_difference_is_found_with_its_size():
    x = torch.ones(2, device="cuda")
    result = compare_speed(spinning(1_000_000), spinning(1_250_000), x)
    assert result.verdict == "first is faster"
    assert result.speedup == pytest.approx(1.25, rel=0.03)
    assert result.speedup_low < result.speedup < result.speedup_high
    assert result.device == "cuda:0"


def test_the_same_work_is_not_told_apart():
    x = torch.ones(2, device="cuda")
    result = compare_speed(spinning(1_000_000), spinning(1_000_000), x)
    assert result.verdict == "no difference"


def test_the_time_is_that_of_the_device_and_not_of_the_launch():
    x = torch.ones(2, device="cuda")
    result = compare_speed(spinning(4_000_000), spinning(4_000_000), x, budget_s=2.0)
    # Below 2.5 GHz, which is more than any device has, this takes longer than 1.6 ms.
    assert 1.6 < result.first_ms < 10


@pytest.mark.parametrize("grad", [False, True])
def test_real_work_is_told_apart(grad):
    x = torch.randn(1024, 1024, device="cuda", requires_grad=grad)

    def once(x):
        return x @ x

    def twice(x):
        return (x @ x + x @ x) / 2

    result = compare_speed(once, twice, x, grad=grad)
    assert result.verdict == "first is faster"
    assert result.speedup > 1.5


def test_the_backward_counts():
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
    x = torch.randn(2048, 1024, device="cuda")
    forward = compare_speed(model, model, x, budget_s=2.0)
    both = compare_speed(model, model, x, grad=True, budget_s=2.0)
    assert both.first_ms > 1.8 * forward.first_ms
    assert all(p.grad is None for p in model.parameters())


class Pause:
    """Stands in for the buffer: keeps the device busy for as long, and leaves the cache alone."""

    def zero_(self):
        torch.cuda._sleep(100_000)


def test_each_call_finds_the_cache_cold():
    l2 = torch.cuda.get_device_properties("cuda").L2_cache_size
    x = torch.randn(l2 * 2 // 5 // 4, device="cuda")  # fits into the cache
    stopwatch = _EventStopwatch(torch.device("cuda", 0), flush_l2=True)
    flush = stopwatch._buffer
    seconds = {}
    for name, buffer in [("cold", flush), ("warm", Pause())] * 2:  # the first time warms up
        stopwatch._buffer = buffer
        seconds[name] = stopwatch(x.sum, 200)
    assert seconds["cold"] > 1.1 * seconds["warm"]


def test_the_flush_is_not_in_the_time():
    stopwatch = _EventStopwatch(torch.device("cuda", 0), flush_l2=True)
    flush = stopwatch._buffer
    assert flush is not None
    assert flush.numel() >= 2 * torch.cuda.get_device_properties("cuda").L2_cache_size
    seconds = stopwatch(lambda: None, 200) / 200
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(200):
        flush.zero_()
    end.record()
    torch.cuda.synchronize()
    assert seconds < 0.5 * start.elapsed_time(end) / 1e3 / 200


def test_a_slow_host_counts_as_the_device_waits_for_it():
    x = torch.ones(2, device="cuda")

    def late(x):
        y = x + 1
        time.sleep(0.002)
        return y + 1

    result = compare_speed(lambda x: x + 1 + 1, late, x, budget_s=2.0)
    assert result.verdict == "first is faster"
    assert result.second_ms > 1.5


def test_versions_in_other_precisions_are_compared():
    a, b = (torch.randn(512, 512, device="cuda") for _ in range(2))

    def narrow(a, b):
        return a.bfloat16() @ b.bfloat16()

    result = compare_speed(torch.matmul, narrow, a, b, budget_s=2.0)
    assert 0 < result.largest_difference < 1e-2
    with pytest.raises(ValueError, match="do not compute the same: result 0 differs by up to"):
        compare_speed(torch.matmul, lambda a, b: a @ b * 1.1, a, b)


def test_random_functions_draw_the_same_numbers_and_generators_are_put_back():
    x = torch.ones(1000, device="cuda", requires_grad=True)
    before = torch.cuda.get_rng_state()
    result = compare_speed(F.dropout, lambda x: F.dropout(x, 0.5), x, grad=True, budget_s=2.0)
    assert result.largest_difference == 0.0
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_work_that_names_no_tensor_is_found_on_the_device():
    model = nn.Linear(64, 64).cuda()
    x = torch.randn(8, 64, device="cuda")
    result = compare_speed(lambda: model(x), lambda: model(x), budget_s=1.0)
    assert result.device == "cuda:0"


def test_a_compiled_version_is_compiled_before_it_is_timed():
    x = torch.randn(16384, 2048, device="cuda", requires_grad=True)  # not bound by launches

    def chain(x):
        return ((x * 2 + 1).sigmoid() * x).tanh() + x

    try:
        compiled = torch.compile(chain)
        result = compare_speed(compiled, chain, x, grad=True)
    finally:
        torch.compiler.reset()
    assert result.verdict == "first is faster"
    assert result.num_rounds >= 8


@requires(gpus=2)
def test_work_on_another_device_than_the_current_one():
    x = torch.ones(1 << 20, device="cuda:1")
    result = compare_speed(lambda x: x + 1, lambda x: x * 2 - x + 1, x, budget_s=2.0)
    assert result.device == "cuda:1"
    assert result.verdict == "first is faster"
    assert torch.cuda.current_device() == 0
