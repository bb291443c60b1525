"""What float8 does to the numbers of a model: drift from bf16, and what falls out of the format.

A converted layer that loses too much raises nothing: the model just learns worse. So before some of
the first updates, and every so often from then on, the first micro-batch goes through forward and
backward twice more, once in float8 and once in bf16, with the same weights and the same random
draws, and loss and gradient norm are compared. On the way each converted layer's operands are
looked at: the largest value, which sets the scale, and the part of the values beside zeros that the
scale leaves so small that they become zero.

Nothing of it is read by the host when it is computed. The figures go to pinned memory behind an
event, and are judged at a later step, when they have arrived. The two passes run eagerly and leave
no gradient, no draw and no statistic behind; they take memory as an eager step does, and where
there is not enough the watch steps aside.

Ranks that train together compare together: the mean of their losses, the norm of the gradient that
they have in common, the largest value that any of them saw. So all find the same, and the first
one says it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from torchfast._core.decisions import Decision
from torchfast._core.measure import first_line
from torchfast._core.rank_group import is_distributed
from torchfast._core.reading import Reading
from torchfast.precision.float8 import Float8Linears
from torchfast.precision.float8_drift import Drift, DriftHistory, LayerNumbers, figures
from torchfast.precision.float8_layers import layer_input
from torchfast.precision.float8_ranks import Alone, WatchedRanks
from torchfast.precision.float8_trial import without_trace

logger = logging.getLogger(__name__)

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The format of gradients: a scale for a whole tensor needs range more than it needs digits.
_GRADIENTS: Final = {"tensorwise": _E5M2, "rowwise": _E4M3, "rowwise_with_gw_hp": _E4M3}
_BY_ROW: Final = ("rowwise", "rowwise_with_gw_hp")
_FIGURES: Final = ("amax", "lost", "present")  # a magnitude, and two counts
_SHOWN: Final = 4
_OPERANDS: Final = ("input", "weight", "gradient")


@final
class Float8Watch:
    """Compares a step in float8 with bf16, before the updates that its options name.

    Args:
        model: As it trains.
        float8: Its converted layers.
        ranks: Who trains it together; None means this process alone.

    Numerics: None, where the step changes nothing but gradients, parameters, buffers, generators,
        what modules keep in attributes, and what of these the loss function holds.
    Synchronizes: Before the updates named, to put the model back; never in between.
    """

    def __init__(
        self, model: nn.Module, float8: Float8Linears, ranks: WatchedRanks | None = None
    ) -> None:
        self._model, self._float8 = model, float8
        self._ranks = Alone(model) if ranks is None else ranks
        self._options = float8.options
        self._pending: list[tuple[int, Reading]] = []
        self._obstacle: str | None = None
        self._warned: set[str] = set()
        self._looked_at = 0
        self._history = DriftHistory()
        self._called: set[str] = set()  # layers in float8

    @property
    def drifts(self) -> list[Drift]:
        """What was found, oldest first: the first comparisons and the latest of a long run."""
        return self._history.kept

    def look(self, step: int, forward: Callable[[], Tensor]) -> None:
        """Compare, if this update is one of those to compare at, and judge what has arrived.

        Args:
            step: The number of the update that is to come; the first is 1.
            forward: Runs the loss on a micro-batch, uncompiled or not, and returns it.
        """
        while self._pending and self._pending[0][1].is_ready:
            self._judge()
        is_due = self._options.watches(step) and step != self._looked_at
        if not is_due or self._obstacle or not self._float8.recipes:
            return
        self._looked_at = step
        if not self._ranks.are_many and is_distributed():
            self._obstacle = "with several processes and no shard= in the plan"
            return
        try:
            with self._float8.seeing_rows(step):
                values = self._compare(forward)
        except _StoppedError as stopped:  # too little memory, above all
            self._obstacle = str(stopped)
            return
        except RuntimeError as error:  # outside of forward and backward
            if self._ranks.are_many:  # the others wait for this one
                raise
            self._obstacle = first_line(error)
            return
        if self._ranks.are_many:
            values = self._joined(values)
        self._pending.append((step, Reading(values, self._float8.device)))

    def decisions(self) -> list[Decision]:
        """Say what was found. Synchronizes: Where figures are on their way."""
        while self._pending:
            self._judge()
        if not self._float8.recipes or not self._options.watch_at:
            return []
        if self._obstacle is not None:
            detail = f"float8 is not compared with bf16: {self._obstacle}"
            return [Decision(lever="float8 watch", outcome="left alone", detail=detail)]
        if not self.drifts:
            detail = f"compares with bf16 before updates {self._options.watched}"
            return [Decision(lever="float8 watch", outcome="applied", detail=detail)]
        scales = "; ".join(
            f"{numbers.layer} {numbers.operand} {numbers.scale:.3g}"
            + (f" (!) {numbers.problem}" if numbers.problem else "")
            for numbers in self.drifts[-1].layers
        )
        return [
            Decision(
                lever="float8 watch",
                outcome="applied",
                detail=f"beside bf16, {self._history}{self._uncalled()}",
            ),
            Decision(lever="float8 scales", outcome="applied", detail=scales),
        ]

    def _uncalled(self) -> str:
        names = [repr(name) for name in self._float8.recipes if name not in self._called]
        if not names:
            return ""
        more = f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else ""
        names = names[:_SHOWN]
        return f"; no forward of these called {', '.join(names)}{more}, which so computed nothing"

    # --- the two passes ---------------------------------------------------------------------

    def _compare(self, forward: Callable[[], Tensor]) -> dict[str, Tensor | float]:
        operands: dict[str, Tensor] = {}
        hooks = [
            hook
            for name, module in self._float8.modules().items()
            for hook in self._hooks(name, module, operands)
        ]
        try:
            loss, norm = self._pass(forward)
            with self._float8.left():
                plain_loss, plain_norm = self._pass(forward)
        finally:
            for hook in hooks:
                hook.remove()
        return {
            "loss": loss,
            "plain_loss": plain_loss,
            "norm": norm,
            "plain_norm": plain_norm,
            **operands,
        }

    def _pass(self, forward: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        failure, gradients = None, []
        with without_trace(self._model, self._float8.device, forward):
            try:
                loss = forward()
                gradients = self._ranks.gradients(loss)
            except RuntimeError as error:
                failure = first_line(error)
            # One that failed would not take part in what follows.
            if not self._ranks.all_agree(failure is None):
                raise _StoppedError(failure or "another rank could not run a step in both formats")
            return loss.detach(), self._ranks.norm(gradients)

    def _joined(self, values: dict[str, Tensor | float]) -> dict[str, Tensor | float]:
        """Return what the ranks have found together; each may have called other layers."""
        keys = [f"{operand}/{name}" for name in self._float8.modules() for operand in _OPERANDS]
        losses = [torch.as_tensor(values[name]).float() for name in ("loss", "plain_loss")]
        none = losses[0].new_zeros(())
        names = [f"{figure}/{key}" for figure in ("lost", "present") for key in keys]
        counts = [torch.as_tensor(values.get(name, none)) for name in names]
        means = self._ranks.mean(torch.stack([*losses, *counts]))
        amax = [torch.as_tensor(values.get(f"amax/{key}", none - 1)) for key in keys]
        # A largest value that is no number would not win.
        stacked = torch.stack(amax).nan_to_num(nan=math.inf, posinf=math.inf)
        largest = self._ranks.largest(stacked)
        joined: dict[str, Tensor | float] = {"loss": means[0], "plain_loss": means[1]}
        joined |= {name: values[name] for name in ("norm", "plain_norm")}
        joined |= {f"amax/{key}": value for key, value in zip(keys, largest, strict=True)}
        return joined | dict(zip(names, means[2:], strict=True))

    def _hooks(self, name: str, module: nn.Module, into: dict[str, Tensor]) -> list[Any]:
        recipe = self._float8.recipes[name]
        by_row = recipe in _BY_ROW

        def note(operand: str, tensor: Tensor, dtype: torch.dtype) -> None:
            if f"{_FIGURES[0]}/{operand}/{name}" in into:
                return  # seen before: in another call, or in the pass in float8
            if not tensor.numel():
                return  # an expert without tokens
            for figure, value in zip(_FIGURES, figures(tensor, dtype, by_row=by_row), strict=True):
                into[f"{figure}/{operand}/{name}"] = value

        def before(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            given = layer_input(args, named)
            if given is not None and self._float8.leaves_in_fp32(given):
                self._called.add(name)
                return
            if given is not None:
                note("input", given, _E4M3)
            weight = module.weight
            assert isinstance(weight, Tensor)
            # Gathered in float8 it has lost already what there was to lose: see it in bf16.
            if not hasattr(weight, "to_original_precision"):
                note("weight", weight, _E4M3)

        def after(_: nn.Module, __: tuple[Any, ...], out: Tensor) -> None:
            if out.requires_grad and not self._float8.leaves_in_fp32(out):
                out.register_hook(lambda g: note("gradient", g, _GRADIENTS[recipe]))

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        ]

    # --- what is made of it -----------------------------------------------------------------

    def _judge(self) -> None:
        step, reading = self._pending.pop(0)
        values = reading.read()
        layers = []
        for key, amax in values.items():
            figure, _, rest = key.partition("/")
            if figure != "amax" or amax < 0:  # which no rank has seen
                continue
            operand, _, name = rest.partition("/")
            dtype = _GRADIENTS[self._recipe_of(name)] if operand == "gradient" else _E4M3
            scale = torch.finfo(dtype).max / amax if amax > 0 else math.inf
            present = values[f"present/{rest}"]
            lost = values[f"lost/{rest}"] / present if present else 0.0
            numbers = LayerNumbers(layer=name, operand=operand, amax=amax, scale=scale, lost=lost)
            layers.append(numbers)
            self._called.add(name)
        drift = Drift(
            step=step,
            loss=values["loss"],
            plain_loss=values["plain_loss"],
            norm=values["norm"],
            plain_norm=values["plain_norm"],
            layers=tuple(layers),
        )
        self._history.add(drift)
        if self._ranks.is_first:
            self._warn(drift)

    def _recipe_of(self, name: str) -> str:
        return self._float8.recipes.get(name, "tensorwise")  # closed meanwhile

    def _warn(self, drift: Drift) -> None:
        for what, found, limit, plain in (
            ("loss", drift.loss_drift, self._options.loss_drift, drift.plain_loss),
            ("gradient norm", drift.norm_drift, self._options.norm_drift, drift.plain_norm),
        ):
            if not math.isfinite(plain):
                continue  # no format is the cause, and what is told once is left for what is
            # A loss near zero, as one of a game or a difference, differs by much of itself anyway.
            is_far = not abs(found) <= limit and not abs(drift.norm_drift) <= limit
            if is_far and what not in self._warned:
                self._warned.add(what)
                logger.warning(
                    "before update %d the %s in float8 is %+.2g %% from that in bf16; leave out "
                    "layers with Float8Options(keep=...), or take recipe='rowwise'",
                    drift.step,
                    what,
                    100 * found,
                )
        worst = drift.problems[0] if drift.problems else None
        # Another layer, later in the run, is told too.
        if worst is not None and f"layer {worst.layer}" not in self._warned:
            self._warned.add(f"layer {worst.layer}")
            more = f", and {len(drift.problems) - 1} operands more" if drift.problems[1:] else ""
            logger.warning(
                "before update %d layer %r does not fit float8: %s%s; leave it out with "
                "Float8Options(keep=(%r,)), or take recipe='rowwise'",
                drift.step,
                worst.layer,
                worst.problem,
                more,
                worst.layer,
            )


class _StoppedError(Exception):
    """A comparison that this rank or another could not make."""
