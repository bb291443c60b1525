"""Bad input: the error has the right type, and says name, value and what to do.

One table; the numbers are those of the list of bad inputs that the library was designed against.
"""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import TensorDataset

from bad_input import BATCHES, SGD, build, fit, frozen, load, on_meta, step, twice
from models import DropoutNet, mean_loss
from torchfast import (
    CUDAGraphStep,
    EmptyEpochError,
    LossError,
    MicroBatches,
    Plan,
    PlanError,
    PrecisionOptions,
    PrefetchingLoader,
    StateMismatchError,
    TrainStep,
    UnsupportedDeviceError,
    UnsupportedOptimizerError,
)
from torchfast._core.device import resolve_device
from torchfast.testing import assert_parity

SAMPLES = TensorDataset(torch.ones(4, 8), torch.ones(4))


class Row(NamedTuple):
    """One bad input: its number, what is done, and what must be said of it."""

    number: str
    call: object
    error: type
    message: str


ROWS = [
    # --- TypeError
    Row("1", lambda: fit(3), TypeError, r"loader must be an iterable of batches, got 3 \(int\)"),
    Row("1", lambda: build().prefetch(None), TypeError, r"got None \(NoneType\)"),
    Row("1 evaluate", lambda: fit(evaluate=3), TypeError, r"iterable.*got 3 \(int\)"),
    *(
        Row("7", partial(build, loss_fn=loss_fn), TypeError, rf"and {name} cannot be \({why}")
        for loss_fn, name, why in (
            (lambda m, x, y: 0, r"<lambda>\(m, x, y\)", "missing a required argument: 'y'"),
            (lambda batch: 0, r"<lambda>\(batch\)", "too many positional arguments"),
            (partial(lambda m, b, c: 0, c=1, b=2), r"partial\(m, \*, b=2, c=1\)", "too many"),
        )
    ),
    *(
        Row("1 data set", call, TypeError, rf"{name} must .* a TensorDataset is a data set of samp")
        for name, call in (
            ("loader", lambda: fit(SAMPLES, epochs=1)),
            ("loader", lambda: build().evaluate(SAMPLES)),
            ("evaluate", lambda: fit(evaluate=SAMPLES)),
        )
    ),
    *(
        Row("1 evaluate", call, TypeError, r"evaluate \(generator\) is an iterator, which serves")
        for call in (
            lambda: fit(evaluate=(b for b in BATCHES), steps=4, evaluate_every=2),
            lambda: fit(evaluate=(b for b in BATCHES), epochs=2),
        )
    ),
    Row("4", lambda: build("net"), TypeError, r"model must be a torch.nn.Module, got str"),
    Row("4 class", lambda: build(DropoutNet), TypeError, r"model must be .* got type"),
    Row("5", lambda: build(loss_fn=None), TypeError, r"loss_fn must be callable as .* got None"),
    Row("5 callback", lambda: fit(callbacks=[3]), TypeError, r"callbacks\[0\] must be .* got 3"),
    Row("5 count", lambda: fit(count_items=8), TypeError, r"count_items must be callable.* got 8"),
    Row(
        "6",
        lambda: build(optimizer=optim.AdamW),
        TypeError,
        r"got the class AdamW; write functools.partial\(AdamW, lr=...\)",
    ),
    Row("6", lambda: build(optimizer=3), TypeError, r"optimizer must be a .* got 3 \(int\)"),
    Row("6", lambda: build(optimizer=None), TypeError, r"optimizer must be a .* got None"),
    Row("6 made", lambda: build(optimizer=list), TypeError, r"optimizer must be .* class list"),
    Row("6 made", lambda: build(optimizer=lambda p: 3), TypeError, r"optimizer call.* got int"),
    Row("7", lambda: step(lambda m, b: 1.5), TypeError, r"loss_fn must return .* got float '1.5'"),
    Row("7", lambda: step(lambda m, b: None), TypeError, r"loss_fn must return .* got NoneType"),
    Row(
        "7 output object",
        lambda: step(lambda m, b: {"loss": m(b[0]).sum()}),
        TypeError,
        r"got dict .*; if the model returns an object, return its .loss",
    ),
    Row(
        "7 tuple",
        lambda: step(lambda m, b: (m(b[0]).sum(), {}, 1, 2)),
        TypeError,
        r"got a tuple of \(Tensor, dict, int, int\)",
    ),
    Row(
        "7 metrics",
        lambda: step(lambda m, b: (m(b[0]).sum(), 3)),
        TypeError,
        r"second return value must be a mapping of metric names to scalars, got int '3'",
    ),
    Row(
        "7 metric",
        lambda: step(lambda m, b: (m(b[0]).sum(), {"top": "1"})),
        TypeError,
        r"metric 'top' must be a scalar tensor or a number, got str '1'",
    ),
    Row(
        "7 weight",
        lambda: step(lambda m, b: (m(b[0]).sum(), {}, [6])),
        TypeError,
        r"weight must be a scalar tensor or a number, got list",
    ),
    Row(
        "7 some weights",
        lambda: step(
            lambda m, b: (m(b).sum(), {}, None if b.shape[0] == 2 else 3),
            MicroBatches([torch.ones(2, 8), torch.ones(3, 8)]),
            accumulate=2,
        ),
        TypeError,
        r"a weight for 1 of 2 micro-batches; return one always or never",
    ),
    Row("8", lambda: build(device=object()), TypeError, r"device must be a string .* got <object"),
    Row("8", lambda: build(device=True), TypeError, r"device must be .* got True \(bool\)"),
    Row("8", lambda: build(device=1.0), TypeError, r"device must be .* got 1.0 \(float\)"),
    Row("12", lambda: fit(callbacks=print), TypeError, r"callbacks must be a list .* got builtin"),
    Row(
        "13",
        lambda: fit(iter(BATCHES), epochs=2),
        TypeError,
        r"loader \(list_iterator\) is an iterator, which serves one epoch, but epochs=2; pass",
    ),
    Row(
        "14 Trainer",
        lambda: build(accumulation=2),
        TypeError,
        r"Trainer\(\) has no argument 'accumulation'; did you mean 'accumulate'\?.*accepted: model",
    ),
    Row(
        "14 TrainStep",
        lambda: TrainStep(DropoutNet(), SGD, mean_loss, max_norm=1.0),
        TypeError,
        r"TrainStep\(\) has no argument 'max_norm'; did you mean 'max_grad_norm'",
    ),
    Row("14 fit", lambda: fit(step=3), TypeError, r"fit\(\) has no argument 'step'.*'steps'\?"),
    Row("14 Plan", lambda: Plan(precison="bf16"), TypeError, r"'precison'; did you mean 'precisi"),
    Row(
        "14 PrecisionOptions",
        lambda: PrecisionOptions(init_scal=2.0),
        TypeError,
        r"PrecisionOptions\(\) has no argument 'init_scal'; did you mean 'init_scale'",
    ),
    Row(
        "14 assert_parity",
        lambda: assert_parity(DropoutNet, SGD, mean_loss, BATCHES, tolerence=1),
        TypeError,
        r"assert_parity\(\) has no argument 'tolerence'; did you mean 'tolerance'",
    ),
    Row(
        "15",
        lambda: len(build().prefetch(iter(BATCHES))),
        TypeError,
        r"loader \(list_iterator\) has no length; give steps=",
    ),
    Row(
        "22",
        lambda: build(accumulate=2).step(BATCHES[:2]),
        TypeError,
        r"accumulate=2 a step takes MicroBatches, got list; iterate over trainer.prefetch\(load",
    ),
    Row(
        "22 bare batch",
        lambda: build(accumulate=2).forward_backward(BATCHES[0]),
        TypeError,
        r"a step takes MicroBatches, got tuple",
    ),
    Row(
        "scheduler class",
        lambda: build(lr_scheduler=schedulers.StepLR),
        TypeError,
        r"lr_scheduler must be an instance or a callable .* got the class StepLR",
    ),
    Row("scheduler", lambda: build(lr_scheduler=3), TypeError, r"lr_scheduler must be .* got 3"),
    Row("int", lambda: fit(steps=2.0), TypeError, r"steps must be an int >= 0, got 2.0 \(float\)"),
    Row("int", lambda: fit(epochs=True), TypeError, r"epochs must be an int .* got True \(bool\)"),
    Row("int", lambda: build(accumulate=2.0), TypeError, r"accumulate must be an int >= 1, got 2"),
    Row("26", lambda: build(max_grad_norm="1"), TypeError, r"max_grad_norm must be a number > 0"),
    Row("9", lambda: fit(log_path=3), TypeError, r"^log_path.*3"),
    Row(
        "scheduler made",
        lambda: build(lr_scheduler=lambda o: None),
        TypeError,
        r"lr_scheduler.*got NoneType",
    ),
    Row("evaluate", lambda: fit(evaluate=lambda m: None), TypeError, r"evaluate.*got NoneType"),
    Row("25", lambda: build(plan=3), TypeError, r"plan must be one of .* or a Plan, got 3 \(int\)"),
    Row(
        "parity",
        lambda: assert_parity(DropoutNet, SGD([torch.ones(1)]), mean_loss, BATCHES),
        TypeError,
        r"optimizer must be (a )?callable",
    ),
    # --- ValueError
    Row("18", lambda: build(device="gpu"), ValueError, r"device='gpu' .*; did you mean 'cuda'\?"),
    Row("18", lambda: build(device="gpu:1"), ValueError, r"device='gpu:1' .* did you mean 'cuda'"),
    Row("18", lambda: build(device="cudo"), ValueError, r"types are \['cpu'.*did you mean 'cuda'"),
    Row("18", lambda: build(device="cuda:x"), ValueError, r"device='cuda:x' .* 'cuda:0'"),
    Row("19", lambda: fit(steps=-1), ValueError, r"steps must be >= 0, got -1"),
    Row("19", lambda: fit(epochs=-2), ValueError, r"epochs must be >= 0, got -2"),
    Row("20", lambda: fit(steps=None), ValueError, r"fit needs steps= or epochs=, got neither"),
    Row("21", lambda: build(accumulate=0), ValueError, r"accumulate must be >= 1, got 0"),
    Row(
        "21",
        lambda: PrefetchingLoader([], torch.device("cpu"), accumulate=0),
        ValueError,
        r"accumulate must be >= 1, got 0",
    ),
    Row("24", lambda: fit(log_every=0), ValueError, r"log_every must be >= 1, got 0"),
    Row("24", lambda: fit(evaluate=[], evaluate_every=0), ValueError, r"evaluate_every must be >="),
    Row("24", lambda: fit(evaluate_every=2), ValueError, r"evaluate_every=2 needs evaluate=, got"),
    Row("25", lambda: build(plan="fats"), PlanError, r"plan must be .*'fats'; did you mean 'fast'"),
    Row(
        "25",
        lambda: Plan(precision="half"),
        PlanError,
        r"precision must be one of \['as_given', .*'fp8'\], got 'half'",
    ),
    *(
        Row(
            "26",
            partial(build, max_grad_norm=value),
            ValueError,
            rf"max_grad_norm must be > 0, got {value}",
        )
        for value in (float("nan"), 0, -1.0)
    ),
    Row("26", lambda: fit(flops_per_item=0), ValueError, r"flops_per_item must be > 0, got 0"),
    Row("26", lambda: fit(peak_flops=-1), ValueError, r"peak_flops must be > 0, got -1"),
    Row(
        "27",
        lambda: step(lambda m, b: m(b[0]).sum(0)),
        ValueError,
        r"scalar loss, got shape \(4,\); reduce it with .mean\(\)",
    ),
    Row("27", lambda: step(lambda m, b: m(b[0])[:0]), ValueError, r"got shape \(0, 4\)"),
    Row(
        "27 metric",
        lambda: step(lambda m, b: (m(b[0]).sum(), {"per_class": m(b[0])})),
        ValueError,
        r"metric 'per_class' must be a scalar, got shape \(6, 4\)",
    ),
    Row(
        "27 weight",
        lambda: step(lambda m, b: (m(b[0]).sum(), {}, torch.ones(2))),
        ValueError,
        r"weight must be a scalar, got shape \(2,\)",
    ),
    Row("31", lambda: build(nn.ReLU()), ValueError, r"model has no parameters \(ReLU\), so there"),
    Row(
        "31",
        lambda: build(optimizer=lambda p: SGD([{"params": []}])),
        ValueError,
        r"optimizer holds no parameters; pass it model.parameters\(\)",
    ),
    Row(
        "32",
        twice,
        ValueError,
        r"a parameter twice \(positions 0 and 2, shape \(4, 8\)\).*; give it once",
    ),
    Row(
        "35",
        lambda: Plan(precision=PrecisionOptions(format="bf16", init_scale=2.0)),
        PlanError,
        r"init_scale belongs to loss scaling, .* precision='bf16'; drop it, or use fp16",
    ),
    Row(
        "scheduler of another",
        lambda: build(lr_scheduler=schedulers.StepLR(SGD(DropoutNet().parameters()), 1)),
        ValueError,
        r"lr_scheduler \(StepLR\) drives another optimizer .* pass a callable",
    ),
    Row(
        "plateau",
        lambda: fit(trainer=build(lr_scheduler=lambda o: schedulers.ReduceLROnPlateau(o))),
        ValueError,
        r"ReduceLROnPlateau is stepped on evaluations: fit needs evaluate=",
    ),
    Row(
        "plateau",
        lambda: fit(
            trainer=build(lr_scheduler=lambda o: schedulers.ReduceLROnPlateau(o, mode="max")),
            evaluate=BATCHES,
        ),
        ValueError,
        r"mode='max'\) would be stepped with the loss of each evaluation, which is to fall",
    ),
    Row(
        "plateau",
        lambda: fit(
            trainer=build(lr_scheduler=lambda o: schedulers.ReduceLROnPlateau(o)),
            evaluate=lambda model: {"accuracy": 0.5},
        ),
        ValueError,
        r"needs evaluate= to return 'loss', got \['accuracy'\]",
    ),
    Row("progress", lambda: fit(progress="loud"), ValueError, r"^progress.*'loud'"),
    Row(
        "parity",
        lambda: assert_parity(DropoutNet, SGD, mean_loss, []),
        ValueError,
        r"assert_parity needs at least one batch, got none",
    ),
    # --- RuntimeError
    Row(
        "37",
        lambda: step(lambda m, b: m(b[0]).sum().detach()),
        LossError,
        r"without a graph \(requires_grad=False\).*check for no_grad\(\), .detach\(\)",
    ),
    Row(
        "37 frozen",
        lambda: build(frozen(), loss_fn=lambda m, b: m(b[0]).sum()).step(BATCHES[0]),
        LossError,
        r"parameters are all frozen",
    ),
    Row(
        "45",
        lambda: load(lambda s: s.update(format=2)),
        StateMismatchError,
        r"state has format 2, this version reads up to 1; upgrade torchfast",
    ),
    Row("10", lambda: load(lambda s: [1]), TypeError, r"state must be the mapping .* got list"),
    Row(
        "46 missing",
        lambda: load(lambda s: s["model"].__delitem__("layers.3.bias")),
        StateMismatchError,
        r"does not fit DropoutNet \(1 keys\): missing 'layers.3.bias'",
    ),
    Row(
        "46 unexpected",
        lambda: load(lambda s: s["model"].update(b=torch.ones(1))),
        StateMismatchError,
        r"\(1 keys\): unexpected 'b'",
    ),
    Row(
        "46 shape",
        lambda: load(lambda s: s["model"].update({"layers.3.bias": torch.ones(5)})),
        StateMismatchError,
        r"'layers.3.bias' has shape \(5,\), expected \(4,\)",
    ),
    Row(
        "48 list",
        lambda: fit([], epochs=1),
        EmptyEpochError,
        r"epoch 0 yielded no batch after 0 steps",
    ),
    Row(
        "48",
        lambda: fit(iter([]), epochs=1),
        EmptyEpochError,
        r"epoch 0 yielded no batch after 0 steps; the loader is empty",
    ),
    Row(
        "48 used up",
        lambda: fit(iter(BATCHES), steps=10),
        EmptyEpochError,
        r"epoch 1 yielded no batch after 3 steps; .* pass one that iter\(\) can start again",
    ),
    Row(
        "48 evaluation",
        lambda: build().evaluate([]),
        EmptyEpochError,
        r"evaluation got no batch; its loader is empty or used up",
    ),
    Row(
        "LBFGS",
        lambda: build(optimizer=optim.LBFGS),
        TypeError,
        r"got the class LBFGS",
    ),
    Row(
        "LBFGS",
        lambda: build(optimizer=partial(optim.LBFGS, lr=1.0)),
        UnsupportedOptimizerError,
        r"LBFGS.step\(\) needs a closure .* use AdamW, SGD",
    ),
    Row("meta", on_meta, UnsupportedDeviceError, r"device='meta' .* has no meta; use device='cpu'"),
]


@pytest.mark.parametrize("row", ROWS, ids=[f"{i} #{row.number}" for i, row in enumerate(ROWS)])
def test_bad_input_is_refused_with_name_value_and_remedy(row):
    with pytest.raises(row.error, match=row.message) as caught:
        row.call()
    assert type(caught.value) is row.error


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:99", torch.device("cuda", 1)])
def test_cuda_where_there_is_none(device):
    with pytest.raises(UnsupportedDeviceError, match=rf"device='{device}' .* has no cuda; use"):
        build(device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_graph_where_there_is_no_cuda_names_no_device_that_has_none_either():
    with pytest.raises(UnsupportedDeviceError, match=r"has no CUDA; call the step itself, or use"):
        CUDAGraphStep(lambda: None)


def test_modules_of_the_package_are_reached_by_their_names():
    statement = (
        "import torchfast; torchfast.losses.linear_cross_entropy; torchfast.testing.Tolerance"
    )
    subprocess.run([sys.executable, "-c", statement], check=True)


def test_a_device_index_that_does_not_exist_lists_those_that_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"'cuda:99' does not .* \['cuda:0', 'cuda:1'\]") as caught:
        resolve_device("cuda:99", nn.Linear(1, 1))
    assert type(caught.value) is ValueError


def test_a_refusal_at_construction_leaves_model_and_optimizer_alone():
    model = DropoutNet()
    optimizer = optim.AdamW(model.parameters())
    groups = copy.deepcopy(optimizer.state_dict())
    for options in ({"accumulate": 0}, {"max_grad_norm": -1.0}, {"device": "gpu"}):
        with pytest.raises(ValueError, match=r"must be|did you mean"):
            build(model, optimizer, plan="fast", **options)
    assert optimizer.state_dict() == groups


def test_a_bad_scheduler_leaves_the_optimizer_alone():
    model = DropoutNet()
    optimizer = optim.AdamW(model.parameters())
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(TypeError, match="lr_scheduler must be"):
        build(model, optimizer, plan="fast", lr_scheduler=3)
    assert optimizer.state_dict() == before


def test_a_refusal_of_fit_trains_nothing():
    trainer = build()
    for options in ({"log_every": 0}, {"steps": -1}, {"callbacks": [3]}, {"progress": "loud"}):
        with pytest.raises((ValueError, TypeError)):
            fit(trainer=trainer, **options)
    assert trainer.num_steps == 0


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.int64(1), 1])
def test_numbers_of_numpy_are_numbers(number):
    trainer = build(max_grad_norm=number, accumulate=np.int32(2))
    assert (trainer._step.max_grad_norm, trainer._step.accumulate) == (float(number), 2)


@pytest.mark.parametrize("value", [np.bool_(True), np.array(0.5), torch.tensor(0.5)])
def test_what_only_looks_like_a_number_is_refused(value):
    with pytest.raises(TypeError, match="max_grad_norm must be a number > 0"):
        build(max_grad_norm=value)


def unpacked(function):
    @functools.wraps(function)
    def call(model, batch):
        return function(model, *batch)

    return call


class Anything:
    def __getattr__(self, name):
        return getattr(lambda model, x, y: None, name)

    def __call__(self, model, batch):
        return mean_loss(model, batch)


DECORATED = unpacked(lambda model, x, y: mean_loss(model, (x, y)))


@pytest.mark.parametrize("loss_fn", [DECORATED, Anything()])
def test_what_can_be_called_with_a_model_and_a_batch_is_taken(loss_fn):
    build(loss_fn=loss_fn).step(BATCHES[0])


@pytest.mark.parametrize("options", [{"steps": 4, "evaluate_every": 4}, {"epochs": 1}])
def test_a_generator_serves_one_evaluation(options):
    assert fit(evaluate=(b for b in BATCHES), **options).evaluation
