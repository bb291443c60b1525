"""A step that did not fit, done again in parts: the same gradient, and never an endless loop.

Memory runs out by hand here; `tests/gpu/test_out_of_memory_on_gpu.py` has a real device.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models import BatchNormNet, counted_loss, loss_and_metrics, mean_loss
from planting import SPLIT, Planted, assert_close, batch_of, make, weights
from tape import taped
from torchfast import (
    CUDAGraphOptions,
    MicroBatches,
    OutOfMemoryError,
    OutOfMemoryOptions,
    Plan,
    PrecisionOptions,
)
from torchfast._core.rng import get_rng_state, same_rng_state, seed_everything
from torchfast.memory import before_step, split_verdicts
from torchfast.memory.split_check import Verdict
from torchfast.memory.splitting import SplitBatch, split, why_whole

# --- in parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("size", "fits"), [(8, 4), (7, 3), (5, 1)])
@pytest.mark.parametrize("loss_fn", [mean_loss, loss_and_metrics, counted_loss])
def test_a_step_in_parts_has_the_gradient_of_the_whole(where, size, fits, loss_fn):
    trainer = make(Planted(fits, where), loss_fn=loss_fn, plan=SPLIT, max_grad_norm=1.0)
    twin = make(Planted(99, where), loss_fn=loss_fn, max_grad_norm=1.0)
    for seed in range(3):
        loss, expected = (t.step(batch_of(size, seed)) for t in (trainer, twin))
        torch.testing.assert_close(loss, expected)
        assert trainer.metrics.keys() == twin.metrics.keys()
        for name, value in twin.metrics.items():
            torch.testing.assert_close(trainer.metrics[name], value)
        assert_close(weights(trainer), weights(twin))


def test_without_the_shares_it_has_not(monkeypatch):
    """The control: halves of 4 and 3 samples that count equally are another mean."""
    even = lambda self: ((part, 1 / len(self.parts)) for part in self.parts)  # noqa: E731
    monkeypatch.setattr(SplitBatch, "__iter__", even)
    monkeypatch.setattr(
        split_verdicts, "check_split", lambda *_, **__: Verdict()
    )  # which would see it
    trainer, twin = make(Planted(4), plan=SPLIT), make(Planted(99))
    for each in (trainer, twin):
        each.step(batch_of(7))
    with pytest.raises(AssertionError):
        assert_close(weights(trainer), weights(twin))


def test_under_accumulation():
    plant = Planted(4)
    trainer, twin = make(plant, plan=SPLIT, accumulate=2), make(Planted(99), accumulate=2)
    group = MicroBatches([batch_of(8), batch_of(3, seed=1)])
    losses = [t.step(group) for t in (trainer, twin)]
    torch.testing.assert_close(*losses)
    assert_close(weights(trainer), weights(twin))
    assert plant.sizes == [8, 4, 4, 3]  # only what is too large is in parts


def test_the_size_that_failed_is_remembered():
    plant = Planted(4)
    trainer = make(plant, plan=SPLIT)
    for size in (4, 16, 16, 7, 4):
        trainer.step(batch_of(size))
    tries = [4, 16, 8, *[4] * 4]  # the first two
    assert plant.sizes == [*tries, *[4] * 4, 7, 4, 3, 4]
    assert trainer.report().counters["out_of_memory"] == 3
    assert trainer.report().counters["split_steps"] == 3
    assert trainer.report().counters["most_parts"] == 4
    [decision] = [d for d in trainer.report().decisions if d.lever == "out_of_memory"]
    assert decision.outcome == "applied"
    assert "elements and more run in parts" in decision.detail


def test_what_never_fits_ends_with_an_account():
    plant = Planted(0)
    trainer = make(plant, plan=SPLIT)
    before = weights(trainer)
    with pytest.raises(OutOfMemoryError, match="a single sample does not fit") as caught:
        trainer.step(batch_of(8))
    assert plant.sizes == [8, 4, 2, 1]
    assert caught.value.account.stage == "forward"
    for name, value in weights(trainer).items():
        assert torch.equal(value, before[name])
    # Nothing of it is remembered that would put later steps into needless parts.
    plant.fits = 99
    plant.sizes = []
    trainer.step(batch_of(2))
    assert plant.sizes == [2]


def test_max_parts():
    plant = Planted(1)
    trainer = make(plant, plan=Plan(out_of_memory=OutOfMemoryOptions(action="split", max_parts=4)))
    with pytest.raises(OutOfMemoryError, match="it would take 8 parts, and max_parts=4"):
        trainer.step(batch_of(8))
    assert plant.sizes == [8, 4, 2]


def test_a_batch_that_cannot_be_split_says_so():
    plant = Planted(2)
    loss_fn = lambda model, batch: mean_loss(model, batch["pair"])  # noqa: E731
    trainer = make(plant, plan=SPLIT, loss_fn=loss_fn)
    with pytest.raises(OutOfMemoryError, match=r"batch\['names'\] is a list of 4, which may be"):
        trainer.step({"pair": batch_of(4), "names": list("abcd")})
    assert plant.sizes == [4]


def test_what_the_failed_try_has_changed_is_put_back():
    """Random numbers, running statistics, buffers that were replaced: all as with halves only."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(BatchNormNet(), nn.Dropout(0.5))
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            self.seen = self.seen + len(x)  # another tensor
            return self.inner(x)

    def halves(model, batch):
        inputs, targets = batch
        pairs = zip(inputs.split(4), targets.split(4), strict=True)
        return sum(F.cross_entropy(model(x), y) for x, y in pairs) / 2

    # The plant in the forward sits behind all of it; in the backward likewise.
    for where in ("forward", "backward"):
        trainer = make(Planted(4, where), net=Net, plan=SPLIT)
        twin = make(Planted(99), net=Net, loss_fn=halves)
        after = []
        for each in (trainer, twin):
            seed_everything(3)
            each.step(batch_of(8))
            after.append(get_rng_state(torch.device("cpu")))
        for (name, buffer), expected in zip(
            trainer.model.named_buffers(), twin.model.buffers(), strict=True
        ):
            assert torch.equal(buffer, expected), name
        assert float(trainer.model.net.seen) == 8
        assert same_rng_state(*after)
        assert_close(weights(trainer), weights(twin))


def test_without_putting_back_they_would_differ(monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr("torchfast.memory.out_of_memory.BeforeStep.put_back", lambda self: None)
    trainer = make(Planted(4), net=BatchNormNet, plan=SPLIT)
    trainer.step(batch_of(8))
    assert int(trainer.model.net.norm.num_batches_tracked) == 3


def test_batch_norm_is_told_of(caplog):
    trainer = make(Planted(4), net=BatchNormNet, plan=SPLIT)
    trainer.step(batch_of(8))
    assert "BatchNorm in it then sees the statistics of a part" in caplog.text
    assert "BatchNorm" in str(trainer.report())
    caplog.clear()
    make(Planted(4), plan=SPLIT).step(batch_of(8))
    assert "done again in 2 parts" in caplog.text
    assert "BatchNorm" not in caplog.text


@pytest.mark.parametrize("is_weighted", [False, True])
def test_metrics_that_are_no_means_are_told_of(is_weighted, caplog):
    def loss_fn(model, batch):
        inputs, labels = batch
        outputs = model(inputs)
        right = (outputs.argmax(1) == labels).float()
        metrics = {"share": right.mean(), "number": float(len(labels)), "rate": 0.5}
        if is_weighted:
            return F.cross_entropy(outputs, labels, reduction="sum"), metrics, len(labels)
        return F.cross_entropy(outputs, labels), metrics

    trainer = make(Planted(4), plan=SPLIT, loss_fn=loss_fn)
    trainer.step(batch_of(8))
    told = "a metric is the mean of those of its parts, which is not that of the whole for number"
    assert caplog.text.rstrip().endswith(told)
    assert told in str(trainer.report())
    with torch.no_grad():
        twin = make(Planted(0), plan="eager", loss_fn=loss_fn)
        metrics = loss_fn(twin.model.net, batch_of(8))[1]
    torch.testing.assert_close(trainer.metrics["share"], metrics["share"])
    assert metrics["number"] == 8
    assert float(trainer.metrics["number"]) == 4  # in two parts


def test_another_error_in_a_part_says_that_it_is_one():
    trainer = make(Planted(1), net=lambda: nn.Sequential(nn.BatchNorm1d(8)), plan=SPLIT)
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        trainer.step(batch_of(4))  # a single sample has no statistics
    assert "runs in 4 parts, since it did not fit" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "precision", ["as_given", "bf16", PrecisionOptions(format="fp16", init_scale=256.0)]
)
def test_with_skipping_of_what_is_not_finite(precision):
    plan = Plan(out_of_memory="split", nonfinite="skip", precision=precision)
    trainer, twin = make(Planted(4), plan=plan), make(Planted(99), plan=plan)
    poisoned = batch_of(8)
    poisoned[0][7] = torch.nan
    for batch in (batch_of(8), poisoned, batch_of(8, seed=2)):
        for each in (trainer, twin):
            each.step(batch)
    assert trainer.num_skipped == twin.num_skipped == 1
    for name, value in weights(trainer).items():
        torch.testing.assert_close(value, weights(twin)[name], rtol=2e-2, atol=2e-3)


def test_within_graphs(monkeypatch):
    """A step in parts is another kind of step, and gets its own warm-up and graph."""
    graphs = CUDAGraphOptions(warm_up_steps=1)
    with taped(monkeypatch) as backends:
        plan = Plan(out_of_memory="split", cuda_graph=graphs)
        trainer, twin = make(Planted(4), plan=plan), make(Planted(99))
        for seed in range(6):
            losses = [t.step(batch_of(8, seed)) for t in (trainer, twin)]
            torch.testing.assert_close(*losses)
        assert_close(weights(trainer), weights(twin))
        counters = trainer.report().counters
        assert backends[0].num_captures == 1
        assert counters["graphs"] == 1
        assert counters["replays"] >= 3
        assert counters["split_steps"] == 6
        trainer.close()


# --- ranks --------------------------------------------------------------------------------------


def test_ranks_come_together_in_the_backward_of_the_last_part_only(monkeypatch):
    trainer = make(Planted(4), plan=SPLIT, accumulate=2)
    seen = []

    class Noted:
        def __init__(self, sharding):
            self.mean = sharding.mean
            self.end_backward = sharding.end_backward
            self.shared = sharding.shared
            self.around_gradients = sharding.around_gradients

        def run(self, call, *, is_last):
            seen.append(is_last)
            return call()

    gradients = trainer._step._gradients
    monkeypatch.setattr(gradients, "sharding", Noted(gradients.sharding))
    group = MicroBatches([batch_of(7), batch_of(8, seed=1)])
    trainer.step(group)
    seen.clear()
    trainer.step(group)
    assert seen == [False, False, False, True]


# --- cutting batches ----------------------------------------------------------------------------


def test_cutting_keeps_structure_and_scalars():
    shared = torch.arange(12).reshape(6, 2)
    batch = {"x": shared, "again": shared, "scale": torch.tensor(2.0), "name": "a", "n": None}
    found = split(batch, 7)
    assert [len(part["x"]) for part in found.parts] == [3, 3]
    assert found.shares == (0.5, 0.5)
    for part in found.parts:
        assert part["x"] is part["again"]
        assert part["scale"] is batch["scale"]
        assert part["name"] == "a"
    assert torch.equal(torch.cat([part["x"] for part in found.parts]), shared)


def test_what_is_small_enough_is_the_same_object():
    batch = batch_of(4)
    assert split(batch, 1000) is batch


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ((torch.zeros(4, 2), torch.zeros(3)), r"batch\[1\] has shape \(3,\)"),
        (torch.tensor(1.0), "no tensor with a first dimension"),
        (torch.zeros(1, 9), "a single sample"),
        ((torch.zeros(4), ["a", "b", "c", "d"]), r"batch\[1\] is a list of 4"),
        (
            (torch.zeros(2, 3), [{"boxes": torch.zeros(2, 4)}, {"boxes": torch.zeros(2, 4)}]),
            r"batch\[1\] is a list of 2, which may be one for each sample",
        ),
        ((torch.zeros(4), torch.zeros(4).to_sparse()), "layout torch.sparse_coo"),
        ((torch.zeros(4), object()), r"batch\[1\] is a object"),
        (nn.utils.rnn.pack_sequence([torch.zeros(3), torch.zeros(2)]), "PackedSequence"),
    ],
)
def test_what_cannot_be_cut(batch, why):
    assert re.search(why, why_whole(batch))


def test_what_can_be_cut():
    assert why_whole({"x": torch.zeros(4, 2), "y": [torch.zeros(4)], "z": 1.0}) is None
    # Inputs and targets of two samples.
    assert why_whole([{"x": torch.zeros(2, 2)}, {"y": torch.zeros(2)}]) is None
    assert why_whole({"pair": (torch.zeros(2, 2), torch.zeros(2))}) is None


def test_what_the_loss_holds_as_data_is_not_copied_in_each_step(monkeypatch):
    monkeypatch.setattr(before_step, "_MOST_BYTES", 3 * 4)
    data, small = torch.zeros(4), torch.zeros(2)
    noted = before_step.BeforeStep(nn.Linear(1, 1), torch.device("cpu"), lambda: [data, small])
    data.add_(1)
    small.add_(1)
    noted.put_back()
    assert data.tolist() == [1.0] * 4
    assert small.tolist() == [0.0] * 2


class Centered(nn.Module):
    """A loss with state of its own, which each call moves: in buffers, a tensor and a generator."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(4))

    def forward(self, logits, targets):
        with torch.no_grad():
            self.center.mul_(0.9).add_(logits.mean(0), alpha=0.1)
        return F.cross_entropy(logits, targets)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_the_loss_keeps_is_put_back_too(where):
    """It has seen the parts, and neither the tries that failed nor what tried parts out."""
    found = []
    for planted, parts in ((Planted(4, where), 1), (Planted(99), 2)):
        criterion, calls = Centered(), torch.zeros(1)
        generator = torch.Generator().manual_seed(0)

        def loss_fn(model, batch, parts=parts, criterion=criterion, own=(calls, generator)):
            inputs, targets = batch
            halves = zip(inputs.chunk(parts), targets.chunk(parts), strict=True)
            losses = []
            for some, classes in halves:
                own[0].add_(torch.rand(1, generator=own[1]))
                losses.append(criterion(model(some), classes))
            return sum(losses) / parts

        trainer = make(planted, loss_fn=loss_fn, plan=SPLIT if parts == 1 else "eager")
        trainer.step(batch_of(8))
        trainer.step(batch_of(8, seed=1))
        found.append((criterion.center, calls, generator.get_state(), weights(trainer)))
    assert_close(found[0][3], found[1][3])
    torch.testing.assert_close(found[0][:2], found[1][:2])
    assert torch.equal(found[0][2], found[1][2])
