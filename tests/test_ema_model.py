"""The averaged model: which tensors it has, what it follows, and how it can be used."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim

from averages import AveragedTwins, MixedNet, comparable, reference, weights_of
from models import MODELS, BatchNormNet, DropoutNet, make_batches, mean_loss
from poison import SKIP, BufferNet
from stepping import make_trainer
from torchfast import EMAOptions, MicroBatches, Plan, Trainer
from torchfast._core.compare import differences
from torchfast.ema import WeightAverage

ADAMW = partial(optim.AdamW, lr=0.01, fused=True)
SGD = partial(optim.SGD, lr=0.1, momentum=0.9)


# --- what is averaged -----------------------------------------------------------------------------


def test_buffers_are_copied_or_averaged():
    copied, averaged = (
        make_trainer(SGD, net=BatchNormNet, ema=EMAOptions(decay=0.9, use_buffers=flag))
        for flag in (False, True)
    )
    for batch in make_batches(5):
        copied.step(batch)
        averaged.step(batch)
    assert torch.equal(copied.ema_model.norm.running_mean, copied.model.norm.running_mean)
    assert not torch.equal(averaged.ema_model.norm.running_mean, averaged.model.norm.running_mean)
    for trainer in (copied, averaged):
        assert int(trainer.ema_model.norm.num_batches_tracked) == 5


def test_tied_weights_are_averaged_once_and_stay_tied():
    trainer = make_trainer(SGD, net=MODELS["tied"], ema=0.9)
    for batch in make_batches(3):
        trainer.step(batch)
    assert trainer.ema_model.head.weight is trainer.ema_model.embedding.weight
    expected = {n: p.shape for n, p in trainer.model.named_parameters()}
    assert {n: p.shape for n, p in trainer.ema_model.named_parameters()} == expected


@pytest.mark.usefixtures("tape")
def test_weights_of_16_bits_are_averaged_in_32():
    """By hand: copies of 32 bits. In 16 bits the average would stand still."""
    twins = AveragedTwins(MixedNet, partial(optim.SGD, lr=0.01), ema=0.999)
    wide, narrow = None, None
    for batch in make_batches(12):
        twins.twins.step(batch)
        twins.twins.check()
        weight = twins.twins.plain.third.weight.detach()
        wide = weight.float() if wide is None else wide.lerp_(weight.float(), 1 - 0.999)
        narrow = weight.clone() if narrow is None else narrow.lerp_(weight, 1 - 0.999)
        own = twins.twins.captured.ema_model
        assert torch.equal(own.third.weight, wide.bfloat16())
        state = twins.twins.captured.state_dict()
        assert torch.equal(state["ema"]["unrounded"]["third.weight"], wide)
        assert not differences(weights_of(twins.twins.plain)["phase"], own.phase)
    assert own.first.weight.dtype is torch.float64
    assert set(state["ema"]["unrounded"]) == {"third.weight", "third.bias"}
    assert not torch.equal(wide, narrow.float())
    assert twins.twins.counts == (1, 9, 3, 1)


def test_several_dtypes_are_averaged_under_a_flag_too():
    ours, plain = (make_trainer(SGD, net=MixedNet, plan=p, ema=0.9) for p in (SKIP, "eager"))
    for batch in make_batches(5):
        ours.step(batch)
        plain.step(batch)
    assert not differences(weights_of(plain.ema_model), weights_of(ours.ema_model))


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.conv(x.view(-1, 2, 2, 2)).flatten(1))


def test_the_average_is_laid_out_as_the_model():
    def strides(model):
        return [p.stride() for p in model.parameters()]

    plan = Plan(channels_last=True)
    with make_trainer(SGD, net=Convolution, plan=plan, ema=0.9) as trainer:
        beside = reference(trainer.model, 0.9)
        for batch in make_batches(3):
            trainer.step(batch)
            beside.update_parameters(trainer.model)
        assert strides(trainer.model) != strides(Convolution())
        assert strides(trainer.ema_model) == strides(trainer.model)
        assert not differences(*comparable(beside, trainer.ema_model, use_buffers=False))
    assert strides(trainer.ema_model) == strides(trainer.model) == strides(Convolution())
    assert not differences(*comparable(beside, trainer.ema_model, use_buffers=False))


def test_a_model_loaded_before_the_first_step_is_where_the_average_begins():
    trainer = make_trainer(SGD, ema=0.999)
    torch.manual_seed(7)
    trainer.model.load_state_dict(DropoutNet().state_dict())
    assert not differences(weights_of(trainer.model), weights_of(trainer.ema_model))
    trainer.step(make_batches(1)[0])
    assert not differences(weights_of(trainer.model), weights_of(trainer.ema_model))


# --- what changes under its feet ------------------------------------------------------------------


def swap_last(model, optimizer, new):
    model.layers[3] = new
    optimizer.param_groups[0]["params"][2:] = []
    optimizer.add_param_group({"params": list(new.parameters())})


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("planted", [False, True], ids=["guarded", "planted"])
@pytest.mark.parametrize("other", [False, True], ids=["alike", "other"])
def test_a_layer_that_is_swapped_is_followed(other, planted, monkeypatch):
    """By hand: what has the old name and shape goes on with its average, what is new begins."""
    if planted:
        monkeypatch.setattr(WeightAverage, "follow", lambda self: None)
    trainer = make_trainer(ADAMW, ema=0.9)
    expected = reference(trainer.model, 0.9)
    for number, batch in enumerate(make_batches(14)):
        if number == 6:
            torch.manual_seed(5)
            new = nn.Linear(16, 4)
            if other:
                new = nn.Sequential(nn.Linear(16, 16), new)
                expected.module.layers[3] = copy.deepcopy(new)
            swap_last(trainer.model, trainer.optimizer, new)
        trainer.step(batch)
        expected.update_parameters(trainer.model)
    pair = comparable(expected, trainer.ema_model, use_buffers=False)
    assert bool(differences(*pair)) == planted
    assert trainer.report().counters["captures"] == 2


@pytest.mark.usefixtures("tape")
def test_weights_that_are_assigned_are_followed():
    trainer = make_trainer(ADAMW, ema=0.9)
    expected = reference(trainer.model, 0.9)
    for number, batch in enumerate(make_batches(12)):
        if number == 6:
            torch.manual_seed(7)
            trainer.model.load_state_dict(DropoutNet().state_dict(), assign=True)
            trainer.optimizer.state.clear()
            trainer.optimizer.param_groups[0]["params"] = list(trainer.model.parameters())
        trainer.step(batch)
        expected.update_parameters(trainer.model)
        assert not differences(*comparable(expected, trainer.ema_model, use_buffers=False))


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("assign", [False, True])
def test_what_is_loaded_into_the_average_is_averaged_on(assign):
    trainer = make_trainer(ADAMW, ema=0.9)
    expected = reference(trainer.model, 0.9)
    for number, batch in enumerate(make_batches(10)):
        if number == 6:
            torch.manual_seed(7)
            state = DropoutNet().state_dict()
            expected.module.load_state_dict(state)
            trainer.ema_model.load_state_dict(copy.deepcopy(state), assign=assign)
        trainer.step(batch)
        expected.update_parameters(trainer.model)
        assert not differences(*comparable(expected, trainer.ema_model, use_buffers=False))
    assert trainer.report().counters["captures"] == 1


class Growing(nn.Module):
    """Keeps what it has seen in a buffer, which is longer each time."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(0, 8))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x.detach()[:1]])
        return self.layer(x)


def test_a_buffer_that_grows_is_there_when_it_is_asked_for():
    trainer = make_trainer(SGD, net=Growing, ema=0.9)
    for batch in make_batches(3):
        trainer.step(batch)
    assert torch.equal(trainer.ema_model.seen, trainer.model.seen)
    average = trainer.ema_model.layer.weight.clone()
    weight = trainer.model.layer.weight.detach().clone()
    trainer.step(make_batches(1)[0])
    moved = average.lerp(trainer.model.layer.weight.detach(), 1 - 0.9)
    assert torch.equal(trainer.ema_model.layer.weight, moved)
    assert not torch.equal(weight, trainer.model.layer.weight)


# --- the averaged model as a module ---------------------------------------------------------------


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("net", [DropoutNet, BufferNet])
def test_evaluating_it_disturbs_nothing(net):
    ours, alone = (make_trainer(ADAMW, net=net, ema=0.9) for _ in range(2))
    held_out = make_batches(2, seed=9)
    for trainer in (ours, alone):
        torch.manual_seed(1)
        for batch in make_batches(12):
            trainer.step(batch)
            if trainer is ours:
                trainer.evaluate(held_out, ema=True)
                trainer.ema_model.train()
                assert trainer.ema_model.training
                trainer.ema_model.eval()
                with torch.no_grad():
                    trainer.ema_model(held_out[0][0])
    assert not differences(weights_of(alone.model), weights_of(ours.model))
    average = [weights_of(t.ema_model) for t in (alone, ours)]
    if net is BufferNet:  # what its own forward writes is overwritten by the next update only
        for side in average:
            del side["seen"], side["mean"]
    assert not differences(*average)
    assert ours.report().counters["captures"] == alone.report().counters["captures"] == 1


def test_it_is_evaluated_where_that_is_asked_for():
    trainer = make_trainer(SGD, net=BatchNormNet, ema=0.9)
    for batch in make_batches(6):
        trainer.step(batch)
    held_out = make_batches(2, seed=9)
    averaged = copy.deepcopy(trainer.ema_model).eval()
    with torch.no_grad():
        losses = [mean_loss(averaged, batch).item() for batch in held_out]
    assert trainer.evaluate(held_out, ema=True)["loss"] == pytest.approx(sum(losses) / 2)
    assert trainer.evaluate(held_out)["loss"] != trainer.evaluate(held_out, ema=True)["loss"]
    assert trainer.model.training
    assert not trainer.ema_model.training


@pytest.mark.usefixtures("tape")
def test_a_loss_may_look_at_it():
    """A teacher that is the student's average: read where it is, also in a replay."""
    trainers = []

    def distilled(model, batch):
        teacher = trainers[-1].ema_model
        with torch.no_grad():
            aim = teacher(batch[0])
        return mean_loss(model, batch) + (model(batch[0]) - aim).square().mean()

    ends = []
    for plan in ("eager", "exact"):
        trainers.append(make_trainer(ADAMW, distilled, plan, net=MODELS["tied"], ema=0.9))
        for batch in make_batches(10):
            trainers[-1].step(batch)
        ends.append(weights_of(trainers[-1].model) | weights_of(trainers[-1].ema_model))
    assert not differences(*ends)
    assert trainers[-1].report().counters["replays"] == 7


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("planted", [False, True], ids=["guarded", "planted"])
def test_a_loss_that_looks_at_an_average_begun_anew_captures_no_beginning(planted, monkeypatch):
    """Outside a step a new average is what the weights are; in a graph that would be for ever."""
    current = WeightAverage.current

    def always(self):
        self._in_step = False
        return current(self)

    if planted:
        monkeypatch.setattr(WeightAverage, "current", always)
    trainers = []

    def distilled(model, batch):
        with torch.no_grad():
            aim = trainers[-1].ema_model(batch[0])
        return mean_loss(model, batch) + (model(batch[0]) - aim).square().mean()

    plain = make_trainer(ADAMW, net=MODELS["tied"])
    plain.step(make_batches(1)[0])
    state = copy.deepcopy(plain.state_dict())
    ends = []
    for plan in ("eager", "exact"):
        trainers.append(make_trainer(ADAMW, distilled, plan, net=MODELS["tied"], ema=0.9))
        for number, batch in enumerate(make_batches(12)):
            if number == 6:  # another capture, without warm-up
                trainers[-1].load_state_dict(state)
                trainers[-1].optimizer.param_groups[0]["weight_decay"] = 0.5
            trainers[-1].step(batch)
        ends.append(weights_of(trainers[-1].ema_model))
    # The check finds what was planted, and blames the update first: one capture more.
    assert trainers[-1].report().counters["captures"] == 2 + planted
    assert bool(differences(*ends)) == planted


def test_it_is_a_module_of_its_own_without_gradients():
    trainer = make_trainer(SGD, ema=0.9)
    averaged = trainer.ema_model
    assert type(averaged) is DropoutNet
    assert averaged.state_dict().keys() == trainer.model.state_dict().keys()
    assert not any(p.requires_grad for p in averaged.parameters())
    assert not averaged.training
    trainer.step(make_batches(1)[0])
    assert trainer.ema_model is averaged
    assert all(p.grad is None for p in averaged.parameters())
    assert make_trainer(SGD).ema_model is None


def test_the_report_and_the_repr_tell_of_it():
    trainer = make_trainer(SGD, ema=EMAOptions(decay=0.99, warm_up=True))
    (decision,) = [d for d in trainer.report().decisions if d.lever == "ema"]
    assert decision.outcome == "applied"
    assert decision.detail.startswith("4 tensors are averaged after each update (decay 0.99, warm")
    assert repr(trainer).endswith(", ema=EMAOptions(decay=0.99, warm_up=True))")
    plain = make_trainer(SGD)
    assert "ema" not in repr(plain)
    assert "ema" not in {d.lever for d in plain.report().decisions}


def test_groups_of_several_sizes_are_one_update_each():
    trainer = make_trainer(SGD, ema=0.9, accumulate=3)
    expected = reference(trainer.model, 0.9)
    batches = make_batches(5)
    for group in (batches[:3], batches[3:]):
        trainer.step(MicroBatches(group))
        expected.update_parameters(trainer.model)
    assert not differences(*comparable(expected, trainer.ema_model, use_buffers=False))
    assert trainer.state_dict()["ema"]["num_averaged"] == 2


def test_a_model_that_cannot_be_copied_is_refused():
    class Uncopyable(nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("no copies")

    with pytest.raises(TypeError, match=r"deepcopy\(\) of Uncopyable failed .*no copies"):
        Trainer(Uncopyable(8, 4), SGD, mean_loss, ema=0.9)
    Trainer(Uncopyable(8, 4), SGD, mean_loss)


# --- bad input ------------------------------------------------------------------------------------

BAD = [
    (True, TypeError, r"ema must be a decay in \[0, 1\), EMAOptions or None, .*got True \(bool\)"),
    ("0.99", TypeError, r"ema must be .* got '0.99' \(str\)"),
    (torch.tensor(0.9), TypeError, r"ema must be .*\(Tensor\)"),
    (1.0, ValueError, r"ema must be .* got 1.0: .*1 would never move"),
    (-0.1, ValueError, r"ema must be .* got -0.1"),
    (float("nan"), ValueError, r"ema must be .* got nan"),
    (999, ValueError, r"ema must be .* got 999"),
]


@pytest.mark.parametrize(("value", "error", "message"), BAD, ids=[str(row[0]) for row in BAD])
def test_a_decay_that_is_none_is_refused(value, error, message):
    with pytest.raises(error, match=message):
        make_trainer(SGD, ema=value)
    with pytest.raises(error, match=message.replace("ema", "decay", 1).split("a decay")[0]):
        EMAOptions(decay=value)


def test_other_bad_options_are_refused():
    with pytest.raises(TypeError, match=r"warm_up must be True or False, got 1 \(int\)"):
        EMAOptions(warm_up=1)
    with pytest.raises(TypeError, match=r"use_buffers must be True or False, got 'yes'"):
        EMAOptions(use_buffers="yes")
    with pytest.raises(TypeError, match=r"no argument 'warmup'; did you mean 'warm_up'"):
        EMAOptions(warmup=True)
    with pytest.raises(ValueError, match=r"ema=True .* evaluates averaged weights, and this"):
        make_trainer(SGD).evaluate(make_batches(1), ema=True)
    with pytest.raises(TypeError, match=r"ema must be True or False, got 0.9"):
        make_trainer(SGD, ema=0.9).evaluate(make_batches(1), ema=0.9)
    assert EMAOptions.of(0).decay == 0.0


class Resizing(nn.Module):
    """Resizes a buffer in place in its first forward, as observers of quantization do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x):
        if not self.seen.numel():
            self.seen.resize_(8).zero_()
        with torch.no_grad():
            self.seen.add_(x.mean(0))
        return self.layer(x)


def test_a_buffer_that_is_resized_in_place_is_followed():
    trainer = make_trainer(SGD, net=Resizing, ema=0.9)
    for batch in make_batches(3):
        trainer.step(batch)
    assert torch.equal(trainer.ema_model.seen, trainer.model.seen)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_model_is_averaged():
    trainer = make_trainer(SGD, net=lambda: torch.jit.script(BatchNormNet()), ema=0.9)
    plain = make_trainer(SGD, net=BatchNormNet, ema=0.9)
    for batch in make_batches(3):
        trainer.step(batch)
        plain.step(batch)
    found = dict(trainer.ema_model.named_parameters())
    for name, expected in plain.ema_model.named_parameters():
        torch.testing.assert_close(found[name], expected)


class Switching(nn.Module):
    """Goes another way in its forward in eval mode, as its ``train()`` has noted."""

    def __init__(self):
        super().__init__()
        self.layer, self.is_fast = nn.Linear(8, 4), False

    def train(self, mode=True):
        self.is_fast = not mode
        return super().train(mode)

    def forward(self, x):
        return self.layer(x) * (1.0 if self.is_fast else 100.0)


def test_an_average_is_in_the_form_of_eval_mode():
    trainer = make_trainer(partial(optim.SGD, lr=0.0), net=Switching, ema=0.9)
    batches = make_batches(3)
    trainer.step(batches[0])
    assert trainer.ema_model.is_fast
    assert trainer.evaluate(batches, ema=True) == pytest.approx(trainer.evaluate(batches))
    assert not trainer.model.is_fast
