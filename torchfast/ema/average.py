"""An exponential moving average of the weights, moved on by each update.

After an update every average moves a little towards its weight:
``average = decay * average + (1 - decay) * weight``. The average of the last thousand steps or so
jitters less than the last step's weights and often predicts better, above all while the learning
rate is high.

By hand it is one more loop over all weights, and torch's own `AveragedModel` asks the device at
each update whether it is the first, which makes the host wait. Here the first is known without
asking, and the whole average is a launch or two, in the same graph as the update. It computes what
`AveragedModel` with `get_ema_multi_avg_fn` computes, bit for bit.

It costs one more copy of parameters and buffers, and reading and writing it once a step. It does
not help short runs, which an average of a thousand steps lags behind; ``warm_up`` shortens it at
first.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn

from torchfast._core.compare import same_objects
from torchfast._core.decisions import Decision
from torchfast._core.device import is_capturing
from torchfast._core.errors import StateMismatchError
from torchfast._core.no_context import NO_CONTEXT
from torchfast._core.state import check_module_state
from torchfast.ema.options import EMAOptions
from torchfast.ema.pairs import (
    Entry,
    Group,
    buffer_forms,
    copied,
    forms,
    is_real,
    pair,
    take_buffers,
    wide_dtype,
)
from torchfast.precision import Snapshot

logger = logging.getLogger(__name__)

# With warm_up, the decay after n updates is at most (1 + n) / (10 + n).
_WARM_UP = 10
_STATE = ("ema_model", "ema")
_VERSION, _DTYPE = operator.attrgetter("_version"), operator.attrgetter("dtype")


@final
class WeightAverage:
    """The averaged model of a step.

    A step runs within `around_step`, calls `update` behind the optimizer's update, in a graph or
    not, and `after_update` when all is enqueued.

    Until the first update the average is what the weights are, and that update makes it equal to
    the new ones, unless the user has put another average there. Whether it is the first, the host
    knows, so where nothing can call an update off the decay is a constant of the graph, all
    averages of a dtype are one launch, and `after_update` writes over what the first has made.
    Where an update may be skipped, and with ``warm_up``, the weight of the new weights is computed
    on the device from a counter there: 1 at the first, 0 where it is skipped. Then each tensor is a
    launch of its own.

    Args:
        model: Whose weights; copied, in eval mode and without gradients.
        options: How; None means that nothing is averaged and all calls do nothing.
        device: Where the flag of skipped updates is.
        can_skip: Whether there may be such a flag.
        twin: A copy of the model as `copied` makes it, where the model cannot be copied any more.

    Attributes:
        model: The averaged model; None where nothing is averaged. Another object after modules or
            parameters of the model were replaced, or got another dtype, device or shape.
        named: What an update reads and writes besides the model, for whoever captures it.
        is_new: Whether the next update is the first to be averaged.

    Raises:
        TypeError: The model cannot be copied, or its copy shares modules or parameters with it.

    Numerics: Bitwise `AveragedModel` with `get_ema_multi_avg_fn`, for finite values of 32 and 64
        bits. A skipped update leaves every finite value (a zero may lose its sign).
    Synchronizes: Never; `state_dict` reads one number.
    """

    def __init__(
        self,
        model: nn.Module,
        options: EMAOptions | None,
        device: torch.device,
        *,
        can_skip: bool,
        twin: nn.Module | None = None,
    ) -> None:
        self.options = options
        self.model: nn.Module | None = None
        self.named: list[nn.Module] = []
        self._entries: list[Entry] = []
        self.is_new, self._in_step = options is not None, False
        if options is None:
            return
        self._source, self._twin = model, twin
        self._is_fixed = not (options.warm_up or can_skip)
        self._real = torch.float32 if device.type == "mps" else torch.float64
        # Not the averaged model itself, whose modes and hooks are nobody's concern here.
        self._holder = nn.Module()
        self.named = [self._holder]
        self._num_averaged = torch.zeros((), dtype=torch.int64, device=device)
        self._build()

    @property
    def is_on(self) -> bool:
        """Whether anything is averaged."""
        return self.options is not None

    # -- Around and in a step --------------------------------------------------------------------

    def around_step(self) -> AbstractContextManager[None]:
        """Follow, and leave it at that until the end: what the step does may be in a capture."""
        return NO_CONTEXT if self.options is None else self._around_step()

    @contextmanager
    def _around_step(self) -> Iterator[None]:
        self.follow()
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
            self._note_versions()

    def follow(self) -> None:
        """Take in what was replaced since the last step, in the model or in its average.

        What stands in the place of an average is written to it, so that the graphs of the step go
        on. A model whose modules or parameters are others gets a new average, which takes over what
        fits by name and shape; the rest begins as it is. In a capture nothing is done: each replay
        would do it again.
        """
        if not self.is_on or is_capturing():
            return
        if not all(map(operator.is_, map(dict.get, *self._places), self._placed)):
            self._put_back()
        if [*map(_VERSION, self._watched)] != self._versions:
            self._take_over()
        if not same_objects(self._holdings(), self._held):
            self._build()
        elif self._places_of_weights() != self._weights_at:
            if forms(self._weights) != self._forms:
                self._build()
            else:
                self.align()
        if self.is_new:  # the model may have been loaded since
            self._start()

    def update(self, skipped: Tensor | None) -> None:
        """Move the average by one update, unless ``skipped`` (1.0 on the device) says otherwise."""
        if not self.is_on:
            return
        with torch.no_grad():
            weight = self._weight(skipped)
            for group in self._averaged:
                group.move(weight)
            if skipped is None:
                self._copy_others()
                self._num_averaged.add_(1)
            else:
                before = Snapshot([e.shown for group in self._copied for e in group.entries])
                self._copy_others()
                before.put_back(skipped)
                self._num_averaged.add_(1 - skipped.to(torch.int64))

    def after_update(self) -> None:
        """Do what the host does after an update."""
        if not self.is_new:
            return
        if self._is_fixed:
            self._start()
        self.is_new = False
        self._note_versions()

    def current(self) -> nn.Module | None:
        """Return the averaged model as it should be now: see `follow`, for buffers too."""
        if not self.is_on or self._in_step or is_capturing():
            return self.model
        with torch.inference_mode(False):  # whose tensors no update could write to
            self.follow()
            if buffer_forms(self._source) != self._buffer_forms:
                assert self.model is not None
                take_buffers(self._source, self.model)
                self._pair()
        return self.model

    def align(self) -> None:
        """Lay the averages out as the model's tensors are, so that one launch can serve them."""
        for entry in self._entries:
            for tensor in (entry.shown, entry.average):
                if tensor.stride() != entry.source.stride():
                    laid_out = torch.empty_like(entry.source, dtype=tensor.dtype)
                    tensor.data = laid_out.copy_(tensor.detach())
        if self.is_on:
            self._weights_at = self._places_of_weights()

    # -- What is saved and told --------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the parts of a step's state that are the average's. Synchronizes: Yes.

        ``"ema_model"`` is the averaged model's own state, under its own keys.
        """
        model = self.current()
        if model is None:
            return {}
        unrounded = {e.name: e.average for e in self._entries if e.is_rounded}
        return {
            "ema_model": model.state_dict(),
            "ema": {"num_averaged": int(self._num_averaged), "unrounded": unrounded},
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise unless what `state_dict` returned fits, or there is none of it.

        Raises:
            StateMismatchError: It does not.
        """
        model = self.current()
        if model is None or not any(key in state for key in _STATE):
            return
        check_module_state(state.get("ema_model"), model, "averaged model")
        saved = state.get("ema")
        parts = saved if isinstance(saved, Mapping) else {}
        unrounded = parts.get("unrounded")
        if not isinstance(parts.get("num_averaged"), int) or not isinstance(unrounded, Mapping):
            raise StateMismatchError(
                "state's 'ema' lacks 'num_averaged' or 'unrounded'; load what state_dict() returned"
            )
        shapes = {e.name: e.average.shape for e in self._entries}
        odd = [n for n, v in unrounded.items() if shapes.get(n, 0) != getattr(v, "shape", None)]
        if odd:
            raise StateMismatchError(
                f"state's 'ema' has averages of other names or shapes than {type(model).__name__}: "
                f"{odd[:3]}; build the model as it was"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` returned, in place, so that graphs go on.

        Without an average in the state it begins anew, with the weights that the model has now.
        """
        if not self.is_on:
            if "ema_model" in state:
                logger.warning(
                    "the state holds averaged weights and this trainer averages none, so they are "
                    "left out; build it with ema=... to go on with them"
                )
            return
        model = self.current()
        assert model is not None
        if "ema_model" not in state:
            logger.warning(
                "the state holds no averaged weights, so the average begins anew with the weights "
                "that were loaded"
            )
            self.is_new = True
            self._num_averaged.zero_()
            self._start()
            return
        model.load_state_dict(state["ema_model"])
        self.current()  # a hook of the model's may have put other tensors there
        num_averaged = state["ema"]["num_averaged"]
        self._num_averaged.fill_(num_averaged)
        self.is_new = num_averaged == 0
        with torch.no_grad():
            for entry in self._entries:
                value = state["ema"]["unrounded"].get(entry.name)
                if value is None and entry.is_rounded:
                    value = state["ema_model"].get(entry.name, entry.shown)
                if value is not None:
                    entry.average.copy_(value)
                    entry.shown.copy_(entry.average)
        self._note_versions()

    def decisions(self) -> list[Decision]:
        """Say what is averaged, and what it costs."""
        if self.options is None:
            return []
        tensors = {id(t): t for e in self._entries for t in (e.average, e.shown)}.values()
        num_bytes = sum(t.numel() * t.element_size() for t in tensors)
        num_averaged = sum(len(group.entries) for group in self._averaged)
        detail = (
            f"{num_averaged} tensors are averaged after each update (decay {self.options.decay}"
            f"{', warmed up' if self.options.warm_up else ''}), in {num_bytes / 1e6:.3g} MB"
        )
        return [Decision(lever="ema", outcome="applied", detail=detail)]

    # -- The parts of an update ------------------------------------------------------------------

    def _weight(self, skipped: Tensor | None) -> float | Tensor:
        """Return how much of the new weights comes in."""
        assert self.options is not None
        if self._is_fixed:
            return 1 - self.options.decay
        count = self._num_averaged.to(self._real)
        if self.options.warm_up:
            decay = ((count + 1) / (count + _WARM_UP)).clamp(max=self.options.decay)
        else:
            decay = torch.full_like(count, self.options.decay)
        # Filled, not chosen by where(), which would copy a number from the host.
        weight = (1 - decay).masked_fill(count == 0, 1.0)
        return weight if skipped is None else weight.masked_fill(skipped.bool(), 0.0)

    def _copy_others(self) -> None:
        for group in self._copied:
            group.start()

    def _start(self) -> None:
        with torch.no_grad():
            for group in (*self._averaged, *self._copied):
                group.start()
        self._note_versions()

    # -- What the user writes to the average -----------------------------------------------------

    def _note_versions(self) -> None:
        """Remember how often the averages were written to, to see when another does so.

        A replay is not counted; all else of ours is, and is noted behind it. Once there is an
        average, what is written to it needs no notice, but for what it is rounded from.
        """
        if self.is_on:
            self._watched = self._shown if self.is_new else self._rounded
            self._versions = [*map(_VERSION, self._watched)]

    def _take_over(self) -> None:
        """Let what the user has written be the average. Of weights, that is a beginning."""
        pairs = zip(self._watched, self._versions, strict=True)
        written = {id(shown) for shown, known in pairs if shown._version != known}
        with torch.no_grad():
            for group in self._averaged:
                entries = [entry for entry in group.entries if id(entry.shown) in written]
                for entry in entries:
                    entry.take_over()
                if entries and not group.may_move:
                    self.is_new = False
                    self._num_averaged.clamp_(min=1)
        self._note_versions()

    # -- The model and its copy ------------------------------------------------------------------

    def _build(self) -> None:
        """Copy the model as it is now, and take over the averages that fit it."""
        if self.model is not None:
            logger.info("the model has other parts than before, and its average follows")
        self.model = copied(self._source) if self._twin is None else self._twin
        self._twin = None
        self._pair()

    def _pair(self) -> None:
        """Pair the tensors of the two models, and go on with the averages that there are."""
        assert self.model is not None
        before = {entry.name: entry for entry in self._entries}
        self._entries = pair(self._source, self.model)
        for entry in self._entries:
            known = before.get(entry.name)
            if known is not None and known.shown is entry.shown:
                entry.average = known.average
        self._group()
        with torch.no_grad():
            for entry in (e for group in self._averaged for e in group.entries):
                known = before.get(entry.name)
                if known is None or known.average is entry.average:
                    continue
                if known.average.shape == entry.average.shape:
                    entry.average.copy_(known.average)
                    entry.shown.copy_(known.average)
        placed = [(e.shown_in, e.key, e.shown) for e in self._entries if e.shown_in is not None]
        tables, keys, self._placed = (
            map(list, zip(*placed, strict=True)) if placed else ([], [], [])
        )
        self._places = tables, keys
        self._held_in: list[dict[str, Any]] = [
            table
            for module in self._source.modules()
            if not isinstance(module, torch.jit.ScriptModule)
            for table in (module._parameters, module._modules)
        ]
        self._held = self._holdings()
        groups = (*self._averaged, *self._copied)
        self._weights = [e.source for g in groups if not g.may_move for e in g.entries]
        self._forms, self._buffer_forms = forms(self._weights), buffer_forms(self._source)
        # Others, such as sharded tensors, have no one address.
        self._at = [w for w in self._weights if type(w) in (Tensor, nn.Parameter)]
        self._weights_at = self._places_of_weights()
        self._note_versions()

    def _group(self) -> None:
        """Sort the entries into launches, and name all tensors."""
        assert self.options is not None
        parameters = {id(p) for p in self._source.parameters()}
        self._averaged: list[Group] = []
        self._copied: list[Group] = []
        found: dict[Any, list[Entry]] = {}
        for entry in self._entries:
            is_buffer = id(entry.source) not in parameters
            is_averaged = is_real(entry.source) and (self.options.use_buffers or not is_buffer)
            dtype = wide_dtype(entry.shown.dtype)
            if is_averaged and dtype is not entry.shown.dtype and not entry.is_rounded:
                entry.average = entry.shown.to(dtype)
            form = entry.source.device, entry.source.dtype
            found.setdefault((is_averaged, is_buffer, form), []).append(entry)
        for (is_averaged, is_buffer, _), entries in found.items():
            group = Group(entries, may_move=is_buffer)
            (self._averaged if is_averaged else self._copied).append(group)
        averaged = [entry for group in self._averaged for entry in group.entries]
        self._shown = [entry.shown for entry in averaged]
        self._rounded = [entry.shown for entry in averaged if entry.is_rounded]
        self._holder._buffers.clear()
        self._holder.register_buffer("num_averaged", self._num_averaged)
        for number, entry in enumerate(self._entries):
            self._holder.register_buffer(f"shown_{number}", entry.shown)
            if entry.is_rounded:
                self._holder.register_buffer(f"average_{number}", entry.average)

    def _put_back(self) -> None:
        """Write what stands in the place of a tensor of the averaged model to it."""
        for entry in self._entries:
            now = entry.shown if entry.shown_in is None else entry.shown_in.get(entry.key)
            if now is entry.shown:
                continue
            with torch.no_grad():
                if isinstance(now, Tensor) and now.shape == entry.shown.shape:
                    entry.average.copy_(now)
                    entry.shown.copy_(now)
            assert entry.shown_in is not None
            entry.shown_in[entry.key] = entry.shown

    def _places_of_weights(self) -> list[Any]:
        """Return what differs once a weight was cast, moved or laid out anew; quick to compare."""
        return [*map(_DTYPE, self._weights), *map(Tensor.data_ptr, self._at)]

    def _holdings(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._held_in)))
