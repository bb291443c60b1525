"""Parameters that wait on the host: the same gradients, bounded memory, copies beside the work."""

from __future__ import annotations

import copy
import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpu.syncs import forbid_syncs
from parameter_offloading import Mixture
from torchfast import (
    ActivationOffload,
    CaptureError,
    CUDAGraphStep,
    OffloadOptions,
    ParameterOffload,
    Plan,
    Recompute,
    Trainer,
)

pytestmark = pytest.mark.usefixtures("deterministic")

WIDTH, ROWS, DEPTH = 1024, 64, 8  # a block of 16 MiB, an activation of 256 KiB
BLOCK_BYTES = 4 * (2 * WIDTH * 2 * WIDTH + 3 * WIDTH + 2 * WIDTH)


class Block(nn.Module):
    def __init__(self, width=WIDTH, recompute=False):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.recompute = recompute

    def inner(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)

    def forward(self, x):
        if self.recompute:
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)


def mixture(width=256):
    """Experts in a loop, the last two of which get no tokens."""
    made = Mixture(width=width, expert=Block)
    with torch.no_grad():
        made.router.bias[-2:] = -1000.0
    return made


def built(kind="blocks", device="cuda"):
    torch.manual_seed(0)
    if kind == "mixture":
        return nn.Sequential(mixture(), mixture()).to(device)
    return nn.Sequential(*(Block(recompute=kind == "checkpoint") for _ in range(DEPTH))).to(device)


def batch(seed=1, width=WIDTH):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(ROWS, width, device="cuda", generator=generator)


def loss_fn(model, x):
    return model(x).square().mean()


def gradients(model, kind="blocks", num=3, forward=loss_fn):
    """Return the losses and the gradients of some micro-batches, added up."""
    torch.manual_seed(5)
    width = 256 if kind == "mixture" else WIDTH
    found = []
    for seed in range(num):
        loss = forward(model, batch(seed, width))
        loss.backward()
        found.append(loss.detach())
    found += [p.grad for p in model.parameters() if p.grad is not None]
    return [t.cpu() for t in found]


def same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


WHAT = {"blocks": "blocks", "checkpoint": "blocks", "mixture": ("*.experts.*",)}


@pytest.mark.parametrize("max_resident_blocks", [1, 2, 3])
@pytest.mark.parametrize("kind", WHAT)
def test_gradients_have_the_bits_of_the_model_on_the_device(kind, max_resident_blocks):
    expected = gradients(built(kind), kind)
    model = built(kind)
    parameters = list(model.parameters())
    offload = ParameterOffload(model, WHAT[kind], max_resident_blocks=max_resident_blocks)
    assert same(gradients(model, kind), expected)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert offload.counters()["offload_most_resident_blocks"] == max_resident_blocks
    offloaded = [p for p in model.parameters() if not p.is_cuda]
    assert all(p.is_pinned() for p in offloaded)
    if kind == "mixture":
        assert all(m.experts[-1].up.weight.grad is None for m in model)
    else:
        assert all(p.grad.device.type == "cpu" for p in offloaded)


@pytest.mark.parametrize("late", ["back", "out", "home"])
def test_copies_that_are_late_change_no_bit(late):
    expected = gradients(built())
    model = built()
    engine = ParameterOffload(model)._engine
    streams = {"back": engine._back, "out": engine._out, "home": torch.cuda.current_stream()}

    def forward(model, x):
        with torch.cuda.stream(streams[late]):
            torch.cuda._sleep(100_000_000)
        loss = loss_fn(model, x)
        with torch.cuda.stream(streams[late]):
            torch.cuda._sleep(100_000_000)
        return loss

    assert same(gradients(model, forward=forward), expected)


def test_on_a_side_stream_behind_the_current_one():
    expected = gradients(built())
    model = built()
    ParameterOffload(model)
    loss_fn(model, batch()).backward()  # blocks of another stream are there in between
    model.zero_grad()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = gradients(model)
    torch.cuda.synchronize()
    assert same(found, expected)


def test_a_parameter_may_be_written_as_soon_as_a_forward_returns():
    model = built().eval()
    with torch.no_grad():
        expected = model(batch()).clone()
    ParameterOffload(model)
    with torch.no_grad():
        model(batch())
        torch.cuda._sleep(200_000_000)
        found = model(batch())
        for parameter in model.parameters():
            parameter.fill_(7.0)
    assert torch.equal(found, expected)


def settled_bytes():
    """Return what is allocated when libraries have taken what they keep."""
    block = Block().cuda()
    loss_fn(block, batch()).backward()
    del block
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_of_a_step(model, forward=loss_fn):
    """Return the peak of a step, parameters included."""
    for _ in range(2):
        model.zero_grad()
        forward(model, batch()).backward()
    model.zero_grad()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    forward(model, batch()).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def test_a_model_larger_than_what_is_on_the_device():
    """Two blocks, and gradients of two, in place of eight each; it never was there as a whole."""
    before = settled_bytes()
    plain = peak_of_a_step(built()) - before
    assert settled_bytes() == before
    model = built(device="cpu")
    offload = ParameterOffload(model, device="cuda")
    assert torch.cuda.max_memory_allocated() - before < BLOCK_BYTES
    found = peak_of_a_step(model) - before
    assert plain > 2 * DEPTH * BLOCK_BYTES
    assert found < 6 * BLOCK_BYTES
    assert torch.cuda.memory_allocated() - before < BLOCK_BYTES
    assert offload.counters()["offload_most_resident_blocks"] == 2


def test_casts_of_autocast_do_not_stay():
    def forward(model, x):
        with torch.autocast("cuda", torch.bfloat16):
            return model(x).float().square().mean()

    model, deep = built(), nn.Sequential(*(Block() for _ in range(3 * DEPTH)))
    expected = gradients(copy.deepcopy(model), forward=forward)
    ParameterOffload(model)
    assert same(gradients(model, forward=forward), expected)
    ParameterOffload(deep, device="cuda")
    shallow = peak_of_a_step(model, forward)
    # A block of activations is a tenth of its weights in bf16 here.
    assert peak_of_a_step(deep, forward) - shallow < 2 * DEPTH * BLOCK_BYTES / 4


def test_a_steady_step_pins_nothing_and_makes_no_copy_that_blocks():
    model = built()
    ParameterOffload(model)
    x = batch()
    for _ in range(3):
        model.zero_grad()
        loss_fn(model, x).backward()
    model.zero_grad()
    torch.cuda.synchronize()
    pinned = torch.cuda.host_memory_stats()["num_host_alloc"]
    forbid_syncs(True)
    try:
        for _ in range(3):
            loss_fn(model, x).backward()
            model.zero_grad()
    finally:
        forbid_syncs(False)
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == pinned


def test_gradients_arrive_in_pinned_memory_and_are_not_copied_again():
    model = built()
    ParameterOffload(model)
    loss_fn(model, batch()).backward()
    assert all(p.grad.is_pinned() for p in model.parameters())


def test_with_recompute_and_offloaded_activations():
    expected = gradients(built())
    for selective in (False, True):
        model = built()
        parameters = ParameterOffload(model)
        activations = ActivationOffload(model, min_bytes=1, window_bytes=0, device="cuda")
        what = "selective" if selective else "blocks"
        recompute = Recompute(model, what)

        def forward(model, x, activations=activations):
            with activations:
                return loss_fn(model, x)

        assert same(gradients(model, forward=forward), expected)
        assert activations.counters()["offload_sent_bytes"] > 0
        recompute.close()
        parameters.close()


ADAMW = partial(torch.optim.AdamW, lr=1e-3, fused=True)


def trained(kind, plan, **options):
    model = built(kind)
    torch.manual_seed(5)
    trainer = Trainer(model, ADAMW, loss_fn, plan=plan, **options)
    width = 256 if kind == "mixture" else WIDTH
    losses = [trainer.step(batch(seed, width)) for seed in range(6)]
    report = trainer.report()
    averaged = [] if trainer.ema_model is None else list(trainer.ema_model.parameters())
    values = [*losses, *model.parameters(), *averaged]
    values = [value.detach().cpu().clone() for value in values]
    if averaged:
        trainer.ema_model(batch(9, width))  # on the device, as the model is
    trainer.close()
    assert all(p.is_cuda for p in model.parameters())
    return values, report


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1, "ema": 0.9}], ids=str)
@pytest.mark.parametrize("kind", ["blocks", "mixture"])
@pytest.mark.parametrize("optimizer", [False, True])
def test_under_a_plan(kind, optimizer, options):
    offload = OffloadOptions(parameters=WHAT[kind], activations=False, optimizer=optimizer)
    found, report = trained(kind, Plan(offload=offload, cuda_graph=True), **options)
    # All updates on the host: what is left of a difference are norms, which the host sums.
    expected, _ = trained(kind, Plan(offload="optimizer"), **options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    if optimizer and not options:
        assert same(found, expected)
    outcomes = {d.lever: d.outcome for d in report.decisions if d.lever == "cuda_graph"}
    assert outcomes == {"cuda_graph": "stepped aside"}
    assert report.counters["offload_fetched_blocks"] > 0


def test_activations_go_too_where_all_parameters_are_on_the_host():
    options = OffloadOptions(parameters="blocks", min_bytes=1, window_bytes=0)
    found, report = trained("blocks", Plan(offload=options))
    expected, _ = trained("blocks", Plan(offload="parameters"))
    assert same(found, expected)
    assert report.counters["offload_sent_bytes"] > 0


def test_a_built_optimizer_and_its_state_go_there_and_back():
    model = built()
    optimizer = ADAMW(model.parameters())
    loss_fn(model, batch()).backward()
    optimizer.step()
    trainer = Trainer(model, optimizer, loss_fn, plan=Plan(offload="parameters"))
    trainer.step(batch())
    assert all(not state["exp_avg"].is_cuda for state in optimizer.state.values())
    trainer.close()
    assert all(state["exp_avg"].is_cuda for state in optimizer.state.values())
    optimizer.zero_grad()
    loss_fn(model, batch()).backward()
    optimizer.step()


def test_a_capture_is_refused():
    model = built()
    ParameterOffload(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    call = CUDAGraphStep(step, state=[model, optimizer], on_failure="raise")

    def run():
        for seed in range(6):
            call(batch(seed))

    with pytest.raises(CaptureError, match="block '0' has its parameters on the host"):
        run()
    twin = copy.deepcopy(model).cuda()
    for each in (model, twin):
        each.zero_grad()
    assert same(gradients(model), gradients(twin))
