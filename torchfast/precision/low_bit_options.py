"""What a user can say about an AdamW whose moments, or whose weights, take fewer bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch import Tensor

from torchfast._core.arguments import check_choice, check_flag, explain_init_keywords
from torchfast._core.errors import PlanError
from torchfast._core.option_fields import call_of, changed_fields

State = Literal["8bit", "4bit", "fp8", "full"]
# As a plan writes those that say no more than how many bits.
WORDS: Final[dict[str, State]] = {"adamw8bit": "8bit", "adamw4bit": "4bit", "adamwfp8": "fp8"}
# Forms of AdamW that are not to be had in low bits.
VARIANTS: Final = ("amsgrad", "maximize")
_STATES = (*WORDS.values(), "full")


@explain_init_keywords
@dataclass(frozen=True, kw_only=True)
class LowBitOptions:
    """An AdamW with moments in fewer bits, and how it rounds weights that are bf16 themselves.

    Args:
        state: ``"8bit"``, ``"4bit"``, ``"fp8"``, or ``"full"``: fp32 moments.
        stochastic_rounding: Round bf16 weights up or down by chance, so that updates smaller than
            half of their last digit add up. Not for replicas: each would round for itself.
        compiled: Compile the update of each shape; None means on CUDA devices.

    Raises:
        PlanError: A state that does not exist.

    Example:
        >>> LowBitOptions(state="full", stochastic_rounding=True)
        LowBitOptions(state='full', stochastic_rounding=True)
    """

    state: State = "8bit"
    stochastic_rounding: bool = False
    compiled: bool | None = None

    def __post_init__(self) -> None:
        check_choice("state", self.state, _STATES, PlanError)
        check_flag("stochastic_rounding", self.stochastic_rounding)
        if self.compiled is not None:
            check_flag("compiled", self.compiled)

    @classmethod
    def of(cls, value: object) -> LowBitOptions | None:
        """Return options from a word of a plan or from options; None for another optimizer."""
        if isinstance(value, cls):
            return value
        return cls(state=WORDS[value]) if isinstance(value, str) and value in WORDS else None

    @property
    def word(self) -> str | None:
        """The word that says the same, or None."""
        return next((w for w, bits in WORDS.items() if LowBitOptions(state=bits) == self), None)

    @property
    def changed(self) -> dict[str, Any]:
        """What is not as by default, as JSON takes it."""
        return changed_fields(self)

    def __repr__(self) -> str:
        """Return the call that makes these options, defaults left out."""
        return call_of(self, changed_fields(self))


def check_numbers(group: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError if this AdamW cannot compute with the numbers of a group.

    Synchronizes: Never; a learning rate that lies on a device is not looked at.
    """
    for name in VARIANTS:
        if group.get(name):
            raise ValueError(
                f"LowBitAdamW does not do {name}=True, which a group asks for; leave it out, or "
                "take torch.optim.AdamW"
            )
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        is_there = not isinstance(value, Tensor) or value.device.type == "cpu"
        if is_there and not value >= 0.0:
            raise ValueError(f"{name} must be >= 0, got {value}")
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas must be two numbers, as (0.9, 0.999), got {betas!r}")
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas must be at least 0 and below 1, got {betas}")
