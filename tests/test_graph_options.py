"""What can be said about graphs, what is refused and how, what is told, and how it ends."""

from __future__ import annotations

import gc
import json
import weakref
from functools import partial

import pytest
import torch
from torch import nn, optim

from models import DropoutNet, make_batches, mean_loss
from tape import CPU, counts
from torchfast import ClosedError, CUDAGraphOptions, Plan, PlanError, Trainer
from torchfast._core.compare import differences
from torchfast._core.errors import UnsupportedDeviceError
from torchfast.graphs import CUDAGraphStep
from torchfast.graphs import step as step_module

ADAMW = partial(optim.AdamW, lr=0.01, fused=True)


def fn(x):
    return x


def model_and_optimizer(make=ADAMW):
    torch.manual_seed(0)
    model = DropoutNet()
    return model, make(model.parameters())


def captured(model, optimizer, **options):
    def step(batch):
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    return CUDAGraphStep(step, state=[model, optimizer], **options)


# --- what is refused ------------------------------------------------------------------------------

OPTIONS = [
    ({"warm_up_steps": 0}, ValueError, r"warm_up_steps must be >= 1, got 0"),
    ({"warm_up_steps": 1.0}, TypeError, r"warm_up_steps must be an int >= 1, got 1.0 \(float\)"),
    ({"warm_up_steps": True}, TypeError, r"warm_up_steps must be an int >= 1, got True"),
    ({"max_graphs": 0}, ValueError, r"max_graphs must be >= 1, got 0"),
    ({"max_graphs": "8"}, TypeError, r"max_graphs must be an int >= 1, got '8' \(str\)"),
    (
        {"new_shapes": "captur"},
        PlanError,
        r"new_shapes must be one of \['capture', 'eager'\], got 'captur'; did you mean 'capture'",
    ),
    ({"new_shapes": None}, TypeError, r"new_shapes must be one of .*got None \(NoneType\)"),
    (
        {"on_failure": "rais"},
        PlanError,
        r"on_failure must be one of \['eager', 'raise'\], got 'rais'; did you mean 'raise'",
    ),
    ({"on_failure": True}, TypeError, r"on_failure must be one of .*got True \(bool\)"),
    ({"check": 1}, TypeError, r"check must be True or False, got 1 \(int\)"),
    ({"warmup_steps": 3}, TypeError, r"no argument 'warmup_steps'; did you mean 'warm_up_steps'"),
]


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS)
@pytest.mark.parametrize("take", [CUDAGraphOptions, partial(CUDAGraphStep, fn, device="cpu")])
def test_a_bad_option_is_refused(take, options, error, message, tape):
    with pytest.raises(error, match=message):
        take(**options)


STEPS = [
    (("fn",), {}, TypeError, r"fn must be callable as fn\(batch\), got 'fn' \(str\)"),
    ((fn,), {"state": [object()]}, TypeError, r"state\[0\] must be a module, .*got object"),
    ((fn,), {"state": [None]}, TypeError, r"state\[0\] must be .*got NoneType"),
    ((fn,), {"numerics": "clse"}, ValueError, r"\['exact', 'close'\], got 'clse'; did you mean"),
    ((fn,), {"device": "cpuu"}, ValueError, r"cpuu"),
    ((fn,), {"device": 1.5}, TypeError, r"device .*got 1.5"),
    ((fn,), {"stat": []}, TypeError, r"no argument 'stat'; did you mean 'state'"),
]


@pytest.mark.parametrize(("given", "options", "error", "message"), STEPS)
def test_a_bad_step_is_refused(given, options, error, message, tape):
    with pytest.raises(error, match=message):
        CUDAGraphStep(*given, **options)


def test_state_that_is_one_module_says_that_it_takes_a_list(tape):
    with pytest.raises(TypeError, match=r"state must be .*list"):
        CUDAGraphStep(fn, state=nn.Linear(2, 2))


def test_a_refused_step_leaves_the_optimizer_as_it_was(tape):
    model, optimizer = model_and_optimizer()
    given = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    for options in ({"numerics": "no"}, {"max_graphs": 0}, {"state": [model, optimizer, 1]}):
        with pytest.raises((TypeError, ValueError)):
            CUDAGraphStep(fn, **{"state": [model, optimizer], **options})
    now = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert now == given


PLANS = [
    ({"cuda_graph": 1}, TypeError, r"cuda_graph must be True, False or CUDAGraphOptions, got 1"),
    ({"cuda_graph": "yes"}, TypeError, r"cuda_graph must be .*got 'yes'"),
    ({"cuda_graph": None}, TypeError, r"cuda_graph must be .*got None"),
    ({"cuda_graph": {"max_graphs": 2}}, TypeError, r"cuda_graph must be .*CUDAGraphOptions"),
    ({"cuda_graphs": True}, TypeError, r"'cuda_graphs'; did you mean 'cuda_graph'"),
]


@pytest.mark.parametrize(("options", "error", "message"), PLANS)
def test_a_bad_plan_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        Plan(**options)


# --- a plan as a value ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        True,
        CUDAGraphOptions(),
        CUDAGraphOptions(warm_up_steps=11, max_graphs=2),
        CUDAGraphOptions(new_shapes="eager", on_failure="raise", check=False),
    ],
)
def test_a_plan_with_options_comes_back_from_json_and_from_repr(options):
    plan = Plan(cuda_graph=options)
    assert Plan.from_json(plan.to_json()) == plan
    assert eval(repr(plan), {"Plan": Plan, "CUDAGraphOptions": CUDAGraphOptions}) == plan
    assert plan.graph_options == (CUDAGraphOptions() if options is True else options)


def test_options_as_by_default_are_the_plain_switch():
    assert Plan(cuda_graph=CUDAGraphOptions()) == Plan(cuda_graph=True) == Plan.preset("exact")
    assert json.loads(Plan(cuda_graph=CUDAGraphOptions()).to_json()) == {"cuda_graph": True}
    assert Plan().graph_options is None
    assert Plan.preset("eager").graph_options is None


def test_json_holds_only_what_differs():
    plan = Plan(cuda_graph=CUDAGraphOptions(max_graphs=2))
    assert json.loads(plan.to_json()) == {"cuda_graph": {"max_graphs": 2}}


@pytest.mark.parametrize("value", ['{"max_graphs": 0}', '{"size": 1}', "3", '"on"', "[]"])
def test_json_with_bad_options_is_no_plan(value):
    with pytest.raises(PlanError, match="not a plan in JSON"):
        Plan.from_json(f'{{"cuda_graph": {value}}}')


def test_options_are_shown_by_what_differs_and_cannot_change():
    options = CUDAGraphOptions(max_graphs=2, check=False)
    assert repr(options) == "CUDAGraphOptions(max_graphs=2, check=False)"
    with pytest.raises(AttributeError):
        options.max_graphs = 3
    assert hash(options) == hash(CUDAGraphOptions(check=False, max_graphs=2))


@pytest.mark.parametrize("steps", [1, 5])
def test_a_trainer_warms_up_as_long_as_its_plan_says(steps, tape):
    plan = Plan(cuda_graph=CUDAGraphOptions(warm_up_steps=steps))
    trainer = Trainer(DropoutNet(), ADAMW, mean_loss, plan)
    for batch in make_batches(8):
        trainer.step(batch)
    assert counts(trainer) == (1, 8 - steps, steps, 1)


# --- without graphs -------------------------------------------------------------------------------


def test_on_the_cpu_a_trainer_steps_aside_without_a_warning(caplog):
    trainer = Trainer(DropoutNet(), ADAMW, mean_loss)
    trainer.step(make_batches(1)[0])
    (told,) = [d for d in trainer.report().decisions if d.lever == "cuda_graph"]
    assert told.outcome == "left alone"
    assert told.detail == "there are no graphs on cpu, only on CUDA"
    assert trainer.report().to_dict()["counters"] == {"steps": 1}
    assert not caplog.records
    assert "capturable" in trainer.optimizer.param_groups[0]
    assert not trainer.optimizer.param_groups[0]["capturable"]


def test_a_plan_without_graphs_says_that_steps_run_as_they_are(tape):
    trainer = Trainer(DropoutNet(), ADAMW, mean_loss, "eager")
    trainer.step(make_batches(1)[0])
    assert tape == []
    assert "every step runs as it is" in str(trainer.report())


def test_on_the_cpu_a_bare_step_is_refused_and_changes_nothing():
    model, optimizer = model_and_optimizer()
    with pytest.raises(UnsupportedDeviceError, match="no graphs on 'cpu', only on CUDA; call the"):
        captured(model, optimizer)
    assert optimizer.param_groups[0]["capturable"] is False


def test_a_bare_step_computes_where_parameters_are_that_no_offload_keeps_on_the_host(tape):
    step = CUDAGraphStep(fn, state=[torch.zeros(1), torch.zeros(1, device="meta")])
    assert step.device.type == "meta"


@pytest.mark.parametrize("pinned", [False, True])
def test_a_state_in_pinned_memory_belongs_to_a_step_of_the_device(pinned, tape, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: pinned)
    asked = []
    monkeypatch.setattr(step_module, "check_device", lambda d, data: asked.append(d) or CPU)
    assert CUDAGraphStep(fn, state=[torch.zeros(1)]).device == CPU
    assert asked == ["cuda"] * pinned


# --- what is told ---------------------------------------------------------------------------------


def test_the_report_of_a_bare_step_in_words_and_as_a_dict(tape):
    step = captured(*model_and_optimizer())
    for batch in [*make_batches(6), *make_batches(2, size=3)]:
        step(batch)
    report = step.report()
    text = str(report)
    assert text.splitlines()[0].endswith(".step) on cpu")
    assert "the update of AdamW can be in the graph, as fused capturable" in text
    assert "6x8 float32, 6 int64: 3 replays" in text
    assert "3x8 float32, 3 int64: 1 replays" in text
    found = report.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert {d["lever"] for d in found["decisions"]} == {"cuda_graph"}
    assert set(found["counters"]) >= {"graphs", "replays", "eager steps", "captures", "capture_s"}
    assert counts(step) == (2, 4, 4, 2)
    assert report.stepped_aside == ()


def test_an_update_that_stays_outside_is_warned_of_once_with_its_remedy(tape, caplog):
    trainer = Trainer(DropoutNet(), partial(optim.AdamW, lr=0.01), mean_loss)
    for batch in make_batches(6):
        trainer.step(batch)
    (warning,) = [r.getMessage() for r in caplog.records]
    assert "the update of AdamW is not in the graph" in warning
    assert "fused=True" in warning


def test_close_numerics_take_a_form_that_rounds(tape):
    model, optimizer = model_and_optimizer(partial(optim.AdamW, lr=0.01))
    step = captured(model, optimizer, numerics="close")
    for batch in make_batches(6):
        step(batch)
    assert optimizer.param_groups[0]["fused"] is True
    assert counts(step) == (1, 3, 3, 1)


def test_a_step_names_what_it_runs(tape):
    assert repr(CUDAGraphStep(fn, device="cpu")) == "CUDAGraphStep(fn, device='cpu')"
    assert repr(CUDAGraphStep(DropoutNet(), device="cpu")).startswith("CUDAGraphStep(DropoutNet,")


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bare", [False, True], ids=["trainer", "bare"])
def test_closing_puts_the_optimizer_back_and_ends_the_step(bare, tape):
    model, optimizer = model_and_optimizer(partial(ADAMW, weight_decay=0.1))
    given = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    defaults = dict(optimizer.defaults)
    step = captured(model, optimizer) if bare else Trainer(model, optimizer, mean_loss)
    run = step if bare else step.step
    for batch in make_batches(6):
        run(batch)
    assert optimizer.param_groups[0]["capturable"] is True
    assert optimizer.state_dict()["param_groups"][0]["capturable"] is False
    step.close()
    step.close()
    now = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert now == given
    assert dict(optimizer.defaults) == defaults
    with pytest.raises(ClosedError, match=r"closed.*; build a new"):
        run(make_batches(1)[0])
    assert "closed" in str(step.report()) or counts(step)[0] == 0


def test_a_closed_step_leaves_a_plain_loop_that_goes_on_exactly(tape):
    states = []
    for is_captured in (False, True):
        model, optimizer = model_and_optimizer()
        torch.manual_seed(1)
        trainer = Trainer(model, optimizer, mean_loss, "exact" if is_captured else "eager")
        for batch in make_batches(6):
            trainer.step(batch)
        trainer.close()
        for batch in make_batches(3, seed=1):
            optimizer.zero_grad()
            mean_loss(model, batch).backward()
            optimizer.step()
        states.append([model.state_dict(), optimizer.state_dict()])
    assert not differences(*states)


def test_a_step_closes_at_the_end_of_a_with_block_even_if_it_failed(tape):
    model, optimizer = model_and_optimizer()
    step = captured(model, optimizer)

    def fails():
        with step:
            step(make_batches(1)[0])
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fails()
    assert optimizer.param_groups[0]["capturable"] is False
    with pytest.raises(ClosedError):
        step(make_batches(1)[0])


def test_a_second_step_takes_over_the_optimizer_of_a_closed_one(tape):
    model, optimizer = model_and_optimizer()
    for _ in range(2):
        with captured(model, optimizer) as step:
            for batch in make_batches(6):
                step(batch)
            assert counts(step) == (1, 3, 3, 1)
    assert optimizer.param_groups[0]["capturable"] is False


@pytest.mark.parametrize("is_bare", [False, True])
def test_what_nobody_has_any_more_keeps_no_graph(is_bare, tape):
    """The optimizer goes on, and takes states."""
    model, optimizer = model_and_optimizer()
    if is_bare:
        step = captured(model, optimizer)
    else:
        step = Trainer(model, optimizer, mean_loss, ema=0.9).step
    for batch in make_batches(6):
        step(batch)
    store = step._engine.store if is_bare else step.__self__._step._graph._graph.store
    gone = weakref.ref(store.graphs[0].graph)
    del step, store
    gc.collect()
    assert gone() is None
    optimizer.load_state_dict(optimizer.state_dict())
    mean_loss(model, make_batches(1)[0]).backward()
    optimizer.step()


def test_an_error_of_the_step_itself_comes_through(tape):
    def loss_fn(model, batch):
        if len(batch[0]) == 5:
            raise KeyError("bad batch")
        return mean_loss(model, batch)

    trainer = Trainer(DropoutNet(), ADAMW, loss_fn)
    for batch in make_batches(5):
        trainer.step(batch)
    for _ in range(3):  # its warm-up, its capture, and as it is
        with pytest.raises(KeyError, match="bad batch"):
            trainer.step(make_batches(1, size=5)[0])
    trainer.step(make_batches(1)[0])
    assert counts(trainer)[1] == 3
