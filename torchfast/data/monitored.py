"""A DataLoader that says how it was built, and which of its workers was lost.

torch waits for ever for a worker that hangs or was stopped, unless it is given a timeout; then it
says that time ran out, but not for whom, and leaves a stopped process behind, for which the exit of
Python waits. And its timeout covers only the wait for a message: the tensors behind a message are
fetched from the worker's own process, for which it waits without end if the worker was stopped
after it sent it. Here a watch sees that too, the error names the worker and its process, all
workers are ended at once, and the loader can be iterated again.

With ``recycle_memory`` the workers make their batches in shared memory that is used again; see
``shared_pool.py``.
"""

from __future__ import annotations

import contextlib
import copy
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, final

from torch.utils.data import DataLoader, _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from torchfast._core.arguments import check_flag
from torchfast._core.decisions import Report
from torchfast.data.pool_receiver import Pin, PooledIterator, PoolStatistics
from torchfast.data.pooled_collate import PooledCollate, PooledStart
from torchfast.data.shared_pool import SPARE_BLOCKS
from torchfast.data.unannotated import taker

# How torch's own errors begin. An exception of the data set begins otherwise, and goes through.
_HANGS = "DataLoader timed out after"
_OF_A_WORKER = "DataLoader worker (pid"
_LOST = (_HANGS, _OF_A_WORKER, "Pin memory thread exited unexpectedly")
_DIES_IN_S = 1.0  # from the end of its connections to that of the process
_ENDS_IN_S = 5.0  # a process that was killed
_LEFT_TAKEN_S = 0.5  # a lock that its thread needs for an instant only
_STATES = {"T": "is stopped", "t": "is stopped", "D": "waits for a disk", "R": "is running"}


@final
class MonitoredDataLoader(DataLoader[Any]):
    """The ``torch.utils.data.DataLoader`` that `build_dataloader` makes.

    It takes what torch's takes and yields the same batches. ``report()`` says how it was built. A
    worker that dies, or does not deliver within ``timeout``, is an error that names it; none is
    left behind.

    Args:
        *args: As for torch's.
        recycle_memory: Whether workers make batches in shared memory that is used again once all
            tensors of a batch are gone. For the consumer they are tensors as any other.
        **kwargs: As for torch's.

    Raises:
        TypeError: ``recycle_memory`` is no bool.
        RuntimeError: While iterating, a worker died, or delivered nothing for ``timeout`` seconds.

    Numerics: Exact.
    Synchronizes: Never.
    """

    _report: Report | None = None

    def __init__(self, *args: Any, recycle_memory: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recycle_memory = check_flag("recycle_memory", recycle_memory)
        self._memory = PoolStatistics()
        self._pin: Pin | None = None

    def report(self) -> Report:
        """Return what was chosen for this loader, and why, and what its memory did."""
        report = self._report or Report(title="DataLoader, as given", decisions=())
        if not self.recycle_memory or self.num_workers == 0:
            return report
        counted = {name: value for name, value in asdict(self._memory).items() if value != ""}
        return replace(report, counters={**report.counters, **counted})

    def memory(self) -> PoolStatistics:
        """Return what became of batches and of the memory that is used again."""
        return replace(self._memory)

    @contextmanager
    def pinned_by(self, pin: Pin | None) -> Iterator[None]:
        """Let an iteration that begins in the body have its shared memory pinned where it is.

        Only for a consumer that holds each batch until no copy reads it any more: when the tensors
        of a batch are gone, another process writes there.
        """
        before, self._pin = self._pin, pin
        try:
            yield
        finally:
            self._pin = before

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.num_workers == 0:
            return super().__iter__()
        with nullcontext() if self._iterator is None else _ended_by_errors(self._iterator, self):
            iterator = super().__iter__()
        if isinstance(iterator, PooledIterator):
            iterator.receiver.pin = self._pin
        return _MonitoredIterator(self, iterator)

    def _get_iterator(self) -> Any:
        if self.num_workers == 0:
            return super()._get_iterator()
        self.check_worker_number_rationality()
        if not self.recycle_memory:
            return _made(_MultiProcessingDataLoaderIter, self)
        # The workers' functions are theirs: this loader shows those that it was given.
        theirs = copy.copy(self)
        ahead = self.prefetch_factor or 0
        theirs.collate_fn = PooledCollate(self.collate_fn, ahead + SPARE_BLOCKS)
        theirs.worker_init_fn = PooledStart(theirs.collate_fn, self.worker_init_fn)
        return _made(PooledIterator, theirs, self._memory)


def pinned_by(loader: Any, pin: Pin | None) -> AbstractContextManager[None]:
    """Let an iteration that begins in the body have its memory pinned, if the loader can."""
    return loader.pinned_by(pin) if isinstance(loader, MonitoredDataLoader) else nullcontext()


def unpin(loader: Any, pin: Pin) -> None:
    """Unpin what ``pin`` pinned for workers that stay; no copy may read it any more."""
    iterator = getattr(loader, "_iterator", None)
    if isinstance(iterator, PooledIterator) and iterator.receiver.pin is pin:
        iterator.receiver.unpin()


def memory_of(loader: Any) -> PoolStatistics | None:
    """Return what became of the memory that a loader uses again; None for any other loader."""
    if isinstance(loader, MonitoredDataLoader) and loader.recycle_memory and loader.num_workers:
        return loader.memory()
    return None


class _MonitoredIterator:
    """An iterator of torch's, until a worker is lost."""

    def __init__(self, loader: MonitoredDataLoader, iterator: Any) -> None:
        self._loader = loader
        self._iterator = iterator
        self._take = taker(iterator)
        self._watch = _Watch(iterator, loader.timeout) if loader.timeout else None
        if self._watch is not None:
            # By way of a weak reference: a thread that held this iterator would keep it alive.
            weakref.finalize(self, self._watch.over.set)

    def __iter__(self) -> _MonitoredIterator:
        return self

    def __len__(self) -> int:
        return len(self._iterator)

    def __next__(self) -> Any:
        if self._iterator is None:
            raise StopIteration
        watch = self._watch
        try:
            with watch or contextlib.nullcontext():
                return self._take()
        except StopIteration:
            self._stop_watching()
            raise
        except Exception as error:
            # torch's frames hold the error and this iterator in a cycle. Workers that the garbage
            # collector ends keep it waiting for 5 s.
            traceback.clear_frames(error.__traceback__)
            said = str(error)
            hangs = (watch is not None and watch.suspects) or ""
            if not hangs and not _is_loss(error, said, self._iterator):
                raise
            if not hangs and said.startswith(_HANGS):
                hangs = _suspects(self._iterator)
            dead = _dead(self._iterator)
            timeout = self._loader.timeout
            self.end()
            if hangs:
                raise RuntimeError(
                    f"no batch for {timeout:.3g} s from DataLoader worker {hangs}; it "
                    "hangs in the data set, or needs longer: give a longer timeout (0 waits for "
                    "ever), or run with num_workers=0 to see where it hangs"
                ) from error
            raise _death(dead or said.strip()) from error

    def end(self) -> None:
        """End the workers now; the loader starts new ones when it is iterated again."""
        self._stop_watching()
        iterator, self._iterator = self._iterator, None
        self._take = iter(()).__next__  # which holds no iterator
        if iterator is not None:
            end_workers(iterator)
        if self._loader._iterator is iterator:
            self._loader._iterator = None

    def finish(self) -> None:
        """Let the workers finish what they do, for some seconds, and end."""
        if self._iterator is not None:
            self._iterator._shutdown_workers()
        self.end()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.over.set()


def _made(kind: Any, *args: Any) -> Any:
    """Return an iterator of torch's; of one that fails half made no worker is left."""
    iterator = kind.__new__(kind)
    with _ended_by_errors(iterator):
        kind.__init__(iterator, *args)
    return iterator


@contextmanager
def _ended_by_errors(iterator: Any, loader: MonitoredDataLoader | None = None) -> Iterator[None]:
    """End an iterator's workers if it cannot begin an epoch, and say so if that is for one's loss.

    Nobody else would: to torch, its own end is safe there, too.
    """
    try:
        yield
    except BaseException as error:
        said = str(error)
        is_loss = isinstance(error, Exception) and _is_loss(error, said, iterator)
        dead = _dead(iterator) if is_loss else ""
        end_workers(iterator)
        if loader is not None:
            loader._iterator = None
        if is_loss:
            raise _death(dead or said.strip()) from error
        raise


def _death(who: str) -> RuntimeError:
    return RuntimeError(
        f"a DataLoader worker died: {who}; SIGKILL is mostly want of memory and SIGBUS want of "
        "shared memory: take fewer workers or a smaller prefetch_factor; otherwise run with "
        "num_workers=0 to see where it crashes"
    )


def named_loss(error: BaseException) -> BaseException:
    """Return the error of a lost worker in place of what torch's SIGCHLD handler raised.

    It raises wherever the main thread is, which need not be within an iterator that would say more.
    Any other error is returned as it is.
    """
    said = str(error).strip()
    if not isinstance(error, RuntimeError) or not said.startswith(_OF_A_WORKER):
        return error
    for number in signal.valid_signals():
        by_name = f" is killed by signal: {signal.strsignal(number)}."
        said = said.replace(by_name, f", {_exit(-number)}")
    return _death(said)


class _Watch:
    """Ends the workers of an iterator that waits for them beyond the reach of torch's timeout.

    Entered while a batch is awaited. Nothing may have come for half as long again as the timeout,
    so that torch's own word comes first where it has one.
    """

    def __init__(self, iterator: Any, timeout: float) -> None:
        self.over = threading.Event()
        self.suspects: str | None = None
        self._iterator = weakref.ref(iterator)
        self._timeout = timeout
        self._waits = False
        # Held while the thread looks at the iterator, which whoever waits for it keeps alive: the
        # last reference must not be the thread's, or the workers would end there, at any time.
        self._looking = threading.Lock()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="torchfast-worker-watch", daemon=True
            )
            self._thread.start()
        self._waits = True

    def __exit__(self, *_: object) -> None:
        with self._looking:
            self._waits = False

    def _run(self) -> None:
        seen: object = None
        since = time.monotonic()
        while not self.over.wait(self._timeout / 4):
            with self._looking:
                now = self._progress()
                if now is None or now != seen:
                    seen, since = now, time.monotonic()
                elif time.monotonic() - since > 1.5 * self._timeout:
                    self._end()
                    return

    def _progress(self) -> object:
        """Return what changes with each arrival and each request; None while nobody waits."""
        iterator = self._iterator() if self._waits else None
        return None if iterator is None else (iterator._tasks_outstanding, iterator._send_idx)

    def _end(self) -> None:
        iterator = self._iterator()
        self.suspects = _suspects(iterator)
        _kill_workers(iterator)
        # The last open end for writing: a reader of half a message gets its end of file.
        iterator._worker_result_queue._writer.close()  # type: ignore[union-attr]


def end_workers(iterator: Any) -> None:
    """End the workers of torch's iterator, also such as are stopped or hang, or of one half made.

    torch's own way to do so writes to the workers' queues and sets an event. Either may wait for
    ever: its SIGCHLD handler raises wherever the main thread is, also where that has just taken the
    lock of a queue, and a worker that was killed may have had the event's.
    """
    _forget_workers(iterator)
    iterator._shutdown = True  # for torch it is done
    thread = getattr(iterator, "_pin_memory_thread", None)
    if thread is not None:  # first, while what it reads from is whole
        iterator._pin_memory_thread_done_event.set()
        results = iterator._worker_result_queue
        results.cancel_join_thread()
        _give_back(results)
        with contextlib.suppress(OSError, ValueError):  # it was closed
            results.put((None, None))
        thread.join(timeout=_utils.MP_STATUS_CHECK_INTERVAL)
        results.close()
    _kill_workers(iterator)
    for worker in getattr(iterator, "_workers", ()):
        worker.join(timeout=_ENDS_IN_S)
    for queue in getattr(iterator, "_index_queues", ()):
        queue.cancel_join_thread()
        _give_back(queue)
        queue.close()


def _give_back(queue: Any) -> None:
    """Give back the lock of a queue if an interrupt has left it taken."""
    queue._notempty.acquire(timeout=_LEFT_TAKEN_S)
    queue._notempty.release()


def _forget_workers(iterator: Any) -> None:
    """Take the workers off the list of torch's SIGCHLD handler, or their end is a crash to it."""
    if getattr(iterator, "_worker_pids_set", False):
        _utils.signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        iterator._worker_pids_set = False


def _kill_workers(iterator: Any) -> None:
    _forget_workers(iterator)
    for worker in getattr(iterator, "_workers", ()):
        worker.kill()  # a stopped process ignores SIGTERM


def _is_loss(error: Exception, said: str, iterator: Any) -> bool:
    """Whether an error says that a worker is gone, rather than what the data set raised in one."""
    if isinstance(error, RuntimeError):
        return said.startswith(_LOST)
    # Tensors of a batch that was sent are fetched from the worker, which died in between.
    if not isinstance(error, EOFError | ConnectionError | FileNotFoundError):
        return False
    if said.startswith("Caught "):
        return False
    deadline = time.monotonic() + _DIES_IN_S
    while not _dead(iterator) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(_dead(iterator))


def _suspects(iterator: Any) -> str:
    """Return the worker whose batch is due, as ``1 (pid 1234, is stopped)``; all if unknown."""
    workers = dict(enumerate(iterator._workers))
    task = getattr(iterator, "_task_info", {}).get(getattr(iterator, "_rcvd_idx", None))
    if task and getattr(iterator, "_in_order", True):
        workers = {task[0]: workers[task[0]]}
    return ", ".join(f"{i} (pid {w.pid}, {_state(w.pid)})" for i, w in workers.items())


def _dead(iterator: Any) -> str:
    found = [(i, w.pid, w.exitcode) for i, w in enumerate(iterator._workers) if w.exitcode]
    return ", ".join(f"worker {i} (pid {pid}), {_exit(code)}" for i, pid, code in found)


def _exit(code: int) -> str:
    names = {-s: s.name for s in signal.Signals}
    return f"by {names[code]}" if code in names else f"with exit code {code}"


def _state(pid: int) -> str:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # no such file system, or no such process any more
        return "alive or not, this system does not say"
    return _STATES.get(state, "waits for something")
