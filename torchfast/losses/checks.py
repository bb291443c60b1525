"""Checks of what `linear_cross_entropy` is given, with messages that say what was expected."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchfast._core.arguments import check_choice, check_int, check_positive


def product_dtype(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
) -> torch.dtype:
    """Return the dtype of the matrix products."""
    named = {"hidden": hidden, "weight": weight, "targets": targets, "bias": bias}
    for name, value in named.items():
        if name == "bias" and value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
        if hasattr(value, "device_mesh"):
            raise TypeError(
                f"{name} is a DTensor, which linear_cross_entropy does not split; call it inside "
                "the forward of the module that holds the output layer, where FSDP has gathered "
                "it, or pass weight.full_tensor()"
            )
        if value.device != hidden.device:
            raise ValueError(
                f"{name} is on {value.device} and hidden on {hidden.device}; move them to one "
                "device"
            )
    if targets.dtype is not torch.int64:
        raise TypeError(
            f"targets must be class indices of dtype torch.int64, got {targets.dtype}; for other "
            "integers use targets.long(), for probabilities F.cross_entropy"
        )
    floating = [hidden, weight] if bias is None else [hidden, weight, bias]
    for tensor in floating:
        if not tensor.is_floating_point():
            raise TypeError(f"hidden, weight and bias must be floating-point, got {tensor.dtype}")
    dtypes = {tensor.dtype for tensor in floating}
    if autocasts(hidden) and torch.float64 not in dtypes:
        return torch.get_autocast_dtype(hidden.device.type)
    if len(dtypes) > 1:
        found = ", ".join(str(tensor.dtype) for tensor in floating)
        raise ValueError(
            f"hidden, weight and bias must have one dtype outside of autocast, got {found}; "
            "convert them, or use autocast"
        )
    return hidden.dtype


def check_differentiation(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise where gradients are asked for otherwise than by a backward.

    Compiled code too: there a gradient under ``torch.func.grad`` would be zero, without a word.
    """
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "linear_cross_entropy makes its gradients in its forward, which no transform of "
            "torch.func (grad, vmap, jvp, jacrev, ...) can follow; there use "
            "F.cross_entropy(F.linear(hidden, weight, bias), targets), or take the gradients by "
            "backward() or torch.autograd.grad, which goes with torch.func.functional_call"
        )
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    tensors = (hidden, weight) if bias is None else (hidden, weight, bias)
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise RuntimeError(
            "linear_cross_entropy has no forward-mode derivative, and was given dual tensors of "
            "torch.autograd.forward_ad; for it use "
            "F.cross_entropy(F.linear(hidden, weight, bias), targets)"
        )


def is_batched(gradient: Tensor) -> bool:
    """Whether a gradient is a batch of them, as under ``is_grads_batched``."""
    if torch.compiler.is_compiling():
        return False
    functions: Any = torch._C._functorch
    return bool(functions.is_batchedtensor(gradient) or functions.is_legacy_batchedtensor(gradient))


def check_shapes(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
) -> None:
    """Raise unless the shapes and devices fit together."""
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            "hidden must have shape (..., features) and weight (vocabulary, features), got "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if weight.shape[0] == 0:
        raise ValueError("weight must have at least one row, a class, got none")
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets must have the shape of hidden without its last dimension, "
            f"{tuple(hidden.shape[:-1])}, got {tuple(targets.shape)}"
        )
    for name, value in (("bias", bias), ("class_weight", class_weight)):
        if value is None:
            continue
        if value.shape != weight.shape[:1]:
            raise ValueError(
                f"{name} must have shape ({weight.shape[0]},), one for each row of weight, got "
                f"{tuple(value.shape)}"
            )
        if name == "class_weight" and value.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "class_weight requires gradients, and the loss has none with respect to it; pass "
                "class_weight.detach()"
            )
        if value.device != weight.device:
            raise ValueError(
                f"{name} is on {value.device} and weight on {weight.device}; move them to one "
                "device"
            )


def check_options(
    reduction: object,
    ignore_index: object,
    label_smoothing: object,
    z_loss: object,
    softcap: object,
    chunk_size: object,
) -> None:
    """Raise for an option that does not exist or is out of range."""
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {ignore_index!r}")
    for name, value in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
        if not 0 <= value < (float("inf") if name == "z_loss" else 1.000001):
            raise ValueError(
                f"{name} must be at least 0{'' if name == 'z_loss' else ' and at most 1'}, "
                f"got {value}"
            )
    if softcap is not None:
        check_positive("softcap", softcap)
    if chunk_size != "auto":
        if isinstance(chunk_size, str):
            raise ValueError(f"chunk_size must be 'auto' or an int >= 1, got {chunk_size!r}")
        check_int("chunk_size", chunk_size, minimum=1)


def autocasts(hidden: Tensor) -> bool:
    """Whether autocast is on where ``hidden`` is."""
    kind = hidden.device.type
    # Asked about "meta" torch raises; torch.amp.is_autocast_available, made for this, breaks a
    # graph in torch 2.11.
    return kind != "meta" and torch.is_autocast_enabled(kind)
