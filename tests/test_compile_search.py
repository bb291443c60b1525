"""A search keeps the fastest way that computes the same, in time."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from compiled_training import Deep
from models import BatchNormNet
from search_lab import CPU, Lab, off_by, statuses
from torchfast._core.compare import differences
from torchfast._core.rng import get_rng_state
from torchfast.compiler import CompileOptions, mode_search
from torchfast.compiler.candidates import Candidate
from torchfast.compiler.parity import Outcome, ParityTolerance, errors_between
from torchfast.compiler.search import _peak_bytes


def wrong_gradient(model):
    """Make one gradient a tenth too large."""
    return next(model.parameters()).register_hook(lambda grad: grad * 1.1)


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


def buffer_error(expected, actual):
    def outcome(buffers):
        held = {name: torch.full((8,), float(value)) for name, value in buffers.items()}
        return Outcome(loss=1.0, gradients={}, buffers=held, precision="float32")

    return errors_between(outcome(expected), outcome(actual)).buffer


def test_an_average_that_is_zero_up_to_rounding_may_be_another_zero():
    """As that of a norm behind another one, with nothing but a convolution between them."""
    zero = {"norm.running_mean": 1e-9, "norm.running_var": 1.0}
    assert buffer_error(zero, zero | {"norm.running_mean": -3e-9}) < 1e-6
    # One that is not is far off, and so is the variance.
    assert buffer_error(zero, zero | {"norm.running_mean": 1e-2}) == pytest.approx(1.0, rel=1e-3)
    # The mean has the scale of deviations and not of variances, and counters have none.
    wide = {"norm.running_mean": 0.1, "norm.running_var": 900.0, "norm.num_batches_tracked": 1}
    assert buffer_error(wide, wide | {"norm.running_mean": 0.0}) > 0.3
    assert buffer_error(wide, wide | {"norm.num_batches_tracked": 2}) == 1.0
    assert buffer_error(zero, zero | {"norm.running_var": 0.9}) == pytest.approx(0.1, rel=1e-3)
    lost = {"norm.running_mean": 1.0, "norm.running_var": math.inf}
    assert buffer_error(lost, lost | {"norm.running_mean": 500.0}) > 100
    # Nobody tells how large something else in another module is.
    apart = {"norm.average": 1e-9, "table": 1.0}
    assert buffer_error(apart, apart | {"norm.average": 2e-9}) == pytest.approx(1.0)


def test_regions_that_are_named_are_no_whole_model():
    model = Deep()

    def names(regions):
        options = CompileOptions(mode="auto", regions=regions)
        choices = mode_search._choices(model, options, CPU, in_graph=False)
        return {choice.name.partition(":")[0] for choice in choices}

    assert names(("blocks.0",)) == {"eager", "regions"}
    assert names("whole") == {"eager", "whole"}
    assert names("blocks") == {"eager", "blocks"}


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


def fail():
    raise RuntimeError("no kernel\nfor this")


def test_a_candidate_that_raises_is_recorded_with_its_reason():
    lab = Lab()

    def fail_late():
        lab.now += 3.0
        fail()

    def cannot():
        raise ValueError("cannot be put in force")

    receipt = lab.search(
        lab.candidate("fails", doing=fail_late),
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


def test_a_budget_that_is_used_up_is_said():
    lab = Lab()
    receipt = lab.search(lab.candidate("a", 0.5), lab.candidate("b", 0.5), budget_s=2.5)
    assert receipt.choice == "eager"
    assert not receipt.is_answer
    assert "nothing could be compared with eager within budget_s=2.5 (" in receipt.why
    assert f"({receipt.elapsed_s:.3g} s were used)" in receipt.why
    assert "a and b left out: no time was left to compile it (0 s); raise budget_s" in receipt.why


def test_what_ran_and_was_not_timed_is_said():
    lab = Lab()
    receipt = lab.search(
        lab.candidate("fails", doing=fail), lab.candidate("slow", 20.0, 1.0), budget_s=180.0
    )
    assert statuses(receipt) == {"eager": "measured", "fails": "failed", "slow": "measured"}
    assert receipt["slow"].ratio_high is None
    assert not receipt.is_answer
    assert "within budget_s=180" in receipt.why
    assert (
        "slow ran and was right, but too little time was left to time it; raise budget_s"
        in receipt.why
    )
    assert "fails failed: RuntimeError: no kernel" in receipt.why


def test_failures_are_an_answer_and_said():
    lab = Lab()
    receipt = lab.search(
        lab.candidate("fails", doing=fail), lab.candidate("wrong", 0.5, damage=off_by(2.0))
    )
    assert receipt.is_answer
    assert receipt.why.startswith("nothing but eager ran and was right: fails failed: RuntimeError")
    assert "; wrong wrong: its loss is off by" in receipt.why
    assert lab.search().why == "nothing but eager was there to be tried"


def test_beside_what_was_compared_what_was_not_is_said():
    lab = Lab()
    receipt = lab.search(
        lab.candidate("a", 1.2, 50.0), lab.candidate("b", 0.5, 60.0), budget_s=140.0
    )
    assert receipt.choice == "eager"
    assert receipt.is_answer
    assert receipt.why.startswith(
        "nothing was faster than eager by more than the noise; b left out"
    )
    assert "raise budget_s" in receipt.why


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


@pytest.mark.parametrize("unit", range(1, 7))
def test_one_that_fails_at_any_unit_is_ruled_out(unit):
    lab, calls = Lab(), []

    def doing():
        calls.append(None)
        if len(calls) == unit:
            raise torch.OutOfMemoryError("CUDA out of memory")

    receipt = lab.search(lab.candidate("greedy", 0.5, doing=doing), lab.candidate("good", 0.5))

    assert receipt["greedy"].status == "failed"
    assert "CUDA out of memory" in receipt["greedy"].reason
    assert receipt.choice == "good"
