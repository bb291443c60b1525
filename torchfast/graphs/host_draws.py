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
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import override

from torchfast._core.batches import tensors

_TRUTH = "torchfast_truth"
_COMPARISONS = frozenset(
    getattr(holder, name) for holder in (Tensor, torch) for name in ("lt", "le", "gt", "ge")
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

    Args:
        is_alone: Whether no other rank takes part in the step. Ranks draw numbers of their own, and
            NCCL wants an operation captured on all of them or on none. So each must replay whatever
            it draws: no comparison may depend on it, as with ``p = 0``.

    Attributes:
        are_only_compared: Whether nothing else was done with them.
    """

    def __init__(self, *, is_alone: bool = True) -> None:
        self._is_alone = is_alone
        self._forms: list[tuple[torch.Size, torch.dtype]] = []
        self._outcomes: list[_Outcome] = []
        self._noted: list[weakref.ref[_Noted]] = []
        self.are_only_compared = True

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what the body draws in this thread, and nothing of what was noted before."""
        self._forms, self._outcomes, self._noted = [], [], []
        self.are_only_compared = True
        now, thread = torch.rand, threading.get_ident()
        truth: Callable[..., Tensor] = getattr(now, _TRUTH, now)

        @functools.wraps(truth)
        def rand(*args: Any, **kwargs: Any) -> Tensor:
            drawn: Tensor = truth(*args, **kwargs)
            is_ours = threading.get_ident() == thread and kwargs.get("generator") is None
            if not is_ours or drawn.device.type != "cpu" or drawn.numel() != 1:
                return drawn
            if kwargs.get("out") is not None:  # which somebody else has, and may read
                return drawn
            self._forms.append((drawn.shape, drawn.dtype))
            return self._note(drawn, len(self._forms) - 1)

        vars(rand)[_TRUTH] = truth
        torch.rand = rand
        try:
            yield
        finally:
            # Unless another thread, which captures too, has put its own there: that one will.
            if torch.rand is rand:
                torch.rand = truth

    def explain(self, before: Tensor) -> bool:
        """Whether no more than what was noted was drawn; if so, all of it is still to be drawn.

        Nor may a number outlive the step, or a later one could read what a replay has not drawn.

        Args:
            before: Where the generator was when the step began. It will be there again.
        """
        now = torch.get_rng_state()
        torch.set_rng_state(before)
        is_all = self.come_out_the_same() and torch.equal(torch.get_rng_state(), now)
        is_all = is_all and self.are_only_compared
        is_all = is_all and all(noted() is None for noted in self._noted)
        is_all = is_all and (self._is_alone or all(map(_is_certain, self._outcomes)))
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
            return self._note(value, noted.draw, (function, others[0]))
        if noted.compared is not None and function is Tensor.__bool__:
            self._outcomes.append(_Outcome(noted.draw, *noted.compared, value))
        else:
            self.are_only_compared = False
        return value

    def _note(
        self, value: Tensor, draw: int, compared: tuple[Callable[..., Tensor], float] | None = None
    ) -> _Noted:
        noted = value.as_subclass(_Noted)
        noted.noted_by, noted.draw, noted.compared = self, draw, compared
        self._noted.append(weakref.ref(noted))
        return noted


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


def _is_certain(outcome: _Outcome) -> bool:
    """Whether a comparison comes out so whatever is drawn."""
    ends = torch.tensor([0.0, 1.0], device="cpu")
    found: list[bool] = outcome.compare(ends, outcome.number).tolist()
    return found == 2 * [outcome.is_true]
