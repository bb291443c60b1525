"""From a slow loop to a fast one, a fault at a time, each as the profile named it.

    PYTHONPATH=. python benchmarks/slow_to_fast.py [--size smoke] [--device cpu] [--out FILE]

A small transformer over rows that a data set decodes. The loop begins with what loops collect: a
data set that decodes in the loop's own thread, a loss read at each step, rows picked by a mask, no
graph, float32. Each stage takes one of these out. A stage is profiled, which gives the verdict,
what the device did of the time and how often the host waited; and timed without a profiler, in
turns with the others, which gives the milliseconds. Utilisation is the busy time of the device,
which the trace tells, over those milliseconds: beside a profiler the host is slower, and the device
is not. On a CPU there is no device, and no utilisation.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks import results
from benchmarks.arms import parser_of
from torchfast import Plan, SyncGuard, Trainer, profile

DECODE_S: Final = {"full": 0.0002, "smoke": 0.0}
SHAPES: Final = {"full": (64, 128, 512, 8), "smoke": (4, 8, 32, 1)}  # batch, length, width, layers
STEPS: Final = {"full": 40, "smoke": 2}
VOCABULARY: Final = 1024


class Stage(NamedTuple):
    """A loop, and what it has that the one before had not."""

    name: str
    change: str
    loads_ahead: bool
    picks_by_mask: bool
    reads_loss: bool
    plan: str


STAGES: Final = (
    Stage("as found", "", False, True, True, "eager"),
    Stage("data ahead", "decoded beforehand, trainer.prefetch", True, True, True, "eager"),
    Stage("no mask", "a product with the mask", True, False, True, "eager"),
    Stage("no read", "the loss read at the end", True, False, False, "eager"),
    Stage("one graph", 'plan="exact"', True, False, False, "exact"),
    Stage("fast", 'plan="fast"', True, False, False, "fast"),
)


class Texts(Dataset[tuple[Tensor, Tensor]]):
    """Tokens and weights; to decode a row takes a moment."""

    def __init__(self, count: int, length: int, decode_s: float) -> None:
        self.tokens = torch.randint(VOCABULARY, (count, length))
        self.decode_s = decode_s

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.decode_s:
            time.sleep(self.decode_s)
        return self.tokens[index], torch.tensor(index % 7 / 7)


class Model(nn.Module):
    """A transformer that tells each token by those around it."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        one = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, 0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(one, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, (batch, length, vocabulary)."""
        out: Tensor = self.head(self.layers(self.embed(tokens)))
        return out


def loss_by_mask(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Leave light rows out, by asking the device which they are."""
    tokens, weights = batch
    kept = tokens[weights > 0.1]
    return F.cross_entropy(model(kept).flatten(0, 1), kept.flatten())


def loss_by_product(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Leave light rows out, all sizes fixed."""
    tokens, weights = batch
    losses = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="none")
    kept = (weights > 0.1).to(losses.dtype)
    return (losses.view_as(tokens).mean(1) * kept).sum() / kept.sum()


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield batches for ever."""
    while True:
        yield from loader


class Loop:
    """The training of a stage, a step at a time."""

    def __init__(self, stage: Stage, size: str, device: str) -> None:
        batch, length, width, layers = SHAPES[size]
        torch.manual_seed(0)
        self.stage, self.device = stage, device
        model = Model(width, layers).to(device)
        loss_fn: Callable[..., Tensor] = loss_by_mask if stage.picks_by_mask else loss_by_product
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.trainer = Trainer(model, optimizer, loss_fn, Plan.of(stage.plan))
        texts = Texts(32 * batch, length, 0.0 if stage.loads_ahead else DECODE_S[size])
        self.loader: Iterable[Any] = DataLoader(texts, batch)
        if stage.loads_ahead:
            ready = [
                tuple(t.pin_memory() if device == "cuda" else t for t in b) for b in self.loader
            ]
            self.loader = self.trainer.prefetch(ready)
        self.batches = endless(self.loader)
        self.losses: list[float] = []

    def step(self, batch: Any) -> None:
        """Make one step as the stage does."""
        if not self.stage.loads_ahead:
            batch = tuple(tensor.to(self.device) for tensor in batch)
        loss = self.trainer.step(batch)
        if self.stage.reads_loss:
            self.losses.append(loss.item())

    def time_ms(self, steps: int) -> float:
        """Return milliseconds a step of some steps in a row."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step(next(self.batches))
        if self.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / steps * 1e3

    def look(self) -> dict[str, Any]:
        """Return what a profile and a guard say of the loop."""
        with tempfile.TemporaryDirectory() as folder:
            profiling = profile(folder, steps=8, warmup=8)
            with profiling:
                for batch in profiling.iterate(self.batches):
                    self.step(batch)
            told = profiling.report.to_dict()
        with SyncGuard(device="cuda" if self.device == "cuda" else "cpu") as guard:
            for _ in range(4):
                self.step(next(self.batches))
        waits = guard.report()
        return {
            "verdict": profiling.report.verdict.name,
            "findings": [finding["kind"] for finding in told["findings"]],
            "busy_ms": told["busy_ms"],
            "traced_step_ms": told["step_ms"],
            "host_waits": waits.count / 4,
            "waiting_lines": [f"{s.kind}: {s.source}" for s in waits.syncs[:5]],
        }


def main() -> None:
    """Measure each stage and write it down."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--size", default="full", choices=list(SHAPES))
    args = parser.parse_args()
    loops = [Loop(stage, args.size, args.device) for stage in STAGES]
    steps = STEPS[args.size]
    for loop in loops:
        loop.time_ms(max(steps // 2, 6))  # compiled and captured
    times: dict[str, list[float]] = {loop.stage.name: [] for loop in loops}
    for _ in range(args.rounds):
        for loop in loops:
            times[loop.stage.name].append(loop.time_ms(steps))
    rows = []
    for loop in loops:
        stage, ms = loop.stage, times[loop.stage.name]
        row = {"stage": stage.name, "change": stage.change, "blocks_ms": ms}
        rows.append(row | {"ms": statistics.median(ms)} | loop.look())
        used = rows[-1]["busy_ms"] / rows[-1]["ms"] if args.device == "cuda" else None
        rows[-1]["utilisation"] = used
        shown = "" if used is None else f"  {used:.0%} busy"
        print(f"{stage.name:<12} {rows[-1]['ms']:8.3f} ms{shown}  {rows[-1]['verdict']}")
        loop.trainer.close()
    if args.out is not None:
        settings = {"size": args.size, "rounds": args.rounds, "steps": steps}
        results.write(args.out, {"settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
