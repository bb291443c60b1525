"""Branches on real streams: exact whatever is late, eager and in graphs; and wrong without care."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

from gpu.late import SLOW, Late
from gpu.syncs import no_syncs
from models import make_batches
from torchfast import CUDAGraphStep, ParallelBranches, Plan, Trainer
from torchfast._core.compare import differences

SIZE = 1500


@pytest.fixture(autouse=True)
def deterministic():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Several branches use one weight here, which torch tells once.
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    yield
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)
    torch.use_deterministic_algorithms(False)


class Expert(nn.Module):
    def __init__(self, width, cycles):
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.cycles = cycles

    def forward(self, x):
        h = F.silu(self.gate(x)) * self.up(x)
        if any(self.cycles):
            h = Late.apply(h, *self.cycles)
        return x + F.dropout(self.down(h), 0.1, self.training)


class Mixture(nn.Module):
    """Two layers of experts with a weight that all share; ``late`` says who is late."""

    def __init__(self, branches, late="nobody", num_experts=5, width=64):
        super().__init__()
        cycles = {
            "forward": lambda k: (SLOW // 10 * (k % 2), 0),
            "backward": lambda k: (0, SLOW // 10 * (k % 3)),
            "both": lambda k: (SLOW // 10 * (k % 3), SLOW // 10 * ((k + 1) % 2)),
        }.get(late, lambda k: (0, 0))
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 4)
        self.routers = nn.ModuleList(nn.Linear(width, num_experts) for _ in range(2))
        self.layers = nn.ModuleList(
            nn.ModuleList(Expert(width, cycles(k)) for k in range(num_experts)) for _ in range(2)
        )
        self.shared = nn.Linear(width, width)
        self.branches, self.main_is_late = branches, late == "main"

    def forward(self, x):
        x = self.first(x)
        for router, experts in zip(self.routers, self.layers, strict=True):
            gates = router(x).softmax(-1).split(1, dim=-1)
            if self.main_is_late:
                x = Late.apply(x, SLOW // 10, SLOW // 10)
            branch = partial(self.branch, x=x)
            if self.branches is None:
                outputs = [branch(expert) for expert in experts]
            else:
                outputs = self.branches.map(branch, experts)
            if self.main_is_late:
                outputs[1] = Late.apply(outputs[1], SLOW // 10, SLOW // 10)
            for gate, output in zip(gates, outputs, strict=True):
                x = x + gate * output
            x = F.layer_norm(x, x.shape[-1:])
        return self.last(x)

    def branch(self, expert, x):
        return torch.tanh(self.shared(expert(x)))


def loss_fn(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def build(branches, plan, late="nobody", **options):
    torch.manual_seed(0)
    model = Mixture(branches, late).cuda()
    make = partial(optim.AdamW, lr=1e-3, fused=True)
    return Trainer(model, make, loss_fn, plan, max_grad_norm=1.0, **options)


def batches(count):
    made = [tuple(t.cuda() for t in b) for b in make_batches(8, size=12)]
    return [made[k % 8] for k in range(count)]


def train(trainer, steps):
    torch.manual_seed(1)
    losses = [trainer.step(batch).clone() for batch in steps]
    state = {key: value for key, value in trainer.state_dict().items() if key != "plan"}
    return losses, copy.deepcopy(state)


# -- The same as one after another -----------------------------------------------------------------


@pytest.mark.parametrize("plan", ["eager", "exact"])
@pytest.mark.parametrize("num_streams", [1, 2, 4, 8])
def test_two_hundred_steps_are_those_of_the_loop(num_streams, plan):
    expected = train(build(None, Plan()), batches(200))
    trainer = build(ParallelBranches(num_streams), plan)
    assert not differences(expected, train(trainer, batches(200)))
    if plan == "exact":
        found = trainer.report().counters
        assert (found["graphs"], found["replays"]) == (1, 197)


@pytest.mark.parametrize("plan", ["eager", "exact"])
@pytest.mark.parametrize("late", ["forward", "backward", "both", "main"])
def test_who_is_late_changes_nothing(late, plan):
    expected = train(build(None, Plan()), batches(30))
    trainer = build(ParallelBranches(3), plan, late)
    assert not differences(expected, train(trainer, batches(30)))
    if plan == "exact":
        assert trainer.report().counters["replays"] == 27


def test_gradients_of_an_eager_step_are_those_of_the_loop():
    found = []
    for branches, late in ((None, "nobody"), (ParallelBranches(3), "both")):
        torch.manual_seed(0)
        model = Mixture(branches, late).cuda()
        for step in batches(5):  # accumulated
            loss_fn(model, step).backward()
        found.append([p.grad for p in model.parameters()])
    assert not differences(found[0], found[1])


@pytest.mark.parametrize("accumulate", [1, 3])
def test_any_step_in_a_graph(accumulate):
    def run(branches, captured):
        torch.manual_seed(0)
        model = Mixture(branches).cuda()
        optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def step(*group):
            optimizer.zero_grad(set_to_none=True)
            losses = [loss_fn(model, batch) for batch in group]
            for loss in losses:
                (loss / len(group)).backward()
            optimizer.step()
            return torch.stack(losses).detach()

        run_step = CUDAGraphStep(step, state=[model, optimizer]) if captured else step
        torch.manual_seed(1)
        steps = batches(60)
        losses = [run_step(*[steps[k]] * accumulate).clone() for k in range(60)]
        if captured:
            assert run_step.report().counters["replays"] == 57
        return losses, list(model.parameters())

    assert not differences(run(None, False), run(ParallelBranches(4), True))


def test_a_graph_of_torchs_own():
    torch.manual_seed(0)
    model = Mixture(ParallelBranches(3)).cuda().eval()
    plain = Mixture(None).cuda().eval()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(12, 8, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            model(x).square().sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        output = model(x)
        output.square().sum().backward()
        with torch.no_grad():
            without = model(x)
    for _ in range(5):
        x.copy_(torch.randn_like(x))
        graph.replay()
        plain.zero_grad(set_to_none=True)
        expected = plain(x)
        expected.square().sum().backward()
        assert torch.equal(output, expected)
        assert torch.equal(without, expected)
        gradients = [[p.grad for p in m.parameters()] for m in (model, plain)]
        assert not differences(*gradients)


@pytest.mark.parametrize("context", ["no_grad", "inference", "autocast", "checkpoint"])
def test_in_other_contexts(context):
    def run(branches, late):
        torch.manual_seed(0)
        model = Mixture(branches, late).cuda()
        torch.manual_seed(1)
        x = torch.randn(12, 8, device="cuda")
        if context == "no_grad":
            with torch.no_grad():
                return [model(x) for _ in range(5)]
        if context == "inference":
            with torch.inference_mode():
                return [model(x).sum() for _ in range(5)]
        if context == "autocast":  # without a cache, since the shared weight is used several times
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                output = model(x)
        else:
            output = checkpoint(model, x, use_reentrant=False)
        output.float().square().sum().backward()
        return output, [p.grad for p in model.parameters()]

    assert not differences(run(None, "nobody"), run(ParallelBranches(3), "both"))


def test_branches_in_branches():
    branches = ParallelBranches(3)

    def run(call):
        w = torch.linspace(-1, 1, 64 * 64, device="cuda").view(64, 64).requires_grad_()
        x = torch.linspace(-1, 1, 64 * 64, device="cuda").view(64, 64).requires_grad_() * 1.0
        x.retain_grad()

        def inner(y, k):
            return Late.apply(y @ w, SLOW // 20 * k, SLOW // 20 * (2 - k))

        def outer(x, k):
            return sum(call([partial(inner, k=j) for j in range(3)], x * (k + 1.0)))

        sum(call([partial(outer, k=k) for k in range(4)], x)).square().sum().backward()
        return w.grad, x.grad

    expected = run(lambda functions, x: [f(x) for f in functions])
    for _ in range(5):
        assert not differences(expected, run(branches))


def test_no_call_makes_the_host_wait():
    branches, x = ParallelBranches(4), torch.randn(64, 64, device="cuda", requires_grad=True)
    branches([torch.sin] * 4, x)
    with no_syncs():
        sum(y.sum() for y in branches([torch.sin, torch.cos, torch.tan, torch.exp], x)).backward()


def test_a_copy_of_what_has_run_has_no_streams():
    branches = ParallelBranches(2)
    branches([torch.sin, torch.cos], torch.ones(1, device="cuda"))
    assert len(branches._streams[torch.device("cuda", 0)]) == 2
    assert copy.deepcopy(branches)._streams == {}
    assert pickle.loads(pickle.dumps(branches))._streams == {}


# -- Errors ----------------------------------------------------------------------------------------


def test_an_error_leaves_the_streams_joined():
    x = torch.zeros(SIZE, SIZE, device="cuda")

    def slow():
        torch.cuda._sleep(SLOW)
        x.fill_(1.0)

    with pytest.raises(ZeroDivisionError):
        ParallelBranches(2)([slow, lambda: 1 / 0])
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert x.sum().item() == SIZE * SIZE


class RaisesInCapture(Mixture):
    def branch(self, expert, x):
        if torch._C._cuda_isCurrentStreamCapturing() and expert is self.layers[1][2]:
            raise ValueError("only here")
        return super().branch(expert, x)


def test_an_error_in_a_capture_lets_training_go_on():
    expected = train(build(None, Plan()), batches(12))
    torch.manual_seed(0)
    model = RaisesInCapture(ParallelBranches(3)).cuda()
    make = partial(optim.AdamW, lr=1e-3, fused=True)
    trainer = Trainer(model, make, loss_fn, Plan(cuda_graph=True), max_grad_norm=1.0)
    assert not differences(expected, train(trainer, batches(12)))
    (why, *_) = [d.detail for d in trainer.report().stepped_aside if d.lever == "cuda_graph"]
    assert "ValueError: only here" in why
    fine = build(model.branches, "exact")  # on the very streams that were in the broken capture
    assert not differences(expected, train(fine, batches(12)))
    assert fine.report().counters["replays"] == 9


# -- Memory ----------------------------------------------------------------------------------------


def test_a_graph_gives_its_memory_back():
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    reserved = torch.cuda.memory_reserved()
    branches = ParallelBranches(4)
    for _ in range(3):
        trainer = build(branches, "exact")
        train(trainer, batches(10))
        trainer.close()
        del trainer
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    # What remains are workspaces of cuBLAS, one for each thread and stream.
    assert torch.cuda.memory_allocated() < before + 2**30
    assert torch.cuda.memory_reserved() < reserved + 2**30
