"""What float8 and low-bit state give the Llama of the yardstick: tokens a second, memory, loss.

    PYTHONPATH=. python benchmarks/below_bf16.py [--smoke] [--device cpu] [--groups ...]
        [--methods ...] [--out FILE]

"float8": the step by hand (torchao's layers in the blocks, tensorwise, blocks compiled, all in one
CUDA graph, batches on the device), ours in bf16, and ours in float8 with measured recipes;
"vocabulary": by hand again, and ours with the loss in chunks. "state": fused AdamW beside AdamW
with moments in 8 and 4 bits. The first of a group stays, and each other one takes turns with it,
since three such models do not fit; a figure is the median of its turns. "curves": each plan trains
on its own for --steps on Python's standard library, the same batches in the same order, and losses
are compared with bf16's. On a CPU float8 is emulated, nothing is compiled or captured, and only the
numbers mean anything.

Each row is written as it comes, beside those of earlier runs (`benchmarks.result_rows`). A group,
or a curve (``--groups curves --methods "8 bit"``), is meant to take less than 250 s on an H200.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils._pytree import tree_leaves

from benchmarks.arms import median_and_quartiles
from benchmarks.result_rows import ResultRows
from benchmarks.workloads import llama
from benchmarks.workloads.definition import Batch, Workload
from torchfast import CompileOptions, Float8Options, Plan, Trainer
from torchfast._core.storages import plain_parts
from torchfast.losses import linear_cross_entropy

MAX_GRAD_NORM = 1.0
WARM_UP_STEPS = 12
BLOCKS = CompileOptions(regions="blocks", dynamic=False)


class Method:
    """A way to train, with a model of its own."""

    def __init__(
        self,
        name: str,
        work: Workload,
        build: Callable[[nn.Module], Any],
        batches: Iterator[Batch],
    ) -> None:
        self.name, self.times_ms = name, list[float]()
        torch.manual_seed(0)
        self.losses: list[Tensor] = []
        free()
        before = allocated()
        self.runner = build(work.build())
        self.turn(batches, 2 * WARM_UP_STEPS)  # compiles, measures and captures
        self.times_ms.clear()
        free()
        self.held_bytes = allocated() - before

    def turn(self, batches: Iterator[Batch], steps: int) -> None:
        """Time some steps."""
        drawn = [next(batches) for _ in range(steps)]
        synchronize()
        started = time.perf_counter()
        for batch in drawn:
            loss = self.runner.step(batch)
        synchronize()
        self.times_ms.append((time.perf_counter() - started) / steps * 1e3)
        self.losses.append(loss)

    def row(self, group: str, items: int, reference: Method) -> dict[str, Any]:
        """Return the figures, beside those of the first method, round by round."""
        ms = statistics.median(self.times_ms)
        pairs = zip(self.times_ms, reference.times_ms, strict=True)
        ratio, quartiles = median_and_quartiles([own / other for own, other in pairs])
        return {
            "reference": reference.name,
            "ratio": ratio,
            "ratio_quartiles": quartiles,
            "group": group,
            "method": self.name,
            "ms": ms,
            "items_per_s": items / ms * 1e3,
            "held_bytes": self.held_bytes,
            "turns_ms": self.times_ms,
            "losses": [float(loss) for loss in self.losses],
            **self.runner.notes(),
        }


class Ours:
    """A trainer with a plan, as a user writes it."""

    def __init__(self, work: Workload, args: argparse.Namespace, plan: Plan, loss_fn: Any) -> None:
        self._work, self._args, self._plan, self._loss_fn = work, args, plan, loss_fn
        self.trainer: Trainer | None = None

    def __call__(self, model: nn.Module) -> Ours:
        """Begin to train a model."""
        self.trainer = Trainer(
            model.to(self._args.device),
            partial(torch.optim.AdamW, lr=self._work.lr),
            self._loss_fn,
            self._plan,
            max_grad_norm=MAX_GRAD_NORM,
        )
        return self

    def step(self, batch: Batch) -> Tensor:
        """Train on a batch."""
        assert self.trainer is not None
        return self.trainer.step(batch)

    def close(self) -> None:
        """Let go of the model."""
        assert self.trainer is not None
        self.trainer.close()
        self.trainer = None

    def notes(self) -> dict[str, Any]:
        """Return what the report says, and what the optimizer's state takes."""
        assert self.trainer is not None
        return {
            "state_bytes": state_bytes(self.trainer.optimizer),
            "report": self.trainer.report().to_dict(),
        }


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return what the state of an optimizer takes, of few bits or many."""
    tensors = tree_leaves(list(optimizer.state.values()))
    parts = (part for t in tensors if isinstance(t, Tensor) for part in plain_parts(t))
    memory = (part.untyped_storage() for part in parts)
    return sum({held.data_ptr(): held.nbytes() for held in memory}.values())


class ByHand:
    """The same in float8 as a person writes it, around torchao."""

    def __init__(self, work: Workload, args: argparse.Namespace) -> None:
        self._work, self._device = work, torch.device(args.device)

    def __call__(self, model: nn.Module) -> ByHand:
        """Begin to train a model."""
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        on_gpu = self._device.type == "cuda"
        config = Float8LinearConfig.from_recipe_name("tensorwise")
        self.model: Any = convert_to_float8_training(
            model.to(self._device),
            config=config if on_gpu else dataclasses.replace(config, emulate=True),
            module_filter_fn=lambda module, name: (
                "blocks" in name and isinstance(module, nn.Linear)
            ),
        )
        if on_gpu:
            for block in self._work.regions(self.model):
                block.compile(dynamic=False)
        self.optimizer: Any = torch.optim.AdamW(
            self.model.parameters(), lr=self._work.lr, fused=True, capturable=on_gpu
        )
        self._graph: Any = None
        self._inputs: Any = None
        self._loss: Any = None
        self._num_steps = 0
        return self

    def step(self, batch: Batch) -> Tensor:
        """Train on a batch: through the graph, once it is there."""
        if self._device.type != "cuda":
            return self._run(batch)
        if self._num_steps == 0:
            self._inputs = tuple(tensor.clone() for tensor in batch)
            self._stream = torch.cuda.Stream()
        self._num_steps += 1
        for target, source in zip(self._inputs, batch, strict=True):
            target.copy_(source)
        if self._graph is None and self._num_steps > WARM_UP_STEPS:
            self.optimizer.zero_grad(set_to_none=True)
            self._graph = torch.cuda.CUDAGraph()
            with (
                torch.cuda.graph(self._graph, stream=self._stream),
                torch.compiler.set_stance("fail_on_recompile"),
            ):
                self._loss = self._run(self._inputs)
        if self._graph is not None:
            self._graph.replay()
            return self._loss.clone()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self._run(self._inputs)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _run(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            loss = self._work.loss_fn(self.model, batch)
        loss.backward()
        clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        return loss.detach()

    def close(self) -> None:
        """Let go of the model."""
        self._graph = self.model = self.optimizer = self._inputs = self._loss = None

    def notes(self) -> dict[str, Any]:
        """Return nothing: what is written by hand has no report."""
        return {}


def chunked_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss without the logits of all tokens at once."""
    tokens, targets = batch
    net: Any = model
    return linear_cross_entropy(net.hidden(tokens), net.output_weight, targets)


def plans(args: argparse.Namespace) -> dict[str, Plan]:
    """Return the plans that are compared, by name."""
    on_gpu = args.device == "cuda"
    float8 = Float8Options(watch_at=()) if on_gpu else emulated()
    base = Plan(precision="bf16", optimizer="fused")
    if on_gpu:
        base = base.replace(compile=BLOCKS, cuda_graph=True)
    return {
        "bf16": base,
        "float8": base.replace(precision=float8),
        "float8 tensorwise": base.replace(
            precision=dataclasses.replace(float8, recipe="tensorwise", smallest=16)
        ),
        "8 bit": base.replace(optimizer="adamw8bit"),
        "4 bit": base.replace(optimizer="adamw4bit"),
        "float8, 8 bit": base.replace(precision=float8, optimizer="adamw8bit"),
    }


def emulated() -> Float8Options:
    """Return float8 as a CPU computes it."""
    return Float8Options(recipe="tensorwise", smallest=16, emulate=True, watch_at=())


def groups(args: argparse.Namespace, work: Workload) -> dict[str, dict[str, Any]]:
    """Return what takes turns, by group and name."""
    known = plans(args)

    def ours(plan: str, loss_fn: Any = work.loss_fn) -> Ours:
        return Ours(work, args, known[plan], loss_fn)

    return {
        "float8": {
            "by hand, float8": ByHand(work, args),
            "torchfast bf16": ours("bf16"),
            "torchfast float8": ours("float8"),
        },
        "vocabulary": {
            "by hand, float8": ByHand(work, args),
            "torchfast float8, loss in chunks": ours("float8", chunked_loss),
        },
        "state": {
            "fused AdamW": ours("bf16"),
            "8 bit": ours("8 bit"),
            "4 bit": ours("4 bit"),
        },
    }


def text_batches(work: Workload, steps: int, device: str) -> Iterator[Batch]:
    """Yield batches of the bytes of Python's standard library, the same in every run."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [*sorted(root.glob("*.py")), *sorted(root.glob("[a-s]*/*.py"))]
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    tokens, _ = work.batches()[0]
    most = int(torch.stack([t.max() for t, _ in work.batches()]).max()) + 1
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(
            len(text) - tokens.shape[1] - 1, (len(tokens), 1), generator=generator
        )
        drawn = text[starts + torch.arange(tokens.shape[1] + 1)].long().remainder(max(most, 64))
        yield drawn[:, :-1].to(device), drawn[:, 1:].to(device)


def curve(name: str, plan: Plan, work: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Return the losses of a plan on real text."""
    torch.manual_seed(0)
    ours = Ours(work, args, plan, work.loss_fn)(work.build())
    losses = [ours.step(batch) for batch in text_batches(work, args.steps, args.device)]
    row = {"group": "curves", "method": name, "losses": [float(x) for x in losses], **ours.notes()}
    ours.close()
    return row


def measured(
    group: str, every: dict[str, Any], work: Workload, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield a row for the first method of a group, and for each that is asked for beside it."""
    batches = [tuple(t.to(args.device) for t in batch) for batch in work.batches()]
    source = itertools.cycle(batches)
    (first, build), *others = every.items()
    reference = Method(first, work, build, source)
    try:
        if is_wanted(first, args):
            for _ in range(args.rounds):
                reference.turn(source, args.turn_steps)
            yield reference.row(group, work.items_per_step, reference)
        for name, build in others:
            if not is_wanted(name, args):
                continue
            reference.times_ms.clear()
            method = Method(name, work, build, source)
            try:
                for number in range(args.rounds):
                    # Whoever is first is another one each time.
                    for one in (reference, method)[:: -1 if number % 2 else 1]:
                        one.turn(source, args.turn_steps)
                yield method.row(group, work.items_per_step, reference)
            finally:
                method.runner.close()
                del method
                free()
    finally:
        reference.runner.close()
        torch.compiler.reset()
        free()


def allocated() -> int:
    """Return the bytes that tensors hold on the device; 0 on a CPU, which does not say."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free() -> None:
    """Give back what nothing holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    """Measure the groups asked for, print a table and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    names = ["float8", "vocabulary", "state", "curves"]
    parser.add_argument("--device", default=default, choices=["cuda", "cpu"])
    parser.add_argument("--smoke", action="store_true", help="the tiny model")
    parser.add_argument("--groups", nargs="*", default=names, choices=names)
    parser.add_argument("--methods", nargs="*", help="of these names only; all, if left out")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turn-steps", type=int, default=10)
    parser.add_argument("--steps", type=int, default=500, help="of each curve")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    work = llama.workload("llama", "smoke" if args.smoke else "full")
    print(work.title)
    settings = {"smoke": args.smoke, "rounds": args.rounds, "steps": args.steps}
    rows = ResultRows(args.out, ("group", "method"), settings)
    for group, every in groups(args, work).items():
        if group not in args.groups or not any(is_wanted(name, args) for name in every):
            continue
        for row in measured(group, every, work, args):
            rows.add(row)
            print(
                f"{group:<12}{row['method']:<34}{row['ms']:>9.2f} ms "
                f"{row['items_per_s']:>10,.0f} tokens/s {row['held_bytes'] / 2**30:>7.1f} GiB "
                f"{row['ratio']:>7.3f}",
                flush=True,
            )
    for name, plan in plans(args).items() if "curves" in args.groups else ():
        if is_wanted(name, args):
            row = curve(name, plan, work, args)
            rows.add(row)
            free()
            losses = row["losses"]
            end = statistics.fmean(losses[-max(1, len(losses) // 10) :])
            print(f"{'curves':<12}{name:<34}{end:>9.4f}", flush=True)


def is_wanted(name: str, args: argparse.Namespace) -> bool:
    """Whether a method was asked for."""
    return args.methods is None or name in args.methods


if __name__ == "__main__":
    main()
