"""The loss over a large vocabulary as two functions compute it, inputs, and comparisons."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F


def plain(
    hidden,
    weight,
    targets,
    bias=None,
    *,
    class_weight=None,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
    chunk_size=None,
):
    """The two functions, with z-loss and softcap as one would write them."""
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    flat = targets.flatten()
    options = {"ignore_index": ignore_index, "weight": class_weight}
    loss = F.cross_entropy(
        logits, flat, reduction=reduction, label_smoothing=label_smoothing, **options
    )
    if z_loss:
        valid = flat != ignore_index
        counts = valid.to(logits.dtype)
        if class_weight is not None:
            counts = counts * class_weight[torch.where(valid, flat, 0)]
        squares = z_loss * counts * torch.logsumexp(logits, -1).square()
        loss = (
            loss
            + {
                "none": lambda: squares,
                "sum": lambda: squares.sum(),
                "mean": lambda: squares.sum() / counts.sum(),
            }[reduction]()
        )
    return loss.reshape(targets.shape) if reduction == "none" else loss


def make(shape=(3, 7), vocabulary=53, features=16, dtype=torch.float64, seed=0, ignored=3):
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    hidden = draw(*shape, features).to(dtype).requires_grad_()
    weight = (draw(vocabulary, features) * 0.5).to(dtype).requires_grad_()
    bias = draw(vocabulary).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, shape, generator=generator)
    targets.view(-1)[:ignored] = -100
    return hidden, weight, targets, bias


def results(function, hidden, weight, targets, bias, incoming=None, **options):
    """Return the loss and the gradients of what asks for one."""
    loss = function(hidden, weight, targets, bias, **options)
    asked = [t for t in (hidden, weight, bias) if t is not None and t.requires_grad]
    incoming = torch.ones_like(loss) if incoming is None else incoming.to(loss.dtype)
    return [loss.detach(), *torch.autograd.grad(loss, asked, incoming)]


def assert_same(found, expected, tolerance):
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        bound = tolerance * (b.abs().max().item() if b.numel() else 0) + 1e-300
        worst = (a.double() - b.double()).abs().max().item() if b.numel() else 0
        assert worst <= bound, (index, worst, bound)
        assert a.shape == b.shape


OPTIONS = {
    "bare": {},
    "smoothing": {"label_smoothing": 0.2},
    "classes": {"class_weight": torch.linspace(0.1, 2, 53, dtype=torch.float64)},
    "z": {"z_loss": 0.01},
    "softcap": {"softcap": 3.0},
    "all": {
        "label_smoothing": 0.2,
        "class_weight": torch.linspace(0.1, 2, 53, dtype=torch.float64),
        "z_loss": 0.01,
        "softcap": 3.0,
    },
}


def options_in(name, dtype):
    kept = dict(OPTIONS[name])
    if "class_weight" in kept:
        kept["class_weight"] = kept["class_weight"].to(dtype)
    return kept
