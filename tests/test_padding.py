"""Samples padded to few lengths: the batch is right, and a step is compiled once for each."""

from __future__ import annotations

import pickle
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader

from tape import counts
from torchfast import CompileOptions, PadToLengths, Plan, Trainer

LENGTHS = (4, 8, 12)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 5)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def loss_fn(model, batch):
    tokens, labels = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def samples(*lengths):
    generator = torch.Generator().manual_seed(0)
    draw = lambda most, n: torch.randint(1, most, (n,), generator=generator)  # noqa: E731
    return [(draw(16, n), draw(5, n)) for n in lengths]


def trained(plan, batches):
    torch.manual_seed(0)
    model = Tagger()
    trainer = Trainer(model, optim.SGD(model.parameters(), lr=0.1), loss_fn, plan)
    losses = [trainer.step(batch) for batch in batches]
    return trainer, torch.stack(losses)


def test_padding_goes_to_the_next_length_and_changes_no_loss():
    torch.manual_seed(0)
    model = Tagger()
    for longest, padded in ((1, 4), (4, 4), (5, 8), (12, 12)):
        group = samples(longest, 1, longest)
        tokens, labels = PadToLengths(LENGTHS, (0, -100))(group)
        assert tokens.shape == labels.shape == (3, padded)
        for row, (own, label) in enumerate(group):
            assert torch.equal(tokens[row, : len(own)], own)
            assert torch.equal(labels[row, : len(own)], label)
            assert not tokens[row, len(own) :].any()
            assert (labels[row, len(own) :] == -100).all()
        joined = tuple(torch.cat(parts)[None] for parts in zip(*group, strict=True))
        torch.testing.assert_close(loss_fn(model, (tokens, labels)), loss_fn(model, joined))


class Sample(NamedTuple):
    frames: torch.Tensor
    mask: torch.Tensor
    about: dict


def test_samples_of_any_nesting_are_batched_as_they_are_nested():
    group = [
        Sample(torch.full((n, 2, 3), 1.5), torch.ones(n, dtype=torch.bool), {"id": n, "name": "a"})
        for n in (2, 5)
    ]
    values = Sample(0.5, 0, {"id": None, "name": None})
    batch = PadToLengths([8, 4], values)(group)
    assert type(batch) is Sample
    assert batch.frames.shape == (2, 8, 2, 3)
    assert batch.frames[0].unique().tolist() == [0.5, 1.5]
    assert (batch.frames[0, :2] == 1.5).all()
    assert (batch.frames[0, 2:] == 0.5).all()
    assert batch.mask.dtype is torch.bool
    assert batch.mask.sum(1).tolist() == [2, 5]
    assert batch.about["id"].tolist() == [2, 5]
    assert batch.about["name"] == ["a", "a"]


def test_workers_take_it_with_them():
    collate = PadToLengths(LENGTHS, (0, -100))
    assert repr(pickle.loads(pickle.dumps(collate))) == "PadToLengths((4, 8, 12), (0, -100))"
    loader = DataLoader(samples(3, 9, 2, 12), 2, collate_fn=collate, num_workers=1)
    assert [tokens.shape[1] for tokens, _ in loader] == [12, 12]


@pytest.mark.parametrize(
    ("lengths", "values", "group", "error", "says"),
    [
        ((), 0, [], ValueError, "lengths is empty"),
        ((4, 0), 0, [], ValueError, "lengths must be >= 1, got 0"),
        (128, 0, [], TypeError, "lengths must be several ints, such as"),
        ((4,), {"tokens": ("0",)}, [], TypeError, r"values must be numbers and None.* got '0' "),
        ((4.5,), 0, [], TypeError, "lengths must be an int >= 1, got 4.5"),
        ((4, 8), (0, -100), samples(3, 9), ValueError, r"lengths=\(4, 8\) has none .* length 9"),
        ((4,), {"tokens": 0}, samples(3), TypeError, "where a sample has tuple"),
        ((4,), (0,), samples(3), TypeError, "nest values as a sample is"),
        ((4,), 0, [torch.tensor(3)], TypeError, "values has 0 where a sample has Tensor"),
    ],
)
def test_what_cannot_be_padded_is_an_error(lengths, values, group, error, says):
    with pytest.raises(error, match=says):
        PadToLengths(lengths, values)(group)


# Each length in turn, and then many samples of all.
ORDER = (3, 7, 11, *(1 + (5 * n) % 12 for n in range(24)))


def batches(collate):
    return [collate(samples(n, 1)) for n in ORDER]


def to_longest(group):
    return PadToLengths([max(len(tokens) for tokens, _ in group)], (0, -100))(group)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_step_is_compiled_once_for_each_length_and_no_more():
    plan = Plan(compile=CompileOptions(backend="aot_eager", dynamic=False))
    collate = PadToLengths(LENGTHS, (0, -100))
    trainer, first = trained(plan, batches(collate)[:3])
    found = trainer.report().counters
    assert (found["compile_graphs"], found["compile_recompiles"]) == (3, 2)
    losses = torch.stack([trainer.step(batch) for batch in batches(collate)[3:]])
    found = trainer.report().counters
    assert (found["compile_graphs"], found["compile_recompiles"]) == (3, 2)
    assert trainer.report().stepped_aside == ()
    _, plain = trained("eager", batches(collate))
    torch.testing.assert_close(torch.cat([first, losses]), plain)
    trainer.close()


@pytest.mark.usefixtures("fresh_dynamo")
def test_padded_to_the_longest_it_is_compiled_again_and_again():
    plan = Plan(compile=CompileOptions(backend="aot_eager", dynamic=False))
    trainer, _ = trained(plan, batches(to_longest)[:6])
    assert trainer.report().counters["compile_graphs"] > len(LENGTHS)
    trainer.close()


def test_a_step_is_captured_once_for_each_length(tape):
    trainer, losses = trained("exact", batches(PadToLengths(LENGTHS, (0, -100))))
    graphs, replays, _, captures = counts(trainer)
    assert (graphs, captures) == (3, 3)
    assert replays > 15
    _, plain = trained("eager", batches(PadToLengths(LENGTHS, (0, -100))))
    assert torch.equal(losses, plain)
