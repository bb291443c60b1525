"""fit with several steps in a replay trains, evaluates, saves and resumes as one after another.

Each test runs fit twice, with ``unroll`` and without, on a tape that stands in for CUDA's graphs.
"""

from __future__ import annotations

import itertools
import signal
from functools import partial

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from fit_unrolling import BATCHES, LAMBDAS, SKIP, Loader, Run, assert_same, poisoned, trainer_of
from fitting import evaluations, fit, training
from models import DropoutNet, loss_and_metrics, weighted_loss
from poison import BufferNet
from poison import fp16 as fp16_plan
from torchfast import CheckpointManager
from torchfast._core.compare import differences
from torchfast._core.rng import seed_everything
from torchfast.profiling import step_timer
from torchfast.testing import plain_step
from unrolling import ADAMW, SGD, K, said, two_groups, unrolled

pytestmark = pytest.mark.usefixtures("tape")


def loss_and_all_kinds(model, batch):
    loss, metrics = loss_and_metrics(model, batch)
    right = (model(batch[0]).argmax(1) == batch[1]).sum()
    return loss, {**metrics, "right": right, "half": 0.5, "size": float(len(batch[0]))}


KINDS = {
    "AdamW": {},
    "metrics of all kinds": {"loss_fn": loss_and_all_kinds, "accumulate": 2},
    "SGD": {"optimizer": two_groups(SGD)},
    "accumulate": {"accumulate": 2},
    "weights": {"loss_fn": weighted_loss, "accumulate": 3},
    "average": {"ema": 0.9, "net": BufferNet},
    "skip": {"plan": SKIP, "net": BufferNet},
    "fp16": {"plan": fp16_plan("skip").replace(cuda_graph=True)},
    "no schedule": {"lr_scheduler": None, "max_grad_norm": None},
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_is_told_and_trained_as_one_after_the_other(kind, monkeypatch):
    monkeypatch.setattr(step_timer, "BUDGET", 1.0)  # on a busy machine a moment is dear
    make = KINDS[kind]
    options = {"make": make, "epochs": 4}
    if kind in ("skip", "fp16"):
        options["loader"] = lambda trainer: poisoned()
    one, several = Run(**options), Run(K, **options)
    assert_same(one, several)
    assert unrolled(several.trainer)[0] >= 3
    assert several.result.step_times["replay"].num_samples > 0
    if kind == "skip":
        assert {r["skipped"] for r in training(several.result)} >= {0, 2, 3, 12}


def test_it_is_the_plain_loop():
    several = Run(K)
    seed_everything(0)
    model = DropoutNet()
    optimizer = two_groups(ADAMW)(model.parameters())
    scheduler = LAMBDAS(optimizer)
    seed_everything(1)
    for number, batch in enumerate([*BATCHES, *BATCHES], start=1):
        loss = plain_step(
            model, optimizer, loss_and_metrics, [batch], max_grad_norm=0.5, lr_scheduler=scheduler
        )
        assert torch.equal(loss, several.steps[number][0]), number
    assert not differences(model.state_dict(), several.trainer.model.state_dict())
    assert not differences(optimizer.state_dict(), several.trainer.optimizer.state_dict())
    assert scheduler.get_last_lr() == several.trainer.lr_scheduler.get_last_lr()
    assert unrolled(several.trainer)[1] >= 8 * K


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize("make", [{}, {"accumulate": 2}], ids=["single", "accumulate"])
def test_through_a_ring_of_slots(make):
    one, several = Run(make=make, epochs=3), Run(K, make=make, epochs=3)
    assert_same(one, several)
    assert unrolled(several.trainer)[0] >= 4
    by_loader = Run(
        loader=lambda t: t.prefetch(Loader(BATCHES), unroll=K, reuse=True), make=make, epochs=3
    )
    assert_same(one, by_loader)
    assert unrolled(by_loader.trainer) == unrolled(several.trainer)


# --- what falls between two steps -----------------------------------------------------------------


def seen_by(evaluated):
    def evaluate(model):
        evaluated.append([p.detach().clone() for p in model.parameters()])
        return {"sum": float(sum(p.sum() for p in evaluated[-1]))}

    return evaluate


@pytest.mark.parametrize("every", [5, 6, 9])
def test_evaluations_see_the_model_of_their_step(every):
    seen = [], []
    options = {"epochs": 3, "evaluate_every": every}
    one, several = (
        Run(unroll, evaluate=seen_by(each), **options)
        for unroll, each in zip((None, K), seen, strict=True)
    )
    assert_same(one, several)
    assert not differences(*seen)
    assert [r["step"] for r in evaluations(several.result)] == [*range(every, 69, every), 69]
    assert unrolled(several.trainer)[0] >= 4
    assert "an evaluation, a checkpoint or the end was due" in said(several.trainer)[0][1]


@pytest.mark.parametrize(("every", "replays"), [(3, 12), (2, 20), (1, 0)])
def test_groups_are_as_short_as_what_falls_between_them_needs(every, replays):
    options = {"evaluate": lambda model: {}, "evaluate_every": every}
    one, several = (Run(unroll, **options) for unroll in (None, K))
    assert_same(one, several)
    assert unrolled(several.trainer) == (replays, replays * every)
    if not replays:
        assert "42 one by one (an evaluation, a checkpoint" in said(several.trainer)[0][1]


def test_a_plateau_is_stepped_where_it_was_evaluated():
    plateau = partial(schedulers.ReduceLROnPlateau, patience=0, factor=0.5)
    options = {"make": {"lr_scheduler": plateau}, "evaluate_every": 6}
    one, several = (
        Run(unroll, evaluate=lambda model: {"loss": 1.0}, **options) for unroll in (None, K)
    )
    assert_same(one, several)
    assert len({r["lr"][0] for r in training(several.result)}) > 3
    assert unrolled(several.trainer)[0] >= 4


def saved(folder):
    with CheckpointManager(folder) as manager:
        return {step: manager.load(step).state for step in manager.steps()}


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize("every", [7, None])
def test_checkpoints_hold_what_single_steps_would_have_saved(every, tmp_path):
    runs = []
    for unroll, name in ((None, "one"), (K, "several")):
        with CheckpointManager(tmp_path / name, keep_last=99) as manager:
            runs.append(Run(unroll, checkpoint=manager, checkpoint_every=every))
    assert_same(*runs)
    one, several = (saved(tmp_path / name) for name in ("one", "several"))
    assert list(one) == list(several) == [*range(7, 46, 7), 46] if every else [23, 46]
    assert not differences(one, several)
    assert unrolled(runs[1].trainer)[0] >= 4


@pytest.mark.parametrize("every", [5, 7])
def test_a_run_goes_on_from_the_middle_of_what_would_be_a_group(every, tmp_path):
    """However the runs before and behind the checkpoint take their steps."""
    whole = Run(steps=40, epochs=None)
    for number, (first, second) in enumerate(itertools.product((None, K), repeat=2)):
        folder = tmp_path / str(number)
        options = {"checkpoint": folder, "checkpoint_every": every, "epochs": None}
        early = Run(first, steps=19, **options)
        late = Run(second, steps=40, **options)
        assert list(late.steps) == list(range(20, 41))
        assert not differences(whole.state(), late.state())
        assert not differences(whole.steps, early.steps | late.steps)
        assert whole.told()[-6:] == late.told()[-6:]


def test_a_signal_ends_the_run_behind_its_group_and_it_goes_on_exactly(tmp_path):
    whole = Run()
    ended = set()
    for stop_at in (2, 4, 6, 11, 12, 13, 21, 23, 24, 33, 45, 46):

        def stop(event, stop_at=stop_at):
            if (event.kind, event.num_steps) == ("step", stop_at):
                signal.raise_signal(signal.SIGTERM)

        folder = tmp_path / str(stop_at)
        early = Run(K, checkpoint=folder, callbacks=[stop])
        assert early.result.stopped_by == "SIGTERM"
        assert stop_at <= early.result.num_steps < stop_at + K
        assert early.trainer.num_steps == early.result.num_steps
        ended.add(early.result.num_steps)
        late = Run(K, checkpoint=folder)
        assert list(late.steps) == list(range(early.result.num_steps + 1, 47))
        assert not differences(whole.state(), late.state())
        assert not differences(whole.steps, early.steps | late.steps)
    assert len(ended) < 12  # there were groups


def test_a_callback_that_stops_hears_of_the_rest_of_its_group():
    def stop(event):
        if event.num_steps == 14:
            event.stop()

    several = Run(K, callbacks=[stop])
    # Four single steps, and groups of four.
    assert (several.result.num_steps, several.result.stopped_by) == (16, "callback")
    assert list(several.steps) == list(range(1, 17))


def test_steps_that_are_asked_for_are_done_and_no_more():
    for steps in range(12):
        watched = Run(K, steps=steps, epochs=None)
        assert watched.result.num_steps == watched.trainer.num_steps == steps
    fetched = []

    def load():
        for batch in Loader(BATCHES):
            fetched.append(batch)
            yield batch

    Run(K, loader=lambda _: load(), steps=14, epochs=None)
    assert len(fetched) == 14


def test_what_is_left_in_an_iterator_is_trained_on_by_the_next_call():
    def run(unroll):
        trainer = trainer_of()
        batches = trainer.prefetch(iter(Loader(BATCHES)), unroll=unroll)
        return [
            Run(loader=lambda _: batches, trainer=trainer, epochs=None, steps=steps)
            for steps in (10, 9, 4)
        ]

    for one, several in zip(run(None), run(K), strict=True):
        assert_same(one, several)


def test_an_epoch_shorter_than_a_group_is_a_group():
    short = Run(8, loader=lambda _: Loader(BATCHES[:5]), epochs=6)
    assert_same(Run(loader=lambda _: Loader(BATCHES[:5]), epochs=6), short)
    assert unrolled(short.trainer) == (5, 25)


@pytest.mark.parametrize("place", range(K))
def test_an_error_of_a_step_leaves_the_loader_where_single_steps_would(place):
    """Of any step of a group that runs one by one, for its batches have two shapes."""

    def failing(model, batch):
        assert len(batch[0]) != 3, "the batch that fails"
        return loss_and_metrics(model, batch)

    bad = 12 + place
    ragged = [(x[: 6 - n % 2], y[: 6 - n % 2]) for n, (x, y) in enumerate(BATCHES)]
    ragged[bad] = tuple(t[:3] for t in ragged[bad])
    found = []
    for unroll in (None, K):
        trainer = trainer_of(loss_fn=failing)
        loader = trainer.prefetch(Loader(ragged), unroll=unroll)
        with pytest.raises(AssertionError, match="the batch that fails"):
            fit(loader, trainer=trainer, epochs=1)
        found.append((trainer.num_steps, loader.state_dict()["num_batches"]))
    assert found == [(bad, bad + 1)] * 2


def test_an_error_of_the_loader_leaves_what_was_done_before_its_group():
    def load():
        yield from Loader(BATCHES[:14])
        raise OSError("disk")

    trainer = trainer_of()
    with pytest.raises(OSError, match="disk"):
        fit(load(), trainer=trainer, steps=99, unroll=K)
    assert trainer.num_steps == 12
