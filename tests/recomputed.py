"""Models whose blocks are recomputed, and what a forward of them really keeps in memory."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchfast import Recompute, RecomputeOptions
from torchfast.memory.block_costs import storages
from torchfast.memory.deferred import Deferred


class GPTBlock(nn.Module):
    def __init__(self, width=32, heads=4, dropout=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(x.shape)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


class RotaryBlock(nn.Module):
    """As in a Llama: queries and keys are turned by their positions, keys and values are few."""

    def __init__(self, width=32, heads=4, dropout=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width // 2, bias=False)
        self.value, self.out = nn.Linear(width, width // 2), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop, self.p = nn.Dropout(dropout), dropout
        self.head_width = width // heads
        angles = torch.outer(torch.arange(64.0), 0.1 ** torch.arange(self.head_width // 2))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.out(self.attended(self.norm1(x))))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))

    def attended(self, h: Tensor) -> Tensor:
        q, k, v = (self.heads_of(layer(h)) for layer in (self.query, self.key, self.value))
        return self.mixed(*self.turned(q, k), v)

    def heads_of(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def turned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos[: q.shape[-2]], self.sin[: q.shape[-2]]
        return rotated(q, cos, sin), rotated(k, cos, sin)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)


class GPT(nn.Module):
    def __init__(self, layers=3, dropout=0.0, block=GPTBlock):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(block(dropout=dropout) for _ in range(layers))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Bottleneck(nn.Module):
    """As in a ResNet, with the ReLU in place."""

    def __init__(self, width=8):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv3, self.norm3 = nn.Conv2d(4, width, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        return self.relu(self.norm3(self.conv3(y)) + x)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stages = nn.Sequential(*(Bottleneck() for _ in range(3)))
        self.head = nn.Linear(8, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


def token_loss(model, tokens):
    logits = model(tokens)
    logits = logits if isinstance(logits, Tensor) else logits.logits
    return F.cross_entropy(logits.flatten(0, -2), tokens.flatten())


def image_loss(model, batch):
    images, labels = batch
    logits = model(images)
    logits = logits if isinstance(logits, Tensor) else logits.logits
    return F.cross_entropy(logits, labels)


def tokens(batch=4, length=16, seed=0):
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(seed))


def images(batch=4, size=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(batch, 3, size, size, generator=generator)
    return pixels, torch.randint(50, (batch,), generator=generator)


def make(name):
    """Return a model, its loss function and a batch."""
    torch.manual_seed(0)
    match name:
        case "gpt":
            return GPT(), token_loss, tokens()
        case "gpt with dropout":
            return GPT(dropout=0.2), token_loss, tokens()
        case "resnet":
            return ResNet(), image_loss, images()
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    match name:
        case "llama" | "qwen2" | "mistral" | "phi3":
            kinds = {"llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral", "phi3": "Phi3"}
            config = getattr(transformers, f"{kinds[name]}Config")(
                **sizes,
                intermediate_size=88,
                num_key_value_heads=2,
                vocab_size=50,
                pad_token_id=None,
                bos_token_id=0,
                eos_token_id=0,
            )
            return transformers.AutoModelForCausalLM.from_config(config), token_loss, tokens()
        case "gpt2":
            config = transformers.GPT2Config(
                n_embd=32, n_layer=3, n_head=4, vocab_size=50, n_positions=16
            )
            return transformers.GPT2LMHeadModel(config), token_loss, tokens()
        case "vit":
            config = transformers.ViTConfig(
                **sizes, intermediate_size=128, image_size=16, patch_size=4, num_labels=50
            )
            return transformers.ViTForImageClassification(config), image_loss, images()


class Live(TorchDispatchMode):
    """Knows of all memory that operations under it have made, and whether it still lives."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def live_bytes(self, without=()):
        gone = storages(without)
        return sum(
            size
            for key, (storage, size) in self.made.items()
            if key not in gone and not storage.expired()
        )


class Operations(TorchDispatchMode):
    """Counts the operations that run, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def copied_buffers(monkeypatch):
    """Note what is copied for second runs, one by one and together."""
    copied, clone, together = [], torch.Tensor.clone, torch._foreach_copy_

    def noted(self, **options):
        copied.append(self)
        return clone(self, **options)

    def noted_together(own, theirs, **options):
        copied.extend(theirs)
        return together(own, theirs, **options)

    monkeypatch.setattr(torch.Tensor, "clone", noted)
    monkeypatch.setattr(torch, "_foreach_copy_", noted_together)
    return copied


def live_bytes(model, loss_fn, batch):
    """Return what a forward has made and keeps, the loss aside."""
    with Live() as live:
        loss = loss_fn(model, batch)
    kept = live.live_bytes([*model.parameters(), *model.buffers(), loss, *tree_leaves(batch)])
    loss.backward()
    model.zero_grad(set_to_none=True)
    return kept


def kept_with(recompute, model, loss_fn, batch):
    """Return the bytes that a forward keeps under a choice of a planner."""
    if recompute is False:
        return live_bytes(model, loss_fn, batch)
    with Recompute(model, recompute):
        live_bytes(model, loss_fn, batch)  # selective looks at its first call
        return live_bytes(model, loss_fn, batch)


def as_if_compiled(monkeypatch, answer=lambda: False):
    """Let a function say whether something has been compiled in this process: other tests have."""
    for module in ("kept_calls", "stretches"):
        monkeypatch.setattr(f"torchfast.memory.{module}.has_compiled", answer)


def noted_layers(monkeypatch):
    """Note from here on each linear layer that runs, and each value that is computed after all."""
    layers, computed = [], []
    run, compute = nn.Linear.forward, Deferred.computed

    def counted(self, x):
        layers.append(self)
        return run(self, x)

    def noted(self):
        computed.append(self)
        return compute(self)

    monkeypatch.setattr(nn.Linear, "forward", counted)
    monkeypatch.setattr(Deferred, "computed", noted)
    return layers, computed


def train(model, loss_fn, batch, steps=3, seed=0):
    """Return losses, gradients of the last step, parameters, buffers and the generator."""
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    gradients = {n: p.grad for n, p in model.named_parameters()}
    state = copy.deepcopy(model.state_dict())
    return {"losses": losses, "grads": gradients, "state": state, "rng": torch.get_rng_state()}


def with_and_without(make, what, loss_fn, batch, *, seed=0, steps=3):
    """Train what `make` makes as it is, and with recompute; return both results.

    Args:
        make: Returns the model, the same from the same seed.
        what: What is recomputed.
        loss_fn: Of a model and a batch.
        batch: Returns the batch.
        seed: Of the model.
        steps: How many.
    """
    results = []
    for is_recomputed in (False, True):
        torch.manual_seed(seed)
        model = make()
        with Recompute(model, what) if is_recomputed else nullcontext():
            results.append(train(model, loss_fn, batch(), steps=steps))
    return results


def with_and_without_selective(block, loss_fn, share, steps):
    """Train a GPT of such blocks as it is, and with selective recompute; return both results."""
    options = RecomputeOptions(selective=True, share=share)
    make = partial(GPT, block=block, dropout=0.2)
    return with_and_without(make, options, loss_fn, tokens, steps=steps)


def make_or_skip(name):
    if name in ("llama", "qwen2", "mistral", "phi3", "gpt2", "vit"):
        pytest.importorskip("transformers")
    return make(name)


class Counted(nn.Module):
    """Counts how often its forward runs."""

    def __init__(self, width=4):
        super().__init__()
        self.line = nn.Linear(width, width)
        self.num_runs = 0

    def forward(self, x, **others):
        self.num_runs += 1
        return torch.tanh(self.line(x))
