"""What every compilation needs first, worked out and started before the model is traced.

Before torch finds a compiled graph on disk, it hashes its own source, some hundreds of files, and
Triton hashes its, a library of hundreds of megabytes among them. That happens once a process, at
the first lookup, and takes some tenths of a second: a good part of a start that finds all its code.
Threads do it from when something is to be compiled, one for each hash, while the first batch comes.

**What is not done by then is waited for before the tracing begins.** Hashing lets go of Python's
lock and takes it again for every file and for every megabyte. Beside a thread that traces, which
gives the lock up only now and then, it takes several times as long, slows the tracing by as much as
it saves, and is not done when the lookup asks: then torch works everything out once more. Beside a
thread that waits, the hashes are worked out at full speed and at the same time. And the thread that
waits has something to do on a GPU, see `launch_early`.

The first lookup also starts Triton's driver, for which Triton compiles a C file where it finds none
in its own cache (``~/.triton``), as on a new machine or in a new container. A thread that waits for
a C compiler needs no lock. So this one is not waited for, and goes on while the model is traced.

**What is not in a cache is compiled by torch's worker processes, once they are there**; until then
Triton compiles in this process, one kernel after the other. They take some seconds to import torch,
and torch starts them when the first graph is traced: too late for a model that is compiled by
blocks, whose kernels are wanted a second later. So for what is on a GPU they are started as soon as
their key is known, that is torch's, once a process: those that have gone idle come back for what
there is to compile. It is torch's own call, which finds them there when it comes to it, by torch's
own settings (``TORCH_WARM_POOL=0``, ``TORCHINDUCTOR_COMPILE_THREADS``, ``inductor.config``, which
each thread has for itself and is handed on).

Torch and Triton remember the results themselves. If they are asked before it is done, they work
them out once more, or wait.
"""

from __future__ import annotations

import contextvars
import importlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch

from torchfast.compiler.early_launches import launch_early

logger = logging.getLogger(__name__)

_NAME = "torchfast-keys"
_DRIVER_NAME = "torchfast-driver"
# Longer takes only a disk that does not answer, of which torch tells better than a silent wait.
_MOST_WAIT_S = 10.0


def work_out_keys(*, for_gpu: bool = True) -> list[threading.Thread]:
    """Begin with it; return the threads to wait for, none if there is nothing to do.

    The workers are waited for until they are started, not until they are ready: torch would start
    them a second time while another thread is at it.

    What is imported is imported here, and not in the threads. Nothing of it raises: what is amiss
    with the inductor or with Triton is told by whoever needs them.

    Args:
        for_gpu: Whether something is about to be compiled that may be on a GPU. No worker is
            started for anything else.
    """
    # Somebody else of this process has begun: the same again would only take longer.
    if begun := _under_way(_NAME):
        return begun
    try:
        from torch._inductor import codecache

        keys: list[Sequence[Callable[[], object]]] = [
            (codecache.torch_key, *(_workers() if for_gpu else ()))
        ]
        if torch.version.cuda is not None:
            # First, so that its compiler is at work while the hashes are waited for.
            if not _under_way(_DRIVER_NAME):
                _begin(_DRIVER_NAME, _driver())
            keys.append(_of_triton())
    except Exception as error:  # an installation that is amiss raises what it likes
        logger.debug("the keys of the compile caches are not worked out early: %s", error)
        return []
    return [thread for in_turn in keys for thread in _begin(_NAME, in_turn)]


def wait_for_keys(threads: list[threading.Thread]) -> None:
    """Return when the threads are done, at once if they are; once, so the list is emptied."""
    deadline = time.monotonic() + _MOST_WAIT_S
    if any(thread.is_alive() for thread in threads):
        launch_early()
    for thread in tuple(threads):  # another thread may wait for them, too
        thread.join(max(0.0, deadline - time.monotonic()))
    threads.clear()


def _under_way(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def _begin(name: str, keys: Sequence[Callable[[], object]]) -> list[threading.Thread]:
    """Start a thread if there is something for it."""
    if not keys:
        return []
    # From torch 2.13 on settings of the inductor are variables of the context.
    ask = contextvars.copy_context().run
    thread = threading.Thread(target=ask, args=(_ask, keys), name=name, daemon=True)
    thread.start()
    return [thread]


def _of_triton() -> list[Callable[[], object]]:
    try:
        from torch._inductor.runtime.triton_compat import triton_key
    except Exception as error:  # such as a Triton that does not fit the driver
        logger.debug("Triton's key is not worked out early: %s", error)
        return []
    return [triton_key]


def _workers() -> list[Callable[[], object]]:
    # They compile for GPUs only.
    if torch.version.cuda is None or not torch.cuda.is_initialized():
        return []
    try:
        from torch._inductor.async_compile import AsyncCompile, maybe_warm_pool
    except Exception as error:
        logger.debug("torch's worker processes are not started early: %s", error)
        return []

    def start() -> None:
        if not AsyncCompile.process_pool.cache_info().currsize:
            maybe_warm_pool()

    return [start]


def _driver() -> list[Callable[[], object]]:
    # Where nothing is on a GPU, nothing asks for it.
    if not torch.cuda.is_initialized():
        return []
    try:
        driver = importlib.import_module("triton.runtime.driver").driver
    except Exception as error:
        logger.debug("Triton's driver is not started early: %s", error)
        return []
    # Making it asks for no device: the current one is another in each thread.
    return [lambda: driver.active]


def _ask(keys: Sequence[Callable[[], object]]) -> None:
    for key in keys:
        try:
            key()
        except Exception as error:
            # Whoever needs it meets the same error, where it can be answered.
            logger.debug("what a compilation needs first could not be had early: %s", error)
