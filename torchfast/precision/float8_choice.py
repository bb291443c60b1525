"""Which recipe each layer takes: timed on the shapes that the model has, bf16 among them.

Whether float8 pays depends on the shape: the product becomes faster with its volume, the casts
before it take time with its surface. So each distinct shape (rows, inputs, outputs) is timed by
itself, forward and backward, compiled if the step is, in turns with bf16 (see `_core/measure`).
What is not faster beyond the noise stays bf16.

Where a graph will hold the step, launches do not count (see `_core/device_stopwatch`).

What it does not see: casts that the compiler fuses with the layer before, so it is hard on float8.
Whether the step is faster with what was chosen, or with all layers, is asked of the step itself
(see `float8_step`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from torchfast._core.device_stopwatch import DeviceStopwatch
from torchfast._core.measure import Measurement, first_line, measure
from torchfast.precision.float8_forward import is_outside_autocast
from torchfast.precision.float8_layers import Layer, layer_input
from torchfast.precision.float8_options import RECIPES
from torchfast.precision.float8_trial import without_trace

PLAIN: Final = "bf16"
Work = Callable[[], object]
Timer = Callable[[Mapping[str, Work], torch.device, float], Measurement]
Converter = Callable[[str], Callable[[nn.Module], nn.Module]]
# A part less than which a recipe need not be faster: what a step of many layers may not lose.
_SMALLEST: Final = 0.02


class Use(NamedTuple):
    """How a layer was called."""

    rows: int
    dtype: torch.dtype  # of its weight, which shards may be gathered in
    is_in_fp32: bool = True  # in each call, autocast being off


class Shape(NamedTuple):
    """What the time of a layer depends on."""

    rows: int
    inputs: int
    outputs: int
    has_bias: bool
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.inputs} to {self.outputs}"


@final
@dataclass(frozen=True, kw_only=True)
class ShapeChoice:
    """What was measured of one shape.

    Attributes:
        shape: In words.
        layers: The layers that have it.
        recipe: What is fastest; ``"bf16"`` where no recipe is faster beyond the noise.
        times_ms: Of forward and backward, by recipe; the median.
        ratios: Of each recipe to bf16: median, and the bounds of its interval at 99 %.
        refused: What torch said to a recipe that does not run here.
    """

    shape: str
    layers: tuple[str, ...]
    recipe: str
    times_ms: Mapping[str, float] = field(default_factory=dict)
    ratios: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> str | None:
        """The recipe that took least, if any ran."""
        return min(self.ratios, key=lambda recipe: self.ratios[recipe][0]) if self.ratios else None

    def __str__(self) -> str:
        times = ", ".join(f"{name} {ms:.4g} ms" for name, ms in self.times_ms.items())
        refused = "".join(f"; {name} refused: {why}" for name, why in self.refused.items())
        count = "1 layer" if len(self.layers) == 1 else f"{len(self.layers)} layers"
        return f"{self.shape}, {count}: {self.recipe} ({times}{refused})"


@final
@dataclass(frozen=True, kw_only=True)
class Float8Receipt:
    """The record of a choice of recipes: ``str`` for a person, `to_dict` for a file.

    Attributes:
        device: What it was measured on.
        compiled: Whether the candidates were.
        choices: What was measured, shape by shape.
    """

    device: str
    compiled: bool
    choices: tuple[ShapeChoice, ...]

    @property
    def recipes(self) -> dict[str, str]:
        """The recipe of each layer that is to be in float8."""
        return {
            name: choice.recipe
            for choice in self.choices
            if choice.recipe != PLAIN
            for name in choice.layers
        }

    @property
    def others(self) -> dict[str, str]:
        """The best recipe of each layer that is to stay in bf16, where one ran."""
        return {
            name: choice.best
            for choice in self.choices
            if choice.recipe == PLAIN and choice.best is not None
            for name in choice.layers
        }

    def why_not(self, name: str) -> str:
        """Return why a layer stays in bf16."""
        choice = next(choice for choice in self.choices if name in choice.layers)
        if choice.best is None:
            return f"no recipe runs here: {'; '.join(choice.refused.values())}"
        _, low, high = choice.ratios[choice.best]
        part = f"{low:.2f} to {high:.2f}"
        return f"not surely faster: {choice.best} took {part} of the time of bf16 at {choice.shape}"

    def to_dict(self) -> dict[str, Any]:
        """Return the receipt as JSON-ready builtins."""
        return {
            "device": self.device,
            "compiled": self.compiled,
            "torch": torch.__version__,
            "choices": [asdict(choice) for choice in self.choices],
        }

    def __str__(self) -> str:
        kind = "compiled" if self.compiled else "not compiled"
        lines = [f"float8 recipes measured on {self.device}, {kind}"]
        return "\n".join([*lines, *(f"  {choice}" for choice in self.choices)])


def uses_of(
    layers: Iterable[Layer], forward: Work, model: nn.Module, device: torch.device
) -> dict[str, Use]:
    """Return how each layer is called in one forward; those not called are not there."""
    with noting_uses(layers) as uses, without_trace(model, device, forward):
        forward()
    return uses


@contextmanager
def noting_uses(layers: Iterable[Layer]) -> Iterator[dict[str, Use]]:
    """Note how each layer is called in the body; those not called are not there."""
    uses: dict[str, Use] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(layer: nn.Linear, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            given = layer_input(args, named)
            if given is not None:
                rows = math.prod(given.shape[:-1])
                known = uses.get(name, Use(0, layer.weight.dtype))  # one may be called often
                in_fp32 = known.is_in_fp32 and is_outside_autocast(given)
                uses[name] = known._replace(rows=max(rows, known.rows), is_in_fp32=in_fp32)

        return hook

    hooks = [
        layer.module.register_forward_pre_hook(note(layer.name), with_kwargs=True)
        for layer in layers
    ]
    try:
        yield uses
    finally:
        for hook in hooks:
            hook.remove()


def choose_recipes(
    layers: Mapping[str, tuple[Use, nn.Linear]],
    converter: Converter,
    device: torch.device,
    *,
    budget_s: float,
    compiled: bool,
    timer: Timer | None = None,
) -> Float8Receipt:
    """Time every recipe on every shape, and take what is fastest.

    Args:
        layers: How each is called, and the layer, by name.
        converter: Makes what converts a layer by a recipe.
        device: Where.
        budget_s: Most seconds a shape, compilation aside.
        compiled: Whether the candidates are compiled.
        timer: What times them.

    Synchronizes: Yes.
    """
    named: dict[Shape, list[str]] = {}
    for name, (use, module) in layers.items():
        sizes = module.in_features, module.out_features
        shape = Shape(use.rows, *sizes, module.bias is not None, use.dtype)
        named.setdefault(shape, []).append(name)
    clock = _on_device if timer is None else timer
    choices = [
        _choice(shape, tuple(names), converter, device, budget_s, compiled, clock)
        for shape, names in named.items()
    ]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Float8Receipt(device=name, compiled=compiled, choices=tuple(choices))


def _choice(
    shape: Shape,
    layers: tuple[str, ...],
    converter: Converter,
    device: torch.device,
    budget_s: float,
    compiled: bool,
    timer: Timer,
) -> ShapeChoice:
    works: dict[str, Work] = {}
    refused: dict[str, str] = {}
    for recipe in (PLAIN, *RECIPES):
        layer: nn.Module = _layer(shape, device)
        try:
            if recipe != PLAIN:
                layer = converter(recipe)(layer)
            work = _work(layer, shape, device, compiled)
            with _no_recompile_limit() if compiled else nullcontext():
                for _ in range(2):  # compiles, forward and backward
                    work()
        except Exception as error:
            if recipe == PLAIN:
                raise
            refused[recipe] = first_line(error)
            continue
        works[recipe] = work
    if len(works) == 1:
        return ShapeChoice(shape=str(shape), layers=layers, recipe=PLAIN, refused=refused)
    found = timer(works, device, budget_s)
    ratios = {name: found.ratio(name) for name in works if name != PLAIN}
    faster = {n: r.ratio for n, r in ratios.items() if r.verdict == "faster"}
    timings = {name: found.timing(name) for name in works}
    return ShapeChoice(
        shape=str(shape),
        layers=layers,
        recipe=min(faster, key=lambda n: faster[n]) if faster else PLAIN,
        times_ms={name: timing.median_ms for name, timing in timings.items() if timing},
        ratios={n: (r.ratio, r.low, r.high) for n, r in ratios.items() if r.num_rounds},
        refused={**refused, **found.failed},
    )


def _layer(shape: Shape, device: torch.device) -> nn.Linear:
    # Not initialised by torch, which would draw from the generators of the run.
    layer: nn.Linear = nn.utils.skip_init(
        nn.Linear, shape.inputs, shape.outputs, shape.has_bias, device=device, dtype=shape.dtype
    )
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.02, generator=generator)
    return layer


def _work(layer: nn.Module, shape: Shape, device: torch.device, compiled: bool) -> Work:
    """Return one forward and backward of a layer as it is done in a step."""
    generator = torch.Generator(device).manual_seed(1)

    def drawn(features: int) -> Tensor:
        return torch.randn(
            shape.rows, features, generator=generator, device=device, dtype=torch.bfloat16
        )

    inputs, gradient = drawn(shape.inputs).requires_grad_(), drawn(shape.outputs)
    call: Callable[[Tensor], Tensor] = layer
    if compiled:
        call = torch.compile(layer, dynamic=False)
    written = [inputs, *layer.parameters()]

    def work() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            out = call(inputs)
        out.backward(gradient.to(out.dtype))
        for tensor in written:
            tensor.grad = None

    return work


def _no_recompile_limit() -> Any:
    """Let one function be compiled for every shape: dynamo counts those of all layers together."""
    from torch._dynamo.utils import disable_cache_limit

    return disable_cache_limit()


def _on_device(
    works: Mapping[str, Work],
    device: torch.device,
    budget_s: float,
    stopwatch: DeviceStopwatch | None = None,
) -> Measurement:
    return measure(
        works,
        reference=PLAIN,
        device=device,
        budget_s=budget_s,
        smallest=_SMALLEST,
        stopwatch=stopwatch,
    )


def of_graphs(works: Mapping[str, Work], device: torch.device, budget_s: float) -> Measurement:
    """Time ways to compute a layer as a graph replays them."""
    return _on_device(works, device, budget_s, DeviceStopwatch(device))
