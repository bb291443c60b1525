"""What was in memory when there was no more: every block counted once, and named where it can be.

The allocator is played by blocks that lie where the tensors of the test do; the real one is in
`tests/gpu/test_out_of_memory_on_gpu.py`.
"""

from __future__ import annotations

import inspect
import json
import pickle

import pytest
import torch
from torch import nn, optim
from torch._subclasses import FakeTensorMode

from allocator_blocks import FAR, MB, block, block_of, moment_of, segment
from models import mean_loss
from planting import Planted
from torchfast import OutOfMemoryError, OutOfMemoryOptions, Plan, Trainer
from torchfast.memory import failure, moment, out_of_memory
from torchfast.memory.account import CACHED, GRAPHS, GRAPHS_KEPT, PENDING, PIECES, REST, look
from torchfast.memory.moment import CUDAMoments, requested_of
from torchfast.memory.owners import Owner, known_owners, living_owners

CPU = torch.device("cpu")


def by_name(lines):
    return {line.name: (line.num_bytes, line.num_blocks) for line in lines}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(256, 512), nn.BatchNorm1d(512)
        self.second = nn.Linear(512, 64)

    def forward(self, x):
        hidden = self.first(x)
        return self.second(torch.relu(self.norm(hidden)))


def trained():
    torch.manual_seed(0)
    model = Net()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def job():
    return trained()


def test_every_category_is_found_and_the_sums_agree(job):
    model, optimizer = job
    batch = (torch.randn(8, 256), torch.zeros(8, dtype=torch.long))
    ring = torch.zeros(4096, dtype=torch.uint8)
    known = known_owners(model, optimizer, batch, {"the loader's ring": [ring]}, CPU)
    held = {
        "parameters": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters()],
        "optimizer state": [t for table in optimizer.state.values() for t in table.values()],
        "buffers": list(model.buffers()),
        "the batch": list(batch),
        "the loader's ring": [ring],
    }
    free = segment(block(FAR, 4 * MB, "inactive"))
    mixed = segment(
        block(FAR + 10 * MB, MB),
        block(FAR + 11 * MB, 2 * MB, "inactive"),
        block(FAR + 13 * MB, MB, "active_pending_free"),
    )
    graphs = segment(
        block(FAR + 20 * MB, MB), block(FAR + 21 * MB, 3 * MB, "inactive"), pool=(0, 7)
    )
    # Small tensors of torch's on the CPU may share a 512-byte block; each has one of its own here.
    tensors = [segment(block_of(t)) for each in held.values() for t in each]
    now = moment_of(*tensors, free, mixed, graphs)
    found = look(now, known, [], model)
    lines = by_name(found.in_use)
    for name, each in held.items():
        assert lines[name] == (sum(block_of(t)["size"] for t in each), len(each)), name
    assert lines[REST] == (MB, 1)
    assert lines[GRAPHS] == (MB, 1)
    assert by_name(found.not_in_use) == {
        CACHED: (4 * MB, 1),
        PIECES: (2 * MB, 1),
        PENDING: (MB, 1),
        GRAPHS_KEPT: (3 * MB, 1),
    }
    in_use = sum(line.num_bytes for line in found.in_use)
    assert in_use == now.allocated_bytes
    assert in_use + sum(line.num_bytes for line in found.not_in_use) == now.reserved_bytes
    assert sizes_fall(found.in_use)
    assert sizes_fall(found.largest)


def sizes_fall(lines):
    sizes = [line.num_bytes for line in lines]
    return sizes == sorted(sizes, reverse=True)


def test_a_gradient_in_a_graphs_pool_is_a_gradient(job):
    model, optimizer = job
    gradient = model.first.weight.grad
    now = moment_of(segment(block_of(gradient), pool=(0, 3)))
    found = look(now, known_owners(model, optimizer, (), {}, CPU), [], model)
    [line] = found.in_use
    assert line.name == "gradients"
    assert found.largest[0].name == "first.weight"
    assert found.largest[0].form == "(512, 256) float32"


def test_a_storage_in_the_middle_of_a_block():
    owners = [Owner(FAR + 512, 100, "parameters", "inside", ""), Owner(FAR + MB, 8, "x", "out", "")]
    found = look(moment_of(segment(block(FAR, MB))), owners, [], nn.Identity())
    assert found.largest[0].name == "inside"
    assert by_name(found.in_use) == {"parameters": (MB, 1)}


def test_what_only_python_knows_has_its_shape(job):
    model, optimizer = job
    alive = torch.relu(model.first(torch.randn(16, 256)))
    known, living = known_owners(model, optimizer, (), {}, CPU), living_owners(CPU)
    found = look(moment_of(segment(block_of(alive))), known, living, model)
    [held] = found.largest
    assert (held.category, held.form) == (REST, "(16, 512) float32")
    assert held.name == "ReluBackward0"


def test_a_part_of_a_storage_is_told_as_one_and_the_largest_of_them_is_shown(job):
    model, optimizer = job
    whole = torch.zeros(6, 4)
    parts = [whole[:2], whole[:4]]
    known = known_owners(model, optimizer, parts, {}, CPU)
    [owner] = [owner for owner in known if owner.category == "the batch"]
    assert (owner.form, owner.num_bytes) == ("(4, 4) float32, a part of it", 96)
    [owner] = [o for o in living_owners(CPU) if o.address == whole.data_ptr()]
    assert owner.form == "(6, 4) float32"


def test_lines_and_modules_by_the_frames_of_a_block(job):
    model, _ = job
    lines, start = inspect.getsourcelines(Net.forward)
    own = {"filename": __file__, "line": start + len(lines) - 1, "name": "forward"}
    of_torch = {"filename": inspect.getsourcefile(nn.Linear), "line": 134, "name": "forward"}
    linear = inspect.getsourcelines(nn.Linear.forward)[1] + 1
    of_torch["line"] = linear
    elsewhere = {"filename": "train.py", "line": 3, "name": "<module>"}
    now = moment_of(
        segment(
            block(FAR, 3 * MB, frames=[of_torch, own, elsewhere]),
            block(FAR + 3 * MB, MB, frames=[of_torch, elsewhere]),
            block(FAR + 4 * MB, 2 * MB, frames=[elsewhere]),
        )
    )
    found = look(now, [], [], model)
    assert by_name(found.modules) == {
        "Net (the model)": (3 * MB, 1),
        "train.py:3 in <module>": (2 * MB, 1),
        "Linear (2 of them)": (MB, 1),
    }
    assert found.largest[0].line == f"{__file__}:{own['line']} in forward"


def test_tensors_made_of_others_and_sparse_ones_are_counted():
    model = nn.Embedding(32, 8, sparse=True)
    model(torch.arange(4)).sum().backward()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    known = known_owners(model, optimizer, (), {}, CPU)
    gradients = {owner.form for owner in known if owner.category == "gradients"}
    assert gradients == {"(1, 4) int64", "(4, 8) float32"}


def test_odd_objects_do_not_disturb():
    class Claims:
        @property
        def __class__(self):
            raise AssertionError("asked")

    kept = [Claims(), torch.empty(4, device="meta")]
    assert all(owner.num_bytes for owner in living_owners(CPU))
    del kept


def test_fake_tensors_hold_nothing(recwarn):
    """A compiler's, which says that it is on the device."""
    with FakeTensorMode():
        fake = torch.empty(40, 40)
    model = nn.Linear(2, 2)
    model.extra = fake
    optimizer = optim.SGD(model.parameters())
    batch = {"fake": fake}
    assert fake.device == CPU
    forms = [owner.form for owner in living_owners(CPU)]
    forms += [owner.form for owner in known_owners(model, optimizer, batch, {}, CPU)]
    assert "(2, 2) float32" in forms
    assert "(40, 40) float32" not in forms
    assert not [w for w in recwarn if "FakeTensor" in str(w.message)]


# --- through a step -----------------------------------------------------------------------------


class Played:
    """A source that answers with what a test has laid down."""

    def __init__(self, now):
        self.now = now
        self.calls = []

    def open(self):
        self.calls.append("open")

    def close(self):
        self.calls.append("close")

    def start(self):
        self.calls.append("start")

    def stop(self):
        self.calls.append("stop")

    def take(self):
        now = self.now() if callable(self.now) else self.now
        self.calls.append("take")
        return now


class SeenNet(nn.Module):
    """Lays the blocks of what lives down before it fails."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.plant = Planted(0)
        self.blocks = []

    def forward(self, x):
        hidden = self.first(x)
        self.blocks = [block_of(t) for t in (*self.parameters(), hidden, x)]
        self.plant.check(len(x), "forward")
        return self.second(hidden)


def failing(monkeypatch, options=None, **figures):
    model = SeenNet()
    source = Played(lambda: moment_of(*map(segment, model.blocks), **figures))
    monkeypatch.setattr(out_of_memory, "moments_of", lambda device, **kwargs: source)
    plan = Plan(out_of_memory=options or OutOfMemoryOptions())
    trainer = Trainer(model, lambda p: optim.SGD(p, lr=0.1), mean_loss, plan)
    with pytest.raises(OutOfMemoryError) as caught:
        trainer.step((torch.randn(4, 8), torch.zeros(4, dtype=torch.long)))
    return trainer, source, caught.value


def test_the_account_of_a_step(monkeypatch):
    trainer, source, error = failing(
        monkeypatch,
        requested_bytes=5 * MB,
        free_bytes=10 * MB,
        limit_bytes=80 * MB,
        total_bytes=100 * MB,
    )
    account = error.account
    assert account.bytes_of("parameters") == 4 * 512
    assert account.bytes_of("the batch") == 512
    assert account.bytes_of(REST) == 512
    assert account.bytes_of("nothing of the kind") == 0
    assert account.outside_bytes == 100 * MB - 10 * MB - account.reserved_bytes
    assert account.requested_bytes == 5 * MB
    assert {"(4, 16) float32"} == {h.form for h in account.largest if h.category == REST}
    text = str(account)
    assert "cpu is out of memory in the forward" in text
    assert "of which this process may take 80.00 MiB" in text
    assert "first.weight" in text
    assert json.loads(json.dumps(account.to_dict()))["stage"] == "forward"
    assert trainer._step.memory.last_account == account
    trainer.close()
    assert source.calls == ["start", "open", "take", "close", "stop"]


def test_an_account_that_fails_hides_nothing(monkeypatch):
    def broken(*args):
        raise ValueError("no")

    monkeypatch.setattr(failure, "look", broken)
    _, _, error = failing(monkeypatch)
    assert error.account.stage == "forward"
    assert error.account.remarks == ("no account could be taken: ValueError: no",)


def test_on_the_cpu_only_what_is_known_is_told():
    trainer = Trainer(SeenNet(), lambda p: optim.SGD(p, lr=0.1), mean_loss, "eager")
    with pytest.raises(OutOfMemoryError) as caught:
        trainer.step((torch.randn(4, 8), torch.zeros(4, dtype=torch.long)))
    account = caught.value.account
    assert account.bytes_of("parameters") == sum(4 * p.numel() for p in trainer.model.parameters())
    assert account.remarks == ("the allocator of cpu does not tell what it holds",)
    assert account.requested_bytes == 2 * 2**30  # from torch's message
    assert account.free_bytes is None


def test_the_snapshot_is_written(monkeypatch, tmp_path):
    options = OutOfMemoryOptions(snapshot=tmp_path / "deep" / "er")
    _, _, error = failing(monkeypatch, options, snapshot={"segments": []})
    path = error.account.snapshot_path
    assert path.startswith(str(tmp_path))
    with open(path, "rb") as file:
        assert pickle.load(file) == {"segments": []}
    assert path in str(error)


def test_so_many_snapshots_and_no_more(monkeypatch, tmp_path):
    options = OutOfMemoryOptions(snapshot=str(tmp_path))
    trainer, _, _ = failing(monkeypatch, options, snapshot={})
    for _ in range(4):
        with pytest.raises(OutOfMemoryError) as caught:
            trainer.step((torch.randn(4, 8), torch.zeros(4, dtype=torch.long)))
    assert len(list(tmp_path.iterdir())) == 3
    assert "no snapshot was written, 3 were already" in caught.value.account.remarks


def test_a_snapshot_that_cannot_be_written_hides_nothing(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    options = OutOfMemoryOptions(snapshot=tmp_path / "file")
    _, _, error = failing(monkeypatch, options, snapshot={})
    assert error.account.snapshot_path is None
    assert any("the snapshot was not written" in remark for remark in error.account.remarks)


# --- the moment ---------------------------------------------------------------------------------


def test_the_observer_keeps_the_last_moment_of_an_open_source(monkeypatch):
    source = CUDAMoments(torch.device("cuda", 1))
    other = CUDAMoments(torch.device("cuda", 0))
    made = lambda self, *figures: figures  # noqa: E731
    monkeypatch.setattr(CUDAMoments, "_now", made)
    monkeypatch.setattr(moment, "_LISTENING", {source, other})
    moment._observe(1, 10, 20, 30)  # nothing is under way
    assert source.take() == (None, None, None)
    source.open()
    moment._observe(1, 10, 20, 30)
    moment._observe(1, 11, 20, 30)
    source.close()
    moment._observe(1, 12, 20, 30)
    assert source.take() == (11, 20, 30)
    assert source.take() == (None, None, None)
    assert other.take() == (None, None, None)
    source.open()
    moment._observe(1, 13, 20, 30)
    source.open()  # another step
    assert source.take() == (None, None, None)


def test_an_error_in_the_observer_is_not_torchs(monkeypatch):
    source = CUDAMoments(torch.device("cuda", 1))
    monkeypatch.setattr(CUDAMoments, "_now", lambda *args: 1 / 0)
    monkeypatch.setattr(moment, "_LISTENING", {source})
    source.open()
    moment._observe(1, 10, 20, 30)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU", 20 * MB),
        ("Tried to allocate 512 bytes", 512),
        ("no number", None),
    ],
)
def test_how_much_was_asked_for(text, expected):
    assert requested_of(text) == expected
