"""Recompute and offload on models that nobody here wrote: the plain loop's bits, in both forms."""

from __future__ import annotations

import pytest
import torch

from benchmarks.outside_models import MODELS, optimizer, scheduler
from torchfast import OffloadOptions, Plan
from torchfast.testing import assert_parity

pytest.importorskip("timm")
pytest.importorskip("transformers")

NAMES = [
    "transformers GPT-2",
    "transformers BERT",
    "transformers Llama",
    "transformers T5",
    "transformers Whisper",
    "timm ResNet",
    "timm ViT",
    "timm ConvNeXt",
    "timm EfficientNet",
    "timm Swin",
]
# Its own forward copies from the host, or waits for the device.
EAGER = {"transformers BERT"}

SENT = OffloadOptions(min_bytes=1 << 12, window_bytes=1 << 12)  # the models are small
LEVERS = {
    "blocks": {"recompute": "blocks"},
    "selective": {"recompute": "selective"},
    "offload": {"offload": SENT},
    "blocks, offload": {"recompute": "blocks", "offload": SENT},
}


@pytest.mark.parametrize("cuda_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("levers", LEVERS)
@pytest.mark.parametrize("name", NAMES)
def test_ends_bitwise_where_the_plain_loop_ends(name, levers, cuda_graph):
    outside = MODELS[name]
    generator = torch.Generator().manual_seed(0)
    result = assert_parity(
        outside.build,
        optimizer,
        outside.loss_fn,
        [outside.batch(generator) for _ in range(7)],
        Plan(cuda_graph=cuda_graph, **LEVERS[levers]),
        max_grad_norm=1.0,
        lr_scheduler=scheduler,
        device="cuda",
    )
    assert result.exact
    assert result.num_steps == 7
    applied = {d.lever for d in result.report.decisions if d.outcome == "applied"}
    assert set(LEVERS[levers]) <= applied, str(result.report)
    if "offload" in LEVERS[levers]:
        assert result.report.counters["offload_sent_bytes"] > 0
    if cuda_graph and name not in EAGER:
        assert result.report.counters["replays"] >= 1, str(result.report)
