"""Running out of memory on a real device, made small for the test and put back after it.

The account against the allocator's own counters, memory that is free again after the error, steps
in parts beside whole ones, and training that goes on.
"""

from __future__ import annotations

import gc
import pickle
import time
from queue import SimpleQueue

import pytest
import torch
from torch import nn, optim

from torchfast import (
    CaptureError,
    CUDAGraphOptions,
    MemoryPool,
    OutOfMemoryError,
    OutOfMemoryOptions,
    Plan,
    Trainer,
)
from torchfast.memory import account as account_module
from torchfast.memory.failure import AccountTaker

pytestmark = pytest.mark.requires(gpus=1)

MB = 2**20
WIDTH = 512
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def limited():
    """Return a function that leaves so many megabytes more than what is reserved now."""
    before = torch.cuda.get_per_process_memory_fraction(DEVICE)
    total = torch.cuda.get_device_properties(DEVICE).total_memory

    def limit(megabytes):
        gc.collect()
        # Wherever cuBLAS has got its workspace, the rest of that segment is not given back; of one
        # that held gigabytes once, a test could have what it is to lack.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        segments = [
            s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == (0, 0)
        ]
        blocks = [block for segment in segments for block in segment["blocks"]]
        free = max((b["size"] for b in blocks if b["state"] == "inactive"), default=0)
        assert free < megabytes * MB, f"{free} bytes are free in a segment that holds tensors"
        most = torch.cuda.memory_reserved(DEVICE) + megabytes * MB
        torch.cuda.set_per_process_memory_fraction(most / total, DEVICE)
        return most

    yield limit
    torch.cuda.set_per_process_memory_fraction(before, DEVICE)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def all_are_told(monkeypatch):
    """The largest ten may all be of others: libraries keep 32 MB for each thread and stream."""
    monkeypatch.setattr(account_module, "_LARGEST", 10_000)


class Asks(torch.autograd.Function):
    """Asks for memory in its forward or its backward, if the net says so."""

    @staticmethod
    def forward(ctx, x, net):
        ctx.net = net
        net.ask("forward", x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.net.ask("backward", gradient)
        return gradient, None


class Net(nn.Module):
    def __init__(self, where="never"):
        super().__init__()
        self.layers = nn.Sequential(*[self._layer() for _ in range(4)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.where = where
        self.num_calls = 0  # in training
        self.seen = SimpleQueue()  # into which nobody looks: in a list it would be put back
        self.asked = 1024 * MB

    @staticmethod
    def _layer():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    def ask(self, where, like):
        if torch.cuda.is_current_stream_capturing():
            where = "capture"
        if where != self.where:
            return
        self.seen.put(torch.cuda.memory_allocated(DEVICE))
        torch.empty(self.asked, dtype=torch.uint8, device=like.device)

    def allocated(self):
        """What was in use when it asked last."""
        while self.seen.qsize() > 1:
            self.seen.get()
        return self.seen.get()

    def forward(self, x):
        self.num_calls += self.training  # some samples are tried in eval mode before a split
        x = self.norm(self.layers(x))
        return Asks.apply(x, self)


class AskingAdamW(optim.AdamW):
    asks = False
    allocated = 0

    def step(self, closure=None):
        if self.asks:
            self.allocated = torch.cuda.memory_allocated(DEVICE)
            torch.empty(1024 * MB, dtype=torch.uint8, device=DEVICE)
        return super().step(closure)


def loss_fn(model, x):
    return model(x).square().mean()


def batch(size=4096, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(size, WIDTH, device=DEVICE, generator=generator)


def make(net=None, plan="eager", **options):
    torch.manual_seed(0)
    net = (net or Net()).to(DEVICE)
    return Trainer(net, AskingAdamW(net.parameters(), lr=1e-3), loss_fn, plan, **options)


def rounded(tensors):
    return sum(-(-t.numel() * t.element_size() // 512) * 512 for t in tensors)


@pytest.mark.usefixtures("all_are_told")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_account_agrees_with_the_allocator(limited, where):
    trainer = make()
    net = trainer.model
    x = batch()  # which the frames of the test hold as long as the error lives
    trainer.step(x)  # libraries make their workspaces, the optimizer its state
    before = torch.cuda.memory_allocated(DEVICE)
    most = limited(384)
    net.where = where
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        trainer.step(x)
    after = torch.cuda.memory_allocated(DEVICE)
    account = caught.value.account
    assert account.stage == where
    assert account.requested_bytes >= net.asked
    assert account.limit_bytes == pytest.approx(most, rel=0.01)
    adds_up(account, net.allocated())
    parameters = list(net.parameters())
    assert account.bytes_of("parameters") == pytest.approx(rounded(parameters), rel=0.02)
    moments = [t for s in trainer.optimizer.state.values() for t in s.values() if t.is_cuda]
    assert account.bytes_of("optimizer state") == pytest.approx(rounded(moments), rel=0.02)
    assert account.bytes_of("the batch") == pytest.approx(4096 * WIDTH * 4, rel=0.02)
    assert account.bytes_of("activations and other intermediates") > 4 * 4096 * WIDTH * 4
    assert any("(4096, 512) float32" in held.form for held in account.largest)
    # What the step has allocated is free, though the error lives.
    assert after <= before
    net.where = "never"
    trainer.step(batch(64))
    assert trainer.num_steps == 2


def test_the_account_asks_for_no_memory_and_takes_no_time(limited, monkeypatch):
    seen = {}
    take = AccountTaker.take

    def watched(self, error, pieces):
        def count():
            return torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"]

        before, started = count(), time.perf_counter()
        account = take(self, error, pieces)
        seen.update(made=count() - before, seconds=time.perf_counter() - started)
        return account

    monkeypatch.setattr(AccountTaker, "take", watched)
    trainer = make(Net("forward"))
    limited(384)
    with pytest.raises(OutOfMemoryError):
        trainer.step(batch())
    assert seen["made"] == 0
    assert seen["seconds"] < 10


def test_an_update_that_fails(limited):
    trainer = make()
    x = batch()
    trainer.step(x)
    before = torch.cuda.memory_allocated(DEVICE)
    limited(384)
    trainer.optimizer.asks = True
    with pytest.raises(OutOfMemoryError, match="some parameters may be updated") as caught:
        trainer.step(x)
    account = caught.value.account
    assert account.stage == "update"
    adds_up(account, trainer.optimizer.allocated)
    parameters = list(trainer.model.parameters())  # whose gradients were there, and are dropped now
    assert account.bytes_of("gradients") == pytest.approx(rounded(parameters), rel=0.02)
    assert torch.cuda.memory_allocated(DEVICE) <= before
    trainer.optimizer.asks = False
    trainer.step(batch())
    assert trainer.num_steps == 2


def adds_up(account, allocated):
    """An account is within 2 % of what the allocator said by itself."""
    in_use = sum(line.num_bytes for line in account.in_use)
    assert in_use == pytest.approx(account.allocated_bytes, rel=0.02)
    assert in_use == pytest.approx(allocated, rel=0.02)
    reserved = in_use + sum(line.num_bytes for line in account.not_in_use)
    assert reserved == pytest.approx(account.reserved_bytes, rel=0.02)


def test_a_real_lack_without_a_plant(limited):
    """Activations of a batch that is too large, in C++ all the way."""
    trainer = make()
    trainer.step(batch(64))
    limited(600)
    trainer.step(batch(64))  # libraries make their workspaces anew
    x = torch.zeros(1, WIDTH, device=DEVICE).expand(2**17, WIDTH)  # 256 MB a layer's output
    before = torch.cuda.memory_allocated(DEVICE)
    with pytest.raises(OutOfMemoryError) as caught:
        trainer.step(x)
    account = caught.value.account
    in_use = sum(line.num_bytes for line in account.in_use)
    assert in_use == pytest.approx(account.allocated_bytes, rel=0.02)
    assert account.in_use[0].name == "activations and other intermediates"
    assert torch.cuda.memory_allocated(DEVICE) <= before
    trainer.step(batch(64))


def test_pools_are_told_from_graphs(limited):
    """A pool with tensors and with free memory, and a graph that keeps what it captured with."""
    pool = MemoryPool("cache", device=DEVICE)
    with pool:
        held = [torch.zeros(48 * MB, dtype=torch.uint8, device=DEVICE) for _ in range(3)]
    del held[1]
    net = PlainNet().to(DEVICE)
    captured = Trainer(net, optim.SGD(net.parameters(), lr=0.1), loss_fn, Plan(cuda_graph=graphs()))
    repeated(captured.step, batch())
    assert captured.report().counters["graphs"] == 1
    trainer = make(Net("forward"))
    limited(384)
    with pytest.raises(OutOfMemoryError) as caught:
        trainer.step(batch())
    account = caught.value.account
    adds_up(account, trainer.model.allocated())
    assert account.bytes_of("pool 'cache'") == 96 * MB
    assert account.bytes_of("free in memory pools") == 48 * MB
    assert account.bytes_of("kept by graphs for their replays") > 4 * 4096 * WIDTH * 4
    captured.close()


@pytest.mark.usefixtures("all_are_told")
def test_lines_and_modules(limited):
    trainer = make(Net("forward"), plan=Plan(out_of_memory=OutOfMemoryOptions(lines=True)))
    assert torch._C._cuda_isHistoryEnabled()
    limited(384)
    with pytest.raises(OutOfMemoryError) as caught:
        trainer.step(batch())
    trainer.close()
    assert not torch._C._cuda_isHistoryEnabled()
    assert caught.value.account.modules[0].name == "Net (the model)"
    assert any("test_out_of_memory_on_gpu.py" in held.line for held in caught.value.account.largest)


def test_the_snapshot_can_be_read(limited, tmp_path):
    options = OutOfMemoryOptions(snapshot=tmp_path, history=1000)
    trainer = make(Net("backward"), plan=Plan(out_of_memory=options))
    limited(384)
    with pytest.raises(OutOfMemoryError) as caught:
        trainer.step(batch())
    trainer.close()
    assert not torch._C._cuda_isHistoryEnabled()
    with open(caught.value.account.snapshot_path, "rb") as file:
        snapshot = pickle.load(file)
    assert snapshot["segments"]
    events = snapshot["device_traces"][DEVICE.index]
    assert 0 < len(events) <= 1000
    assert any(event["action"] == "oom" for event in events)


def test_a_fit_watches_memory():
    trainer = make()
    result = trainer.fit([batch(64).cpu()] * 4, steps=40, log_every=20, progress="off")
    record = [r for r in result.history if "loss" in r][-1]
    assert record["memory"]["allocated_bytes"] > 0
    assert "out_of_memory" not in record
    assert [d.outcome for d in trainer.report().decisions if d.lever == "memory"] == ["applied"]


# --- captures -----------------------------------------------------------------------------------


def graphs(**options):
    return CUDAGraphOptions(warm_up_steps=1, check=False, **options)


def repeated(step, x):
    for _ in range(3):
        step(x)


def test_a_capture_that_runs_out_is_an_eager_step(limited, caplog):
    torch.manual_seed(0)
    trainer = make(Net("capture"), plan=Plan(cuda_graph=graphs()))
    twin = make()
    limited(384)
    for each in (trainer, twin):
        for seed in range(3):
            each.step(batch(seed=seed))
    assert "memory ran out" in caplog.text
    assert "out of memory in the capture" in caplog.text
    account = trainer._step.memory.last_account
    assert account.stage == "capture"
    assert account.requested_bytes >= trainer.model.asked
    adds_up(account, trainer.model.allocated())
    parameters = list(trainer.model.parameters())
    assert account.bytes_of("parameters") == pytest.approx(rounded(parameters), rel=0.02)
    counters = trainer.report().counters
    assert counters["graphs"] == 0
    assert counters["captures_out_of_memory"] == 1
    assert "out_of_memory" not in counters
    for ours, theirs in zip(trainer.model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    trainer.close()


def test_a_capture_that_is_to_raise_keeps_no_memory(limited):
    plan = Plan(cuda_graph=graphs(on_failure="raise"))
    trainer = make(Net("capture"), plan=plan)
    x = batch()
    trainer.step(x)
    before = torch.cuda.memory_allocated(DEVICE)
    limited(384)
    with pytest.raises(CaptureError, match="memory ran out") as caught:
        repeated(trainer.step, x)
    gc.collect()
    assert caught.value.account.stage == "capture"
    adds_up(caught.value.account, trainer.model.allocated())
    # What the capture has put aside to be put back is a few buffers.
    assert torch.cuda.memory_allocated(DEVICE) <= before + MB
    del caught
    trainer.close()
    make().step(batch(64))


# --- in parts -----------------------------------------------------------------------------------


class PlainNet(nn.Module):
    """Without statistics over the batch, so that parts are the same."""

    def __init__(self):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


def trained(plan, size, steps, limit=None):
    torch.manual_seed(0)
    net = PlainNet().to(DEVICE)
    trainer = Trainer(net, optim.SGD(net.parameters(), lr=0.1, momentum=0.9), loss_fn, plan)
    trainer.step(batch(64))
    if limit is not None:
        limit(1000)  # a whole step of 2**15 needs more than 1100, a graph of its halves 870
    losses = [trainer.step(batch(size, seed)).item() for seed in range(steps)]
    return trainer, losses


@pytest.mark.parametrize("graph", [False, True])
def test_steps_in_parts_train_as_whole_ones(limited, graph):
    size = 2**15  # 64 MB a layer's output
    options = graphs() if graph else False
    whole, expected = trained("eager", size, 6)
    expected_weights = [p.detach().cpu() for p in whole.model.parameters()]
    whole.close()
    del whole
    plan = Plan(out_of_memory="split", cuda_graph=options)
    parts, losses = trained(plan, size, 6, limited)
    counters = parts.report().counters
    assert counters["out_of_memory"] >= 1
    assert counters["split_steps"] == 6
    assert losses == pytest.approx(expected, rel=1e-4)
    for ours, theirs in zip(parts.model.parameters(), expected_weights, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs, rtol=1e-3, atol=1e-5)
    if graph:
        assert counters["graphs"] >= 1
    parts.close()


def test_what_never_fits_ends(limited):
    net = Net("forward")
    net.norm = nn.BatchNorm1d(WIDTH, affine=False).eval()  # which a single sample would not do for
    trainer = make(net, plan=Plan(out_of_memory="split"))
    before = torch.cuda.memory_allocated(DEVICE)
    limited(384)
    with pytest.raises(OutOfMemoryError, match="a single sample does not fit"):
        trainer.step(batch(16))
    assert trainer.model.num_calls == 5
    # Libraries may have made their workspaces meanwhile.
    assert torch.cuda.memory_allocated(DEVICE) <= before + 64 * MB
