"""Skip the tests whose CUDA devices this machine lacks; what several of the others share."""

import os
import sys

import pytest
import torch

from gpu.requirements import lacking, present_devices, required_by
from gpu.syncs import forbid_syncs


@pytest.hookimpl(tryfirst=True)  # before any fixture allocates on a device
def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = required_by(item.iter_markers("requires"))
    if reason := lacking(needed, present_devices()):
        pytest.skip(reason)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once what failed: of a run that a time limit ends there is no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        told = str(report.longrepr)[-400:] if crash is None else crash.message[:400]
        print(f"\nfailed now: {report.nodeid}\n{told}", file=sys.__stderr__, flush=True)


@pytest.fixture
def deterministic():
    """Kernels that add in one order, so that two runs can be equal to the bit."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def no_sync_debug_mode_is_left():
    """Or every test after one that fails in it would."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.get_sync_debug_mode():
        forbid_syncs(False)
