"""What is given as the batches of several steps and is none: refused, with name and remedy."""

from __future__ import annotations

import pytest

from models import make_batches
from stepping import make_trainer
from torchfast import MicroBatches, PrefetchingLoader, StepBatches

BATCHES = make_batches(3)
REFUSED = {
    "a list": (BATCHES, TypeError, r"steps\(\) takes StepBatches, .* got list"),
    "a batch": (BATCHES[0], TypeError, r"steps\(\) takes StepBatches, .* got tuple"),
    "micro-batches": (MicroBatches(BATCHES), TypeError, "got MicroBatches"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_anything_but_the_batches_of_steps_is_refused(name):
    given, error, message = REFUSED[name]
    trainer = make_trainer()
    with pytest.raises(error, match=message):
        trainer.steps(given)
    assert trainer.num_steps == 0


def test_a_step_refuses_the_batches_of_several():
    with pytest.raises(TypeError, match="a step takes one batch, got the StepBatches of 3 steps"):
        make_trainer().step(StepBatches(BATCHES))


@pytest.mark.parametrize("given", [BATCHES[0][0], {"a": 1}, "ab", iter(BATCHES)])
def test_what_holds_no_batches_makes_no_group(given):
    with pytest.raises(TypeError, match="StepBatches takes a list or tuple of batches, got"):
        StepBatches(given)


def test_an_empty_group_is_refused():
    with pytest.raises(ValueError, match="StepBatches needs at least one batch"):
        StepBatches([])


def test_a_bare_batch_among_micro_batches_is_refused_before_anything_runs():
    trainer = make_trainer(accumulate=2)
    with pytest.raises(TypeError, match="with accumulate=2 a step takes MicroBatches"):
        trainer.steps(StepBatches([MicroBatches(BATCHES[:2]), BATCHES[2]]))
    with pytest.raises(ValueError, match="got 3 micro-batches in a step, but accumulate=2"):
        trainer.steps(StepBatches([MicroBatches(BATCHES[:2]), MicroBatches(BATCHES)]))
    assert trainer.num_steps == 0


@pytest.mark.parametrize("unroll", [0, -1, 1.5, "4", True])
def test_a_loader_unrolls_whole_numbers_of_steps(unroll):
    with pytest.raises((TypeError, ValueError), match="unroll must be"):
        make_trainer().prefetch(BATCHES, unroll=unroll)


def test_a_loader_says_how_it_groups():
    assert "unroll=2" in repr(PrefetchingLoader(BATCHES, "cpu", unroll=2))
    assert repr(StepBatches(BATCHES)) == "StepBatches(3 x tuple)"


def test_a_closed_trainer_takes_no_steps():
    trainer = make_trainer()
    trainer.close()
    with pytest.raises(RuntimeError, match=r"this step was closed, by close\(\)"):
        trainer.steps(StepBatches(BATCHES))
