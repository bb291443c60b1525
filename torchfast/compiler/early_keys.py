"""What every lookup in a compile cache needs first, worked out while something else is done.

Before torch finds a compiled graph on disk, it hashes its own source, some hundreds of files, and
Triton hashes its, a library of a hundred megabytes among them. That happens once a process, at the
first lookup, and takes some tenths of a second: a good part of a start that finds all its code. A
thread does it from when something is to be compiled. It reads and hashes, where Python's lock is
not held, while the first batch comes and the model is traced.

Torch and Triton remember the results themselves. If they are asked before it is done, they work
them out once more, or wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)


def work_out_keys() -> threading.Thread | None:
    """Begin with it; return the thread, None if there is nothing to do.

    What is imported is imported here, and not in the thread. Nothing of it raises: what is amiss
    with the inductor or with Triton is told by whoever needs them.
    """
    try:
        from torch._inductor import codecache

        keys: list[Callable[[], object]] = [codecache.torch_key]
        if torch.version.cuda is not None:
            keys += _of_triton()
    except Exception as error:  # an installation that is amiss raises what it likes
        logger.debug("the keys of the compile caches are not worked out early: %s", error)
        return None
    thread = threading.Thread(target=_ask, args=(keys,), name="torchfast-keys", daemon=True)
    thread.start()
    return thread


def _of_triton() -> list[Callable[[], object]]:
    try:
        from torch._inductor.runtime.triton_compat import triton_key
    except Exception as error:  # such as a Triton that does not fit the driver
        logger.debug("Triton's key is not worked out early: %s", error)
        return []
    return [triton_key]


def _ask(keys: list[Callable[[], object]]) -> None:
    for key in keys:
        try:
            key()
        except Exception as error:
            # Whoever needs it meets the same error, where it can be answered.
            logger.debug("a key of the compile caches could not be worked out: %s", error)
