"""A forward that views what lies as NHWC as one dimension: the plan lays it out as NCHW again."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from torchfast import CompileOptions, Plan, Trainer
from torchfast._core.compare import differences

SGD = partial(optim.SGD, lr=0.1, momentum=0.9)
NHWC = Plan(channels_last=True)


class Net(nn.Module):
    """The classic: convolutions, and a view of what they make as one dimension."""

    def __init__(self, flattened):
        super().__init__()
        self.flattened = flattened
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(4 * 6 * 6, 3)

    def forward(self, x):
        return self.last(self.flattened(self.drop(F.relu(self.norm(self.conv(x))))))


def by_view(x):
    return x.view(-1, 4 * 6 * 6)


def by_reshape(x):
    return x.reshape(-1, 4 * 6 * 6)


def mean_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def dice(model, batch):
    maps = batch[0].sigmoid()
    weight = maps.view(-1).mean()
    return mean_loss(model, batch) * weight


def batches(number=4):
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(5, 3, 6, 6, generator=generator), torch.arange(5) % 3) for _ in range(number)
    ]


def trainer_of(plan, *, flattened=by_view, loss_fn=mean_loss):
    torch.manual_seed(0)
    return Trainer(Net(flattened), SGD, loss_fn, plan)


def layout(trainer):
    (found,) = [d for d in trainer.report().decisions if d.lever == "channels_last"]
    return found


@pytest.mark.parametrize("is_prefetched", [False, True])
@pytest.mark.parametrize("case", [(by_view, mean_loss), (by_reshape, dice)], ids=["model", "loss"])
@pytest.mark.parametrize("plan", [NHWC, NHWC.replace(compile=CompileOptions(backend="aot_eager"))])
def test_it_trains_as_without(plan, case, is_prefetched, caplog):
    flattened, loss_fn = case
    trainer = trainer_of(plan, flattened=flattened, loss_fn=loss_fn)
    plain = trainer_of("eager", flattened=flattened, loss_fn=loss_fn)
    with caplog.at_level(logging.WARNING):
        given = trainer.prefetch(batches()) if is_prefetched else batches()
        for batch, other in zip(given, batches(), strict=True):
            torch.manual_seed(5)
            loss = trainer.step(batch)
            torch.manual_seed(5)
            torch.testing.assert_close(loss, plain.step(other), rtol=1e-5, atol=1e-6)
    assert layout(trainer).outcome == "stepped aside"
    assert "view" in layout(trainer).detail
    assert sum("channels_last: a view(...)" in r.getMessage() for r in caplog.records) == 1
    # Of the forward that failed nothing is left: statistics were counted once.
    assert int(trainer.model.norm.num_batches_tracked) == 4
    for own, expected in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)
        assert own.is_contiguous()


def test_not_compiled_it_is_the_plain_loop_to_the_bit():
    trainer, plain = trainer_of(NHWC), trainer_of("eager")
    losses = []
    for each in (trainer, plain):
        torch.manual_seed(5)
        losses.append([each.step(batch) for batch in batches()])
    assert not differences(losses[1], losses[0])
    assert not differences(plain.model.state_dict(), trainer.model.state_dict())


def test_an_evaluation_before_the_first_step_finds_it_too():
    trainer, plain = trainer_of(NHWC), trainer_of("eager")
    assert trainer.evaluate(batches()) == plain.evaluate(batches())
    assert layout(trainer).outcome == "stepped aside"


def test_what_bears_it_stays():
    trainer = trainer_of(NHWC, flattened=by_reshape)
    for batch in batches():
        trainer.step(batch)
    assert layout(trainer).outcome == "applied"
    assert trainer.model.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_another_error_of_the_forward_is_the_users():
    trainer = trainer_of(NHWC, flattened=lambda x: x.view(7, -1))
    plain = trainer_of("eager", flattened=lambda x: x.view(7, -1))
    for each in (plain, trainer):
        with pytest.raises(RuntimeError, match="is invalid for input of size"):
            each.step(batches()[0])


def test_a_later_view_says_what_to_do():
    is_late = False
    trainer = trainer_of(NHWC, flattened=lambda x: by_view(x) if is_late else by_reshape(x))
    trainer.step(batches()[0])
    is_late = True
    with pytest.raises(RuntimeError, match="view size is not compatible") as raised:
        trainer.step(batches()[1])
    assert "plan.replace(channels_last=False)" in "".join(raised.value.__notes__)


def test_an_average_is_laid_out_as_its_model():
    torch.manual_seed(0)
    trainer = Trainer(Net(by_view), SGD, mean_loss, NHWC, ema=0.5)
    assert trainer.evaluate(batches(), ema=True)["loss"] > 0
    assert trainer.ema_model.conv.weight.is_contiguous()


def test_a_view_that_only_training_takes_is_found_behind_an_evaluation():
    trainer = trainer_of(NHWC, flattened=by_reshape)
    trainer.evaluate(batches())
    trainer.model.flattened = by_view
    trainer.step(batches()[0])
    assert layout(trainer).outcome == "stepped aside"
