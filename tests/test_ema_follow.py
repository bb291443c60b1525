"""What the average follows, and what it survives: steps that fail, and changes by the user."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim

from averages import comparable, reference, weights_of
from models import BatchNormNet, DropoutNet, make_batches, mean_loss
from poison import SKIP
from stepping import make_trainer
from test_ema_model import Convolution, Growing
from torchfast import EMAOptions, Trainer
from torchfast._core.compare import differences
from torchfast.ema import WeightAverage, average

ADAMW = partial(optim.AdamW, lr=0.01, fused=True)
SGD = partial(optim.SGD, lr=0.1, momentum=0.9)
WARM = EMAOptions(decay=0.9, warm_up=True)
BATCHES = make_batches(6)


def another(net=DropoutNet):
    torch.manual_seed(7)
    return net()


def same(first, second):
    return not differences(weights_of(first), weights_of(second))


def cast_loss(model, batch):
    """In whatever dtype the model is."""
    dtype = next(model.parameters()).dtype
    return mean_loss(lambda x: model(x.to(dtype)).float(), batch)


# --- where it begins ------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["eager", SKIP], ids=str)
@pytest.mark.parametrize("ema", [0.9, WARM], ids=repr)
def test_a_loaded_model_is_where_it_begins_whatever_the_model_was(ema, plan):
    net = DropoutNet()
    with torch.no_grad():
        net.layers[0].weight.fill_(torch.nan)
    trainer = Trainer(net, SGD, mean_loss, plan, ema=ema)
    net.load_state_dict(another().state_dict())
    expected = reference(net, ema)
    for batch in BATCHES[:3]:
        trainer.step(batch)
        expected.update_parameters(net)
        assert not differences(*comparable(expected, trainer.ema_model, use_buffers=False))


def test_a_loaded_model_is_where_it_begins_if_the_first_update_is_skipped():
    trainer = make_trainer(SGD, plan=SKIP, ema=0.999)
    trainer.model.load_state_dict(another().state_dict())
    inputs, targets = BATCHES[0]
    trainer.step((inputs * torch.nan, targets))
    assert trainer.num_skipped == 1
    assert same(trainer.ema_model, another())


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("plan", ["eager", "exact"])
def test_a_loss_that_looks_at_it_sees_a_model_that_was_loaded(plan):
    seen = []

    def looking(model, batch):
        seen.append(copy.deepcopy(trainer.ema_model))
        return mean_loss(model, batch)

    trainer = make_trainer(ADAMW, looking, plan, ema=0.9)
    trainer.model.load_state_dict(another().state_dict())
    trainer.step(BATCHES[0])
    assert same(seen[0], another())


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("assign", [False, True], ids=["in place", "assigned"])
@pytest.mark.parametrize("plan", ["eager", "exact", SKIP], ids=str)
@pytest.mark.parametrize("ema", [0.9, WARM], ids=repr)
def test_an_average_loaded_before_the_first_step_is_averaged_on(ema, plan, assign):
    """A pretrained average beside its model, which is then not the average's beginning."""
    trainer = make_trainer(ADAMW, plan=plan, ema=ema)
    trainer.ema_model.load_state_dict(another().state_dict(), assign=assign)
    expected = reference(trainer.model, ema)
    expected.module.load_state_dict(another().state_dict())
    expected.n_averaged.fill_(1)
    trainer.model.load_state_dict(trainer.model.state_dict())
    assert same(trainer.ema_model, another())
    assert trainer.state_dict()["ema"]["num_averaged"] == 1
    for batch in make_batches(8):
        trainer.step(batch)
        expected.update_parameters(trainer.model)
        assert not differences(*comparable(expected, trainer.ema_model, use_buffers=False))


def test_looking_at_it_begins_no_average():
    """Its forward writes to its buffers, and a state of no updates is loaded into it."""
    trainer = make_trainer(SGD, net=BatchNormNet, ema=0.9)
    trainer.ema_model.train()(BATCHES[0][0])
    trainer.load_state_dict(copy.deepcopy(trainer.state_dict()))
    trainer.model.load_state_dict(another(BatchNormNet).state_dict())
    assert same(trainer.ema_model, trainer.model)
    assert trainer.state_dict()["ema"]["num_averaged"] == 0


# --- 16 bits --------------------------------------------------------------------------------------


def narrow():
    return DropoutNet().bfloat16()


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("plan", ["eager", "exact"])
def test_what_is_loaded_in_place_into_an_average_of_16_bits_is_averaged_on(plan):
    trainer = make_trainer(ADAMW, cast_loss, plan, net=narrow, ema=0.999)
    for number, batch in enumerate(make_batches(12)):
        if number == 8:  # replays
            trainer.ema_model.load_state_dict(another(narrow).state_dict())
            expected = {n: p.float() for n, p in another(narrow).named_parameters()}
        trainer.step(batch)
        if number >= 8:
            weights = dict(trainer.model.named_parameters())
            expected = {n: t.lerp(weights[n].float(), 1 - 0.999) for n, t in expected.items()}
            assert not differences(expected, trainer.state_dict()["ema"]["unrounded"])


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("plan", ["eager", "exact", SKIP], ids=str)
def test_the_same_values_written_again_lose_no_bits(plan):
    ours, alone = (make_trainer(ADAMW, cast_loss, plan, net=narrow, ema=0.999) for _ in range(2))
    for trainer in (ours, alone):
        torch.manual_seed(1)
        for batch in make_batches(10):
            trainer.step(batch)
            if trainer is ours:
                trainer.ema_model.load_state_dict(trainer.ema_model.state_dict())
    assert not differences(*(t.state_dict()["ema"]["unrounded"] for t in (alone, ours)))


# --- a step that fails ----------------------------------------------------------------------------


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("plan", ["eager", "exact"])
@pytest.mark.parametrize("half", [False, True], ids=["step", "update"])
def test_after_a_step_that_failed_it_follows_on(plan, half, monkeypatch):
    trainer = make_trainer(ADAMW, plan=plan, ema=0.9)
    for batch in BATCHES:
        trainer.step(batch)
    trainer.forward_backward(BATCHES[0])
    with monkeypatch.context() as patch:
        patch.setattr(WeightAverage, "update", fail)
        other = tuple(t[:3] for t in BATCHES[0])  # another shape, so no replay
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.update() if half else trainer.step(other)
    trainer.model.layers[3] = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    assert trainer.ema_model.state_dict().keys() == trainer.model.state_dict().keys()


def fail(*args, **kwargs):
    raise RuntimeError("out of memory")


# --- buffers that a forward makes -----------------------------------------------------------------


class Lazy(nn.Module):
    """Registers a buffer when it first runs, and keeps its last loss in a list."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.losses = []

    def forward(self, x):
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.full((4,), 2.0), persistent=False)
        result = self.layer(x) * self.cache
        self.losses[:] = [result.mean()]
        return result


@pytest.mark.parametrize("ema", [0.9, EMAOptions(decay=0.9, use_buffers=True)], ids=repr)
@pytest.mark.parametrize("net", [Lazy, Growing])
def test_a_buffer_made_in_a_forward_leaves_the_averaged_model_what_it_is(net, ema):
    trainer = make_trainer(SGD, net=net, ema=ema)
    held = trainer.ema_model
    weight = held.layer.weight
    expected = trainer.model.layer.weight.detach().clone()
    for number, batch in enumerate(BATCHES):
        trainer.step(batch)
        now = trainer.model.layer.weight.detach()
        expected = now.clone() if number == 0 else expected.lerp(now, 1 - 0.9)
        assert trainer.ema_model is held
        assert torch.equal(weight, expected)
        assert held.state_dict().keys() == trainer.model.state_dict().keys()
        own, theirs = dict(held.named_buffers()), dict(trainer.model.named_buffers())
        assert not differences(theirs, own)
        assert own.keys() == {"cache" if net is Lazy else "seen"}


def test_a_buffer_shared_by_two_modules_stays_shared_and_one_taken_away_is_gone():
    trainer = make_trainer(SGD, net=BatchNormNet, ema=0.9)
    held = trainer.ema_model
    table = torch.ones(3)
    for module in (trainer.model, trainer.model.norm):
        module.register_buffer("table", table)
    assert trainer.ema_model is held
    assert held.table is held.norm.table is not table
    del trainer.model.table
    assert "table" not in dict(trainer.ema_model.named_buffers(recurse=False))


def test_asked_for_in_inference_mode_it_can_be_written_to():
    trainer = make_trainer(SGD, net=Lazy, ema=0.9)
    with torch.inference_mode():
        trainer.ema_model(BATCHES[0][0])  # which registers the buffer on its own
    trainer.step(BATCHES[0])
    with torch.inference_mode():
        trainer.ema_model(BATCHES[0][0])
    trainer.step(BATCHES[1])
    trainer.model.cache = torch.zeros(3)
    with torch.inference_mode():
        buffer = trainer.ema_model.cache
    assert not buffer.is_inference()


@pytest.mark.parametrize("plan", ["eager", SKIP], ids=str)
def test_a_model_that_keeps_a_loss_is_copied_without_its_graph(plan):
    trainer = make_trainer(SGD, plan=plan, net=Lazy, ema=0.9)
    trainer.step(BATCHES[0])
    assert trainer.model.losses[0].grad_fn is not None
    trainer.model.layer = nn.Linear(8, 4)
    (loss,) = trainer.ema_model.losses
    assert loss.grad_fn is None
    assert torch.equal(loss, trainer.model.losses[0])


# --- a model that is cast, moved or laid out anew -------------------------------------------------


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", ["eager", SKIP], ids=str)
@pytest.mark.parametrize("ema", [0.9, WARM], ids=repr)
def test_a_model_that_was_cast_is_averaged_on(ema, plan, dtype, at):
    plain_sgd = partial(optim.SGD, lr=0.1)
    trainer = make_trainer(plain_sgd, cast_loss, plan, ema=ema)
    for batch in BATCHES[:at]:
        trainer.step(batch)
    before = copy.deepcopy(dict(trainer.ema_model.named_parameters()))
    trainer.model.to(dtype)
    assert trainer.step(BATCHES[at]).isfinite()
    assert {p.dtype for p in trainer.ema_model.parameters()} == {dtype}
    state = trainer.state_dict()
    assert state["ema"]["num_averaged"] == at + 1
    if at == 0:
        assert same(trainer.ema_model, trainer.model)
        return
    decay = 0.9 if ema == 0.9 else (1 + at) / (10 + at)
    wide = torch.promote_types(dtype, torch.float32)
    found = state["ema"]["unrounded"] or dict(trainer.ema_model.named_parameters())
    for name, weight in trainer.model.named_parameters():
        expected = before[name].to(wide).lerp(weight.detach().to(wide), 1 - decay)
        torch.testing.assert_close(found[name], expected)


def test_a_weight_of_another_shape_begins_as_it_is():
    trainer = make_trainer(partial(optim.SGD, lr=0.1), net=lambda: nn.Linear(8, 4), ema=0.9)
    trainer.step(BATCHES[0])
    trainer.model.bias.data = torch.zeros(1)
    trainer.optimizer.zero_grad()
    assert trainer.ema_model.bias.shape == (1,)
    trainer.step(BATCHES[1])


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("plan", ["eager", "exact"])
def test_a_model_laid_out_anew_is_followed(plan):
    trainer = make_trainer(partial(optim.SGD, lr=0.1), plan=plan, net=Convolution, ema=0.9)
    expected = reference(trainer.model, 0.9)
    held = trainer.ema_model
    for number, batch in enumerate(make_batches(10)):
        if number == 5:
            trainer.model.to(memory_format=torch.channels_last)
            assert trainer.model.conv.weight.stride() != held.conv.weight.stride()
        trainer.step(batch)
        expected.update_parameters(trainer.model)
        assert not differences(*comparable(expected, trainer.ema_model, use_buffers=False))
    assert trainer.ema_model is held
    assert trainer.model.conv.weight.stride() == held.conv.weight.stride()


# --- copies that are none -------------------------------------------------------------------------


class Shared(nn.Linear):
    def __deepcopy__(self, memo):
        return self


class SharedWeight(nn.Linear):
    def __deepcopy__(self, memo):
        other = nn.Linear(8, 8)
        other.weight = self.weight
        return other


@pytest.mark.parametrize("kind", [Shared, SharedWeight])
def test_a_copy_that_shares_with_the_model_is_refused_and_freezes_nothing(kind):
    model = nn.Sequential(kind(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    part = "Shared" if kind is Shared else "Parameter"
    with pytest.raises(TypeError, match=rf"deepcopy\(\) of Sequential shares a {part} with it"):
        Trainer(model, SGD, mean_loss, ema=0.9)
    assert all(p.requires_grad for p in model.parameters())
    assert all(module.training for module in model.modules())


# --- captures by others ---------------------------------------------------------------------------


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("planted", [False, True], ids=["guarded", "planted"])
def test_the_beginning_of_an_average_is_in_no_graph_of_another_trainer(planted, monkeypatch):
    if planted:
        monkeypatch.setattr(average, "is_capturing", lambda: False)
    ends = []
    for plan in ("eager", "exact"):
        teacher = make_trainer(ADAMW, plan="eager", net=lambda: nn.Linear(8, 4), ema=0.9)

        def distilled(model, batch, teacher=teacher):
            with torch.no_grad():
                aim = teacher.ema_model(batch[0])
            return mean_loss(model, batch) + (model(batch[0]) - aim).square().mean()

        student = make_trainer(ADAMW, distilled, plan, net=lambda: nn.Linear(8, 4))
        for number, batch in enumerate(make_batches(14)):
            student.step(batch)
            if number >= 8:
                teacher.step(batch)
        ends.append(weights_of(student.model) | {"average": teacher.ema_model.weight})
    assert student.report().counters["replays"] == 11
    assert bool(differences(*ends)) == planted
