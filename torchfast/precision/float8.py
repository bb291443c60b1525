"""float8 training: the matrix products of linear layers in 8 bits, in place and taken back.

A float8 number has 2 or 3 bits of mantissa, and units that multiply it do twice the products a
second of bf16. torchao's converted layers scale each operand to the format's range by its largest
value, multiply, and give bf16 back; the three products of a layer (output, gradient of the input,
gradient of the weight) are all done so. Weights, gradients and optimizer state stay as they are.

When it helps: large layers (thousands of features) with many rows, compiled, so that scaling and
casting are fused with what comes before. When it does not: small layers, whose casts take longer
than the product saves; a step that is not compiled; a step that waits for something else.

The model object, its layers, their parameters and keys stay: what is trained so loads without
torchao, and an optimizer that was built before still holds the right parameters. Copies of the
model and pickles of it have plain layers. Forbidden is a model that is itself one linear layer,
since a layer changes its class.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from torchfast._core.closing import Closing, close_with
from torchfast._core.decisions import Decision
from torchfast._core.errors import PlanError, UnsupportedDeviceError
from torchfast.precision.float8_choice import Float8Receipt, choose_recipes, noting_uses, uses_of
from torchfast.precision.float8_conversion import Float8Conversion
from torchfast.precision.float8_forms import Form, leave_with
from torchfast.precision.float8_forward import is_outside_autocast
from torchfast.precision.float8_layers import (
    Layer,
    check_held,
    check_no_layer,
    obstacle_of,
    shown,
    survey,
)
from torchfast.precision.float8_options import RECIPES, Float8Options

if TYPE_CHECKING:
    from torchfast.precision.float8_gather import Float8Gather

logger = logging.getLogger(__name__)

_REMEDY = "begin with a batch that reaches it, or name a recipe to have it unmeasured"
_UNMEASURED = f"so its recipe was not measured: {_REMEDY}"
_LOADED = "in the run whose state was loaded"
_IN_FP32 = "in fp32, since what calls it has turned autocast off"
_FEW = 2  # so many times the rows that were measured are another shape


@final
class Float8Linears(Closing):
    """The linear layers of a model, in float8 from `apply` to `close`, or within ``with``.

    Args:
        model: Changed in place: layers change their class from ``nn.Linear`` to one of torchao's.
            All objects stay, with their parameters, hooks and keys.
        options: Which layers and how; by default each as measured (see `decide`).
        device: Where the model trains; None means where its parameters are.
        is_sharded: Whether ``fully_shard`` has sharded the model or will.
        until_dropped: Let the layers be plain again when this object is dropped without `close`,
            too, for one whose owner nobody may remember to close. Otherwise they stay.
        under_autocast: Whether the model trains under autocast. Then a layer that is called in fp32
            where autocast was turned off is left so, unless weights are gathered in float8.

    Raises:
        PlanError: A model that is a linear layer itself; or ``all_gather`` without shards.
        UnsupportedDeviceError: A device without float8 products, and ``emulate`` is off.
        ImportError: torchao is missing, too old or too new.

    Numerics: Close to bf16. With every layer left out, none.
    Synchronizes: Never, but in `decide`.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> options = Float8Options(recipe="tensorwise", smallest=16, emulate=True)
        >>> with Float8Linears(model, options) as float8:
        ...     print(float8.recipes)
        {'0': 'tensorwise'}
        >>> type(model[0]) is nn.Linear
        True
    """

    def __init__(
        self,
        model: nn.Module,
        options: Float8Options | None = None,
        device: torch.device | None = None,
        *,
        is_sharded: bool = False,
        until_dropped: bool = False,
        under_autocast: bool = False,
    ) -> None:
        self.options = Float8Options() if options is None else options
        self.device = next(model.parameters()).device if device is None else device
        self._model = model
        self._layers: list[Layer] = []
        self._forms: dict[str, Form] = {}  # by the layer's name
        self._others: dict[str, Form] = {}  # while it is found out whether they pay
        self._is_in, self._is_sharded = False, is_sharded
        self._until_dropped = until_dropped
        self._under_autocast = under_autocast and not self.options.all_gather
        self._gather: Float8Gather | None = None
        self.recipes: dict[str, str] = {}  # of the layers in float8, by name
        self.receipt: Float8Receipt | None = None  # what `decide` measured
        self._is_taken_over = False  # from another run, so that nothing is measured
        # By layer: those of `decide`; of what is in bf16, when there were far more, and how many.
        self._measured_rows: dict[str, int] = {}
        self._later_rows: dict[str, tuple[int, int]] = {}
        check_no_layer(model)
        if self.options.all_gather and not is_sharded:
            raise PlanError(
                "all_gather=True gathers shards in float8, and this model is not to be sharded; "
                "take Plan(shard='fsdp') or 'hsdp', say is_sharded=True if you shard it, or leave "
                "it out"
            )
        self._conversion = Float8Conversion(self.device, emulate=self.options.emulate)
        if self.options.recipe != "auto":
            self._conversion.probe(self.options.recipe)

    def apply(self) -> None:
        """Convert the layers; where recipes are measured, `decide` does.

        Raises:
            PlanError: A model that is in float8 already, or that has no layer which could be; a
                name in the options that fits no layer.
        """
        model = self._model
        self.receipt, self._is_taken_over = None, False  # of a time before
        self._measured_rows, self._later_rows = {}, {}
        self._layers = survey(model, self.options)
        possible = [layer for layer in self._layers if layer.reason is None]
        if not possible:
            raise PlanError(
                f"no linear layer of this {type(model).__name__} can be in float8: "
                f"{self._left_out() or 'it has none'}; use precision='bf16'"
            )
        if self.options.recipe != "auto":
            self._convert({layer.name: self.options.recipe for layer in possible})

    @property
    def is_undecided(self) -> bool:
        """Whether `decide` is still to choose the recipes; until then everything is in bf16."""
        is_known = self.receipt is not None or self._is_taken_over
        return self.options.recipe == "auto" and not is_known

    def decide(
        self,
        forward: Callable[[], object],
        *,
        compiled: bool = True,
        timer: Callable[..., Any] | None = None,
        agree: Callable[[dict[str, str]], dict[str, str]] = dict,
    ) -> None:
        """Choose each layer's recipe by measurement, bf16 among them, and convert.

        Each recipe is timed against bf16 on every shape that the model has, forward and backward,
        in turns. A layer takes float8 only where that is faster beyond the noise, so the step does
        not get slower by it.

        Args:
            forward: Runs the loss on the first batch, to see how many rows each layer gets.
            compiled: Whether the layers will be compiled; then the candidates are too.
            timer: What times them, by default on the device.
            agree: Takes the recipes that this process would choose, by layer, and returns those
                that all ranks take.

        Raises:
            PlanError: There is nothing to decide: before `apply`, a second time, or where the
                options name a recipe.

        Synchronizes: Yes.
        """
        self._check_decidable()
        possible = self._look_again()
        # Shards stay gathered behind a forward whose backward never comes.
        with torch.no_grad() if self._is_sharded else nullcontext():
            uses = uses_of(possible, forward, self._model, self.device)
        layers = []
        for layer in self._layers:
            reason = layer.reason
            if reason is None and layer.name not in uses:
                reason = f"nothing called it in the first forward, {_UNMEASURED}"
            elif reason is None and uses[layer.name].rows == 0:
                reason = f"it got no rows in the first forward, {_UNMEASURED}"
            elif reason is None and uses[layer.name].is_in_fp32 and self._under_autocast:
                reason = _IN_FP32
            layers.append(dataclasses.replace(layer, reason=reason))
        self._layers = layers
        self._measured_rows = {
            layer.name: uses[layer.name].rows if layer.name in uses else 0 for layer in possible
        }
        possible = [layer for layer in layers if layer.reason is None]
        self.receipt = choose_recipes(
            {layer.name: (uses[layer.name], layer.module) for layer in possible},
            self._conversion.by,
            self.device,
            budget_s=self.options.budget_s,
            compiled=compiled,
            timer=timer,
        )
        chosen = agree(self.receipt.recipes)
        self._layers = [
            dataclasses.replace(layer, reason=self.receipt.why_not(layer.name))
            if layer.reason is None and layer.name not in chosen
            else layer
            for layer in layers
        ]
        self._convert(chosen)

    def take_over(self, recipes: Mapping[str, str]) -> bool:
        """Convert by the recipes that another run has measured; return whether that was done.

        It is not where recipes are decided already, or where this device does not take them.

        Args:
            recipes: By the layer's name; all others stay in bf16.
        """
        names = set(recipes.values())
        if not self.is_undecided or not names <= set(RECIPES):
            return False
        try:
            for name in sorted(names):
                self._conversion.probe(name)
        except UnsupportedDeviceError:
            return False
        self._is_taken_over = True
        self._look_again()
        self._layers = [
            dataclasses.replace(layer, reason=f"it was so {_LOADED}")
            if layer.reason is None and layer.name not in recipes
            else layer
            for layer in self._layers
        ]
        self._convert({each.name: recipes[each.name] for each in self._layers if not each.reason})
        return True

    def give_up(self, reason: str) -> None:
        """Put all layers back into bf16, for a reason that the report gives."""
        self._leave()
        self._layers = [
            dataclasses.replace(layer, reason=reason) if layer.name in self.recipes else layer
            for layer in self._layers
        ]
        self._forms, self._others, self.recipes = {}, {}, {}

    @contextmanager
    def left(self) -> Iterator[None]:
        """Let the model be in bf16 for the length of a block."""
        was_in = self._is_in
        self._leave()
        try:
            with nullcontext() if self._gather is None else self._gather.left():
                yield
        finally:
            if was_in:
                self._enter()

    @property
    def others(self) -> dict[str, str]:
        """The layers that were measured and are in bf16, each with its best recipe."""
        found = {} if self.receipt is None else self.receipt.others
        return {name: recipe for name, recipe in found.items() if name not in self.recipes}

    @contextmanager
    def widened(self) -> Iterator[None]:
        """Let the others be in float8, too, for the length of a block."""
        if not self._others:
            self._others = self._made(self.others)
        for form in self._others.values():
            form.enter()
        try:
            yield
        finally:
            for form in self._others.values():
                form.leave()

    def widen(self) -> None:
        """Have the others in float8 from now on: in their step they are faster so."""
        others = self.others
        self._layers = [
            dataclasses.replace(layer, reason=None) if layer.name in others else layer
            for layer in self._layers
        ]
        self._convert(others)

    @contextmanager
    def seeing_rows(self, step: int) -> Iterator[None]:
        """Note, for the report, what layers get in the body that were measured with less, or never.

        Args:
            step: The number of the update before which the body runs.
        """
        waiting = [
            layer
            for layer in self._layers
            if layer.name in self._measured_rows and layer.name not in self.recipes
        ]
        with noting_uses(waiting) as uses:
            yield
        for name, use in uses.items():
            if use.rows > _FEW * self._measured_rows[name]:
                self._later_rows.setdefault(name, (step, use.rows))

    def gather(self) -> Float8Gather | None:
        """Gather weights in float8 from now on, if the options say so. The model is sharded."""
        if self.options.all_gather and self._gather is None:
            from torchfast.precision.float8_gather import Float8Gather  # takes long to import

            self._gather = Float8Gather(self._model, self.modules())
            if self._until_dropped:
                close_with(self, self._gather)
        return self._gather

    @override
    def __enter__(self) -> Self:
        self.apply()
        return self

    @override
    def close(self) -> None:
        """Let the layers be plain again, with all that they have by now."""
        if self._gather is not None:
            self._gather.close()
            self._gather = None
        self._leave()
        self._forms, self._others, self.recipes = {}, {}, {}

    def leaves_in_fp32(self, tensor: Tensor) -> bool:
        """Whether a layer that gets or gives this tensor now does not compute in float8."""
        return self._under_autocast and is_outside_autocast(tensor)

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the layers in float8, by name."""
        return {name: form.module for name, form in self._forms.items()}

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise if an optimizer holds a tensor in place of a weight of a converted layer.

        Raises:
            PlanError: It was built on another model, or on this one before its weights were
                replaced.
        """
        check_held(optimizer, self._model, self._layers)

    def decision(self) -> Decision:
        """Say which layers are in float8, in which recipe, and why the others are not."""
        if self.is_undecided:
            detail = "all in bf16 until decide() measures recipes, as a trainer's first step does"
            return Decision(lever="float8", outcome="left alone", detail=detail)
        why = self._left_out()
        rest = f"; in bf16: {why}" if why else ""
        if not self.recipes:
            return Decision(lever="float8", outcome="left alone", detail=f"no layer{rest}")
        counts = Counter(self.recipes.values())
        kinds = ", ".join(f"{count} {recipe}" for recipe, count in counts.items())
        emulated = ", emulated" if self.options.emulate else ""
        detail = f"{len(self.recipes)} of {len(self._layers)} linear layers ({kinds}{emulated})"
        if self._is_taken_over:
            detail += f", as {_LOADED}"
        if self._gather is not None:
            detail += f", the weights of {self._gather.num_layers} gathered in float8"
        in_fp32 = [repr(name) for name, form in self._forms.items() if form.was_in_fp32]
        if in_fp32:
            detail += f"; of these {shown(in_fp32)} ({_IN_FP32})"
        return Decision(lever="float8", outcome="applied", detail=f"{detail}{rest}")

    def __repr__(self) -> str:
        return f"Float8Linears({type(self._model).__name__}, {self.recipes or 'undecided'})"

    def _check_decidable(self) -> None:
        if not self._layers:
            why = "nothing is known of the layers; call apply() before"
        elif self.options.recipe != "auto":
            why = f"the options name recipe={self.options.recipe!r}, which is not measured"
        elif not self.is_undecided:
            why = "the recipes are chosen already; close() and apply() to measure anew"
        else:
            return
        raise PlanError(f"decide() has nothing to decide: {why}")

    # --- conversion -------------------------------------------------------------------------

    def _convert(self, recipes: Mapping[str, str]) -> None:
        made = {name: self._others[name] for name in recipes if name in self._others}
        made |= self._made({n: recipe for n, recipe in recipes.items() if n not in made})
        self._others = {}
        self._forms |= made
        self.recipes |= {name: recipes[name] for name in made}
        if self._until_dropped:
            leave_with(self, made.values())
        self._enter()

    def _made(self, recipes: Mapping[str, str]) -> dict[str, Form]:
        """Return what lets layers be in float8, by name."""
        return {
            layer.name: Form(
                layer.name,
                layer.module,
                self._conversion.by(recipes[layer.name])(layer.module),
                under_autocast=self._under_autocast,
            )
            for layer in self._layers
            if layer.name in recipes
        }

    def _look_again(self) -> list[Layer]:
        """Return the layers that can be in float8 with what they have got since `apply`."""
        if not self._is_sharded:  # shards are of a class of their own
            self._layers = [
                dataclasses.replace(layer, reason=layer.reason or obstacle_of(layer.module))
                for layer in self._layers
            ]
        return [layer for layer in self._layers if layer.reason is None]

    def _enter(self) -> None:
        for form in self._forms.values():
            form.enter()
        self._is_in = True

    def _leave(self) -> None:
        if self._is_in:
            for form in self._forms.values():
                form.leave()
        self._is_in = False

    def _left_out(self) -> str:
        """Return the reasons why layers stay in bf16, each with its layers."""
        by_reason: dict[str, list[str]] = {}
        for layer in self._layers:
            reason = layer.reason
            if reason is None:
                continue
            if layer.name in self._later_rows:
                step, rows = self._later_rows[layer.name]
                reason += f"; before update {step} it got {rows} rows, of which nothing is known"
                reason += "" if _UNMEASURED in reason else f": {_REMEDY}"
            by_reason.setdefault(reason, []).append(repr(layer.name))
        return "; ".join(f"{shown(names)} ({reason})" for reason, names in by_reason.items())
