"""Decoders of transformers in a graph: what the host asks of positions and masks, and its kernels.

With heads of 128 the kernel of attention that is causal by itself has other bits than the one that
gets a mask, which transformers makes once it is told of a capture.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import optim

from gpu.requirements import requires
from torchfast import CUDAGraphOptions, Plan, Trainer
from torchfast._core.compare import differences
from torchfast.graphs import manner

transformers = pytest.importorskip("transformers")
pytestmark = [requires(gpus=1), pytest.mark.usefixtures("deterministic")]

STEPS = 12
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "use_cache": False,
}
NAMES = ["Llama", "Mistral", "Qwen2", "GPTNeoX", "Phi3"]


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    """As in a process of its own: no other test has compiled anything."""
    monkeypatch.setattr(manner, "has_compiled_code", lambda: False)


def models_of(name, number):
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**SIZES)
    )
    return [copy.deepcopy(model).cuda().train() for _ in range(number)]


def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 512, (2, 512), generator=generator).cuda() for _ in range(STEPS)]


def without_mask(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def with_mask(model, tokens):
    return model(input_ids=tokens, attention_mask=tokens.ne(0).long(), labels=tokens).loss


def trained(model, loss_fn, plan):
    trainer = Trainer(model, partial(optim.AdamW, lr=1e-4, fused=True), loss_fn, plan)
    losses = [trainer.step(tokens) for tokens in batches()]
    report = trainer.report()
    notes = [d.detail for d in report.decisions if d.lever == "cuda_graph"]
    trainer.close()
    return torch.stack(losses), report.counters, notes


@pytest.mark.parametrize("precision", ["as_given", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_without_a_mask_it_is_the_step_to_the_bit(name, precision):
    models = models_of(name, 2)
    plain, _, _ = trained(models[0], without_mask, Plan(precision=precision))
    graph = CUDAGraphOptions(parity="exact")
    losses, counters, notes = trained(
        models[1], without_mask, Plan(precision=precision, cuda_graph=graph)
    )
    assert counters["replays"] == STEPS - 4, notes
    assert torch.equal(losses, plain)
    assert not differences(models[0].state_dict(), models[1].state_dict())
    assert any("constants read on the host" in note for note in notes)


@pytest.mark.parametrize("name", NAMES)
def test_with_a_mask_it_is_the_step_that_is_told_and_close(name):
    models = models_of(name, 2)
    plain, _, _ = trained(models[0], with_mask, Plan(precision="bf16"))
    plan = Plan(precision="bf16", cuda_graph=True)
    losses, counters, notes = trained(models[1], with_mask, plan)
    assert counters["replays"] == STEPS - 5, notes
    assert torch.allclose(losses, plain, rtol=1e-2)
