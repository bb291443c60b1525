"""assert_parity itself: what it compares, what it says, and that it can fail."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

from models import BatchNormNet, DropoutNet, make_batches, mean_loss
from torchfast import OffloadOptions, ParityError, Plan
from torchfast._core.compare import differences
from torchfast.testing import Tolerance, assert_parity, plain_step
from torchfast.update import Update

SGD = partial(optim.SGD, lr=0.1)
LARGE = torch.tensor([1e200 + 0j], dtype=torch.complex128)


def test_the_models_are_left_alone():
    model = BatchNormNet()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    result = assert_parity(model, SGD, mean_loss, make_batches(4))
    assert differences(before, model.state_dict()) == []
    assert all(p.grad is None for p in model.parameters())
    assert len(result.losses) == 4


def test_the_callers_generators_and_switches_are_put_back():
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert_parity(DropoutNet, SGD, mean_loss, make_batches(2), seed=7)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state[1:]
    assert not torch.are_deterministic_algorithms_enabled()


def test_switches_are_put_back_after_a_failure(monkeypatch):
    monkeypatch.setattr(Update, "__call__", lambda self: (None, None))
    with pytest.raises(ParityError):
        assert_parity(DropoutNet, SGD, mean_loss, make_batches(2))
    assert not torch.are_deterministic_algorithms_enabled()


def test_it_says_where_and_by_how_much(monkeypatch):
    original, done = Update.__call__, []

    def update(self):
        result = original(self)
        done.append(self)
        if len(done) == 2:
            with torch.no_grad():
                self._sharding._model.layers[3].weight[1, 2] += 0.5
        return result

    monkeypatch.setattr(Update, "__call__", update)
    with pytest.raises(ParityError) as caught:
        assert_parity(DropoutNet, SGD, mean_loss, make_batches(3))
    message = str(caught.value)
    assert "at step 2 of 3: parameters 'layers.3.weight'" in message
    assert "max |difference| 0.5 at (1, 2)" in message
    assert "1 of 64 elements differ" in message


def test_buffers_are_compared(monkeypatch):
    original = Update.__call__

    def update(self):
        result = original(self)
        self._sharding._model.norm.running_mean[1] = 3.0
        return result

    monkeypatch.setattr(Update, "__call__", update)
    with pytest.raises(ParityError, match=r"buffers 'norm.running_mean'"):
        assert_parity(BatchNormNet, SGD, mean_loss, make_batches(3))


def test_optimizer_state_is_compared(monkeypatch):
    original = Update.__call__

    def update(self):
        result = original(self)
        for state in self._compiled._optimizer.state.values():
            state["step"] += 1
        return result

    monkeypatch.setattr(Update, "__call__", update)
    with pytest.raises(ParityError, match=r"optimizer 'state.0.step': max |difference| 1 "):
        assert_parity(DropoutNet, partial(optim.Adam, lr=0.1), mean_loss, make_batches(1))


@pytest.mark.parametrize(
    ("options", "exact"),
    [
        ({"recompute": "blocks"}, True),
        ({"recompute": "selective", "cuda_graph": True}, True),
        ({"offload": "auto"}, True),
        ({"offload": OffloadOptions(min_bytes=1)}, True),
        ({"sync_guard": "record"}, True),
        ({"offload": "optimizer"}, False),
        ({"out_of_memory": "split"}, False),
        ({"channels_last": True}, False),
    ],
)
def test_every_bit_is_compared_of_a_plan_that_promises_to_change_none(options, exact):
    def build():
        return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)) for _ in range(3)])

    batches = make_batches(3)
    assert assert_parity(build, SGD, mean_loss, batches, Plan(**options)).exact == exact


def test_a_comparison_that_proves_nothing_is_refused():
    for plan in ("exact", Plan(precision="bf16")):
        with pytest.raises(ValueError, match="changed no parameter"):
            assert_parity(DropoutNet, partial(optim.SGD, lr=0.0), mean_loss, make_batches(2), plan)
    with pytest.raises(ValueError, match="at least one batch"):
        assert_parity(DropoutNet, SGD, mean_loss, [])


def test_a_factory_that_makes_two_models_is_refused():
    bias = iter([True, False])
    with pytest.raises(ValueError, match="two different models from one seed"):
        assert_parity(lambda: nn.Linear(8, 4, bias=next(bias)), SGD, mean_loss, make_batches(2))


def test_a_model_that_diverges_to_nan_is_exact_but_not_close():
    batches = make_batches(3)
    batches[1] = (batches[1][0] * torch.nan, batches[1][1])
    assert assert_parity(DropoutNet, SGD, mean_loss, batches).num_steps == 3
    with pytest.raises(ParityError, match="losses differ by up to nan"):
        assert_parity(DropoutNet, SGD, mean_loss, batches, Plan(precision="bf16"))


def test_a_plan_that_trains_nothing_is_not_close(monkeypatch):
    monkeypatch.setattr(Update, "__call__", lambda self: (None, None))
    with pytest.raises(ParityError, match=r"parameters' change differs by 1 of its norm"):
        assert_parity(
            DropoutNet,
            partial(optim.SGD, lr=1e-4),
            mean_loss,
            make_batches(3),
            Plan(precision="bf16"),
            tolerance=Tolerance(loss=0.1, update=0.9),
        )


def test_a_loss_function_may_change_its_batch_in_place():
    def loss_fn(model, batch):
        inputs, targets = batch
        return mean_loss(model, (inputs.mul_(2), targets))

    assert_parity(DropoutNet, SGD, loss_fn, make_batches(3))


def test_an_optimizer_instance_is_refused():
    model = DropoutNet()
    with pytest.raises(TypeError, match="two are needed"):
        assert_parity(model, SGD(model.parameters()), mean_loss, make_batches(2))


def test_differences_name_every_kind():
    old = {"a": torch.zeros(3), "b": 1, "c": [torch.ones(2), "x"], "gone": 1, "nan": float("nan")}
    new = {
        "a": torch.tensor([0.0, 2.0, 0.0]),
        "b": 3,
        "c": [torch.ones(2), "y"],
        "nan": float("nan"),
    }
    found = {d.key: d for d in differences(old, new)}
    assert set(found) == {"a", "b", "c.1", "gone"}
    assert found["a"].distance == 2.0
    assert "at (1,)" in found["a"].detail
    assert found["b"].distance == 2
    assert found["gone"].detail == "missing"
    assert differences(new, old)[0].detail == "unexpected"


@pytest.mark.parametrize(
    ("old", "new", "equal"),
    [
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), True),
        (torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 2.0]), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), False),
        (torch.zeros(2), torch.zeros(2, 1), False),
        (torch.zeros(0), torch.zeros(0), True),
        (torch.tensor(True), torch.tensor(False), False),
        (torch.tensor(1 + 2j), torch.tensor(1 + 3j), False),
        (torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0, dtype=torch.bfloat16), True),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), True),
        (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse(), False),
        (torch.zeros(2), None, False),
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), True),
        (torch.tensor(2**60), torch.tensor(2**60 + 1), False),  # one number in float64
        (torch.tensor(2**60), torch.tensor(2**60), True),
        (torch.tensor(7, dtype=torch.uint64), torch.tensor(8, dtype=torch.uint64), False),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2).to(torch.float8_e4m3fn), True),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.zeros(2).to(torch.float8_e4m3fn), False),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]), True),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]), False),
    ],
)
def test_tensors_are_compared_by_bits(old, new, equal):
    assert (differences({"t": old}, {"t": new}) == []) is equal


@pytest.mark.parametrize(
    ("old", "new", "distance"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), 0.5),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.5, torch.nan]), torch.inf),
        (torch.tensor([-torch.inf]), torch.tensor([torch.inf]), torch.inf),
        (torch.tensor([3 + 1j]), torch.tensor([0 + 5j]), 5.0),
        (LARGE * 3, LARGE * 4j, 5e200),  # whose squares overflow
        (torch.tensor(True), torch.tensor(False), 1.0),
        (torch.tensor(5, dtype=torch.uint8), torch.tensor(7, dtype=torch.uint8), 2.0),
    ],
)
def test_the_distance_is_measured_without_complex_numbers(old, new, distance):
    """CUDA would compile a kernel for them, and look for a folder to keep it in."""
    computed = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            given = [a for a in (*args, result) if isinstance(a, torch.Tensor)]
            if any(tensor.is_complex() for tensor in given):
                computed.append(function.overloadpacket.__name__)
            return result

    new = new.to(old.dtype)
    with Operations():
        (found,) = differences([old], [new])
    assert found.distance == pytest.approx(distance)
    looked_at = {"detach", "view_as_real", "select", "_local_scalar_dense"}
    assert set(computed) <= (looked_at if old.is_complex() else set())


def test_the_reference_loop_is_the_loop_one_writes():
    """Against one written out here once more, weights and all."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    twin = nn.Linear(8, 4)
    twin.load_state_dict(model.state_dict())
    first, second = SGD(model.parameters()), SGD(twin.parameters())
    batches = make_batches(3, ragged=True)

    def summed(model, batch):
        return mean_loss(model, batch) * len(batch[1]), {}, len(batch[1])

    loss = plain_step(model, first, summed, batches, max_grad_norm=0.1)
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    expected = nn.functional.cross_entropy(twin(inputs), targets)
    expected.backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    second.step()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(model.weight, twin.weight)
