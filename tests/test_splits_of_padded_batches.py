"""What a step in parts would weigh wrongly is found by gradients, in batches that come later, too.

The losses of a fresh model are about the same for each token, so they tell nothing here.
"""

from __future__ import annotations

import logging
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planting import SPLIT, TEXT, Planted, PlantedNet, batch_of, make, weights
from torchfast import Float8Options, MicroBatches, OutOfMemoryError, Plan, Trainer
from torchfast._core.loss import unpack_loss
from torchfast.memory import split_check, split_samples
from torchfast.memory.split_check import check_split
from torchfast.memory.split_samples import counts_in, unevenness, unlike

VOCABULARY = 50
REFUSED = r"is of no use here: the gradient of some samples .* are \d+\.\d% apart"


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        hidden = self.norm(hidden + self.layers(hidden))
        return hidden @ self.embedding.weight.t() / 100  # about log of the vocabulary


def language(lengths, *, ignored=-100, seed=0):
    """Tokens and labels; what is behind the length of a sample is ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (len(lengths), 12), generator=generator)
    is_padding = torch.arange(12) >= torch.tensor(lengths).unsqueeze(1)
    return tokens.masked_fill(is_padding, 0), tokens.roll(-1, 1).masked_fill(is_padding, ignored)


def mean(model, batch, **options):
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten(), **options)


def mean_but_zeros(model, batch):
    return mean(model, batch, ignore_index=0)


def smoothed(model, batch):
    return mean(model, batch, label_smoothing=0.1)


def summed(model, batch):
    num = (batch[1] >= 0).sum()
    return mean(model, batch, reduction="sum"), {"num": num.float()}, num


def trainer_of(net, loss_fn=mean, *, fits=4, plan=SPLIT, **options):
    model = PlantedNet(net, Planted(fits))
    return Trainer(model, optim.SGD(model.parameters(), lr=0.1), loss_fn, plan, **options)


def language_trainer(loss_fn=mean, **options):
    torch.manual_seed(0)
    return trainer_of(TinyLM(), loss_fn, **options)


def assert_refused(trainer, batch, match=REFUSED):
    before = weights(trainer)
    with pytest.raises(OutOfMemoryError, match=match):
        trainer.step(batch)
    for name, value in weights(trainer).items():
        assert torch.equal(value, before[name])


def assert_trained_alike(trainer, twin, batches):
    for batch in batches:
        torch.testing.assert_close(*(each.step(batch) for each in (trainer, twin)))
    for name, value in weights(twin).items():
        torch.testing.assert_close(weights(trainer)[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert trainer.report().counters["split_steps"] == len(batches)


# --- padding -------------------------------------------------------------------------------------

LATE = [12] * 16 + [2] * 4  # what the first samples do not show


@pytest.mark.parametrize("lengths", [[12, 3, 7, 1, 12, 5, 9, 2], LATE, [12] * 15 + [0]])
@pytest.mark.parametrize(("loss_fn", "ignored"), [(mean, -100), (mean_but_zeros, 0)])
def test_a_mean_over_tokens_is_refused_from_fresh_weights(lengths, loss_fn, ignored):
    match = "is of no use here: the (gradient|loss) of some samples"
    assert_refused(language_trainer(loss_fn), language(lengths, ignored=ignored), match)


def test_so_is_a_language_model_of_transformers():
    transformers = pytest.importorskip("transformers")

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12}
            config = transformers.GPT2Config(vocab_size=VOCABULARY, **sizes)
            self.model = transformers.GPT2LMHeadModel(config)

        def forward(self, tokens):
            return self.model(input_ids=tokens).logits

    torch.manual_seed(0)
    assert_refused(trainer_of(Logits()), language(LATE))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_padded_batch_behind_even_ones_is_refused_and_even_ones_go_on(accumulate):
    trainer = language_trainer(accumulate=accumulate)
    of = lambda batch: batch if accumulate == 1 else MicroBatches([language([12] * 8), batch])  # noqa: E731
    for seed in range(2):
        trainer.step(of(language([12] * 8, seed=seed)))
    assert_refused(trainer, of(language([12, 3, 7, 1, 12, 5, 9, 2])))
    trainer.step(of(language([12] * 8, seed=3)))
    assert trainer.report().counters["split_steps"] == 3


def test_one_that_fits_as_a_whole_is_taken_as_a_whole():
    """The size that failed is that of longer samples, say; nothing is lost by a try."""
    trainer, twin = language_trainer(), language_trainer(fits=99)
    padded = language([12, 3, 7, 1, 12, 5, 9, 2])
    trainer.step(language([12] * 8))
    twin.step(language([12] * 8))
    trainer.model.plant.fits = 8
    trainer.model.plant.sizes = []
    torch.testing.assert_close(trainer.step(padded), twin.step(padded))
    assert trainer.model.plant.sizes == [8]
    assert trainer.report().counters["split_steps"] == 1


def test_what_is_more_uneven_than_what_has_passed_is_tried_again():
    trainer = language_trainer()
    trainer.step(language([12] * 8))
    barely = [tokens.repeat(1, 20) for tokens in language([12] * 8)]
    barely[1][0, :1] = -100  # one of 240: less than what could be told from rounding
    trainer.step(tuple(barely))
    barely[1][0, :200] = -100
    assert_refused(trainer, tuple(barely))


MIDDLE = torch.arange(4).unsqueeze(1), torch.arange(8, 30)


def without_labels(kind):
    """Return labels for 8 samples, and what some of them are where nobody knows any."""
    generator = torch.Generator().manual_seed(2)
    classes = torch.randint(0, 4, (8,), generator=generator)
    of_pixels = torch.randint(1, 4, (8, 32), generator=generator)
    numbers = torch.rand(8, 4, generator=generator)
    return {
        "a class": (classes, classes.index_fill(0, torch.arange(3), -100)),
        "a number": (numbers[:, 0], numbers[:, 0].index_fill(0, torch.arange(3), math.nan)),
        "some numbers": (numbers, numbers.index_fill(0, torch.arange(3), math.nan)),
        "numbers below zero": (numbers, torch.where(numbers < 0.3, -1.0, numbers)),
        "classes of pixels": (of_pixels, of_pixels.index_put(MIDDLE, torch.tensor(255))),
    }[kind]


class Known(nn.Module):
    """A loss over labels that are known, whatever they are for."""

    def forward(self, model, batch):
        out, labels = model(batch[0]), batch[1]
        if labels.is_floating_point():
            is_known = ~labels.isnan() & (labels >= 0)
            return (out[:, 0] if labels.dim() == 1 else out).sub(labels)[is_known].square().mean()
        if labels.dim() == 1:
            return F.cross_entropy(out, labels)
        logits = out.unsqueeze(-1) * torch.linspace(0.5, 2, labels.shape[1])
        return F.cross_entropy(logits, labels, ignore_index=255)


@pytest.mark.parametrize(
    "kind", ["a class", "a number", "some numbers", "numbers below zero", "classes of pixels"]
)
def test_samples_without_labels_behind_such_as_have_them_are_refused(kind):
    known, some = without_labels(kind)
    trainer = make(Planted(4), loss_fn=Known(), plan=SPLIT)
    inputs = batch_of(8)[0]
    trainer.step((inputs, known))
    assert_refused(
        trainer, (inputs, some), "is of no use here: the (loss|gradient) of some samples"
    )
    trainer.step((inputs, known))
    assert trainer.report().counters["split_steps"] == 2


@pytest.mark.parametrize("lengths", [[12] * 8, [5] * 9])
@pytest.mark.parametrize("loss_fn", [mean, summed])
def test_samples_that_are_equally_padded_train_in_parts(lengths, loss_fn):
    trainer, twin = language_trainer(loss_fn), language_trainer(loss_fn, fits=99)
    assert_trained_alike(trainer, twin, [language(lengths, seed=seed) for seed in range(3)])


def test_a_sum_with_its_weight_is_padded_as_it_likes():
    trainer, twin = language_trainer(summed), language_trainer(summed, fits=99)
    lengths = ([12] * 8, [12, 3, 7, 1, 12, 5, 9, 2], LATE)
    assert_trained_alike(trainer, twin, [language(of) for of in lengths])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("loss_fn", [mean, smoothed, summed])
def test_rounding_is_not_refused(loss_fn, precision):
    trainer = language_trainer(loss_fn, plan=Plan(out_of_memory="split", precision=precision))
    for seed in range(3):
        trainer.step(language([12] * (8 + seed), seed=seed))
    assert trainer.report().counters["split_steps"] == 3


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 512)
        self.up, self.down = nn.Linear(512, 1024), nn.Linear(1024, 512)
        self.head = nn.Linear(512, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.down(self.up(self.embedding(tokens)).relu()))


def test_nor_is_that_of_float8_whose_scales_depend_on_the_part():
    names = "net.up", "net.down"
    precision = Float8Options(emulate=True, recipe="tensorwise", only=names)
    torch.manual_seed(0)
    plan = Plan(out_of_memory="split", precision=precision)
    trainer = trainer_of(Wide(), plan=plan)
    trainer.step(language([12] * 8))
    assert trainer.report().counters["split_steps"] == 1
    assert_refused(trainer, language([12, 3, 7, 1, 12, 5, 9, 2]), "the (gradient|loss) of some")


# --- other means ---------------------------------------------------------------------------------


def class_weighted(model, batch):
    flat = lambda inputs: 1e-3 * model(inputs)  # noqa: E731  # as of a fresh model
    return mean(flat, batch, weight=torch.tensor([0.1, 1.0, 1.0, 10.0]))


def root_of_mean(model, batch):
    return F.mse_loss(model(batch[0]), batch[2]).sqrt()


@pytest.mark.parametrize("loss_fn", [class_weighted, root_of_mean])
def test_other_means_are_refused(loss_fn):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    targets = torch.randn(16, 4) * torch.arange(16).unsqueeze(1)
    assert_refused(
        trainer_of(net, loss_fn), (*batch_of(16), targets), "the (gradient|loss) of some samples"
    )


# --- time first ----------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, *, batch_first=False):
        super().__init__()
        self.layer = nn.LSTM(8, 16, 2, dropout=0.1, batch_first=batch_first)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.layer(x)[0])


class Attending(nn.Module):
    def __init__(self, *, batch_first=False):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.layer(x))


@pytest.mark.parametrize("kind", [Recurrent, Attending])
def test_a_batch_that_is_time_first_is_refused(kind):
    torch.manual_seed(0)
    batch = torch.randn(10, 8, 8), torch.randint(4, (10, 8))
    assert_refused(trainer_of(kind()), batch, REFUSED)
    trainer = trainer_of(kind(batch_first=True))
    trainer.step(batch)
    assert trainer.report().counters["split_steps"] == 1


# --- nobody can tell -----------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_is_looked_at_again(caplog):
    trainer = language_trainer(lambda model, batch: mean(model, batch) * batch[2])
    even, padded = language([12] * 8), language([12, 3, 7, 1, 12, 5, 9, 2])
    before = trainer.model.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    with caplog.at_level(logging.WARNING, "torchfast"):
        assert math.isnan(trainer.step((*even, torch.tensor(math.nan))))
    assert any("a loss that is not finite" in r.getMessage() for r in caplog.records)
    trainer.model.load_state_dict(before)
    one = torch.tensor(1.0)
    trainer.step((*even, one))
    assert trainer.report().counters["split_steps"] == 2
    assert "not finite" not in str(trainer.report())
    assert_refused(trainer, (*padded, one))


def test_a_gradient_that_is_another_one_each_time_tells_nothing():
    generator = torch.Generator().manual_seed(0)  # of its own, which nobody watches

    def noisy(model, batch):
        noise = torch.randn(VOCABULARY, generator=generator)
        return mean(lambda tokens: model(tokens) * noise, batch)

    trainer = language_trainer(lambda model, batch: noisy(model, batch))
    trainer.step(language([12] * 8))
    assert "its gradient is another one each time" in str(trainer.report())


def test_a_check_that_ran_out_of_memory_is_done_again():
    full = [True]

    def loss_fn(model, batch):
        if full and not model.training:
            raise torch.OutOfMemoryError(TEXT)
        return mean(model, batch)

    trainer = language_trainer(loss_fn)
    trainer.step(language([12] * 8))
    assert "could not be tried out: 2 samples do not fit" in str(trainer.report())
    full.clear()
    trainer.step(language([12] * 8, seed=1))
    assert "tried out" not in str(trainer.report())


# --- no trace ------------------------------------------------------------------------------------


def test_gradients_hooks_and_rates_are_as_before():
    torch.manual_seed(0)
    model = Recurrent(batch_first=True)
    called = []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.register_post_accumulate_grad_hook(called.append)
    batch = torch.randn(6, 3, 8), torch.randint(4, (6, 3))
    rng = torch.get_rng_state()
    found = check_split(
        lambda some: unpack_loss(mean(model, some)), batch, model, torch.device("cpu")
    )
    assert found.why_not is found.why_unknown is None
    assert not called
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert model.layer.dropout == 0.1
    assert all(module.training for module in model.modules())
    assert torch.equal(rng, torch.get_rng_state())


@pytest.mark.parametrize("most", [0, 16 + 16 + 32, 2**25])
def test_some_parameters_tell_as_much_as_all(monkeypatch, most):
    """Of a large model there is no room for two gradients more."""
    asked = []
    gradient_of = torch.autograd.grad

    def noted(loss, parameters, **options):
        asked.append(sum(p.numel() for p in parameters))
        return gradient_of(loss, parameters, **options)

    monkeypatch.setattr(split_check, "_MOST_ELEMENTS", most)
    monkeypatch.setattr(torch.autograd, "grad", noted)
    trainer = language_trainer()
    assert_refused(trainer, language([12, 3, 7, 1, 12, 5, 9, 2]))
    assert max(asked) <= max(most, 16)


# --- which samples -------------------------------------------------------------------------------


def test_samples_are_those_that_differ():
    counts = counts_in(language(LATE), len(LATE))
    assert any(LATE[place] == 2 for place in unlike(counts, 2))
    assert sorted(set(unlike(counts, 8))) == sorted(unlike(counts, 8))
    # Where none differ, from all over the batch.
    assert sorted(unlike(torch.zeros(9, 0), 3)) == [0, 4, 8]


@pytest.mark.parametrize(
    ("even", "uneven"),
    [
        (torch.ones(4, 6, dtype=torch.bool), torch.ones(4, 6, dtype=torch.bool).tril()),
        (torch.ones(4, 6), torch.ones(4, 6).tril()),
        (torch.ones(4, 6, dtype=torch.long), torch.ones(4, 6, dtype=torch.long).tril()),
        (torch.full((4,), 6), torch.tensor([6, 6, 6, 2])),
        (torch.ones(4), torch.tensor([1.0, 1.0, 1.0, 0.5])),
        (torch.arange(24).view(4, 6) + 1, torch.arange(24).view(4, 6).clamp(max=20) + 1),
    ],
)
def test_what_counts_as_uneven(even, uneven):
    assert max(unevenness(counts_in((even,), 4))) == 0.0
    assert max(unevenness(counts_in((uneven,), 4))) > 0.3


def test_what_cannot_be_counted_is_left_out():
    batch = torch.ones(4, 2, dtype=torch.complex64), torch.ones(4, 2, dtype=torch.uint16), 3
    assert counts_in(batch, 4).shape == (4, 0)
    assert unevenness(counts_in(batch, 4)) == ()
    assert make(Planted(2), plan=SPLIT).step(batch_of(4)).isfinite()


def test_counting_needs_little_memory_beside_the_batch(monkeypatch):
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            there = {t.data_ptr() for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
            for made in tree_leaves(found):
                if made.data_ptr() not in there and func not in views:
                    self.elements = max(self.elements, made.numel())
            return found

    views = {torch.ops.aten.split.Tensor, torch.ops.aten.select.int, torch.ops.aten.slice.Tensor}
    images = torch.randn(16, 3, 8, 8).to(memory_format=torch.channels_last)
    tokens, labels = language([12, 3, 7, 1] * 4)
    images[3, 0, 0, :2] = float("nan")
    batch = images, images.to(torch.float8_e4m3fn), tokens, labels, labels != -100, labels[:, 0]
    whole = counts_in(batch, 16)
    monkeypatch.setattr(split_samples, "_MOST_AT_ONCE", 3 * images[0].numel())
    with Largest() as largest:
        in_parts = counts_in(batch, 16)
    assert torch.equal(in_parts, whole)
    assert largest.elements == 3 * images[0].numel()
