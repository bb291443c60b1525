"""Steps that cannot be captured train on as they are, and say why; nothing of them is left over."""

from __future__ import annotations

import contextlib
import copy
import random
from functools import partial
from queue import SimpleQueue

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR

from models import DropoutNet, make_batches, mean_loss
from poison import BufferNet
from tape import CPU, Twins, counts, reasons
from torchfast import CaptureError, CUDAGraphOptions, Plan
from torchfast._core.compare import differences
from torchfast._core.rng import get_rng_state, preserved_rng, seed_everything
from torchfast.graphs import CUDAGraphStep, failures
from torchfast.graphs.watch import StateWatch

pytestmark = pytest.mark.usefixtures("tape")

ADAMW = partial(optim.AdamW, lr=0.01, fused=True)


def reads_item(model, batch):
    loss = mean_loss(model, batch)
    return loss * (2.0 if loss.item() > 1.0 else 1.0)


def reads_nonzero(model, batch):
    inputs, targets = batch
    rows = torch.nonzero(targets >= 0).flatten()
    return F.cross_entropy(model(inputs)[rows], targets[rows])


def indexes_by_mask(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs)[targets >= 0], targets)


def draws_python(model, batch):
    return mean_loss(model, batch) * random.random()


def draws_numpy(model, batch):
    return mean_loss(model, batch) * float(np.random.rand())


class Counted:
    """Depends on how often it was called."""

    def __init__(self):
        self.count = 0

    def __call__(self, model, batch):
        self.count += 1
        return mean_loss(model, batch) / self.count


class Growing(DropoutNet):
    """A buffer that is larger after each step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("means", torch.zeros(0))

    def forward(self, x):
        self.means = torch.cat([self.means, x.detach().mean().reshape(1)])
        return super().forward(x) + self.means.mean()


class Counting(DropoutNet):
    """A number of the module's own, which the step changes."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls


class Toggling(DropoutNet):
    """A word of the module's own, which the step changes; only the check can see what it means."""

    def __init__(self):
        super().__init__()
        self.phase = "even"

    def forward(self, x):
        scale = 1.0 if self.phase == "even" else 0.5
        self.phase = "odd" if self.phase == "even" else "even"
        return super().forward(x) * scale


WAITS = "the host waits for the device"
UNCAPTURED = {
    "item": (reads_item, WAITS, "in reads_item: return loss * (2.0 if loss.item() > 1.0"),
    "nonzero": (reads_nonzero, WAITS, "in reads_nonzero: rows = torch.nonzero(targets >= 0)"),
    "mask": (indexes_by_mask, WAITS, "in indexes_by_mask: return F.cross_entropy(model("),
    "random": (draws_python, "draws from random,", "outside the step"),
    "numpy": (draws_numpy, "draws from numpy.random,", "outside the step"),
}


@pytest.mark.parametrize("bare", [False, True], ids=["trainer", "bare"])
@pytest.mark.parametrize("name", UNCAPTURED)
def test_a_step_that_cannot_be_captured_goes_on_and_says_why(name, bare, caplog):
    loss_fn, reason, detail = UNCAPTURED[name]
    twins = Twins(DropoutNet, ADAMW, loss_fn, bare=bare, clip=0.5)
    twins.run(make_batches(12))
    assert twins.counts == (0, 0, 12, 0)
    (told,) = reasons(twins.captured)
    assert reason in told
    assert detail in told
    if reason is WAITS:
        assert "tests/test_graph_recovery.py:" in told
        assert "torch.where for a choice" in told
    (warning,) = [r.getMessage() for r in caplog.records]
    assert warning == f"cuda_graph: steps of {told.replace(': ', ' run eagerly: ', 1)}"


OF_MODULES = {
    "number": (Counting, "'calls' of Counting, a number on the host; make it a buffer"),
    "word": (Toggling, "2 replays and 2 eager steps from the same state"),
}


@pytest.mark.parametrize("bare", [False, True], ids=["trainer", "bare"])
@pytest.mark.parametrize("name", OF_MODULES)
def test_a_step_that_depends_on_what_its_module_counts_runs_as_it_is(name, bare, caplog):
    net, reason = OF_MODULES[name]
    twins = Twins(net, ADAMW, bare=bare)
    twins.run(make_batches(12))
    assert twins.counts[:3] == (0, 0, 12)
    (told,) = reasons(twins.captured)
    assert reason in told
    assert len(caplog.records) == 1


@pytest.mark.parametrize("bare", [False, True], ids=["trainer", "bare"])
def test_a_step_that_depends_on_a_counter_nobody_named_is_not_replayed(bare):
    """The counter cannot be put back, but that a replay does not move it can be found."""
    twins = Twins(DropoutNet, ADAMW, Counted(), bare=bare)
    for batch in make_batches(12):
        twins.step(batch)
    assert twins.counts[:3] == (0, 0, 12)


def scaled_by_itself(loss):
    return loss * loss.item()


def test_of_nested_functions_the_line_that_did_it_is_told():
    twins = Twins(DropoutNet, ADAMW, lambda m, b: scaled_by_itself(mean_loss(m, b)))
    twins.run(make_batches(5))
    (told,) = reasons(twins.captured)
    assert "in scaled_by_itself: return loss * loss.item()" in told
    assert "<lambda>" not in told


def test_an_error_in_the_capture_alone_costs_the_graph_and_nothing_else(caplog):
    captured = SimpleQueue()  # into which nobody looks: a list would be put back

    def loss_fn(model, batch):
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            captured.put(1)
            raise ValueError("only\nthen")
        return mean_loss(model, batch)

    twins = Twins(BufferNet, ADAMW, loss_fn)
    twins.run(make_batches(12))
    assert twins.counts == (0, 0, 12, 0)
    (told,) = reasons(twins.captured)
    assert told.startswith("6x8 float32, 6 int64: ValueError: only at ")
    assert 'in loss_fn: raise ValueError("only\\nthen")' in told
    assert captured.qsize() == 1
    assert len(caplog.records) == 1


@pytest.mark.parametrize("bare", [False, True], ids=["trainer", "bare"])
def test_a_step_that_grows_a_buffer_runs_as_it_is(bare):
    twins = Twins(Growing, ADAMW, bare=bare)
    twins.run(make_batches(12))
    assert len(twins.model.means) == 12
    assert twins.counts == (0, 0, 12, 0)
    (told,) = reasons(twins.captured)
    assert "was replaced by the step itself, so a replay would read what is gone" in told


class Late(DropoutNet):
    """A layer whose parameters have gradients, and so optimizer state, only when asked."""

    def __init__(self):
        super().__init__()
        self.late = nn.Linear(4, 4)
        self.is_late = False

    def forward(self, x):
        out = super().forward(x)
        return self.late(out) if self.is_late else out


@pytest.mark.parametrize("when", [3, 4])
def test_state_made_at_a_later_step_is_made_outside_a_graph(when):
    twins = Twins(Late, ADAMW)
    for number, batch in enumerate(make_batches(12)):
        if number == when - 1:
            twins.both(lambda model, _: setattr(model, "is_late", True))
        twins.step(batch)
        twins.check()
    if when == 4:  # the step that was to be captured runs as it is, the next one is captured
        assert twins.counts == (1, 8, 4, 1)
    assert reasons(twins.captured) == []


HIDDEN = torch.Generator()
AMONG_MANY = [HIDDEN] * 1000  # data, where nobody looks for state


def generator_twins(*, named):
    """A plain loop and a captured step that mask by a generator; the step, and what differs."""
    results = []
    for is_captured in (False, True):
        seed_everything(0)
        model = nn.Linear(8, 4)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        HIDDEN.manual_seed(5)

        def step(batch, model=model, optimizer=optimizer):
            inputs, targets = batch
            mask = torch.rand(inputs.shape, generator=AMONG_MANY[0]) > 0.3
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs * mask), targets)
            loss.backward()
            optimizer.step()
            return loss.detach()

        fn = step
        if is_captured:
            state = [model, optimizer, *([HIDDEN] if named else [])]
            fn = CUDAGraphStep(step, state=state)
        losses = [fn(batch) for batch in make_batches(12)]
        results.append([losses, model.state_dict(), HIDDEN.get_state()])
    return fn, differences(*results)


def test_a_named_generator_goes_on_in_replays():
    step, found = generator_twins(named=True)
    assert found == []
    assert counts(step) == (1, 9, 3, 1)


def test_a_generator_that_was_not_named_is_found_and_the_step_runs_as_it_is():
    """What the capture has drawn from it cannot be put back, but no mask repeats."""
    step, _ = generator_twins(named=False)
    assert counts(step)[:3] == (0, 0, 12)
    (told,) = reasons(step)
    assert "replays do not differ: the step depends on something that is not named" in told


# --- what a failed capture leaves behind ----------------------------------------------------------


def whole_state(model, optimizer):
    return copy.deepcopy(
        {
            "parameters": dict(model.named_parameters()),
            "buffers": dict(model.named_buffers()),
            "gradients": [p.grad for p in model.parameters()],
            "optimizer": optimizer.state_dict(),
            "generators": get_rng_state(CPU),
        }
    )


FAILURES = {
    "item": (BufferNet, reads_item, "the host waits for the device"),
    "random": (BufferNet, draws_python, "draws from random"),
    "growing": (Growing, mean_loss, "was replaced by the step itself"),
    "number": (Counting, mean_loss, "a number on the host"),
    "word": (Toggling, mean_loss, "replays and 2 eager steps"),
}


@pytest.mark.parametrize("bare", [False, True], ids=["trainer", "bare"])
@pytest.mark.parametrize("name", FAILURES)
def test_a_capture_that_raises_leaves_everything_as_it_was(name, bare):
    net, loss_fn, reason = FAILURES[name]
    options = {"on_failure": "raise"}
    if not bare:
        options = {"plan": Plan(cuda_graph=CUDAGraphOptions(**options))}
    twins = Twins(net, ADAMW, loss_fn, bare=bare, **options)
    batches = make_batches(4)
    with preserved_rng(CPU):
        seed_everything(1)
        step = twins.captured
        for batch in batches[:3]:
            step(batch)
        before = whole_state(twins.model, twins.own)
        memory = [t.data_ptr() for t in (*twins.model.parameters(), *twins.model.buffers())]
        with pytest.raises(CaptureError, match=rf"6x8 float32, 6 int64\) was not .*{reason}"):
            step(batches[3])
        assert not differences(before, whole_state(twins.model, twins.own))
        now = [t.data_ptr() for t in (*twins.model.parameters(), *twins.model.buffers())]
        assert now == memory
        step(batches[3])  # as it is from now on
        assert differences(before, whole_state(twins.model, twins.own))
    assert counts(step)[2] == 4


def test_the_error_of_a_capture_has_its_cause():
    step = CUDAGraphStep(lambda x: x.sum().item(), on_failure="raise", device="cpu")
    for _ in range(3):
        step(torch.ones(2))
    with pytest.raises(CaptureError, match=r"\.item\(\)") as caught:
        step(torch.ones(2))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_failed_capture_leaves_no_gradient_of_its_own():
    twins = Twins(DropoutNet, ADAMW, reads_item)
    twins.run(make_batches(4))
    gradients = [p.grad for p in twins.model.parameters()]
    assert all(g is not None for g in gradients)
    twins.run(make_batches(1))
    assert all(
        not torch.equal(a, p.grad) for a, p in zip(gradients, twins.model.parameters(), strict=True)
    )


def test_one_kind_of_step_that_fails_leaves_the_others_their_graph(caplog):
    def loss_fn(model, batch):
        loss = mean_loss(model, batch)
        return loss * 1.0 if len(batch[0]) == 6 else loss * loss.item()

    twins = Twins(DropoutNet, ADAMW, loss_fn)
    for _ in range(4):
        twins.run([*make_batches(4), *make_batches(1, size=3)])
    assert twins.counts == (1, 13, 7, 1)
    assert len(caplog.records) == 1


def test_two_kinds_that_fail_for_one_reason_are_warned_of_once(caplog):
    twins = Twins(DropoutNet, ADAMW, reads_item)
    for _ in range(4):
        twins.run([*make_batches(2), *make_batches(1, size=3)])
    assert len(reasons(twins.captured)) == 2
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "file",
    [
        "/tmp/torchinductor_me/ab/cab.py",
        "/somewhere/own/ab/cab.py",
        "/home/me/.triton/cache/ab/kernel.py",
        contextlib.__file__,
        torch.__file__,
    ],
)
def test_the_line_is_neither_of_generated_code_nor_of_the_standard_library(file, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere/own")
    scope = {}
    exec(compile("def run():\n    raise KeyError\n", file, "exec"), scope)
    with pytest.raises(KeyError) as caught:
        scope["run"]()
    line = failures.user_line(caught.value)
    assert line.startswith(f"{__file__}:")
    assert line.endswith('scope["run"]()')


@contextlib.contextmanager
def looks(monkeypatch):
    """Count how often everything is looked at that steers a step's control flow."""
    found, mode = [], StateWatch.mode
    with monkeypatch.context() as patch:
        patch.setattr(StateWatch, "mode", lambda self: found.append(self) or mode(self))
        yield found


def test_what_is_not_captured_is_looked_at_now_and_then(monkeypatch):
    """Before each step it would cost the host what nothing gains."""
    twins = Twins(DropoutNet, ADAMW, reads_item)
    twins.run(make_batches(6))
    with looks(monkeypatch) as found:
        twins.run(make_batches(66))
    assert 1 <= len(found) <= 3
    with looks(monkeypatch) as found:
        twins.run(make_batches(33, size=3))  # another kind: warmed up and tried by itself
    assert 3 <= len(found) <= 6
    assert twins.counts[0] == 0


def test_what_is_not_captured_runs_as_if_nothing_were_to_be(tape):
    """On the stream that is current and with rates that are floats, as without a graph."""
    found = []

    def loss_fn(model, batch):
        if model is twins.model:
            rate = twins.own.param_groups[0]["lr"]
            found.append((tape[-1].on_side_stream, type(rate)))
        return reads_item(model, batch)

    twins = Twins(DropoutNet, ADAMW, loss_fn, scheduler=partial(StepLR, step_size=1))
    twins.run(make_batches(8))
    assert found[0] == (1, torch.Tensor)  # a warm-up step
    assert found[-1] == (0, float)
    assert tape[-1].num_released == 1


def test_a_step_that_a_graph_can_hold_after_a_change_of_mode_is_captured_soon():
    def loss_fn(model, batch):
        loss = mean_loss(model, batch)
        return loss * (1.0 + (loss.item() > 1e9)) if model.training else loss

    twins = Twins(DropoutNet, ADAMW, loss_fn)
    twins.run(make_batches(6))
    assert twins.counts[0] == 0
    twins.both(lambda model, _: model.eval())
    twins.run(make_batches(40), gradients=False)
    assert twins.counts[0] == 1
    # A graph there is; what it was captured from is looked at before each step.
    twins.both(lambda model, _: model.train())
    twins.run(make_batches(3), gradients=False)
    assert len(reasons(twins.captured)) == 1
