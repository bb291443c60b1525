"""Plan and PrecisionOptions as values: presets, repr, JSON, and what they refuse."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest

from torchfast import CompileOptions, NonfiniteOptions, Plan, PlanError, PrecisionOptions

FP16 = PrecisionOptions(format="fp16", init_scale=1024.0, growth_interval=10)

PLANS = [
    Plan(),
    Plan.preset("fast"),
    Plan(precision="tf32"),
    Plan(channels_last=True, optimizer="fused"),
    Plan(precision=FP16),
    Plan(precision=PrecisionOptions(format="fp16", growth_factor=1.5, backoff_factor=0.25)),
    Plan(precision=PrecisionOptions(format="bf16")),
    Plan(nonfinite="skip"),
    Plan(compile=True),
    Plan(compile="auto"),
    Plan(compile=CompileOptions(mode="max-autotune", regions=("blocks.*", "head"))),
    Plan(nonfinite=NonfiniteOptions(stop_after=5), precision=FP16),
]


def test_eager_and_exact_change_no_number():
    assert Plan.preset("eager") == Plan()
    assert Plan.preset("exact") == Plan(cuda_graph=True)
    assert Plan() == Plan(
        precision="as_given",
        channels_last=False,
        optimizer="as_given",
        nonfinite="propagate",
        compile=False,
        cuda_graph=False,
    )


def test_fast_is_what_its_docstring_says():
    assert Plan.preset("fast") == Plan(
        precision="auto",
        channels_last=True,
        cudnn_benchmark=True,
        optimizer="fused",
        compile="auto",
        cuda_graph=True,
    )


def test_every_preset_has_a_plan():
    assert Plan.PRESETS == ("eager", "exact", "fast")
    assert all(isinstance(Plan.preset(name), Plan) for name in Plan.PRESETS)


def test_a_plan_is_taken_by_name_or_as_it_is():
    plan = Plan(precision="bf16")
    assert Plan.of(plan) is plan
    assert Plan.of("fast") == Plan.preset("fast")


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_repr_is_the_call_that_makes_the_plan(plan):
    names = {cls.__name__: cls for cls in (CompileOptions, NonfiniteOptions, PrecisionOptions)}
    made = eval(repr(plan), {"Plan": Plan, **names})
    assert made == plan
    assert repr(made) == repr(plan)


def test_repr_leaves_defaults_out():
    assert repr(Plan()) == "Plan()"
    assert repr(Plan(precision="bf16")) == "Plan(precision='bf16')"
    assert repr(PrecisionOptions()) == "PrecisionOptions(format='as_given')"
    assert repr(NonfiniteOptions()) == "NonfiniteOptions(action='skip')"
    assert repr(FP16) == ("PrecisionOptions(format='fp16', init_scale=1024.0, growth_interval=10)")


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_json_goes_both_ways(plan):
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text
    assert isinstance(json.loads(text), dict)


def test_json_holds_what_was_changed():
    assert Plan().to_json() == "{}"
    assert json.loads(Plan(precision=FP16, channels_last=True).to_json()) == {
        "channels_last": True,
        "precision": {"format": "fp16", "init_scale": 1024.0, "growth_interval": 10},
    }
    assert json.loads(Plan(nonfinite="skip").to_json()) == {"nonfinite": "skip"}
    assert json.loads(Plan(nonfinite=NonfiniteOptions(stop_after=5)).to_json()) == {
        "nonfinite": {"action": "skip", "stop_after": 5}
    }
    assert Plan.from_json('{"nonfinite": {"stop_after": 5}}').nonfinite_options.stop_after == 5


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_a_plan_is_a_value(plan):
    same = pickle.loads(pickle.dumps(plan))
    assert same == plan
    assert hash(same) == hash(plan)
    assert copy.deepcopy(plan) == plan
    assert {plan: 1}[same] == 1


def test_a_plan_has_one_way_to_be_written():
    assert Plan(precision=PrecisionOptions()) == Plan()
    assert Plan(precision=PrecisionOptions(format="bf16")) == Plan(precision="bf16")
    assert Plan(precision=FP16) != Plan(precision="fp16")
    assert Plan(nonfinite=NonfiniteOptions()) == Plan(nonfinite="skip")
    assert Plan(nonfinite=NonfiniteOptions(action="propagate")) == Plan()
    assert Plan(nonfinite=NonfiniteOptions(stop_after=1)) != Plan(nonfinite="skip")


def test_plans_that_differ_are_not_equal():
    assert len(set(PLANS)) == len(PLANS)


def test_replace_changes_what_is_named_and_checks_it():
    fast = Plan.preset("fast")
    changed = fast.replace(precision="fp16")
    assert changed.precision == "fp16"
    assert changed.replace(precision="auto") == fast
    assert fast.replace() == fast == Plan.preset("fast")
    with pytest.raises(PlanError, match="'bf17'"):
        fast.replace(precision="bf17")
    with pytest.raises(TypeError, match="no argument 'channel_last'; did you mean 'channels_last'"):
        fast.replace(channel_last=True)


@pytest.mark.parametrize("value", [Plan(), PrecisionOptions(), NonfiniteOptions()])
def test_a_plan_is_frozen(value):
    field = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, "bf16")


@pytest.mark.parametrize("make", [Plan, PrecisionOptions, NonfiniteOptions])
def test_fields_are_given_by_name(make):
    with pytest.raises(TypeError, match="positional argument"):
        make("bf16")


def test_precision_by_name_and_by_options_is_one_thing_to_a_step():
    assert Plan(precision="bf16").precision_options == PrecisionOptions(format="bf16")
    assert Plan(precision=FP16).precision_options is FP16


def test_nonfinite_by_name_and_by_options_is_one_thing_to_a_step():
    options = NonfiniteOptions(stop_after=5)
    assert Plan().nonfinite_options == NonfiniteOptions(action="propagate")
    assert Plan(nonfinite="skip").nonfinite_options == NonfiniteOptions()
    assert Plan(nonfinite=options).nonfinite_options is options


def test_scaling_is_what_was_set():
    assert FP16.scaling == {"init_scale": 1024.0, "growth_interval": 10}
    assert PrecisionOptions(format="fp16").scaling == {}


REFUSED = [
    (lambda: Plan.preset("fats"), PlanError, r"plan must be one of .*'fats'; did you mean 'fast'"),
    (lambda: Plan.preset("nonsense"), PlanError, r"\['eager', 'exact', 'fast'\], got 'nonsense'$"),
    (lambda: Plan.of(3), TypeError, r"plan must be one of .* or a Plan, got 3 \(int\)"),
    (lambda: Plan.of(None), TypeError, r"got None \(NoneType\)"),
    (lambda: Plan(precision="bf32"), PlanError, r"precision must be one of .*got 'bf32'; did you"),
    (lambda: Plan(precision=16), TypeError, r"PrecisionOptions or Float8Options, got 16 \(int\)"),
    (lambda: Plan(optimizer="fuse"), PlanError, r"optimizer must be .*'fuse'; did you mean 'fused"),
    (lambda: Plan(optimizer=True), TypeError, r"optimizer must be one of .* got True \(bool\)"),
    (lambda: Plan(channels_last=1), TypeError, r"channels_last must be True or False, got 1"),
    (lambda: Plan(precison="bf16"), TypeError, r"no argument 'precison'; did you mean 'precision'"),
    (
        lambda: PrecisionOptions(formt="bf16"),
        TypeError,
        r"PrecisionOptions\(\) has no argument 'formt'; did you mean 'format'",
    ),
    (
        lambda: PrecisionOptions(format="bf16", init_scale=8.0),
        PlanError,
        r"init_scale belongs to loss scaling.*precision='bf16'; drop it, or use fp16",
    ),
    (
        lambda: PrecisionOptions(growth_interval=5, backoff_factor=0.5),
        PlanError,
        r"backoff_factor, growth_interval belongs .*precision='as_given'",
    ),
    (lambda: PrecisionOptions(format="fp16", init_scale=0), ValueError, r"init_scale must be > 0"),
    (
        lambda: PrecisionOptions(format="fp16", init_scale=float("nan")),
        ValueError,
        r"init_scale must be > 0, got nan",
    ),
    (
        lambda: PrecisionOptions(format="fp16", growth_factor=1.0),
        PlanError,
        r"growth_factor must be > 1, got 1.0",
    ),
    (
        lambda: PrecisionOptions(format="fp16", backoff_factor=1.0),
        PlanError,
        r"backoff_factor must be < 1, got 1.0",
    ),
    (
        lambda: PrecisionOptions(format="fp16", growth_interval=0),
        ValueError,
        r"growth_interval must be >= 1, got 0",
    ),
    (
        lambda: PrecisionOptions(format="fp16", growth_interval=2.0),
        TypeError,
        r"growth_interval must be an int >= 1, got 2.0 \(float\)",
    ),
    (
        lambda: Plan(nonfinite="skp"),
        PlanError,
        r"nonfinite must be one of \['propagate', 'skip'\], got 'skp'; did you mean 'skip'",
    ),
    (
        lambda: Plan(nonfinite=True),
        TypeError,
        r"nonfinite must be one of .* or NonfiniteOptions, got True \(bool\)",
    ),
    (lambda: Plan(nonfinite=None), TypeError, r"or NonfiniteOptions, got None"),
    (
        lambda: NonfiniteOptions(action="propagate", stop_after=3),
        PlanError,
        r"stop_after=3 counts skipped updates, but nonfinite='propagate' skips none; drop it",
    ),
    (lambda: NonfiniteOptions(stop_after=0), ValueError, r"stop_after must be >= 1, got 0"),
    (
        lambda: NonfiniteOptions(stop_after=2.0),
        TypeError,
        r"stop_after must be an int >= 1, got 2.0 \(float\)",
    ),
    (
        lambda: NonfiniteOptions(stop_afer=2),
        TypeError,
        r"NonfiniteOptions\(\) has no argument 'stop_afer'; did you mean 'stop_after'",
    ),
    (
        lambda: Plan.from_json('{"nonfinite": {"action": "skipp"}}'),
        PlanError,
        r"not a plan in JSON: nonfinite must be .*'skipp'; did you mean 'skip'",
    ),
    (lambda: Plan.from_json('{"nonfinite": 3}'), PlanError, r"not a plan in JSON: nonfinite must"),
    (lambda: Plan.from_json("{"), PlanError, r"not a plan in JSON"),
    (lambda: Plan.from_json("[1]"), PlanError, r"a plan in JSON is an object, got list"),
    (
        lambda: Plan.from_json('{"optimiser": "fused"}'),
        PlanError,
        r"Plan has no field 'optimiser'; did you mean 'optimizer'",
    ),
    (
        lambda: Plan.from_json('{"precision": {"format": "fp16", "init_scal": 2}}'),
        PlanError,
        r"not a plan in JSON: .*'init_scal'; did you mean 'init_scale'",
    ),
    (
        lambda: Plan.from_json('{"channels_last": 1}'),
        PlanError,
        r"not a plan in JSON: channels_last must be True or False, got 1",
    ),
    (lambda: Plan.from_json('{"precision": "bf17"}'), PlanError, r"got 'bf17'; did you mean"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[r[2][:30] for r in REFUSED])
def test_what_is_refused_and_how(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert type(caught.value) is error
