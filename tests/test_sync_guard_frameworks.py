"""A wait planted in a script of transformers, Accelerate and Lightning is found at its line.

The scripts train with the framework's own loop, and know nothing of torchfast but the guard. In
each the first line with the mark is what was planted; what the framework itself reads is told too,
at the framework's lines, and is no line of the script's. Behind them the slow scripts of the
benchmarks are run as they stand, which do not even know the guard. Where a package waits for the
user, as a progress bar does, the user's line is told beside its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import warm_python
from benchmarks.slow_scripts.expected import EXPECTED, lines_of, path_of
from host_waits import here
from torchfast import SyncGuard

# In a process of its own: what the scripts set is never put back.
RUN_GUARDED = """
import json, sys
from torchfast import SyncGuard

found = {}
for path in sys.argv[2:]:
    script = {"__name__": "script", "__file__": path}
    with open(path) as file:
        exec(compile(file.read(), path, "exec"), script)
    with SyncGuard(device="cpu") as guard:
        script["main"](["--device", "cpu", "--steps", "3", "--small"])
    found[path] = [[s.file, s.line, s.kind, s.count] for s in guard.report().syncs]
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
"""

STEPS = 3


def planted(name):
    lines = Path(__file__).read_text().split("\n")
    return 1 + next(n for n, line in enumerate(lines) if line.endswith(f"# planted: {name}"))


def of_this_file(guard):
    rows = [s for s in guard.report().syncs if s.file == __file__]
    return [(s.line, s.kind, s.count) for s in rows]


class Tokens(Dataset):
    def __len__(self):
        return 8 * STEPS

    def __getitem__(self, index):
        tokens = torch.arange(8) + index
        return {"input_ids": tokens % 32, "labels": tokens % 32}


@pytest.mark.parametrize("is_planted", [True, False])
def test_transformers(is_planted, tmp_path):
    transformers = pytest.importorskip("transformers")

    class Reads(transformers.Trainer):
        def compute_loss(self, model, inputs, **options):
            loss = super().compute_loss(model, inputs, **options)
            if is_planted and loss > 1e9:  # planted: transformers
                return loss * 0
            return loss

    config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    trainer = Reads(transformers.GPT2LMHeadModel(config), arguments, train_dataset=Tokens())
    with SyncGuard(device="cpu") as guard:
        trainer.train()
    assert trainer.state.global_step == STEPS
    line = planted("transformers")
    assert of_this_file(guard) == ([(line, "bool", STEPS)] if is_planted else [])


@pytest.mark.parametrize("is_planted", [True, False])
def test_accelerate(is_planted):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.ones(2 * STEPS, 4)), 2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    with SyncGuard(device="cpu") as guard:
        for (batch,) in loader:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if is_planted:
                seen.append(loss.item())  # planted: accelerate
    assert len(seen) == STEPS * is_planted
    line = planted("accelerate")
    assert of_this_file(guard) == ([(line, "item", STEPS)] if is_planted else [])


@pytest.mark.filterwarnings("default")  # those of Lightning, about itself
@pytest.mark.parametrize("is_planted", [True, False])
def test_lightning(is_planted, tmp_path):
    lightning = pytest.importorskip("lightning")

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 2)

        def training_step(self, batch):
            (x,) = batch
            mask = x[:, 0] > 0
            if is_planted:
                x = x[mask]  # planted: lightning
            return self.head(x).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(torch.ones(2 * STEPS, 4)), 2)
    with SyncGuard(device="cpu") as guard:
        trainer.fit(Classifier(), loader)
    assert trainer.global_step == STEPS
    line = planted("lightning")
    assert of_this_file(guard) == ([(line, "boolean mask", STEPS)] if is_planted else [])


def test_scripts_as_they_stand(tmp_path):
    names = [name for name, answer in EXPECTED.items() if answer.needs is not None]
    for name in names:
        pytest.importorskip(EXPECTED[name].needs)
    out = tmp_path / "found.json"
    paths = [str(path_of(name)) for name in names]
    warm_python.run(RUN_GUARDED, out, *paths, cwd=tmp_path, check=True, timeout=240)
    found = json.loads(out.read_text())
    assert len(names) == 3
    for name, path in zip(names, paths, strict=True):
        own = [row for row in found[path] if row[0] == path]
        planted = lines_of(name)
        # The costliest are what was planted; a script may read its loss once, behind the loop.
        costliest, others = own[: len(planted)], own[len(planted) :]
        assert sorted(row[1:3] for row in costliest) == [[line, "item"] for line in planted]
        assert all(count > 2 * STEPS for *_, count in costliest)
        assert all(count == 1 for *_, count in others)


def test_a_line_of_an_installed_package_is_told_with_its_caller():
    package: dict[str, Any] = {"__name__": "bars"}
    source = "def shown(loss):\n    return f'{loss:.3f}'\n"
    exec(compile(source, "/some/site-packages/bars/bar.py", "exec"), package)
    loss = torch.ones(())
    with SyncGuard(device="cpu") as guard:
        package["shown"](loss)
        line = here() - 1
        loss.item()
    told, own = sorted(guard.report().syncs, key=lambda sync: sync.line)
    assert (told.kind, told.file[-6:], told.line) == ("print", "bar.py", 2)
    assert told.called_from == f"{__file__}:{line}"
    assert f"bar.py:2, in shown, called from test_sync_guard_frameworks.py:{line}" in str(
        guard.report()
    )
    assert own.called_from == ""
