"""A small model with layers that can be in float8 and others, and what the tests of it share."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from torchfast import Float8Linears, Float8Options
from torchfast._core.measure import Measurement

EMULATED = Float8Options(recipe="tensorwise", smallest=16, emulate=True, watch_at=())
MEASURED = Float8Options(emulate=True, watch_at=())
WATCHED = Float8Options(recipe="tensorwise", smallest=16, emulate=True, watch_at=(1,))

# Outside models, and how many of their layers are converted, so that a model whose layers nobody
# finds does not pass.
NUM_CONVERTED = {
    "transformers GPT-NeoX": 8,
    "transformers OPT": 12,
    "transformers BLOOM": 8,
    "transformers Llama": 14,
    "transformers Qwen3": 14,
    "transformers Gemma 2": 14,
    "transformers BERT": 13,
    "transformers T5": 32,
    "transformers BART": 32,
    "transformers ViT": 12,
}


class TinyGPT(nn.Module):
    """A vocabulary, two blocks with layers of both kinds, and a tied head."""

    def __init__(self, vocabulary=48, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 2 * width), nn.Dropout(0.1), nn.GELU(), nn.Linear(2 * width, width)
            )
            for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(width)
        self.gate = nn.Linear(width, 3)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x.flatten(0, 1)).view_as(x)
        return self.head(x * self.gate(x).mean(-1, keepdim=True).sigmoid())


def loss_fn(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(48, (4, 17), generator=generator) for _ in range(count)]
    return [(t[:, :16], t[:, 1:]) for t in tokens]


def gpt():
    torch.manual_seed(0)
    return TinyGPT()


def gpt_without_batch_norm():
    model = gpt()
    model.norm = nn.LayerNorm(32)  # whose weight may be gathered in bf16
    for block in model.blocks:
        block.append(nn.LayerNorm(32))  # FSDP warns of blocks that return a view
    return model


def applied(model, options):
    float8 = Float8Linears(model, options)
    float8.apply()
    return float8


def bf16_loss(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_fn(model, batch)


def timer_of(seconds, seen=None):
    """Return a timer that knows what each way takes, by recipe, and runs each once."""

    def timer(works, device, budget_s):
        for work in works.values():
            work()
        if seen is not None:
            seen.append(sorted(works))
        rounds = tuple({name: seconds[name] for name in works} for _ in range(12))
        return Measurement(
            reference="bf16",
            rounds=rounds,
            units=dict.fromkeys(works, 1),
            failed={},
            smallest=0.02,
            elapsed_s=0.0,
            ended_by="told",
        )

    return timer


def step_timer_of(float8_ms, seen=None):
    """Return a timer that knows what a whole step takes beside bf16, and runs each way once."""

    def timer(works, device, budget_s, around):
        for name, work in works.items():
            with around(name):
                work()
                if seen is not None:
                    seen.append((name, type(seen.model.blocks[0][0]).__name__))
        return Measurement(
            reference="bf16",
            rounds=tuple({"bf16": 1.0, "float8": ms} for ms in [*float8_ms] * 4),
            units=dict.fromkeys(works, 1),
            failed={},
            smallest=0.02,
            elapsed_s=0.0,
            ended_by="told",
        )

    return timer


# --- how far a run is from another ----------------------------------------------------------------


def furthest(losses, reference):
    """Return the largest difference from another run's losses, as a part of what those went down.

    Not of the losses themselves: over a large vocabulary they stay near its logarithm whatever is
    trained, so that nothing is far; and those of a batch that is learnt by heart go to zero, where
    everything is.
    """
    went_down = all(later < earlier for earlier, later in pairwise(reference))
    assert went_down, f"no run to compare with, its loss goes up: {reference}"
    differences = (abs(a - b) for a, b in zip(losses, reference, strict=True))
    return max(differences) / (reference[0] - reference[-1])


@contextmanager
def scales_too_large(monkeypatch, times=16):
    """Let torchao find scales that are so many times too large, so that large values are cut off.

    What is multiplied by a scale is divided by it again: nothing else is wrong.
    """
    import torchao.float8.float8_utils as utils

    right = utils.amax_to_scale
    with monkeypatch.context() as patch:
        patch.setattr(utils, "amax_to_scale", lambda *a, **named: right(*a, **named) * times)
        yield
