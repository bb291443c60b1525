"""Losses whose parts do not make the whole: a step that does not fit is not done again in parts."""

from __future__ import annotations

import logging
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from planting import SPLIT, TEXT, Planted, PlantedNet, batch_of, make, weights
from torchfast import MicroBatches, OutOfMemoryError, Plan, Trainer
from torchfast.memory import split_verdicts
from torchfast.memory.split_check import MOST_SAMPLES, Verdict, check_split


def sum_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def token_mean(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], ignore_index=0)


def contrastive(model, batch):
    out = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(out @ out.t(), torch.arange(len(out)))


def of_a_count(model, batch):
    return sum_loss(model, batch) / batch[2]


def wrong_weight(model, batch):
    return sum_loss(model, batch), {}, 7.0


def labelled(size, seed=0):
    x, _ = batch_of(size, seed=seed)
    return x, torch.arange(size) % 4 * (torch.arange(size) % 3 > 0), torch.tensor(float(size))


DIFFERENT = [sum_loss, token_mean, contrastive, of_a_count, wrong_weight]


def classifier(fits, loss_fn, *, dropout=0.0, plan=SPLIT, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.Linear(16, 4))
    model = PlantedNet(net, Planted(fits))
    return Trainer(model, optim.SGD(model.parameters(), lr=0.1), loss_fn, plan, **options)


@pytest.mark.parametrize(("size", "fits"), [(16, 5), (16, 2), (12, 2), (8, 3), (6, 2), (5, 2)])
def test_fewer_samples_are_tried_where_so_many_do_not_fit(size, fits):
    def loss_fn(model, batch):
        if len(batch[0]) > fits:
            raise torch.OutOfMemoryError(TEXT)
        return sum_loss(model, batch)

    trainer = classifier(size, loss_fn)
    before = weights(trainer)
    with pytest.raises(OutOfMemoryError, match="is of no use here: the loss of some samples"):
        trainer.step(labelled(size))
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_ranks_are_left_by_the_error():
    """They run as many forwards as each other, so one that cannot tells them before they go on."""
    left = []

    @contextmanager
    def around():
        try:
            yield
        except BaseException as error:
            left.append(type(error))
            raise

    def loss_of(batch):
        raise torch.OutOfMemoryError(TEXT)

    model, device = nn.Linear(8, 4), torch.device("cpu")
    verdict = check_split(loss_of, labelled(8), model, device, size=4, around=around)
    assert verdict == Verdict(why_unknown="4 samples do not fit", is_kept=False)
    assert left == [torch.OutOfMemoryError]


@pytest.mark.parametrize("loss_fn", DIFFERENT)
def test_a_loss_that_parts_do_not_make_raises_and_nothing_is_changed(loss_fn):
    trainer = classifier(3, loss_fn)
    before = weights(trainer)
    with pytest.raises(OutOfMemoryError, match=r"is of no use here: the (loss|weight)") as caught:
        trainer.step(labelled(7))
    assert "neither a mean over samples nor (sum, metrics, weight)" in str(caught.value)
    for name, value in weights(trainer).items():
        assert torch.equal(value, before[name])
    # A step that fits is taken as it is, and one that does not raises again.
    trainer.step(labelled(3))
    assert trainer.report().counters["split_steps"] == 0
    with pytest.raises(OutOfMemoryError, match="is of no use here"):
        trainer.step(labelled(7))


@pytest.mark.parametrize("loss_fn", [sum_loss, token_mean, contrastive])
def test_without_the_check_they_train_wrong(loss_fn, monkeypatch):
    """The control."""
    monkeypatch.setattr(split_verdicts, "check_split", lambda *_, **__: Verdict())
    trainer, whole = classifier(3, loss_fn), classifier(99, loss_fn)
    losses = [each.step(labelled(7)) for each in (trainer, whole)]
    assert not torch.allclose(*losses, rtol=1e-2)


def weighted(model, batch):
    keep = batch[1] > 0
    loss = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (loss * keep).sum(), {"kept": keep.float().mean()}, keep.sum()


def mean(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("loss_fn", [mean, weighted])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_those_that_they_make_train_in_parts(loss_fn, precision):
    plans = [Plan(out_of_memory=action, precision=precision) for action in ("split", "raise")]
    trainer, whole = (
        classifier(fits, loss_fn, plan=plan, dropout=0.5, accumulate=2)
        for fits, plan in zip((3, 99), plans, strict=True)
    )
    for each in (trainer, whole):
        each.model.net[1].p = 0.0  # in training; what the check is not told by a mask
        each.step(MicroBatches([labelled(7), labelled(3, seed=1)]))
    assert trainer.report().counters["split_steps"] == 1
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-6} if precision == "fp32" else {"rtol": 0.05, "atol": 1e-3}
    )
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(trainer)[name], value, **tolerance)


def test_the_check_leaves_nothing_behind():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
            self.frozen = nn.BatchNorm1d(4).eval()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            self.seen += 1
            return self.frozen(self.layers(x))

    model = Net()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    rng = torch.get_rng_state()
    found = check_split(
        lambda batch: _parts(mean(model, batch)), labelled(20)[:2], model, torch.device("cpu")
    )
    assert found == Verdict()
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(rng, torch.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())


def _parts(loss):
    from torchfast._core.loss import unpack_loss

    return unpack_loss(loss)


def test_it_runs_few_samples():
    sizes = []

    def loss_fn(model, batch):
        if not model.training:
            sizes.append(len(batch[0]))
        return mean(model, batch)

    trainer = classifier(99, loss_fn)
    trainer.model.plant.fits = 40
    trainer.step(labelled(64))
    assert sizes == [MOST_SAMPLES, 1, 2, MOST_SAMPLES - 3]
    trainer.step(labelled(64))
    assert len(sizes) == 4  # once


def noisy(model, batch):
    return mean(model, (batch[0] + torch.randn_like(batch[0]), batch[1]))


def only_in_training(model, batch):
    if not model.training:
        raise KeyError("losses")
    return mean(model, batch)


@pytest.mark.parametrize(
    ("loss_fn", "why"),
    [(noisy, "it draws random numbers"), (only_in_training, "in eval mode it raises KeyError")],
)
def test_where_nobody_can_tell_it_trains_and_says_so(loss_fn, why, caplog):
    trainer = classifier(3, loss_fn)
    with caplog.at_level(logging.WARNING, "torchfast"):
        trainer.step(labelled(7))
    assert any(why in record.getMessage() for record in caplog.records)
    (decision,) = [d for d in trainer.report().decisions if d.lever == "out_of_memory"]
    assert f"could not be tried out: {why}" in decision.detail
    assert trainer.report().counters["split_steps"] == 1


def test_a_mean_of_samples_says_nothing_of_it(caplog):
    trainer = make(Planted(3), plan=SPLIT)
    with caplog.at_level(logging.WARNING, "torchfast"):
        trainer.step(batch_of(7))
    assert not any("tried out" in record.getMessage() for record in caplog.records)


def of_the_active(model, batch):
    """The mean over samples that are still off: of none at first, which tells nothing."""
    each = F.cross_entropy(model(batch[0]), batch[1], reduction="none") - batch[2]
    active = (each > 0).sum().clamp(min=1)
    return each.relu().sum() / active


def aiming(limit):
    x, y, _ = labelled(16)
    return x, y, torch.where(torch.arange(16) < 3, limit, torch.full((), 99.0))


def test_samples_without_a_gradient_tell_nothing(caplog):
    trainer = classifier(9, of_the_active)
    with caplog.at_level(logging.WARNING, "torchfast"):
        trainer.step(aiming(torch.tensor(99.0)))
    assert "some samples give no gradient at all" in caplog.text
    # The next batch is looked at, though its samples are no more unlike.
    with pytest.raises(OutOfMemoryError, match="their parts make"):
        trainer.step(aiming(torch.tensor(0.0)))
