"""The loop of fit: where a run ends, its callbacks, its errors, and the loop that it stands for."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, IterableDataset

from fitting import (
    BATCHES,
    SGD,
    EmptyFrom,
    Watched,
    evaluations,
    fit,
    handlers,
    list_loss,
    make_trainer,
    training,
)
from models import DropoutNet, loss_and_metrics, make_batches, weighted_loss
from torchfast import EmptyEpochError
from torchfast._core.compare import differences
from torchfast._core.reading import Reading
from torchfast._core.rng import get_rng_state, seed_everything
from torchfast.reporting import read_jsonl
from torchfast.testing import plain_step

# --- steps and epochs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "steps", "epochs", "stopped_by"),
    [
        ({"steps": 3}, 3, 0, "steps"),
        ({"steps": 4}, 4, 1, "steps"),
        ({"steps": 6}, 6, 1, "steps"),
        ({"epochs": 2}, 8, 2, "epochs"),
        ({"epochs": 2, "steps": 6}, 6, 1, "steps"),
        ({"epochs": 1, "steps": 100}, 4, 1, "epochs"),
    ],
)
def test_a_run_ends_where_it_is_told_to(asked, steps, epochs, stopped_by):
    trainer = make_trainer()
    result = fit(trainer=trainer, **asked)
    assert (result.num_steps, result.num_epochs, result.stopped_by) == (steps, epochs, stopped_by)
    assert trainer.num_steps == len(training(result)) == steps
    assert result.seconds > 0
    assert result.evaluation == {}


@pytest.mark.parametrize("asked", [{"steps": 0}, {"epochs": 0}])
def test_nothing_to_do_is_done_at_once(asked):
    watched = Watched()
    result = fit(watched, **asked)
    assert (result.num_steps, result.history, watched.fetched) == (0, [], 0)
    assert result.stopped_by == next(iter(asked))


def test_no_batch_is_fetched_that_is_not_trained_on():
    watched = Watched()
    fit(watched, steps=6)
    assert watched.fetched == 6


def test_a_second_fit_goes_on_where_the_first_ended():
    trainer = make_trainer()
    assert fit(trainer=trainer, steps=3).num_steps == 3
    result = fit(trainer=trainer, steps=2)
    assert result.num_steps == 2
    assert [record["step"] for record in result.history] == [4, 5]


def test_the_epoch_is_told_to_everyone_once():
    class Holder:
        def __init__(self):
            self.epochs = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

    watched = Watched()
    watched.sampler, watched.dataset = Holder(), Holder()
    fit(watched, epochs=3)
    assert watched.epochs == watched.sampler.epochs == watched.dataset.epochs == [0, 1, 2]


def test_groups_and_a_short_last_group():
    sizes = []

    def loss_fn(model, batch):
        return loss_and_metrics(model, batch)

    trainer = make_trainer(loss_fn, accumulate=3)
    result = fit(
        make_batches(7),
        trainer=trainer,
        epochs=2,
        callbacks=[lambda event: sizes.append(event.kind)],
    )
    assert result.num_steps == 6
    assert result.num_epochs == 2
    assert sizes.count("step") == 6
    assert [record["epoch"] for record in result.history] == [0, 0, 0, 1, 1, 1]


def test_an_iterator_serves_one_epoch():
    assert fit((b for b in BATCHES), epochs=1).num_epochs == 1
    assert fit((b for b in BATCHES), steps=4).num_steps == 4
    with pytest.raises(EmptyEpochError, match="epoch 1 yielded no batch after 4 steps"):
        fit((b for b in BATCHES), steps=5)


def test_an_empty_epoch_is_an_error():
    with pytest.raises(EmptyEpochError, match="epoch 2 yielded no batch after 8 steps"):
        fit(EmptyFrom(2), epochs=5)


def test_a_model_in_eval_mode_is_warned_of_once_and_left_so():
    trainer = make_trainer(net=lambda: DropoutNet().eval())
    with pytest.warns(UserWarning, match=r"DropoutNet is in eval mode.*model.train\(\)") as caught:
        fit(trainer=trainer, epochs=2, evaluate=BATCHES)
    assert len(caught) == 1
    assert not any(module.training for module in trainer.model.modules())


# --- callbacks ----------------------------------------------------------------------------------


def test_every_kind_of_event_in_order():
    events = []
    trainer = make_trainer(loss_and_metrics)
    result = fit(
        trainer=trainer,
        epochs=1,
        log_every=2,
        evaluate=BATCHES[:1],
        evaluate_every=3,
        callbacks=(events.append,),
    )
    kinds = [(event.kind, event.num_steps) for event in events]
    assert kinds == [
        ("step", 1),
        ("step", 2),
        ("log", 2),
        ("step", 3),
        ("evaluate", 3),
        ("step", 4),
        ("log", 4),
        ("epoch", 4),
        ("evaluate", 4),
        ("end", 4),
    ]
    for event in events:
        assert (event.loss is not None) == (event.kind == "step")
        assert (event.record is not None) == (event.kind in ("log", "evaluate"))
        assert set(event.metrics) == {"accuracy"}
        assert event.epoch == 0 or event.num_steps == 4
    assert [e.record for e in events if e.record is not None] == result.history


@pytest.mark.parametrize(
    ("kind", "num_steps"), [("step", 1), ("log", 2), ("evaluate", 3), ("epoch", 4)]
)
def test_a_callback_can_stop_the_run(kind, num_steps):
    events = []

    def stop(event):
        events.append(event.kind)
        if event.kind == kind:
            event.stop()
            event.stop()

    result = fit(epochs=5, log_every=2, evaluate=BATCHES[:1], evaluate_every=3, callbacks=[stop])
    assert (result.num_steps, result.stopped_by) == (num_steps, "callback")
    assert events[-1] == "end"
    assert evaluations(result)[-1]["step"] == num_steps


def test_callbacks_are_called_in_their_order():
    calls = []
    fit(steps=1, callbacks=[lambda e: calls.append(1), lambda e: calls.append(2)])
    assert calls == [1, 2] * (len(calls) // 2)


def test_an_error_of_a_callback_comes_through():
    def fail(event):
        if event.num_steps == 2:
            raise LookupError("mine")

    before = handlers()
    with pytest.raises(LookupError, match="mine"):
        fit(steps=3, callbacks=[fail])
    assert handlers() == before


# --- a loader that fails ------------------------------------------------------------------------


@pytest.mark.parametrize("is_ready", [True, False])
def test_an_error_of_the_loader_comes_through_and_the_log_is_whole(monkeypatch, tmp_path, is_ready):
    # On a GPU readings arrive late; here that is played.
    monkeypatch.setattr(Reading, "is_ready", is_ready)

    class BrokenError(Exception):
        pass

    def load():
        yield from BATCHES[:3]
        raise BrokenError("disk", 3)

    trainer = make_trainer()
    with pytest.raises(BrokenError) as caught:
        fit(load(), trainer=trainer, steps=10, log_path=tmp_path / "log")
    assert type(caught.value) is BrokenError
    assert caught.value.args == ("disk", 3)
    assert caught.traceback[-1].name == "load"
    assert caught.value.__cause__ is None
    assert trainer.num_steps == 3
    assert [record["step"] for record in read_jsonl(tmp_path / "log")] == [1, 2, 3]


def test_an_error_is_not_hidden_by_one_of_the_records_that_wait(monkeypatch):
    def fail(event):
        if event.kind == "log":
            raise LookupError("a callback's")

    def load():
        yield BATCHES[0]
        raise OSError("the loader's")

    monkeypatch.setattr(Reading, "is_ready", False)
    with pytest.raises(OSError, match="the loader's"):
        fit(load(), steps=2, callbacks=[fail])


def test_records_that_arrive_late_are_the_same(monkeypatch):
    def run():
        result = fit(epochs=2, log_every=3, evaluate=BATCHES, evaluate_every=4)
        return [(r["step"], r.get("loss"), r.get("evaluation")) for r in result.history]

    at_once = run()
    monkeypatch.setattr(Reading, "is_ready", False)
    assert run() == at_once


class Failing(IterableDataset):
    def __iter__(self):
        yield from BATCHES[:2]
        raise LookupError("sample 2")


def test_an_error_of_a_worker_comes_through():
    trainer = make_trainer(list_loss)
    loader = DataLoader(Failing(), batch_size=None, num_workers=1)
    with pytest.raises(LookupError, match=r"(?s)in DataLoader worker process 0.*sample 2"):
        fit(loader, trainer=trainer, steps=10)
    assert trainer.num_steps == 2


# --- fit is the loop that one writes ------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("loss_fn", [loss_and_metrics, weighted_loss])
def test_fit_is_a_loop_of_steps_is_the_plain_loop(accumulate, loss_fn):
    batches = make_batches(7, ragged=True)
    schedule = partial(schedulers.CosineAnnealingLR, T_max=9)
    options = {"accumulate": accumulate, "max_grad_norm": 0.5, "lr_scheduler": schedule}

    fitted = make_trainer(loss_fn, **options)
    noted = []
    fit(
        batches,
        trainer=fitted,
        epochs=2,
        evaluate=BATCHES,
        evaluate_every=2,
        callbacks=[lambda e: noted.append(e.loss) if e.kind == "step" else None],
    )

    stepped = make_trainer(loss_fn, **options)
    losses = [stepped.step(batch) for _ in range(2) for batch in stepped.prefetch(batches)]

    seed_everything(0)
    model = DropoutNet()
    optimizer = SGD(model.parameters())
    scheduler = schedule(optimizer)
    plain = [
        plain_step(
            model,
            optimizer,
            loss_fn,
            batches[i : i + accumulate],
            max_grad_norm=0.5,
            lr_scheduler=scheduler,
        )
        for _ in range(2)
        for i in range(0, 7, accumulate)
    ]
    assert len(noted) == len(losses) == len(plain)
    for a, b, c in zip(noted, losses, plain, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(b, c)
    by_fit, by_step = fitted.state_dict(), stepped.state_dict()
    assert (by_fit.pop("num_epochs"), by_step.pop("num_epochs")) == (2, 0)  # only fit has epochs
    assert not differences(by_fit, by_step)
    assert not differences(model.state_dict(), fitted.model.state_dict())
    assert not differences(optimizer.state_dict(), fitted.optimizer.state_dict())
    assert not differences(get_rng_state(fitted.device), fitted.state_dict()["rng"])


def test_epochs_go_on_where_the_last_fit_ended():
    """A shuffle that depends on the epoch must not start over with each call, nor on resume."""
    seen = []

    class Shuffling(list):
        def set_epoch(self, epoch):
            seen.append(epoch)

    trainer = make_trainer()
    loader = Shuffling(BATCHES)
    for _ in range(2):
        fit(loader, trainer=trainer, epochs=2)
    resumed = make_trainer()
    resumed.load_state_dict(trainer.state_dict())
    fit(loader, trainer=resumed, epochs=1)
    assert seen == [0, 1, 2, 3, 4]
