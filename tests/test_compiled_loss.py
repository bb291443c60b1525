"""`Plan(compile=...)`: the step trains the same model, and the report says what was compiled."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from functools import partial

import pytest
import torch
from torch import nn, optim

from compiled_training import BATCHES, Deep, compiled_in, counter
from models import MODELS, BatchNormNet, DropoutNet, make_batches, mean_loss
from stepping import make_trainer
from torchfast import CompileError, CompileOptions, Plan, PlanError, Trainer
from torchfast.compiled_loss import CompiledLoss
from torchfast.testing import assert_parity

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

EAGER = CompileOptions(backend="eager")  # traced and run by the same kernels
CUDA = torch.device("cuda")


def fails(graph, inputs):
    raise NotImplementedError("no such kernel")


# -- The same model --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("regions", ["whole", ("*",)], ids=["whole", "parts"])
def test_what_is_compiled_trains_the_same(name, regions):
    result = assert_parity(
        MODELS[name],
        partial(optim.AdamW, lr=0.01),
        mean_loss,
        make_batches(11),
        Plan(compile=CompileOptions(backend="eager", regions=regions)),
        accumulate=2,
        max_grad_norm=1.0,
        lr_scheduler=partial(optim.lr_scheduler.StepLR, step_size=2),
    )
    assert result.loss_error == result.update_error == 0.0
    assert result.report.counters["compile_graphs"] > 0


def test_blocks_are_compiled_once_and_the_keys_stay():
    model = Deep()
    keys = list(model.state_dict())
    trainer = make_trainer(
        net=lambda: model, plan=Plan(compile=CompileOptions(backend="eager", regions="blocks"))
    )
    for batch in make_batches(3):
        trainer.step(batch)
    # The second of the block is for an input that needs a gradient, the third is the loss.
    assert counter(trainer, "graphs") == 3
    assert counter(trainer, "compiled") == 3
    assert list(model.state_dict()) == keys
    assert "3 blocks of Block" in compiled_in(trainer)[0].detail
    trainer.close()
    assert not any("_compiled_call_impl" in vars(block) for block in model.blocks)


def test_a_loss_that_is_compiled_whole_is_one_graph():
    trainer = make_trainer(plan=Plan(compile=EAGER))
    for batch in BATCHES:
        trainer.step(batch)
    assert counter(trainer, "graphs") == 1
    assert counter(trainer, "graph_breaks") == 0
    assert "the loss function with the whole model" in compiled_in(trainer)[0].detail


# -- What else calls the model ---------------------------------------------------------------------


def test_evaluation_runs_what_was_given():
    trainer = make_trainer(net=BatchNormNet, plan=Plan(compile=EAGER), ema=0.9)
    plain = make_trainer(net=BatchNormNet, plan="eager", ema=0.9)
    for batch in BATCHES:
        trainer.step(batch)
        plain.step(batch)
    graphs = counter(trainer, "graphs")
    for ema in (False, True):
        assert trainer.evaluate(BATCHES, ema=ema) == plain.evaluate(BATCHES, ema=ema)
    assert counter(trainer, "graphs") == graphs
    assert copy.deepcopy(trainer.model)(BATCHES[0][0]).shape[0] == len(BATCHES[0][0])


def test_after_close_nothing_is_compiled():
    model = Deep()
    plan = Plan(compile=CompileOptions(backend="eager", regions="blocks"))
    make_trainer(net=lambda: model, plan=plan).close()
    again = make_trainer(net=lambda: model, plan=plan)  # else refused, as compiled by another
    again.step(BATCHES[0])
    assert counter(again, "graphs") > 0


# -- What really happened --------------------------------------------------------------------------


def test_nothing_is_called_compiled_that_was_not():
    trainer = make_trainer(plan=Plan(compile=EAGER))
    with torch.compiler.set_stance("force_eager"):
        for batch in BATCHES:
            trainer.step(batch)
    assert counter(trainer, "graphs") == 0
    told = [d for d in compiled_in(trainer) if d.outcome == "stepped aside"]
    assert any("force_eager" in d.detail for d in told)
    assert not [d for d in compiled_in(trainer) if d.outcome == "applied"]


def test_a_graph_break_is_told_with_its_line():
    def breaking(model, batch):
        loss = mean_loss(model, batch)
        torch._dynamo.graph_break()
        return loss * 2.0

    trainer = make_trainer(loss_fn=breaking, plan=Plan(compile=EAGER))
    trainer.step(BATCHES[0])
    assert any("test_compiled_loss.py" in d.detail for d in compiled_in(trainer))


def test_what_cannot_be_compiled_runs_as_it_is(caplog):
    plan = Plan(compile=CompileOptions(backend=fails))
    result = assert_parity(DropoutNet, partial(optim.SGD, lr=0.1), mean_loss, BATCHES, plan)
    assert result.loss_error == result.update_error == 0.0
    assert "NotImplementedError: no such kernel" in caplog.text


def test_what_cannot_be_compiled_raises_if_asked():
    trainer = make_trainer(plan=Plan(compile=CompileOptions(backend=fails, on_failure="raise")))
    with pytest.raises(CompileError, match="no such kernel"):
        trainer.step(BATCHES[0])


def test_a_recompile_in_the_middle_of_a_run_is_warned_of_once(caplog):
    trainer = make_trainer(plan=Plan(compile=EAGER))
    with caplog.at_level(logging.WARNING):
        for batch in make_batches(12):
            trainer.step(batch)
        assert "compiled a function again" not in caplog.text
        for size in (3, 5):
            for inputs, targets in make_batches(8):
                trainer.step((inputs[:size], targets[:size]))
    assert caplog.text.count("compiled a function again") == 1


def test_a_model_with_a_counter_is_told(caplog):
    """As a step whose state is a Python number: each value is another graph."""

    class Counting(BatchNormNet):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * (1.0 + 0.0 * self.calls)

    trainer = make_trainer(net=Counting, plan=Plan(compile=EAGER))
    for batch in make_batches(4):
        trainer.step(batch)
    assert counter(trainer, "recompiles") > 0


# -- Which way -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "graphs"), [("auto", 0), (False, 0), (EAGER, 1)])
def test_auto_is_for_cuda(value, graphs):
    trainer = make_trainer(plan=Plan(compile=value))
    trainer.step(BATCHES[0])
    assert counter(trainer, "graphs") == graphs


@pytest.mark.parametrize(
    ("mode", "within", "alone"),
    [
        ("reduce-overhead", "default", "reduce-overhead"),
        ("max-autotune", "max-autotune-no-cudagraphs", "max-autotune"),
        ("default", "default", "default"),
    ],
)
def test_within_a_graph_modes_make_no_graphs(mode, within, alone):
    for cuda_graph, device, expected in (
        (True, CUDA, within),
        (False, CUDA, alone),
        (True, torch.device("cpu"), alone),
    ):
        plan = Plan(compile=CompileOptions(mode=mode), cuda_graph=cuda_graph)
        loss = CompiledLoss(DropoutNet(), mean_loss, plan, device)
        assert loss._compiled.options.mode == expected
        assert any("graphs of its own" in d.detail for d in loss.decisions()) == (expected != mode)
        loss.close()


def test_what_lies_in_graphs_of_torchs_own_is_copied_out(monkeypatch):
    begun = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    static = torch.ones((), requires_grad=True) * 2
    for mode, copies in (("reduce-overhead", True), ("default", False)):
        begun.clear()
        plan = Plan(compile=CompileOptions(mode=mode))
        loss = CompiledLoss(DropoutNet(), mean_loss, plan, CUDA)
        monkeypatch.setattr(loss, "_function", lambda model, batch: (static, {"seen": static}))
        value, metrics = loss(None, None)
        assert (value is static, metrics["seen"] is static) == (not copies, not copies)
        assert value.requires_grad
        loss.begin()
        assert len(begun) == copies
        loss.close()


def test_graphs_of_torchs_own_in_an_evaluation(monkeypatch):
    """Of two evaluations both results can be read; and one within a step keeps its gradients."""
    begun = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    static = torch.ones(())
    plan = Plan(compile=CompileOptions(mode="reduce-overhead", regions=(nn.Linear,)))
    loss = CompiledLoss(DropoutNet(), lambda *_: (static, {"seen": static}), plan, CUDA)
    value, metrics = loss.as_given(None, None)
    assert value is not static
    assert metrics["seen"] is not static
    assert len(begun) == 1
    loss.begin()
    assert len(begun) == 2
    loss.as_given(None, None)  # between forward_backward and update
    assert len(begun) == 2
    loss.after_step()
    loss.as_given(None, None)
    assert len(begun) == 3
    loss.close()


def test_a_plan_in_json():
    plan = Plan(compile=CompileOptions(mode="max-autotune", regions=("blocks.*",), cache="x"))
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan(compile=CompileOptions()) == Plan(compile=True) != Plan(compile="auto")
    with pytest.raises(PlanError, match="no argument 'mod'"):
        Plan.from_json('{"compile": {"mod": "default"}}')
    with pytest.raises(TypeError, match="compile must be True, False, 'auto' or CompileOptions"):
        Plan(compile="always")


# -- One after another -----------------------------------------------------------------------------


def broken_loss(model, batch):
    loss = mean_loss(model, batch)
    torch._dynamo.graph_break()
    return loss * 2.0


def test_each_trainer_compiles_for_itself(caplog):
    """Behind a graph break lie the user's own functions, of which others left compiled code."""
    for _ in range(10):  # more than torch compiles of a function by default
        trainer = make_trainer(loss_fn=broken_loss, plan=Plan(compile=EAGER))
        for batch in BATCHES:
            trainer.step(batch)
        assert counter(trainer, "graphs") == 2
        assert counter(trainer, "recompiles") == 0
        trainer.close()
    assert not [r for r in caplog.records if r.name.startswith("torchfast")]


@pytest.mark.parametrize("regions", ["whole", "blocks"])
@pytest.mark.parametrize("closes", [True, False])
def test_what_was_compiled_is_freed(regions, closes):
    compiled = []

    def backend(graph, inputs):
        compiled.append(weakref.ref(graph))
        return graph.forward

    options = CompileOptions(backend=backend, regions=regions, mark_dynamic=True)
    trainer = make_trainer(net=Deep, plan=Plan(compile=options))
    for inputs, targets in BATCHES:
        for size in (8, 5):
            trainer.step((inputs[:size], targets[:size]))
    assert any(graph() is not None for graph in compiled)
    model = trainer.model
    if closes:
        trainer.close()
    else:
        del model
    del trainer
    for _ in range(2):  # what the first sets free may lie in cycles
        gc.collect()
    left = [graph() for graph in compiled if graph() is not None]
    if regions == "blocks" and not closes:
        # What stands around them is in the user's own functions, where torch keeps it.
        assert not [graph for graph in left if "layer_norm" in graph.code]
        # The next one that is closed frees it.
        del left
        with make_trainer(net=Deep, plan=Plan(compile=options)) as trainer:
            trainer.step(BATCHES[0])
        del trainer
        gc.collect()
        left = [graph() for graph in compiled if graph() is not None]
    assert not left


def test_a_trainer_that_is_gone_or_replaced_does_not_stand_in_the_way():
    plan = Plan(compile=CompileOptions(backend="eager", regions="blocks"))
    model = Deep()
    trainer = make_trainer(net=lambda: model, plan=plan)
    del trainer
    gc.collect()
    trainer = make_trainer(net=lambda: model, plan=plan)
    # As in a notebook cell that is run twice.
    again = Trainer(model, trainer.optimizer, mean_loss, plan)
    again.step(BATCHES[0])
    assert counter(again, "graphs") > 0
    with pytest.raises(ValueError, match="close that, or the Trainer that made it, first"):
        make_trainer(net=lambda: model, plan=plan)


def test_a_trainer_that_cannot_be_made_leaves_the_layout():
    model = BatchNormNet()
    before = model.conv.weight.stride()
    plan = Plan(channels_last=True, compile=CompileOptions(backend="eager", regions=("nope",)))
    with pytest.raises(ValueError, match="regions names 'nope'"):
        make_trainer(net=lambda: model, plan=plan)
    assert model.conv.weight.stride() == before
