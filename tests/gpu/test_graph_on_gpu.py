"""Captured steps on a real device: exact over hundreds of steps, recovered from every failure."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers
from torch.utils._pytree import tree_map_only

from gpu.test_syncs import no_syncs
from models import make_batches
from test_parity import OPTIMIZERS
from torchfast import (
    CUDAGraphOptions,
    CUDAGraphStep,
    MicroBatches,
    Plan,
    PrecisionOptions,
    Trainer,
)
from torchfast._core.compare import differences

GRAPH = Plan(cuda_graph=True)
# Those that keep every bit in a form that a graph can hold.
IN_GRAPH = {"ASGD", "AdamW fused", "Rprop", "SGD", "SGD momentum", "SGD nesterov fused"}


@pytest.fixture(autouse=True)
def deterministic():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Net(nn.Module):
    """Dropout, BatchNorm, tied weights, a buffer that each forward replaces."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.2)
        self.second = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.second.weight
        self.last = nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        x = self.dropout(F.gelu(self.norm(self.first(x))))
        return self.last(self.tied(torch.tanh(self.second(x))))


def loss_fn(model, batch):
    inputs, targets = batch
    logits = model(inputs)
    return F.cross_entropy(logits, targets), {"logit": logits.detach().max()}


def two_groups(make, model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return make([{"params": matrices}, {"params": rest, "lr": 0.003}])


def lambdas(optimizer):
    return schedulers.LambdaLR(optimizer, [lambda s: 1 / (1 + s), lambda s: 0.99**s])


def one_cycle(optimizer):
    return schedulers.OneCycleLR(optimizer, 0.02, total_steps=400, cycle_momentum=False)


def on_gpu(batches):
    return [tuple(t.cuda() for t in batch) for batch in batches]


def build(name, plan, *, net=Net, loss=loss_fn, scheduler=None, **options):
    torch.manual_seed(0)
    model = net().cuda()
    optimizer = two_groups(OPTIMIZERS[name], model)
    return Trainer(model, optimizer, loss, plan, lr_scheduler=scheduler, **options)


def run(trainer, steps):
    torch.manual_seed(1)
    return [trainer.step(step).clone() for step in steps]


def state(trainer):
    return {key: value for key, value in trainer.state_dict().items() if key != "plan"}


def assert_same_training(plain, captured, steps):
    losses, ours = run(plain, steps), run(captured, steps)
    assert not differences(losses, ours)
    assert not differences(state(plain), state(captured))
    assert not differences(dict(plain.metrics), dict(captured.metrics))


def copied(state):
    return tree_map_only(torch.Tensor, torch.clone, state)


def counters(trainer):
    return trainer.report().counters


@pytest.mark.parametrize("scheduler", [lambdas, one_cycle])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_hundred_steps_are_exact(name, accumulate, clip, scheduler):
    groups = on_gpu(make_batches(8 * accumulate, size=12))
    steps = [
        MicroBatches(groups[i : i + accumulate]) if accumulate > 1 else groups[i]
        for i in range(0, len(groups), accumulate)
    ] * 25
    options = {"accumulate": accumulate, "max_grad_norm": clip, "scheduler": scheduler}
    captured = build(name, GRAPH, **options)
    assert_same_training(build(name, Plan(), **options), captured, steps)
    found = counters(captured)
    assert (found["graphs"], found["replays"], found["eager steps"]) == (1, 197, 3)
    (decision, *_) = [d for d in captured.report().decisions if d.lever == "cuda_graph"]
    assert (decision.outcome == "applied") == (name in IN_GRAPH)


@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_fast_captures_what_torch_can(name):
    """And trains as the eager step in the same form, bit for bit."""
    plan = Plan(optimizer="fused", cuda_graph=True)
    batches = on_gpu(make_batches(6, size=12)) * 5
    captured, halves = build(name, plan), build(name, plan)
    torch.manual_seed(1)
    losses = []
    for batch in batches:
        losses.append(halves.forward_backward(batch))
        halves.update()
    assert not differences(losses, run(captured, batches))
    assert not differences(state(halves), state(captured))
    assert counters(captured)["replays"] == 27


def test_what_happens_between_steps_is_seen():
    def events(trainer):
        group = trainer.optimizer.param_groups[0]
        yield
        group["lr"] = 0.5
        yield
        group["weight_decay"] = 0.1
        yield
        trainer.model.eval()
        yield
        trainer.model.train()
        yield
        trainer.model.first.requires_grad_(False)
        yield
        trainer.model.first.requires_grad_(True)
        yield
        trainer.load_state_dict(saved[trainer])
        yield
        trainer.optimizer.zero_grad(set_to_none=True)
        yield
        extra = nn.Parameter(torch.ones(4, device="cuda"))
        trainer.model.extra = extra
        trainer.optimizer.add_param_group({"params": [extra], "lr": 0.1})
        yield
        trainer.model.load_state_dict(trainer.model.state_dict(), assign=True)
        yield

    batches = on_gpu(make_batches(7, size=12))
    saved, results = {}, []
    for plan in (Plan(), GRAPH):
        trainer = build("AdamW fused", plan)
        losses = run(trainer, batches)
        saved[trainer] = copied(trainer.state_dict())
        for _ in events(trainer):
            losses += run(trainer, batches)
        results.append((losses, state(trainer)))
        last = trainer
    assert not differences(results[0][0], results[1][0])
    assert not differences(results[0][1], results[1][1])
    assert counters(last)["replays"] > 40


def test_a_resumed_run_is_the_uninterrupted_one():
    batches = on_gpu(make_batches(8, size=12)) * 4
    whole = build("AdamW fused", GRAPH, scheduler=one_cycle)
    expected = run(whole, batches)
    first = build("AdamW fused", GRAPH, scheduler=one_cycle)
    run(first, batches[:16])
    held = copied(first.state_dict())
    # Into a trainer whose graph lives, and which has trained something else.
    second = build("AdamW fused", GRAPH, scheduler=one_cycle)
    run(second, batches[3:11])
    second.load_state_dict(held)
    assert counters(second)["graphs"] == 1
    assert not differences(expected[16:], [second.step(batch) for batch in batches[16:]])
    assert not differences(state(whole), state(second))
    assert counters(second)["captures"] == 1


@pytest.mark.parametrize(
    "plan",
    [
        Plan(precision="bf16", cuda_graph=True),
        Plan(precision=PrecisionOptions(format="fp16", init_scale=256.0), cuda_graph=True),
        Plan(nonfinite="skip", cuda_graph=True),
        Plan(precision="tf32", channels_last=True, cuda_graph=True),
    ],
    ids=["bf16", "fp16", "skip", "tf32"],
)
def test_other_levers_hold_in_a_graph(plan):
    batches = on_gpu(make_batches(8, size=12)) * 4
    poisoned = batches[13][0].clone()
    poisoned[0, 0] = torch.inf
    batches[13] = (poisoned, batches[13][1])
    if plan.nonfinite == "propagate" and plan.precision != "fp16":
        del batches[13]
    plain = build("AdamW fused", plan.replace(cuda_graph=False), max_grad_norm=1.0)
    captured = build("AdamW fused", plan, max_grad_norm=1.0)
    assert_same_training(plain, captured, batches)
    assert plain.num_skipped == captured.num_skipped
    assert counters(captured)["graphs"] == 1


# -- What cannot be captured -----------------------------------------------------------------------


class Breaks(Net):
    how = ""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator("cuda").manual_seed(3)
        self.calls = [0]  # in a list, where only the check finds it

    def forward(self, x):
        self.calls[0] += 1
        capturing = torch.cuda.is_current_stream_capturing()
        if self.how == "item":
            x = x * (1.0 + 0.0 * x.sum().item())
        elif self.how == "copy":  # another value each time
            x = x + 0.0 * torch.tensor(float(self.calls[0])).to(x.device)
        elif self.how == "mask":
            x = x + 0.0 * x[x > 0].sum()
        elif self.how == "nonzero":
            x = x + 0.0 * x.nonzero().sum()
        elif self.how == "generator":
            x = x * torch.rand(x.shape, device=x.device, generator=self.generator)
        elif self.how == "host randomness":
            x = x * float(torch.rand(()))
        elif self.how == "counter":
            x = x / self.calls[0]
        elif self.how == "raises" and capturing:
            raise ValueError("only here")
        elif self.how == "synchronizes" and capturing:
            torch.cuda.synchronize()
        elif self.how == "out of memory" and capturing:
            torch.empty(1 << 43, device="cuda")
        return super().forward(x)


HOWS = [
    "item",
    "copy",
    "mask",
    "nonzero",
    "generator",
    "host randomness",
    "raises",
    "synchronizes",
    "out of memory",
]
CAUSES = {
    "item": "the host waits for the device",
    "copy": "copies between host and device",
    "mask": "the host waits for the device",
    "nonzero": "the host waits for the device",
    "generator": "a generator that was not named",
    "host randomness": "torch's CPU generator",
    "raises": "ValueError: only here",
    "synchronizes": "the host waits for the device",
    "out of memory": "memory ran out",
}


@pytest.mark.parametrize("how", HOWS)
def test_what_cannot_be_captured_trains_on_as_it_is_and_the_next_is_captured(how):
    batches = on_gpu(make_batches(6, size=12)) * 3
    batches += on_gpu(make_batches(3, size=5)) * 2
    net = type("Breaks", (Breaks,), {"how": how})
    captured = build("AdamW fused", GRAPH, net=net)
    allocated = torch.cuda.memory_allocated()
    assert_same_training(build("AdamW fused", Plan(), net=net), captured, batches)
    (why, *_) = [d.detail for d in captured.report().stepped_aside if d.lever == "cuda_graph"]
    assert CAUSES[how] in why
    if how in ("item", "copy", "mask", "nonzero", "generator"):
        assert f"{Path(__file__).name}:" in why
    assert counters(captured)["replays"] == 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    captured.close()
    fine = build("AdamW fused", GRAPH)
    assert_same_training(build("AdamW fused", Plan()), fine, batches)
    assert counters(fine)["graphs"] == 2
    assert torch.cuda.memory_allocated() < allocated + 2**24


def test_a_step_that_counts_in_python_is_found_out():
    """Though not what each capture and check has counted too: the list is nobody's to put back."""
    net = type("Breaks", (Breaks,), {"how": "counter"})
    captured = build("AdamW fused", GRAPH, net=net)
    run(captured, on_gpu(make_batches(6, size=12)) * 3)
    (why,) = [d.detail for d in captured.report().stepped_aside if d.lever == "cuda_graph"]
    assert "replays do not differ" in why
    assert counters(captured)["replays"] == 0


class CopiesConstants(Net):
    """In each way there is to bring a value from the host."""

    def forward(self, x):
        x = x * torch.tensor(0.5).to(x.device) + torch.tensor([0.1], device=x.device)
        x = x - torch.as_tensor(0.25, device="cuda") * torch.arange(8.0).cuda()
        x = x + x.new_tensor([1.0] * 8)
        mask = torch.zeros(8, device=x.device)
        mask[2:4] = torch.ones(2)
        mask.copy_(mask + torch.tensor(1, dtype=torch.int64).to(x))
        return super().forward(x * mask)


def test_constants_that_are_copied_from_the_host_are_no_obstacle():
    batches = on_gpu(make_batches(6, size=12)) * 3 + on_gpu(make_batches(2, size=5)) * 3
    plan = Plan(cuda_graph=CUDAGraphOptions(host_constants=True))
    captured = build("AdamW fused", plan, net=CopiesConstants)
    assert_same_training(build("AdamW fused", Plan(), net=CopiesConstants), captured, batches)
    assert counters(captured)["graphs"] == 2
    assert counters(captured)["replays"] > 12


def test_what_is_no_constant_is_found_out():
    net = type("Breaks", (Breaks,), {"how": "copy"})
    batches = on_gpu(make_batches(6, size=12)) * 3
    plan = Plan(cuda_graph=CUDAGraphOptions(host_constants=True))
    captured = build("AdamW fused", plan, net=net)
    assert_same_training(build("AdamW fused", Plan(), net=net), captured, batches)
    (why,) = [d.detail for d in captured.report().stepped_aside if d.lever == "cuda_graph"]
    assert "has another value each time" in why


@pytest.mark.parametrize("what", ["ragged last batch", "batches of 1", "every size", "empty"])
def test_other_shapes_never_see_a_stale_input(what):
    sizes = {
        "ragged last batch": [12, 12, 12, 7],
        "batches of 1": [12, 1, 12, 12],
        "every size": list(range(1, 30)),
        "empty": [12, 12, 0, 12],
    }[what]

    def no_norm(model, batch):  # BatchNorm takes no batch of 1
        model.norm.eval()
        return loss_fn(model, batch) if len(batch[0]) else model(batch[0]).sum()

    batches = [batch for n in sizes for batch in on_gpu(make_batches(1, size=max(n, 1)))]
    batches = [tuple(t[:n] for t in b) for b, n in zip(batches, sizes, strict=True)] * 5
    captured = build("AdamW fused", GRAPH, loss=no_norm)
    assert_same_training(build("AdamW fused", Plan(), loss=no_norm), captured, batches)
    assert counters(captured)["graphs"] <= 8


def test_a_loader_that_pins_in_a_thread_does_not_disturb_a_capture():
    def uneven(count):
        for number in range(count):
            yield tuple(t.pin_memory() for t in make_batches(1, size=4 + number % 5)[0])

    captured, plain = build("AdamW fused", GRAPH), build("AdamW fused", Plan())
    torch.manual_seed(1)
    ours = [captured.step(b).clone() for b in captured.prefetch(uneven(60))]
    torch.manual_seed(1)
    expected = [plain.step(b).clone() for b in plain.prefetch(uneven(60))]
    assert not differences(expected, ours)
    assert counters(captured)["graphs"] == 5


# -- Memory ----------------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8))
        )

    def forward(self, x):
        return self.layers(x)


def wide(plan):
    torch.manual_seed(0)
    model = Wide().cuda()
    optimizer = partial(optim.AdamW, lr=1e-3, fused=True)
    return Trainer(model, optimizer, lambda m, x: m(x).square().mean(), plan)


def peak(plan, batches):
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # each has to make its own
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    trainer = wide(plan)
    for batch in batches:
        trainer.step(batch)
    torch.cuda.synchronize()
    if plan.cuda_graph:
        torch.cuda.empty_cache()  # what the check of the graph has left
        return torch.cuda.memory_reserved() - before, trainer
    return torch.cuda.max_memory_reserved() - before, trainer


def test_a_graph_takes_the_memory_of_the_step_and_shapes_share_it():
    batches = [torch.randn(8192, 1024, device="cuda")] * 6
    eager, trainer = peak(Plan(), batches)
    del trainer
    one, trainer = peak(GRAPH, batches)
    assert one < 1.05 * eager
    del trainer
    many = [torch.randn(size, 1024, device="cuda") for size in range(8192, 0, -1024)]
    all_of_them, trainer = peak(GRAPH, [b for batch in many for b in [batch] * 6])
    assert counters(trainer)["graphs"] == 8
    assert all_of_them < 1.3 * one


def test_twenty_thousand_replays_neither_grow_nor_drift():
    batches = on_gpu(make_batches(4, size=12))
    captured, plain = build("AdamW fused", GRAPH), build("AdamW fused", Plan())
    torch.manual_seed(1)
    for batch in batches * 5:
        captured.step(batch)
    before = torch.cuda.memory_allocated()
    for batch in itertools.islice(itertools.cycle(batches), 20_000):
        captured.step(batch)
    assert torch.cuda.memory_allocated() <= before + 2**16
    torch.manual_seed(1)
    for batch in itertools.islice(itertools.cycle(batches), 20_020):
        plain.step(batch)
    assert not differences(state(plain), state(captured))
    assert counters(captured)["replays"] == 20_017


# -- Any step --------------------------------------------------------------------------------------


def test_two_optimizers_and_a_generator_in_one_step():
    def make():
        torch.manual_seed(0)
        g = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).cuda()
        d = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)).cuda()
        og, od = (optim.Adam(m.parameters(), lr=1e-3, fused=True) for m in (g, d))
        noise = torch.Generator("cuda").manual_seed(7)

        def step(real):
            fake = g(torch.randn(len(real), 4, device="cuda", generator=noise))
            loss_d = F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()
            od.zero_grad(set_to_none=True)
            loss_d.backward()
            od.step()
            loss_g = F.softplus(-d(fake)).mean()
            og.zero_grad(set_to_none=True)
            loss_g.backward()
            og.step()
            return {"generator": loss_g, "discriminator": loss_d}

        return step, [g, d, og, od, noise]

    batches = [torch.randn(32, 2, device="cuda") for _ in range(40)]
    plain, parts = make()
    expected = [{k: v.detach() for k, v in plain(b).items()} for b in batches]
    step, own = make()
    with CUDAGraphStep(step, state=own) as captured:
        found = [captured(b) for b in batches]
        assert captured.report().counters["replays"] == 37
    assert not differences(expected, found)
    for a, b in zip(parts[:4], own[:4], strict=True):
        assert not differences(a.state_dict(), b.state_dict())


def test_no_sync_in_a_steady_step():
    batches = on_gpu(make_batches(4, size=12))
    captured = build("AdamW fused", GRAPH, max_grad_norm=1.0, scheduler=lambdas)
    for batch in batches * 2:
        captured.step(batch)
    with no_syncs():
        for batch in batches * 10:
            captured.step(batch)
    assert counters(captured)["replays"] == 45


def test_without_the_check_a_counter_in_python_trains_wrong():
    """The negative control of the check."""
    net = type("Breaks", (Breaks,), {"how": "counter"})
    batches = on_gpu(make_batches(6, size=12)) * 3
    captured = build("AdamW fused", Plan(cuda_graph=CUDAGraphOptions(check=False)), net=net)
    plain = build("AdamW fused", Plan(), net=net)
    assert differences(run(plain, batches), run(captured, batches))


SCRIPT = """
import torch
from test_graph_on_gpu import GRAPH, build, counters, make_batches, on_gpu, run
trainer = build("AdamW fused", GRAPH)
batches = on_gpu(make_batches(4, size=12))
run(trainer, batches * 3)
assert counters(trainer)["graphs"] == 1
# Of this process only, since others use the device too.
total = torch.cuda.get_device_properties(0).total_memory
limit = torch.cuda.memory_reserved() + (1 << 28)
torch.cuda.set_per_process_memory_fraction(limit / total)
ballast = []
try:
    while True:
        ballast.append(torch.empty(1 << 24, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError:
    pass
assert ballast
del ballast[:5]  # what cuBLAS needs in an eager step, and little more
small = on_gpu(make_batches(3, size=9))
run(trainer, small * 3)
ballast.clear()
run(trainer, batches * 3)
assert counters(trainer)["replays"] >= 9 + 12
print("survived")
"""


def test_out_of_memory_around_a_capture_is_survived():
    here = Path(__file__).parent
    paths = [str(folder) for folder in (here, here.parent, here.parent.parent)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "survived" in done.stdout
