"""The guard together with fp16 and bf16; what it counts, saves and says."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import optim

from pairs import in_pairs
from poison import (
    SKIP,
    as_batch,
    assert_same,
    batches_with,
    fp16,
    run,
    run_without,
    state_of,
    trainer_of,
)
from stepping import roundtrip
from test_parity import OPTIMIZERS
from torchfast import NonfiniteOptions, Plan, StateMismatchError

NOT_THE_SCALE = ["NaN input", None, None, "infinite loss", "NaN loss only", None, None]


@in_pairs(OPTIMIZERS, ("accumulate", (1, 3)), ("clip", (None, 0.5)), ["AdamW fused", "AdamW"])
def test_under_fp16_too_it_is_as_if_it_had_never_been(name, accumulate, clip):
    """The scale as well: where the loss is not finite it is not to blame."""
    groups = batches_with(NOT_THE_SCALE, accumulate=accumulate)
    options = {"accumulate": accumulate, "max_grad_norm": clip}
    plan = fp16("skip", growth_interval=2)
    ours = trainer_of(OPTIMIZERS[name], plan, **options)
    reference = trainer_of(OPTIMIZERS[name], plan, **options)
    run(ours, groups)
    run_without(reference, groups)
    assert_same(state_of(reference), state_of(ours))
    assert (ours.num_skipped, reference.num_skipped) == (3, 0)
    scales = [t.state_dict()["scaler"]["scaler"] for t in (ours, reference)]
    assert scales[0] == scales[1]
    assert scales[0]["scale"] == 1024.0


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "SGD nesterov fused"])
def test_under_fp16_a_bad_gradient_shrinks_the_scale(name):
    trainer = trainer_of(OPTIMIZERS[name], fp16("skip"))
    good, bad = batches_with([None, "NaN gradient"])
    run(trainer, [good])
    before = state_of(trainer)
    run(trainer, [bad])
    assert_same(before, state_of(trainer))
    assert trainer.state_dict()["scaler"]["scaler"]["scale"] == 128.0
    levers = {d.lever: d for d in trainer.report().decisions}
    assert {"loss scaling", "nonfinite"} <= levers.keys()


def test_under_fp16_without_the_guard_all_is_as_it_was():
    """Buffers are not put back, and a loss that is NaN alone is no reason to skip."""
    trainer = trainer_of(OPTIMIZERS["AdamW"], fp16("propagate"))
    good, nan, alone = batches_with([None, "NaN input", "NaN loss only"])
    run(trainer, [good])
    before = state_of(trainer)
    run(trainer, [nan])
    assert_same(before["parameters"], state_of(trainer)["parameters"])
    assert not trainer.model.norm.running_mean.isfinite().all()
    assert trainer.state_dict()["scaler"]["scaler"]["scale"] == 128.0
    trainer = trainer_of(OPTIMIZERS["AdamW"], fp16("propagate"))
    run(trainer, [good, alone])
    assert trainer.num_skipped == 0


def test_under_fp16_what_is_spoilt_between_the_halves_is_not_the_scales_fault():
    trainer = trainer_of(OPTIMIZERS["AdamW"], fp16("skip"))
    trainer.forward_backward(as_batch(batches_with([None])[0]))
    before = state_of(trainer)
    trainer.model.last.bias.grad[1] = torch.nan
    trainer.update()
    assert_same(before["parameters"], state_of(trainer)["parameters"])
    assert trainer.state_dict()["scaler"]["scaler"]["scale"] == 256.0


def test_bf16_is_guarded():
    trainer = trainer_of(OPTIMIZERS["AdamW"], Plan(precision="bf16", nonfinite="skip"))
    good, bad = batches_with([None, "NaN input"])
    run(trainer, [good])
    before = state_of(trainer)
    run(trainer, [bad])
    assert_same(before, state_of(trainer))


# --- counting, saving, the scheduler --------------------------------------------------------------


def test_the_report_says_how_many_and_which():
    trainer = trainer_of(OPTIMIZERS["AdamW"], SKIP)
    assert trainer.report().to_dict()["counters"] == {"steps": 0, "skipped": 0}
    pattern = [None, *["NaN input"] * 7, None, *["NaN loss only"] * 3]
    run(trainer, batches_with(pattern))
    counters = trainer.report().to_dict()["counters"]
    assert counters["skipped"] == trainer.num_skipped == 10
    assert counters["last skipped steps"] == "4 5 6 7 8 10 11 12"


@pytest.mark.parametrize("plan", [SKIP, fp16("skip")], ids=["fp32", "fp16"])
def test_the_counts_are_resumed(plan):
    pattern = ["NaN input", None, None, "NaN input", "NaN input", "NaN input", None]
    groups = batches_with(pattern)
    whole, first, second = (trainer_of(OPTIMIZERS["AdamW"], plan) for _ in range(3))
    run(whole, groups)
    run(first, groups[:5])
    saved = roundtrip(first.state_dict())
    assert saved["nonfinite"] == {"num_skipped": 3, "in_a_row": 2, "last_steps": [1, 4, 5]}
    second.load_state_dict(saved)
    for group in groups[5:]:
        second.step(as_batch(group))
    expected, found = whole.state_dict(), second.state_dict()
    assert_same(expected, found)
    assert found["nonfinite"]["last_steps"] == [1, 4, 5, 6]


def test_a_state_of_before_the_guard_loads():
    old = trainer_of(OPTIMIZERS["AdamW"], Plan())
    groups = batches_with([None, "NaN input"])
    run(old, groups[:1])
    state = roundtrip(old.state_dict())
    assert "nonfinite" not in state
    trainer = trainer_of(OPTIMIZERS["AdamW"], SKIP)
    run(trainer, groups)
    trainer.load_state_dict(state)
    assert (trainer.num_steps, trainer.num_skipped) == (1, 0)
    run(trainer, groups[1:])
    assert trainer.num_skipped == 1
    # And the other way round: the counts are left behind.
    old.load_state_dict(roundtrip(trainer.state_dict()))
    assert old.num_skipped == 0


def test_the_count_of_fp16_goes_on_under_the_guard():
    old = trainer_of(OPTIMIZERS["AdamW"], fp16("propagate"))
    run(old, batches_with(["NaN gradient", None]))
    trainer = trainer_of(OPTIMIZERS["AdamW"], fp16("skip"))
    trainer.load_state_dict(roundtrip(old.state_dict()))
    assert trainer.num_skipped == old.num_skipped == 1


def test_a_damaged_count_changes_nothing():
    trainer = trainer_of(OPTIMIZERS["AdamW"], SKIP)
    state = copy.deepcopy(trainer.state_dict())
    del state["nonfinite"]["in_a_row"]
    with pytest.raises(StateMismatchError, match=r"'nonfinite' lacks \['in_a_row'\]"):
        trainer.load_state_dict(state)
    with pytest.raises(StateMismatchError, match="'nonfinite' lacks"):
        trainer.load_state_dict({**state, "nonfinite": [1, 2]})


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "RMSprop"])
def test_the_scheduler_counts_skipped_steps(name):
    scheduler = partial(optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    trainer = trainer_of(OPTIMIZERS[name], SKIP, lr_scheduler=scheduler)
    before = trainer.optimizer.param_groups[0]["lr"]
    run(trainer, batches_with(["NaN input", "NaN input", None]))
    assert trainer.optimizer.param_groups[0]["lr"] == before / 8


def test_the_report_says_how_it_skips():
    def detail(name, steps=1):
        trainer = trainer_of(OPTIMIZERS[name], SKIP)
        run(trainer, batches_with([None] * steps))
        decisions = {d.lever: d for d in trainer.report().decisions}
        assert decisions["nonfinite"].outcome == "applied"
        return decisions["nonfinite"].detail

    assert "inside the fused update" in detail("AdamW fused")
    assert detail("AdamW") == "skipped updates of AdamW are undone on the device"
    assert detail("SGD", steps=0) == "skipped updates of SGD are undone on the device"
    assert detail("AdamW", steps=0) == (
        "until AdamW has state, each update reads one flag on the host"
    )


def test_a_plain_plan_does_not_look():
    trainer = trainer_of(OPTIMIZERS["AdamW"], Plan())
    assert "nonfinite" not in {d.lever for d in trainer.report().decisions}
    assert trainer.report().to_dict()["counters"] == {"steps": 0}


def test_nothing_of_the_guard_stays_on_the_optimizer():
    trainer = trainer_of(OPTIMIZERS["AdamW fused"], SKIP)
    run(trainer, batches_with(["NaN input", None]))
    assert not {"found_inf", "grad_scale"} & trainer.optimizer.__dict__.keys()


def test_stop_after_alone_means_skip():
    options = NonfiniteOptions(stop_after=3)
    trainer = trainer_of(OPTIMIZERS["AdamW"], Plan(nonfinite=options))
    before = state_of(trainer)
    run(trainer, batches_with(["NaN input"]))
    assert_same(before, state_of(trainer))
