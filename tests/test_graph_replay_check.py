"""What a replay may differ by from eager steps, where eager steps differ among themselves."""

from __future__ import annotations

import random

import pytest
import torch

from torchfast.graphs import replay_check, run_ends, saved_named_state
from torchfast.graphs.named_state import NamedState
from torchfast.graphs.replay_check import find_mismatch

CPU = torch.device("cpu")
NOISE = 1e-6


@pytest.fixture(autouse=True, params=["whole", "samples"])
def room(request, monkeypatch):
    """Judge by copies, and as where a state is large beside the device's memory."""
    if request.param == "samples":
        monkeypatch.setattr(run_ends, "SAMPLE", 2)
        for module in (replay_check, saved_named_state):
            monkeypatch.setattr(module, "have_room", lambda *_: False)


def judged(eager_noise, replay_noise, error=0.0, counted=True):
    """Judge a step that adds one to a vector and counts, with noise in what it adds."""
    values, count = torch.ones(8).double(), torch.zeros((), dtype=torch.int64)
    draw = random.Random(0)

    def step(noise, error=0.0, counted=True):
        with torch.no_grad():
            values.add_(1.0 + error + noise * draw.uniform(-1, 1))
            count.add_(1 if counted else 0)
        return values.sum()

    before = values.clone(), count.clone()
    found = find_mismatch(
        NamedState([values, count]),
        CPU,
        replay=lambda: step(replay_noise, error, counted),
        eager=lambda: step(eager_noise),
    )
    assert torch.equal(values, before[0])
    assert torch.equal(count, before[1])
    return None if found is None else found.detail


def test_equal_bits_are_equal():
    assert judged(0.0, 0.0) is None


def test_what_no_eager_step_does_no_replay_may():
    assert "eager steps from the same state end 1.3e-06 apart" in judged(0.0, 0.0, error=2 * NOISE)


def test_a_replay_may_be_some_times_as_noisy_as_eager_steps():
    assert judged(NOISE, NOISE) is None
    assert judged(NOISE, 8 * NOISE) is None


@pytest.mark.parametrize("error", [1e-3, 1e-2, 1.0])
def test_an_error_is_seen_beside_noise(error):
    assert "2 replays and 2 eager steps from the same state end" in judged(NOISE, NOISE, error)


def test_a_count_has_no_noise():
    assert "end inf apart" in judged(NOISE, NOISE, counted=False)


def test_eager_steps_that_differ_by_themselves_depend_on_something():
    assert "replays do not differ" in judged(1e-2, 0.0)


def judged_behind(*, first_is_wrong=False, noise=0.0, unnamed=False):
    """Judge a step that returns what it finds and then writes, which its replay does wrong."""
    values = torch.ones(8).double()
    draw = random.Random(0)

    def step(error=0.0, in_first=0.0, noise=noise):
        with torch.no_grad():
            output = values.sum() + in_first + noise * draw.uniform(-1, 1)
            values.add_(1.0 + error + noise * draw.uniform(-1, 1))
        return output

    return find_mismatch(
        NamedState([values]),
        CPU,
        replay=lambda: step(0.5, 0.5 * first_is_wrong, noise=0.0 if unnamed else noise),
        eager=step,
    )


@pytest.mark.parametrize("noise", [0.0, NOISE])
def test_what_is_wrong_behind_the_first_outputs_is_told_from_what_is_wrong_in_them(noise):
    assert judged_behind(noise=noise).is_later
    assert not judged_behind(noise=noise, first_is_wrong=True).is_later


def test_what_differs_by_itself_in_the_first_outputs_is_not_behind_them():
    found = judged_behind(noise=1e-2, unnamed=True)
    assert "replays do not differ" in found.detail
    assert not found.is_later
