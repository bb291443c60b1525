"""A step that does not fit: the error, what it says and what it keeps alive, and the plan's field.

Memory runs out by hand here; `tests/gpu/test_out_of_memory_on_gpu.py` has a real device,
`test_memory_account.py` the account, and `test_step_in_parts.py` the steps in parts.
"""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp import fully_shard

import ranks
from float8_models import MEASURED, timer_of
from models import mean_loss
from planting import (
    SPLIT,
    TEXT,
    BackwardPlant,
    Planted,
    PlantedSGD,
    batch_of,
    make,
    weights,
)
from torchfast import (
    OutOfMemoryError,
    OutOfMemoryOptions,
    Plan,
    PlanError,
    TorchFastError,
    Trainer,
)
from torchfast.compiled_loss import CompiledLoss
from torchfast.precision.float8_options import RECIPES

# --- the error ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_error_says_where_and_is_torchs_too(where):
    trainer = make(Planted(0, where))
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        trainer.step(batch_of(4))
    error = caught.value
    assert isinstance(error, OutOfMemoryError)
    assert isinstance(error, TorchFastError)
    assert error.account.stage == where
    assert error.account.requested_bytes == 2 * 2**30
    assert f"out of memory in the {where}" in str(error)
    assert "2.00 GiB was asked for" in str(error)
    assert "planting.py" in error.account.line
    assert "what to try" in str(error)


@pytest.mark.parametrize(("num_samples", "is_told"), [(1, False), (2, True)])
def test_a_batch_of_one_is_not_to_be_halved(num_samples, is_told):
    trainer = make(Planted(0, "forward"))
    with pytest.raises(OutOfMemoryError) as caught:
        trainer.step(batch_of(num_samples))
    assert any("half the batch size" in text for text in caught.value.account.advice) == is_told


def test_lines_of_a_device_that_tells_none_are_said_not_to_be_had(tmp_path):
    for options in (OutOfMemoryOptions(lines=True), OutOfMemoryOptions(snapshot=str(tmp_path))):
        trainer = make(Planted(100, "forward"), plan=Plan(out_of_memory=options))
        [decision] = [d for d in trainer.report().decisions if d.lever == "out_of_memory"]
        assert decision.detail.endswith("lines and snapshots are not to be had on cpu")


def test_an_update_that_fails_is_never_tried_again():
    trainer = make(Planted(99), plan=SPLIT, optimizer=lambda p: PlantedSGD(p))
    with pytest.raises(OutOfMemoryError, match="some parameters may be updated") as caught:
        trainer.step(batch_of(4))
    assert caught.value.account.stage == "update"
    assert "it happened in the update" in str(caught.value)
    assert trainer.model.plant.sizes == [4]


def test_the_halves_raise_it_too():
    trainer = make(Planted(3), optimizer=lambda p: PlantedSGD(p))
    with pytest.raises(OutOfMemoryError):
        trainer.forward_backward(batch_of(4))
    trainer.forward_backward(batch_of(2))
    with pytest.raises(OutOfMemoryError):
        trainer.update()
    # What an update failed on can be freed, and the gradients are still there.
    assert all(p.grad is not None for p in trainer.model.parameters())
    trainer.update()
    assert trainer.num_steps == 1


def test_other_errors_pass():
    class Odd(nn.Module):
        def forward(self, x):
            raise RuntimeError("something else")

    trainer = Trainer(
        nn.Sequential(nn.Linear(8, 4), Odd()), lambda p: optim.SGD(p, lr=0.1), mean_loss
    )
    with pytest.raises(RuntimeError, match="something else") as caught:
        trainer.step(batch_of(2))
    assert not isinstance(caught.value, OutOfMemoryError)


def test_training_goes_on_after_the_error():
    trainer, twin = make(Planted(4)), make(Planted(99))
    trainer.step(batch_of(4))
    twin.step(batch_of(4))
    with pytest.raises(OutOfMemoryError):
        trainer.step(batch_of(8))
    assert all(p.grad is None for p in trainer.model.parameters())
    trainer.step(batch_of(4, seed=1))
    twin.step(batch_of(4, seed=1))
    for name, value in weights(trainer).items():
        assert torch.equal(value, weights(twin)[name])


def test_the_error_survives_a_pipe():
    trainer = make(Planted(0))
    with pytest.raises(OutOfMemoryError) as caught:
        trainer.step(batch_of(4))
    twin = pickle.loads(pickle.dumps(caught.value))
    assert str(twin) == str(caught.value)
    assert twin.account == caught.value.account


class Remembered(nn.Module):
    """Holds weak references to the activations of its last forward."""

    def __init__(self, plant):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.plant = plant

    def forward(self, x):
        hidden = self.first(x)
        self.seen = weakref.ref(hidden)
        out = self.second(torch.tanh(hidden))
        try:
            self.plant.check(len(x), "forward")
        except torch.OutOfMemoryError as error:
            # A cycle: this frame holds the error, whose traceback holds this frame.
            kept = error  # noqa: F841
            raise
        return out


class Between(nn.Module):
    """Fails in its backward when half of the gradient is there."""

    def __init__(self, plant):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.plant = plant

    def forward(self, x):
        return self.second(BackwardPlant.apply(self.first(x), self.plant))


def test_half_a_gradient_is_dropped():
    plant = Planted(0, "backward")
    model = Between(plant)
    trainer = Trainer(model, optim.SGD(model.parameters(), lr=0.1), mean_loss, "eager")
    seen = []
    model.second.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is None))
    with pytest.raises(OutOfMemoryError):
        trainer.step(batch_of(4))
    assert seen == [False]  # it was there
    assert all(p.grad is None for p in model.parameters())


def test_the_error_keeps_nothing_alive():
    plant = Planted(0)
    trainer = Trainer(Remembered(plant), lambda p: optim.SGD(p, lr=0.1), mean_loss, "eager")
    gc.disable()  # what is freed is freed by the error's end, not by chance
    try:
        with pytest.raises(OutOfMemoryError) as caught:
            trainer.step(batch_of(4))
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None
        assert trainer.model.seen() is None
    finally:
        gc.enable()


def test_torchs_own_error_does_keep_it_alive():
    """The control of the test above."""
    model = Remembered(Planted(0))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        mean_loss(model, batch_of(4))
    assert model.seen() is not None
    assert caught.value.__traceback__ is not None


def test_an_error_that_the_user_handles_meanwhile_is_left_alone():
    trainer = make(Planted(0))

    def fails():
        held = "still here"
        raise ValueError(held)

    try:
        fails()
    except ValueError as outer:
        with pytest.raises(OutOfMemoryError):
            trainer.step(batch_of(4))
        frame = outer.__traceback__.tb_next.tb_frame
        assert frame.f_locals["held"] == "still here"


# --- the plan -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    ["split", OutOfMemoryOptions(lines=True), OutOfMemoryOptions(action="split", max_parts=3)],
)
def test_a_plan_goes_through_json(value):
    plan = Plan(out_of_memory=value)
    assert Plan.from_json(plan.to_json()) == plan
    assert "out_of_memory" in plan.to_json()


def test_equal_plans_are_written_alike():
    assert Plan(out_of_memory=OutOfMemoryOptions()) == Plan()
    assert Plan(out_of_memory=OutOfMemoryOptions(action="split")) == SPLIT


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("splt", ValueError, "did you mean 'split'"),
        (True, TypeError, "out_of_memory must be one of"),
    ],
)
def test_bad_values(value, kind, message):
    with pytest.raises(kind, match=message):
        Plan(out_of_memory=value)


class Replicas(nn.parallel.DistributedDataParallel):
    """As some derive it, to reach the attributes of the model."""


def test_a_model_that_reduces_gradients_by_itself_cannot_split():
    def by_way_of(wrapper):
        return lambda model, batch: wrapper(batch).square().mean()

    def rank(number):
        def made(model, loss_fn=mean_loss):
            return Trainer(model, lambda p: optim.SGD(p, lr=0.1), loss_fn, SPLIT)

        one, two = (
            kind(nn.Linear(8, 4)) for kind in (nn.parallel.DistributedDataParallel, Replicas)
        )
        sharded = nn.Linear(8, 4)
        fully_shard(sharded)
        message = "a DistributedDataParallel on 2 ranks: a backward"
        for model, loss_fn, words in (
            (one, mean_loss, message),
            (two, mean_loss, message),
            # The model is the plain one, and all calls of it go through the wrapper.
            (one.module, by_way_of(one), message),
            (one.module, by_way_of(two), message),
            (sharded, mean_loss, "the model is sharded on 2 ranks"),
            (nn.Linear(8, 4), by_way_of(sharded), "the model is sharded on 2 ranks"),
        ):
            with pytest.raises(PlanError, match=words):
                made(model, loss_fn)
        made(nn.Linear(8, 4))
        made(nn.Linear(8, 4), by_way_of(nn.Linear(8, 4)))

    ranks.run(rank)


# --- what looks at a batch before the first step ------------------------------------------------


class Roomy(nn.Module):
    """Layers that can be in float8, and no room for more than so many samples."""

    def __init__(self, fits):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
        self.plant = Planted(fits)

    def forward(self, x):
        self.plant.check(len(x), "forward")
        return self.layers(x)


def looking(plan, fits=32):
    torch.manual_seed(0)
    model = Roomy(fits)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, optimizer, lambda m, x: m(x).float().square().mean(), plan)


def test_a_measurement_that_does_not_fit_has_an_account_or_is_made_in_parts(monkeypatch):
    seconds = dict.fromkeys(("bf16", *RECIPES), 1.0)
    monkeypatch.setattr("torchfast.precision.float8_choice._on_device", timer_of(seconds))
    with pytest.raises(OutOfMemoryError, match="out of memory in the forward") as caught:
        looking(Plan(precision=MEASURED)).step(torch.ones(64, 16))
    assert caught.value.account.stage == "forward"
    trainer = looking(Plan(precision=MEASURED, out_of_memory="split"))
    trainer.step(torch.ones(64, 16))
    assert trainer.num_steps == 1
    assert "32 rows, 16 to 32" in str(trainer.report())  # as the step runs
    counters = trainer.report().counters
    assert (counters["out_of_memory"], counters["split_steps"]) == (1, 1)


def test_a_search_of_a_way_to_compile_that_does_not_fit_is_made_in_parts(monkeypatch):
    seen = []

    def decide(self, work, group, graph):
        work(group)
        seen.append(group)
        monkeypatch.setattr(CompiledLoss, "is_undecided", False)

    monkeypatch.setattr(CompiledLoss, "is_undecided", True)
    monkeypatch.setattr(CompiledLoss, "decide", decide)
    trainer = looking(SPLIT)
    trainer.step(torch.ones(64, 16))
    assert [len(part) for part in seen[0][0].parts] == [32, 32]
    assert trainer.num_steps == 1


def test_nothing_is_reported_where_nothing_happened():
    trainer = make(Planted(99))
    trainer.step(batch_of(4))
    assert "out_of_memory" not in str(trainer.report())
    assert TEXT not in str(trainer.report())
