"""The guard in front of tests/gpu: what it lets through and what it skips."""

import pytest

from gpu.conftest import pytest_runtest_setup
from gpu.requirements import Devices, lacking, required_by, requires


@pytest.mark.parametrize(
    ("needed", "present"),
    [
        (Devices(), [75]),
        (Devices(gpus=2), [80, 80]),
        (Devices(sm=90), [90]),
        (Devices(sm=90), [100]),
        (Devices(gpus=2, sm=90), [80, 90, 90]),
    ],
)
def test_enough_devices_lack_nothing(needed, present):
    assert lacking(needed, present) is None


@pytest.mark.parametrize(
    ("needed", "present", "reason"),
    [
        (Devices(), [], "needs 1 CUDA device(s); this machine has none"),
        (Devices(gpus=2), [90], "needs 2 CUDA device(s); this machine has sm_90"),
        (Devices(sm=90), [80], "needs 1 CUDA device(s) of sm_90 or later; this machine has sm_80"),
        (
            Devices(gpus=2, sm=90),
            [80, 90],
            "needs 2 CUDA device(s) of sm_90 or later; this machine has sm_80, sm_90",
        ),
    ],
)
def test_too_few_devices_are_named(needed, present, reason):
    assert lacking(needed, present) == reason


def test_marks_of_class_and_function_add_up():
    marks = [requires(gpus=2).mark, requires(sm=90).mark]

    assert required_by(marks) == Devices(gpus=2, sm=90)


def test_an_unmarked_test_needs_one_gpu():
    assert required_by([]) == Devices(gpus=1)


def test_the_hook_skips_what_the_machine_cannot_run(request, monkeypatch):
    monkeypatch.setattr("gpu.conftest.present_devices", lambda: ())

    with pytest.raises(pytest.skip.Exception, match="needs 1 CUDA device"):
        pytest_runtest_setup(request.node)


@requires(sm=80)
def test_the_hook_lets_pass_what_the_machine_can_run(request, monkeypatch):
    monkeypatch.setattr("gpu.conftest.present_devices", lambda: (90,))

    pytest_runtest_setup(request.node)
