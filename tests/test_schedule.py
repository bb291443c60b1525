"""Who steps the scheduler: the step alone, or a loop beside it, which is said."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
from torch import optim
from torch.optim import lr_scheduler as schedulers

from models import DropoutNet, make_batches, mean_loss
from torchfast import Trainer

DECAY = partial(schedulers.ExponentialLR, gamma=0.5)


def trained(beside, scheduler=DECAY, steps=6):
    """Train, call ``beside(trainer, number)`` after each step, and return the texts of warnings."""
    optimizer = partial(optim.SGD, lr=1.0)
    with (
        warnings.catch_warnings(record=True) as caught,
        Trainer(DropoutNet(), optimizer, mean_loss, lr_scheduler=scheduler) as trainer,
    ):
        warnings.simplefilter("always")
        for number, batch in enumerate(make_batches(steps)):
            trainer.step(batch)
            beside(trainer, number)
    return [str(one.message) for one in caught if "stepped twice" in str(one.message)]


def test_a_loop_that_steps_it_too_is_told_once():
    (told,) = trained(lambda trainer, number: trainer.lr_scheduler.step())
    assert told.startswith("lr_scheduler (ExponentialLR) is stepped twice for each update")


@pytest.mark.parametrize(
    "beside",
    [
        lambda trainer, number: None,
        # At the end of each epoch of two steps, and now and then.
        lambda trainer, number: number % 2 and trainer.lr_scheduler.step(),
        lambda trainer, number: number in (1, 2) and trainer.lr_scheduler.step(),
        lambda trainer, number: trainer.load_state_dict(trainer.state_dict()),
        lambda trainer, number: [trainer.lr_scheduler.step() for _ in range(3)],
    ],
)
def test_what_is_no_second_loop_is_not_told(beside):
    assert trained(beside) == []


def test_a_scheduler_that_counts_nothing_is_stepped_all_the_same():
    class Own:
        num_steps = 0

        def step(self):
            self.num_steps += 1

    own = Own()
    assert trained(lambda trainer, number: None, scheduler=own) == []
    assert own.num_steps == 6
