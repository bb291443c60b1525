"""What can be said about compilation, and what cannot."""

from __future__ import annotations

import copy
import json
import math
import pickle
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from torchfast import Plan, PlanError
from torchfast.compiler import CompiledModule, CompileOptions, compile_callable


def test_what_is_changed_is_shown_and_json_ready():
    assert CompileOptions().changed == {}
    options = CompileOptions(
        mode="reduce-overhead",
        regions=[nn.Linear, "blocks.*"],
        dynamic=False,
        timeout_s=math.inf,
        cache=Path("cache"),
    )
    assert options.regions == (nn.Linear, "blocks.*")
    assert options.changed == {
        "mode": "reduce-overhead",
        "regions": ["Linear", "blocks.*"],
        "dynamic": False,
        "timeout_s": math.inf,
        "cache": "cache",
    }
    assert json.loads(json.dumps(options.changed))["regions"] == ["Linear", "blocks.*"]
    assert repr(CompileOptions(fullgraph=True)) == "CompileOptions(fullgraph=True)"
    assert CompileOptions(backend=print).changed == {"backend": "print"}
    assert hash(CompileOptions(regions=["a"])) == hash(CompileOptions(regions=("a",)))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"mode": "fast"}, PlanError, r"mode must be one of \["),
        ({"mode": 1}, TypeError, "mode must be one of"),
        (
            {"regions": "block"},
            PlanError,
            r"got 'block'; did you mean 'blocks'\?; for one path write \('block',\)",
        ),
        ({"regions": 3}, TypeError, "regions must be one of"),
        ({"regions": (3,)}, TypeError, "regions must hold paths such as"),
        ({"regions": (int,)}, TypeError, "regions must hold paths such as"),
        ({"regions": ()}, PlanError, "regions must name at least one region"),
        ({"dynamic": 1}, TypeError, r"dynamic must be True or False, or None .*, got 1 \(int\)"),
        ({"fullgraph": None}, TypeError, "fullgraph must be True or False"),
        ({"backend": 3}, TypeError, "backend must be the name of a torch.compile backend"),
        ({"backend": "eager", "mode": "max-autotune"}, PlanError, "has a meaning for backend="),
        ({"on_failure": "warn"}, PlanError, "on_failure must be one of"),
        ({"timeout_s": 0}, ValueError, "timeout_s must be > 0"),
        ({"timeout_s": None}, TypeError, "timeout_s must be a number > 0"),
        ({"cache": 3}, TypeError, "cache must be the path of a folder or None"),
        ({"cache": "", "mode": "auto"}, ValueError, "cache='' names no folder"),
        ({"cache": "~/cache", "mode": "auto"}, ValueError, "cache='~/cache' begins with '~'"),
        ({"cache": __file__, "mode": "auto"}, ValueError, "cache=.* is a file, expected a folder"),
        ({"mark_dynamic": "yes"}, TypeError, "mark_dynamic must be True or False"),
        ({"option": {}}, TypeError, r"CompileOptions\(\) has no argument 'option'"),
    ],
)
def test_what_cannot_be_said(arguments, error, words):
    with pytest.raises(error, match=words):
        CompileOptions(**arguments)


def test_the_handle_says_the_same():
    with pytest.raises(PlanError, match="regions must be one of"):
        CompiledModule(nn.Linear(2, 2), regions="block")
    with pytest.raises(TypeError, match="did you mean 'regions'"):
        CompiledModule(nn.Linear(2, 2), region="blocks")


def test_a_path_is_kept_as_text(tmp_path):
    options = CompileOptions(cache=tmp_path)
    assert options == CompileOptions(cache=str(tmp_path))
    plan = Plan(compile=options)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("options", ["max-autotune", {"mode": "default"}])
def test_options_of_a_function_are_options(options):
    with pytest.raises(TypeError, match=r"options must be CompileOptions or None, .*got ['{].*\)"):
        compile_callable(torch.sin, options)


def test_the_model_of_a_function_is_a_module():
    with pytest.raises(TypeError, match="model must be torch's Module, got"):
        compile_callable(torch.sin, model=torch.sin)


def test_what_was_compiled_of_a_function_is_not_copied():
    with compile_callable(torch.sin, CompileOptions(backend="eager")) as compiled:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="a CompiledCallable stands for code of this"):
                copied(compiled)


@pytest.mark.parametrize("function", [None, 3])
def test_what_stands_around_is_a_function(function):
    with (
        CompiledModule(nn.Linear(2, 2), backend="eager") as handle,
        pytest.raises(TypeError, match="function must be"),
    ):
        handle.around(function)


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (lambda loss: None, TypeError, "loss_fn must return"),
        (lambda loss: loss.expand(3), ValueError, "must return a scalar loss"),
        (lambda loss: (loss, {"loss": loss.detach()}), None, ""),
    ],
)
def test_a_search_takes_what_a_trainer_takes(result, error, words):
    model = nn.Linear(2, 2)
    with CompiledModule(model, mode="auto", budget_s=0.001) as handle:
        raises = nullcontext() if error is None else pytest.raises(error, match=words)
        with raises:
            handle.search(lambda model, x: result(model(x).mean()), torch.ones(3, 2))
    with (
        CompiledModule(model, mode="auto") as handle,
        pytest.raises(TypeError, match="takes outputs and targets"),
    ):
        handle.search(nn.functional.mse_loss, torch.ones(3, 2))


def test_auto_is_for_what_can_measure():
    assert CompileOptions(mode="auto").mode == "auto"
    with pytest.raises(ValueError, match="mode='auto' has to be measured first"):
        compile_callable(print, CompileOptions(mode="auto"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard": "ddp"}, "does not go with shard"),
        ({"shard": "fsdp"}, "does not go with shard"),
        ({"offload": "optimizer"}, "offload of the optimizer does not go with"),
    ],
)
@pytest.mark.parametrize("update", [True, "auto"])
def test_plans_whose_update_cannot_be_compiled(options, message, update):
    with pytest.raises(PlanError, match=message):
        Plan(compile=CompileOptions(update=update), **options)
    Plan(compile=True, **options)


@pytest.mark.parametrize("value", ["yes", None, 1, 0.5])
def test_bad_values_of_update(value):
    with pytest.raises(TypeError, match="update must be True, False or 'auto', got"):
        CompileOptions(update=value)


def test_a_plan_that_compiles_the_update_goes_through_json():
    plan = Plan(compile=CompileOptions(update="auto"))
    assert Plan.from_json(plan.to_json()) == plan
    assert repr(plan) == "Plan(compile=CompileOptions(update='auto'))"
