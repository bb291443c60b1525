"""A search keeps the fastest way that computes the same, in time, and leaves nothing behind."""

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
from torchfast._core import measure as measuring
from torchfast._core.compare import differences
from torchfast._core.rng import get_rng_state
from torchfast.compiler.candidates import Candidate, mode_choices
from torchfast.compiler.parity import ParityTolerance
from torchfast.compiler.search import _peak_bytes, search

CPU = torch.device("cpu")
BATCH = (torch.randn(16, 8), torch.randint(0, 4, (16,)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.second = nn.Linear(32, 4)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


class FunctionalDropout(Net):
    """Draws in a way that no module's rate can turn off."""

    def forward(self, x):
        return self.second(F.dropout(F.gelu(self.first(x)), 0.3))


class Lab:
    """A model whose candidates are fakes: seconds on a clock of the lab's, and what they do."""

    def __init__(self, model=None, batch=BATCH):
        self.model = Net() if model is None else model
        self.batch = batch
        self.now = 0.0
        self.unit_s = 1.0
        self.extra = None
        self.log = []
        self.in_force = None
        self.first = set()

    def clock(self):
        return self.now

    def work(self):
        self.now += self.unit_s
        if self.extra is not None:
            self.extra()
        inputs, targets = self.batch
        loss = F.cross_entropy(self.model(inputs), targets)
        loss.backward()
        return loss.detach()

    def candidate(self, name, unit_s=1.0, compile_s=0.0, *, each_time=False, **options):
        """Return a candidate whose unit takes so long, and the first one its compile too."""
        doing = options.pop("doing", lambda: None)
        damage = options.pop("damage", None)
        assert not options

        def apply():
            assert self.in_force is None
            self.in_force = name
            before = self.unit_s, self.extra
            hooks = []
            if damage is not None:
                hooks.append(damage(self.model))

            def extra():
                if name not in self.first or (each_time and not state["ran"]):
                    self.first.add(name)
                    self.now += compile_s
                state["ran"] = True
                self.log.append(name)
                doing()

            state = {"ran": False}
            self.unit_s, self.extra = unit_s, extra

            def undo():
                assert self.in_force == name
                self.in_force = None
                self.unit_s, self.extra = before
                for hook in hooks:
                    hook.remove()

            return undo

        return Candidate(name=name, apply=apply)

    def search(self, *candidates, budget_s=1000.0, **options):
        receipt = search(
            [self.candidate("eager"), *candidates],
            self.work,
            model=self.model,
            device=CPU,
            batch=self.batch,
            budget_s=budget_s,
            clock=self.clock,
            synchronize=lambda: None,
            **options,
        )
        assert self.in_force is None
        return receipt


def wrong_gradient(model):
    """Make one gradient a tenth too large."""
    return next(model.parameters()).register_hook(lambda grad: grad * 1.1)


def off_by(factor):
    return lambda model: model.register_forward_hook(lambda m, args, output: output * factor)


def statuses(receipt):
    return {c.name: c.status for c in receipt.candidates}


# -- The choice ------------------------------------------------------------------------------------


def test_the_fastest_is_chosen():
    lab = Lab()
    receipt = lab.search(lab.candidate("blocks", 0.8, 5.0), lab.candidate("whole", 0.6, 20.0))
    assert receipt.choice == "whole"
    assert set(statuses(receipt).values()) == {"measured"}
    assert receipt["whole"].compile_s == pytest.approx(20.0)
    assert receipt["whole"].ratio == pytest.approx(0.6)
    assert receipt["blocks"].median_ms == pytest.approx(800.0)
    assert receipt["whole"].low_ms <= receipt["whole"].median_ms <= receipt["whole"].high_ms
    assert "0.600" in receipt.why


def test_within_the_noise_the_simpler_one_stays():
    lab = Lab()
    receipt = lab.search(lab.candidate("blocks", 0.8, 5.0), lab.candidate("whole", 0.797, 20.0))
    assert receipt.choice == "blocks"
    assert "whole cost more to compile" in receipt.why
    assert lab.search(lab.candidate("blocks", 0.997, 5.0)).choice == "eager"
    assert lab.search(lab.candidate("blocks", 1.5, 5.0)).choice == "eager"


def test_what_is_wrong_is_never_chosen_though_it_is_fastest():
    lab = Lab()
    receipt = lab.search(
        lab.candidate("right", 0.8),
        lab.candidate("loss", 0.1, damage=off_by(1.01)),
        lab.candidate("gradient", 0.1, damage=wrong_gradient),
    )
    assert receipt.choice == "right"
    assert statuses(receipt)["loss"] == statuses(receipt)["gradient"] == "wrong"
    assert "first.weight" in receipt["gradient"].reason
    assert receipt["gradient"].median_ms is None


def test_a_wrong_loss_with_right_gradients_is_wrong():
    lab = Lab()
    plain = lab.work
    lab.work = lambda: plain() * (1.01 if lab.in_force == "loss" else 1.0)
    receipt = lab.search(lab.candidate("loss", 0.1))
    assert "its loss is off by" in receipt["loss"].reason


def test_rounding_is_not_wrong_and_a_tolerance_can_be_given():
    lab = Lab()
    close = lab.candidate("close", 0.5, damage=off_by(1 + 1e-6))
    assert lab.search(close).choice == "close"
    assert lab.search(close)["close"].gradient_error > 0
    off = lab.candidate("off", 0.5, damage=off_by(1.01))
    assert lab.search(off).choice == "eager"
    assert lab.search(off, tolerance=ParityTolerance(loss=0.1, gradient=0.1)).choice == "off"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tolerance_is_that_of_the_precision_that_is_computed_in(dtype):
    lab = Lab()
    plain = lab.work

    def under_autocast():
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            return plain()

    lab.work = under_autocast
    # Off by what bf16 rounds, which is far too much for fp32.
    receipt = lab.search(lab.candidate("rounds", 0.5, damage=off_by(1.004)))
    assert statuses(receipt)["rounds"] == ("wrong" if dtype is torch.float32 else "measured")


@pytest.mark.parametrize("name", ["running_mean", "num_batches_tracked"])
@pytest.mark.parametrize("share", [1, 0])
def test_a_buffer_that_is_written_twice_is_wrong(share, name):
    model = BatchNormNet()
    lab = Lab(model)

    def twice(model):
        def again(module, args):
            with torch.no_grad():
                getattr(module, name).add_(share)

        return model.norm.register_forward_pre_hook(again)

    receipt = lab.search(lab.candidate("twice", 0.5, damage=twice))
    assert statuses(receipt)["twice"] == ("wrong" if share else "measured")


def test_a_candidate_that_updates_parameters_is_wrong():
    lab = Lab()
    before = copy.deepcopy(lab.model.state_dict())

    def update():
        with torch.no_grad():
            lab.model.first.weight.add_(1e-7)

    receipt = lab.search(lab.candidate("updates", 0.5, doing=update))
    assert statuses(receipt)["updates"] == "wrong"
    assert "first.weight" in receipt["updates"].reason
    assert differences(before, lab.model.state_dict()) == []


# -- Failures and time -----------------------------------------------------------------------------


class Interrupted(BaseException):
    """What a limit raises inside of the call."""


def test_a_candidate_that_hangs_is_bounded_and_the_next_one_is_tried():
    lab = Lab()
    limits = []

    def call_within(seconds, function):
        limits.append(seconds)
        lab.deadline = lab.now + seconds
        return function()

    def hang():
        lab.now = lab.deadline
        raise Interrupted

    receipt = lab.search(
        lab.candidate("quick", 0.9, 1.0),
        lab.candidate("hangs", 0.1, doing=hang),
        lab.candidate("after", 0.1, 1.0),
        budget_s=100.0,
        call_within=call_within,
    )
    assert statuses(receipt) == {
        "eager": "measured",
        "quick": "measured",
        "hangs": "timed out",
        "after": "left out",
    }
    assert receipt.choice == "quick"
    assert "not done in" in receipt["hangs"].reason
    assert receipt.elapsed_s <= 101
    assert max(limits) <= 75


def test_an_interruption_that_is_no_limit_is_not_swallowed():
    lab = Lab()
    before = get_rng_state(CPU)

    def stop():
        torch.rand(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab.search(lab.candidate("stopped", doing=stop))
    assert lab.in_force is None
    assert differences(before, get_rng_state(CPU)) == []

    def other():
        raise Interrupted

    with pytest.raises(Interrupted):
        lab.search(lab.candidate("other", doing=other))


def test_a_candidate_that_raises_is_recorded_with_its_reason():
    lab = Lab()

    def fail():
        lab.now += 3.0
        raise RuntimeError("no kernel\nfor this")

    def cannot():
        raise ValueError("cannot be put in force")

    receipt = lab.search(
        lab.candidate("fails", doing=fail),
        Candidate(name="refuses", apply=cannot),
        Candidate(
            name="pretends", apply=lab.candidate("x").apply, failure=lambda: "nothing was compiled"
        ),
        lab.candidate("runs", 0.9),
    )
    assert receipt["fails"].reason == "RuntimeError: no kernel"
    assert receipt["fails"].compile_s == pytest.approx(4.0)
    assert receipt["refuses"].reason == "ValueError: cannot be put in force"
    assert receipt["pretends"].reason == "nothing was compiled"
    assert {statuses(receipt)[n] for n in ("fails", "refuses", "pretends")} == {"failed"}
    assert receipt.choice == "runs"


def test_a_failure_while_timed_rules_out():
    lab = Lab()
    calls = []

    def fail():
        calls.append(1)
        if len(calls) > 12:
            raise MemoryError("full")

    receipt = lab.search(lab.candidate("fails", 0.1, doing=fail), lab.candidate("runs", 0.9))
    assert "while it was timed" in receipt["fails"].reason
    assert receipt.choice == "runs"


def test_what_would_take_longer_than_is_left_is_left_out_and_said():
    lab = Lab()
    receipt = lab.search(
        lab.candidate("a", 0.9, 50.0), lab.candidate("b", 0.5, 60.0), budget_s=140.0
    )
    assert statuses(receipt)["b"] == "left out"
    assert "raise budget_s" in receipt["b"].reason
    assert receipt.choice == "a"
    assert receipt.elapsed_s <= 140


def test_what_compiles_each_time_it_is_put_in_force_is_out():
    lab = Lab()
    receipt = lab.search(lab.candidate("again", 0.1, 20.0, each_time=True))
    assert "compiles anew" in receipt["again"].reason
    assert receipt.choice == "eager"


def test_an_error_of_the_reference_is_raised_and_nothing_is_left():
    lab = Lab(BatchNormNet())
    before = copy.deepcopy(lab.model.state_dict())
    plain, calls = lab.work, []

    def breaks():
        calls.append(1)
        loss = plain()
        if len(calls) == 2:
            raise RuntimeError("the user's own")
        return loss

    lab.work = breaks
    with pytest.raises(RuntimeError, match="the user's own"):
        lab.search(lab.candidate("a"))
    assert differences(before, lab.model.state_dict()) == []
    assert all(p.grad is None for p in lab.model.parameters())


def test_the_peak_of_each_is_that_of_one_unit(monkeypatch):
    lab = Lab()
    peaks = {"eager": 300, "lean": 200}
    units = []

    def peak_bytes(run):
        before = len(lab.log)
        run()
        units.append(len(lab.log) - before)
        return peaks[lab.in_force]

    receipt = lab.search(lab.candidate("lean", 0.5), peak_bytes=peak_bytes)
    assert {c.name: c.peak_bytes for c in receipt.candidates} == peaks
    assert units == [1, 1]


def test_on_cuda_the_peak_is_asked_of_the_allocator(monkeypatch):
    calls = []
    cuda = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda d: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda d: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda d: 123)
    assert _peak_bytes(cuda, lambda: calls.append("run")) == 123
    assert calls == ["reset", "run", "wait"]
    assert _peak_bytes(CPU, lambda: calls.append("run")) is None
    assert calls[-1] == "run"


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
