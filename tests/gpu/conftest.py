"""Skip the tests whose CUDA devices this machine lacks; what several of the others share."""

import os

import pytest
import torch

from gpu.requirements import lacking, present_devices, required_by


@pytest.hookimpl(tryfirst=True)  # before any fixture allocates on a device
def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = required_by(item.iter_markers("requires"))
    if reason := lacking(needed, present_devices()):
        pytest.skip(reason)


@pytest.fixture
def deterministic():
    """Kernels that add in one order, so that two runs can be equal to the bit."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
