"""Compiled code kept on disk, so that the next run of the same training starts without compiling.

The mechanism: what ``torch.compile`` built in this process can be had as bytes and given to another
process before it compiles (torch's mega-cache). Dynamo traces the Python code in any case; what is
saved is what follows: joint graph, code generation, Triton's and the autotuner's work. On CUDA this
is most of the time, minutes with ``max-autotune``. On the CPU the C++ code is kept, but not what
the C++ compiler made of it, so less is saved.

It helps where the next process starts with nothing: another node or container, a temporary folder
that was cleared, a queue that starts jobs anywhere. On the same machine torch's own cache
(``TORCHINDUCTOR_CACHE_DIR``, by default under ``/tmp``) does the same, and this adds nothing.

**What is in the folder is code, and is run as this user.** So the folder is named by the user and
never chosen here, and must belong to this user and be writable by nobody else; files likewise, and
no symbolic links. Everything is checked on what was opened, and the SHA-256 before a byte reaches
torch. This keeps out other users and accidents. It does not keep out who can already write as this
user: a file with the right hash is trusted. Never point this at a folder that was downloaded.

Whatever is wrong with folder or file, nothing is raised: it is left alone with the reason, said
once, and the training compiles as it would have without. ``load`` goes before the first compile,
``save`` after the first step; ``outcome`` tells by torch's counters whether anything was of use.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal, final

from torchfast._core.arguments import check_folder, check_int, check_positive, explain_keywords
from torchfast._core.version import __version__
from torchfast.compiler.store_artifacts import (
    Artifacts,
    ArtifactSource,
    CacheCounts,
    TorchArtifacts,
    count,
    join,
    merged,
    split,
)
from torchfast.compiler.store_contents import ENTRY, evict, touch, utc_now
from torchfast.compiler.store_entry import (
    EntryHeader,
    differing,
    encode,
    read_header,
    read_payload,
)
from torchfast.compiler.store_files import StoreFolder, Unusable
from torchfast.compiler.store_key import StoreKey

logger = logging.getLogger(__name__)

Status = Literal[
    # of load and outcome
    "loaded",
    "hit",
    "miss",
    "incompatible",
    "ignored",
    "loaded but nothing was used",
    # of save
    "saved",
    "nothing new",
    "nothing compiled",
    "skipped",
    "failed",
]
_WARNED: Final = ("incompatible", "ignored", "failed", "loaded but nothing was used")
_TOUCH_WAIT_S: Final = 0.5


@final
@dataclass(frozen=True, kw_only=True)
class CacheOutcome:
    """What became of loading or saving.

    Attributes:
        status: In a word. Of loading: ``"loaded"`` (nothing was compiled since), ``"hit"``,
            ``"miss"``, ``"incompatible"`` (there is an entry of this work for another machine),
            ``"ignored"`` or ``"loaded but nothing was used"``. Of saving: ``"saved"``,
            ``"nothing new"``, ``"nothing compiled"``, ``"skipped"`` (somebody else writes) or
            ``"failed"``.
        detail: The reason, or what was found.
        num_artifacts: How many artifacts were loaded, or are in the file now.
        num_bytes: Their size.
        seconds: How long it took.
    """

    status: Status
    detail: str = ""
    num_artifacts: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        """Return it as a line."""
        return f"{self.status}: {self.detail}" if self.detail else self.status


@final
class CacheStore:
    """A folder of compiled artifacts.

    Args:
        folder: Where; made when first written to. It must be named: what is in it will be run.
        max_bytes: What all entries may take together; the least recently used go first.
        lock_wait_s: How long to wait while another process of this node writes; it is skipped
            then, and what this process compiled is saved another time.
        artifacts: Where artifacts come from and go to, torch by default.

    Raises:
        TypeError: ``folder`` is no path, or another argument is of the wrong type.
        ValueError: ``folder`` is empty, a file or begins with ``~``, or a number is too small.

    Synchronizes: Never.

    Example:
        >>> import tempfile
        >>> from torch import nn
        >>> from torchfast.compiler.store_key import store_key
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = CacheStore(folder)
        ...     print(store.load(store_key(nn.Linear(2, 3))))
        miss: no entry
    """

    @explain_keywords
    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        max_bytes: int = 8 << 30,
        lock_wait_s: float = 5.0,
        artifacts: ArtifactSource | None = None,
    ) -> None:
        # Absolute at once: the working directory may change or go.
        self.folder = Path(os.path.abspath(check_folder("folder", folder, "cache")))
        self.max_bytes = check_int("max_bytes", max_bytes, minimum=1)
        self._lock_wait_s = check_positive("lock_wait_s", lock_wait_s)
        self._source: ArtifactSource = TorchArtifacts() if artifacts is None else artifacts
        self._loaded: Artifacts = {}
        self._last = CacheOutcome(status="miss", detail="nothing was loaded")
        self._before = CacheCounts(0, 0)
        self._warned: set[str] = set()

    # -- In a training -------------------------------------------------------------------------

    def load(self, key: StoreKey) -> CacheOutcome:
        """Make what is stored under a key known to the compiler. Never raises.

        Goes before the first compile: what is compiled already stays as it is.
        """
        self._last = self._guarded("ignored", lambda: self._load(key))
        with suppress(Exception):
            self._before = self._source.counts()
        return self._last

    def outcome(self) -> CacheOutcome:
        """Return what became of the last `load`, by torch's counters since then. Never raises.

        They count all graphs of the process, and torch's own cache on this machine counts as well.
        """
        if self._last.status != "loaded":
            return self._last
        return self._guarded("ignored", self._verified)

    def save(self, key: StoreKey) -> CacheOutcome:
        """Store what this process compiled, together with what is stored already. Never raises.

        All that the process compiled, for whichever model: torch does not tell them apart. To be
        called from the thread that compiles, when nothing is being compiled.
        """
        return self._guarded("failed", lambda: self._save(key))

    def __repr__(self) -> str:
        """Return the call that makes this store."""
        return f"CacheStore({os.fspath(self.folder)!r}, max_bytes={self.max_bytes})"

    # -- Steps ---------------------------------------------------------------------------------

    def _load(self, key: StoreKey) -> CacheOutcome:
        self._loaded = {}
        reason = self._source.switched_off()
        if reason:
            return CacheOutcome(status="ignored", detail=f"torch's caches are off: {reason}")
        try:
            folder = StoreFolder(self.folder)
        except FileNotFoundError:
            return CacheOutcome(status="miss", detail="no entry")
        with folder:
            try:
                header, payload = _read(folder, key.name)
            except FileNotFoundError:
                return _missing(folder, key)
            difference = differing(key.machine, header.machine)
            if difference:
                return CacheOutcome(status="incompatible", detail=f"made with {difference}")
            difference = differing(key.work, header.work)
            if difference:
                return CacheOutcome(status="ignored", detail=f"{key.name} is of {difference}")
            found = self._source.load(payload)
            if found is None:
                return CacheOutcome(
                    status="ignored", detail=f"torch cannot read what is in {key.name}; remove it"
                )
            self._loaded = split(payload) or {}
            # A folder that can only be read keeps no account.
            with suppress(OSError, Unusable), folder.locked(_TOUCH_WAIT_S) as lock:
                if lock != "busy":
                    touch(folder, key.name, used=True)
        return CacheOutcome(status="loaded", num_artifacts=found, num_bytes=len(payload))

    def _verified(self) -> CacheOutcome:
        now = self._source.counts().since(self._before)
        if now == CacheCounts(0, 0, 0):
            return self._last
        found = f"{now.hits} of {now.hits + now.misses} looked up were found"
        if now.bypasses:
            found += f", and {now.bypasses} cannot be in a cache"
        if now.hits:
            return replace(self._last, status="hit", detail=found)
        detail = f"{found}; the model or what it is given is built otherwise than it looks"
        return replace(self._last, status="loaded but nothing was used", detail=detail)

    def _save(self, key: StoreKey) -> CacheOutcome:
        own = self._source.save()
        if own is None:
            return CacheOutcome(status="nothing compiled")
        with StoreFolder(self.folder, create=True) as folder:
            # Before the lock, which takes a file: a folder that can only be read may have it all.
            outcome, *_ = self._to_be_written(folder, key, own)
            if outcome.status == "nothing new":
                return outcome
            with folder.locked(self._lock_wait_s) as lock:
                if lock == "busy":
                    return CacheOutcome(
                        status="skipped", detail="another process of this node is writing"
                    )
                if lock == "held":
                    folder.clean()
                return self._write(folder, key, own)

    def _to_be_written(
        self, folder: StoreFolder, key: StoreKey, own: bytes
    ) -> tuple[CacheOutcome, bytes, dict[str, int]]:
        """Return what is to come of it, the payload, and how many artifacts of each kind it has."""
        stored = _stored(folder, key)
        payload, artifacts = self._joined(stored, own)
        counts = count(artifacts or {})
        outcome = CacheOutcome(
            status="nothing new" if payload == stored else "saved",
            num_artifacts=sum(counts.values()),
            num_bytes=len(payload),
        )
        return outcome, payload, counts

    def _write(self, folder: StoreFolder, key: StoreKey, own: bytes) -> CacheOutcome:
        # Again, as another process may have written meanwhile.
        whole, payload, counts = self._to_be_written(folder, key, own)
        if whole.status == "nothing new":
            return whole
        header = EntryHeader(
            work=dict(key.work),
            machine=dict(key.machine),
            artifacts=counts,
            payload_bytes=len(payload),
            payload_sha256=sha256(payload).hexdigest(),
            written_at=utc_now(),
            torchfast=__version__,
        )
        pieces = encode(header, payload)
        if sum(map(len, pieces)) > self.max_bytes:
            detail = f"it takes {sum(map(len, pieces))} bytes, and max_bytes is {self.max_bytes}"
            return replace(whole, status="failed", detail=detail)
        folder.write(key.name, pieces)
        with suppress(OSError):  # the entry is there; it only counts as used long ago
            touch(folder, key.name, used=False)
        evict(folder, self.max_bytes, keep=key.name)
        return whole

    def _joined(self, stored: bytes | None, own: bytes) -> tuple[bytes, Artifacts | None]:
        """Return what is to be on the disk: ``stored`` itself if there is nothing new."""
        mine = split(own)
        theirs = {} if stored is None else split(stored)
        if mine is None or theirs is None:
            # Bytes of a form that is not known: all or nothing. What torch cannot read, where it
            # reads ours, is of no use to anybody.
            if theirs is None and mine is not None:
                return own, None
            new = self._source.counts().since(self._before).misses > 0
            return (own if new or stored is None else stored), None
        artifacts = merged(theirs, mine, self._loaded)
        if stored is not None and artifacts == theirs:
            return stored, artifacts
        return join(artifacts), artifacts

    def _guarded(
        self, status: Literal["ignored", "failed"], step: Callable[[], CacheOutcome]
    ) -> CacheOutcome:
        """Run a step whose every failure is an outcome, and say once what went wrong."""
        start = time.perf_counter()
        try:
            outcome = step()
        except Unusable as error:
            outcome = CacheOutcome(status=status, detail=str(error))
        except OSError as error:
            reason = error.strerror or str(error)
            outcome = CacheOutcome(status=status, detail=f"{self.folder}: {reason}")
        except Exception as error:  # a cache may never end a training
            outcome = CacheOutcome(status=status, detail=f"{type(error).__name__}: {error}")
        outcome = replace(outcome, detail=_printable(outcome.detail))
        if outcome.status in _WARNED and str(outcome) not in self._warned:
            self._warned.add(str(outcome))
            folder = _printable(os.fspath(self.folder))
            if status == "failed":
                logger.warning(
                    "what was compiled is not kept in the compile cache in %s (%s); the training "
                    "goes on, and the next run compiles it again",
                    folder,
                    outcome,
                )
            else:
                logger.warning(
                    "the compile cache in %s is of no use here (%s); the training goes on and "
                    "compiles as without a cache",
                    folder,
                    outcome,
                )
        return replace(outcome, seconds=time.perf_counter() - start)


# -- One entry -------------------------------------------------------------------------------------


def _read(folder: StoreFolder, name: str) -> tuple[EntryHeader, bytes]:
    with folder.read(name) as file:
        header = read_header(file, name)
        return header, read_payload(file, header, name)


def _stored(folder: StoreFolder, key: StoreKey) -> bytes | None:
    """Return what is stored under a key; None if nothing of it is worth keeping."""
    try:
        header, payload = _read(folder, key.name)
    except (OSError, Unusable):
        return None
    same = header.work == dict(key.work) and header.machine == dict(key.machine)
    return payload if same else None


def _missing(folder: StoreFolder, key: StoreKey) -> CacheOutcome:
    """Say why there is no entry: there is none of this work, or only for other machines."""
    for name in folder.names():
        if not (ENTRY.match(name) and name.startswith(key.work_prefix)):
            continue
        with suppress(OSError, Unusable), folder.read(name) as file:
            machine = read_header(file, name).machine
            # That of another rank of this machine is nothing to be told.
            if machine | {"device": ""} != {**key.machine, "device": ""}:
                difference = differing(key.machine, machine)
                return CacheOutcome(status="incompatible", detail=f"made with {difference}")
    return CacheOutcome(status="miss", detail="no entry")


def _printable(text: str) -> str:
    # A path need not be text; a log file would not take it.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
