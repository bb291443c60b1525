"""Steps that copy values from the host, captured with these as constants, on a tape.

The tape's device is the host, so what would be a copy is told by torch's own error.
"""

from __future__ import annotations

import copy
import random
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes

import tape
import unrolling
from models import make_batches, mean_loss
from tape import counts, reasons
from torchfast import CUDAGraphOptions, CUDAGraphStep, Plan
from torchfast._core.compare import differences
from torchfast.graphs import constants, manner
from torchfast.graphs.constants import _Copies

# torch, and nobody else, is told that a capture is under way.
BY_TORCH = {"__name__": "torch.of_the_test"}
REFUSED = "Cannot copy between CPU and CUDA tensors during CUDA graph capture"
LARGE = 1000
SCALES = {"scale": 1.0}


@pytest.fixture(autouse=True)
def on_tape(monkeypatch):
    """Capture on a tape, which does not see that values of the host are compared."""
    same = constants._same

    def unseen(a, b):
        with _disable_current_modes():
            return same(a, b)

    monkeypatch.setattr(constants, "_same", unseen)
    monkeypatch.setattr(manner, "has_compiled_code", lambda: False)  # by another test
    with tape.taped(monkeypatch):
        yield


def copied(data):
    """Bring something to the device, which cannot be captured unless it is a constant."""
    is_watched = any(isinstance(mode, _Copies) for mode in _get_current_function_mode_stack())
    is_captured = eval("ask()", {"ask": torch.cuda.is_current_stream_capturing, **BY_TORCH})
    if is_captured and not is_watched:
        raise RuntimeError(REFUSED)
    return torch.tensor(data, device="cpu")


class Net(nn.Module):
    """Multiplies by what it is told to copy."""

    def __init__(self, data):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.data = data

    def forward(self, x):
        return (self.layer(x) * copied(self.data).mean()).square().mean()


class Scaled(Net):
    """Multiplies by a global entry."""

    def forward(self, x):
        return (self.layer(x) * copied([SCALES["scale"]])).square().mean()


class Draws(Net):
    """Copies another number each time."""

    def forward(self, x):
        return (self.layer(x) * copied(self.data + random.random())).mean()


def side_by_side(net, data, *, event=None, steps=14, **options):
    """Train the plain and the captured way, compared to the bit; return the captured step."""
    torch.manual_seed(0)
    models = [net(copy.deepcopy(data)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [optim.SGD(model.parameters(), lr=0.1) for model in models]

    def step_of(model, optimizer):
        def step(x):
            loss = model(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    plain, own = map(step_of, models, optimizers)
    captured = CUDAGraphStep(own, state=[models[1], optimizers[1]], **options)
    for number, x in enumerate(torch.randn(steps, 8, 4)):
        if event is not None:
            for model in models:
                event(number, model)
        state = random.getstate()
        expected = plain(x)
        random.setstate(state)
        assert torch.equal(expected, captured(x)), number
        assert not differences(*(model.state_dict() for model in models)), number
    return captured


def test_a_constant_is_no_obstacle():
    captured = side_by_side(Net, [0.5, 2.0])
    # Three steps warm up, one finds the copy, and the next one is captured and replayed.
    assert counts(captured) == (1, 10, 4, 1)
    assert not reasons(captured)
    assert "; constants copied from the host: 1" in str(captured.report())


def test_nothing_is_taken_for_a_constant_where_that_is_forbidden():
    captured = side_by_side(Net, [0.5, 2.0], host_constants=False)
    assert counts(captured)[:2] == (0, 0)
    (why,) = reasons(captured)
    assert "it copies between host and device" in why
    assert why.endswith("or, if it is the same each time, set host_constants=True")


BY_TURNS = """
import sys, torch
from torchfast.graphs.constants import has_compiled_code
assert not has_compiled_code() and "torch._dynamo" not in sys.modules
layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(layer.parameters())
layer(torch.ones(2)).sum().backward()
optimizer.step()
torch._dynamo.disable(torch.sin)(torch.ones(2))
assert not has_compiled_code()
torch.compile(torch.sin, backend="eager")(torch.ones(2))
assert has_compiled_code()
torch._dynamo.utils.counters.clear()
assert has_compiled_code()
"""


def test_compiled_code_is_known_and_what_dynamo_leaves_alone_is_none():
    subprocess.run([sys.executable, "-c", BY_TURNS], check=True, timeout=120)


def test_nothing_is_tried_beside_compiled_code_unless_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(manner, "has_compiled_code", lambda: True)
    captured = side_by_side(Net, [0.5, 2.0])
    assert counts(captured)[:2] == (0, 0)
    assert reasons(captured)[0].endswith("set host_constants=True")
    assert counts(side_by_side(Net, [0.5, 2.0], host_constants=True))[:2] == (1, 10)


class Asks(Net):
    """Computes another way once it is told of the capture."""

    def forward(self, x):
        is_told = torch.cuda.is_current_stream_capturing()
        return super().forward(x) * (2.0 if is_told else 1.0)


def test_constants_are_tried_before_the_step_is_told_of_its_capture():
    captured = side_by_side(Asks, [0.5, 2.0])
    assert counts(captured) == (1, 10, 4, 1)
    assert not reasons(captured)


class AsksWhatVaries(Net):
    """Copies another number each time unless it is told of the capture."""

    def forward(self, x):
        if torch.cuda.is_current_stream_capturing():
            return self.layer(x).mean()
        drawn = copied(time.monotonic_ns())
        return self.layer(x).mean() + 0.0 * drawn


def test_what_turns_out_to_be_no_constant_leaves_telling_to_be_tried():
    captured = side_by_side(AsksWhatVaries, None)
    assert counts(captured)[0] == 1
    assert not reasons(captured)


class Stubborn(Net):
    """Copies in a way that is no function of Python's."""

    def forward(self, x):
        if eval("ask()", {"ask": torch.cuda.is_current_stream_capturing, **BY_TORCH}):
            raise RuntimeError(REFUSED)
        return self.layer(x).mean()


def test_what_no_constant_can_help_is_not_said_to_be_helped():
    captured = side_by_side(Stubborn, None)
    assert counts(captured)[:2] == (0, 0)
    assert reasons(captured)[0].endswith("or once, as a buffer")


@pytest.mark.parametrize("changes", [False, True])
def test_several_steps_in_one_graph_have_the_constants_of_one(changes):
    scales = [0.5, 2.0]

    def scaled(model, batch):
        return mean_loss(model, batch) * copied(scales).mean()

    both = unrolling.Both(loss_fn=scaled, plan=Plan(cuda_graph=True))
    batches = make_batches(16 * unrolling.K)
    both.run(batches[: 8 * unrolling.K])
    if changes:
        scales[0] = 3.0
    both.run(batches[8 * unrolling.K :])
    replays, _ = both.unrolled
    assert replays > (10 if changes else 13)
    assert counts(both.several)[3] == (4 if changes else 2)


def replaced(number, model):
    if number == 8:
        model.data = [3.0, 1.0]


def in_place(number, model):
    if number == 8:
        model.data[1] = 7.0


def again_and_again(number, model):
    if number in (8, 21, 34, 47):
        model.data[0] += 1.0


def elsewhere(number, _):
    SCALES["scale"] = 1.0 if number < 8 else 2.0


CHANGES = {
    "replaced": (Net, [0.5, 2.0], replaced),
    "a list, in place": (Net, [0.5, 2.0], in_place),
    "a global dictionary": (Scaled, None, elsewhere),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_a_constant_is_made_of_is_noticed(name):
    net, data, event = CHANGES[name]
    captured = side_by_side(net, data, event=event)
    assert counts(captured)[3] == 2
    assert counts(captured)[1] > 6
    assert not reasons(captured)


def test_changes_now_and_then_are_followed_for_ever():
    captured = side_by_side(Net, [0.5, 2.0], event=again_and_again, steps=60)
    assert counts(captured)[3] == 5
    assert counts(captured)[1] > 40
    assert not reasons(captured)


def long_list(size):
    return [1.0] * size


@pytest.mark.parametrize(("kind", "size"), [(np.ones, 4), (np.ones, LARGE), (long_list, LARGE)])
def test_what_is_no_short_list_of_numbers_runs_eagerly_and_right(kind, size):
    captured = side_by_side(Net, kind(size), event=in_place)
    assert counts(captured)[:2] == (0, 0)
    (why,) = reasons(captured)
    assert "it copies a tensor from the host of which a change might not be noticed" in why
    assert "set host_constants=True" in why
    captured = side_by_side(Net, kind(size), host_constants=True)
    assert counts(captured)[:2] == (1, 10)


def test_who_vouches_for_it_is_believed():
    """The control: what `in_place` does to an array of this size is seen by nobody."""
    with pytest.raises(AssertionError, match=r"^8"):
        side_by_side(Net, np.ones(LARGE), event=in_place, host_constants=True)


def test_numbers_that_are_drawn_are_no_constants():
    captured = side_by_side(Draws, 1.0)
    assert counts(captured)[:2] == (0, 0)
    assert "another value each time" in reasons(captured)[0]


@pytest.mark.parametrize("value", ["always", 1, None])
def test_other_choices_do_not_exist(value):
    with pytest.raises(TypeError, match="host_constants must be True, False or 'auto'"):
        CUDAGraphOptions(host_constants=value)
