"""The parts of the guard: the check that changes no bit, the copy that is put back, the counts.

And that the host reads nothing for it, which on a CPU shows in the operations that were dispatched.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

from models import make_batches
from poison import BufferNet, as_batch, batches_with, fp16, poisoned_loss, run, trainer_of
from test_parity import OPTIMIZERS
from torchfast import NonfiniteOptions, Plan
from torchfast.precision import SkipCounts
from torchfast.precision.skipping import Snapshot, any_flag

CPU = torch.device("cpu")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor):
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.detach().clone().contiguous().view(INTEGERS[tensor.element_size()])


# --- the check ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_check_leaves_the_bits_of_every_finite_gradient(dtype):
    """Zeros of both signs, denormal and the largest numbers, every layout; in a whole update."""
    limits = torch.finfo(dtype)
    odd = [0.0, -0.0, limits.smallest_normal, -limits.smallest_normal / 2, limits.max, limits.min]
    values = torch.cat([torch.tensor(odd, dtype=dtype), torch.randn(1000).to(dtype)])
    gradients = [values, values[:6].view(2, 3).t(), values[:24].view(1, 2, 3, 4).clone()]
    gradients[2] = gradients[2].contiguous(memory_format=torch.channels_last)
    model = nn.ParameterList(torch.zeros_like(g) for g in gradients)
    trainer = trainer_of(partial(optim.SGD, lr=0.0), Plan(nonfinite="skip"), net=lambda: model)
    for parameter, gradient in zip(model, gradients, strict=True):
        parameter.grad = gradient.clone()
    before = [bits(g) for g in gradients]
    trainer.update()
    assert trainer.num_skipped == 0
    assert all(torch.equal(bits(p.grad), b) for p, b in zip(model, before, strict=True))
    assert any((b != 0).any() for b in before)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_check_finds_one_bad_value_among_many(dtype, value):
    model = nn.ParameterList(torch.zeros(n, dtype=dtype) for n in (3, 5000, 0, 1))
    for index, parameter in enumerate(model):
        trainer = trainer_of(partial(optim.SGD, lr=0.1), Plan(nonfinite="skip"), net=lambda: model)
        for other in model:
            other.grad = torch.ones_like(other)
        parameter.grad[-1:] = value
        before = [bits(other.grad) for other in model]
        trainer.update()
        assert trainer.num_skipped == (parameter.numel() > 0), index
        # What is thrown away may be looked at all the same.
        assert all(torch.equal(bits(o.grad), b) for o, b in zip(model, before, strict=True))
        for other in model:
            assert bool((other == 0).all()) == (parameter.numel() > 0 or other.numel() == 0)
            other.data.zero_()


def test_any_flag_is_one_or_zero():
    """A fused kernel skips at 1.0 exactly, so a sum of two would not be seen."""
    clear, set_ = torch.tensor(0.0), torch.tensor(1.0)
    for flags in ([set_], [set_, set_], [clear, torch.tensor(True), set_]):
        assert any_flag(flags, CPU).item() == 1.0
        assert any_flag(flags, CPU).dtype == torch.float32
    assert any_flag([clear, torch.tensor(False)], CPU).item() == 0.0


# --- the copy -------------------------------------------------------------------------------------

KINDS = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("flag", [0.0, 1.0])
@pytest.mark.parametrize("sizes", [[1], [3, 1, 5], [40000], [20000, 7, 0, 30000]], ids=str)
def test_a_snapshot_is_put_back_or_not(sizes, flag):
    generator = torch.Generator().manual_seed(0)
    tensors = [
        (torch.rand(size, generator=generator) * 100).to(dtype) for dtype in KINDS for size in sizes
    ]
    tensors += [torch.rand(4, 6).t(), torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)]
    tensors.append(torch.tensor([torch.nan, -torch.nan, -0.0, torch.inf]))
    before = [bits(t) for t in tensors]
    pointers = [t.data_ptr() for t in tensors]
    snapshot = Snapshot(tensors)
    for tensor in tensors:
        tensor.copy_(torch.full(tensor.shape, torch.nan).to(tensor.dtype))
    after = [bits(t) for t in tensors]
    snapshot.put_back(torch.tensor(flag))
    expected = before if flag else after
    assert all(torch.equal(bits(t), e) for t, e in zip(tensors, expected, strict=True))
    assert [t.data_ptr() for t in tensors] == pointers
    assert any(not torch.equal(b, a) for b, a in zip(before, after, strict=True))


def test_an_empty_snapshot_does_nothing():
    Snapshot([]).put_back(torch.tensor(1.0))


# --- the counts -----------------------------------------------------------------------------------


@given(
    flags=st.lists(st.booleans(), max_size=150),
    asked=st.lists(st.integers(0, 150), max_size=4),
    first=st.integers(0, 5),
)
def test_the_counts_are_those_of_a_plain_count(flags, asked, first):
    counts = SkipCounts(CPU)
    total, in_a_row, longest, last = 0, 0, 0, []
    for index, flag in enumerate(flags):
        step = first + index + 1
        counts.note(torch.tensor(float(flag)), step)
        total, in_a_row = total + flag, (in_a_row + 1) * flag
        longest, last = max(longest, in_a_row), [*last, step] if flag else last
        if index in asked:
            assert counts.read() == (total, in_a_row, longest, tuple(last[-8:]))
            counts.forget_longest()
            longest = 0
    assert counts.read() == (total, in_a_row, longest, tuple(last[-8:]))
    assert int(counts.num_skipped()) == total
    assert int(counts.longest()) == longest


def test_steps_need_not_follow_each_other():
    counts = SkipCounts(CPU)
    for step in (3, 4, 9):
        counts.note(torch.tensor(1.0), step)
    assert counts.read().last_steps == (3, 4, 9)


@pytest.mark.parametrize("noted", [0, 1, 8, 40])
def test_counts_are_loaded_where_they_were(noted):
    first, second = SkipCounts(CPU), SkipCounts(CPU)
    for step in range(1, noted + 1):
        first.note(torch.tensor(float(step > 5)), step)
    second.note(torch.tensor(1.0), 99)
    second.load_state_dict(first.state_dict())
    for counts in (first, second):
        counts.forget_longest()
        counts.note(torch.tensor(1.0), noted + 1)
    assert first.read() == second.read()


def test_counting_adds_nothing_to_a_step():
    counts, flag = SkipCounts(CPU), torch.tensor(0.0)
    with Operations() as seen:
        for step in range(1, 60):
            counts.note(flag, step)
    assert seen.names == []


# --- nothing is read on the host ------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Notes every operation; `reads` are those by which a value reaches Python."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))

    @property
    def reads(self):
        return [name for name in self.names if "_local_scalar_dense" in name or "nonzero" in name]


def reads_of(name, plan, *, poisons=(None, "NaN input", None), **options):
    trainer = trainer_of(OPTIMIZERS[name], plan, **options)
    groups = batches_with([None, None, *poisons], accumulate=options.get("accumulate", 1))
    run(trainer, groups[:2])
    with Operations() as seen:
        run(trainer, groups[2:])
    assert len(seen.names) > 50
    return seen.reads


SKIP_AFTER = Plan(nonfinite=NonfiniteOptions(stop_after=2))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_guard_reads_nothing_that_the_optimizer_does_not(name, accumulate):
    """A skipped step too: the host does not know."""
    options = {"accumulate": accumulate, "max_grad_norm": 1.0}
    if name == "SGD momentum" or "fused" in name or name == "SGD":
        assert reads_of(name, Plan(), **options) == []
    ours = reads_of(name, SKIP_AFTER, **options)
    assert len(ours) == len(reads_of(name, Plan(), poisons=(None,) * 3, **options))


@pytest.mark.parametrize("name", ["AdamW fused", "SGD nesterov fused", "SGD"])
def test_under_fp16_nothing_is_read_either(name):
    assert reads_of(name, fp16("skip"), max_grad_norm=1.0) == []
    assert reads_of(name, fp16("propagate"), max_grad_norm=1.0) == []


def test_the_detector_of_reads_fires():
    def reading(model, batch):
        return poisoned_loss(model, batch) * (1 if batch[0].sum() > 0 else 2)

    assert reads_of("SGD", SKIP_AFTER, loss_fn=reading) != []


def test_the_first_updates_are_read_until_there_is_state():
    """The control of the three ways: what cannot be undone on the device is read once."""
    for name, expected in {"SGD": 0, "AdamW fused": 0, "SGD nesterov fused": 1}.items():
        trainer = trainer_of(OPTIMIZERS[name], SKIP_AFTER)
        (good,) = batches_with([None])
        trainer.forward_backward(as_batch(good))
        with Operations() as seen:
            trainer.update()
        assert len(seen.reads) == expected, name


def test_a_buffer_of_another_form_is_the_one_read_of_a_step():
    class Growing(BufferNet):
        def forward(self, x):
            self.mean = torch.cat([self.mean, self.mean[:1]])
            self.mean = self.mean[:8] if len(self.mean) > 10 else self.mean
            return self.last(torch.relu(self.first(x)))

    trainer = trainer_of(OPTIMIZERS["SGD"], SKIP_AFTER, net=Growing)
    batch = (*make_batches(1)[0], None)
    with Operations() as seen:
        trainer.step(batch)
    assert len(seen.reads) == 1
