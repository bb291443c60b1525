"""The form of an optimizer: which implementation runs its update, with the same hyperparameters.

torch.optim holds up to three implementations of each optimizer (for-loop, foreach, fused) and a
capturable variant that keeps its step counters on the device. The user's optimizer object stays;
its form is switched by the flags of its parameter groups and by moving its scalar state, and
`close` puts both back. Hyperparameters are never touched, so schedulers and ``group["lr"] = x``
behave as ever.

Why it is faster: the fused update is one or two kernels for all parameters, where the for-loop
launches a dozen for each. When it is not: a model of one or two tensors.

Two things switch a form back behind our back, and both are handled: ``load_state_dict`` restores
the flags and the placement of the saved run, and ``add_param_group`` takes the defaults. What the
optimizer's ``state_dict`` returns is always the form as given, so a file loads into a plain loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfast._core.building import optimized
from torchfast._core.decisions import Decision
from torchfast._core.local import local
from torchfast._core.update_trials import kinds_of, refusal

Form = Literal["as_given", "fused", "capturable", "fused_capturable"]

# Scalar state that torch keeps on the host unless the form is fused or capturable.
_HOST_SCALARS = ("step", "mu_product")
_FLAGS = ("foreach", "fused", "capturable")
# What each form sets, as far as the optimizer has the flag; and the flag that it must have.
FORMS: dict[Form, dict[str, bool]] = {
    "fused": {"foreach": False, "fused": True},
    "capturable": {"capturable": True},
    "fused_capturable": {"foreach": False, "fused": True, "capturable": True},
}
_NEEDED = {"fused": "fused", "capturable": "capturable", "fused_capturable": "fused"}


@final
class OptimizerForm:
    """Switches an optimizer to a form, keeps it there, and puts it back.

    Args:
        optimizer: The user's optimizer; changed in place.
        form: ``"as_given"`` changes nothing; ``"fused"`` and ``"capturable"`` step aside, with
            the reason in `decision`, where torch has no such implementation for this optimizer,
            device or dtype.
        model: Searched for sparse embeddings, whose gradients no fused update takes.

    Numerics: ``"as_given"`` is exact. The other forms may differ by rounding.
    Synchronizes: When applied, put back or saved, if scalar state has to cross to the host.
    """

    def __init__(self, optimizer: Optimizer, form: Form, model: nn.Module) -> None:
        self.optimizer = optimizer
        self._given = [{f: g[f] for f in _FLAGS if f in g} for g in optimizer.param_groups]
        self._given_defaults = {f: optimizer.defaults[f] for f in _FLAGS if f in optimizer.defaults}
        self._given_scaling = optimizer.__dict__.get("_step_supports_amp_scaling")
        obstacle = None if form == "as_given" else _obstacle(optimizer, form, model)
        self.form: Form = "as_given" if obstacle else form
        self.decision = _decision(optimizer, form, obstacle)
        if self.form != "as_given":
            self._save_hook = optimizer.register_state_dict_post_hook(
                lambda _, state: self._as_given(state)
            )
        self.apply()

    @property
    def is_fused(self) -> bool:
        """Whether every group now runs the fused update, by our doing or as given."""
        return all(g.get("fused") for g in self.optimizer.param_groups)

    def apply(self) -> None:
        """Put the form on: at construction, and again after a state was loaded."""
        if self.form == "as_given":
            return
        flags = FORMS[self.form]
        for holder in (self.optimizer.defaults, *self.optimizer.param_groups):
            holder.update({flag: on for flag, on in flags.items() if flag in holder})
        if "capturable" in flags:  # torch warns of steps outside a graph: those are the warm-up
            self.optimizer._warned_capturable_if_run_uncaptured = True
        if "fused" in flags:
            # What the constructor sets for fused=True: GradScaler then hands found_inf to the
            # kernel in place of reading it on the host.
            self.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
            self.optimizer._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]
        for parameter, state in self.optimizer.state.items():
            for key in _HOST_SCALARS:
                value = state.get(key)
                if isinstance(value, Tensor) and value.device != parameter.device:
                    state[key] = value.to(parameter.device, torch.float32)

    def close(self) -> None:
        """Put the flags and the scalar state back as they were given."""
        if self.form == "as_given":
            return
        state = self.optimizer.state_dict()
        self._save_hook.remove()
        self.optimizer.defaults.update(self._given_defaults)
        for group, saved in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            group.update({flag: saved[flag] for flag in _FLAGS if flag in saved})
        for index, parameter in enumerate(optimized(self.optimizer)):  # as state_dict numbers them
            if parameter in self.optimizer.state:
                self.optimizer.state[parameter].update(state["state"].get(index, {}))
        self.optimizer.__dict__.pop("_step_supports_amp_scaling", None)
        if self._given_scaling is not None:
            self.optimizer._step_supports_amp_scaling = self._given_scaling  # type: ignore[attr-defined]
        self.form = "as_given"

    def _as_given(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return what ``optimizer.state_dict()`` found as if the form had never been changed."""
        groups = [dict(group) for group in state["param_groups"]]
        for position, group in enumerate(groups):
            group.update(
                self._given[position] if position < len(self._given) else self._given_defaults
            )
        device_scalar_groups = [bool(g.get("fused") or g.get("capturable")) for g in groups]
        on_device = {
            index: device_scalar
            for group, device_scalar in zip(groups, device_scalar_groups, strict=True)
            for index in group["params"]
        }
        return {
            **state,
            "param_groups": groups,
            "state": _with_host_scalars(state["state"], on_device),
        }


def _obstacle(optimizer: Optimizer, form: Form, model: nn.Module) -> str | None:
    """Return why the form cannot be had here, or None."""
    name = type(optimizer).__name__
    if not type(optimizer).__module__.startswith("torch.optim"):
        return f"{name} is not one of torch.optim's own classes, whose forms are known"
    if any(_NEEDED[form] not in group for group in optimizer.param_groups):
        return f"torch.optim.{name} has no {form} implementation"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} was built with differentiable=True, which excludes {form}"
    sparse = next((n for n, m in model.named_modules() if getattr(m, "sparse", None) is True), None)
    if sparse is not None:
        return f"module {sparse!r} has sparse gradients, which the {form} update does not take"
    for kind in kinds_of(optimizer):
        if (why := refusal(optimizer, kind, FORMS[form])) is not None:
            what = f"{'' if local(kind) is kind else 'shards of '}{kind.dtype}"
            return f"torch refused {form} {name} for {what} on {kind.device.type}: {why}"
    return None


def _decision(optimizer: Optimizer, form: Form, obstacle: str | None) -> Decision:
    name = type(optimizer).__name__
    if form == "as_given":
        return Decision(lever="optimizer", outcome="left alone", detail=f"{name} as given")
    if obstacle:
        return Decision(
            lever="optimizer",
            outcome="stepped aside",
            detail=f"{name} runs as given: {obstacle}",
        )
    detail = f"{name} runs its {form} update; state_dict() keeps the form as given"
    return Decision(lever="optimizer", outcome="applied", detail=detail)


def _with_host_scalars(
    state: Mapping[int, Mapping[str, Any]], on_device: Mapping[int, bool]
) -> dict[int, dict[str, Any]]:
    """Return ``state`` with the scalars of for-loop and foreach groups on the host."""
    result = {index: dict(entries) for index, entries in state.items()}
    places = [
        (index, key)
        for index, entries in result.items()
        for key in _HOST_SCALARS
        if not on_device.get(index) and isinstance(entries.get(key), Tensor)
    ]
    if places:
        # One transfer for all of them rather than one host sync each.
        device = result[places[0][0]][places[0][1]].device
        stacked = torch.stack([result[i][k].to(device, torch.float32) for i, k in places]).cpu()
        for (index, key), value in zip(places, stacked.unbind(), strict=True):
            result[index][key] = value.clone()
    return result
