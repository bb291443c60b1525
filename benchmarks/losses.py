"""What the loss over a large vocabulary costs: milliseconds and peak memory, forward and backward.

    PYTHONPATH=. python benchmarks/losses.py [--smoke] [--device cpu] [--out FILE]

A step makes the loss of hidden vectors that ask for a gradient, and its backward, under bf16
autocast with an fp32 weight, as in training. The methods are ``F.cross_entropy(F.linear(...))``,
``torch.nn.functional.linear_cross_entropy`` where torch has it, in chunks and without autocast
(which it does not know), and ours; each eager and compiled, and ours in a CUDA graph. They take
turns, and a figure is the median of its turns. Peak memory is what a step allocates beyond what
stands before it: gradients included. "error" is how far the weight's gradient is from one in fp32.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import results
from benchmarks.arms import Arm, parser_of, take_turns
from torchfast import CUDAGraphStep
from torchfast.losses import linear_cross_entropy


class Shape(NamedTuple):
    """Tokens, width and vocabulary."""

    tokens: int
    width: int
    vocabulary: int


SHAPES = {
    "full": {
        "GPT-2": Shape(32 * 1024, 768, 50257),
        "GPT-2, padded": Shape(32 * 1024, 768, 50304),
        "Llama 2": Shape(16384, 2048, 32000),
        "Llama 3": Shape(16384, 2048, 128256),
    },
    "smoke": {"tiny": Shape(128, 16, 301)},
}


class Inputs(NamedTuple):
    """What every method gets."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the loss as two functions make it."""
    with torch.autocast(hidden.device.type, torch.bfloat16):
        return F.cross_entropy(F.linear(hidden, weight), targets)


def ours(chunk_size: Any) -> Loss:
    """Return our loss with a chunk size."""

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, torch.bfloat16):
            return linear_cross_entropy(hidden, weight, targets, chunk_size=chunk_size)

    return loss


def of_torch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of torch's own function, in chunks."""
    options: Any = torch.nn.LinearCrossEntropyOptions()
    low = torch.bfloat16
    return F.linear_cross_entropy(hidden.to(low), weight.to(low), targets, options=options)


class Method(Arm):
    """A way to compute the loss, with a step of its own."""

    def __init__(self, name: str, loss: Loss, inputs: Inputs, form: str) -> None:
        super().__init__(inputs.hidden.device.type)
        self.name, self.inputs = name, inputs
        self.loss = torch.compile(loss, fullgraph=True) if form != "eager" else loss
        started = time.perf_counter()
        self.step()
        self.synchronize()
        self.first_s = time.perf_counter() - started
        self.step()
        self.error = self._error()
        self.peak_bytes = self._peak_bytes()
        self._graph: Any = None
        self.call: Callable[[], object] = self.step
        if form == "graph":
            state = [torch.nn.ParameterList([inputs.hidden, inputs.weight])]
            self._graph = CUDAGraphStep(
                lambda: self.step(), state=state, on_failure="raise", check=False
            )
            self.call = self._graph
            for _ in range(5):
                self._graph()

    def step(self) -> Tensor:
        """Compute the loss and its gradients, anew."""
        hidden, weight, targets = self.inputs
        hidden.grad = weight.grad = None
        loss = self.loss(hidden, weight, targets)
        loss.backward()
        return loss.detach()

    def run(self) -> object:
        """Step, as it is or by its graph."""
        return self.call()

    def _error(self) -> float:
        """Return the distance of the weight's gradient from fp32's, on a part of the classes."""
        hidden, weight, targets = self.inputs
        found = weight.grad
        assert found is not None
        exact = reference(hidden.detach(), weight.detach(), targets)
        part = found[: len(exact)].float()
        return float((part - exact).norm() / exact.norm())

    def _peak_bytes(self) -> int | None:
        if self.device != "cuda":
            return None
        self.inputs.hidden.grad = self.inputs.weight.grad = None
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def row(self, name: str, shape: Shape) -> dict[str, Any]:
        """Return the figures."""
        pool = None if self._graph is None else self._graph.report().counters["pool_bytes"]
        return {
            "name": name,
            **shape._asdict(),
            "method": self.name,
            "ms": statistics.median(self.times_ms),
            "peak_bytes": self.peak_bytes,
            "pool_bytes": pool,
            "first_s": self.first_s,
            "error": self.error,
            "turns_ms": self.times_ms,
        }

    def close(self) -> None:
        """Let go of the graph."""
        if self._graph is not None:
            self._graph.close()


@torch.no_grad()
def reference(hidden: Tensor, weight: Tensor, targets: Tensor, classes: int = 256) -> Tensor:
    """Return the gradient of the first classes' weights in fp32, some rows at a time."""
    hidden, weight = hidden.float(), weight.float()
    exact = torch.zeros(min(classes, len(weight)), hidden.shape[1], device=hidden.device)
    for rows, chosen in zip(hidden.split(1024), targets.split(1024), strict=True):
        p = torch.softmax(rows @ weight.T, -1)
        p[torch.arange(len(rows), device=rows.device), chosen] -= 1
        exact += p[:, : len(exact)].T @ rows
    return exact / len(hidden)


def build(shape: Shape, args: argparse.Namespace) -> list[Method]:
    """Return the methods, each having run."""
    torch.manual_seed(0)
    hidden = torch.randn(shape.tokens, shape.width, device=args.device)
    if args.device == "cuda":
        hidden = hidden.bfloat16()  # as a last norm leaves it under autocast, or a block
    weight = torch.randn(shape.vocabulary, shape.width, device=args.device) * 0.02
    targets = torch.randint(shape.vocabulary, (shape.tokens,), device=args.device)
    inputs = Inputs(hidden.requires_grad_(), weight.requires_grad_(), targets)
    chunk: Any = shape.tokens // 4 if args.smoke else "auto"
    chosen = [("plain", plain, "eager"), ("torchfast", ours(chunk), "eager")]
    if not args.smoke:
        chosen += [("plain", plain, "compiled"), ("torchfast", ours(chunk), "compiled")]
        chosen += [
            (f"torchfast {size}", ours(size), form)
            for size in args.chunk_sizes
            for form in ("eager", "compiled")
        ]
    if hasattr(F, "linear_cross_entropy") and args.device == "cuda":
        chosen.append(("torch", of_torch, "eager"))
    if args.device == "cuda":
        chosen.append(("torchfast", ours(chunk), "graph"))
    return [Method(f"{name} {form}", loss, inputs, form) for name, loss, form in chosen]


def measured(name: str, shape: Shape, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each method."""
    methods = build(shape, args)
    try:
        take_turns(methods, args.rounds, 1 if args.smoke else 5)
        return [method.row(name, shape) for method in methods]
    finally:
        for method in methods:
            method.close()
        torch.compiler.reset()


def main() -> None:
    """Measure every shape, print a table and write the figures."""
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument("--smoke", action="store_true", help="one tiny shape, eager only")
    parser.add_argument("--only", nargs="*", help="names of shapes")
    parser.add_argument("--chunk-sizes", nargs="*", type=int, default=[], help="beside 'auto'")
    args = parser.parse_args()
    rows = []
    print(f"{'shape':<14} {'method':<22} {'ms':>9} {'peak MiB':>9} {'first s':>8}  error")
    for name, shape in SHAPES["smoke" if args.smoke else "full"].items():
        if args.only and name not in args.only:
            continue
        for found in measured(name, shape, args):
            rows.append(found)
            peak = "" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 2**20:,.0f}"
            print(
                f"{name:<14} {found['method']:<22} {found['ms']:>9.3f} {peak:>9} "
                f"{found['first_s']:>8.1f}  {found['error']:.5f}",
                flush=True,
            )
    if args.out is not None:
        settings = {"smoke": args.smoke, "rounds": args.rounds, "chunk_sizes": args.chunk_sizes}
        results.write(args.out, {"settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
