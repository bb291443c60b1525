"""A fit that was cut short goes on from its checkpoint and ends as if it had never been."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset

from fitting import fit, make_trainer
from resuming import BATCHES, EPOCHS, KINDS, check_same, pairs, run, shuffled, state, trainer_of
from torchfast._core.compare import differences
from torchfast._core.rng import get_rng_state, same_rng_state

CPU = torch.device("cpu")
NUM_STEPS = {"accumulated": EPOCHS * -(-len(shuffled()) // 2)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_resumed_run_is_the_uninterrupted_one_at_every_step(kind, tmp_path):
    last = NUM_STEPS.get(kind, EPOCHS * len(shuffled()))
    expected, losses, whole = run(kind)
    rng = get_rng_state(CPU)
    assert whole.num_steps == last
    for stop_at in range(1, last + 1):
        folder = tmp_path / str(stop_at)
        _, early, cut = run(kind, stop_at=stop_at, checkpoint=folder)
        assert cut.stopped_by == "SIGTERM"
        assert cut.exit_code == 143
        trainer, late, result = run(kind, checkpoint=folder)
        assert result.exit_code == 0
        assert (result.num_steps, result.num_epochs) == (whole.num_steps, EPOCHS)
        assert sorted({*early, *late}) == list(range(1, last + 1))
        assert not set(early) & set(late)
        check_same(expected, trainer, losses, early | late)
        assert same_rng_state(get_rng_state(CPU), rng)


class Stateful:
    """A loader that carries its state, as torchdata's StatefulDataLoader."""

    def __init__(self):
        self.at = 0

    def __len__(self):
        return len(BATCHES)

    def __iter__(self):
        while self.at < len(BATCHES):
            self.at += 1
            yield BATCHES[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Longer(IterableDataset):
    """Has more samples than it says, as one that workers share may."""

    def __len__(self):
        return 12

    def __iter__(self):
        return iter([(x, y) for batch in BATCHES[:4] for x, y in zip(*batch, strict=True)])


LOADERS = {
    "own generator": lambda: shuffled(generator=torch.Generator().manual_seed(4)),
    "carries state": Stateful,
    "longer than it says": lambda: DataLoader(Longer(), 4, collate_fn=pairs),
    "unknown length": lambda: Unsized(),
}


class Unsized:
    def __iter__(self):
        return iter(BATCHES)


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@pytest.mark.parametrize("name", LOADERS)
def test_the_end_of_an_epoch_is_what_the_loader_says(name, tmp_path):
    expected, losses, whole = run(loader=LOADERS[name])
    for stop_at in range(1, whole.num_steps + 1):
        folder = tmp_path / str(stop_at)
        _, early, _ = run(loader=LOADERS[name], stop_at=stop_at, checkpoint=folder)
        trainer, late, _ = run(loader=LOADERS[name], checkpoint=folder)
        check_same(expected, trainer, losses, early | late)
    if name == "unknown length":
        return  # whether the last step of a call ends an epoch is not known there
    for first in range(1, whole.num_steps):
        folder = tmp_path / f"in two, {first}"
        options = {"loader": LOADERS[name], "checkpoint": folder, "epochs": None}
        run(steps=first, **options)
        trainer, _, _ = run(steps=whole.num_steps, **options)
        assert differences(state(expected), state(trainer)) == []


@pytest.mark.parametrize("every", [None, 4])
@pytest.mark.parametrize("end", ["signal", "callback", "steps"])
def test_evaluations_that_schedule_are_made_once_each(every, end, tmp_path):
    def go(stop_at=None, **options):
        trainer = make_trainer(
            lr_scheduler=partial(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5)
        )
        values = []

        def evaluate(model):
            values.append(float(sum(p.detach().sum() for p in model.parameters())))
            return {"loss": values[-1]}

        def stop(event):
            if event.kind == "step" and event.num_steps == stop_at:
                event.stop() if end == "callback" else os.kill(os.getpid(), signal.SIGTERM)

        given = {"epochs": 3, "callbacks": [stop], **options}
        fit(shuffled(), trainer=trainer, evaluate=evaluate, evaluate_every=every, **given)
        return trainer

    expected = go()
    for stop_at in (1, 4, 9, 12, 20):
        run = {"checkpoint": tmp_path / str(stop_at), "checkpoint_every": 3}
        if end == "steps":
            go(epochs=None, steps=stop_at, **run)
        else:
            go(stop_at, **run)
        trainer = go(**run)
        assert differences(state(expected), state(trainer)) == [], stop_at
        again = go(**run)  # nothing is left to do, and nothing is scheduled again
        assert differences(state(expected), state(again)) == []


def test_cut_twice_in_one_epoch_and_again_later(tmp_path):
    expected, losses, _ = run()
    seen = {}
    for stop_at in (2, 4, 5, len(shuffled()), len(shuffled()) + 3, None):
        trainer, own, result = run(stop_at=stop_at, checkpoint=tmp_path)
        seen |= own
    assert result.stopped_by == "epochs"
    check_same(expected, trainer, losses, seen)
    assert len(seen) == len(losses)


def test_with_worker_processes(tmp_path):
    loader = partial(shuffled, num_workers=2)
    expected, losses, _ = run(loader=loader)
    _, early, _ = run(loader=loader, stop_at=4, checkpoint=tmp_path)
    trainer, late, _ = run(loader=loader, checkpoint=tmp_path)
    check_same(expected, trainer, losses, early | late)


@pytest.mark.usefixtures("every_way")
def test_with_batches_in_flight(tmp_path):
    def prefetched(trainer):
        return trainer.prefetch(shuffled(), depth=3, reuse=True)

    def go(stop_at, **options):
        trainer = trainer_of("accumulated")

        def stop(event):
            if event.kind == "step" and event.num_steps == stop_at:
                os.kill(os.getpid(), signal.SIGUSR1)

        result = fit(prefetched(trainer), trainer=trainer, epochs=3, callbacks=[stop], **options)
        return trainer, result

    expected, _ = go(None)
    for stop_at in (1, 5, 6, 8):
        _, cut = go(stop_at, checkpoint=tmp_path / str(stop_at))
        assert cut.stopped_by == "SIGUSR1"
        assert cut.exit_code == 128 + signal.SIGUSR1
        trainer, _ = go(None, checkpoint=tmp_path / str(stop_at))
        assert differences(state(expected), state(trainer)) == []


def test_a_run_that_ended_has_nothing_left_to_do(tmp_path):
    first, _, _ = run(checkpoint=tmp_path)
    again, losses, result = run(checkpoint=tmp_path)
    assert losses == {}
    assert result.stopped_by == "epochs"
    assert differences(state(first), state(again)) == []
    # More epochs go on from there.
    _, losses, result = run(checkpoint=tmp_path, epochs=EPOCHS + 1)
    assert len(losses) == len(shuffled())
    assert result.num_epochs == EPOCHS + 1


def test_steps_count_from_where_the_run_began(tmp_path):
    expected, _, _ = run(epochs=None, steps=10)
    run(epochs=None, steps=10, stop_at=4, checkpoint=tmp_path)
    trainer, losses, result = run(epochs=None, steps=10, checkpoint=tmp_path)
    assert list(losses) == [5, 6, 7, 8, 9, 10]
    assert (result.num_steps, result.stopped_by) == (10, "steps")
    assert differences(state(expected), state(trainer)) == []
