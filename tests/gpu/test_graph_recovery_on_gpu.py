"""Captured steps on a real device: recovered from every failure, and flat in memory."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from gpu.graph_jobs import (
    GRAPH,
    Net,
    assert_same_training,
    build,
    counters,
    loss_fn,
    on_gpu,
    run,
    state,
)
from models import make_batches
from torchfast import (
    CUDAGraphOptions,
    Plan,
)
from torchfast._core.compare import differences
from torchfast._core.pinned_block import PinnedBlock
from torchfast.graphs import attributes, replay_check, run_ends, saved_named_state

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Let go of what tests before this one have compiled: beside it no constants are tried."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


# -- What cannot be captured -----------------------------------------------------------------------


class Breaks(Net):
    how = ""

    def __init__(self):
        super().__init__()
        # Where nobody looks for one.
        self.among_many = [torch.Generator("cuda").manual_seed(3)] * 1000
        self.calls = [0]

    def forward(self, x):
        self.calls[0] += 1
        capturing = torch._C._cuda_isCurrentStreamCapturing()  # the other one is told no
        if self.how == "item":
            x = x * (1.0 + 0.0 * x.sum().item())
        elif self.how == "copy":  # another value each time
            x = x + 0.0 * torch.tensor(float(self.calls[0])).to(x.device)
        elif self.how == "mask":
            x = x + 0.0 * x[x > 0].sum()
        elif self.how == "nonzero":
            x = x + 0.0 * x.nonzero().sum()
        elif self.how == "generator":
            x = x * torch.rand(x.shape, device=x.device, generator=self.among_many[0])
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
    "copy": "has another value each time",
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
    """And what the capture has counted is put back."""
    net = type("Breaks", (Breaks,), {"how": "counter"})
    captured = build("AdamW fused", GRAPH, net=net)
    batches = on_gpu(make_batches(6, size=12)) * 3
    assert_same_training(build("AdamW fused", Plan(), net=net), captured, batches)
    (why,) = [d.detail for d in captured.report().stepped_aside if d.lever == "cuda_graph"]
    assert "the step changes what no replay changes: 'calls' of Breaks" in why
    assert counters(captured)["replays"] == 0


@pytest.fixture
def large_beside_the_device(monkeypatch):
    """The state counts as too large for copies: digests, samples, and a copy on the host."""
    blocks = []

    def pinned(*args):
        blocks.append(PinnedBlock(*args))
        return blocks[-1]

    monkeypatch.setattr(run_ends, "SAMPLE", 8)
    monkeypatch.setattr(saved_named_state, "PinnedBlock", pinned)
    for module in (replay_check, saved_named_state):
        monkeypatch.setattr(module, "have_room", lambda *_: False)
    yield
    assert blocks
    assert all(block.memory.is_pinned() for block in blocks)


@pytest.mark.usefixtures("large_beside_the_device")
def test_a_large_state_is_checked_as_well():
    batches = on_gpu(make_batches(6, size=12)) * 3
    captured = build("AdamW fused", GRAPH)
    assert_same_training(build("AdamW fused", Plan()), captured, batches)
    assert counters(captured)["graphs"] == 1
    test_a_step_that_counts_in_python_is_found_out()


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


@pytest.mark.parametrize("host_constants", ["auto", True, False])
def test_constants_that_are_copied_from_the_host_are_no_obstacle(host_constants):
    batches = on_gpu(make_batches(6, size=12)) * 3 + on_gpu(make_batches(2, size=5)) * 3
    plan = Plan(cuda_graph=CUDAGraphOptions(host_constants=host_constants))
    captured = build("AdamW fused", plan, net=CopiesConstants)
    assert_same_training(build("AdamW fused", Plan(), net=CopiesConstants), captured, batches)
    if host_constants is False:
        assert counters(captured)["graphs"] == 0
        (why, *_) = [d.detail for d in captured.report().stepped_aside if d.lever == "cuda_graph"]
        assert "copies between host and device" in why
        assert "set host_constants=True" in why
        return
    assert counters(captured)["graphs"] == 2
    assert counters(captured)["replays"] > 12


class CopiesScales(Net):
    """Brings numbers of a list, and indices."""

    def __init__(self):
        super().__init__()
        self.scales = [0.5 + k / 8 for k in range(8)]

    def brought(self, x):
        return torch.tensor(self.scales, device=x.device)

    def forward(self, x):
        return super().forward(x * self.brought(x) + (x[:, [0]] - x[..., [-1]]))


class CopiesATensor(CopiesScales):
    """Brings a tensor that was on the host before."""

    def __init__(self):
        super().__init__()
        self.scales = torch.tensor(self.scales)

    def brought(self, x):
        return self.scales.to(x.device)


@pytest.mark.parametrize("net", [CopiesScales, CopiesATensor])
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_change_of_what_was_taken_for_a_constant_is_noticed(how, net):
    batches = on_gpu(make_batches(6, size=12)) * 5

    def trained(plan):
        trainer = build("AdamW fused", plan, net=net)
        losses, model = [], trainer.model
        torch.manual_seed(1)
        for number, batch in enumerate(batches):
            if number in (10, 22) and how == "in place":
                model.scales[number % 8] = float(number)
            elif number in (10, 22):
                model.scales = model.scales * 2
                model.scales = model.scales[:8]  # of a list it is twice as long
                model.scales[1] = float(number)
            losses.append(trainer.step(batch).clone())
        return trainer, losses

    (plain, expected), (captured, found) = trained(Plan()), trained(GRAPH)
    assert not differences(expected, found)
    assert not differences(state(plain), state(captured))
    if net is CopiesATensor:
        assert counters(captured)["captures"] == 0
        (why, *_) = [d.detail for d in captured.report().stepped_aside if d.lever == "cuda_graph"]
        assert "a change might not be noticed" in why
        return
    assert counters(captured)["captures"] == 3
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
    ours, was_there = [], False
    for batch in captured.prefetch(uneven(60), background=True):
        was_there |= any(t.name == "torchfast-stager" for t in threading.enumerate())
        ours.append(captured.step(batch).clone())
    assert was_there
    torch.manual_seed(1)
    expected = [plain.step(b).clone() for b in plain.prefetch(uneven(60))]
    assert not differences(expected, ours)
    assert counters(captured)["graphs"] == 5


class LayerDrop(Net):
    """Beside dropout, which draws on the device."""

    probability = 0.0

    def forward(self, x):
        if torch.rand([]) < self.probability:
            x = torch.tanh(x)
        if torch.rand([]) >= self.probability:
            x = x * 0.5
        return super().forward(x)


@pytest.mark.parametrize("name", ["AdamW fused", "AdamW"])
@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_draws_on_the_host_that_are_only_compared_are_made_before_each_replay(name, probability):
    net = type("LayerDrop", (LayerDrop,), {"probability": probability})
    batches = on_gpu(make_batches(6, size=12)) * 6
    plain, captured = build(name, Plan(), net=net), build(name, GRAPH, net=net)
    losses, expected = run(plain, batches), torch.get_rng_state()
    assert not differences(losses, run(captured, batches))
    assert torch.equal(torch.get_rng_state(), expected)
    assert not differences(state(plain), state(captured))
    found = counters(captured)
    assert found["graphs"] == 1
    assert found["replays"] == 32 if not probability else found["replays"] >= 2
    assert found["replays"] + found["eager steps"] == 36


def test_without_the_checks_a_counter_in_python_trains_wrong(monkeypatch):
    """The negative control of both: nobody looks at values beside tensors, nor compares replays."""
    monkeypatch.setattr(attributes, "places", lambda *_: iter(()))
    net = type("Breaks", (Breaks,), {"how": "counter"})
    batches = on_gpu(make_batches(6, size=12)) * 3
    captured = build("AdamW fused", Plan(cuda_graph=CUDAGraphOptions(check=False)), net=net)
    plain = build("AdamW fused", Plan(), net=net)
    assert differences(run(plain, batches), run(captured, batches))
    assert counters(captured)["replays"] > 0


# -- Memory ----------------------------------------------------------------------------------------


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


SCRIPT = """
import torch
from gpu.graph_jobs import GRAPH, build, counters, on_gpu, run
from models import make_batches
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
