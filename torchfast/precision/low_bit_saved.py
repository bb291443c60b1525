"""What optimizer state is taken over into low bits, and what would go on otherwise from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
SCALE: Final = "_scale"
# By which groups say what their codes are.
KIND: Final = "state_kind"
# Forms of AdamW that are not to be had in low bits.
VARIANTS: Final = ("amsgrad", "maximize")


def check_of_adamw(state_dict: Mapping[str, Any]) -> None:
    """Raise if a state is of an optimizer that would go on otherwise than AdamW does."""
    for group in state_dict["param_groups"]:
        other = next((name for name in VARIANTS if group.get(name)), None)
        what = None if other is None else f"{other}=True"
        if what is None and group.get("weight_decay") and not _is_decoupled(group):
            what = "weight decay within the gradient, as Adam has it"
        if what is not None:
            raise ValueError(
                f"the optimizer state is of one with {what}, which LowBitAdamW has not: it would "
                "train otherwise from here on; load it into the optimizer that saved it"
            )
    for saved in state_dict["state"].values():
        lacking = [name for name in ("step", *MOMENTS) if saved and name not in saved]
        if lacking:
            raise ValueError(
                f"the optimizer state has no {lacking[0]!r} but {sorted(saved)}, so it is not that "
                "of an AdamW; load it into the optimizer that saved it"
            )


def check_kind(state_dict: Mapping[str, Any], kind: str) -> None:
    """Raise if codes stand for other values than those of this kind.

    Those of "8bit" and of "fp8" look alike: a byte a value, and as many scales. What takes none at
    all sees that by itself.
    """
    saved = {group.get(KIND) for group in state_dict["param_groups"]} - {None, kind}
    is_coded = any(f"{MOMENTS[0]}{SCALE}" in state for state in state_dict["state"].values())
    if saved and is_coded and kind != "full":
        raise ValueError(
            f"the optimizer state was saved by other low bits than {kind!r}: by {min(saved)!r}; "
            "build LowBitAdamW with the state= it had"
        )


def _is_decoupled(group: Mapping[str, Any]) -> bool:
    # Before torch 2.7 neither said so; what is loaded then is as it was named.
    return bool(group.get("decoupled_weight_decay", True))


def in_full(value: Tensor) -> Tensor:
    """Return a moment as an ordinary tensor; torchao's own classes keep it in one of theirs."""
    if type(value).__module__.partition(".")[0] == "torchao":
        plain: Tensor = value.dequantize()
        return plain
    return value
