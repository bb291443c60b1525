"""What counts as a step of a script that says nothing: the updates of its first optimizer.

The script is not changed, so its calls of torch are watched. There are four ways to make an update:

- **Eagerly.** An optimizer wraps its class's ``step`` when it is built. What it is wrapped by is
  exchanged before the script builds any, so that a step ends after its annotation has ended.
- **Within the backward pass**, by hooks of the parameters. A profiler cannot be moved on in the
  middle of a backward, so that the step ends when the backward does. On CUDA devices such hooks run
  on a thread of autograd's, while the script's own thread waits for the backward.
- **Compiled.** torch.compile traces what it finds, once, and its code then runs without asking
  anybody here. It keeps assignments to attributes of what is outside, though: one is traced along
  with the update, and costs no graph break and no guard of its value. It is looked at when the next
  backward or replay begins, so that a step reaches from backward to backward.
- **In a CUDA graph**, where Python sees replays only. A graph that holds the update comes round
  once a step, without an update between.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchfast.profiling.profiler import Profile


@contextmanager
def steps_counted(profiling: Profile, *, stop: bool) -> Iterator[None]:
    """Count the updates of the first optimizer that the script uses, or replays without one.

    Args:
        profiling: Told when a step has ended.
        stop: Raise SystemExit where the profile has seen enough.
    """
    counter = _Counter(profiling, stop=stop)
    optimizer, graph = torch.optim.Optimizer, torch.cuda.CUDAGraph
    hook, replay, backward = optimizer.profile_hook_step, graph.replay, torch.autograd.backward
    optimizer.profile_hook_step = staticmethod(counter.around_update(hook))  # type: ignore[method-assign]
    graph.replay = counter.around_replay(replay)  # type: ignore[method-assign]
    torch.autograd.backward = counter.around_backward(backward)
    handle = register_optimizer_step_post_hook(counter.after_update)
    try:
        yield
    finally:
        handle.remove()
        counter.is_on = False
        optimizer.profile_hook_step = staticmethod(hook)  # type: ignore[method-assign]
        graph.replay = replay  # type: ignore[method-assign]
        torch.autograd.backward = backward


class _Counter:
    """Says to a profile when a step of the script has ended."""

    def __init__(self, profiling: Profile, *, stop: bool) -> None:
        self.is_on = True
        self.compiled_update: Any = None  # the optimizer that compiled code has stepped last
        self._profiling = profiling
        self._stop = stop
        # The profiler begins and ends on the script's thread, in its process, and nowhere else.
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._depth = 0  # of updates within updates: super().step()
        self._backwards = 0  # of backwards within backwards: recompute
        self._is_updated_in_backward = False
        self._counted: int | None = None  # the id of the optimizer whose updates are the steps
        self._replayed: set[int] = set()  # the graphs replayed since the last update or step
        self._any_replayed = self._updates_only = False

    def around_update(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def hooked(step: Callable[..., Any]) -> Callable[..., Any]:
            inner = hook(step)

            @wraps(inner)
            def update(*args: Any, **kwargs: Any) -> Any:
                # The first is asked alone while torch.compile looks at this.
                if torch.compiler.is_compiling() or not self._is_counting():
                    return inner(*args, **kwargs)
                self._depth += 1
                try:
                    result = inner(*args, **kwargs)
                finally:
                    self._depth -= 1
                if self._depth == 0 and self._wraps(args[0]):
                    self._updated(args[0])
                return result

            update.counted_by = self  # type: ignore[attr-defined]
            return update

        return hooked

    def after_update(self, optimizer: Any, *_: Any) -> None:
        """Count the update of a class that was wrapped before, within its annotation.

        Those that are compiled, or made by a thread of autograd's, are noted whoever wrapped them.
        """
        if torch.compiler.is_compiling():
            # Nothing may be read here, or its value would be guarded.
            self.compiled_update = optimizer
        elif self._is_counting():
            if self._depth == 0 and not self._wraps(optimizer):
                self._updated(optimizer)
        elif self._backwards and self.is_on and os.getpid() == self._process:
            self._updated(optimizer)

    def _wraps(self, optimizer: Any) -> bool:
        return getattr(type(optimizer).step, "counted_by", None) is self

    def _is_counting(self) -> bool:
        return self.is_on and threading.get_ident() == self._thread and os.getpid() == self._process

    def around_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._is_counting():
                return backward(*args, **kwargs)
            self._look_for_compiled_update()
            self._backwards += 1
            try:
                result = backward(*args, **kwargs)
            finally:
                self._backwards -= 1
            if self._is_updated_in_backward and not self._backwards:
                self._is_updated_in_backward = False
                self._end_step()
            return result

        return counted

    def around_replay(self, replay: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(replay)
        def counted(graph: Any) -> Any:
            # A graph that holds the update comes round once a step, without an update between.
            # Where updates come in between, a graph may be a part of the step: a model's forward,
            # once for each micro-batch.
            if self._is_counting():
                self._look_for_compiled_update()
                if not self._updates_only:
                    if id(graph) in self._replayed:
                        self._end_step()
                    self._replayed.add(id(graph))
                    self._any_replayed = True
            return replay(graph)

        return counted

    def _look_for_compiled_update(self) -> None:
        optimizer, self.compiled_update = self.compiled_update, None
        if optimizer is not None:
            self._updated(optimizer)

    def _updated(self, optimizer: Any) -> None:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        self._counted = id(optimizer) if self._counted is None else self._counted
        if id(optimizer) != self._counted:
            return
        self._updates_only = self._any_replayed
        if self._backwards:
            self._is_updated_in_backward = True
        else:
            self._end_step()

    def _end_step(self) -> None:
        self._replayed.clear()
        if self._profiling.is_done:
            return
        self._profiling.step()
        if self._stop and self._profiling.is_done:
            raise SystemExit(0)
