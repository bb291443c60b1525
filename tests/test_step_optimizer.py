"""The optimizer and the scheduler of a step, and how close hands them back."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers

from models import BatchNormNet, DropoutNet, make_batches, mean_loss
from stepping import ADAMW, FP16, SGD, grouped, make_trainer, roundtrip
from torchfast import ClosedError, MicroBatches, Trainer
from torchfast._core.compare import differences
from torchfast.testing import plain_step

# --- optimizer and scheduler --------------------------------------------------------------------


def test_num_steps_counts_updates():
    trainer = make_trainer(accumulate=2)
    assert trainer.num_steps == trainer.num_skipped == 0
    for group in grouped(make_batches(5), 2):
        trainer.step(group)
    assert trainer.num_steps == 3
    trainer.forward_backward(MicroBatches(make_batches(1)))
    assert trainer.num_steps == 3
    trainer.update()
    assert trainer.num_steps == 4


def test_what_was_given_is_the_same_object():
    model = DropoutNet()
    optimizer = ADAMW(model.parameters())
    scheduler = schedulers.StepLR(optimizer, 2)
    trainer = Trainer(model, optimizer, mean_loss, "fast", lr_scheduler=scheduler)
    assert trainer.model is model
    assert trainer.optimizer is optimizer
    assert trainer.lr_scheduler is scheduler


def test_an_optimizer_factory_gets_the_parameters():
    seen = []

    def make(parameters):
        seen.extend(parameters)
        return SGD(seen)

    trainer = make_trainer(make)
    assert all(a is b for a, b in zip(seen, trainer.model.parameters(), strict=True))
    assert isinstance(trainer.optimizer, optim.SGD)
    trainer.step(make_batches(1)[0])


def test_a_scheduler_is_stepped_once_after_each_update():
    trainer = make_trainer(SGD, accumulate=2, lr_scheduler=partial(schedulers.StepLR, step_size=2))
    rates = []
    for group in grouped(make_batches(8), 2):
        trainer.step(group)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.01, 0.01, 0.001])
    assert trainer.lr_scheduler.last_epoch == 4


def test_without_a_scheduler_the_users_own_takes_effect():
    trainer = make_trainer(SGD)
    assert trainer.lr_scheduler is None
    mine = schedulers.StepLR(trainer.optimizer, 1)
    for batch in make_batches(2):
        trainer.step(batch)
        mine.step()
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_a_plateau_scheduler_is_left_to_fit():
    trainer = make_trainer(lr_scheduler=partial(schedulers.ReduceLROnPlateau, patience=0))
    trainer.step(make_batches(1)[0])
    assert trainer.lr_scheduler.last_epoch == 0


def test_any_object_with_step_will_do_as_a_scheduler():
    class Counter:
        calls = 0

        def step(self):
            self.calls += 1

    counter = Counter()
    trainer = make_trainer(lr_scheduler=counter)
    for batch in make_batches(2):
        trainer.step(batch)
    assert counter.calls == 2
    make_trainer(lr_scheduler=Counter()).load_state_dict(roundtrip(trainer.state_dict()))


@pytest.mark.parametrize("plan", ["eager", "exact", "fast", FP16], ids=str)
def test_parameter_groups_show_python_floats(plan):
    trainer = make_trainer(plan=plan, lr_scheduler=partial(schedulers.StepLR, step_size=1))
    given = ADAMW(DropoutNet().parameters()).param_groups[0]
    for batch in make_batches(2):
        trainer.step(batch)
    (group,) = trainer.optimizer.param_groups
    assert type(group["lr"]) is float
    assert group.keys() - {"initial_lr"} == given.keys()
    for key in given.keys() - {"params", "lr", "foreach", "fused", "capturable"}:
        assert group[key] == given[key]


@pytest.mark.parametrize("plan", ["exact", "fast"])
def test_a_learning_rate_set_by_hand_takes_effect(plan):
    trainer = make_trainer(partial(optim.SGD, lr=0.1), plan=plan, net=lambda: nn.Linear(8, 4))
    batches = make_batches(2)
    trainer.step(batches[0])
    trainer.optimizer.param_groups[0]["lr"] = 0.5
    before = trainer.model.weight.detach().clone()
    trainer.step(batches[1])
    expected = before - 0.5 * trainer.model.weight.grad
    torch.testing.assert_close(trainer.model.weight.detach(), expected)


def test_a_group_added_later_is_trained():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    trainer = Trainer(model, SGD(model[0].parameters()), mean_loss, "fast")
    batches = make_batches(3)
    trainer.step(batches[0])
    trainer.optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.2})
    before = model[1].weight.detach().clone()
    trainer.step(batches[1])
    assert not torch.equal(model[1].weight, before)
    roundtrip(trainer.state_dict())
    trainer.close()


def test_a_callable_may_go_through_the_parameters_more_than_once():
    def make(parameters):
        return optim.SGD(
            [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in parameters if p.dim() <= 1]},
            ],
            lr=0.1,
        )

    trainer = Trainer(nn.Linear(8, 4), make, mean_loss)
    assert [len(group["params"]) for group in trainer.optimizer.param_groups] == [1, 1]


def test_a_parameter_outside_the_optimizer_is_reported():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    trainer = Trainer(model, SGD(model[0].parameters()), mean_loss)
    assert "2 trainable parameters are not in the optimizer (1.weight, 1.bias)" in str(
        trainer.report()
    )


# --- close --------------------------------------------------------------------------------------


def test_close_puts_the_optimizer_and_the_layout_back():
    torch.manual_seed(0)
    model = BatchNormNet()
    model.conv.weight.data = torch.randn(4, 1, 3, 3)
    wide = nn.Conv2d(3, 5, 3)
    model.add_module("wide", wide)
    optimizer = ADAMW(model.parameters())
    given = copy.deepcopy(optimizer.state_dict()["param_groups"])
    trainer = Trainer(model, optimizer, mean_loss, "fast")
    assert optimizer.param_groups[0]["fused"] is True
    assert wide.weight.is_contiguous(memory_format=torch.channels_last)
    trainer.step(make_batches(1)[0])
    trainer.close()
    assert optimizer.state_dict()["param_groups"] == given
    assert wide.weight.is_contiguous()
    assert optimizer.state[model.head.weight]["exp_avg"].is_contiguous()
    plain_step(model, optimizer, mean_loss, make_batches(1))


@pytest.mark.parametrize("plan", ["exact", "fast"])
def test_a_second_close_does_nothing(plan):
    trainer = make_trainer(plan=plan)
    trainer.step(make_batches(1)[0])
    trainer.close()
    state = copy.deepcopy(trainer.state_dict())
    trainer.close()
    assert not differences(state, trainer.state_dict())


def test_a_closed_step_refuses_to_train():
    trainer = make_trainer()
    batch = make_batches(1)[0]
    state = trainer.state_dict()
    trainer.close()
    for call in (
        lambda: trainer.step(batch),
        lambda: trainer.forward_backward(batch),
        trainer.update,
        lambda: trainer.load_state_dict(state),
        lambda: trainer.fit([batch], steps=1, progress="off"),
    ):
        with pytest.raises(ClosedError, match=r"was closed, .*; build a new Trainer"):
            call()
    assert trainer.num_steps == 0


def test_a_trainer_is_a_context_that_closes_also_on_an_error():
    with make_trainer(plan="fast") as trainer:
        assert trainer.optimizer.param_groups[0]["fused"] is True
    assert not trainer.optimizer.param_groups[0]["fused"]
    with pytest.raises(ZeroDivisionError), make_trainer() as trainer:
        raise ZeroDivisionError
    with pytest.raises(ClosedError):
        trainer.update()


def test_the_optimizer_goes_on_without_us_after_close():
    trainer = make_trainer(plan="fast")
    trainer.step(make_batches(1)[0])
    trainer.close()
    trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())
    assert not trainer.optimizer.param_groups[0]["fused"]


def test_a_model_on_several_devices_stays_where_it_is():
    """Only ``device=`` moves a model; without it, one spread by its user stays spread."""
    for make in (SGD, lambda params: SGD(list(params))):
        model = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4, device="meta")])
        for optimizer in (make, make(model.parameters())):
            trainer = Trainer(model, optimizer, lambda m, b: mean_loss(m[0], b))
            assert [p.device.type for p in model.parameters()] == ["cpu", "cpu", "meta", "meta"]
            trainer.step(make_batches(1)[0])
            assert "some parameters lie on ['meta']" in str(trainer.report())
            trainer.close()


def test_an_optimizer_of_another_model_is_refused():
    model = DropoutNet()
    with pytest.raises(ValueError, match="holds no parameter of this DropoutNet"):
        Trainer(copy.deepcopy(model), SGD(model.parameters()), mean_loss)


def test_a_second_trainer_finds_what_the_user_gave():
    """As a notebook cell that is run twice."""
    model = DropoutNet()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    first = Trainer(model, optimizer, mean_loss, "fast")
    assert optimizer.param_groups[0]["fused"] is True
    second = Trainer(model, optimizer, mean_loss, "exact")
    assert optimizer.param_groups[0]["fused"] is None
    with pytest.raises(ClosedError):
        first.step(make_batches(1)[0])
    second.step(make_batches(1)[0])


def test_what_steps_aside_is_warned_of_once(caplog):
    Trainer(DropoutNet(), partial(optim.RMSprop, lr=0.1), mean_loss, "fast")
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "torch.optim.RMSprop has no fused implementation" in caplog.text
    caplog.clear()
    Trainer(DropoutNet(), SGD, mean_loss, "exact")
    assert caplog.text == ""
