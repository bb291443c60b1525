"""Numbers that a step draws on the host, only to choose by them what it runs.

LayerDrop draws one for each layer, ``if torch.rand([]) < p``, and skips the layer or not. Many
models of transformers do so with ``p = 0``, too. A replay draws nothing on the host, so the CPU's
generator would stay behind, and the choices would be those of the capture for ever.

So where a capture fails for such draws, the next one is watched: each number that ``torch.rand``
draws on the host is noted, and may only be compared with a Python number, for an ``if``. Before
each replay as many numbers are drawn. Where each comparison comes out as in the capture, the graph
is what the step would run; where one does not, the generator goes back and the step runs eagerly.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import override

from torchfast._core.batches import tensors

_COMPARISONS = frozenset(
    getattr(holder, name)
    for holder in (Tensor, torch)
    for name in ("lt", "le", "gt", "ge", "eq", "ne")
)


class _Outcome(NamedTuple):
    """How a comparison came out: of which draw, by what, with which number."""

    draw: int
    compare: Callable[..., Tensor]
    number: float
    is_true: bool


@final
class HostDraws:
    """The numbers that a step drew in its capture, in their order, and what came of them.

    Attributes:
        are_only_compared: Whether nothing else was done with them.
    """

    def __init__(self) -> None:
        self._forms: list[tuple[torch.Size, torch.dtype]] = []
        self._outcomes: list[_Outcome] = []
        self.are_only_compared = True

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what the body draws in this thread, and nothing of what was noted before."""
        self._forms, self._outcomes, self.are_only_compared = [], [], True
        truth, thread = torch.rand, threading.get_ident()

        @functools.wraps(truth)
        def rand(*args: Any, **kwargs: Any) -> Tensor:
            drawn: Tensor = truth(*args, **kwargs)
            is_ours = threading.get_ident() == thread and kwargs.get("generator") is None
            if not is_ours or drawn.device.type != "cpu" or drawn.numel() != 1:
                return drawn
            self._forms.append((drawn.shape, drawn.dtype))
            return _noted(drawn, self, len(self._forms) - 1)

        torch.rand = rand
        try:
            yield
        finally:
            # Unless another thread, which captures too, has put its own there: that one will.
            if torch.rand is rand:
                torch.rand = truth

    def explain(self, before: Tensor) -> bool:
        """Whether no more than what was noted was drawn; if so, all of it is still to be drawn.

        Args:
            before: Where the generator was when the step began. It will be there again.
        """
        now = torch.get_rng_state()
        torch.set_rng_state(before)
        is_all = self.come_out_the_same() and torch.equal(torch.get_rng_state(), now)
        is_all = is_all and self.are_only_compared
        torch.set_rng_state(before if is_all else now)
        return is_all

    def come_out_the_same(self) -> bool:
        """Draw for a replay, and return True; draw nothing where the step would run otherwise."""
        before = torch.get_rng_state()
        drawn = [torch.rand(shape, dtype=dtype, device="cpu") for shape, dtype in self._forms]
        for draw, compare, number, is_true in self._outcomes:
            if bool(compare(drawn[draw], number)) is not is_true:
                torch.set_rng_state(before)
                return False
        return True

    def saw(self, noted: _Noted, function: Any, others: tuple[Any, ...], value: Any) -> Any:
        """Note what was done with a number, or with how a comparison of it came out."""
        is_number = len(others) == 1 and type(others[0]) in (int, float)
        if noted.compared is None and function in _COMPARISONS and is_number:
            return _noted(value, self, noted.draw, (function, others[0]))
        if noted.compared is not None and function is Tensor.__bool__:
            self._outcomes.append(_Outcome(noted.draw, *noted.compared, value))
        else:
            self.are_only_compared = False
        return value


class _Noted(Tensor):
    """A number that was drawn, or how its comparison came out."""

    noted_by: HostDraws
    draw: int
    compared: tuple[Callable[..., Tensor], float] | None

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            value = func(*args, **kwargs)
        noted = [tensor for tensor in tensors((args, kwargs)) if isinstance(tensor, _Noted)]
        if len(noted) == 1 and args and args[0] is noted[0] and not kwargs:
            return noted[0].noted_by.saw(noted[0], func, args[1:], value)
        for tensor in noted:
            tensor.noted_by.are_only_compared = False
        return value


def _noted(
    value: Tensor,
    log: HostDraws,
    draw: int,
    compared: tuple[Callable[..., Tensor], float] | None = None,
) -> _Noted:
    noted = value.as_subclass(_Noted)
    noted.noted_by, noted.draw, noted.compared = log, draw, compared
    return noted
