"""The loss of a transformers model for causal language modelling, without its logits.

``model(input_ids=..., labels=...).loss`` makes the logits of every position. `causal_lm_loss` runs
the model without its output layer and gives hidden states and the layer's weight to
`linear_cross_entropy`. It knows nothing of transformers but the two methods that its models share:
``base_model`` and ``get_output_embeddings()``.

It calls the model's parts and not the model. A wrapper such as DistributedDataParallel would miss
that, and leave gradients as they are on each rank, silently; so a wrapper is refused.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from torchfast.losses.linear_cross_entropy import linear_cross_entropy

# Attributes of configurations by which models change their logits otherwise than by softcapping.
OTHER_LOGITS = (
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "mup_width_multiplier",
    "logits_mup_width_multiplier",
    "output_multiplier",
)
# And those by which they add to their loss.
OTHER_LOSSES = {
    "output_router_logits": "a loss of its router",
    "z_loss_coefficient": "a z-loss of its own",
}
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# Arguments by which the model itself would change its loss. The part without the output layer takes
# them without a word.
OF_THE_LOSS = ("logits_to_keep", "num_items_in_batch", "output_router_logits", "shift_labels")


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
        ValueError: A model whose logits or loss are more than the output layer and cross entropy of
            shifted labels, or an argument of ``model_inputs`` that would change that loss.

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
    is_plain = isinstance(head, nn.Linear) and _forward_of(head) is nn.Linear.forward
    if not is_plain:
        own = " with a forward of its own" if isinstance(head, nn.Linear) else ""
        raise TypeError(
            f"the output layer of {type(model).__name__} must be an nn.Linear, got "
            f"{type(head).__name__}{own}; call linear_cross_entropy with what it is made of"
        )
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(head, name) for name in hooks):
        raise ValueError(
            f"the output layer of {type(model).__name__} has hooks, and causal_lm_loss does not "
            "call it; remove them (or Float8Options(vocabulary=True), which has its own), or call "
            "the model with labels"
        )
    config = _Settings(model)
    for name in OTHER_LOGITS:
        if any(value not in (1, 1.0) for value in config.values(name)):
            raise ValueError(
                f"{type(model).__name__} changes its logits by config.{name}, which "
                "causal_lm_loss does not know; scale hidden and call linear_cross_entropy"
            )
    if any(value != head.weight.shape[0] for value in config.values("unpadded_vocab_size")):
        raise ValueError(
            f"{type(model).__name__} cuts its logits to config.unpadded_vocab_size; call "
            "linear_cross_entropy with so many rows of the output layer's weight"
        )
    for name, what in OTHER_LOSSES.items():
        if any(config.values(name)):
            raise ValueError(
                f"{type(model).__name__} adds {what} (config.{name}), "
                "which causal_lm_loss does not know; call linear_cross_entropy and add it"
            )
    if "_loss_function" in vars(model):
        raise ValueError(
            f"{type(model).__name__} was given another loss_function, which causal_lm_loss does "
            "not call; call the model with labels"
        )
    if not _shifts_labels(type(model)):
        raise ValueError(
            f"{type(model).__name__} has a loss of its own: its forward neither calls "
            "loss_function nor shifts the logits, as models of causal language modelling do; call "
            "linear_cross_entropy with the labels as this model takes them"
        )
    for name, child in model.named_children():
        if child is not base and child is not head and next(child.parameters(), None) is not None:
            raise ValueError(
                f"{type(model).__name__} has parameters outside of its base_model and its output "
                f"layer (in {name}), so its logits may be made otherwise; call "
                "linear_cross_entropy with what goes into the output layer"
            )
    for name in OF_THE_LOSS:
        if name in model_inputs:
            raise ValueError(
                f"{name} changes the loss that {type(model).__name__} itself computes, and "
                "causal_lm_loss does not know it; leave it out, or call linear_cross_entropy"
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
        softcap=next((cap for name in SOFTCAPS for cap in config.values(name) if cap), None),
        chunk_size=chunk_size,
    )


class _Settings:
    """The configuration of a model, and that of its text part, where a model of images has one."""

    def __init__(self, model: nn.Module) -> None:
        config: Any = getattr(model, "config", None)
        parts = (getattr(config, name, None) for name in ("text_config", "decoder", "generator"))
        self._configs = (*parts, config)

    def values(self, name: str) -> list[Any]:
        """Return what each of them says, the text part first."""
        found = (getattr(config, name, None) for config in self._configs)
        return [value for value in found if value is not None]


def _forward_of(module: nn.Module) -> Any:
    return vars(module).get("forward", type(module).forward)


def _shifts_labels(kind: type) -> bool:
    """Whether models of a class compute the usual loss, by what stands in their forward.

    Those of BART's family and XLNet judge position i by label i.
    """
    for base in kind.__mro__:
        forward = vars(base).get("forward")
        code = getattr(inspect.unwrap(forward), "__code__", None) if callable(forward) else None
        # What transformers calls by now, and what each model did by itself before.
        if code and ("loss_function" in code.co_names or "shift_logits" in code.co_varnames):
            return True
    return False


# Asked while the compiler traces, and not a part of the graph. It is what
# torch.compiler.assume_constant_result does, which would import the compiler here.
_shifts_labels._dynamo_marked_constant = True  # type: ignore[attr-defined]
