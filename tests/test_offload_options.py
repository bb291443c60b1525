"""Plan(offload=...): the same bits through a whole step, and what cannot be had said so."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from simulated_copies import PromptCopies
from tape import Tape
from torchfast import (
    MicroBatches,
    OutOfMemoryOptions,
    Plan,
    PlanError,
    RecomputeOptions,
    TrainStep,
)
from torchfast.memory import (
    OffloadOptions,
    activation_offload,
    host_pool,
    optimizer_offload,
)
from torchfast.memory.step_offload import StepOffload

ALL = OffloadOptions(min_bytes=1, window_bytes=0)
ADAMW = partial(torch.optim.AdamW, lr=0.01, fused=True)


@pytest.fixture
def copies(monkeypatch):
    copies = PromptCopies()
    monkeypatch.setattr(activation_offload, "copy_streams_for", lambda _: copies)
    monkeypatch.setattr(optimizer_offload, "copy_streams_for", lambda _: copies)
    monkeypatch.setattr(host_pool, "SLAB_BYTES", 1 << 14)
    return copies


class Block(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.recompute = recompute

    def inner(self, x):
        return x + F.dropout(F.gelu(self.linear(self.norm(x))), 0.3)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)


class Net(nn.Module):
    """Convolution, BatchNorm, views of one projection, integers, booleans, complex numbers."""

    def __init__(self, recompute=False):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(3))
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        x = F.max_pool1d(F.relu(self.norm(self.conv(x)), inplace=True), 2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        q, k, v = (t.unsqueeze(1) for t in self.qkv(x).chunk(3, -1))
        x = F.scaled_dot_product_attention(q, k, v).squeeze(1)
        return x.masked_fill(x > 2, 0.5) * torch.fft.fft(x.float()).abs()


def loss_fn(model, batch):
    return model(batch).square().mean()


def run(plan, *, optimizer=ADAMW, recompute=False, accumulate=1, steps=3, **options):
    torch.manual_seed(0)
    model = Net(recompute)
    step = TrainStep(model, optimizer, loss_fn, plan, accumulate=accumulate, **options)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        batches = [torch.randn(4, 2, 8) for _ in range(accumulate)]
        losses.append(step(MicroBatches(batches) if accumulate > 1 else batches[0]))
    report = step.report()
    state = step.optimizer.state_dict()["state"]
    moments = [s[k] for s in state.values() for k in sorted(s)]
    step.close()
    return [*losses, *model.state_dict().values(), *moments], report


def decision(report):
    return [d for d in report.decisions if d.lever == "offload"]


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"recompute": True}])
@pytest.mark.parametrize("window", [0, 3000])
def test_offloaded_activations_leave_every_bit(copies, options, window):
    expected, _ = run(Plan(), **options)
    found, report = run(Plan(offload=OffloadOptions(min_bytes=1, window_bytes=window)), **options)
    assert all(map(torch.equal, expected, found))
    assert report.counters["offload_sent_bytes"] > 0
    assert [d.outcome for d in decision(report)] == ["applied"]


AUTO = OffloadOptions(activations="auto", min_bytes=1, window_bytes=3000)
SLOWER = replace(AUTO, max_slowdown=0.25)


@pytest.mark.parametrize("offload", [AUTO, SLOWER])
@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"recompute": True}])
def test_activations_chosen_by_measurement_leave_every_bit(copies, options, offload):
    expected, _ = run(Plan(), steps=8, **options)
    found, report = run(Plan(offload=offload), steps=8, **options)
    assert all(map(torch.equal, expected, found))
    assert report.counters["offload_sent_bytes"] > 0
    (made,) = decision(report)
    assert "GB/s to the host" in made.detail
    assert ("at most 25% of its time" in made.detail) is (offload is SLOWER)


def test_under_autocast(copies):
    expected, _ = run(Plan(precision="bf16"))
    found, report = run(Plan(precision="bf16", offload=ALL))
    assert all(map(torch.equal, expected, found))
    assert report.counters["offload_sent_bytes"] > 0


@pytest.mark.parametrize("offload", [ALL, AUTO, SLOWER])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}])
def test_a_graph_holds_the_copies(copies, tape, monkeypatch, options, offload):
    def is_capturing():
        return any(isinstance(mode, Tape) for mode in _get_current_dispatch_mode_stack())

    monkeypatch.setattr(copies, "is_capturing", is_capturing)
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    expected, _ = run(Plan(), optimizer=sgd, steps=16, **options)
    found, report = run(Plan(cuda_graph=True, offload=offload), optimizer=sgd, steps=16, **options)
    assert all(map(torch.equal, expected, found))
    assert report.counters["replays"] > 0
    assert report.counters["offload_sent_bytes"] > 0


def test_a_graph_ends_before_an_update_on_the_host(copies, tape):
    expected, _ = run(Plan(offload="optimizer"), steps=16, max_grad_norm=0.1)
    found, report = run(Plan(cuda_graph=True, offload="optimizer"), steps=16, max_grad_norm=0.1)
    assert all(map(torch.equal, expected, found))
    assert report.counters["replays"] > 0


def test_recompute_of_the_plan_stands_inside(copies):
    expected, _ = run(Plan())
    sent = {}
    for recompute in (False, "blocks"):
        found, report = run(Plan(recompute=recompute, offload=ALL))
        assert all(map(torch.equal, expected, found))
        sent[recompute] = report.counters["offload_sent_bytes"]
    assert 0 < sent["blocks"] < sent[False]


def test_of_a_compiled_model(copies, fresh_dynamo):
    def compiled(context):
        torch.manual_seed(0)
        model = Net()
        call = torch.compile(model, backend="aot_eager")
        torch.manual_seed(1)
        for _ in range(2):
            with context(model) as offload:
                loss = loss_fn(call, torch.randn(4, 2, 8))
            loss.backward()
        return [p.grad for p in model.parameters()], offload

    expected, _ = compiled(lambda model: torch.enable_grad())
    offload = partial(activation_offload.ActivationOffload, min_bytes=1, window_bytes=0)
    found, context = compiled(offload)
    assert all(map(torch.equal, expected, found))
    assert context.counters()["offload_sent_bytes"] > 0


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1, "accumulate": 2}, {"ema": 0.9}])
def test_an_offloaded_update_leaves_every_bit_on_one_device(copies, options):
    expected, _ = run(Plan(), **options)
    found, report = run(Plan(offload="optimizer"), **options)
    assert all(map(torch.equal, expected, found))
    (made,) = decision(report)
    assert "AdamW updates copies of the parameters" in made.detail


@pytest.mark.parametrize("limit", [0.01, 1e6])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_update_that_begins_in_the_backward_leaves_every_bit(
    copies, limit, accumulate, monkeypatch
):
    monkeypatch.setattr(PromptCopies.Stream, "query", lambda self: False)  # it is never over
    options = {"max_grad_norm": limit, "accumulate": accumulate, "steps": 6}
    expected, _ = run(Plan(), **options)
    offload = OffloadOptions(activations=False, optimizer=True, overlap=True)
    found, report = run(Plan(offload=offload), **options)
    assert all(map(torch.equal, expected, found))
    begun, taken_back = (
        report.counters[f"offload_updates_{what}"] for what in ("begun_early", "taken_back")
    )
    # Of one micro-batch the first guess finds out, of two the second, which is the first of two.
    assert (begun, taken_back) == ((accumulate, accumulate) if limit == 0.01 else (5, 0))


def test_no_graph_holds_a_step_whose_update_begins_in_the_backward(copies, tape):
    offload = OffloadOptions(activations=False, optimizer=True, overlap=True)
    _, report = run(Plan(offload=offload, cuda_graph=True))
    (made,) = [d for d in report.decisions if d.lever == "cuda_graph"]
    assert made.outcome == "stepped aside"
    assert "begins in the backward, by hooks that no graph replays" in made.detail


def test_state_goes_through_a_checkpoint_to_a_plain_step(copies):
    torch.manual_seed(0)
    one = TrainStep(Net(), ADAMW, loss_fn, Plan(offload="all"))
    other = TrainStep(Net(), ADAMW, loss_fn, Plan())
    batch = torch.randn(4, 2, 8)
    one(batch)
    other.load_state_dict(one.state_dict())
    back = TrainStep(Net(), ADAMW, loss_fn, Plan(offload="all"))
    back.load_state_dict(other.state_dict())
    again = TrainStep(Net(), ADAMW, loss_fn, Plan())
    again.load_state_dict(other.state_dict())
    torch.manual_seed(3)
    first = [back(batch), back(batch)]
    torch.manual_seed(3)
    assert all(map(torch.equal, first, [again(batch), again(batch)]))


def test_an_optimizer_that_is_built_already_is_refused():
    model = Net()
    built = ADAMW(model.parameters())
    with pytest.raises(PlanError, match=r"offload .* the AdamW given is built already"):
        TrainStep(model, built, loss_fn, Plan(offload="optimizer"))
    with pytest.raises(TypeError, match="got the class AdamW"):
        TrainStep(model, torch.optim.AdamW, loss_fn, Plan(offload="optimizer"))


def test_on_the_cpu_it_steps_aside(caplog):
    expected, _ = run(Plan())
    found, report = run(Plan(offload="all"))
    assert all(map(torch.equal, expected, found))
    assert [d.outcome for d in decision(report)] == ["stepped aside"] * 2
    assert "activations stay on cpu" in caplog.text
    _, report = run(Plan())
    assert [d.outcome for d in decision(report)] == ["left alone"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("activations", "activations"),
        ("auto", "auto"),
        (OffloadOptions(activations="auto"), "auto"),
        (OffloadOptions(activations="auto", optimizer=True),) * 2,
        (OffloadOptions(activations="auto", max_slowdown=0), "auto"),
        (OffloadOptions(activations="auto", max_slowdown=0.05),) * 2,
        ("optimizer", "optimizer"),
        ("all", "all"),
        (OffloadOptions(), "activations"),
        (OffloadOptions(optimizer=True), "all"),
        (OffloadOptions(min_bytes=5), OffloadOptions(min_bytes=5)),
        (OffloadOptions(optimizer=True, overlap=True),) * 2,
    ],
)
def test_a_plan_is_written_in_one_way(given, kept):
    plan = Plan(offload=given)
    assert plan.offload == kept
    assert Plan.from_json(plan.to_json()) == plan
    assert eval(repr(plan), {"Plan": Plan, "OffloadOptions": OffloadOptions}) == plan


def test_any_number_is_written_as_json():
    options = OffloadOptions(activations="auto", max_slowdown=torch.ones((1,)).numpy()[0])
    assert '"max_slowdown": 1.0' in Plan(offload=options).to_json()


def test_what_is_refused():
    with pytest.raises(PlanError, match="offload must be one of"):
        Plan(offload="activation")
    with pytest.raises(TypeError, match="offload must be None, one of"):
        Plan(offload=True)
    with pytest.raises(PlanError, match="leaves nothing to offload"):
        OffloadOptions(activations=False)
    with pytest.raises(TypeError, match="activations must be True, False or 'auto', got 'half'"):
        OffloadOptions(activations="half")
    with pytest.raises(ValueError, match="max_bytes must be >= 0"):
        OffloadOptions(max_bytes=-1)
    with pytest.raises(TypeError, match="max_slowdown must be a number >= 0, got '5%'"):
        OffloadOptions(activations="auto", max_slowdown="5%")
    with pytest.raises(ValueError, match="max_slowdown must be a finite number >= 0, got -1"):
        OffloadOptions(activations="auto", max_slowdown=-1)
    for activations in (True, False):
        with pytest.raises(PlanError, match=f"='auto' only, got activations={activations}"):
            OffloadOptions(activations=activations, optimizer=True, max_slowdown=0.05)
    with pytest.raises(PlanError, match=r"overlap=True .* goes with optimizer=True only"):
        OffloadOptions(overlap=True)
    with pytest.raises(TypeError, match="overlap must be True or False, got 1"):
        OffloadOptions(optimizer=True, overlap=1)
    with pytest.raises(PlanError, match="does not go with precision='fp16'"):
        Plan(offload="optimizer", precision="fp16")
    with pytest.raises(PlanError, match="does not go with nonfinite='skip'"):
        Plan(offload="all", nonfinite="skip")
    with pytest.raises(PlanError, match="does not go with shard='fsdp'"):
        Plan(offload="optimizer", shard="fsdp")
    Plan(offload="activations", nonfinite="skip", precision="fp16", shard="fsdp")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (partial(OffloadOptions, optimizer=True, activations=False, max_bytes=5), "max_bytes=5"),
        (partial(OffloadOptions, optimizer=True, activations=False, window_bytes=7), "window"),
        (partial(OffloadOptions, max_resident_blocks=3), "max_resident_blocks=3 .*parameters"),
        (partial(RecomputeOptions, share=0.3), "share=0.3 does nothing without selective=True"),
        (partial(OutOfMemoryOptions, max_parts=2), "max_parts=2 .* action='split'"),
        (partial(OutOfMemoryOptions, history=5), "history=5 does nothing without snapshot"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_option_of_what_was_not_asked_for_is_refused(make, said):
    with pytest.raises(PlanError, match=said):
        make()


def test_the_bound_of_what_is_taken_back_is_that_of_the_optimizer():
    offload = OffloadOptions(activations=False, optimizer=True, overlap=True, max_undo_bytes=0)
    assert "max_undo_bytes=0" in repr(offload)
    assert Plan.from_json(Plan(offload=offload).to_json()).offload == offload
    model = nn.Linear(4, 4)
    make = StepOffload(offload).source(partial(torch.optim.SGD, lr=0.1))
    assert make.keywords["max_undo_bytes"] == 0
    make(list(model.parameters()))
    with pytest.raises(PlanError, match=r"max_undo_bytes=0 .* goes with overlap=True only"):
        OffloadOptions(optimizer=True, max_undo_bytes=0)
    with pytest.raises(ValueError, match="max_undo_bytes must be >= 0"):
        OffloadOptions(optimizer=True, overlap=True, max_undo_bytes=-1)
