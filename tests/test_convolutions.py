"""cuDNN's choice of kernels: when it tries them all, and whose switch that is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchfast import Plan, Trainer
from torchfast.precision import Convolutions, convolutions

CUDA = torch.device("cuda")  # no tensor is made there
BACKEND = torch.backends.cudnn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.LazyLinear(3))


@pytest.fixture(autouse=True)
def as_it_was():
    before = BACKEND.benchmark, BACKEND.deterministic
    yield
    assert BACKEND.benchmark == before[0]
    BACKEND.deterministic = before[1]


def made(model=None, device=CUDA, *, benchmark=True):
    return Convolutions(model or Net(), device, channels_last=False, benchmark=benchmark)


def tries(layout, *shapes):
    with layout.measured([{"x": [torch.empty(shape), 3]} for shape in shapes]):
        return BACKEND.benchmark


def decision(layout):
    (found,) = [d for d in layout.decisions() if d.lever == "cudnn_benchmark"]
    return found


def test_it_is_on_in_the_gradients_and_put_back():
    layout = made()
    assert tries(layout, (2, 2, 8))
    assert BACKEND.benchmark is False
    BACKEND.benchmark = True
    try:
        assert tries(layout, (2, 2, 8))
        assert BACKEND.benchmark is True
        with pytest.raises(ValueError, match="within"), layout.measured([]):
            raise ValueError("within")
        assert BACKEND.benchmark is True
    finally:
        BACKEND.benchmark = False
    with pytest.raises(ValueError, match="within"), layout.measured([]):
        raise ValueError("within")
    assert decision(layout).outcome == "applied"


@pytest.mark.parametrize(
    ("model", "device", "benchmark", "why"),
    [
        (None, CUDA, False, "the switch as given"),
        (None, torch.device("cpu"), True, "there is no cuDNN on cpu"),
        (nn.Linear(3, 3), CUDA, True, "the model has no convolution"),
    ],
)
def test_where_it_is_left_alone(model, device, benchmark, why):
    layout = made(model, device, benchmark=benchmark)
    assert not tries(layout, (2, 2, 8))
    assert decision(layout).outcome == "left alone"
    assert decision(layout).detail == why


def test_what_has_to_repeat_is_not_measured():
    layout = made()
    torch.use_deterministic_algorithms(True)
    try:
        assert not tries(layout, (2, 2, 8))
    finally:
        torch.use_deterministic_algorithms(False)
    BACKEND.deterministic = True
    assert not tries(layout, (2, 2, 8))
    BACKEND.deterministic = False
    assert tries(layout, (2, 2, 8))


def test_after_many_shapes_it_steps_aside():
    layout = made()
    shapes = [(2, 2, 8 + i) for i in range(convolutions.MOST_SHAPES)]
    assert all(tries(layout, shape) for shape in 3 * shapes)
    assert not tries(layout, (2, 2, 100))
    assert not tries(layout, shapes[0])
    assert decision(layout).outcome == "stepped aside"
    assert "more than 8 shapes" in decision(layout).detail


def test_a_step_computes_its_gradients_so(monkeypatch):
    """On a CPU that passes for a device with cuDNN: nothing there reads the switch."""
    applied = convolutions._benchmark_decision(Net(), CUDA, True)
    monkeypatch.setattr(convolutions, "_benchmark_decision", lambda *_: applied)
    seen = {"forward": [], "backward": [], "update": []}

    class Sees(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen["forward"].append(BACKEND.benchmark)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen["backward"].append(BACKEND.benchmark)
            return gradient

    model = nn.Conv2d(1, 1, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen["update"].append(BACKEND.benchmark))
    with Trainer(model, optimizer, lambda m, x: Sees.apply(m(x)).sum(), Plan()) as trainer:
        trainer.step(torch.ones(2, 1, 4, 4))
        report = trainer.report()
    assert seen == {"forward": [True], "backward": [True], "update": [False]}
    assert "cudnn_benchmark" in str(report)
