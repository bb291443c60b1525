"""What a search may not touch: random numbers and the state; and real backends, searched."""

from __future__ import annotations

import copy
import random
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models import BatchNormNet, DropoutNet
from search_lab import BATCH, CPU, Lab, Net, off_by, statuses
from torchfast._core import measure as measuring
from torchfast._core.compare import differences
from torchfast._core.rng import get_rng_state
from torchfast.compiler.candidates import Candidate, mode_choices
from torchfast.compiler.search import search


class FunctionalDropout(Net):
    """Draws in a way that no module's rate can turn off."""

    def forward(self, x):
        return self.second(F.dropout(F.gelu(self.first(x)), 0.3))


# -- Random numbers --------------------------------------------------------------------------------


def other_draws(model):
    """Have other numbers drawn after the same seed, as inductor does."""
    return model.register_forward_pre_hook(lambda *_: (torch.rand(3), None)[1])


def test_other_draws_are_no_error():
    lab = Lab(DropoutNet())
    receipt = lab.search(lab.candidate("other draws", 0.5, damage=other_draws))
    # It draws on without dropout, so it could only be judged within the spread.
    assert receipt.choice == "other draws"


def test_with_dropout_the_choice_is_judged_once_more_without():
    lab = Lab(DropoutNet())

    def other_masks(model):
        def draw(module, args):
            if module.p:
                torch.rand(3)

        return model.layers[2].register_forward_pre_hook(draw)

    slightly_off = off_by(1.002)  # nothing beside the masks, and too much for fp32
    receipt = lab.search(
        lab.candidate("right", 0.8, damage=other_masks),
        lab.candidate("wrong", 0.5, damage=slightly_off),
    )
    assert receipt["right"].loss_error == 0.0  # of the judgement without dropout
    assert statuses(receipt)["wrong"] == "wrong"
    assert "without dropout" in receipt["wrong"].reason
    assert receipt.choice == "right"
    assert lab.model.layers[2].p == 0.3


def test_with_dropout_what_is_grossly_wrong_is_out_at_once():
    lab = Lab(DropoutNet())
    receipt = lab.search(lab.candidate("wrong", 0.5, damage=off_by(-3.0)))
    assert "random numbers" in receipt["wrong"].reason
    assert "without dropout" not in receipt["wrong"].reason


def test_dropout_that_cannot_be_turned_off_is_said():
    lab = Lab(FunctionalDropout())
    receipt = lab.search(lab.candidate("a", 0.5))
    assert receipt.choice == "a"
    assert any("draws on" in note for note in receipt.notes)


def test_too_little_time_for_the_second_judgement_is_said():
    lab = Lab(DropoutNet())
    receipt = lab.search(lab.candidate("a", 0.5, 60.0), budget_s=110.0)
    assert receipt.choice == "a"
    assert any("no time to compile it without dropout" in note for note in receipt.notes)


# -- The state -------------------------------------------------------------------------------------


class Odd(BatchNormNet):
    """Keeps state in every way that a module can."""

    def __init__(self):
        super().__init__()
        self.register_buffer("means", torch.zeros(0))
        self.calls = 0
        self.cache = None
        self.kept = torch.zeros(2)
        self.generator = torch.Generator().manual_seed(3)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        self.means = torch.cat([self.means, x.detach().mean().reshape(1)])
        self.calls += 1
        self.cache = x.detach() + 1
        self.new = x.detach()
        self.kept += 1
        random.random()
        np.random.rand()
        noise = torch.rand(x.shape, generator=self.generator)
        return super().forward(self.dropout(x + 0.01 * noise))


def everything(lab):
    model = lab.model
    return {
        "model": copy.deepcopy(model.state_dict()),
        "rng": get_rng_state(CPU),
        "generator": model.generator.get_state(),
        "attributes": (model.calls, model.cache, model.kept.clone(), "new" in vars(model)),
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "batch": [t.clone() for t in lab.batch],
    }


@pytest.mark.parametrize("ends", ["well", "in an error"])
@pytest.mark.parametrize("with_grads", [False, True])
def test_the_state_is_bit_for_bit_what_it_was(with_grads, ends):
    lab = Lab(Odd(), (torch.randn(16, 8), torch.randint(0, 4, (16,))))
    if with_grads:
        lab.work()
        lab.model.calls = 5
        next(lab.model.parameters()).grad = None
    grads = [p.grad for p in lab.model.parameters()]
    buffers = dict(lab.model.named_buffers())
    before = everything(lab)

    calls = []

    def damage():
        calls.append(1)
        lab.batch[0].add_(1.0)
        for grad in grads:
            if grad is not None:
                grad.zero_()
        if ends == "in an error" and len(calls) == 4:
            raise KeyboardInterrupt

    candidates = [lab.candidate("a", 0.9), lab.candidate("b", 0.8, doing=damage)]
    if ends == "well":
        lab.search(*candidates)
    else:
        with pytest.raises(KeyboardInterrupt):
            lab.search(*candidates)
    assert differences(before, everything(lab)) == []
    assert all(p.grad is g for p, g in zip(lab.model.parameters(), grads, strict=True))
    assert all(b is buffers[name] for name, b in lab.model.named_buffers())


def test_work_that_updates_parameters_is_refused_and_undone():
    lab = Lab()
    before = copy.deepcopy(lab.model.state_dict())
    plain = lab.work

    def work():
        loss = plain()
        with torch.no_grad():
            lab.model.first.weight -= 0.1
        return loss

    lab.work = work
    with pytest.raises(ValueError, match=r"work\(\) changed the parameters \['first.weight'"):
        lab.search(lab.candidate("a"))
    assert differences(before, lab.model.state_dict()) == []


@pytest.mark.parametrize("result", [None, torch.zeros(3), 1.5])
def test_work_has_to_return_its_loss(result):
    lab = Lab()
    lab.work = lambda: result
    with pytest.raises(TypeError, match=r"work\(\) must return the loss"):
        lab.search()


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_candidates_are_one_or_more_of_different_names(names):
    lab = Lab()
    with pytest.raises(ValueError, match="candidates must be one or more"):
        search(
            [lab.candidate(n) for n in names], lab.work, model=lab.model, device=CPU, budget_s=1.0
        )


# -- Modes, and the real thing ---------------------------------------------------------------------


def test_the_modes_worth_trying():
    cuda = torch.device("cuda")
    assert [c.name for c in mode_choices(cuda, has_blocks=True, outer_graph=True)] == [
        "eager",
        "blocks: default",
        "whole: default",
        "blocks: max-autotune-no-cudagraphs",
        "whole: max-autotune-no-cudagraphs",
    ]
    own_graphs = {"whole: reduce-overhead", "whole: max-autotune"}
    names = {c.name for c in mode_choices(cuda, has_blocks=True)}
    assert own_graphs < names
    names = {c.name for c in mode_choices(torch.device("cpu"), has_blocks=True)}
    assert own_graphs.isdisjoint(names)


def compiled(model, name, backend):
    """Return a candidate that compiles the model for real."""
    call = torch.compile(model.forward, backend=backend)

    def apply():
        model.forward = call
        return lambda: delattr(model, "forward")

    return Candidate(name=name, apply=apply)


@pytest.fixture
def fresh_dynamo():
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(1))  # imports it
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def lies(graph, inputs):
    """A backend that computes something else."""
    return lambda *args: tuple(out * 1.05 for out in graph(*args))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("kind", [Net, BatchNormNet])
def test_real_backends_are_compiled_judged_and_timed(kind):
    model = kind()
    before = copy.deepcopy(model.state_dict()), get_rng_state(CPU)

    def work():
        loss = F.cross_entropy(model(BATCH[0]), BATCH[1])
        loss.backward()
        return loss

    candidates = [
        Candidate(name="eager", apply=lambda: lambda: None),
        compiled(model, "aot_eager", "aot_eager"),
        compiled(model, "lies", lies),
        compiled(model, "unknown", "no such backend")
        if kind is None
        else compiled(model, "fails", lambda graph, inputs: 1 / 0),
    ]
    started = time.perf_counter()
    receipt = search(candidates, work, model=model, device=CPU, budget_s=20.0, smallest=0.5)
    assert time.perf_counter() - started < 20
    assert receipt["aot_eager"].status == "measured"
    assert receipt["aot_eager"].ratio is not None
    assert receipt["fails"].status == "failed"
    if kind is Net:
        assert receipt["lies"].status == "wrong"
    assert receipt.choice in ("eager", "aot_eager")
    assert differences(before[0], model.state_dict()) == []
    assert differences(before[1], get_rng_state(CPU)) == []


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_choice_is_judged_without_dropout(monkeypatch):
    model = DropoutNet()
    rates = []

    def work():
        loss = F.cross_entropy(model(BATCH[0]), BATCH[1])
        loss.backward()
        return loss

    def noting(graph, inputs):
        rates.append(model.layers[2].p)
        return aot_eager(graph, inputs)

    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    candidates = [
        Candidate(name="eager", apply=lambda: lambda: None),
        compiled(model, "compiled", noting),
    ]
    # So that it is chosen, whatever it takes: the second judgement is of the choice.
    monkeypatch.setattr(measuring, "_verdict", lambda low, high, smallest: "faster")
    receipt = search(candidates, work, model=model, device=CPU, budget_s=30.0)
    assert receipt.choice == "compiled"
    assert receipt.notes == ()
    # Compiled as it is, then without; torch may take two attempts at a number that has changed.
    assert rates[0] == 0.3
    assert set(rates[1:]) == {0.0}
    assert model.layers[2].p == 0.3
