"""Plan(offload=...) with parameters: whole steps, and what cannot be had said so."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parameter_offloading import Expert, mixture, prompt_copies
from torchfast import MicroBatches, OutOfMemoryError, Plan, PlanError, Trainer, TrainStep
from torchfast.memory import OffloadOptions
from torchfast.memory.host_block import HostForward

ADAMW = partial(torch.optim.AdamW, lr=0.01, fused=True)
ONLY = partial(OffloadOptions, activations=False)


@pytest.fixture
def copies(monkeypatch):
    return prompt_copies(monkeypatch)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        return x + F.dropout(torch.relu(self.norm(self.conv(x))), 0.2, self.training)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def loss_fn(model, batch):
    return model(batch).square().mean()


def weighted_loss_fn(model, batch):
    return model(batch).square().sum(), {"size": batch.square().mean()}, torch.tensor(3.0)


def run(plan, *, optimizer=ADAMW, accumulate=1, steps=3, loss_fn=loss_fn, **options):
    torch.manual_seed(0)
    model = Net()
    step = TrainStep(model, optimizer, loss_fn, plan, accumulate=accumulate, **options)
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        batches = [torch.randn(4, 2, 8, 8) for _ in range(accumulate)]
        found.append(step(MicroBatches(batches) if accumulate > 1 else batches[0]))
        found += [torch.as_tensor(value) for value in step.metrics.values()]
    averaged = [] if step.ema_model is None else [*step.ema_model.state_dict().values()]
    report = step.report()
    state = step.optimizer.state_dict()["state"]
    moments = [s[k] for s in state.values() for k in sorted(s)]
    step.close()
    assert not any("forward" in vars(module) for module in model.modules())
    return [*found, *model.state_dict().values(), *averaged, *moments], report


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 3, "max_grad_norm": 0.1},
        {"ema": 0.9},
        {"accumulate": 2, "loss_fn": weighted_loss_fn, "max_grad_norm": 0.1},
    ],
)
@pytest.mark.parametrize(
    "plan",
    [
        Plan(offload="parameters"),
        Plan(offload=ONLY(parameters=("blocks.*.conv",), max_resident_blocks=1)),
        Plan(offload=OffloadOptions(parameters="blocks", min_bytes=1, window_bytes=0)),
        Plan(offload=OffloadOptions(parameters="blocks", optimizer=True)),
        Plan(offload="parameters", recompute="blocks"),
        Plan(offload="parameters", channels_last=True),
    ],
    ids=str,
)
def test_a_step_leaves_every_bit(copies, plan, options):
    expected, _ = run(plan.replace(offload=None), **options)
    found, report = run(plan, **options)
    assert all(map(torch.equal, expected, found))
    assert len(expected) == len(found)
    assert report.counters["offload_fetched_blocks"] > 0
    assert any("parameters of blocks.0" in d.detail for d in report.decisions)


def test_parameters_that_are_laid_out_anew_are_pinned_again(copies, monkeypatch):
    pinned = []

    def noted(num_bytes, pin=copies.pinned):
        pinned.append(pin(num_bytes))
        return pinned[-1]

    monkeypatch.setattr(copies, "pinned", noted)
    plan = Plan(offload="parameters", channels_last=True)
    step = TrainStep(Net(), ADAMW, loss_fn, plan)
    step(torch.randn(4, 2, 8, 8))
    weight = step.model.blocks[0].conv.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    parameters = [p for block in step.model.blocks for p in block.parameters()]
    assert {p.data_ptr() for p in parameters} <= {memory.data_ptr() for memory in pinned}


def test_a_mixture_with_experts_that_are_not_used(copies):
    def run(plan):
        model = mixture()
        trainer = Trainer(model, ADAMW, loss_fn, plan=plan, max_grad_norm=1.0)
        torch.manual_seed(1)
        losses = [trainer.step(torch.randn(16, 8)) for _ in range(4)]
        counters = trainer.report().counters
        trainer.close()
        return [*losses, *model.state_dict().values()], counters

    expected, _ = run(Plan())
    found, counters = run(Plan(offload=ONLY(parameters=(Expert,))))
    assert all(map(torch.equal, expected, found))
    assert counters["offload_most_resident_blocks"] == 2


def test_an_optimizer_that_is_built_and_has_state_goes_along(copies):
    def run(plan):
        torch.manual_seed(0)
        model = Net()
        optimizer = ADAMW(model.parameters())
        batch = torch.randn(4, 2, 8, 8)
        loss_fn(model, batch).backward()
        optimizer.step()
        step = TrainStep(model, optimizer, loss_fn, plan)
        other = TrainStep(model, optimizer, loss_fn, plan)  # as a cell of a notebook run twice
        losses = [other(batch) for _ in range(3)]
        step.close()
        other.close()
        return [*losses, *model.parameters()]

    expected = run(Plan())
    assert all(map(torch.equal, expected, run(Plan(offload="parameters"))))


def test_state_goes_through_a_file_to_a_plain_step_and_back(copies, tmp_path):
    plan = Plan(offload="parameters")
    batch = torch.randn(4, 2, 8, 8)
    torch.manual_seed(0)
    one = TrainStep(Net(), ADAMW, loss_fn, plan)
    one(batch)
    torch.save(one.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    results = []
    for each in (Plan(), plan):
        step = TrainStep(Net(), ADAMW, loss_fn, each)
        step.load_state_dict(copy.deepcopy(state))
        torch.manual_seed(3)
        results.append([step(batch), step(batch), *step.model.state_dict().values()])
    torch.manual_seed(3)
    expected = [one(batch), one(batch), *one.model.state_dict().values()]
    for found in results:
        assert all(map(torch.equal, expected, found))


def test_the_averaged_model_is_called_as_the_model_is(copies):
    trainer = Trainer(Net(), ADAMW, loss_fn, plan=Plan(offload="parameters"), ema=0.5)
    batch = torch.randn(4, 2, 8, 8)
    trainer.step(batch)
    averaged = trainer.ema_model
    assert all(isinstance(b.forward, HostForward) for b in averaged.blocks)
    before = trainer.report().counters["offload_fetched_blocks"]
    assert torch.equal(averaged(batch), copy.deepcopy(averaged)(batch))
    trainer.evaluate([batch])
    assert trainer.report().counters["offload_fetched_blocks"] == before + 2 * 4
    trainer.close()
    assert not any("forward" in vars(m) and isinstance(m.forward, HostForward)
                   for m in averaged.modules())  # fmt: skip


def test_no_graph_is_captured_and_the_report_says_why(copies, tape):
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    expected, _ = run(Plan(), optimizer=sgd, steps=12)
    found, report = run(Plan(cuda_graph=True, offload="parameters"), optimizer=sgd, steps=12)
    assert all(map(torch.equal, expected, found))
    assert "replays" not in report.counters
    (graph,) = (d for d in report.decisions if d.lever == "cuda_graph")
    assert graph.outcome == "stepped aside"
    assert "their gradients are added up on the host" in graph.detail
    _, report = run(Plan(cuda_graph=True, offload="activations"), optimizer=sgd, steps=12)
    assert report.counters["replays"] > 0


def test_a_step_that_ran_out_of_memory_is_done_again_in_parts(copies):
    def run(plan, raises):
        torch.manual_seed(0)
        model = nn.Sequential(*(Expert() for _ in range(4)))
        failed = []

        def hook(module, args):
            if raises and len(args[0]) > 2:
                failed.append(len(args[0]))
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

        model[2].down.register_forward_pre_hook(hook)
        step = TrainStep(model, ADAMW, loss_fn, plan)
        torch.manual_seed(1)
        losses = [step(torch.randn(4, 8)) for _ in range(2)]
        step.close()
        assert bool(failed) == raises
        return [*losses, *model.parameters()]

    plan = Plan(out_of_memory="split")
    for raises in (False, True):
        expected = run(plan, raises)
        assert all(map(torch.equal, expected, run(plan.replace(offload="parameters"), raises)))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_account_tells_what_is_brought_from_activations(copies, where):
    model = nn.Sequential(*(Expert() for _ in range(4)))

    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    step = TrainStep(model, ADAMW, loss_fn, Plan(offload="parameters"))
    step(torch.randn(4, 8))
    if where == "forward":
        model[2].down.register_forward_pre_hook(fails)
    else:
        model[1].down.weight.register_hook(fails)
    with pytest.raises(OutOfMemoryError) as caught:
        step(torch.randn(4, 8))
    step.close()
    account = caught.value.account
    assert account.stage == where
    block = sum(p.nbytes for p in model[0].parameters())
    brought = account.bytes_of("parameters brought from the host")
    assert block <= brought <= 2 * block
    assert brought % block == 0


def test_a_step_that_cannot_be_built_leaves_the_model_alone(copies):
    model = Net()
    with pytest.raises(ValueError, match="of which the model has no module"):
        TrainStep(model, ADAMW, loss_fn, Plan(offload=ONLY(parameters=(Expert,))))
    with pytest.raises(TypeError, match="got the class SGD"):
        TrainStep(model, torch.optim.SGD, loss_fn, Plan(offload="parameters"))
    assert not any("forward" in vars(module) for module in model.modules())


def test_on_the_cpu_it_steps_aside(caplog):
    expected, _ = run(Plan())
    found, report = run(Plan(offload="parameters", cuda_graph=True))
    assert all(map(torch.equal, expected, found))
    outcomes = {d.lever: d.outcome for d in report.decisions}
    assert outcomes["offload"] == "stepped aside"
    assert outcomes["cuda_graph"] == "left alone"
    assert "parameters of blocks.0 to blocks.3 are on cpu anyway" in caplog.text


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("parameters", "parameters"),
        (ONLY(parameters="blocks"), "parameters"),
        (OffloadOptions(parameters=["a.*", "b"]), OffloadOptions(parameters=("a.*", "b"))),
        (ONLY(parameters={"b", "a"}), ONLY(parameters=("a", "b"))),
        (ONLY(parameters="blocks", max_resident_blocks=3),) * 2,
    ],
)
def test_a_plan_is_written_in_one_way(given, kept):
    plan = Plan(offload=given)
    assert plan.offload == kept
    assert Plan.from_json(plan.to_json()) == plan
    assert eval(repr(plan), {"Plan": Plan, "OffloadOptions": OffloadOptions}) == plan


def test_classes_are_written_by_name():
    plan = Plan(offload=ONLY(parameters=(Expert, "head")))
    assert '"parameters": ["Expert", "head"]' in plan.to_json()


@pytest.mark.parametrize(
    ("others", "remedy"),
    [
        ({"shard": "fsdp"}, r"ShardOptions\(offload=True\)"),
        ({"shard": "ddp"}, "shard='fsdp'"),
        ({"precision": "fp16"}, "take bf16"),
        ({"precision": "fp8"}, "take bf16"),
        ({"nonfinite": "skip"}, "calls updates off"),
        ({"compile": True}, "compile=False"),
        ({"compile": "auto"}, "compile=False"),
        ({"optimizer": "adamw8bit"}, "take 'fused'"),
    ],
    ids=str,
)
def test_plans_that_contradict_themselves(others, remedy):
    with pytest.raises(PlanError, match=f"offload of parameters does not go with .*{remedy}"):
        Plan(offload="parameters", **others)


def test_what_is_refused():
    with pytest.raises(PlanError, match="parameters must be one of"):
        OffloadOptions(parameters="experts")
    with pytest.raises(PlanError, match="parameters must name at least one region"):
        OffloadOptions(parameters=())
    with pytest.raises(TypeError, match="parameters must hold paths"):
        OffloadOptions(parameters=(3,))
    with pytest.raises(ValueError, match="max_resident_blocks must be >= 1"):
        OffloadOptions(parameters="blocks", max_resident_blocks=0)
    with pytest.raises(PlanError, match="parameters=None\\) leaves nothing to offload"):
        OffloadOptions(activations=False)
