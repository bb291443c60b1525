"""The loss and its gradients, some rows at a time.

A row is a token: its hidden vector and its target. `run_chunks` makes the logits of some rows and
`_chunk` their losses and the gradient with respect to the logits. `run_chunks` turns that into the
gradients of hidden, weight and bias at once, and lets go of all that is as wide as the vocabulary.

For a row with target t, weight w (that of its target's class), smoothing e over V classes of
weights c, and z the factor of the z-loss, with p the softmax and lse the logsumexp of the logits::

    loss    = (1 - e) w (-log p[t])  -  e/V sum(c log p)  +  z w lse²
    d/dx[j] = ((1 - e) w + e/V sum(c) + 2 z w lse) p[j]  -  e/V c[j]  -  (1 - e) w [j = t]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchfast.losses.products import add_product, product

# Columns of 16-bit matrix products on CUDA come in such multiples: with 50257, rows would not begin
# at 16 bytes, and cuBLAS would take kernels that are several times slower.
COLUMNS_ON_CUDA = 64


class Terms(NamedTuple):
    """What the loss of a row is made of, beside the negative log-likelihood."""

    label_smoothing: float
    z_loss: float
    softcap: float | None
    class_weight: Tensor | None


class Wanted(NamedTuple):
    """Which gradients are asked for."""

    hidden: bool
    weight: bool
    bias: bool


class Gradients(NamedTuple):
    """Gradients of the sum over rows; None where none was asked for.

    Attributes:
        hidden: Shape ``(rows, features)``, in the dtype of the matrix products.
        weight: Shape ``(columns, features)``, at least fp32; what is beyond the vocabulary is to be
            cut off.
        bias: Shape ``(columns,)``, at least fp32, likewise.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the softmax and of sums over chunks: at least fp32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _chunks(count: int, size: int) -> Iterator[slice]:
    """Yield the rows of each chunk.

    Counted by chunks, and not by rows: a compiler takes what is iterated for a constant, and would
    compile anew for each number of rows in place of each number of chunks.
    """
    if 0 < count <= size:
        yield slice(None)
        return
    whole = count // size
    for number in range(whole):
        yield slice(number * size, (number + 1) * size)
    if count % size:
        yield slice(whole * size, None)


def run_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    terms: Terms,
    *,
    ignore_index: int,
    dtype: torch.dtype,
    num_rows: int,
    wanted: Wanted,
    factors: Tensor | None = None,
) -> tuple[Tensor, Gradients]:
    """Return the loss of each row, and the gradients of their sum.

    Args:
        hidden: Shape ``(rows, features)``.
        weight: Shape ``(vocabulary, features)``.
        bias: Shape ``(vocabulary,)``.
        targets: Shape ``(rows,)``.
        terms: What the loss of a row is made of.
        ignore_index: Rows with this target have loss and gradient zero.
        dtype: Of the matrix products.
        num_rows: Rows in a chunk.
        wanted: Which gradients.
        factors: Shape ``(rows,)``: the gradients are those of the sum weighted by these.
    """
    total = accumulation_dtype(dtype)
    vocabulary = weight.shape[0]
    missing = -vocabulary % _column_multiple(weight.device, dtype)
    weight, hidden = weight.to(dtype), hidden.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    if missing:
        weight = F.pad(weight, (0, 0, 0, missing))
        bias = None if bias is None else F.pad(bias, (0, missing))
    losses: list[Tensor] = []
    grad_hidden: list[Tensor] = []
    grad_weight: Tensor | None = None
    grad_bias: Tensor | None = None
    for rows in _chunks(hidden.shape[0], num_rows):
        part = hidden[rows]
        loss, grad = _chunk(
            F.linear(part, weight, bias),
            targets[rows],
            terms,
            ignore_index,
            vocabulary,
            None if factors is None else factors[rows],
            gradient=any(wanted),
        )
        if grad is None:
            losses.append(loss)
            continue
        if wanted.hidden:
            grad_hidden.append(grad @ weight)
        if grad_weight is not None:
            loss = add_product(grad_weight, grad.t(), part, loss)
        elif wanted.weight:
            grad_weight = product(grad.t(), part, total)
        if wanted.bias:
            sums = grad.sum(0, dtype=total)
            grad_bias = sums if grad_bias is None else grad_bias + sums
        losses.append(loss)
        # The next chunk's logits are made while these names still stand for this one's.
        del grad
    if not losses:  # no rows, so nothing that a gradient could be made of
        nothing = hidden.new_zeros(0, dtype=total)
        return nothing, Gradients(
            hidden if wanted.hidden else None,
            torch.zeros_like(weight, dtype=total) if wanted.weight else None,
            weight.new_zeros(vocabulary + missing, dtype=total) if wanted.bias else None,
        )
    gradients = Gradients(torch.cat(grad_hidden) if wanted.hidden else None, grad_weight, grad_bias)
    return torch.cat(losses), gradients


def _chunk(
    logits: Tensor,
    targets: Tensor,
    terms: Terms,
    ignore_index: int,
    vocabulary: int,
    factors: Tensor | None,
    *,
    gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the loss of each row and the gradient of their sum with respect to the logits."""
    smoothing, z_loss, softcap, class_weight = terms
    low, total = logits.dtype, accumulation_dtype(logits.dtype)
    valid = targets != ignore_index
    # A target above the vocabulary is taken past the last column, where gather refuses it.
    targets = torch.where(targets < vocabulary, targets, logits.shape[1])
    targets = torch.where(valid, targets, 0)
    column = targets.unsqueeze(1)
    slope: Tensor | None = None
    if softcap is not None:
        bent = torch.tanh(logits.to(total) / softcap)
        logits = bent * softcap
        slope = 1 - bent * bent
        del bent
    if logits.shape[1] > vocabulary:
        logits[:, vocabulary:] = -torch.inf
    log_p = torch.log_softmax(logits, 1, dtype=total)
    picked = log_p.gather(1, column).squeeze(1)

    weight = None if class_weight is None else class_weight.index_select(0, targets)
    kept = (1 - smoothing) if weight is None else (1 - smoothing) * weight
    loss = -picked * kept
    share = smoothing / vocabulary  # of each class
    if smoothing:
        inside = log_p[:, :vocabulary]
        loss = loss - share * (inside.sum(1) if class_weight is None else inside @ class_weight)
    spread = share * (vocabulary if class_weight is None else class_weight.sum())
    mass: Tensor | float = kept + spread  # what the softmax is multiplied by
    if z_loss:
        # Of ignored rows, column 0 may be -inf, and minus itself that would be NaN.
        lse = logits.gather(1, column).squeeze(1).to(total) - picked
        lse = torch.where(valid, lse, 0.0)
        strength = z_loss if weight is None else z_loss * weight
        loss = loss + strength * lse * lse
        mass = mass + 2 * strength * lse
    loss = torch.where(valid, loss, 0.0)
    if not gradient:
        return loss, None

    factor = valid.to(total) if factors is None else torch.where(valid, factors, 0.0)
    at_target = picked.exp() * mass - kept
    if smoothing:
        at_target = at_target - share * (1.0 if weight is None else weight)
    at_target = at_target * factor
    if slope is not None:
        at_target = at_target * slope.gather(1, column).squeeze(1)
    scale = (factor * mass).unsqueeze(1)
    del logits
    if torch.compiler.is_compiling():
        # One fused kernel: a comparison costs nothing there, and a scatter would split it.
        grad = log_p.exp() * scale
        if smoothing:
            grad = grad - _smoothed(factor, share, class_weight, grad.shape[1])
        if slope is not None:
            grad = grad * slope
        columns = torch.arange(grad.shape[1], device=grad.device)
        return loss, torch.where(columns == column, at_target.unsqueeze(1), grad).to(low)
    grad = log_p.exp_()
    if smoothing or slope is not None or low is total:
        grad.mul_(scale)
        if smoothing:
            grad[:, :vocabulary].sub_(_smoothed(factor, share, class_weight, vocabulary))
        if slope is not None:
            grad.mul_(slope)
        grad = grad.to(low)
    else:  # multiplied and rounded in one pass over the chunk
        grad = torch.mul(grad, scale, out=torch.empty_like(grad, dtype=low))
    # In its own precision and not as p - 1 of rounded numbers: where p is near 1 nothing would be
    # left. Each row has one target, so that what is put cannot meet: the order does not matter.
    rows = torch.arange(len(targets), device=targets.device)
    grad.index_put_((rows, targets), at_target.to(low))
    return loss, grad


def _smoothed(factor: Tensor, share: float, class_weight: Tensor | None, columns: int) -> Tensor:
    """Return what label smoothing takes off the gradient: shape ``(rows, 1 or columns)``."""
    if class_weight is None:
        return (factor * share).unsqueeze(1)
    class_weight = F.pad(class_weight, (0, columns - len(class_weight)))
    return (factor * share).unsqueeze(1) * class_weight


def _column_multiple(device: torch.device, dtype: torch.dtype) -> int:
    """Return of what the number of columns has to be a multiple."""
    return COLUMNS_ON_CUDA if device.type == "cuda" and dtype.itemsize == 2 else 1
