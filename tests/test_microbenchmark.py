"""compare_speed finds planted differences, invents none, and refuses what cannot be compared."""

from __future__ import annotations

import json
import random
import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchfast import SpeedComparison, compare_speed
from torchfast._core.measure import measure
from torchfast.profiling import microbenchmark
from torchfast.profiling.closeness import leaves_below

quick = partial(compare_speed, budget_s=1.0)


def sleeping(ms):
    def work(x):
        time.sleep(ms / 1e3)
        return x

    return work


class MadeUpClock:
    """A clock that only work moves, by what it takes and a little noise."""

    def __init__(self):
        self.now = 0.0
        self.random = random.Random(0)

    def taking(self, ms):
        def work(x):
            self.now += ms / 1e3 * (1 + self.random.gauss(0, 0.005))
            return x

        return work


@pytest.fixture
def clock(monkeypatch):
    made_up = MadeUpClock()

    def by_made_up_clock(works, **options):
        return measure(works, **options, clock=lambda: made_up.now)

    monkeypatch.setattr(microbenchmark, "measure", by_made_up_clock)
    return made_up


class Counted:
    """A function that counts its calls and whether gradients are recorded in them."""

    def __init__(self, function):
        self.function = function
        self.calls = 0

    def __call__(self, *args):
        self.calls += 1
        return self.function(*args)


# -- What is faster --------------------------------------------------------------------------------


def test_a_planted_difference_is_found_with_its_size(clock):
    result = compare_speed(clock.taking(4), clock.taking(5), torch.ones(2))
    assert result.verdict == "first is faster"
    assert 1.2 < result.speedup_low < result.speedup < result.speedup_high < 1.3
    assert result.speedup == pytest.approx(1.25, abs=0.01)
    assert (result.first_ms, result.second_ms) == pytest.approx((4, 5), rel=0.01)
    assert result.num_rounds >= 8
    assert str(result).startswith("first is 1.2")
    assert "times as fast as second (1.2" in str(result)


def test_the_slower_first_is_told_from_the_other_side(clock):
    result = compare_speed(clock.taking(5), clock.taking(4), torch.ones(2))
    assert result.verdict == "second is faster"
    assert 0.77 < result.speedup_low < 0.8 < result.speedup_high < 0.83
    text = str(result)
    assert text.startswith("second is 1.2")
    low, high = text.partition("(")[2].partition(")")[0].split(" to ")
    assert 1.2 < float(low) <= 1.25 <= float(high) < 1.3


def test_the_same_twice_is_no_difference(clock):
    result = compare_speed(clock.taking(5), clock.taking(5), torch.ones(2))
    assert result.verdict == "no difference"
    assert str(result).startswith("no difference: first is ")


def test_less_than_what_matters_is_no_difference(clock):
    functions = clock.taking(5), clock.taking(5.2)
    assert compare_speed(*functions, torch.ones(2)).verdict == "first is faster"
    assert compare_speed(*functions, torch.ones(2), smallest=0.2).verdict == "no difference"


def test_by_the_real_clock_what_is_plain_is_found():
    result = compare_speed(sleeping(1), sleeping(10), torch.ones(2))
    assert result.verdict == "first is faster"
    assert 3 < result.speedup < 15


@pytest.mark.parametrize(
    ("low", "high", "verdict", "text"),
    [
        (1.2, 1.26, "first is faster", "first is 1.23 times as fast as second (1.2 to 1.26)"),
        (
            0.79365,
            0.83333,
            "second is faster",
            "second is 1.23 times as fast as first (1.2 to 1.26)",
        ),
        (0.99, 1.01, "no difference", "no difference: first is 1 times as fast as second (0.99 to"),
    ],
)
def test_it_reads_as_a_sentence(low, high, verdict, text):
    result = SpeedComparison(
        first_ms=1.0,
        second_ms=1.0,
        speedup=(low * high) ** 0.5,
        speedup_low=low,
        speedup_high=high,
        verdict=verdict,
        num_rounds=8,
        calls_per_round=(1, 1),
        device="cpu",
        largest_difference=None,
    )
    assert str(result).startswith(text)


def test_it_goes_into_json(clock):
    result = compare_speed(clock.taking(1), clock.taking(2), torch.ones(2))
    figures = json.loads(json.dumps(result.to_dict()))
    assert figures["verdict"] == "first is faster"
    assert figures["calls_per_round"] == list(result.calls_per_round)
    assert figures["largest_difference"] == 0.0


# -- Forward and backward --------------------------------------------------------------------------


class CostlyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.004)
        return gradient * 2


def cheap(x):
    return x * 2


def test_the_backward_is_timed_only_if_asked_for():
    x = torch.ones(8, requires_grad=True)
    with_backward = quick(cheap, CostlyBackward.apply, x, grad=True)
    assert with_backward.verdict == "first is faster"
    assert with_backward.second_ms > 4
    assert quick(cheap, CostlyBackward.apply, x).second_ms < 4


def test_gradients_of_the_user_stay_as_they_are():
    model = nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    kept = torch.full_like(model.weight, 7.0)
    model.weight.grad = kept
    quick(model, lambda x: F.linear(x, model.weight, model.bias), x, grad=True)
    assert model.weight.grad is kept
    assert torch.equal(kept, torch.full_like(kept, 7.0))
    assert model.bias.grad is None
    assert x.grad is None


def test_an_argument_with_a_history_can_be_given():
    history = torch.ones(4, requires_grad=True) * 2
    result = quick(torch.exp, lambda x: x.exp(), history, grad=True)
    assert result.largest_difference == 0.0


def test_under_no_grad_gradients_are_recorded_if_asked_for():
    with torch.no_grad():
        quick(cheap, cheap, torch.ones(2, requires_grad=True), grad=True)


def test_leaves_are_found_through_closures_and_once():
    weight = nn.Parameter(torch.ones(3))
    x = torch.ones(3, requires_grad=True)
    roots = [(2 * weight + weight).sum(), x]
    assert {id(leaf) for leaf in leaves_below(roots)} == {id(weight), id(x)}
    assert len(leaves_below(roots)) == 2


def test_nothing_to_differentiate_is_said():
    with pytest.raises(ValueError, match="nothing that first returns depends on"):
        quick(cheap, cheap, torch.ones(2), grad=True)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="nothing that second returns depends on"):
        quick(cheap, lambda x: cheap(x.detach()), x, grad=True, check=False)


# -- The same results ------------------------------------------------------------------------------


def never(function, other, *args, **options):
    """Compare functions that must be refused before anything is timed."""
    counted = Counted(function)
    with pytest.raises(ValueError, match="do not compute the same") as caught:
        quick(counted, other, *args, **options)
    assert counted.calls <= 2
    return str(caught.value)


def test_another_result_is_refused_with_the_largest_difference():
    x = torch.linspace(1, 2, 5)
    message = never(lambda x: x, lambda x: x + 0.5, x)
    assert "result 0 differs by up to 0.5, which is 0.25 of its largest magnitude" in message


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda x: x[:2], r"shape (4,) and (2,)"),
        (lambda x: (x, x), "the one returns 1 tensors, the other 2"),
        (lambda x: torch.full_like(x, float("nan")), "result 0 differs by up to nan"),
        (lambda x: x.clone().index_fill_(0, torch.tensor([1]), float("inf")), "up to inf"),
    ],
)
def test_what_else_differs_is_named(other, words):
    assert words in never(lambda x: x.clone(), other, torch.ones(4))


def test_integers_must_be_equal():
    assert "result 0" in never(lambda x: x, lambda x: x + 1, torch.arange(100_000))


def test_nan_and_infinity_at_the_same_place_are_equal():
    x = torch.tensor([float("nan"), float("inf"), 1.0])
    assert quick(lambda x: x.clone(), lambda x: x + 0, x).largest_difference == 0.0


def test_rounding_is_accepted_by_dtype_and_a_tolerance_can_be_given():
    x = torch.linspace(1, 2, 100)

    def rounded(x):
        return x.bfloat16()

    result = quick(lambda x: x, rounded, x)
    assert 1e-4 < result.largest_difference < 1e-2
    never(lambda x: x, rounded, x, tolerance=1e-4)
    never(lambda x: x, lambda x: x.bfloat16().float(), x)  # fp32 has to be closer than that
    assert quick(lambda x: x, lambda x: x * 2, x, tolerance=2.0).largest_difference == 1.0


def test_without_a_check_other_results_are_timed():
    assert quick(cheap, lambda x: x, torch.ones(2), check=False).largest_difference is None


def test_other_gradients_are_refused():
    class WrongBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 3

    x = torch.ones(4, requires_grad=True)
    message = never(cheap, WrongBackward.apply, x, grad=True)
    assert "the gradient of a leaf of shape (4,)" in message
    assert quick(cheap, WrongBackward.apply, x).largest_difference == 0.0


def test_a_gradient_that_one_leaves_out_is_refused():
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    message = never(torch.mul, lambda x, y: x * y.detach(), x, y, grad=True)
    assert "only one of them computes the gradient" in message


def test_gradients_of_a_softmax_are_not_compared_along_ones():
    # Along ones they are zero whatever the backward does.
    x = torch.randn(4, 5, requires_grad=True)

    def doubled(x):
        y = x.softmax(1)
        return 2 * y - y.detach()

    assert "the gradient of" in never(lambda x: x.softmax(1), doubled, x, grad=True)


def test_a_function_that_changes_its_argument_is_compared_on_a_copy():
    x = torch.ones(4)
    assert quick(lambda x: x.add_(1), lambda x: x + 1, x).largest_difference == 0.0
    never(lambda x: x.zero_(), lambda x: x + 1, torch.ones(4))


def test_random_functions_get_the_same_numbers_and_generators_are_put_back():
    x = torch.ones(64)
    before = torch.get_rng_state()
    result = quick(F.dropout, lambda x: F.dropout(x, 0.5), x)
    assert result.largest_difference == 0.0
    assert torch.equal(torch.get_rng_state(), before)


def test_nested_arguments_and_results_are_walked():
    batch = {"x": torch.ones(3), "names": ["a"], "pair": (torch.ones(2), 4)}

    def work(batch, factor):
        return {"y": batch["x"] * factor, "z": [batch["pair"][0] * batch["pair"][1]]}

    assert quick(work, work, batch, 2).largest_difference == 0.0


# -- What goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"first": 3}, TypeError, r"first must be callable as first\(\*args\)"),
        ({"second": None}, TypeError, "second must be callable"),
        ({"grad": 1}, TypeError, "grad must be True or False"),
        ({"check": "no"}, TypeError, "check must be True or False"),
        ({"flush_l2": None}, TypeError, "flush_l2 must be True or False"),
        ({"budget_s": 0}, ValueError, "budget_s must be > 0"),
        ({"smallest": -1}, ValueError, "smallest must be > 0"),
        ({"tolerance": "1"}, TypeError, "tolerance must be a number"),
        ({"device": "gpu"}, ValueError, "did you mean 'cuda'"),
        ({"gard": True}, TypeError, "did you mean 'grad'"),
    ],
)
def test_bad_arguments_are_named(options, error, words):
    options = dict(options)
    functions = [options.pop("first", cheap), options.pop("second", cheap)]
    with pytest.raises(error, match=words):
        compare_speed(*functions, torch.ones(2), **options)


def test_errors_of_the_functions_come_through():
    def breaks(x):
        raise KeyError("mine")

    for functions in ((breaks, cheap), (cheap, breaks)):
        with pytest.raises(KeyError, match="mine"):
            quick(*functions, torch.ones(2))


def test_a_function_that_fails_later_is_not_left_out_silently():
    def breaks(x):
        if first.calls > 4:
            raise MemoryError("no more")
        return x

    first = Counted(breaks)
    with pytest.raises(
        RuntimeError, match=r"first failed while it was timed.*MemoryError: no more"
    ):
        quick(first, lambda x: x, torch.ones(2))


def test_a_budget_that_does_not_suffice_is_said():
    with pytest.raises(ValueError, match=r"budget_s=0.05 was used up after 0 rounds"):
        compare_speed(sleeping(100), sleeping(100), torch.ones(2), budget_s=0.05)


def test_the_first_calls_are_not_in_the_budget():
    # As with torch.compile, whose first call takes longer than all of the timing.
    def compiled(x):
        if function.calls == 2:  # one call looks where the results are
            time.sleep(0.6)
        return x

    function = Counted(compiled)
    result = compare_speed(function, sleeping(5), torch.ones(2), budget_s=0.5)
    assert result.verdict == "first is faster"
    assert function.calls > 10


def test_where_the_work_is_done_is_seen_in_arguments_or_results():
    meta = torch.ones(2, device="meta")
    assert microbenchmark._device_of(cheap, ({"x": meta},)).type == "meta"
    assert microbenchmark._device_of(lambda x: x.to("meta"), (torch.ones(2),)).type == "meta"
    assert microbenchmark._device_of(cheap, (torch.ones(2),)).type == "cpu"
