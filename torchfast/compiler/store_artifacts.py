"""What torch hands out and takes back: compiled artifacts, as bytes.

``torch.compiler.save_cache_artifacts()`` returns all that this process compiled or took from a
cache **and used**: what it loaded and had no use for is not among it. So what is kept has to be
merged with what was there. Three things about the bytes decide how:

- They are a list of (kind, [(key, content)]). Saving twice in one process appends to the list, and
  the kinds come twice; ``load_cache_artifacts`` makes a dict of it, so **of two saves only the
  second is loaded**. Here the list is read whole, and written with each kind once.
- The content is not the same in two processes that compile the same: times are part of it. So
  content cannot tell what is new; the key can. It is the hash of the graph, of torch's sources and
  of the settings.
- One key may have several contents, for other sizes of a dynamic shape. A second one is kept if
  this process had the first and compiled in spite of it.

Reading and writing the list runs nothing of the contents, which torch unpickles when it uses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

# Of one key, as many as torch recompiles a function by default.
_MOST_CONTENTS: Final = 8

# kind -> key -> contents
Artifacts = dict[str, dict[str, tuple[bytes, ...]]]


@final
@dataclass(frozen=True)
class CacheCounts:
    """How often torch looked for a compiled graph and found one, or not, or could not look.

    Not looked for are graphs that no cache can hold, such as those with operators of one's own that
    do not say how they can be told apart.
    """

    hits: int
    misses: int
    bypasses: int = 0

    def since(self, before: CacheCounts) -> CacheCounts:
        """Return what was counted after ``before``; all of it if the counters were cleared."""
        now = (self.hits, self.misses, self.bypasses)
        then = (before.hits, before.misses, before.bypasses)
        if any(new < old for new, old in zip(now, then, strict=True)):
            return self
        return CacheCounts(*(new - old for new, old in zip(now, then, strict=True)))


class ArtifactSource(Protocol):
    """Where artifacts come from and go to: torch, or a stand-in of a test."""

    def save(self) -> bytes | None:
        """Return what this process compiled or used; None if nothing."""

    def load(self, payload: bytes) -> int | None:
        """Make artifacts known to the compiler; return how many, None if they cannot be read."""

    def counts(self) -> CacheCounts:
        """Return the counters of this process."""

    def switched_off(self) -> str:
        """Return which setting keeps torch from using its caches; empty if none does."""


@final
class TorchArtifacts:
    """torch's own."""

    def save(self) -> bytes | None:
        """Return what this process compiled or used; None if nothing."""
        import torch.compiler

        saved = torch.compiler.save_cache_artifacts()
        return None if saved is None else saved[0]

    def load(self, payload: bytes) -> int | None:
        """Make artifacts known to the compiler; return how many, None if they cannot be read."""
        import torch.compiler

        info = torch.compiler.load_cache_artifacts(payload)
        return None if info is None else sum(map(len, info.artifacts.values()))

    def counts(self) -> CacheCounts:
        """Return the counters of this process."""
        from torch._dynamo.utils import counters

        # A graph of training is looked for as a whole (autograd), then its forward and its backward
        # (fxgraph): where the first finds nothing the other two may still.
        inductor, autograd = counters["inductor"], counters["aot_autograd"]
        return CacheCounts(
            hits=inductor["fxgraph_cache_hit"] + autograd["autograd_cache_hit"],
            misses=inductor["fxgraph_cache_miss"] + autograd["autograd_cache_miss"],
            bypasses=inductor["fxgraph_cache_bypass"] + autograd["autograd_cache_bypass"],
        )

    def switched_off(self) -> str:
        """Return which setting keeps torch from using its caches; empty if none does."""
        import torch._inductor.config as inductor

        if getattr(inductor, "force_disable_caches", False):
            return "torch.compiler.config.force_disable_caches is True"
        if not getattr(inductor, "fx_graph_cache", True):
            return "torch._inductor.config.fx_graph_cache is False"
        return ""


def split(payload: bytes) -> Artifacts | None:
    """Return the artifacts in torch's bytes; None if this torch writes them in another form."""
    try:
        from torch.utils._appending_byte_serializer import AppendingByteSerializer

        most = len(payload)

        def kind(reader: Any) -> tuple[str, list[tuple[str, bytes]]]:
            name = reader.read_str()
            # Bounded: a count that is wrong must not become an endless loop.
            count = min(reader.read_uint64(), most)
            return name, [(reader.read_str(), reader.read_bytes()) for _ in range(count)]

        found: Artifacts = {}
        for name, items in AppendingByteSerializer.to_list(payload, deserialize_fn=kind):
            table = found.setdefault(name, {})
            for key, content in items:
                if content not in table.get(key, ()):
                    table[key] = (*table.get(key, ()), content)
        return found
    except Exception:  # private to torch, so whatever it raises means "not as expected"
        return None


def join(artifacts: Artifacts) -> bytes:
    """Return torch's bytes of artifacts that `split` returned, each kind once."""
    from torch.utils._appending_byte_serializer import AppendingByteSerializer, BytesWriter

    def write(writer: BytesWriter, kind: tuple[str, Mapping[str, tuple[bytes, ...]]]) -> None:
        name, table = kind
        writer.write_str(name)
        writer.write_uint64(sum(map(len, table.values())))
        for key, contents in table.items():
            for content in contents:
                writer.write_str(key)
                writer.write_bytes(content)

    serializer = AppendingByteSerializer(serialize_fn=write)
    serializer.extend(artifacts.items())
    return serializer.to_bytes()


def merged(stored: Artifacts, own: Artifacts, loaded: Artifacts) -> Artifacts:
    """Return what is stored, and of this process's own what is new.

    Args:
        stored: What is on the disk now.
        own: What this process compiled or used.
        loaded: What it had loaded before.
    """
    result = {kind: dict(table) for kind, table in stored.items()}
    for kind, table in own.items():
        into = result.setdefault(kind, {})
        for key, contents in table.items():
            there = into.get(key, ())
            if there and key not in loaded.get(kind, {}):
                continue  # somebody else compiled the same meanwhile
            new = tuple(content for content in contents if content not in there)
            into[key] = (*there, *new)[-_MOST_CONTENTS:]
    return result


def count(artifacts: Artifacts) -> dict[str, int]:
    """Return how many there are of each kind."""
    return {kind: sum(map(len, table.values())) for kind, table in sorted(artifacts.items())}
