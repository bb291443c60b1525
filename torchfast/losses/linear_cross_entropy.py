"""The output layer and its cross entropy over a large vocabulary, without the logits.

A language model's largest tensors are not in its layers. 16,384 tokens over a vocabulary of 128,256
are 4 GiB of bf16 logits, and twice that for the fp32 softmax, and again for its gradient, while the
hidden vectors that they are made of take 64 MiB. `linear_cross_entropy` computes::

    F.cross_entropy(F.linear(hidden, weight, bias), targets)

some thousand tokens at a time. For each chunk the forward makes the logits, the loss and right away
the gradients of hidden, weight and bias: nothing is missing to them but the loss's own gradient,
one number, and the backward multiplies by it. So the logits are made once, as in the plain way, and
only those of one chunk ever exist. (With ``reduction="none"`` that gradient differs from token to
token, so the backward makes the logits again.)

It helps where logits are large: many tokens, and a vocabulary much larger than the width. It saves
memory above all, and so makes larger batches possible. Where all tokens fit into one chunk it
saves little. A loss whose gradient nobody asks for belongs under ``torch.no_grad()``, since the
gradients are made in the forward. On CUDA in 16 bits the columns are padded where the vocabulary is
no multiple of 64, such as GPT-2's 50257: matrix products are faster so.

The gradients of weight and bias are summed over chunks in fp32 (fp64 for fp64), so the weight's
takes fp32 between forward and backward: one of it, to which each chunk adds in place. Chunks are
unrolled under ``torch.compile``, which then fuses the softmax, the loss and the gradient of a chunk
into few kernels around the matrix products; within one opaque operator it could not. That is why
``"auto"`` makes at most 32 chunks. Only the addition in place is an operator of its own.

Forbidden: a second derivative, forward-mode differentiation and ``torch.func``, probabilities as
targets, and weights that are a DTensor.

The idea is not ours: gradients of a chunk in the forward are in Liger Kernel's
FusedLinearCrossEntropy, chunks before the output layer in torchtune, and Apple's "Cut Your Losses
in Large-Vocabulary Language Models" (arXiv 2411.09009) avoids logits within kernels. torch 2.13 and
later have ``torch.nn.functional.linear_cross_entropy``. It makes full logits for label smoothing,
has no z-loss nor softcap, returns a bf16 loss for bf16, and its backward consumes the gradients.
So this one does not call it, and is the same on every version.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchfast.losses.checks import (
    autocasts,
    check_differentiation,
    check_options,
    check_shapes,
    is_batched,
    product_dtype,
)
from torchfast.losses.chunks import Gradients, Terms, Wanted, accumulation_dtype, run_chunks
from torchfast.losses.class_weights import count, heaviest, largest
from torchfast.losses.products import has_wide_products

Reduction = Literal["mean", "sum", "none"]

# A chunk's logits in fp32 take no more than this, unless the weight itself takes more. At each
# chunk the weight's gradient is read and written once. That should be little beside the products of
# matrices, and it is with some thousand rows: both grow with vocabulary and width alike.
CHUNK_BYTES = 2**30
MOST_CHUNKS = 32
FEWEST_ROWS = 1024


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk_size: int | Literal["auto"] = "auto",
) -> Tensor:
    """Compute ``F.cross_entropy(F.linear(hidden, weight, bias), targets)`` without the full logits.

    Under autocast the matrix products are in its dtype and the softmax is in fp32, as those of the
    two functions.

    Args:
        hidden: Shape ``(..., features)``, as it goes into the output layer.
        weight: The output layer's, shape ``(vocabulary, features)``; it may be the embedding's too.
        targets: Class indices (int64), shape ``(...)``.
        bias: The output layer's, shape ``(vocabulary,)``.
        class_weight: What the loss of each class counts, shape ``(vocabulary,)``; the mean is
            divided by the weights of the targets, as in ``F.cross_entropy``.
        ignore_index: Positions with this target count for nothing.
        reduction: ``"mean"`` over the positions that count, their ``"sum"``, or ``"none"``.
        label_smoothing: Part of the target that is spread over all classes, from 0 to 1.
        z_loss: Adds this times the squared logsumexp of the logits, which keeps them from
            drifting (PaLM takes 1e-4); it counts what the target's class counts.
        softcap: Bends the logits to ``softcap * tanh(logits / softcap)`` first (Gemma 2 takes 30).
        chunk_size: Tokens at a time. ``"auto"`` takes the power of two whose fp32 logits take at
            most 1 GiB, or as much as the weight in fp32 if that is more; but no fewer than 1024
            tokens and no more than 32 chunks. Compiled for CUDA in bf16, without a softcap, it
            takes twice the tokens, as no logits are in fp32 there. Smaller chunks save memory and
            cost time.

    Returns:
        Loss, shape ``()``, or that of ``targets`` under ``"none"``: fp64 for fp64, otherwise fp32.

    Raises:
        TypeError: An argument of another kind, or a DTensor.
        ValueError: Shapes, dtypes or devices that do not fit together.
        IndexError: On the CPU, a target that is no class. (On CUDA a device-side assertion.)
        RuntimeError: Within a transform of ``torch.func``, or of dual tensors.

    Numerics: Close. Within rounding of the two functions in fp32 and fp64; under bf16 at most 1.5
        times as far from fp64 as they are. The same bits each time.
    Synchronizes: Never.

    Example:
        >>> hidden, weight = torch.randn(2, 6, 16), torch.randn(1000, 16, requires_grad=True)
        >>> targets = torch.randint(1000, (2, 6))
        >>> loss = linear_cross_entropy(hidden, weight, targets, chunk_size=4)
        >>> expected = torch.nn.functional.cross_entropy(
        ...     (hidden @ weight.T).flatten(0, 1), targets.flatten()
        ... )
        >>> torch.testing.assert_close(loss, expected)
    """
    check_options(reduction, ignore_index, label_smoothing, z_loss, softcap, chunk_size)
    dtype = product_dtype(hidden, weight, bias, targets)
    check_differentiation(hidden, weight, bias)
    check_shapes(hidden, weight, targets, bias, class_weight)
    rows = hidden.reshape(-1, hidden.shape[-1])
    if class_weight is not None:
        class_weight = class_weight.detach().to(accumulation_dtype(dtype))
    factor = 2 if _takes_twice_the_rows(weight, dtype, softcap) else 1
    num_rows = _chunk_rows(chunk_size, rows.shape[0], weight, factor)
    grad = torch.is_grad_enabled()
    arguments = (
        rows,
        weight,
        bias,
        targets.reshape(-1),
        class_weight,
        ignore_index,
        reduction,
        float(label_smoothing),
        float(z_loss),
        None if softcap is None else float(softcap),
        dtype,
        num_rows,
        grad and hidden.requires_grad,
        grad and weight.requires_grad,
        grad and bias is not None and bias.requires_grad,
    )
    with _without_autocast(hidden):
        if hidden.device.type == "cpu" and not torch.compiler.is_compiling():
            loss = _explained(arguments, targets, weight.shape[0], ignore_index)
        else:
            loss = _apply(_LinearCrossEntropy, *arguments)[0]
    return loss.reshape(targets.shape) if reduction == "none" else loss


class LinearCrossEntropy(nn.Module):
    """`linear_cross_entropy` with its options kept, for use in place of ``nn.CrossEntropyLoss``.

    It has no weight of its own: the output layer's is passed, since it often is the embedding's.

    Args:
        class_weight: What the loss of each class counts; a buffer that is not saved.
        options: Further options of `linear_cross_entropy`, by keyword.

    Raises:
        TypeError: An option that does not exist.

    Example:
        >>> head = nn.Linear(16, 1000, bias=False)
        >>> loss_fn = LinearCrossEntropy(label_smoothing=0.1)
        >>> loss = loss_fn(torch.randn(8, 16), head.weight, torch.randint(1000, (8,)))
        >>> loss.backward()
        >>> head.weight.grad.shape
        torch.Size([1000, 16])
    """

    class_weight: Tensor | None

    def __init__(
        self,
        *,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        chunk_size: int | Literal["auto"] = "auto",
    ) -> None:
        super().__init__()
        check_options(reduction, ignore_index, label_smoothing, z_loss, softcap, chunk_size)
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.ignore_index = ignore_index
        self.reduction: Reduction = reduction
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.softcap = softcap
        self.chunk_size = chunk_size

    def forward(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Return the loss; see `linear_cross_entropy`."""
        return linear_cross_entropy(
            hidden,
            weight,
            targets,
            bias,
            class_weight=self.class_weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            chunk_size=self.chunk_size,
        )

    def extra_repr(self) -> str:
        """Return the options, as in the call that makes this."""
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}, z_loss={self.z_loss}, "
            f"softcap={self.softcap}, chunk_size={self.chunk_size!r}"
        )


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss; gradients are made in the forward where one number is all that they lack."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        class_weight: Tensor | None,
        ignore_index: int,
        reduction: str,
        label_smoothing: float,
        z_loss: float,
        softcap: float | None,
        dtype: torch.dtype,
        num_rows: int,
        *wanted: bool,
    ) -> tuple[Tensor, ...]:
        each, unit = reduction == "none", None
        if class_weight is not None and dtype is torch.float16:
            # What weighs most becomes 1, or a gradient in 16 bits would have the weights' scale.
            unit = heaviest(class_weight, targets, ignore_index, label_smoothing)
            class_weight = class_weight / unit
        losses, gradients = run_chunks(
            hidden,
            weight,
            bias,
            targets,
            Terms(label_smoothing, z_loss, softcap, class_weight),
            ignore_index=ignore_index,
            dtype=dtype,
            num_rows=num_rows,
            wanted=Wanted(False, False, False) if each else Wanted(*wanted),
        )
        # From a second output a path leads to all inputs; not from the loss, which its user may
        # write to. The backward of compiled code cannot be differentiated at all, and says so.
        end = () if torch.compiler.is_compiling() else (losses.new_empty(0),)
        ctx.each, ctx.wanted = each, wanted
        ctx.options = (ignore_index, label_smoothing, z_loss, softcap, dtype, num_rows)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.vocabulary = weight.shape[0]
        if each:
            ctx.save_for_backward(hidden, weight, bias, targets, class_weight, unit, *end)
            return losses if unit is None else losses * unit, *end
        loss = losses.sum()
        scale = torch.ones_like(loss)
        if reduction == "sum" and unit is not None:
            loss, scale = loss * unit, unit
        if reduction == "mean":
            counted = count(targets, class_weight, ignore_index, loss.dtype)
            loss = loss / counted
            # Where every target is ignored the loss is NaN and the gradient zero, as in torch.
            scale = torch.where(counted == 0, 0.0, 1 / counted)
        ctx.save_for_backward(*gradients, scale, *end)
        return loss, *end

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            if ctx.each:
                gradients, scale = _gradients_again(ctx, grad_loss)
            else:
                *found, scale = ctx.saved_tensors[:4]
                gradients, scale = Gradients(*found), scale * grad_loss
            vocabulary, (hidden_dtype, weight_dtype, bias_dtype) = ctx.vocabulary, ctx.dtypes
            hidden = _scaled(gradients.hidden, scale, hidden_dtype)
            weight = _scaled(_cut(gradients.weight, vocabulary), scale, weight_dtype)
            bias = _scaled(_cut(gradients.bias, vocabulary), scale, bias_dtype)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            end = ctx.saved_tensors[-1]
            hidden, weight, bias = (
                None if g is None else _apply(_NotTwice, g, grad_loss, end)
                for g in (hidden, weight, bias)
            )
        return hidden, weight, bias, *[None] * (len(ctx.needs_input_grad) - 3)


class _NotTwice(torch.autograd.Function):
    """A gradient that cannot be differentiated, and says so when it is tried.

    It hangs on all that it depends on: the loss's own gradient, and by ``end`` the inputs. As a
    constant a penalty on it would train nothing, and ``torch.autograd.functional.hvp`` be zero.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, grad_loss: Tensor, end: Tensor) -> Tensor:  # noqa: ARG004
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:  # noqa: ARG004
        raise RuntimeError(
            "linear_cross_entropy has a first derivative only, and a gradient of it was "
            "differentiated (create_graph=True); for a second derivative use "
            "F.cross_entropy(F.linear(hidden, weight, bias), targets)"
        )


def _apply(function: type[torch.autograd.Function], *arguments: object) -> Any:
    return function.apply(*arguments)


def _gradients_again(ctx: Any, grad_losses: Tensor) -> tuple[Gradients, Tensor]:
    """Return gradients of the sum weighted by ``grad_losses``, and what they lack as a factor."""
    if is_batched(grad_losses):
        raise RuntimeError(
            "linear_cross_entropy makes its logits again in its backward under reduction='none', "
            "which cannot be done for a batch of gradients at once; leave out is_grads_batched and "
            "vectorize, or use F.cross_entropy(F.linear(hidden, weight, bias), targets)"
        )
    hidden, weight, bias, targets, class_weight, unit = ctx.saved_tensors[:6]
    ignore_index, label_smoothing, z_loss, softcap, dtype, num_rows = ctx.options
    scale = grad_losses.new_ones(())
    if dtype.itemsize == 2:
        # The largest becomes 1, so that those of a mean, or under loss scaling, fit into 16 bits.
        scale = largest(grad_losses)
    with _without_autocast(hidden):  # a backward may be called inside of it
        _, gradients = run_chunks(
            hidden,
            weight,
            bias,
            targets,
            Terms(label_smoothing, z_loss, softcap, class_weight),
            ignore_index=ignore_index,
            dtype=dtype,
            num_rows=num_rows,
            wanted=Wanted(*ctx.wanted),
            factors=grad_losses / scale,
        )
    return gradients, scale if unit is None else scale * unit


def _cut(gradient: Tensor | None, vocabulary: int) -> Tensor | None:
    return None if gradient is None else gradient[:vocabulary]


def _scaled(gradient: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return ``gradient * scale`` as ``dtype``, rounded once; a backward may come twice."""
    if gradient is None:
        return None
    # With as many dimensions, or the scale would be rounded to the gradient's dtype first.
    scale = scale.reshape([1] * gradient.dim())
    if torch.compiler.is_compiling() or is_batched(scale):
        return (gradient * scale).to(dtype)
    return torch.mul(gradient, scale, out=gradient.new_empty(gradient.shape, dtype=dtype))


def _chunk_rows(chunk_size: int | str, num_rows: int, weight: Tensor, factor: int = 1) -> int:
    """Return how many rows a chunk has; ``factor`` times as many where bytes bound them."""
    if not isinstance(chunk_size, str):
        return chunk_size
    row_bytes = 4 * max(1, weight.shape[0])
    most = factor * max(CHUNK_BYTES, row_bytes * weight.shape[1]) // row_bytes
    rows = max(FEWEST_ROWS, 1 << (most.bit_length() - 1))
    while rows * MOST_CHUNKS < num_rows:
        rows *= 2
    return rows


def _takes_twice_the_rows(weight: Tensor, dtype: torch.dtype, softcap: float | None) -> bool:
    """Whether twice the rows take less memory than eager code takes.

    Under bf16 eager code has a chunk's logits in bf16, in fp32, and their log-softmax: 10 bytes
    each. (Under fp16 it does without the second.) Compiled code has them and their gradient in
    bf16, 4 bytes, but for a softcap's tanh, which it may keep in fp32; where products of 16 bits
    cannot be had in fp32 (a CPU, ROCm), it has fp32 copies as well.
    """
    compiled = torch.compiler.is_compiling() and has_wide_products(weight.device)
    return compiled and dtype is torch.bfloat16 and softcap is None


def _without_autocast(hidden: Tensor) -> AbstractContextManager[object]:
    """Keep autocast, which has chosen the dtype, from rounding the sums over chunks as well."""
    if autocasts(hidden):
        return torch.autocast(hidden.device.type, enabled=False)
    return nullcontext()


def _explained(
    arguments: tuple[Any, ...], targets: Tensor, vocabulary: int, ignore_index: int
) -> Tensor:
    """Return the loss; say which target it is where one is no class."""
    try:
        loss: Tensor = _apply(_LinearCrossEntropy, *arguments)[0]
    except (RuntimeError, IndexError) as error:
        bad = ((targets < 0) | (targets >= vocabulary)) & (targets != ignore_index)
        if not bad.any():
            raise
        raise IndexError(
            f"target {targets[bad][0].item()} is no class: expected 0 to {vocabulary - 1}, or "
            f"ignore_index={ignore_index}"
        ) from error
    return loss
