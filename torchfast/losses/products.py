"""Products of matrices that are summed in place over chunks, compiled as well.

What is summed is the gradient of the output layer's weight, which is as large as a chunk's logits
or larger. ``addmm`` onto its own sum keeps one of it. The compiler does not: it makes each sum anew
from the last, and where it knows no ``addmm``, as for 16-bit factors with a sum in fp32, it keeps
the products of all chunks to add them up in one kernel. So compiled code calls an operator of its
own, which the compiler does not look into. It knows which argument that writes, and hands over the
sum itself.

The loss needs no gradient of a weight, so the compiler is free to put a product off until the
backward, and keeps its factors and a copy of the sum until then. That is why the loss of the chunk
goes through the operator: it comes out when the product is done.
"""

from __future__ import annotations

import torch
from torch import Tensor


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``left @ right`` in ``dtype``.

    The tensor cores sum in fp32 anyway; with ``out_dtype`` the sum stays so. Rounded to 16 bits
    chunk by chunk, weights of frequent tokens would overflow in fp16.
    """
    if left.dtype is not dtype and has_wide_products(left.device):
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def add_product(total: Tensor, left: Tensor, right: Tensor, loss: Tensor) -> Tensor:
    """Add ``left @ right`` to ``total``, in place and in its dtype; return ``loss`` as it is."""
    if torch.compiler.is_compiling():
        # By name: what ``custom_op`` returns is no function that Dynamo could put into a graph.
        behind: Tensor = torch.ops.torchfast.add_product_.default(total, left, right, loss)
        return behind
    _add(total, left, right)
    return loss


def has_wide_products(device: torch.device) -> bool:
    """Return whether products of 16-bit matrices can be had in fp32: by cuBLAS alone."""
    return device.type == "cuda" and torch.version.hip is None


def _add(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype is not total.dtype and has_wide_products(left.device):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


@torch.library.custom_op(
    "torchfast::add_product_",
    mutates_args=("total",),
    schema="(Tensor(a!) total, Tensor left, Tensor right, Tensor loss) -> Tensor",
    # addmm takes any strides: the compiler need not copy what it has laid out with other ones.
    tags=(torch.Tag.flexible_layout,),
)
def _add_product(total: Tensor, left: Tensor, right: Tensor, loss: Tensor) -> Tensor:
    _add(total, left, right)
    return loss.clone()  # an operator must not return what it was given


@_add_product.register_fake
def _without_data(total: Tensor, left: Tensor, right: Tensor, loss: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(loss)
