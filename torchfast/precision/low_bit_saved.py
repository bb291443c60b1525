"""What optimizers and states are taken over into low bits, and what would go on otherwise there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchfast._core.errors import PlanError
from torchfast._core.local import local
from torchfast.precision.low_bit_codes import empty_codes
from torchfast.precision.low_bit_options import VARIANTS
from torchfast.precision.low_bit_shards import can_be_coded

if TYPE_CHECKING:
    from torchfast.precision.low_bit import LowBitAdamW

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
# Codes have a name of their own, or an AdamW would take them for moments of 0 to 255.
CODES: Final = "_codes"
SCALE: Final = "_scale"
# By which groups say what their codes are.
KIND: Final = "state_kind"
# What an AdamW has in its groups beside, which says how it computes. Any other key is a scheduler's
# or the user's: OneCycleLR keeps its bounds there, timm the part of the rate that a layer takes.
OF_ADAMW: Final = (
    "amsgrad",
    "foreach",
    "maximize",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
)
# By what names it keeps its state; the last is left over where amsgrad was on and is not any more.
_STATE: Final = frozenset(
    ("step", *(m + part for m in MOMENTS for part in ("", CODES, SCALE)), "max_exp_avg_sq")
)
_NUMBERS: Final = ("lr", "betas", "eps", "weight_decay")
# What torch's optimizers say of themselves in their groups, and LowBitAdamW does not.
_OF_TORCHS: Final = ("maximize", "foreach", "differentiable")


def check_of_adamw(state_dict: Mapping[str, Any]) -> None:
    """Raise if a state is of an optimizer that would go on otherwise than AdamW does."""
    for saved in filter(None, state_dict["state"].values()):
        _check_keys({name.removesuffix(CODES) for name in saved}, ("step", *MOMENTS))
        other = next((name for name in saved if name not in _STATE), None)
        if other is not None:
            raise ValueError(_would_differ(other))
    for group in state_dict["param_groups"]:
        _check_keys(group, _NUMBERS)
        if (what := _other_kind(group)) is not None:
            raise ValueError(_would_differ(what))


def _check_keys(found: Collection[str], expected: Iterable[str]) -> None:
    lacking = next((name for name in expected if name not in found), None)
    if lacking is not None:
        raise ValueError(
            f"the optimizer state has no {lacking!r} but {sorted(found)}, so it is not that of an "
            "AdamW; load it into the optimizer that saved it"
        )


def _other_kind(group: Mapping[str, Any]) -> str | None:
    """Return what a group has that AdamW has not, or None."""
    if (variant := next((name for name in VARIANTS if group.get(name)), None)) is not None:
        return f"{variant}=True"
    if group["weight_decay"] and not _is_decoupled(group):
        return "weight decay within the gradient, as Adam has it"
    # Of torch's optimizers that keep these moments only Adam and AdamW can do amsgrad, and say that
    # they do not. Nothing else tells RAdam from them.
    if "amsgrad" not in group and any(name in group for name in _OF_TORCHS):
        return "groups without amsgrad, as RAdam and NAdam have them"
    return None


def _would_differ(what: str) -> str:
    return (
        f"the optimizer state is of one with {what}, which LowBitAdamW has not: it would train "
        "otherwise from here on; load it into the optimizer that saved it"
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


def check_codes(
    saved: Mapping[str, Any], kind: str, parameter: Tensor, *, is_part: bool = False
) -> None:
    """Raise if the codes of a parameter's moments are not such as this kind has of it.

    Args:
        saved: Its state.
        kind: How its moments are kept.
        parameter: Whose state it is to be.
        is_part: Whether the state of a sharded parameter is this rank's part, and not all of it, as
            in a file.
    """
    for moment in MOMENTS:
        codes = saved.get(moment + CODES)
        if codes is None:
            _check_shape(saved[moment], moment, parameter)
            continue
        if kind == "full":
            raise ValueError(
                "the optimizer state holds moments in low bits, but this LowBitAdamW keeps "
                f"them in {kind!r}; build it with the state= it had"
            )
        shape, of = (local(t).shape if is_part else t.shape for t in (codes, parameter))
        expected = None
        if can_be_coded(kind, parameter):
            expected = empty_codes(kind, torch.empty(of, device="meta"))[0].shape
        if shape != expected:
            has = "none, but fp32" if expected is None else f"such of shape {tuple(expected)}"
            raise ValueError(
                f"the optimizer state was saved by other low bits than {kind!r}, or of parameters "
                f"in another order: codes of {moment} have shape {tuple(shape)}, and a parameter "
                f"of shape {tuple(of)} has {has}; build LowBitAdamW with the state=, the groups "
                "and as many ranks as it had"
            )


def _check_shape(value: Tensor, moment: str, parameter: Tensor) -> None:
    """Raise if a moment in full is another parameter's: its values would be coded all the same."""
    if value.shape not in (parameter.shape, local(parameter).shape):
        raise ValueError(
            f"the optimizer state is of parameters in another order: {moment} has shape "
            f"{tuple(value.shape)}, and its parameter {tuple(parameter.shape)}; build LowBitAdamW "
            "with the parameters in the order they had"
        )


def check_convertible(optimizer: Optimizer) -> None:
    """Raise PlanError if an optimizer is no AdamW, or has what another one in its place would lose.

    It is built anew from its groups, so its state, its hooks and who drives its groups stay behind.
    """
    name = type(optimizer).__name__
    if type(optimizer) is not torch.optim.AdamW:
        raise PlanError(
            f"low-bit state is to be had for torch.optim.AdamW, but the optimizer is {name}; "
            "give an AdamW, or optimizer='as_given'"
        )
    groups = optimizer.param_groups
    variant = next((f for f in VARIANTS if any(g.get(f) for g in groups)), None)
    if variant is not None:
        raise PlanError(
            f"low-bit state is to be had for AdamW as it is, but the optimizer has {variant}="
            "True; leave that out, or use optimizer='as_given'"
        )
    lost = "state, since it has stepped" if optimizer.state else None
    if any(hooks for key, hooks in vars(optimizer).items() if key.endswith("_hooks")):
        lost = "hooks"
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        lost = "a scheduler"
    elif "step" in vars(optimizer):
        lost = "a step() of its own"
    if lost is not None:
        raise PlanError(
            f"low-bit state is kept by another optimizer in place of this AdamW, which has {lost} "
            "that it would lose; build LowBitAdamW itself, with what belongs to it, or the AdamW "
            "without"
        )


def plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group of an AdamW without what only that knows."""
    kept = {k: v for k, v in group.items() if k not in (*OF_ADAMW, "params", "param_names")}
    names = group.get("param_names")  # which torch takes together with the parameters only
    own = group["params"]
    return {**kept, "params": own if names is None else list(zip(names, own, strict=True))}


def unmet(low_bit: LowBitAdamW, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an optimizer has in place of what options ask for; it may do more than that.

    Args:
        low_bit: The optimizer.
        options: ``state``, ``stochastic_rounding``, ``compiled``; what is None is not asked for.
    """
    own = {
        "state": low_bit.kind,
        "stochastic_rounding": low_bit.stochastic_rounding,
        "compiled": low_bit.compiled,
    }
    # Not to ask for rounding by chance is not to ask that there be none.
    asked = {**options, "stochastic_rounding": options.get("stochastic_rounding") or None}
    return {name: has for name, has in own.items() if asked.get(name) not in (None, has)}


def check_does(low_bit: LowBitAdamW, options: Mapping[str, Any]) -> None:
    """Raise PlanError if an optimizer that is built does not do what options ask for."""
    has = unmet(low_bit, options)
    if has:
        found = ", ".join(f"{name}={value!r}" for name, value in has.items())
        wanted = ", ".join(f"{name}={options[name]!r}" for name in has)
        raise PlanError(
            f"the LowBitAdamW that was built has {found}, and {wanted} is asked for; build it so, "
            "or an AdamW, which one that is so will replace"
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
