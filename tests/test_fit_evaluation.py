"""Evaluation, alone and in a run: what it computes, when it happens, that it leaves no trace."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, TensorDataset

from fitting import (
    BATCHES,
    Watched,
    evaluations,
    fit,
    frozen_norm,
    list_loss,
    make_trainer,
    training,
)
from models import loss_and_metrics, make_batches, mean_loss, split, weighted_loss
from torchfast import Trainer
from torchfast._core.compare import differences
from torchfast._core.rng import get_rng_state


def test_evaluation_is_the_mean_over_batches():
    trainer = make_trainer(loss_and_metrics)
    values = trainer.evaluate(BATCHES)
    model = trainer.model.eval()
    with torch.no_grad():
        parts = [loss_and_metrics(model, batch) for batch in BATCHES]
    assert values == {
        "loss": pytest.approx(np.mean([float(loss) for loss, _ in parts])),
        "accuracy": pytest.approx(np.mean([float(m["accuracy"]) for _, m in parts])),
    }
    assert all(type(value) is float for value in values.values())


def weighted_accuracy(model, batch):
    loss, _, weight = weighted_loss(model, batch)
    return loss, {"accuracy": loss_and_metrics(model, batch)[1]["accuracy"]}, weight


def test_evaluation_by_weight_is_that_of_all_items_together():
    batches = make_batches(5, ragged=True)
    values = make_trainer(weighted_accuracy).evaluate(batches)
    whole = tuple(torch.cat(parts) for parts in zip(*map(split, batches), strict=True))
    expected = make_trainer(loss_and_metrics).evaluate([whole])
    assert values == pytest.approx(expected)
    assert values != pytest.approx(make_trainer(loss_and_metrics).evaluate(batches))


def test_a_metric_named_loss_does_not_replace_the_loss():
    trainer = make_trainer(lambda m, b: ((loss := mean_loss(m, b)) * 10, {"loss": loss}))
    assert trainer.evaluate(BATCHES)["loss"] == pytest.approx(
        10 * make_trainer().evaluate(BATCHES)["loss"]
    )


def test_a_metric_that_the_first_batch_lacks_is_there():
    found = iter([{}, {"late": 1.0}, {"late": 3.0}])
    trainer = make_trainer(lambda m, b: (mean_loss(m, b), next(found)))
    assert trainer.evaluate(BATCHES[:3])["late"] == 2.0


def test_evaluation_takes_a_prefetched_loader_under_accumulation():
    trainer = make_trainer(accumulate=2)
    expected = trainer.evaluate(BATCHES)
    assert trainer.evaluate(trainer.prefetch(BATCHES)) == pytest.approx(expected)


def test_fit_takes_a_prefetched_loader_under_accumulation():
    trainer = make_trainer(accumulate=2)
    assert fit(trainer.prefetch(BATCHES), trainer=trainer, epochs=1).num_steps == 2


@pytest.mark.parametrize("fails", [False, True])
def test_every_module_gets_its_own_mode_back(fails):
    modes = []

    def loss_fn(model, batch):
        modes.append(any(module.training for module in model.modules()))
        if fails and not model.training:
            raise ZeroDivisionError
        return mean_loss(model, batch)

    trainer = make_trainer(loss_fn, net=frozen_norm)
    before = {name: module.training for name, module in trainer.model.named_modules()}
    buffers = copy.deepcopy(dict(trainer.model.named_buffers()))
    if fails:
        with pytest.raises(ZeroDivisionError):
            trainer.evaluate(BATCHES)
    else:
        trainer.evaluate(BATCHES)
    assert modes == [False] * (1 if fails else 4)
    assert {name: module.training for name, module in trainer.model.named_modules()} == before
    assert before["norm"] is False
    assert before["conv"] is True
    assert not differences(buffers, dict(trainer.model.named_buffers()))


def test_evaluation_has_no_gradients():
    def loss_fn(model, batch):
        grads.append(torch.is_grad_enabled())
        return mean_loss(model, batch)

    grads = []
    trainer = make_trainer(loss_fn)
    trainer.step(BATCHES[0])
    kept = [p.grad.clone() for p in trainer.model.parameters()]
    metrics = trainer.metrics
    trainer.evaluate(BATCHES[:1])
    assert grads == [True, False]
    assert all(
        torch.equal(a, p.grad) for a, p in zip(kept, trainer.model.parameters(), strict=True)
    )
    assert trainer.metrics is metrics
    assert torch.is_grad_enabled()


def drawing_loss(model, batch):
    """Draws from the host's generators in evaluation too."""
    noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
    return list_loss(model, batch) * (1 + 0.1 * noise)


def test_evaluation_leaves_every_generator_alone():
    data = DataLoader(TensorDataset(*BATCHES[0]), batch_size=2, shuffle=True)
    trainer = make_trainer(drawing_loss)
    before = get_rng_state(trainer.device)
    trainer.evaluate(data)
    assert not differences(before, get_rng_state(trainer.device))


def test_a_run_with_evaluation_ends_where_one_without_does():
    def run(**options):
        trainer = make_trainer(drawing_loss)
        train = DataLoader(TensorDataset(*BATCHES[0]), batch_size=2, shuffle=True)
        result = fit(train, trainer=trainer, epochs=3, **options)
        return trainer.state_dict(), [record["loss"] for record in training(result)]

    shuffled = DataLoader(TensorDataset(*BATCHES[1]), batch_size=2, shuffle=True)
    state, losses = run()
    evaluated_state, evaluated_losses = run(evaluate=shuffled, evaluate_every=2)
    assert losses == evaluated_losses
    assert not differences(state, evaluated_state)


@pytest.mark.parametrize(
    ("asked", "at"),
    [
        ({"epochs": 2}, [4, 8]),
        ({"steps": 6}, [4, 6]),
        ({"steps": 7, "evaluate_every": 3}, [3, 6, 7]),
        ({"steps": 6, "evaluate_every": 3}, [3, 6]),
        ({"epochs": 1, "evaluate_every": 100}, [4]),
    ],
)
@pytest.mark.parametrize("by", ["loader", "callable"])
def test_when_evaluation_happens(by, asked, at):
    trainer = make_trainer()
    seen = []

    def evaluate(model):
        assert model is trainer.model
        seen.append(trainer.num_steps)
        return {"loss": float(trainer.num_steps)}

    watched = Watched()
    result = fit(trainer=trainer, evaluate=watched if by == "loader" else evaluate, **asked)
    assert [record["step"] for record in evaluations(result)] == at
    assert result.evaluation == evaluations(result)[-1]["evaluation"]
    if by == "callable":
        assert seen == at
        assert result.evaluation == {"loss": float(at[-1])}
    else:
        assert watched.fetched == 4 * len(at)


def test_the_last_evaluation_is_of_the_last_weights():
    trainer = make_trainer()
    result = fit(trainer=trainer, steps=3, evaluate=BATCHES, evaluate_every=2)
    assert result.evaluation == trainer.evaluate(BATCHES)


def test_a_plateau_scheduler_is_stepped_after_each_evaluation():
    losses = iter([1.0, 1.0, 1.0, 1.0])
    trainer = make_trainer(
        lr_scheduler=lambda o: schedulers.ReduceLROnPlateau(o, patience=0, factor=0.5)
    )
    result = fit(
        trainer=trainer, steps=8, evaluate=lambda model: {"loss": next(losses)}, evaluate_every=2
    )
    assert trainer.lr_scheduler.last_epoch == 4
    rates = [record["lr"] for record in training(result)]
    assert rates == [0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    assert trainer.optimizer.param_groups[0]["lr"] == 0.0125


def test_a_plateau_scheduler_without_evaluation_is_refused_before_a_step():
    trainer = make_trainer(lr_scheduler=lambda o: schedulers.ReduceLROnPlateau(o))
    with pytest.raises(ValueError, match="fit needs evaluate="):
        fit(trainer=trainer, steps=1)
    assert trainer.num_steps == 0


def test_a_callable_that_evaluates_leaves_no_trace():
    def evaluate(model):
        model.eval()
        torch.rand(3), random.random(), np.random.rand()
        return {"loss": 1.0}

    def run(**options):
        trainer = make_trainer(net=frozen_norm)
        fit(trainer=trainer, epochs=2, **options)
        return trainer

    plain, evaluated = run(), run(evaluate=evaluate)
    assert not differences(plain.state_dict(), evaluated.state_dict())
    assert [m.training for m in plain.model.modules()] == [
        m.training for m in evaluated.model.modules()
    ]


def test_the_closing_evaluation_belongs_to_the_last_epoch():
    events = []
    fit(epochs=2, evaluate=BATCHES, evaluate_every=10_000, callbacks=[events.append])
    assert [e.record["epoch"] for e in events if e.kind == "evaluate"] == [1]
    assert [e.epoch for e in events if e.kind == "end"] == [1]


# -- What is not the model's own -------------------------------------------------------------------


class Adapted(nn.Module):
    """A layer with an adapter that ``eval()`` merges into its weight, and ``train()`` takes out."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8) / 3, requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, 8) / 3)
        self.up = nn.Parameter(torch.zeros(4, 2))
        self.is_merged = False

    def train(self, mode=True):
        super().train(mode)
        if self.is_merged == mode:
            with torch.no_grad():
                self.weight.add_(self.up @ self.down, alpha=-1 if mode else 1)
            self.is_merged = not mode
        return self

    def forward(self, x):
        out = F.linear(x, self.weight)
        return out if self.is_merged else out + x @ self.down.T @ self.up.T


def adapted_trainer(**options):
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), nn.Tanh(), nn.Linear(4, 4))
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_loss, **options)


def test_evaluation_takes_merged_adapters_apart_again():
    trainer, plain = adapted_trainer(), adapted_trainer()
    for batch in BATCHES:
        trainer.step(batch)
        plain.step(batch)
        trainer.evaluate(BATCHES)
        plain.model.eval()
        plain.model.train()
    assert not trainer.model[0].is_merged
    assert trainer.model[0].up.abs().max() > 0
    assert not differences(plain.model.state_dict(), trainer.model.state_dict())


def test_averaged_adapters_are_not_merged_with_what_they_were():
    trainer = adapted_trainer(ema=0.5)
    for batch in BATCHES:
        trainer.step(batch)
        apart = adapted_trainer().model
        apart.load_state_dict(trainer.ema_model.state_dict())
        with torch.no_grad():
            expected = np.mean([float(mean_loss(apart, batch)) for batch in BATCHES])
        assert trainer.evaluate(BATCHES, ema=True)["loss"] == pytest.approx(expected)
    assert not trainer.ema_model[0].is_merged
    assert not any(module.training for module in trainer.ema_model.modules())


def test_evaluation_does_not_train_what_the_loss_holds():
    head = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    model = nn.Linear(8, 4)

    def loss_fn(model, batch):
        inputs, targets = split(batch)
        return F.cross_entropy(head(model(inputs)), targets)

    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    trainer = Trainer(model, optimizer, loss_fn)
    trainer.step(BATCHES[0])
    head[2].eval()
    before = copy.deepcopy(head.state_dict())
    first = trainer.evaluate(BATCHES)
    assert first == trainer.evaluate(BATCHES)  # no dropout
    assert not differences(before, head.state_dict())
    assert [module.training for module in head] == [True, True, False]
    head.eval()
    assert first == trainer.evaluate(BATCHES)
    assert not head.training


@pytest.mark.parametrize("is_prefetched", [False, True])
def test_evaluation_puts_the_generator_of_its_loader_back(is_prefetched):
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(*split(BATCHES[0]))
    loader = DataLoader(data, batch_size=2, shuffle=True, generator=generator)
    trainer = make_trainer(list_loss)
    before = generator.get_state()
    trainer.evaluate(trainer.prefetch(loader) if is_prefetched else loader)
    assert torch.equal(before, generator.get_state())


def test_a_run_that_shares_a_generator_with_its_evaluations_resumes_as_it_was(tmp_path):
    def run(steps, **options):
        generator = torch.Generator().manual_seed(5)
        data = TensorDataset(
            *(torch.cat(parts) for parts in zip(*map(split, BATCHES), strict=True))
        )
        loaders = [
            DataLoader(data, batch_size=8, shuffle=True, generator=generator) for _ in range(2)
        ]
        trainer = make_trainer(list_loss)
        trainer.fit(
            loaders[0],
            steps=steps,
            evaluate=loaders[1],
            evaluate_every=2,
            progress=False,
            **options,
        )
        return trainer.model.state_dict()

    whole = run(12)
    run(3, checkpoint=tmp_path)
    assert not differences(whole, run(12, checkpoint=tmp_path))


@pytest.mark.parametrize("is_averaged", [False, True])
def test_evaluation_puts_the_generators_of_modules_and_of_the_loss_back(is_averaged):
    generators = torch.Generator().manual_seed(5), np.random.default_rng(5), random.Random(5)

    class Drawing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.generator = nn.Linear(8, 4), torch.Generator().manual_seed(6)

        def forward(self, x):
            return self.layer(x + torch.randn(x.shape, generator=self.generator))

    def loss_fn(model, batch, generators=generators):
        scale = 1 + torch.rand((), generator=generators[0]) + generators[1].random()
        return mean_loss(model, batch) * (scale + generators[2].random())

    ema = 0.9 if is_averaged else None
    trainer = make_trainer(loss_fn, net=Drawing, ema=ema)
    trainer.step(BATCHES[0])

    def states():
        of_torch = [generators[0], trainer.model.generator]
        of_torch += [trainer.ema_model.generator] if is_averaged else []
        others = generators[1].bit_generator.state, generators[2].getstate()
        return [[g.get_state() for g in of_torch], *others]

    before = states()
    trainer.evaluate(BATCHES, ema=is_averaged)
    assert not differences(before[0], states()[0])
    assert before[1:] == states()[1:]
