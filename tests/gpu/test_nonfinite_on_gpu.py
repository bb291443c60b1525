"""The guard where it matters: no host sync, also in a step that is skipped, and no bit changed.

By the runtime's trace too, which sees every synchronisation: this file run on a case prints them.
"""

from __future__ import annotations

import copy
import json
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from gpu.own_process import told_by
from gpu.test_syncs import STEPS, forbid_syncs, no_syncs
from models import make_batches
from poison import (
    POISONS,
    BufferNet,
    as_batch,
    assert_same,
    batches_with,
    check_bad_changes_no_bit,
    cured,
    draw_as,
    fp16,
    poisoned_loss,
    run,
    state_of,
    trainer_of,
)
from test_parity import OPTIMIZERS
from torchfast import NonfiniteOptions, Plan, PrecisionOptions, Trainer
from torchfast.precision.skipping import Snapshot

GUARD = Plan(nonfinite=NonfiniteOptions(stop_after=100))
FAST = Plan.preset("fast").replace(nonfinite="skip")
FP16 = Plan(
    precision=PrecisionOptions(format="fp16", init_scale=256.0),
    nonfinite=NonfiniteOptions(stop_after=100),
)
# Adafactor has no form that keeps its counter on the device, and Adagrad none before torch 2.12.
MAY_BE_ON_HOST = ["Adafactor", "Adagrad"]
GIVEN_FUSED = ["SGD nesterov fused", "AdamW fused"]
STEPS_TO_SKIP = ["NaN input", None, None, "NaN gradient", "infinite loss", None, "NaN loss only"]


def on_gpu(groups):
    return [[(x.cuda(), y.cuda(), poison) for x, y, poison in group] for group in groups]


# --- no host sync ---------------------------------------------------------------------------------


def steady(name, plan, accumulate):
    """Return a trainer that has its state, and batches among which each poison stands once."""
    trainer = trainer_of(
        OPTIMIZERS[name], plan, device="cuda", max_grad_norm=1.0, accumulate=accumulate
    )
    groups = on_gpu(batches_with([None, *POISONS], accumulate=accumulate))
    batches = [as_batch(group) for group in groups]
    for _ in range(5):
        trainer.step(batches[0])
    return trainer, batches


def can_be_on_device(make):
    """Whether torch, asked without torchfast, has a form that keeps all state on the device."""
    for form in ("fused", "capturable"):
        parameter = nn.Parameter(torch.ones(1, device="cuda"))
        parameter.grad = torch.ones_like(parameter)
        try:
            optimizer = make([parameter], **{form: True})
            optimizer.step()
        except (TypeError, RuntimeError):  # no such argument; not for this device
            continue
        if all(value.is_cuda for value in optimizer.state[parameter].values()):
            return True
    return False


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("plan", [GUARD, FAST, FP16], ids=["as given", "fast", "fp16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_steps_read_nothing_unless_state_has_to_be_on_the_host(name, plan, accumulate):
    trainer, batches = steady(name, plan, accumulate)
    says = {d.lever: d.detail for d in trainer.report().decisions}["nonfinite"]
    if not can_be_on_device(OPTIMIZERS[name]):
        assert name in MAY_BE_ON_HOST
        assert "reads one flag" in says
        with pytest.raises(RuntimeError, match="synchroniz"), no_syncs():
            trainer.step(batches[0])
        return
    assert "reads" not in says
    before = trainer.num_skipped
    with no_syncs():
        for index in range(STEPS):
            trainer.step(batches[index % len(batches)])
    expected = sum(index % len(batches) != 0 for index in range(STEPS))
    assert trainer.num_skipped - before == expected
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    assert all(b.isfinite().all() for b in trainer.model.buffers() if b.is_floating_point())


def test_a_hundred_steps_settle_their_counts_without_a_sync():
    trainer, batches = steady("AdamW fused", GUARD, 1)
    with no_syncs():
        for _ in range(150):
            trainer.step(batches[0])
            trainer.step(batches[1])
    counters = trainer.report().to_dict()["counters"]
    assert counters["skipped"] == 150
    assert counters["last skipped steps"].split()[-1] == "305"


def test_fit_watches_without_a_sync():
    trainer, batches = steady("AdamW", Plan(nonfinite=NonfiniteOptions(stop_after=3)), 1)
    seen = []

    def callback(event):
        if event.kind == "step" and event.num_steps in (15, 60):
            forbid_syncs(event.num_steps == 15)
        if event.kind == "log":
            seen.append(event.record["skipped"])

    loader = [batches[0], batches[0], batches[1]]
    result = trainer.fit(loader, steps=61, log_every=5, progress=False, callbacks=[callback])
    assert result.stopped_by == "steps"
    assert seen == sorted(seen)
    assert seen[-1] == 20


def test_fit_stops_though_it_reads_late():
    trainer, batches = steady("AdamW", Plan(nonfinite=NonfiniteOptions(stop_after=3)), 1)
    result = trainer.fit([batches[1]], steps=5000, progress=False)
    assert result.stopped_by == "nonfinite"
    assert result.num_steps < 4000


@pytest.mark.parametrize("name", MAY_BE_ON_HOST)
def test_what_reads_says_so_before_its_first_step_and_after(name):
    trainer = trainer_of(OPTIMIZERS[name], GUARD, device="cuda")
    (good,) = on_gpu(batches_with([None]))
    for _ in range(3):
        says = {d.lever: d.detail for d in trainer.report().decisions}["nonfinite"]
        assert ("reads one flag" in says) == (not can_be_on_device(OPTIMIZERS[name]))
        run(trainer, [good])


def trace(name):
    """Run this file on a case; return the synchronisations that the runtime's trace saw."""
    return told_by(__file__, name)


@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "SGD momentum"])
def test_the_trace_sees_no_synchronisation(name):
    assert trace(name) == []


def test_the_trace_fires():
    assert trace("Adafactor") != []


# --- no bit changed -------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_batch_is_as_if_it_had_never_been(name, accumulate, clip):
    """Under one plan with and without it, since the guard may change the optimizer's form."""
    groups = on_gpu(batches_with(STEPS_TO_SKIP, accumulate=accumulate))
    options = {"device": "cuda", "accumulate": accumulate, "max_grad_norm": clip}
    ours = trainer_of(OPTIMIZERS[name], GUARD, **options)
    reference = trainer_of(OPTIMIZERS[name], GUARD, **options)
    run(ours, groups)
    torch.manual_seed(1)
    for group in groups:
        if group == cured(group):
            reference.step(as_batch(group))
        else:
            draw_as(reference, group)
    assert_same(state_of(reference), state_of(ours))
    assert ours.num_skipped == 4


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("plan", [GUARD, FAST, fp16("skip")], ids=["as given", "fast", "fp16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_kind_of_poison_changes_no_bit(name, plan, poison):
    trainer = trainer_of(OPTIMIZERS[name], plan, device="cuda", max_grad_norm=1.0)
    good, bad = on_gpu(batches_with([None, poison]))
    check_bad_changes_no_bit(trainer, good, bad, good)


@pytest.mark.parametrize("name", GIVEN_FUSED)
def test_without_a_bad_batch_nothing_changes(name):
    """Where the guard has no need of another form, which may round otherwise."""
    groups = on_gpu(batches_with([None] * 5, accumulate=2))
    options = {"device": "cuda", "accumulate": 2, "max_grad_norm": 0.5}
    ours = trainer_of(OPTIMIZERS[name], GUARD, **options)
    reference = trainer_of(OPTIMIZERS[name], Plan(), **options)
    losses = [torch.stack(run(trainer, groups)) for trainer in (ours, reference)]
    assert torch.equal(*losses)
    expected, found = (state_of(t) for t in (reference, ours))
    assert_same(expected["parameters"], found["parameters"])
    assert_same(expected["buffers"], found["buffers"])
    assert_same(expected["optimizer"]["state"], found["optimizer"]["state"])


def test_what_was_given_capturable_stays_so():
    make = partial(optim.AdamW, lr=0.01, capturable=True)
    trainer = trainer_of(make, GUARD, device="cuda")
    assert trainer.optimizer.param_groups[0]["capturable"] is True
    assert not trainer.optimizer.param_groups[0]["fused"]
    good, bad = on_gpu(batches_with([None, "NaN input"]))
    run(trainer, [good])
    before = state_of(trainer)
    run(trainer, [bad])
    assert_same(before, state_of(trainer))


# --- gradients of every kind ----------------------------------------------------------------------

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("layout", ["dense", "strided", "overlong"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_check_is_exact(dtype, layout):
    """It finds each bad value wherever it stands, passes the largest, and changes no bit.

    But for the payload of a float16 NaN: the device has one NaN when it converts float32 to that.
    """
    limits = torch.finfo(dtype)

    def made(value=None, place=0):
        size = {"dense": (3000,), "strided": (50, 60), "overlong": (200_003,)}[layout]
        gradient = torch.full(size, limits.max, dtype=dtype, device="cuda")
        gradient.view(-1)[:4] = torch.tensor(
            [0.0, -0.0, limits.smallest_normal / 2, limits.min], dtype=dtype
        )
        if value is not None:
            gradient.view(-1)[place] = value
        return gradient.t()[:, ::2] if layout == "strided" else gradient

    size = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    for value in (None, torch.nan, torch.inf, -torch.inf):
        for place in (0, -62):
            gradients = [made(), made(value, place), made()[:0]]
            before = [g.clone(memory_format=torch.contiguous_format) for g in gradients]
            model = nn.ParameterList(torch.zeros_like(g) for g in gradients)
            trainer = Trainer(model, partial(optim.SGD, lr=0.0), poisoned_loss, GUARD)
            for parameter, gradient in zip(model, gradients, strict=True):
                parameter.grad = gradient
            guard = trainer._step._guard
            with no_syncs():
                guard.judge()
            assert float(guard._flag) == (value is not None)
            for parameter, old in zip(model, before, strict=True):
                new = parameter.grad.contiguous()
                assert torch.equal(new.isnan(), old.isnan())
                kept = ~old.isnan() if dtype == torch.float16 else torch.ones_like(old).bool()
                assert torch.equal(new.view(size)[kept], old.view(size)[kept])


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "RMSprop"])
def test_a_model_in_bf16_is_guarded(name):
    trainer = trainer_of(
        OPTIMIZERS[name],
        GUARD,
        net=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).bfloat16(),
        device="cuda",
        loss_fn=lambda m, b: poisoned_loss(m, (b[0].bfloat16(), *b[1:])),
    )
    for poison in POISONS:
        good, bad = on_gpu(batches_with([None, poison]))
        run(trainer, [good])
        before = state_of(trainer)
        run(trainer, [bad])
        assert_same(before, state_of(trainer))
    assert trainer.num_skipped == len(POISONS)


def test_sparse_gradients_are_judged():
    model = nn.Embedding(50, 4, sparse=True).cuda()
    trainer = Trainer(
        model,
        partial(optim.SGD, lr=0.1),
        lambda m, b: (m(b[0]) * b[1]).square().mean(),
        GUARD,
    )
    ids = torch.randint(50, (6,), device="cuda")
    trainer.step((ids, 1.0))
    before = state_of(trainer)
    trainer.step((ids, torch.inf))
    assert_same(before, state_of(trainer))


# --- buffers --------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    """Statistics of several layers, more of them than one launch takes."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(9))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(9))
        self.head = nn.Linear(8, 4)
        self.register_buffer("large", torch.zeros(300, 300), persistent=False)

    def forward(self, x):
        self.large += 1
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("plan", [GUARD, FAST, FP16], ids=["as given", "fast", "fp16"])
def test_statistics_of_batchnorm_are_put_back(plan):
    trainer = trainer_of(OPTIMIZERS["AdamW"], plan, net=ConvNet, device="cuda")
    images, labels = torch.randn(4, 3, 8, 8).cuda(), torch.randint(4, (4,)).cuda()
    trainer.step((images, labels, None))
    before = state_of(trainer)
    trainer.step((images, labels, "NaN input"))
    assert_same(before, state_of(trainer))
    trainer.step((images, labels, None))
    assert float(trainer.model.large[0, 0]) == 2.0


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_a_snapshot_of_every_dtype_is_put_back_or_not(flag):
    dtypes = [torch.float8_e4m3fn, torch.bool, torch.uint8, torch.int64, torch.complex64, *DTYPES]
    tensors = [
        (torch.rand(n, device="cuda") * 100).to(dtype) for dtype in dtypes for n in (1, 7, 0, 40000)
    ]
    tensors.append(torch.rand(2, 3, 4, 4, device="cuda").to(memory_format=torch.channels_last))
    before = copy.deepcopy(tensors)
    snapshot = Snapshot(tensors)
    flag = torch.tensor(flag, device="cuda")
    for tensor in tensors:
        tensor.zero_()
    with no_syncs():
        snapshot.put_back(flag)
    for tensor, old in zip(tensors, before, strict=True):
        expected = old if flag else torch.zeros_like(old)
        if tensor.dtype == torch.float8_e4m3fn:  # which equal() does not take
            tensor, expected = tensor.view(torch.uint8), expected.view(torch.uint8)
        assert torch.equal(tensor, expected)


# --- two devices ----------------------------------------------------------------------------------


class Apart(nn.Module):
    """Its halves lie on two devices."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16).to("cuda:0")
        self.norm = nn.BatchNorm1d(16).to("cuda:1")
        self.last = nn.Linear(16, 4).to("cuda:1")

    def forward(self, x):
        return self.last(self.norm(self.first(x).to("cuda:1"))).to("cuda:0")


@pytest.mark.requires(gpus=2)
@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "SGD momentum", "RMSprop"])
def test_one_bad_device_is_enough(name, place):
    torch.manual_seed(0)
    trainer = Trainer(Apart(), OPTIMIZERS[name], poisoned_loss, GUARD, device=None)
    good, bad = on_gpu(batches_with([None, None]))
    run(trainer, [good])
    before = state_of(trainer)
    layer = getattr(trainer.model, place)
    hook = layer.weight.register_hook(lambda g: g * torch.nan)
    run(trainer, [bad])
    assert_same(before, state_of(trainer))
    hook.remove()
    run(trainer, batches_with(["NaN input"]))
    assert_same(before, state_of(trainer))
    assert trainer.num_skipped == 2


def main(name):
    """Print the synchronisations of fifty steps, a third of them skipped."""
    torch._C._activate_gpu_trace()
    from torch.cuda import _gpu_trace

    seen = []
    _gpu_trace.register_callback_for_device_synchronization(lambda: seen.append("device"))
    _gpu_trace.register_callback_for_stream_synchronization(lambda _: seen.append("stream"))
    _gpu_trace.register_callback_for_event_synchronization(lambda _: seen.append("event"))
    trainer = trainer_of(OPTIMIZERS[name], GUARD, net=BufferNet, device="cuda", max_grad_norm=1.0)
    inputs, targets = (t.cuda() for t in make_batches(1)[0])
    for _ in range(5):
        trainer.step((inputs, targets, None))
    seen.clear()
    for index in range(STEPS):
        trainer.step((inputs, targets, None if index % 3 else "NaN input"))
    print(json.dumps(seen))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
