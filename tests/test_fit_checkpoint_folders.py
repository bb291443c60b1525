"""When fit saves, what it keeps, what it begins with, and what it says of a disk that is full."""

from __future__ import annotations

import logging
import os
import signal

import pytest
import torch
from torch import optim
from torch.utils.data import DataLoader

from fitting import fit, make_trainer
from models import BatchNormNet
from resuming import BATCHES, DATA, check_same, pairs, run, shuffled
from simulated_device import wait_until
from torchfast import (
    CheckpointCorruptError,
    CheckpointManager,
    CheckpointWriteError,
    StateMismatchError,
)
from torchfast._core.compare import differences

# --- when, and what -----------------------------------------------------------------------------


def steps_in(folder):
    with CheckpointManager(folder) as manager:
        return manager.steps()


def test_a_checkpoint_follows_each_epoch_or_every_so_many_steps(tmp_path):
    everything = CheckpointManager(tmp_path / "epochs")
    run(checkpoint=everything, epochs=3)
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
        run(checkpoint=manager, epochs=3, evaluate=lambda model: {"loss": next(values)})
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
