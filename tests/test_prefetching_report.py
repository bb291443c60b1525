"""What a loader counts, and the verdict that it draws from it."""

from __future__ import annotations

import json
import math
import re
import time

import pytest
import torch

from simulated_device import numbered
from torchfast import LoaderStatistics, PrefetchingLoader
from torchfast.data.loader_report import advice


def figures(**given):
    fixed = {
        "num_batches": 100,
        "num_bytes": 10**6,
        "elapsed_s": 10.0,
        "consumer_wait_s": 0.0,
        "starved_s": 0.0,
        "stager_wait_s": 5.0,
        "fetch_s": 4.0,
        "copy_ms": math.nan,
        "stall_ms": math.nan,
    }
    return LoaderStatistics(**{**fixed, **given})


@pytest.mark.parametrize(
    ("given", "verdict", "said"),
    [
        ({}, "fed", "waits for data 0.0% of the time$"),
        # A host that ran ahead and waited for a slot while the device was busy.
        ({"consumer_wait_s": 9.0}, "fed", "waits for data 0.0%"),
        ({"starved_s": 0.1}, "fed", "waits for data 1.0% of the time"),
        (
            {"starved_s": 6.0, "fetch_s": 10.0},
            "supply-bound",
            "60% of the time .* supplies 0.4 times what the loop could take",
        ),
        ({"stall_ms": 1.0}, "fed", "waits for data 1.0% of the time"),
        (
            {"stall_ms": 30.0, "copy_ms": 80.0},
            "transfer-bound",
            "the device waits for the bus 30% of the time; a batch takes 80 ms .* uint8",
        ),
        ({"stall_ms": 30.0, "starved_s": 5.0}, "supply-bound", "50% of the time"),
        ({"stall_ms": 50.0, "starved_s": 3.0}, "transfer-bound", "50% of the time"),
        ({"num_batches": 2, "starved_s": 9.0}, "unknown", "2 batches are too few to tell"),
    ],
)
def test_the_verdict(given, verdict, said):
    statistics = figures(**given)
    assert statistics.verdict == verdict
    assert re.search(said, advice(statistics, ahead=True, has_workers=True))
    assert json.loads(json.dumps(statistics.to_dict()))["verdict"] == verdict


def test_the_remedy_fits_the_loader():
    slow = figures(starved_s=5.0)
    assert "try more worker processes" in advice(slow, ahead=True, has_workers=True)
    alone = advice(slow, ahead=False, has_workers=False)
    assert "50% of the time goes into waiting for the loader, and nothing is fetched ahead" in alone
    assert "try worker processes" in alone


def step(device, seconds):
    device.transports[0].consumer.enqueue(lambda: time.sleep(seconds))


def test_a_device_that_is_fed(device):
    loader = PrefetchingLoader(iter(numbered(60)), "cpu", depth=2, reuse=True)
    for _ in loader:
        step(device, 0.005)
    statistics = loader.statistics()
    assert statistics.num_batches == 60
    assert statistics.num_bytes == 60 * (64 * 4 + 3 * 8)
    assert statistics.starved < 0.3
    # The host ran ahead, and waited: that is not the device's waiting.
    assert statistics.consumer_wait_s > 0.5 * statistics.elapsed_s
    assert statistics.stager_wait_s > 0.0
    assert statistics.supply_over_demand > 3


def test_a_device_that_starves(device):
    def slow():
        for batch in numbered(40):
            time.sleep(0.008)
            yield batch

    loader = PrefetchingLoader(slow(), "cpu", depth=2)
    for _ in loader:
        step(device, 0.001)
    statistics = loader.statistics()
    assert statistics.verdict == "supply-bound"
    assert statistics.starved > 0.5
    assert statistics.supply_over_demand < 0.6
    report = loader.report()
    assert "supply-bound: " in str(report)
    assert report.counters["verdict"] == "supply-bound"


def test_on_a_cpu_all_loading_is_waiting():
    def slow():
        for batch in numbered(20):
            time.sleep(0.004)
            yield batch

    loader = PrefetchingLoader(slow(), "cpu")
    for _ in loader:
        time.sleep(0.004)
    statistics = loader.statistics()
    assert statistics.num_bytes == 0
    assert 0.3 < statistics.starved < 0.7
    assert statistics.supply_over_demand == pytest.approx(1.0, rel=0.5)
    report = str(loader.report())
    assert "on the CPU nothing could be copied beside a step" in report
    assert "try worker processes" in report


@pytest.mark.usefixtures("every_way")
def test_what_a_first_batch_takes_is_not_counted():
    def slow_start():
        time.sleep(0.3)
        yield from numbered(10)

    loader = PrefetchingLoader(slow_start(), "cpu")
    began = time.perf_counter()
    assert len(list(loader)) == 10
    all_but_the_start_s = time.perf_counter() - began - 0.3
    statistics = loader.statistics()
    assert statistics.num_batches == 10
    assert statistics.starved_s <= statistics.elapsed_s <= all_but_the_start_s


@pytest.mark.usefixtures("every_way")
def test_before_anything_is_known():
    loader = PrefetchingLoader([], "cpu")
    assert loader.statistics().verdict == "unknown"
    assert math.isnan(loader.statistics().supply_over_demand)
    assert "0 batches are too few to tell" in str(loader.report())
    assert loader.report().to_dict()["counters"]["num_batches"] == 0


def test_moved_one_by_one_bytes_are_counted_too():
    loader = PrefetchingLoader(numbered(3), torch.device("meta"))
    assert len(list(loader)) == 3
    assert loader.statistics().num_bytes == 3 * (64 * 4 + 3 * 8)
    assert "it needs CUDA" in str(loader.report())
    assert [d.lever for d in loader.report().stepped_aside] == ["prefetch"]


# -- The end of an epoch -----------------------------------------------------------------------


@pytest.fixture(params=["cpu", "ring"])
def both(request):
    """The CPU, and a device that a CPU plays."""
    if request.param == "ring":
        request.getfixturevalue("device")


def ends_slowly(count, seconds):
    yield from numbered(count)
    time.sleep(seconds)  # as workers take to end


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("max_steps", [None, 10])
def test_a_slow_end_is_part_of_the_time(max_steps):
    loader = PrefetchingLoader(ends_slowly(10, 0.3), "cpu")
    for _ in loader.iterate(max_steps=max_steps):
        time.sleep(0.01)
    statistics = loader.statistics()
    assert statistics.elapsed_s > (0.29 if max_steps is None else 0.09)
    assert statistics.starved_s <= statistics.elapsed_s
    assert 0 <= statistics.starved <= 1
    assert statistics.supply_over_demand > 0


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("options", [{}, {"accumulate": 4}, {"unroll": 4}])
def test_the_step_behind_the_last_batch_is_part_of_the_time(options):
    loader = PrefetchingLoader(numbered(4 if options else 1), "cpu", **options)
    for _ in range(5):
        for _ in loader:
            time.sleep(0.06)  # beside which what a busy machine takes is little
    statistics = loader.statistics()
    assert statistics.elapsed_s >= 0.3
    assert statistics.starved < 0.2
    loader.close()


@pytest.mark.usefixtures("both")
def test_a_step_that_nobody_saw_is_no_verdict():
    loader = PrefetchingLoader(numbered(5), "cpu")
    for _ in range(6):
        next(iter(loader))
        time.sleep(0.005)
    statistics = loader.statistics()
    assert statistics.verdict == "unknown"
    assert statistics.num_unseen == 5  # behind the sixth there may come more
    assert "6 batches are too few to tell: the loop broke off behind 5" in str(loader.report())
    for _ in loader:
        time.sleep(0.005)
    assert loader.statistics().num_unseen == 6
    assert loader.statistics().verdict != "unknown"
    loader.close()


def test_a_group_whose_step_nobody_saw_is_no_verdict():
    loader = PrefetchingLoader(numbered(8), "cpu", accumulate=4)
    for _ in range(3):
        next(iter(loader))
    for _ in loader:
        pass
    statistics = loader.statistics()
    assert (statistics.num_batches, statistics.num_unseen) == (20, 12)


def test_shares_are_none_beyond_all():
    beyond = figures(starved_s=12.0, stall_ms=200.0)
    assert (beyond.starved, beyond.stalled, beyond.supply_over_demand) == (1.0, 1.0, 0.0)
