"""Recompute in a Trainer: the plain loop to the bit, eager and captured; close when compiled."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import nn

from recomputed import GPT, GPTBlock, ResNet, image_loss, images, make, token_loss, tokens, train
from tape import Twins, taped
from torchfast import MicroBatches, Plan, PlanError, Recompute, RecomputeOptions, Trainer
from torchfast._core.compare import differences
from torchfast.compiler import CompiledModule, CompileOptions
from torchfast.testing import assert_parity

adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
EAGER_BACKEND = CompileOptions(backend="aot_eager", regions="blocks")


def trainer(model, plan, loss_fn=token_loss, **options):
    return Trainer(model, adamw(model.parameters()), loss_fn, plan, **options)


@pytest.mark.parametrize("what", ["blocks", "selective", RecomputeOptions(every=2)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_plan_that_recomputes_is_the_plain_loop(what, accumulate):
    results = []
    for plan in (Plan(), Plan(recompute=what)):
        torch.manual_seed(0)
        model = GPT(dropout=0.2)
        with trainer(model, plan, accumulate=accumulate, max_grad_norm=1.0) as own:
            losses = []
            for number in range(3):
                group = [tokens(seed=2 * number + n) for n in range(accumulate)]
                losses.append(own.step(MicroBatches(group)))
            results.append((losses, own.state_dict()["model"], torch.get_rng_state()))
            assert ("forward" in vars(model.blocks[0])) == bool(plan.recompute)
        assert "forward" not in vars(model.blocks[0])
    assert differences(*results) == []


@pytest.mark.parametrize("what", ["blocks", "selective"])
@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_within_a_captured_step(monkeypatch, what, name):
    net = functools.partial(GPT, dropout=0.2) if name == "gpt" else ResNet
    loss_fn, data = (token_loss, tokens) if name == "gpt" else (image_loss, images)
    with taped(monkeypatch):
        twins = Twins(net, sgd, loss_fn, plan=Plan(cuda_graph=True, recompute=what))
        for seed in range(6):
            twins.step(data(seed=seed))
        assert twins.differences() == []
        counters = twins.captured.report().counters
        assert counters["replays"] >= 1, counters


def test_the_tape_can_tell_other_masks(monkeypatch):
    """The negative control: a second run whose generator is not set back within the graph."""
    with taped(monkeypatch), monkeypatch.context() as patch:
        twins = Twins(functools.partial(GPT, dropout=0.2), sgd, token_loss,
                      plan=Plan(cuda_graph=True, recompute="blocks"))  # fmt: skip
        patch.setattr("tape.Tape.set_rng_state", lambda self, state: None)
        for seed in range(6):
            twins.step(tokens(seed=seed))
        # Either the graph is refused, since it is not what eager steps are, or it trains otherwise.
        assert twins.captured.report().counters["replays"] == 0 or twins.differences() != []


def test_parity_is_judged_on_a_model_with_recompute():
    assert_parity(
        lambda: GPT(dropout=0.1),
        adamw,
        token_loss,
        [tokens(seed=n) for n in range(3)],
        plan=Plan(recompute="blocks"),
    )


@pytest.mark.parametrize(("what", "regions"), [("blocks", "blocks"), ("selective", "whole")])
def test_under_the_compiler(what, regions):
    plain, loss_fn, batch = make("resnet")
    expected = train(copy.deepcopy(plain), loss_fn, batch)
    recompute = Recompute(plain, what)
    with CompiledModule(plain, backend="aot_eager", regions=regions) as compiled:
        found = train(plain, loss_fn, batch)
        assert set(compiled.status.values()) == {"compiled"}
        counted = compiled.report().counters
        assert counted["graph_breaks"] == 0
        assert counted["graphs"] == 1  # its blocks share code
    recompute.close()
    assert int(found["state"]["stages.0.norm1.num_batches_tracked"]) == 3
    for name, tensor in expected["state"].items():
        torch.testing.assert_close(found["state"][name], tensor, rtol=1e-4, atol=1e-5)


class Broken(nn.Module):
    """The compiler has to leave it."""

    def __init__(self):
        super().__init__()
        self.line, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        y = self.norm(self.line(x))
        torch._dynamo.graph_break()
        return torch.tanh(y)


@pytest.mark.parametrize("what", ["blocks", "selective"])
def test_a_block_that_the_compiler_has_to_leave(what):
    torch.manual_seed(0)
    model = nn.Sequential(Broken(), Broken())

    def loss_fn(model, x):
        return model(x).square().mean()

    batch = torch.randn(4, 8)
    expected = train(copy.deepcopy(model), loss_fn, batch)
    recompute = Recompute(model, what)
    with CompiledModule(model, backend="eager", regions="blocks"):
        found = train(model, loss_fn, batch)
    recompute.close()
    assert differences(expected["state"], found["state"]) == []


def saved_bytes(model, batch):
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = token_loss(model, batch)
    loss.backward()
    return sum(sizes.values())


def test_the_compiler_saves_less():
    sizes = []
    for what in (None, "selective", "blocks"):
        model, _, batch = make("gpt")
        recompute = None if what is None else Recompute(model, what)
        with CompiledModule(model, backend="aot_eager", regions="blocks"):
            saved_bytes(model, batch)
            sizes.append(saved_bytes(model, batch))
        if recompute is not None:
            recompute.close()
    assert sizes[0] > sizes[1] > sizes[2]
    assert sizes[2] < sizes[0] / 2


def test_a_budget_stands_while_the_step_compiles_and_no_longer():
    seen = []

    def backend(graph, _):
        seen.append(functorch_config.activation_memory_budget)
        return graph.forward

    model = GPT()
    plan = Plan(recompute=0.25, compile=CompileOptions(backend=backend))
    with trainer(model, plan) as own:
        own.step(tokens())
        assert functorch_config.activation_memory_budget == 1.0
        assert "25% of the memory" in str(own.report())
    assert set(seen) == {0.25}
    seen.clear()
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    assert seen == [1.0]


def test_a_budget_without_the_compiler_is_refused():
    with pytest.raises(PlanError, match=r"recompute=0.5 is a memory budget .* compile=False"):
        Plan(recompute=0.5)


def test_a_budget_where_auto_does_not_compile_steps_aside(caplog):
    with trainer(GPT(), Plan(recompute=0.5, compile="auto")) as own:
        own.step(tokens())
        assert any(d.lever == "recompute" for d in own.report().stepped_aside)
    assert "compile=True does here too" in caplog.text


@pytest.mark.parametrize(
    "plan",
    [
        Plan(recompute="blocks"),
        Plan(recompute="selective", cuda_graph=True),
        Plan(recompute=0.5, compile=True),
        Plan(recompute=("blocks.*", "head")),
        Plan(recompute=RecomputeOptions(selective=True, every=2, share=0.3)),
    ],
)
def test_json(plan):
    assert Plan.from_json(plan.to_json()) == plan
    assert eval(repr(plan)) == plan


def test_equal_plans_are_equal():
    assert Plan(recompute=RecomputeOptions()) == Plan(recompute="blocks")
    assert Plan(recompute=RecomputeOptions(selective=True)) == Plan(recompute="selective")
    assert Plan(recompute={"a"}) == Plan(recompute=["a"])
    assert Plan.from_json(Plan(recompute=(GPTBlock,)).to_json()).recompute_options == (
        RecomputeOptions(regions=("GPTBlock",))
    )


def test_a_model_that_recomputes_by_itself_is_left_alone(caplog):
    model = GPT()
    model.blocks[0].gradient_checkpointing = True
    with trainer(model, Plan(recompute="blocks")) as own:
        own.step(tokens())
        (aside,) = [d for d in own.report().stepped_aside if d.lever == "recompute"]
    assert "gradient_checkpointing is on in its module blocks.0" in aside.detail
    assert "nothing is recomputed" in caplog.text


def test_a_name_that_is_not_there_is_an_error_and_changes_nothing():
    model = GPT()
    with pytest.raises(ValueError, match=r"recompute names 'block\.0', which no module"):
        trainer(model, Plan(recompute=("block.0",)))
    assert "forward" not in vars(model.blocks[0])


def test_a_second_trainer_of_the_same_optimizer_takes_over():
    model = GPT()
    optimizer = adamw(model.parameters())
    first = Trainer(model, optimizer, token_loss, Plan(recompute="blocks"))
    second = Trainer(model, optimizer, token_loss, Plan(recompute="selective"))
    assert not second.report().stepped_aside
    second.step(tokens())
    second.close()
    first.close()
    assert "forward" not in vars(model.blocks[0])


def test_the_averaged_model_is_a_plain_one():
    model = GPT()
    with trainer(model, Plan(recompute="blocks"), ema=0.9) as own:
        own.step(tokens())
        averaged = own.ema_model
        assert torch.isfinite(averaged(tokens())).all()
        assert [n for n, _ in averaged.named_parameters()] == [
            n for n, _ in model.named_parameters()
        ]


def test_the_report_says_what_is_recomputed():
    with trainer(GPT(), Plan(recompute="selective")) as own:
        own.step(tokens())
        text = str(own.report())
    assert "3 blocks of GPTBlock (blocks.0 to blocks.2), run again in the backward" in text
    assert "keeps 1 of 1 attention, 2 of 4 products" in text


@pytest.mark.parametrize("compiled", [False, True])
def test_the_report_says_whether_blocks_have_run_again(compiled):
    names = "3 blocks of GPTBlock (blocks.0 to blocks.2)"
    # What is compiled counts no calls.
    in_eval = "to run again" if compiled else "ran as they are in 3 calls: they were in eval mode"
    model = GPT()
    plan = Plan(recompute="blocks", compile=EAGER_BACKEND if compiled else False)

    def loss_fn(model, batch):
        model.train(is_training)
        return token_loss(model, batch)

    with trainer(model, plan, loss_fn) as own:
        assert f"{names}, to run again in the backward, which has not" in str(own.report())
        for is_training in (False, True):
            own.step(tokens())
            told = [d for d in own.report().decisions if d.lever == "recompute"]
            assert (in_eval in str(told)) is not is_training
            assert any(d.outcome == "applied" for d in told) is (is_training or compiled)
        assert f"{names}, run again in the backward" in str(own.report())


def test_what_is_compiled_in_eval_mode_stays_so_beside_eager_calls(fresh_dynamo):
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph

    model = GPT().eval()
    with Recompute(model) as recompute:
        fast = torch.compile(model, backend=backend)
        for _ in range(4):
            fast(tokens())
            model(tokens())
    assert len(compiled) == 1
    assert "ran as they are in 12 calls: they were in eval mode" in str(recompute.decisions())
