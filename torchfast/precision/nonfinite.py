"""What a step does about a loss or a gradient that is not finite.

A plain loop applies it, and the model is lost: NaN in the parameters never goes away. Asking
``loss.isfinite()`` on the host would find it, and make the host wait at every step. Here a flag is
computed on the device and the update called off by it (see `SkippableUpdate`), so the host never
knows and never waits. The same goes for fp16, whose scale is sometimes too high.

An update that is skipped is not enough. The forward has written too: a batch of NaN leaves
BatchNorm's running statistics NaN. So the buffers are copied before the first forward of a step and
put back by the same flag.

When it helps: rare bad batches, in long runs that nobody watches. When it does not: a run that
diverges gives one bad batch after the other; ``stop_after`` ends that. What it costs: one pass over
the gradients, two copies of the buffers, and what `SkippableUpdate` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfast._core.arguments import check_choice, check_int, explain_init_keywords
from torchfast._core.beside import modules_beside
from torchfast._core.building import optimized
from torchfast._core.decisions import Decision
from torchfast._core.errors import NonFiniteError, PlanError
from torchfast._core.local import local
from torchfast._core.storages import is_expanded
from torchfast.precision.scaler import LossScaler
from torchfast.precision.skip_counts import SkipCounts
from torchfast.precision.skipping import SkippableUpdate, Snapshot, any_flag

Action = Literal["propagate", "skip"]

# What GradScaler's kernel takes on every device. On CUDA it has no bf16, and where it goes through
# a strided tensor by itself it rounds float64.
_SCALED_DTYPES = (torch.float32, torch.float16)


@explain_init_keywords
@dataclass(frozen=True, kw_only=True)
class NonfiniteOptions:
    """What to do about a loss or a gradient that is NaN or infinite.

    Args:
        action: ``"skip"``: no parameter, no optimizer state and no buffer changes in that step.
            ``"propagate"``: what a plain loop does.
        stop_after: Skipped updates in a row after which ``fit`` stops and
            ``trainer.check_skips()`` raises; None means never. Under fp16 the updates that a
            scale too high skips count too, and a first scale of 65536 may need a dozen.

    Raises:
        PlanError: Unknown action, or ``stop_after`` without skipping.

    Example:
        >>> NonfiniteOptions(stop_after=20)
        NonfiniteOptions(action='skip', stop_after=20)
    """

    action: Action = "skip"
    stop_after: int | None = None

    ACTIONS: ClassVar[tuple[str, ...]] = ("propagate", "skip")

    def __post_init__(self) -> None:
        check_choice("nonfinite", self.action, self.ACTIONS, PlanError)
        if self.stop_after is None:
            return
        check_int("stop_after", self.stop_after, minimum=1)
        if self.action != "skip":
            raise PlanError(
                f"stop_after={self.stop_after} counts skipped updates, but "
                f"nonfinite={self.action!r} skips none; drop it, or use 'skip'"
            )

    @classmethod
    def of(cls, value: object) -> NonfiniteOptions:
        """Return options from the scalar form ``"skip"`` or from options."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(action=cast(Action, value))
        raise TypeError(
            f"nonfinite must be one of {list(cls.ACTIONS)} or NonfiniteOptions, "
            f"got {value!r} ({type(value).__name__})"
        )

    def __repr__(self) -> str:
        """Return the call that makes these options, defaults left out."""
        stop = "" if self.stop_after is None else f", stop_after={self.stop_after}"
        return f"NonfiniteOptions(action={self.action!r}{stop})"


@final
class UpdateGuard:
    """Runs a step's update, and under fp16 or ``"skip"`` only if it would do no harm.

    A step calls `begin`, for each micro-batch `scale`, then `end_backward`, `judge` and `update`.
    A non-finite **loss** is noted by `end_backward` and holds until the next `begin`. **Gradients**
    are judged by `judge` as they are then, so those that were repaired in between pass, and those
    that were spoilt do not. (fp16's own judgement is made when its gradients are unscaled, as
    GradScaler makes it.) Judged are the optimizer's parameters. A norm that is NaN counts too, for
    it makes every gradient that it clips NaN, and other parameters of the model may be the cause.

    Put back are all buffers of the model, and of modules in training mode that the loss function
    uses beside it, of any dtype, also those that are not saved: those
    written in place by a select on the device; those that the forward replaced by another tensor
    of the same form likewise. Where the form changed too (a cache that grows), the flag is read on
    the host in that step. Not put back: sparse buffers, buffers registered during the step, and
    whatever is not a buffer.

    Args:
        model: Whose buffers are put back.
        loss_fn: And those of the modules that it uses beside the model.
        optimizer: Whose update it is.
        device: Where the loss is.
        options: What to do.
        scaler: fp16's, or None.
        any_rank: Brings a flag to 1.0 on all ranks where it is on any, so that all do alike.

    Numerics: Where all is finite, bitwise the same step without it.
    Synchronizes: As `SkippableUpdate`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        optimizer: Optimizer,
        device: torch.device,
        options: NonfiniteOptions,
        *,
        scaler: LossScaler | None,
        any_rank: Callable[[Tensor], Tensor] = Tensor.detach,
    ) -> None:
        self.options = options
        self.is_on = options.action == "skip"
        self.counts = SkipCounts(device)
        self.scaler = scaler
        self._model, self._loss_fn = model, loss_fn
        self._optimizer = optimizer
        self._device = device
        self._any_rank = any_rank
        self._update = SkippableUpdate(optimizer)
        self._ones: dict[torch.device, Tensor] = {}
        self._bad_loss: Tensor | None = None
        self._flag: Tensor | None = None
        self._buffers: _Buffers | None = None

    @property
    def can_skip(self) -> bool:
        """Whether there is anything that may call an update off."""
        return self.is_on or self.scaler is not None

    def begin(self) -> None:
        """Prepare for the forward of a step's first micro-batch."""
        if self.scaler is not None:
            self.scaler.discard()
        if not self.is_on:
            return
        if self._buffers is not None and self._bad_loss is not None:
            # A half that was never applied leaves no NaN behind either.
            self._buffers.put_back(self._bad_loss)
        self._bad_loss = self._flag = None
        # In eval mode nothing is counted, and a teacher may be large.
        beside = filter(_is_training, modules_beside(self._model, self._loss_fn).values())
        self._buffers = _Buffers([*self._model.modules(), *beside])

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def end_backward(self, losses: list[Tensor]) -> None:
        """Note whether the losses of the micro-batches are finite; unscale the gradients."""
        if self.scaler is not None:
            self.scaler.unscale()
        if self.is_on:
            # Each, not their sum, which can overflow where none of them does. Stacked, hence
            # copied: the check writes, and a loss belongs to its graph.
            on_device = [loss.to(self._device) for loss in losses]
            self._bad_loss = _clear(self._device)
            self._check([torch.stack(on_device)], self._bad_loss)
            self._bad_loss = self._any_rank(self._bad_loss)

    def forget(self) -> None:
        """Let go of what a step has noted that was never carried out."""
        self._bad_loss = self._flag = self._buffers = None
        if self.scaler is not None:
            self.scaler.discard()

    def judge(self) -> None:
        """Decide on the device whether the update is skipped; before clipping.

        Raises:
            RuntimeError: Under fp16, no gradients since the last update.
        """
        flags = [] if self.scaler is None else self.scaler.flags()
        if self.is_on:
            flags = [*flags, *self._gradient_flags()]
        self._flag = self._any_rank(any_flag(flags, self._device)) if flags else None

    def update(self, norm: Tensor | None, step: Callable[[], object]) -> Tensor | None:
        """Update or skip, as `judge` decided.

        Args:
            norm: The gradient norm that clipping found, if there is clipping.
            step: Runs the update, as ``optimizer.step()`` does.

        Returns:
            Whether it was skipped, 1.0 or 0.0 on the device, for `note`; None if it cannot be.
        """
        if self._flag is None:
            step()
            return None
        if self.is_on and norm is not None:
            self._flag = any_flag([self._flag, norm.isnan()], self._device)
        self._update(self._flag, step)
        if self.scaler is not None:
            self.scaler.adapt(unless=self._bad_loss)
        if self._buffers is not None:
            self._buffers.put_back(self._flag)
            self._buffers = None
        flag, self._flag = self._flag, None
        return flag

    def note(self, flag: Tensor | None, step: int) -> None:
        """Count what `update` returned for the step of this number; reads nothing."""
        if flag is not None:
            self.counts.note(flag, step)

    def check_skips(self) -> None:
        """Raise if ``stop_after`` updates in a row were skipped since the last call.

        Raises:
            NonFiniteError: They were.

        Synchronizes: Yes, if ``stop_after`` is set.
        """
        if self.options.stop_after is None:
            return
        found = self.counts.read()
        self.counts.forget_longest()
        if found.longest >= self.options.stop_after:
            raise NonFiniteError(
                f"{found.longest} updates in a row were skipped for a loss or gradient that is "
                f"not finite (stop_after={self.options.stop_after}), the last of them at steps "
                f"{', '.join(map(str, found.last_steps))}; look at the batches of these steps, "
                "lower the learning rate, or clip the gradients"
            )

    def counters(self) -> dict[str, int | float | str]:
        """Return what the report counts. Synchronizes: Yes, if anything can be skipped."""
        if not self.can_skip:
            return {}
        found = self.counts.read()
        counters: dict[str, int | float | str] = {"skipped": found.num_skipped}
        if self.is_on and found.last_steps:
            counters["last skipped steps"] = " ".join(map(str, found.last_steps))
        return counters

    def decisions(self) -> list[Decision]:
        """Say what is done about what is not finite, and how."""
        scaling = [] if self.scaler is None else [self._update.decision("loss scaling")]
        return [*scaling, *([self._update.decision("nonfinite")] if self.is_on else [])]

    def state_dict(self) -> dict[str, Any]:
        """Return the parts of a step's state that are the guard's. Synchronizes: As `counters`."""
        if not self.can_skip:
            return {"scaler": None}
        counts = self.counts.state_dict()
        scaling = self.scaler and {
            "scaler": self.scaler.state_dict(),
            "num_skipped": counts["num_skipped"],
        }
        return {"scaler": scaling, **({"nonfinite": counts} if self.is_on else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` returned, with or without a scaler or the guard."""
        scaling = state["scaler"] or {}
        if self.scaler is not None and scaling:
            self.scaler.load_state_dict(scaling["scaler"])
        without = {"num_skipped": scaling.get("num_skipped", 0)}
        self.counts.load_state_dict(state.get("nonfinite") or without)
        self._bad_loss = self._flag = self._buffers = None

    # --- what is judged ---------------------------------------------------------------------

    def _gradient_flags(self) -> list[Tensor]:
        """Return a flag for each device that has gradients, and for the loss."""
        lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in optimized(self._optimizer):
            if parameter.grad is None:
                continue
            values = _values(parameter.grad)
            if values.numel():
                lists.setdefault((values.device, values.dtype), []).append(values)
        home = _clear(self._device) if self._bad_loss is None else self._bad_loss.clone()
        flags = {self._device: home}
        for (device, _), gradients in lists.items():
            if device not in flags:
                flags[device] = _clear(device)
            self._check(gradients, flags[device])
        return list(flags.values())

    def _check(self, tensors: list[Tensor], flag: Tensor) -> None:
        """Set ``flag`` to 1 if a value of ``tensors`` (one dtype, one device) is not finite.

        Both ways are exact on large finite values, where a sum or a square would overflow.
        """
        with torch.no_grad():
            if tensors[0].dtype not in _SCALED_DTYPES:
                largest = torch.stack(torch._foreach_norm(tensors, torch.inf))
                torch.maximum(flag, largest.isfinite().all().logical_not().to(flag), out=flag)
                return
            # GradScaler's kernel with a scale of 1: one launch for all, no result per tensor, and
            # what it writes back is what it read, to the bit. Only a NaN of float16 may become
            # another NaN on CUDA, on its way through float32.
            one = self._ones.get(flag.device)
            if one is None:
                one = self._ones[flag.device] = torch.ones_like(flag)
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, one)


@final
class _Buffers:
    """The buffers of modules before a step, and where they stood."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places = [
            (module._buffers, name, buffer)
            for module in modules
            for name, buffer in module._buffers.items()
        ]
        tensors = {id(b): b for _, _, b in self._places if b is not None and _can_change(b)}
        self._snapshot = Snapshot(list(tensors.values()))
        # Scripted modules keep no tables in Python, so nothing can be put into them again.
        self._places = [place for place in self._places if isinstance(place[0], dict)]

    def put_back(self, flag: Tensor) -> None:
        """Put them back where ``flag`` is set."""
        self._snapshot.put_back(flag)
        chosen: dict[tuple[int, int], Tensor] = {}  # what was tied stays tied
        for holder, name, old in self._places:
            new = holder.get(name)
            if new is old:
                continue
            if old is None or new is None or not _have_one_form(old, new):
                if bool(flag):
                    holder[name] = old
                continue
            # A new tensor: the one that stands there may be an input of the user's.
            key = id(old), id(new)
            if key not in chosen:
                with torch.no_grad():
                    chosen[key] = torch.where(flag.to(new.device).bool(), old, new)
            holder[name] = chosen[key]


def _clear(device: torch.device) -> Tensor:
    """Return a flag that is not set, of the type that torch's kernels take."""
    return torch.zeros((), dtype=torch.float32, device=device)


def _is_training(module: nn.Module) -> bool:
    return module.training


def _can_change(buffer: Tensor) -> bool:
    """Whether torch would let a forward write to it in place, and a select undo that."""
    if buffer.layout is not torch.strided or buffer.is_quantized:
        return False
    return not (is_expanded(buffer) or buffer.is_inference())


def _have_one_form(old: Tensor, new: Tensor) -> bool:
    def form(tensor: Tensor) -> tuple[object, ...]:
        return tensor.shape, tensor.dtype, tensor.device, tensor.layout

    return form(old) == form(new) and old.layout is torch.strided


def _values(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient as a dense real tensor that shares its storage."""
    gradient = local(gradient)
    if gradient.layout is not torch.strided:
        gradient = gradient._values() if gradient.is_sparse else gradient.values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
