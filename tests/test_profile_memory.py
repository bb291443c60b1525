"""What memory is taken for, over time: sizes that are planted come back."""

import gc
import json
import textwrap
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from synthetic_trace import SyntheticTrace
from torchfast import Trainer, analyse_trace, profile
from torchfast.__main__ import main
from torchfast.profiling.held_memory import HeldMemory
from torchfast.profiling.trace import read_trace

WIDTH, ROWS = 256, 512
WEIGHTS = 2 * (WIDTH * WIDTH + WIDTH) * 4
FROZEN = WIDTH * WIDTH * 4
ACTIVATION = ROWS * WIDTH * 4


class Planted(nn.Module):
    """Two layers that learn, one that does not, and a buffer of its size.

    For the backward pass are kept: what goes into the second layer, and what is squared.
    """

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False)
        self.register_buffer("table", torch.ones(WIDTH, WIDTH))

    def forward(self, x):
        return self.second(self.first(x).relu_())


@pytest.fixture(autouse=True)
def no_others():
    """Models of other tests that nobody has collected yet would be found, too."""
    gc.collect()


def batches(number=30):
    return [torch.ones(ROWS, WIDTH) for _ in range(number)]


def loss_of(model, batch):
    return model(batch).square().mean()


def the_use(report):
    (use,) = report.memory
    return use


def about(num):
    return pytest.approx(num, rel=0.02)


def run(folder, step, *, optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = Planted()
    updates = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with profile(folder, **{"steps": 3, "warmup": 2, "lines": False} | options) as profiling:
        for batch in profiling.iterate(batches()):
            step(model, updates, batch)
    return profiling.report


def clear_first(model, optimizer, batch):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def clear_last(model, optimizer, batch):
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def clear_in_place(model, optimizer, batch):
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, batch).backward()
    optimizer.step()


@pytest.mark.parametrize("step", [clear_first, clear_last, clear_in_place])
def test_what_a_model_holds_is_told_apart(tmp_path, step):
    use = the_use(run(tmp_path, step))

    for seen in (use.least, use.most):
        assert seen["parameters"] == about(WEIGHTS + 2 * FROZEN)
        assert seen["optimizer state"] == about(2 * WEIGHTS)
    assert use.most["inputs"] == about(ACTIVATION)
    assert use.most["gradients"] == about(WEIGHTS)
    assert use.least["gradients"] == (about(WEIGHTS) if step is clear_in_place else 0)
    assert use.most["activations"] == about(2 * ACTIVATION)
    assert use.least["activations"] == 0
    assert "other" not in use.most
    assert sum(use.at_peak.values()) == use.peak_bytes


def test_over_time_activations_come_before_gradients(tmp_path):
    use = the_use(run(tmp_path, clear_last, steps=1))

    full = use.by_category["activations"].index(max(use.by_category["activations"]))
    assert use.by_category["gradients"][full] < 0.5 * WEIGHTS
    last = use.by_category["gradients"].index(max(use.by_category["gradients"]))
    assert full < last
    assert use.by_category["activations"][last] < 0.1 * ACTIVATION
    assert {len(values) for values in use.by_category.values()} == {len(use.times_us)}
    assert sorted(use.times_us) == use.times_us
    assert use.times_us[0] <= use.peak_us <= use.times_us[-1]
    assert max(map(sum, zip(*use.by_category.values(), strict=True))) == use.peak_bytes


def test_what_the_update_takes_and_gives_back_is_temporary(tmp_path):
    def step(model, optimizer, batch):
        clear_last(model, optimizer, batch)

    report = run(tmp_path, step, optimizer=lambda p, lr: torch.optim.AdamW(p, lr=lr, foreach=True))

    use = the_use(report)
    assert use.most["optimizer state"] == about(2 * WEIGHTS)
    assert use.most["temporary"] >= 0.9 * WEIGHTS


def test_the_state_of_an_optimizer_that_begins_in_the_trace(tmp_path):
    def step(model, optimizer, batch):
        loss_of(model, batch).backward()
        if len(seen) == 3:  # the second that is measured
            optimizer.step()
        optimizer.zero_grad()
        seen.append(1)

    seen = []
    use = the_use(run(tmp_path, step))

    assert use.least["optimizer state"] == 0
    assert use.most["optimizer state"] == about(2 * WEIGHTS)


def test_gradients_that_are_gathered_over_batches(tmp_path):
    def step(model, optimizer, batch):
        for part in batch.chunk(2):
            loss_of(model, part).backward()
        optimizer.step()
        optimizer.zero_grad()

    use = the_use(run(tmp_path, step))

    assert use.most["gradients"] == about(WEIGHTS)
    assert use.most["activations"] == about(ACTIVATION)


def test_a_second_profile_says_the_same(tmp_path):
    def step(model, optimizer, batch):
        clear_first(model, optimizer, batch)
        kept.append(torch.ones(1 << 20))  # given back when no profiler looks

    kept = []
    run(tmp_path / "first", step)
    kept.clear()
    use = the_use(run(tmp_path / "second", clear_first))

    assert use.most == the_use(run(tmp_path / "third", clear_first)).most
    assert use.most["gradients"] == about(WEIGHTS)
    # The activations are all there when the first gradient is not.
    assert use.peak_bytes == about(3 * WEIGHTS + 2 * FROZEN + 7 * ACTIVATION)


def test_a_gradient_that_lies_where_the_last_one_did_is_another(tmp_path):
    made = SyntheticTrace()
    made.op("aten::mm", 0, 100)
    path = made.write(tmp_path / "trace.json")
    stays, goes = (nn.Parameter(torch.ones(5)) for _ in range(2))
    memory = bytearray(20)
    stays.grad, goes.grad = torch.ones(5), torch.frombuffer(memory, dtype=torch.float32)
    optimizer = torch.optim.SGD([stays, goes])
    address = goes.grad.data_ptr()
    noted = HeldMemory()
    noted.note_all()

    goes.grad = None
    goes.grad = torch.frombuffer(memory, dtype=torch.float32)
    assert goes.grad.data_ptr() == address
    stays.grad = stays.grad.detach()  # another tensor, the same memory
    noted.note_end_of_step()
    noted.note_end_of_step()
    noted.write_into(path)

    gone = [block for block in read_trace(path).held if not block.what]
    assert [(block.address, block.num_bytes) for block in gone] == [(address, 20)]
    assert len(optimizer.param_groups) == 1


def test_a_trace_that_profile_has_left_says_the_same(tmp_path):
    report = run(tmp_path, clear_first)

    again = analyse_trace(tmp_path / "trace.json.gz")

    assert again.memory == report.memory
    assert not any("which memory" in remark for remark in again.remarks)


def test_of_a_trace_of_somebody_elses_what_cannot_be_told(tmp_path):
    model = Planted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    clear_last(model, optimizer, torch.ones(ROWS, WIDTH))
    with torch.profiler.profile(profile_memory=True) as profiler:
        loss_of(model, torch.ones(ROWS, WIDTH)).backward()
        optimizer.step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))

    report = analyse_trace(tmp_path / "trace.json")

    use = the_use(report)
    assert "parameters" not in use.most
    assert use.most["gradients"] == about(WEIGHTS)
    (remark,) = [r for r in report.remarks if "which memory" in r]
    assert "torchfast.profile() notes what it is" in remark


def test_a_trainer_tells_it_too(tmp_path):
    model = Planted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    trainer = Trainer(model, optimizer, loss_of)

    use = the_use(trainer.profile(batches(), steps=3, warmup=2, folder=tmp_path, lines=False))

    assert use.most["parameters"] == about(WEIGHTS + 2 * FROZEN)
    assert use.most["optimizer state"] == about(2 * WEIGHTS)
    assert use.most["gradients"] == about(WEIGHTS)
    assert use.most["activations"] == about(2 * ACTIVATION)


SCRIPT = """
import gc
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(20):
    model(torch.ones(8, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 0:
        gc.collect()
        gc.freeze()
"""


def test_a_script_that_freezes_its_objects(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.chdir(tmp_path)

    try:
        assert main(["profile", "--steps=3", "--no-lines", "--json=out.json", "train.py"]) == 0
    finally:
        gc.unfreeze()

    (use,) = json.loads((tmp_path / "out.json").read_text())["memory"]
    weights = 4 * (256 * 256 + 256) * 4
    assert use["most"]["parameters"] == about(weights)
    assert use["most"]["optimizer state"] == about(2 * weights)
    assert use["most"]["gradients"] == about(weights)
    assert "  optimizer state" in capsys.readouterr().out


def test_without_memory_nothing_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(HeldMemory, "note_all", lambda self: pytest.fail("it was asked"))

    report = run(tmp_path, clear_first, memory=False)

    assert report.memory == ()
    assert report.trace.held == []


def test_what_cannot_be_noted_is_told_and_the_loop_goes_on(tmp_path, monkeypatch):
    def broken(self):
        raise RuntimeError("no more")

    monkeypatch.setattr(HeldMemory, "note_all", broken)

    report = run(tmp_path, clear_first)

    assert report.figures.num_steps == 3
    assert any("what memory holds" in remark and "no more" in remark for remark in report.remarks)


def test_the_table_the_page_and_the_json_show_it(tmp_path):
    report = run(tmp_path, clear_last)

    text = str(report)
    assert "memory of cpu: at most" in text
    assert all(f"\n  {name} " in text for name in the_use(report).most)
    page = (tmp_path / "report.html").read_text()
    drawing = page[page.index("Memory of cpu") :]
    for name in ("parameters", "optimizer state", "gradients", "activations", "inputs"):
        assert f"<title>{name}: from " in drawing
    assert drawing.count(">step ") == 3
    svg = ElementTree.fromstring(drawing[drawing.index("<svg") : drawing.index("</svg>") + 6])
    _, _, width, height = map(float, svg.get("viewBox").split())
    corners = [c.split(",") for area in svg.iter("polygon") for c in area.get("points").split()]
    assert all(0 <= float(x) <= width and 0 <= float(y) <= height for x, y in corners)
    assert height >= max(float(text.get("y")) for text in svg.iter("text")) + 4
    # Memory is held until it is not: the outline has no slopes.
    for area in svg.iter("polygon"):
        points = [point.split(",") for point in area.get("points").split()]
        assert all(a[0] == b[0] or a[1] == b[1] for a, b in pairwise(points))
    (data,) = json.loads(json.dumps(report.to_dict()))["memory"]
    assert set(data["over_time"]["bytes"]) == set(data["most"])
    assert len(data["over_time"]["ms"]) == len(data["over_time"]["bytes"]["parameters"])
