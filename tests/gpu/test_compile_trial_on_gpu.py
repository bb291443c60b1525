"""Models of transformers whose layers are skipped by chance: compiled or not, by what it takes."""

from __future__ import annotations

import pytest
import torch

from benchmarks.outside_models import MODELS
from gpu.compile_jobs import nothing_compiled
from torchfast import Plan, Trainer
from torchfast._core.batches import to_device

STEPS = 60


@pytest.fixture(autouse=True)
def _nothing_compiled_is_left():
    with nothing_compiled():
        yield


@pytest.mark.parametrize("name", ["transformers OPT", "transformers Wav2Vec2"])
def test_what_is_compiled_in_pieces_is_captured_as_it_is(name):
    outside = MODELS[name]
    batch = to_device(outside.batch(torch.Generator().manual_seed(0)), torch.device("cuda"))
    model = outside.build().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with Trainer(model, optimizer, outside.loss_fn, Plan.preset("fast")) as trainer:
        losses = [trainer.step(batch) for _ in range(STEPS)]
        report = trainer.report()
    told = str(report)
    assert "the step is faster without" in told, told
    assert "captured as it is" in told, told
    assert report.counters["graphs"] == 1
    assert report.counters["replays"] > 20
    assert losses[-1] < losses[0]
