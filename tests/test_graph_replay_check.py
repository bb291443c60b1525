"""What a replay may differ by from eager steps, where eager steps differ among themselves."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from torchfast._core.compare import same_bits
from torchfast._core.rng import get_rng_state, preserved_rng, same_rng_state
from torchfast.graphs import replay_check
from torchfast.graphs.named_state import NamedState
from torchfast.graphs.replay_check import find_mismatch
from torchfast.graphs.saved_named_state import SavedNamedState

CPU = torch.device("cpu")
NOISE = 1e-6

pytestmark = pytest.mark.usefixtures("room")


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


@pytest.mark.parametrize(
    ("wrong", "with_gradients", "name"),
    [
        ("weight", False, "0.weight"),
        ("buffer", False, "1.running_mean"),
        ("state", False, "momentum_buffer of 0.bias"),
        ("rate", False, "lr of parameter group 0"),
        ("loose", False, "a tensor of shape (2,)"),
        ("attribute", False, "1.seen"),
        ("gradient", True, "the gradient of 0.bias"),
        ("output", False, "what it returns"),
        ("named", False, "step of str"),
    ],
)
def test_what_differs_most_is_named(wrong, with_gradients, name):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[1].seen, loose = torch.zeros(3), torch.zeros(2)
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    model(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()
    optimizer.state["of the whole"]["step"] = torch.zeros(())
    changed = {
        "weight": model[0].weight.data,
        "buffer": model[1].running_mean,
        "state": optimizer.state[model[0].bias]["momentum_buffer"],
        "rate": rate,
        "loose": loose,
        "attribute": model[1].seen,
        "named": optimizer.state["of the whole"]["step"],
    }

    def step(is_replay):
        more = 1.0 * is_replay
        for key, tensor in changed.items():
            tensor.add_(1.0 + 0.5 * more * (key == wrong))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model[0].bias.grad += more * (wrong == "gradient")
        return torch.ones(()) + more * (wrong == "output")

    found = find_mismatch(
        NamedState([model, optimizer, loose]),
        CPU,
        replay=lambda: step(True),
        eager=lambda: step(False),
        with_gradients=with_gradients,
    )
    assert found.detail.endswith(f"; farthest in {name}")


def test_state_that_a_step_makes_first_and_one_of_two_models_is_named():
    pair = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(pair[1].parameters(), lr=1e-4, momentum=0.9)

    def step(more):
        for parameter in pair[1].parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + more)
        optimizer.step()

    state = NamedState([*pair, optimizer])
    found = find_mismatch(state, CPU, replay=lambda: step(1.0), eager=lambda: step(0.0))
    assert found.detail.endswith("; farthest in momentum_buffer of weight of Linear, model 1")
    assert not optimizer.state


@pytest.mark.parametrize("alone", [(0.0, 0.0), (1e-3, 0.0), (0.0, 1e-3)])
@pytest.mark.parametrize("error", [0.0, 0.1])
def test_runs_behind_the_first_two_are_beside_other_work(monkeypatch, alone, error):
    """Noise may come only so: kernels that follow each other closely meet in one order."""
    loads, kinds = [], []

    class Load:
        def __init__(self, device):
            assert device is CPU

        def __enter__(self):
            loads.append(True)

        def __exit__(self, *_):
            loads.pop()

    monkeypatch.setattr(replay_check, "SideLoad", Load)
    values, draw = torch.ones(8).double(), random.Random(0)

    def step(kind, constant):
        kinds.append(f"{kind}, loaded" if loads else kind)
        noise = 1e-3 * draw.uniform(-1, 1) if loads else constant
        with torch.no_grad():
            values.add_(1.0 + noise)
        return values.sum()

    found = find_mismatch(
        NamedState([values]),
        CPU,
        replay=lambda: step("replay", alone[0] + error),
        eager=lambda: step("eager", alone[1]),
    )
    assert (found is None) == (error == 0.0)
    assert kinds[:4] == ["replay", "replay", "eager", "eager"]
    assert all("loaded" in kind for kind in kinds[4:])
    assert len(kinds) > 4 or alone[0] + error == alone[1]


@pytest.mark.parametrize("amount", [1e-3, 1e-2, 1e-1])
@pytest.mark.parametrize("alone", [True, False])
def test_noise_hides_no_counter_that_is_far_more(monkeypatch, amount, alone):
    """Which eager steps add to the state, while all runs differ by rounding."""
    values, draw, calls = torch.ones(8).double(), random.Random(0), []

    def step(count):
        noise = 1e-9 * draw.uniform(-1, 1) if not alone or len(calls) > 2 else 0.0
        with torch.no_grad():
            values.add_(1.0 + amount * count + noise)
        return values.sum()

    def eager():
        calls.append(1)
        return step(len(calls))

    found = find_mismatch(NamedState([values]), CPU, replay=lambda: step(0), eager=eager)
    assert "depends on something that is not named" in found.detail


def test_noise_in_one_tensor_hides_no_counter_in_another():
    """Which eager steps count in ``first``, while now and then a replay is off in ``second``."""
    first, second = torch.ones(8).double(), torch.ones(8).double()
    calls = {"eager": 0, "replay": 0}

    def step(kind):
        calls[kind] += 1
        with torch.no_grad():
            first.add_(1.0 + 1e-2 * (calls[kind] % 7) * (kind == "eager"))
            second.add_(1.0 + 5e-2 * (kind == "replay" and calls[kind] > 8))
        return first.sum()

    found = find_mismatch(
        NamedState([first, second]), CPU, replay=lambda: step("replay"), eager=lambda: step("eager")
    )
    assert "replays do not differ" in found.detail


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


def of_all_kinds():
    """Return tensors in many formats and layouts, with values that compare oddly."""
    odd = torch.tensor([0x7FC00001, -0x80000000, 0x7F800001], dtype=torch.int32)
    return [
        odd.view(torch.float32),  # NaNs that say something, and the negative zero
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(6, 6)[::2, 1:4],
        torch.randn(4, 3).t(),
        torch.randn(5, dtype=torch.complex64),
        torch.randn(7).bfloat16(),
        torch.arange(5),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
    ]


class Made(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.mode = nn.Linear(3, 3), "a"
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count, self.mode = self.count + 1, "b"
        return self.layer(x) * torch.rand(()) * random.random()


ERRORS = [RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt]
ENDS = [(error, at) for error in ERRORS for at in (1, 2, 3, 4)]


@pytest.mark.parametrize(("error", "at"), [(None, None), ("mismatch", None), *ENDS])
def test_whatever_ends_the_check_all_is_as_it_was(error, at):
    values, model = of_all_kinds(), Made()
    model.layer.bias.grad = torch.ones(3)
    calls = []

    def step(error=error):
        calls.append(1)
        model(torch.ones(3)).sum().backward()
        for value in values:
            value.zero_()
        if error == "mismatch":
            values[0].fill_(1.0)
        elif len(calls) == at:
            raise error("in the middle")
        return model.count.clone()

    buffer, grad = model.count, model.layer.bias.grad
    before = [v.clone() for v in (*values, buffer, *model.parameters())]
    with preserved_rng(CPU):
        rng = get_rng_state(CPU)
        with pytest.raises(error, match="in the middle") if at else nullcontext():
            state = NamedState([*values, model])
            found = find_mismatch(
                state, CPU, replay=step, eager=lambda: step(error if at else None)
            )
            assert (found is not None) == (error == "mismatch")
        assert same_rng_state(get_rng_state(CPU), rng)
    now = [*values, model.count, *model.parameters()]
    assert all(same_bits(a, b) for a, b in zip(now, before, strict=True))
    assert model.count is buffer
    assert model.mode == "a"
    assert model.layer.bias.grad is grad
    assert model.layer.weight.grad is None


def test_a_copy_lies_as_its_tensor_does():
    """To put back what lies otherwise takes a copy on the device, where there may be no memory."""
    values = of_all_kinds()
    saved = SavedNamedState(NamedState(values), CPU).tensors()
    for value, copy in zip(values, saved, strict=True):
        assert copy.stride() == torch.empty_like(value).stride()
        assert same_bits(value, copy)


@pytest.mark.parametrize("is_saved", [True, False])
def test_parameters_that_are_not_trained_are_not_disturbed(is_saved):
    values, frozen = torch.ones(8).double(), nn.Parameter(torch.rand(8), requires_grad=False)
    before, draw = frozen.detach().clone(), random.Random(0)

    def step(drawn=0.0):
        assert torch.equal(frozen, before)
        values.add_(frozen + drawn)

    state = NamedState([values, frozen]) if is_saved else NamedState([values], found=[frozen])
    assert any(tensor is frozen for tensor in state.parameters)
    assert any(tensor is frozen for tensor in state.everything()) == is_saved
    assert find_mismatch(state, CPU, replay=step, eager=lambda: step(draw.random()))
    assert torch.equal(frozen, before)
