"""A fit that was cut short goes on from its checkpoint and ends as if it had never been."""

from __future__ import annotations

import logging
import os
import signal
from functools import partial

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fitting import fit, make_trainer
from models import BatchNormNet, make_batches
from simulated_device import wait_until
from torchfast import (
    CheckpointCorruptError,
    CheckpointManager,
    CheckpointWriteError,
    Plan,
    StateMismatchError,
)
from torchfast._core.compare import differences
from torchfast._core.rng import get_rng_state, same_rng_state

CPU = torch.device("cpu")
BATCHES = make_batches(6)
DATA = TensorDataset(*(torch.cat(parts) for parts in zip(*make_batches(11), strict=True)))


def shuffled(**options):
    return DataLoader(DATA, batch_size=8, shuffle=True, collate_fn=pairs, **options)


def pairs(samples):
    return tuple(torch.stack(parts) for parts in zip(*samples, strict=True))


KINDS = {
    "plain": {},
    "accumulated": {"accumulate": 2},
    "clipped, with a schedule": {
        "max_grad_norm": 0.1,
        "lr_scheduler": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    },
    "AdamW and BatchNorm": {"net": BatchNormNet, "optimizer": partial(optim.AdamW, lr=0.01)},
    "fp16": {"plan": Plan(precision="fp16")},
}


def trainer_of(kind):
    return make_trainer(**KINDS[kind])


def state(trainer):
    return {k: v for k, v in trainer.state_dict().items() if k != "rng"}


def run(kind="plain", loader=shuffled, stop_at=None, **options):
    """Run a fit of three epochs; ``stop_at`` ends it behind that step, as a signal would."""
    trainer = trainer_of(kind)
    losses = {}

    def note(event):
        if event.kind == "step":
            losses[event.num_steps] = event.loss.clone()
            if event.num_steps == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)

    result = fit(loader(), trainer=trainer, **{"epochs": 3, "callbacks": [note], **options})
    return trainer, losses, result


def check_same(first, second, losses, resumed_losses):
    assert differences(state(first), state(second)) == []
    assert all(torch.equal(losses[step], loss) for step, loss in resumed_losses.items())


NUM_STEPS = {"accumulated": 3 * -(-len(shuffled()) // 2)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_resumed_run_is_the_uninterrupted_one_at_every_step(kind, tmp_path):
    last = NUM_STEPS.get(kind, 3 * len(shuffled()))
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
        assert (result.num_steps, result.num_epochs) == (whole.num_steps, 3)
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
    expected, losses, whole = run(loader=LOADERS[name], epochs=2)
    for stop_at in range(1, whole.num_steps + 1):
        folder = tmp_path / str(stop_at)
        _, early, _ = run(loader=LOADERS[name], epochs=2, stop_at=stop_at, checkpoint=folder)
        trainer, late, _ = run(loader=LOADERS[name], epochs=2, checkpoint=folder)
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
    for stop_at in (1, 4, 8, 9, 12, 18, 20):
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
    _, losses, result = run(checkpoint=tmp_path, epochs=4)
    assert len(losses) == len(shuffled())
    assert result.num_epochs == 4


def test_steps_count_from_where_the_run_began(tmp_path):
    expected, _, _ = run(epochs=None, steps=10)
    run(epochs=None, steps=10, stop_at=4, checkpoint=tmp_path)
    trainer, losses, result = run(epochs=None, steps=10, checkpoint=tmp_path)
    assert list(losses) == [5, 6, 7, 8, 9, 10]
    assert (result.num_steps, result.stopped_by) == (10, "steps")
    assert differences(state(expected), state(trainer)) == []


# --- when, and what -----------------------------------------------------------------------------


def steps_in(folder):
    with CheckpointManager(folder) as manager:
        return manager.steps()


def test_a_checkpoint_follows_each_epoch_or_every_so_many_steps(tmp_path):
    everything = CheckpointManager(tmp_path / "epochs")
    run(checkpoint=everything)
    assert everything.steps() == [9, 18, 27]
    everything = CheckpointManager(tmp_path / "steps")
    run(checkpoint=everything, checkpoint_every=5, epochs=None, steps=12)
    assert everything.steps() == [5, 10, 12]


def test_a_folder_keeps_the_last_three(tmp_path):
    run(checkpoint=tmp_path / "run", checkpoint_every=2, epochs=None, steps=9)
    assert steps_in(tmp_path / "run") == [6, 8, 9]


def test_the_best_by_an_evaluation_is_kept(tmp_path):
    values = iter([3.0, 1.0, 2.0])
    with CheckpointManager(tmp_path, keep_last=1, monitor="loss") as manager:
        run(checkpoint=manager, evaluate=lambda model: {"loss": next(values)})
        assert manager.steps() == [18, 27]
        assert manager.load(18).metrics == {"loss": 1.0}


def test_an_evaluation_of_another_step_is_not_taken_for_this_one(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        options = {"evaluate": BATCHES[:1], "evaluate_every": 4, "checkpoint_every": 2}
        run(checkpoint=manager, epochs=None, steps=8, **options)
        assert {s: list(manager.load(s).metrics) for s in manager.steps()} == {
            2: [],
            4: ["loss"],
            6: [],
            8: ["loss"],
        }


def test_the_state_loads_into_a_plain_loop(tmp_path):
    trainer, _, _ = run("AdamW and BatchNorm", checkpoint=tmp_path)
    with CheckpointManager(tmp_path) as manager:
        found = manager.load().state
        manager.export(tmp_path / "model.pt")
    model = BatchNormNet()
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    optimizer = optim.AdamW(model.parameters())
    optimizer.load_state_dict(found["optimizer"])
    for a, b in zip(model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(optimizer.state[a]["exp_avg"], trainer.optimizer.state[b]["exp_avg"])


def test_a_model_that_is_not_finite_is_not_saved(tmp_path, caplog):
    trainer = make_trainer()

    def poison(event):
        if event.kind == "step" and event.num_steps == 5:
            with torch.no_grad():
                next(trainer.model.parameters()).view(-1)[0] = float("nan")

    options = {"checkpoint": tmp_path, "checkpoint_every": 2, "callbacks": [poison]}
    with caplog.at_level(logging.WARNING):
        fit(BATCHES, trainer=trainer, steps=10, **options)
    assert steps_in(tmp_path) == [2, 4]
    assert caplog.text.count("parameters are not finite), so nothing is saved") == 1


def test_a_buffer_may_be_infinite(tmp_path):
    trainer = make_trainer()
    trainer.model.register_buffer("mask", torch.full((2, 2), float("-inf")), persistent=False)
    fit(BATCHES, trainer=trainer, steps=2, checkpoint=tmp_path)
    assert steps_in(tmp_path) == [2]


# --- what to begin with -------------------------------------------------------------------------


def test_from_a_step_asked_for(tmp_path, caplog):
    everything = CheckpointManager(tmp_path)
    expected, losses, _ = run(checkpoint=everything, checkpoint_every=5)
    trainer, late, _ = run(checkpoint=everything, checkpoint_every=5, resume=10)
    assert min(late) == 11
    check_same(expected, trainer, losses, late)
    assert "step 15 was saved, but" in caplog.text
    with pytest.raises(ValueError, match="12"):
        run(checkpoint=everything, resume=12)


def test_from_the_checkpoints_of_another_run(tmp_path):
    expected, losses, _ = run()
    run(checkpoint=tmp_path / "a", stop_at=7)
    trainer, late, _ = run(checkpoint=tmp_path / "b", resume=tmp_path / "a", stop_at=9)
    # The same command again goes on from its own.
    trainer, later, _ = run(checkpoint=tmp_path / "b", resume=tmp_path / "a")
    assert (min(late), min(later)) == (8, 10)
    check_same(expected, trainer, losses, late | later)
    assert steps_in(tmp_path / "a") == [7]


def test_a_damaged_checkpoint_falls_back(tmp_path, caplog):
    expected, losses, _ = run()
    run(checkpoint=tmp_path, checkpoint_every=3, stop_at=8)
    (shard,) = (tmp_path / "step-8").glob("*.bin")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointCorruptError):
        run(checkpoint=tmp_path, resume=8)
    trainer, late, _ = run(checkpoint=tmp_path)
    assert min(late) == 7
    check_same(expected, trainer, losses, late)
    assert "going on from step 6" in caplog.text


def test_nothing_is_resumed_by_mistake(tmp_path):
    run(checkpoint=tmp_path, stop_at=2)
    with pytest.raises(ValueError, match=r"resume=None begins anew, but .* has checkpoints"):
        run(checkpoint=tmp_path, resume=None)
    assert run(checkpoint=tmp_path / "new", resume=None, stop_at=3)[2].num_steps == 3


def test_a_trainer_that_has_trained_is_not_thrown_back(tmp_path):
    trainer, _, _ = run(checkpoint=tmp_path, stop_at=7)
    with pytest.raises(ValueError, match="has done 7 steps already"):
        fit(shuffled(), trainer=trainer, steps=5, checkpoint=tmp_path)
    assert trainer.num_steps == 7
    fit(shuffled(), trainer=trainer, steps=5, checkpoint=tmp_path / "second")
    assert steps_in(tmp_path / "second") == [12]


def test_a_schedule_that_cannot_be_saved_is_refused_at_once(tmp_path):
    class Schedule:
        def step(self):
            pass

    trainer = make_trainer(lr_scheduler=lambda optimizer: Schedule())
    with pytest.raises(TypeError, match="has no state_dict and load_state_dict"):
        fit(BATCHES, trainer=trainer, steps=5, checkpoint=tmp_path)
    assert trainer.num_steps == 0


def test_another_model_or_loader_is_refused_and_nothing_changes(tmp_path):
    run(checkpoint=tmp_path, stop_at=2)
    with pytest.raises(StateMismatchError):
        run("AdamW and BatchNorm", checkpoint=tmp_path)
    trainer = make_trainer()
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(StateMismatchError, match="batch_size"):
        fit(DataLoader(DATA, 4, collate_fn=pairs), trainer=trainer, steps=3, checkpoint=tmp_path)
    assert trainer.num_steps == 0
    assert differences(before, trainer.model.state_dict()) == []
    with pytest.raises(StateMismatchError, match="batch_size 8, and this loader has 4"):
        run(checkpoint=tmp_path, loader=lambda: DataLoader(DATA, 4, collate_fn=pairs))
    with CheckpointManager(tmp_path / "own") as manager:
        manager.save(make_trainer().state_dict(), 3)
        with pytest.raises(StateMismatchError, match=r"lacks \['fit', 'loader'\], so it was"):
            run(checkpoint=manager)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"checkpoint": 3}, TypeError, r"checkpoint must be a path, .* got 3 \(int\)"),
        ({"checkpoint_every": 5}, ValueError, r"checkpoint_every=5 needs checkpoint=, got None"),
        ({"checkpoint": "x", "checkpoint_every": 0}, ValueError, r"checkpoint_every must be >= 1"),
        ({"checkpoint": "x", "checkpoint_every": 2.0}, TypeError, r"checkpoint_every must be an"),
        ({"checkpoint": "x", "resume": True}, TypeError, r"resume must be 'auto', a step, .* True"),
        ({"checkpoint": "x", "resume": 1.5}, TypeError, r"resume must be 'auto', a step, .* 1.5"),
        ({"checkpoint": ""}, ValueError, r"checkpoint is an empty path; name a folder"),
        ({"resume": 4}, ValueError, r"resume=4 needs checkpoint=, got None"),
        ({"checkpoint": "x", "resume": "nowhere"}, ValueError, r"'nowhere' is no folder of check"),
        ({"checkpoint": "x", "resume": "."}, ValueError, r"resume='\.' has no checkpoint; give"),
        ({"checkpoint": "file"}, ValueError, r"file"),
    ],
)
def test_bad_input(given, error, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(error, match=said):
        run(**given)


def test_a_handler_of_the_users_own_for_sigusr1_stays(tmp_path):
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    try:
        trainer = make_trainer()
        kill = lambda e: os.kill(os.getpid(), signal.SIGUSR1)  # noqa: E731
        result = fit(BATCHES, trainer=trainer, steps=2, callbacks=[kill], checkpoint=tmp_path)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert result.stopped_by == "steps"
    assert seen


def full(*_):
    raise OSError(28, "No space left on device")


def test_a_save_that_fails_is_heard_of_at_the_next_step_which_is_saved(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path)
    healthy = os.fsync

    def fill(event):
        if event.kind == "step" and event.num_steps == 4:
            manager.wait()
            monkeypatch.setattr(os, "fsync", full)
        if event.kind == "step" and event.num_steps == 5:
            wait_until(lambda: manager.has_failed)
            monkeypatch.setattr(os, "fsync", healthy)

    trainer = make_trainer()
    options = {"checkpoint": manager, "checkpoint_every": 2, "callbacks": [fill]}
    with pytest.raises(CheckpointWriteError, match="No space left"):
        fit(BATCHES, trainer=trainer, steps=9, **options)
    assert trainer.num_steps == 5
    assert manager.steps() == [2, 5]


def test_a_disk_that_stays_full_keeps_what_is_there(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path)

    def fill(event):
        if event.kind == "step" and event.num_steps == 3:
            manager.wait()
            monkeypatch.setattr(os, "fsync", full)

    options = {"checkpoint": manager, "checkpoint_every": 2, "callbacks": [fill]}
    with pytest.raises(CheckpointWriteError, match="No space left"):
        fit(BATCHES, trainer=make_trainer(), steps=9, **options)
    monkeypatch.undo()
    assert steps_in(tmp_path) == [2]


def test_the_best_is_kept_where_epoch_and_cadence_meet(tmp_path):
    values = iter([3.0, 1.0, 2.0, 4.0])
    with CheckpointManager(tmp_path, keep_last=1, monitor="loss") as manager:
        options = {"evaluate": lambda model: {"loss": next(values)}, "checkpoint_every": 9}
        run(checkpoint=manager, epochs=4, **options)
        assert manager.steps() == [18, 36]


def test_an_error_of_a_save_is_not_lost_behind_another(tmp_path, monkeypatch):
    def fail(event):
        if event.kind == "step" and event.num_steps == 2:
            monkeypatch.setattr(os, "fsync", full)
        if event.kind == "step" and event.num_steps == 3:
            raise KeyError("the user's own")

    manager = CheckpointManager(tmp_path)
    trainer = make_trainer()
    options = {"checkpoint": manager, "checkpoint_every": 2, "callbacks": [fail]}
    with pytest.raises((KeyError, CheckpointWriteError)) as caught:
        fit(BATCHES, trainer=trainer, steps=9, **options)
    if caught.type is KeyError:  # the save was still under way
        with pytest.raises(CheckpointWriteError):
            manager.wait()
