"""`CheckpointManager`: what is saved comes back, at the right time, as long as it is to be kept."""

from __future__ import annotations

import math
import os
import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from checkpointing import assert_same, trainer
from faults import states
from models import DropoutNet, make_batches
from torchfast import (
    Checkpoint,
    CheckpointManager,
    CheckpointWriteError,
    ClosedError,
    import_state_dict,
)

DEADLINE_S = 30


def save_all(folder, steps, metrics=None, **options):
    with CheckpointManager(folder, **options) as checkpoints:
        for step in steps:
            values = None if metrics is None else {"loss": metrics[step]}
            checkpoints.save({"step": step}, step, metrics=values)
    return checkpoints.steps()


# -- Saving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocking", [True, False])
def test_what_is_not_worth_keeping_is_not_saved_and_is_told_of_once(tmp_path, caplog, blocking):
    keep, drop = torch.tensor(True), torch.tensor(False)
    with CheckpointManager(tmp_path, keep_last=1) as checkpoints:
        for step, flag in enumerate([keep, drop, drop, None, keep, drop], start=1):
            checkpoints.save(states.make(step), step, blocking=blocking, only_if=flag)
            checkpoints.wait()
            if flag is drop:
                assert step not in checkpoints.steps()
        assert checkpoints.steps() == [5]
        assert_same(checkpoints.load().state, states.make(5))
    assert caplog.text.count("not worth keeping") == 1


@pytest.mark.parametrize("bad", [True, torch.tensor(1.0), torch.tensor([True])])
def test_what_decides_about_a_save_is_one_flag(tmp_path, bad):
    with (
        CheckpointManager(tmp_path) as checkpoints,
        pytest.raises(TypeError, match=r"only_if must be a bool tensor of shape \(\), got"),
    ):
        checkpoints.save({"step": 1}, 1, only_if=bad)
    assert checkpoints.steps() == []


def test_the_flag_is_no_part_of_the_state(tmp_path):
    state = {"": torch.ones(2), "?": torch.zeros(1), "??": torch.ones(1)}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(state, 1, only_if=torch.tensor(True))
        assert_same(checkpoints.load().state, state)


def test_a_save_returns_before_it_is_written_and_the_next_waits(tmp_path, monkeypatch):
    go_on, original = threading.Event(), os.write

    def write(descriptor, data):
        assert go_on.wait(DEADLINE_S)
        return original(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(states.make(1), 1)
        assert checkpoints.steps() == []
        second = threading.Thread(target=checkpoints.save, args=(states.make(2), 2))
        second.start()
        second.join(0.2)
        assert second.is_alive()
        go_on.set()
        second.join(DEADLINE_S)
        assert 1 in checkpoints.steps()
    assert CheckpointManager(tmp_path).steps() == [1, 2]


@pytest.mark.parametrize("ask", ["save", "wait", "close", "load", "verify"])
def test_an_error_in_the_background_surfaces(ask, tmp_path, monkeypatch):
    checkpoints = CheckpointManager(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        checkpoints.save(states.make(1), 1)
        call = getattr(checkpoints, ask)
        call = partial(call, states.make(2), 2) if ask == "save" else call
        with pytest.raises(CheckpointWriteError, match="step-1 could not be written"):
            call()
    if ask != "close":
        checkpoints.save(states.make(3), 3)
    checkpoints.close()
    assert checkpoints.steps() == ([] if ask == "close" else [3])


def test_the_error_of_the_body_is_not_hidden(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(os, "fsync", fail)

    def run():
        with CheckpointManager(tmp_path) as checkpoints:
            checkpoints.save(states.make(1), 1)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run()
    assert "a checkpoint failed too" in caplog.text


def test_staging_memory_is_used_again(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        addresses = set()
        for step in (1, 2, 3):
            checkpoints.save(states.make(step), step)
            [block] = checkpoints._stager._blocks.values()
            addresses.add(block.memory.data_ptr())
        assert len(addresses) == 1
        checkpoints.save({"larger": torch.ones(100_000)}, 4)
        assert torch.equal(checkpoints.load(4).state["larger"], torch.ones(100_000))
    assert checkpoints._stager._blocks == {}


def test_the_modes_of_the_caller_do_not_matter(tmp_path):
    state = {
        "a": torch.ones(3),
        "b": torch.arange(6.0).view(2, 3).t(),
        "c": torch.ones(1).expand(4),
    }
    with CheckpointManager(tmp_path) as checkpoints:
        with torch.inference_mode():
            checkpoints.save({**state, "own": torch.ones(2)}, 1)
            first = checkpoints.load().state
        [block] = checkpoints._stager._blocks.values()
        assert not block.memory.is_inference()  # or it could not be used again
        checkpoints.save(state, 2)
        first["a"].requires_grad_().mul(2).sum().backward()
        with torch.device("meta"):
            checkpoints.save(state, 3)
            assert_same(checkpoints.load().state, state)


def test_shared_memory_is_written_once(tmp_path):
    weight = torch.randn(50_000)
    state = {"a": weight, "b": weight, "c": weight[:40_000], "d": weight[20_000:]}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(state, 1)
        assert_same(checkpoints.load().state, state)
    written = sum(path.stat().st_size for path in (tmp_path / "step-1").glob("*.bin"))
    assert written < 1.1 * weight.nbytes


def test_loading_takes_no_second_copy(tmp_path):
    """Loaded tensors are read into place: nothing else of their size is allocated."""
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save({"w": [torch.ones(300_000) for _ in range(5)]}, 1)
        checkpoints.wait()
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            checkpoints.load()
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    assert allocated < 1.2 * 5 * 1_200_000


def test_a_step_is_replaced(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        for value in (1, 2):
            checkpoints.save({"value": value}, 7)
        assert checkpoints.load().state == {"value": 2}
        assert checkpoints.steps() == [7]


def test_an_older_step_than_the_newest_is_told_of(tmp_path, caplog):
    save_all(tmp_path, [5, 10])
    assert caplog.text == ""
    save_all(tmp_path, [7], keep_last=1)
    assert "step 7 was saved, but" in caplog.text
    assert CheckpointManager(tmp_path).steps() == [7, 10]


# -- Loading ---------------------------------------------------------------------------------------


def test_nothing_there(tmp_path):
    with CheckpointManager(tmp_path / "new" / "run") as checkpoints:
        assert checkpoints.load() is None
        assert checkpoints.steps() == []
        assert checkpoints.directory == tmp_path / "new" / "run"


def test_what_load_returns(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save({"a": 1}, 3, metrics={"loss": 0.1, "worst": math.inf, "np": np.float32(2)})
        checkpoints.save({"a": 2}, 12)
        assert checkpoints.load() == checkpoints.load(12)
        assert checkpoints.load(3) == Checkpoint(
            step=3,
            state={"a": 1},
            metrics={"loss": 0.1, "worst": math.inf, "np": 2.0},
            path=tmp_path / "step-3",
        )
        assert repr(checkpoints).endswith("steps=[3, 12])")


def test_order_is_that_of_numbers(tmp_path):
    assert save_all(tmp_path, [9, 10, 100]) == [9, 10, 100]
    assert CheckpointManager(tmp_path).load().step == 100


def test_latest_names_the_last_one(tmp_path):
    save_all(tmp_path, [1, 2])
    assert (tmp_path / "latest").read_text() == "step-2\n"


# -- Retention -------------------------------------------------------------------------------------


def test_everything_is_kept_unless_told(tmp_path):
    assert save_all(tmp_path, range(5)) == [0, 1, 2, 3, 4]


def test_the_last_ones(tmp_path):
    assert save_all(tmp_path, range(5), keep_last=2) == [3, 4]
    # The next run counts those of the run before.
    assert save_all(tmp_path, [5], keep_last=2) == [4, 5]


def test_every_nth(tmp_path):
    assert save_all(tmp_path, range(1, 10), keep_last=1, keep_every=4) == [4, 8, 9]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"mode": "min"}, [2, 6]),
        ({"mode": "max"}, [3, 6]),
        ({"mode": "min", "keep_best": 3}, [2, 4, 5, 6]),
        ({"monitor": "other"}, [6]),
    ],
)
def test_the_best(options, kept, tmp_path):
    losses = {1: math.nan, 2: -math.inf, 3: 9.0, 4: 1.0, 5: 1.0, 6: 2.0}
    found = save_all(tmp_path, losses, losses, **{"keep_last": 1, "monitor": "loss", **options})
    assert found == kept


def test_one_that_cannot_be_deleted_is_told_of(tmp_path, monkeypatch, caplog):
    with CheckpointManager(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(states.make(1), 1, blocking=True)
        monkeypatch.setattr(os, "rmdir", fail)
        checkpoints.save(states.make(2), 2, blocking=True)
    assert "step-1 could not be deleted" in caplog.text
    monkeypatch.undo()
    assert CheckpointManager(tmp_path).steps() == [2]
    assert not list(tmp_path.glob("*.tmp-*"))


# -- Files of weights ------------------------------------------------------------------------------


def test_export_and_import_have_the_keys_of_the_model(tmp_path):
    run, path = trainer(), tmp_path / "model.pt"
    run.step(make_batches(1)[0])
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(run.state_dict(), 1)
        checkpoints.export(path)
    for weights in (import_state_dict(path), torch.load(path, weights_only=True)):
        assert_same(dict(weights), dict(run.model.state_dict()))
        DropoutNet().load_state_dict(weights)
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "run"]


@pytest.mark.parametrize("old_format", [True, False])
def test_files_of_torch_are_imported(old_format, tmp_path):
    model = nn.Linear(2, 2)
    new = not old_format
    torch.save(model.state_dict(), tmp_path / "m.pt", _use_new_zipfile_serialization=new)
    assert_same(dict(import_state_dict(tmp_path / "m.pt")), dict(model.state_dict()))


# -- Bad input -------------------------------------------------------------------------------------


def manager(folder, **options):
    with CheckpointManager(folder, **options) as checkpoints:
        checkpoints.save({"model": {}, "step": 1}, 1, blocking=True)
        return checkpoints


def a_file(folder):
    (folder / "file").touch()
    return CheckpointManager(folder / "file")


def call(folder, name, *arguments, **options):
    save_all(folder, range(12))
    with CheckpointManager(folder) as checkpoints:
        return getattr(checkpoints, name)(*arguments, **options)


ROWS = [
    ("9", lambda f: CheckpointManager(None), TypeError, r"directory must be a path, got None"),
    ("9", lambda f: CheckpointManager(3), TypeError, r"directory must be a path, got 3 \(int\)"),
    ("10", lambda f: call(f, "save", [1], 1), TypeError, r"state must be a mapping.*got list"),
    ("10 leaf", lambda f: call(f, "save", {"a": [len]}, 1), TypeError,
     r"state\['a'\]\[0\] is a builtin_function_or_method"),
    ("10 module", lambda f: call(f, "save", {"m": nn.Linear(1, 1)}, 1), TypeError,
     r"state\['m'\] is a torch.nn.modules.linear.Linear; give its state_dict\(\)"),
    ("10 import", lambda f: torch.save([1], f / "x") or import_state_dict(f / "x"), TypeError,
     r"holds a list, expected a state dict"),
    ("10 export", lambda f: manager(f).export(f / "x", part="step"), TypeError,
     r"only a mapping of tensors can be exported, got int"),
    ("14", lambda f: CheckpointManager(f, keep_lst=1), TypeError, r"did you mean 'keep_last'"),
    ("19", lambda f: call(f, "save", {}, -1), ValueError, r"step must be >= 0, got -1"),
    ("19", lambda f: call(f, "save", {}, 1.0), TypeError, r"step must be an int >= 0, got 1.0"),
    ("23", lambda f: CheckpointManager(f, keep_last=0), ValueError, r"keep_last must be >= 1"),
    ("23", lambda f: CheckpointManager(f, keep_last=True), TypeError, r"keep_last must be an int"),
    ("24", lambda f: CheckpointManager(f, keep_every=0), ValueError, r"keep_every must be >= 1"),
    ("24", lambda f: CheckpointManager(f, keep_every=5), ValueError,
     r"keep_every=5 keeps some .* give keep_last too"),
    ("24", lambda f: CheckpointManager(f, keep_every=2), ValueError, r"keep_every=2 keeps"),
    ("24", lambda f: CheckpointManager(f, keep_last=1, monitor=3), TypeError, r"got 3 \(int\)"),
    ("25", lambda f: CheckpointManager(f, mode="maximum"), ValueError, r"did you mean 'max'"),
    ("28", lambda f: call(f, "save", {}, 1, metrics=[1]), TypeError, r"metrics must be a mapping"),
    ("28", lambda f: call(f, "save", {}, 1, metrics={"a": torch.ones(())}), TypeError,
     r"metrics\['a'\] must be a host number.*got Tensor; use .item\(\)"),
    ("33", a_file, ValueError, r"directory='.*file' is a file, expected a folder"),
    ("33", lambda f: import_state_dict(f), ValueError, r"is a folder, expected one file"),
    ("33", lambda f: manager(f).export(f), ValueError, r"is a folder, expected the path of a file"),
    ("34", lambda f: call(f, "load", 99), ValueError,
     r"step=99 is not in .*, which has 2 more and the steps \[2, .*, 11\]; take one"),
    ("34", lambda f: CheckpointManager(f).verify(), ValueError,
     r"step='latest' is not in .*, which has no checkpoint"),
    ("34", lambda f: call(f, "load", "newest"), TypeError, r"step must be an int >= 0, got 'new"),
    ("34 part", lambda f: call(f, "export", f / "x"), ValueError,
     r"has no part 'model'; it has \['step'\]"),
    ("41", lambda f: manager(f).save({}, 2), ClosedError, r"this CheckpointManager was closed"),
    ("41", lambda f: manager(f).load(), ClosedError, r"this CheckpointManager was closed"),
]  # fmt: skip


@pytest.mark.parametrize(("number", "do", "error", "message"), ROWS, ids=[r[0] for r in ROWS])
def test_bad_input(number, do, error, message, tmp_path):
    with pytest.raises(error, match=message):
        do(tmp_path)


def test_a_bad_state_writes_nothing_and_leaves_no_error_behind(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(TypeError):
            checkpoints.save({"good": torch.ones(3), "bad": object()}, 1)
        assert os.listdir(tmp_path) == []


def test_44_a_save_during_a_capture(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    checkpoints = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointWriteError, match="while a CUDA graph is being captured"):
        checkpoints.save({}, 1)


def test_closing_twice_does_nothing(tmp_path):
    checkpoints = manager(tmp_path)
    checkpoints.close()
    checkpoints.close()


# -- Helpers ---------------------------------------------------------------------------------------


def fail(*args, **kwargs):
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize(("mode", "best"), [("min", 4), ("max", 1)])
def test_the_best_is_loaded_by_name(tmp_path, mode, best):
    losses = [3.0, 1.0, 2.0, 1.0, float("nan"), 2.0]
    with CheckpointManager(tmp_path, keep_last=9, monitor="loss", mode=mode) as manager:
        for step, loss in enumerate(losses, start=1):
            manager.save({"model": {"w": torch.tensor(loss)}}, step, metrics={"loss": loss})
        assert manager.best_step() == best  # of equal ones the later
        assert manager.load("best").step == best
        manager.verify("best")
        manager.export(tmp_path / "best.pt", "best")
    exported = torch.load(tmp_path / "best.pt", weights_only=True)
    assert exported["w"] == losses[best - 1]


def test_a_best_that_nobody_knows_is_refused(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save({"model": {}}, 1, metrics={"loss": 1.0})
        with pytest.raises(ValueError, match=r"is not known without monitor=\.\.\."):
            manager.load("best")
    with (
        CheckpointManager(tmp_path, keep_last=1, monitor="accuracy") as manager,
        pytest.raises(ValueError, match="has the metric 'accuracy' that is monitored"),
    ):
        manager.best_step()
