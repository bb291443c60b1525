"""A search where rounding alone makes results another: the right stay, the wrong are out."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.workloads.gpt import GPT, GPTSize
from benchmarks.workloads.tokens import next_token_loss
from search_lab import CPU, Lab, off_by, statuses
from torchfast._core.saved_modules import SavedModules
from torchfast.compiler import CompiledModule
from torchfast.compiler.candidates import Candidate
from torchfast.compiler.judge import Judge
from torchfast.compiler.parity import Errors, ParityTolerance
from torchfast.compiler.rounding_errors import NUM_RUNS, RoundingErrors

TOLERANCE = ParityTolerance(loss=1e-2, gradient=5e-2)


class Deep(nn.Module):
    """Batch norms one behind the other, which hand on a rounding as ever more."""

    def __init__(self, depth, dropout=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU())
            for _ in range(depth)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x))


class HalfLab(Lab):
    """A lab whose step runs in bfloat16."""

    num_units = 0

    def work(self):
        self.now += self.unit_s
        self.num_units += 1
        if self.extra is not None:
            self.extra()
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss()
        loss.backward()
        return loss.detach()

    def loss(self):
        inputs, targets = self.batch
        return F.cross_entropy(self.model(inputs).float(), targets)


class RoutedLab(HalfLab):
    def loss(self):
        return next_token_loss(self.model, self.batch)


def deep_lab(depth=30, **options):
    torch.manual_seed(0)
    return HalfLab(Deep(depth, **options), (torch.randn(64, 32), torch.randint(0, 4, (64,))))


def routed_lab():
    torch.manual_seed(0)
    size = GPTSize(6, 64, 4, vocabulary=200, batch=4, context=32, lr=1e-3, experts=16)
    tokens = torch.randint(0, 200, (4, 33))
    return RoutedLab(GPT(size), (tokens[:, :-1], tokens[:, 1:]))


def rounds_otherwise(model):
    """Have every linear layer round one result of fifty the other way."""

    def rounded(module, args, output):
        some = torch.arange(output.numel()).view(output.shape) % 50 == 7
        return (output.float() * (1 + 2.0**-7 * some)).to(output.dtype)

    hooks = [m.register_forward_hook(rounded) for m in model.modules() if type(m) is nn.Linear]
    return Hooks(hooks)


class Hooks:
    def __init__(self, hooks):
        self.hooks = hooks

    def remove(self):
        for hook in self.hooks:
            hook.remove()


def scaled(name, factor):
    """Scale the gradient of a parameter."""

    def damage(model):
        hook = model.get_parameter(name).register_hook(lambda grad: grad * factor)
        return Hooks([hook, rounds_otherwise(model)])

    return damage


@pytest.mark.parametrize("make", [deep_lab, routed_lab])
def test_what_only_rounds_otherwise_is_not_wrong(make):
    lab = make()
    state = {name: value.clone() for name, value in lab.model.state_dict().items()}
    receipt = lab.search(
        lab.candidate("by blocks", 0.8, damage=rounds_otherwise),
        lab.candidate("whole", 0.7, damage=rounds_otherwise),
    )
    assert receipt.choice == "whole", receipt.candidates
    assert receipt["whole"].gradient_error > 0.05  # more than is allowed elsewhere
    assert sum("rounding alone" in note for note in receipt.notes) == 1
    for name, value in lab.model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert all(parameter.grad is None for parameter in lab.model.parameters())


@pytest.mark.parametrize("factor", [0.0, 5.0])
def test_a_gradient_that_rounding_drowns_has_its_length(factor):
    lab = deep_lab()
    receipt = lab.search(lab.candidate("wrong", 0.5, damage=scaled("blocks.2.0.weight", factor)))
    assert statuses(receipt)["wrong"] == "wrong"
    if not factor:
        assert "blocks.2.0.weight is 0 times as long" in receipt["wrong"].reason


@pytest.mark.parametrize("depth", [4, 8, 12, 16, 20])
def test_nor_where_rounding_is_in_between(depth):
    lab = deep_lab(depth)
    receipt = lab.search(
        lab.candidate("right", 0.5, damage=rounds_otherwise),
        lab.candidate("turned", 0.4, damage=scaled(f"blocks.{depth // 2}.0.weight", -1.0)),
        lab.candidate("missing", 0.4, damage=scaled("blocks.0.1.bias", 0.0)),
    )
    assert receipt.choice == "right", receipt.candidates
    assert statuses(receipt)["turned"] == statuses(receipt)["missing"] == "wrong"


@pytest.mark.parametrize("right_of_four", [1, 3])
def test_what_is_wrong_most_times_is_wrong(right_of_four):
    lab = deep_lab()
    count = 0

    def now_and_then(grad):
        nonlocal count
        count += 1
        return grad if count % 4 < right_of_four else grad * 0

    def damage(model):
        return Hooks([model.head.weight.register_hook(now_and_then), rounds_otherwise(model)])

    receipt = lab.search(lab.candidate("raced", 0.5, damage=damage))
    assert statuses(receipt)["raced"] == ("wrong" if right_of_four == 1 else "measured")


@pytest.mark.parametrize("tolerance", [None, TOLERANCE])
def test_a_tolerance_that_is_given_and_float64_are_what_they_say(tolerance):
    lab = deep_lab() if tolerance else Lab(Deep(8).double(), doubles())
    wrong = rounds_otherwise if tolerance else in_float32
    receipt = lab.search(lab.candidate("other", 0.5, damage=wrong), tolerance=tolerance)
    assert statuses(receipt)["other"] == "wrong"
    assert "rounding" not in receipt["other"].reason + " ".join(receipt.notes)


def doubles():
    torch.manual_seed(0)
    return torch.randn(64, 32).double(), torch.randint(0, 4, (64,))


def in_float32(model):
    return model.blocks[0][0].register_forward_hook(lambda m, args, output: output.float().double())


@pytest.mark.parametrize("factor", [0.0, -1.0, 2.0])
def test_where_little_is_rounded_as_much_is_allowed_as_elsewhere(factor):
    lab = deep_lab()
    receipt = lab.search(lab.candidate("wrong", 0.5, damage=scaled("head.weight", factor)))
    assert "the gradient of head.weight is off" in receipt["wrong"].reason


@pytest.mark.parametrize("factor", [0.0, -1.0, 4.0])
def test_of_an_expert_too(factor):
    lab = routed_lab()
    experts = [
        n for n, _ in lab.model.named_parameters() if ".experts." in n and "down.weight" in n
    ]
    lab.work()
    lengths = {n: lab.model.get_parameter(n).grad for n in experts}
    lab.model.zero_grad()
    most = max(experts, key=lambda n: 0.0 if lengths[n] is None else float(lengths[n].norm()))
    receipt = lab.search(lab.candidate("wrong", 0.5, damage=scaled(most, factor)))
    assert most in receipt["wrong"].reason


def test_a_wrong_loss_or_buffer_is_wrong_there_too():
    lab = deep_lab()
    receipt = lab.search(
        lab.candidate("loss", 0.5, damage=off_by(1.3)),
        lab.candidate("buffer", 0.5, doing=lambda: lab.model.blocks[0][1].running_mean.add_(1.0)),
    )
    assert "loss is off" in receipt["loss"].reason
    assert "twice what rounding alone does" in receipt["loss"].reason
    assert "the buffer blocks.0.1.running_mean" in receipt["buffer"].reason


def test_what_rounding_does_not_explain_is_told_as_ever():
    lab = deep_lab(depth=2)
    receipt = lab.search(lab.candidate("wrong", 0.5, damage=off_by(1.3)))
    assert "loss is off" in receipt["wrong"].reason
    assert "rounding" not in receipt["wrong"].reason + " ".join(receipt.notes)


def test_nothing_runs_more_often_where_results_are_near():
    counts = {}
    for name, damage in {"same": None, "near": rounds_otherwise, "off": off_by(1.3)}.items():
        lab = deep_lab(depth=2)
        judged(lab, lab.candidate("other", damage=damage))
        counts[name] = lab.num_units
    assert counts["near"] == counts["same"]
    assert counts["off"] == counts["same"] + NUM_RUNS  # of the reference, which explain nothing


def judge_of(lab):
    reference = Candidate(name="eager", apply=lambda: lambda: None)
    return Judge(reference, lab.work, lab.model, SavedModules([lab.model], CPU), None)


def judged(lab, candidate):
    judge = judge_of(lab)
    with candidate.in_force():
        errors = judge.errors()
    return judge.objection(errors, candidate.in_force, lambda function: function())


def test_the_reference_is_measured_once_for_all_candidates():
    lab = deep_lab()
    once, both = (lab.candidate(f"other {i}", 0.9, damage=rounds_otherwise) for i in range(2))
    judge = judge_of(lab)
    spent = []
    for candidate in (once, both):
        with candidate.in_force():
            errors = judge.errors()
        before = lab.num_units
        assert judge.objection(errors, candidate.in_force, lambda function: function()) is None
        spent.append(lab.num_units - before)
        judge.set_back()
    assert spent == [2 * NUM_RUNS, NUM_RUNS]


def test_without_dropout_rounding_is_no_error_either():
    lab = deep_lab(dropout=0.1)
    receipt = lab.search(
        lab.candidate("right", 0.6, damage=rounds_otherwise),
        lab.candidate("wrong", 0.5, damage=scaled("head.weight", 2.0)),
    )
    assert receipt.choice == "right"
    assert "head.weight" in receipt["wrong"].reason


@pytest.mark.parametrize("depth", [2, 30])
def test_what_cannot_be_put_in_force_again_is_told(depth):
    lab = deep_lab(depth)
    good, calls = lab.candidate("other", 0.5, damage=off_by(1.3)), []

    def apply():
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("not twice")
        return good.apply()

    receipt = lab.search(Candidate(name="other", apply=apply))
    assert statuses(receipt)["other"] == "wrong"
    assert "loss is off" in receipt["other"].reason
    assert ("could not be found out: RuntimeError: not twice" in receipt["other"].reason) is (
        depth == 30
    )


def test_what_the_time_does_not_allow_to_be_found_out_is_wrong():
    lab = deep_lab(depth=2, dropout=0.3)

    def within(seconds, function):
        if lab.model.dropout.p == 0.0 and lab.in_force == "eager":  # what rounding does to eager
            raise TimeoutError
        return function()

    receipt = lab.search(
        lab.candidate("wrong", 0.5, damage=scaled("head.weight", 1.7)), call_within=within
    )
    assert statuses(receipt)["wrong"] == "wrong"
    assert "that it is rounding could not be found out" in receipt["wrong"].reason


def test_runs_that_are_moved_have_what_is_left_of_the_time():
    lab, limits = deep_lab(), []

    def within(seconds, function):
        limits.append((seconds, lab.now))
        return function()

    lab.search(
        lab.candidate("other", 0.5, 30.0, damage=rounds_otherwise),
        budget_s=200.0,
        call_within=within,
    )
    assert len(limits) >= 4
    ends = [seconds + now for seconds, now in limits[:3]]  # compiling, eager moved, moved
    assert max(ends) == pytest.approx(min(ends))


def test_dropout_stays_off_while_rounding_is_measured():
    lab, rates = deep_lab(dropout=0.1), []
    found = lab.candidate("right", 0.5, damage=rounds_otherwise)
    lab.model.head.register_forward_hook(lambda *_: rates.append(lab.model.dropout.p))
    lab.search(found)
    zeros = [index for index, rate in enumerate(rates) if rate == 0.0]
    assert len(zeros) == 2 + 2 * NUM_RUNS
    assert zeros == [*range(zeros[0], zeros[-1] + 1)]


def test_what_has_no_memory_is_not_moved():
    lab = deep_lab()
    lab.model.unused = nn.Linear(3, 3, device="meta")
    for parameter in lab.model.unused.parameters():
        parameter.requires_grad_(False)
    receipt = lab.search(lab.candidate("right", 0.5, damage=rounds_otherwise))
    assert receipt.choice == "right"


# -- The comparison of its own ---------------------------------------------------------------------


def errors(tensor=0.0, *, loss=0.0, gradient=0.0, buffer=0.0, length=1.0):
    return Errors(loss, gradient, {"w": tensor}, {"b": buffer}, {"w": length})


def test_each_may_be_twice_as_far_off_as_rounding_takes_it():
    rounding = RoundingErrors([errors(0.3, loss=0.02, gradient=0.1, buffer=0.1), errors()])
    near = errors(0.59, loss=0.039, gradient=0.19, buffer=0.19)
    assert rounding.objection([near], TOLERANCE) is None
    for name, value in {"tensor": 0.61, "loss": 0.041, "gradient": 0.21, "buffer": 0.21}.items():
        assert rounding.objection([errors(**{name: value})], TOLERANCE), name


def test_what_is_off_in_two_of_four_runs_is_rounding():
    rounding = RoundingErrors([errors(0.2, gradient=0.1)])
    off, near = errors(1.0), errors(0.1)
    assert rounding.objection([off, near, off, near], TOLERANCE) is None
    assert rounding.objection([off, near, off, off], TOLERANCE)


def test_no_more_is_allowed_than_what_has_nothing_to_do_with_each_other():
    for tensor, most in {0.6: 1.2, 0.9: 1.4142, 1.2: 1.4142, 1.5: 1.65}.items():
        rounding = RoundingErrors([errors(tensor)])
        assert rounding.objection([errors(most - 0.01)], TOLERANCE) is None
        assert rounding.objection([errors(most + 0.01)], TOLERANCE)


def test_a_length_counts_where_a_missing_gradient_would_be_as_near():
    drowned = RoundingErrors([errors(1.2, length=0.8), errors(1.1, length=1.5)])
    for length, is_right in {0.3: False, 0.5: True, 2.9: True, 3.1: False, math.nan: False}.items():
        runs = [errors(1.2, length=length)]
        assert (drowned.objection(runs, TOLERANCE) is None) is is_right, length
        assert drowned.objection(runs, TOLERANCE, lengths=False) is None
    some = [errors(length=length) for length in (0.0, 1.0, 1.0, 1.0, 5.0)]
    assert drowned.objection(some, TOLERANCE) is None
    for tensor, is_compared in {0.44: False, 0.46: True, 0.9: True}.items():
        objection = RoundingErrors([errors(tensor)]).objection([errors(length=0.3)], TOLERANCE)
        assert (objection is not None) is is_compared, tensor


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_now_and_then_allows_nothing(value):
    rounding = RoundingErrors([errors(value, loss=value, gradient=value, buffer=value), errors()])
    assert not rounding.is_beyond(TOLERANCE)
    assert rounding.objection([errors(0.6)], TOLERANCE)


# -- A compiler of torch's -------------------------------------------------------------------------


def test_blocks_that_are_compiled_are_found_where_gradients_are_rounding():
    lab = deep_lab(depth=50)

    def loss_fn(model, batch):
        inputs, targets = batch
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(inputs).float(), targets)

    with CompiledModule(lab.model, mode="auto", regions="blocks", budget_s=120) as compiled:
        receipt = compiled.search(loss_fn, lab.batch)
    assert statuses(receipt)["blocks: default"] == "measured", receipt.candidates
    assert receipt["blocks: default"].gradient_error > 0.05
