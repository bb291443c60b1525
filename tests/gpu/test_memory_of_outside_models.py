"""Recompute and offload on models that nobody here wrote.

They have the bits of the plain loop, eagerly and in a graph, and are close to it compiled.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from benchmarks.outside_models import MODELS, optimizer, scheduler, without_dropout
from torchfast import OffloadOptions, Plan
from torchfast.testing import Tolerance, assert_parity

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


@pytest.mark.parametrize("levers", ["selective", "blocks, offload"])  # each lever once
@pytest.mark.parametrize("name", NAMES)
def test_compiled_it_ends_close(name, levers):
    outside = MODELS[name]
    generator = torch.Generator().manual_seed(0)
    # Compiled code draws other masks; and AdamW's first steps hang on the signs of small gradients.
    result = assert_parity(
        lambda: without_dropout(outside.build()),
        partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        outside.loss_fn,
        [outside.batch(generator) for _ in range(5)],
        Plan(compile=True, **LEVERS[levers]),
        max_grad_norm=1.0,
        lr_scheduler=scheduler,
        device="cuda",
        tolerance=Tolerance(loss=0.01, update=0.1),
    )
    assert not result.exact
    report = result.report
    applied = {d.lever for d in report.decisions if d.outcome == "applied"}
    assert {"compile", *LEVERS[levers]} <= applied, str(report)
    aside = {d.lever for d in report.stepped_aside}
    assert not aside & set(LEVERS[levers]), str(report)
    assert report.counters["compile_graphs"] >= 1
    if "offload" in LEVERS[levers]:
        assert report.counters["offload_sent_bytes"] > 0
