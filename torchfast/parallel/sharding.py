"""What a step does about there being several ranks, behind one face.

A step asks the same of it whether it trains alone, with replicas or with shards: to run the forward
of a micro-batch, and to bring a number to what it is over all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from torchfast._core.collectives import Collectives
from torchfast._core.decisions import Decision
from torchfast._core.errors import PlanError
from torchfast._core.local import whole
from torchfast._core.no_context import NO_CONTEXT
from torchfast.parallel.buffers import Buffers
from torchfast.parallel.likeness import (
    check_alike,
    check_alike_optimizers,
    difference,
    number_of,
)
from torchfast.parallel.meshes import check_mesh
from torchfast.parallel.meta_device import (
    check_initialization,
    has_no_memory,
    is_on_meta,
    materialize,
)
from torchfast.parallel.options import ShardOptions, shard_decision
from torchfast.parallel.ranks import Ranks, largest_over_ranks, mean_over_ranks
from torchfast.parallel.replicated import BUCKETS_MB, ReplicatedModel
from torchfast.parallel.seeds import part_seeds
from torchfast.parallel.shared_try import SharedTry
from torchfast.parallel.tuning import Tuned, tune

if TYPE_CHECKING:
    from torchfast.parallel.fully_sharded import ShardedModel
    from torchfast.parallel.last_words import LastWords

logger = logging.getLogger(__name__)

# What a rank runs that others do not, it runs in most steps.
_NOTED_FIRST, _NOTED_EVERY = 4, 128


@final
class Sharding:
    """A model on the ranks of a run.

    Args:
        model: What is trained.
        options: How; None, as one rank does, changes nothing.
        ranks: Where.
        device: This rank's.
        gather_dtype: See `ShardedModel`.

    Attributes:
        device: As given.
        shared: What ends a step on all ranks where one runs out of memory.

    Raises:
        PlanError: The model cannot be sharded so.

    Numerics: The gradient is the mean of the ranks' gradients, as of one batch made of all theirs.
    Synchronizes: In `apply`.
    """

    def __init__(
        self,
        model: nn.Module,
        options: ShardOptions | None,
        ranks: Ranks,
        device: torch.device,
        gather_dtype: torch.dtype | None = None,
    ) -> None:
        self.ranks = ranks
        self._model, self._options, self.device = model, options, device
        self._replicated: ReplicatedModel | None = None
        self._sharded: ShardedModel | None = None
        self._seeds: str | None = None
        self._names: list[str] = []  # of the metrics, as all ranks have them
        self._tuned: Tuned[Any] | None = None
        self._num_counted = 0  # steps
        self.shared = SharedTry(ranks.group)
        self.is_on = options is not None and ranks.are_many
        # Entered around the forwards and backwards of a step.
        self.around_gradients: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.collectives = Collectives()  # of forwards and backwards, for whoever times them
        self._is_on_meta = has_no_memory(model) if options is None else is_on_meta(model)
        if self._is_on_meta:
            if options is None:
                raise PlanError(
                    f"{type(model).__name__} was built on the meta device and has no memory; give "
                    "Plan(shard=...), which fills such a model on one rank too, or call "
                    "to_empty(device=...) and fill it"
                )
            check_initialization(model, options.initialize)
        if options is None or not self.is_on:
            return
        if options.is_sharded:
            from torchfast.parallel.fully_sharded import ShardedModel  # takes long to import

            ask = self.shared.ask
            self._sharded = ShardedModel(model, options, ranks, device, gather_dtype, ask)
            self.collectives.issued_by(self._sharded.observe)
        else:
            check_mesh(options, ranks, device)
            self._replicated = ReplicatedModel(model, options, ranks.group, self.shared)
            self.collectives.issued_by(self._replicated.observe)
        self.shared.model = self._sharded or self._replicated

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has a part of the model only."""
        return self._sharded is not None

    @property
    def needs_factory(self) -> str | None:
        """Why the optimizer must be built behind `apply`; None if it need not."""
        if self._options is None:
            return None
        if not self._options.is_sharded:
            what = "a model of the meta device gets other parameters with its memory"
            return what if self._is_on_meta else None
        # One rank changes nothing, but a script must not fail only once it runs on many.
        return f"shard={self._options.strategy!r} replaces the model's parameters"

    def build_on(self, stream: Callable[[], AbstractContextManager[None]]) -> None:
        """Build what averages gradients in such a context: on the stream of a capture."""
        if self._replicated is not None:
            self._replicated.stream = stream

    def check_alike(self, settings: Mapping[str, object]) -> None:
        """Raise on all ranks unless these, and the layouts of their models, are the same on each.

        Raises:
            PlanError: They are not.
        """
        if self.is_on:
            check_alike(self.ranks.group, self._model, settings)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise on all ranks unless it is the same on each, over the same parameters.

        Raises:
            PlanError: It is not.
        """
        if self.is_on:
            check_alike_optimizers(self.ranks.group, self._model, optimizer)

    def apply(self) -> None:
        """Shard the model, and give each rank random numbers of its own."""
        if self._is_on_meta and self._sharded is None and self._options is not None:
            materialize(self._model, self.device, self._options.initialize)
        if not self.is_on:
            return
        if self._sharded is not None:
            self._sharded.apply()
        if self._replicated is not None:
            self._replicated.apply()
        self._seeds = part_seeds(self.ranks, self.device)

    @property
    def is_undecided(self) -> bool:
        """Whether `decide` has something to find out."""
        is_asked = self._options is not None and self._options.is_measured
        return self.is_on and is_asked and self._tuned is None

    def decide(self, work: Callable[[], object]) -> None:
        """Measure what is to be measured.

        Args:
            work: The forward and backward of the first batch.
        """
        group, device = self.ranks.group, self.device
        if self._replicated is not None:
            self._tuned = tune(BUCKETS_MB, self._replicated.use_buckets, work, group, device)
        elif self._sharded is not None:
            from torchfast.parallel.fully_sharded import DEPTHS

            self._tuned = tune(DEPTHS, self._sharded.use_depth, work, group, device)

    @property
    def are_many(self) -> bool:
        """Whether several ranks train the model together."""
        return self.is_on

    @property
    def is_first(self) -> bool:
        """Whether this rank says what is said once."""
        return self.ranks.is_first

    def all_agree(self, yes: bool) -> bool:
        """Return whether all ranks say yes. Synchronizes: The ranks' hosts, not the device."""
        return self.ranks.all_agree(yes)

    def check_counts(self, count: int, *, are_even: bool) -> None:
        """Raise on all ranks unless they take a step of equally many micro-batches.

        Shards are gathered in each of them: a rank that has one more would wait for the others.

        Args:
            count: How many this one takes.
            are_even: Whether a loader of all ranks deals them out, so that they are. It is said
                all the same, for a rank that has others, but not waited for.

        Raises:
            ValueError: They do not.

        Synchronizes: The ranks' hosts, not the device, under ``"fsdp"`` and ``"hsdp"``; unless
            ``are_even``.
        """
        if self._sharded is None:
            return
        each = self.ranks.group.each(count)
        if are_even or len(set(counts := each.wait())) == 1:
            return
        raise ValueError(
            f"the ranks were given different numbers of micro-batches for a step (by rank: "
            f"{', '.join(map(str, counts))}), and shards are gathered in each one on all ranks; "
            "give all ranks equally many, as trainer.prefetch(loader) does"
        )

    def check_same_parts(self) -> None:
        """Raise behind some steps if the ranks have used different parts of the model in it.

        Raises:
            PlanError: They have.

        Synchronizes: The ranks' hosts, not the device, under ``"fsdp"`` and ``"hsdp"``: in the
            first steps and some later ones.
        """
        sharded = self._sharded
        if sharded is None:
            return
        if sharded.is_noted and (found := difference(self.ranks.group, sharded.noted)):
            raise PlanError(
                f"the ranks used different parts of the model in a step ({found}), and shards are "
                "gathered and reduced on all ranks at once, so they trained with each other's; use "
                "the same parts in the same order on all ranks, without a branch on what each "
                "draws or is given, or take shard='ddp' with unused_parameters=True"
            )
        self._num_counted += 1
        sharded.begin_step(self._num_counted)
        sharded.noted = []
        sharded.is_noted = (
            self._num_counted <= _NOTED_FIRST or self._num_counted % _NOTED_EVERY == 0
        )

    def shard_twin(self, twin: nn.Module) -> None:
        """Shard a copy of the model, made before `apply`, as the model is."""
        if self._sharded is not None:
            self._sharded.shard_twin(twin)

    def run(self, call: Callable[[], Any], *, is_last: bool) -> Any:
        """Run the forward of a micro-batch; the gradients of the ``is_last`` one are reduced."""
        if self._replicated is not None:
            return self._replicated.run(call, is_last=is_last)
        if self._sharded is not None:
            return self._sharded.run(call, is_last=is_last)
        return call()

    def end_backward(self) -> None:
        """Do what is left behind the last backward, so that all gradients are averaged.

        Raises:
            PlanError: Some cannot be.
        """
        if self._replicated is not None:
            self._replicated.end_backward()
        if self._sharded is not None:
            self._sharded.end_backward()

    def after_failure(self) -> None:
        """Make the model ready for another step, where one has failed on all ranks alike.

        Also where a capture has: on all ranks, whichever could not go on with it.
        """
        self.close_pass()
        if self._sharded is not None:
            self._sharded.forget_used()
        if self._replicated is not None:
            self._replicated.after_failure()

    def close_pass(self) -> None:
        """End what a forward or a backward of this rank has left in the middle."""
        if self._sharded is not None:
            self._sharded.close_pass()

    def heard(self) -> AbstractContextManager[None]:
        """Enter it around all that ranks do together, so that an error of one is told by all."""
        words = self.ranks.last_words if self.is_on else None
        return NO_CONTEXT if words is None else self._heard_by(words)

    @contextmanager
    def _heard_by(self, words: LastWords) -> Iterator[None]:
        with words.heard():
            words.used.begin(self._sharded)
            try:
                yield
            except BaseException:
                self.after_failure()
                raise

    def check_scaled(self) -> None:
        """Raise if the gradients cannot be scaled, as fp16 scales them.

        Raises:
            PlanError: They cannot.
        """
        if self._sharded is not None:
            self._sharded.check_scaled()

    def whole_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of a sharded model that every rank has whole."""
        return [] if self._sharded is None else self._sharded.whole_parameters()

    def mixed(self) -> AbstractContextManager[Any]:
        """Return the context in which whole and sharded tensors may stand in one list."""
        return nullcontext() if self._sharded is None else self._sharded.mixed()

    def whole(self, call: Callable[[], Any], model: nn.Module) -> Any:
        """Run a forward of the model, or of its twin, that no backward follows."""
        return call() if self._sharded is None else self._sharded.whole(call, model)

    def send_buffers(self, *models: nn.Module) -> None:
        """Make the buffers of these what they are on the first rank, whose are saved."""
        if self.is_on:
            Buffers(*models, device=self.device).send_from_first()

    def clip(self, limit: float) -> Tensor:
        """Clip the model's gradients by their norm over all ranks, and return it."""
        if self._sharded is None:
            return clip_grad_norm_(self._model.parameters(), limit)
        from torchfast.parallel.clipping import clip_sharded

        return clip_sharded(self._model.parameters(), limit)

    def gradients(self, loss: Tensor) -> list[Tensor]:
        """Run a backward that no update follows; shards are reduced, what is whole is not.

        The gradients of shards lie in ``.grad`` then, and are the caller's to put away.
        """
        trained = [p for p in self._model.parameters() if p.requires_grad]
        if self._sharded is not None:
            self._sharded.reduce_gradients()
            loss.backward()
            self._sharded.end_backward()
            return [p.grad for p in trained if p.grad is not None]
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        # All ranks the same ones, for what follows.
        return [
            torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)
        ]

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm, over all ranks, of what `gradients` has found."""
        if self._sharded is not None:
            from torchfast.parallel.clipping import sharded_norm

            return sharded_norm(self._model.parameters())
        norms = [torch.linalg.vector_norm(self.mean(gradient)) for gradient in gradients]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a number over the ranks, on the device."""
        return mean_over_ranks(value) if self.is_on else value

    def means(self, values: Mapping[str, Tensor | float]) -> dict[str, Tensor | float]:
        """Return the means of scalars over the ranks, brought together at once, on the device.

        Raises:
            ValueError: The ranks have other names.

        Synchronizes: The ranks' hosts, not the device, where the names are others than before.
        """
        if not self.is_on:
            return dict(values)
        names = sorted(values)  # a rank may have made its dict in another order
        self._check_names(names)
        scalars = [
            whole(value.detach()).to(self.device, torch.float32).reshape(())
            if isinstance(value, Tensor)
            else torch.full((), float(value), device=self.device)
            for value in map(values.__getitem__, names)
        ]
        means = dict(zip(names, mean_over_ranks(torch.stack(scalars)).unbind(), strict=True))
        return {name: means[name] for name in values}

    def _check_names(self, names: list[str]) -> None:
        """Raise unless all ranks have these; waited for where this rank's own are others."""
        each = self.ranks.group.each(number_of(names))
        if names == self._names:
            return
        if len(set(each.wait())) > 1:
            raise ValueError(
                f"the ranks have different metrics (here: {', '.join(names)}), whose means over "
                "the ranks cannot be told; loss_fn must return the same names on all ranks"
            )
        self._names = names

    def any(self, flag: Tensor) -> Tensor:
        """Return 1.0 where any rank's flag is, on the device."""
        return self.largest(flag)

    def largest(self, value: Tensor) -> Tensor:
        """Return the largest of a tensor's values over the ranks, on the device."""
        return largest_over_ranks(value) if self.is_on else value

    def decisions(self) -> list[Decision]:
        """Say how the model is spread over the ranks."""
        options, ranks = self._options, self.ranks
        if options is None:
            return []
        if not ranks.are_many:
            detail = f"{options.strategy!r}: one rank, so there is nothing to spread"
            return [shard_decision("left alone", detail)]
        if self._sharded is not None:
            detail = f"{options.strategy!r}: {self._sharded}"
        else:
            assert self._replicated is not None
            detail = (
                f"'ddp': {ranks.world_size} ranks, gradients averaged in buckets of "
                f"{self._replicated.bucket_mb:g} MiB"
            )
        found = [shard_decision("applied", f"{detail}; {self._seeds}")]
        if self._tuned is not None:
            name = "blocks gathered ahead" if self.is_sharded else "size of a bucket in MiB"
            found.append(shard_decision("applied", f"{name}: {self._tuned}"))
        return found

    def close(self) -> None:
        """Take off what replicas have added. What is sharded stays so: torch has no way back."""
        if self._replicated is not None:
            self._replicated.close()
