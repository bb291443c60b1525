"""SyncGuard names the line that makes the host wait, and no other."""

from __future__ import annotations

import inspect
import logging
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from host_waits import (
    BELOW,
    KINDS,
    batch,
    branch,
    expected,
    found,
    here,
    invert,
    marked,
    read_item,
    repeat,
    to_host,
    to_numpy,
    torch_left_as_it_was,
    write_selected,
)
from torchfast import HostSyncError, SyncGuard
from torchfast._core import syncs
from torchfast._core.sync_calls import SURE, sync_calls
from torchfast.graphs.constants import HostConstants

IN_GRAPHS = (to_host, to_numpy, write_selected, repeat, invert)


@pytest.fixture(autouse=True)
def torch_stays_as_it_was():
    with torch_left_as_it_was():
        yield


@pytest.mark.parametrize("function", KINDS, ids=lambda f: f.__name__)
def test_each_kind_is_found_at_its_line(function):
    without = function(batch())
    with SyncGuard(device="cpu") as guard:
        results = [function(batch()) for _ in range(3)]
    assert found(guard) == expected(function, 3)
    assert all(torch.equal(result, without) for result in results)


@pytest.mark.parametrize("function", KINDS, ids=lambda f: f.__name__)
def test_each_kind_is_found_in_a_compiled_function(function, fresh_dynamo):
    def graphs(step):
        torch._dynamo.reset()
        stats = torch._dynamo.utils.counters
        stats.clear()
        result = step(batch())
        step(batch())
        return (
            result,
            stats["stats"]["unique_graphs"],
            len(stats["graph_break"]),
            stats["frames"].copy(),
        )

    compiled = torch.compile(function, backend="aot_eager")
    without = graphs(compiled)
    compiled = torch.compile(function, backend="aot_eager")
    with SyncGuard(device="cpu") as guard:
        under = graphs(compiled)
    assert torch.equal(under[0], without[0])
    assert under[1:3] == without[1:3]  # as many graphs and breaks as without the guard
    assert under[3]["total"] <= without[3]["total"]  # what print does is not looked at
    assert under[3]["ok"] == under[3]["total"]
    if guard.report():
        ((file, line, name, kind, times),) = found(guard)
        assert (file, name, times) == (
            __file__.replace("test_sync_guard", "host_waits"),
            *expected(function, 2)[0][2::2],
        )
        # Of what runs within a graph the function is known, not the line in it.
        if (line, kind) != marked(function):
            assert function in IN_GRAPHS
    else:
        # The compiler has taken the call into a graph, where no Python runs.
        assert function in IN_GRAPHS


@pytest.mark.parametrize("function", KINDS, ids=lambda f: f.__name__)
def test_each_kind_is_raised_at_its_line(function):
    line, kind = marked(function)
    with (
        pytest.raises(HostSyncError, match=f"{kind}.*:{line}, in {function.__name__}"),
        SyncGuard("raise", device="cpu"),
    ):
        function(batch())


@pytest.mark.parametrize("function", BELOW, ids=lambda f: f.__name__)
def test_what_is_below_the_calls_is_found_at_its_line(function):
    without = function(batch())
    with SyncGuard(device="cpu") as guard:
        result = function(batch())
    assert {row[:4] for row in found(guard)} == {row[:4] for row in expected(function, 1)}
    assert result.dtype == without.dtype
    assert result.shape == without.shape
    line, kind = marked(function)
    with (
        pytest.raises(HostSyncError, match=f"{kind}.*:{line}, in {function.__name__}"),
        SyncGuard("raise", device="cpu"),
    ):
        function(batch())


@pytest.mark.parametrize("function", BELOW, ids=lambda f: f.__name__)
def test_a_mode_of_torchfasts_that_a_call_passes_hides_no_wait(function):
    # As in the steps that warm a graph up: what they copy from the host is looked at.
    with SyncGuard(device="cpu") as guard:
        function(batch())
    with SyncGuard(device="cpu") as under, HostConstants(torch.device("meta")).recording():
        function(batch())
    assert found(guard)
    assert found(under) == found(guard)


@pytest.mark.parametrize("read", [range, [1, 2, 3].__getitem__, "abc".__mul__])
def test_a_tensor_where_python_wants_a_whole_number_is_found(read):
    with SyncGuard(device="cpu") as guard:
        line = here() + 1
        read(torch.tensor(2))
    assert [(s.line, s.kind) for s in guard.report().syncs] == [(line, "index")]


def test_what_reads_numbers_on_the_host_only_is_silent():
    x = torch.randn(6, 6)
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 3), torch.tensor([3, 2]))
    with SyncGuard("raise", device="cpu"):
        x.std()
        torch.var(x)
        x.quantile(0.5)
        torch.nanquantile(x, torch.tensor([0.5]))
        torch.linalg.inv_ex(x)
        torch.linalg.solve_ex(x, x)
        torch.tensor_split(x, torch.tensor(3))  # torch wants that tensor on the host
        F.multilabel_margin_loss(x, torch.zeros(6, 6, dtype=torch.long))
        nn.LSTM(3, 4)(packed)
        torch.multinomial(x.abs(), 1)  # what it asserts is left to the device
        torch._assert_async(x.abs().sum() > 0)
        x.clone().masked_scatter_(x > 0, x)
        x.masked_fill(x > 0, 2.0)
        x.index_put((torch.tensor([1]),), torch.ones(6))
    with SyncGuard(device="cpu") as guard:
        x.std()
        x.sum().item()
    assert [(s.kind, s.count) for s in guard.report().syncs] == [("item", 1)]


def test_a_graph_of_the_compilers_is_not_changed_by_the_net(fresh_dynamo):
    def function(x):
        return F.gelu(x) * 2

    compiled = torch.compile(function, backend="aot_eager")
    stats = torch._dynamo.utils.counters["stats"]
    stats.clear()
    with SyncGuard(device="cpu") as guard:
        compiled(batch())
    assert stats["unique_graphs"] == 1
    compiled(batch())
    assert stats["unique_graphs"] == 1
    assert not guard.report()


def test_the_net_is_taken_in_with_the_last_guard():
    def kernels():
        names = ("_local_scalar_dense", "nonzero", "equal", "std.correction")
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        return [has(f"aten::{name}", "BackendSelect") for name in names]

    assert not any(kernels())
    with SyncGuard(device="cpu"):
        with SyncGuard(device="cpu"):
            assert all(kernels())
        assert all(kernels())
    assert not any(kernels())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.norm(x)[:, -1].to(torch.float32))


def clean_step(model, optimizer, tokens):
    logits = model(tokens)
    target = torch.where(tokens[:, 0] > 3, tokens[:, 0], tokens[:, 1])
    loss = F.cross_entropy(logits, target)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    mask = torch.zeros_like(logits, dtype=torch.bool)
    logits.detach()[mask] = 0.0  # one value: a masked_fill
    logits.detach().repeat_interleave(2, dim=0)
    return loss.detach()


@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.NAdam]
)
def test_a_clean_step_is_silent(make):
    model = Net()
    optimizer = make(model.parameters(), lr=1e-3)
    with SyncGuard("raise", device="cpu") as guard:
        for _ in range(3):
            clean_step(model, optimizer, torch.arange(12).reshape(3, 4))
    assert not guard.report()
    assert str(guard.report()) == "the host would wait on CUDA at no line"


def test_loaders_are_the_hosts_own():
    class Items(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.tensor(float(torch.ones(2).sum().item() + index))

    with SyncGuard(device="cpu") as guard:
        batches = list(DataLoader(Items(), batch_size=2))
    assert not guard.report()
    assert len(batches) == 2


def test_other_threads_are_not_heard():
    def work():
        torch.ones(2).sum().item()

    with SyncGuard(device="cpu") as guard:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not guard.report()
    with SyncGuard(device="cpu") as guard:
        work()
    assert guard.report().count == 1


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.sum().item()  # waits: item


def test_a_wait_in_a_backward_is_found():
    line, _ = marked(Reads)
    x = torch.ones(3, requires_grad=True)
    with SyncGuard(device="cpu") as guard:
        Reads.apply(x).sum().backward()
    assert [(s.line, s.function, s.kind) for s in guard.report().syncs] == [
        (line, "backward", "item")
    ]


def test_a_wait_in_a_backward_on_a_thread_of_autograds_is_found(monkeypatch):
    # On CUDA the engine runs a backward on a thread of its own, which entered no guard.
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 7)
    with SyncGuard(device="cpu") as guard:
        thread = threading.Thread(target=lambda: torch.ones(2).sum().item())
        thread.start()
        thread.join()
    assert guard.report().count == 1


def test_torch_is_passed_through_to_the_users_line():
    x = torch.ones(3)
    with SyncGuard(device="cpu") as guard:
        inside = 1.0 in x  # torch/_tensor.py calls item()
    (sync,) = guard.report().syncs
    assert inside
    assert (sync.kind, sync.via, sync.source[:6]) == ("item", "torch._tensor", "inside")


def test_torchfasts_own_waits_are_left_out():
    from torchfast._core.reading import Reading

    with SyncGuard("raise", device="cpu") as guard:
        assert Reading({"loss": torch.ones(())}, torch.device("cpu")).read() == {"loss": 1.0}
    assert not guard.report()


def test_a_warning_a_line(caplog):
    with caplog.at_level(logging.WARNING), SyncGuard("warn", device="cpu"):
        for _ in range(3):
            read_item(batch())
        branch(batch())
    assert [r.getMessage().split(" at ")[0] for r in caplog.records] == [
        "the host waits for the device: item",
        "the host waits for the device: bool",
    ]


def test_raising_leaves_the_state_alone():
    model = Net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(HostSyncError, match="keep it a tensor"), SyncGuard("raise", device="cpu"):
        read_item(batch())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert read_item(batch()).shape == (3, 4)


def test_guards_nest():
    with SyncGuard(device="cpu") as outer:
        read_item(batch())
        with SyncGuard(device="cpu") as inner:
            read_item(batch())
    assert (outer.report().count, inner.report().count) == (2, 1)


def test_an_error_inside_of_a_call_is_no_wait():
    with SyncGuard(device="cpu") as guard, pytest.raises(RuntimeError):
        torch.ones(3).item()
    assert not guard.report()


def test_the_account_is_bounded():
    guard = SyncGuard(device="cpu", max_lines=4)
    lines = "\n".join(["x.item()"] * 40)
    with guard:
        exec(compile(lines, "many.py", "exec"), {"x": torch.ones(())})
        for _ in range(5):
            read_item(batch())
    report = guard.report()
    assert len(report.syncs) == 4
    assert (report.count, report.num_left_out) == (45, 41 - 4)
    assert report.syncs[0].count == 5
    assert "elsewhere" in str(report)
    guard.reset()
    assert guard.report().count == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"mode": "shout"}, ValueError),
        ({"device": "mps"}, ValueError),
        ({"max_lines": 0}, ValueError),
    ],
)
def test_bad_arguments(options, error):
    with pytest.raises(error):
        SyncGuard(**options)


def test_the_report_can_be_read():
    with SyncGuard(device="cpu") as guard:
        read_item(batch())
    text = str(guard.report())
    assert text.startswith("the host would wait on CUDA 1 times")
    assert "read_item: return x + x.sum().item()" in text
    assert "-> keep it a tensor" in text


def test_the_tensors_of_a_compilation_are_not_looked_at():
    from torch._subclasses import FakeTensorMode

    real = torch.ones(3), torch.ones(3, dtype=torch.bool), torch.ones(3)
    with FakeTensorMode() as mode:
        traced = tuple(mode.from_tensor(tensor) for tensor in real)
    found = [
        (call.name, call.judge(real, {}, frozenset({"cpu"})))
        for call in sync_calls()
        if call.owner is torch.Tensor and call.judge(traced, {}, frozenset({"cpu"}))
    ]
    assert found == []
    assert sum(c.judge(real, {}, frozenset({"cpu"})) == SURE for c in sync_calls()) > 15


def test_what_print_does_inside_is_one_wait():
    x = torch.ones(())
    with SyncGuard(device="cpu") as guard:
        str(x)  # torch reads the number by item()
    assert [(s.kind, s.count) for s in guard.report().syncs] == [("print", 1)]


@pytest.mark.parametrize(("module", "is_the_users"), [("torch.optim.x", True), ("torch.x", False)])
def test_waits_of_an_optimizer_that_torchfast_calls_are_the_users(module, is_the_users):
    def place():
        return syncs._place(inspect.currentframe().f_back, "item", frozenset({"cuda"}))

    torchs = {"__name__": module, "place": place}
    exec(compile("def step(): return place()", torch.__file__, "exec"), torchs)
    ours = {"__name__": "torchfast.x", "step": torchs["step"]}
    exec(compile("def update(): return step()", syncs.__file__, "exec"), ours)
    line = here() + 1
    found = ours["update"]()
    if is_the_users:
        assert (found.file, found.line, found.via) == (__file__, line, module)
    else:
        assert found is None


def test_what_cannot_be_judged_runs_as_it_is():
    class Strange(torch.Tensor):
        @property
        def device(self):
            raise LookupError("no device")

    with SyncGuard(device="cpu") as guard:
        assert torch.ones(()).as_subclass(Strange).item() == 1.0
    assert not guard.report()
