"""The loss of a transformers model for causal language modelling, without its logits.

``model(input_ids=..., labels=...).loss`` makes the logits of every position. `causal_lm_loss` runs
the model without its output layer and gives hidden states and the layer's weight to
`linear_cross_entropy`. It knows nothing of transformers but the two methods that its models share:
``base_model`` and ``get_output_embeddings()``.

It calls the model's parts and not the model. A wrapper such as DistributedDataParallel would miss
that, and leave gradients as they are on each rank, silently; so a wrapper is refused.
"""

from __future__ import annotations

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from torchfast.losses.linear_cross_entropy import linear_cross_entropy

# Attributes of configurations by which models change their logits otherwise than by softcapping.
OTHER_LOGITS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "mup_width_multiplier")


def causal_lm_loss(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int | Literal["auto"] = "auto",
    **model_inputs: Any,
) -> Tensor:
    """Compute ``model(input_ids=input_ids, labels=labels, **model_inputs).loss``.

    The labels are shifted here, as the model would: position i is judged by label i + 1, and the
    last position counts for nothing. Pass ``labels=input_ids``, with ignored positions set to
    ``ignore_index``.

    Args:
        model: GPT2LMHeadModel, LlamaForCausalLM and their like, not wrapped.
        input_ids: Shape ``(batch, length)``.
        labels: Shape ``(batch, length)``, not shifted.
        ignore_index: Positions with this label count for nothing.
        reduction: The ``"mean"`` over the positions that count, or their ``"sum"``, which
            ``loss_fn`` may return with their number as weight.
        label_smoothing: As in `linear_cross_entropy`.
        z_loss: As in `linear_cross_entropy`.
        chunk_size: As in `linear_cross_entropy`.
        model_inputs: What else the model takes, such as ``attention_mask``.

    Returns:
        Loss, shape ``()``, at least fp32.

    Raises:
        TypeError: Not such a model, or a wrapper.
        ValueError: A model whose logits or loss are more than the output layer and cross entropy.

    Numerics: Close to the model's own loss, as `linear_cross_entropy` says.
    Synchronizes: Never of its own.
    """
    find_head = getattr(model, "get_output_embeddings", None)
    base = getattr(model, "base_model", None)
    if find_head is None or not isinstance(base, nn.Module) or base is model:
        raise TypeError(
            "model must be a transformers model with an output layer (base_model and "
            f"get_output_embeddings()), got {type(model).__name__}; of a wrapper pass the model "
            "inside, within the wrapper's forward"
        )
    head = find_head()
    if not isinstance(head, nn.Linear):
        raise TypeError(
            f"the output layer of {type(model).__name__} must be an nn.Linear, got "
            f"{type(head).__name__}; call linear_cross_entropy with what it is made of"
        )
    config: Any = getattr(model, "config", None)
    for name in OTHER_LOGITS:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"{type(model).__name__} changes its logits by config.{name}, which "
                "causal_lm_loss does not know; scale hidden and call linear_cross_entropy"
            )
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            f"{type(model).__name__} adds a loss of its router (config.output_router_logits), "
            "which causal_lm_loss does not know; call linear_cross_entropy and add it"
        )
    hidden: Tensor = base(input_ids=input_ids, **model_inputs)[0]
    return linear_cross_entropy(
        hidden,
        head.weight,
        F.pad(labels, (0, 1), value=ignore_index)[..., 1:],
        head.bias,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=getattr(config, "final_logit_softcapping", None),
        chunk_size=chunk_size,
    )
