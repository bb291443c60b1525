"""Skip the tests whose CUDA devices this machine lacks."""

import pytest

from gpu.requirements import lacking, present_devices, required_by


@pytest.hookimpl(tryfirst=True)  # before any fixture allocates on a device
def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = required_by(item.iter_markers("requires"))
    if reason := lacking(needed, present_devices()):
        pytest.skip(reason)
