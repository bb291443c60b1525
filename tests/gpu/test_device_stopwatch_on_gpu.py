"""A host that launches slowly is not in the times of a device stopwatch."""

from __future__ import annotations

import time

import pytest
import torch

from gpu.requirements import requires
from torchfast._core.device_stopwatch import DeviceStopwatch
from torchfast._core.measure import measure

pytestmark = requires(gpus=1)


@pytest.fixture
def matrices():
    return torch.randn(2048, 2048, device="cuda"), torch.empty(2048, 2048, device="cuda")


def launched_slowly(matrices, products):
    """Return so many products, each launched a millisecond after the one before."""
    given, out = matrices

    def work():
        for _ in range(products):
            time.sleep(1e-3)
            torch.mm(given, given, out=out)

    return work


def test_twice_the_work_takes_twice_as_long_however_slow_the_host_is(matrices):
    device = torch.device("cuda")
    works = {"two": launched_slowly(matrices, 2), "four": launched_slowly(matrices, 4)}
    found = measure(
        works,
        reference="four",
        device=device,
        budget_s=10.0,
        stopwatch=DeviceStopwatch(device),
    )
    assert found.ratio("two").ratio == pytest.approx(0.5, abs=0.05)
    # So much that no card takes as long over it as the host over its launches.
    assert found.timing("four").median_ms < 4.0


def test_the_control_a_clock_times_the_host(matrices):
    found = measure(
        {"four": launched_slowly(matrices, 4)},
        reference="four",
        device=torch.device("cuda"),
        budget_s=2.0,
    )
    assert found.timing("four").median_ms > 4.0
