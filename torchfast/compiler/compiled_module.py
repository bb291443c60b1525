"""torch.compile made dependable.

``torch.compile`` turns Python that handles tensors into fused kernels. It does so at the first
call, which takes from seconds to minutes, and again for each change that its guards notice: a size,
a dtype, a flag. It helps models whose steps launch many small kernels, most of those that are not
one large matrix product. It does not help where the time goes to few large kernels, or where sizes
change all the time.

`CompiledModule` compiles a model in place: the object, its type, its keys and hooks stay, copies
and files hold the eager model, and `close` takes it all back. It compiles the blocks that repeat
once and not each (see `torchfast.compiler.regions`), and it knows what became of them:

- A region that cannot be compiled runs eagerly, with one warning that says why; so does one whose
  compilation takes too long. An exception of the model's own passes as it is.
- A region of which nothing was compiled is never called compiled. Torch leaves code alone silently
  under a ``TorchDispatchMode``, where the compiler is switched off, and after too many compiles.
- The report has graph breaks with their lines, recompiles with what changed, and what to do.
- With ``cache``, what was compiled is kept in a folder for the next run.

Forbidden: a model that ``torch.compile(model)`` has wrapped already, and two handles on one model.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, final

import torch
from torch import Tensor, nn

from torchfast._core.arguments import check_callable, explain_keywords
from torchfast._core.closing import Closing
from torchfast._core.decisions import Decision, Outcome, Report
from torchfast._core.errors import ClosedError
from torchfast._core.function_fingerprint import function_fingerprint
from torchfast._core.loss import check_differentiable, check_loss_fn, unpack_loss
from torchfast.compiler.account import CompileAccount
from torchfast.compiler.around import CodeAround
from torchfast.compiler.compiled_callable import CompiledCallable
from torchfast.compiler.in_place import Region
from torchfast.compiler.options import CompileOptions, Mode, Regions, compile_decision
from torchfast.compiler.places import (
    ASIDE,
    check_places,
    made_regions,
    state_of_place,
    told_of_place,
)
from torchfast.compiler.region_kind import RegionKind, decision_of
from torchfast.compiler.regions import choose_regions

if TYPE_CHECKING:
    from torchfast.compiler.receipts import Receipt


@final
class CompiledModule(Closing):
    """Compile a model in place, by region.

    Args:
        model: The model. It stays the same object, and calling it runs the compiled code.
        mode: As in ``torch.compile``; ``"auto"`` runs the model eagerly until `search`.
        regions: What is compiled in one piece; see `CompileOptions`.
        dynamic: As in ``torch.compile``.
        fullgraph: A graph break is an error.
        cache: Folder in which what was compiled is kept for later runs. What is in it is run as
            this user: name one that nobody else writes to.
        on_failure: ``"eager"`` or ``"raise"``.
        timeout_s: Longest time that one call may spend on compiling one kind of region.
        backend: As in ``torch.compile``.
        mark_dynamic: After a recompilation because of a size, compile for any size of that
            dimension. Of use with ``dynamic=False``: torch does it by itself otherwise.
        budget_s: Longest time that `search` may take.

    Raises:
        TypeError: Not a module.
        ValueError: A model that is compiled already, or a region that it does not have.
        CompileError: Under ``on_failure="raise"``, a backend that does not exist; from the model's
            call, what cannot be compiled.

    Numerics: May differ by rounding: fused operations keep intermediate results in higher
        precision. Dropout draws other numbers.
    Synchronizes: While it compiles only.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> with CompiledModule(model, backend="eager") as compiled:
        ...     y = model(torch.ones(2, 4))
        ...     print(compiled.status)
        {'': 'compiled'}
    """

    @explain_keywords
    def __init__(
        self,
        model: nn.Module,
        *,
        mode: Mode = "default",
        regions: Regions = "auto",
        dynamic: bool | None = None,
        fullgraph: bool = False,
        cache: str | os.PathLike[str] | None = None,
        on_failure: Literal["eager", "raise"] = "eager",
        timeout_s: float = 300.0,
        backend: str | Callable[..., Any] = "inductor",
        mark_dynamic: bool = False,
        budget_s: float = 600.0,
    ) -> None:
        self.options = CompileOptions(
            mode=mode,
            regions=regions,
            dynamic=dynamic,
            fullgraph=fullgraph,
            cache=cache,
            on_failure=on_failure,
            timeout_s=timeout_s,
            backend=backend,
            mark_dynamic=mark_dynamic,
            budget_s=budget_s,
        )
        check_places(model)
        self._model = weakref.ref(model)
        self._name = type(model).__name__
        choice = choose_regions(model, self.options.regions)
        self._is_closed = False
        self._is_suspended = False
        self._around: CodeAround | None = None
        self._kinds: tuple[RegionKind, ...] = ()
        self._regions: tuple[Region, ...] = ()
        self._is_undecided = mode == "auto"
        self._outcome: Outcome = "applied"
        if self._is_undecided:
            # What is found has an account of its own.
            self._account = CompileAccount(model, replace(self.options, cache=None))
            self._explanation = "mode 'auto' is decided on by search(loss_fn, batch)"
            return
        self._account = CompileAccount(model, self.options)
        self._explanation = str(choice)
        self._kinds, self._regions = made_regions(choice, self.options)
        for region in self._regions:
            region.install(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    @property
    def model(self) -> nn.Module:
        """The model, the object that was given.

        Raises:
            ClosedError: It is gone; this handle does not keep it.
        """
        model = self._model()
        if model is None:
            raise ClosedError(
                f"the {self._name} of this CompiledModule no longer exists: a CompiledModule does "
                "not keep its model; keep a reference to the model yourself"
            )
        return model

    @property
    def regions(self) -> tuple[str, ...]:
        """The paths of the regions, ``""`` for the whole model."""
        return tuple(region.path for region in self._regions)

    @property
    def status(self) -> dict[str, str]:
        """Of each region ``"not called"``, ``"compiled"``, or why it does not run compiled now.

        A reason begins with ``"eager: "``, or with ``"set aside: "`` where the user's own
        ``module.compile()`` has taken the place. ``"compiled as a part of what calls it"`` is a
        region of which only something larger was called, and compiled with it.
        """
        return {region.path: self._missing(region) or region.status for region in self._regions}

    @property
    def explanation(self) -> str:
        """What was chosen to be compiled, and why, in words."""
        return self._explanation

    @property
    def is_closed(self) -> bool:
        """Whether the model is eager again."""
        return self._is_closed

    @property
    def code_around(self) -> Callable[..., Any] | None:
        """What `around` returned; None if it was not called."""
        return self._around

    def search(self, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> Receipt:
        """Find out how to compile, for ``mode="auto"``, and put that in force.

        Each way is compiled, compared with the eager model and timed in turns, on the forward and
        backward of one batch; see `CompileOptions`. What is timed is launched. Modes that keep CUDA
        graphs of their own are not tried: a loop has to announce its steps to torch for them.

        Args:
            loss_fn: ``loss_fn(model, batch)`` returns the loss, as for a `Trainer`. It is not
                compiled.
            batch: On the model's device.

        Returns:
            What was measured, and what was chosen and why.

        Raises:
            TypeError: The loss function cannot be called so, or returns something else.
            ValueError: Another mode, or one that is found already, or a loss that is no scalar.
            LossError: The loss has no graph.
            ClosedError: After `close`.

        Numerics: State, gradients and generators are as before.
        Synchronizes: Often.
        """
        from torchfast.compiler.mode_search import search_mode  # which makes handles like this one

        self._check_open()
        check_loss_fn(loss_fn)
        if not self._is_undecided:
            raise ValueError(
                f"search() finds out what mode='auto' is to be, once; this is compiled as "
                f"{self.options.mode!r}: make another CompiledModule with mode='auto'"
            )
        model = self.model
        first = next(model.parameters(), None)

        def work() -> Tensor:
            loss = unpack_loss(loss_fn(model, batch)).loss
            check_differentiable(loss)
            loss.backward()
            return loss.detach()

        def make(options: CompileOptions) -> CompiledModule:
            given = {f.name: getattr(options, f.name) for f in fields(options)}
            del given["update"]
            return CompiledModule(model, **given)

        in_force: list[Compiled | None] = [None]
        found = search_mode(
            model,
            self.options,
            make,
            lambda compiled: in_force.__setitem__(0, compiled),
            work,
            batch,
            torch.device("cpu") if first is None else first.device,
            in_graph=True,  # or torch's own graphs were among the modes
            plan="a loop of its own",
            loss=function_fingerprint(loss_fn),
        )
        self._take(in_force[0])
        self._explanation, self._outcome = str(found), found.outcome
        return found.receipt

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile what a function does besides calling the regions.

        Args:
            function: Such as ``loss_fn(model, batch)``; it is not changed. One function a handle:
                another takes its place.

        Returns:
            What to call instead. It calls the function as it is while this handle is suspended,
            and once it is closed.

        Raises:
            TypeError: Something that cannot be called.
            ClosedError: After `close`.
        """
        self._check_open()
        check_callable("function", function, "loss_fn(model, batch)")
        if self._around is not None:
            self._around.close()
        self._around = CodeAround(function, self.options)
        self._around.is_in_force = bool(self._regions) and not self._is_suspended
        return self._around

    def decisions(self) -> list[Decision]:
        """Return what was asked for and what became of it, a decision for each kind of region."""
        asked = self._explanation
        if any(region.was_compiled_by_user for region in self._regions):
            asked += "; what model.compile() had made is set aside until close()"
        return [
            compile_decision(self._outcome if self._is_applied else "stepped aside", asked),
            *(decision_of(kind, there) for kind in self._kinds if (there := self._of(kind))),
            *(
                compile_decision("stepped aside", told_of_place(region.path, missing))
                for region in self._regions
                if (missing := self._missing(region))
            ),
            *([] if self._around is None else [self._around.decision()]),
            *self._account.decisions(self._code_names),
        ]

    def before_step(self) -> None:
        """Say that a step of the training begins, in a loop of your own that has several models.

        What is compiled within a step is warned of by its model alone.
        """
        self._account.before_step()

    def after_step(self) -> None:
        """Say that a step of the training is done, in a loop of your own.

        After some ten of them what was compiled is kept in the cache, and what is compiled again
        later is warned of, once, with its cause.
        """
        self._account.after_step()

    def report(self) -> Report:
        """Return the decisions and the counts, for a person or as JSON."""
        states = list(self.status.values())
        counters: dict[str, int | float | str] = {
            "regions": len(states),
            "kinds": len(self._kinds),
            "compiled": sum(state.startswith("compiled") for state in states),
            "eager": sum(state.startswith("eager") for state in states),
            **self._account.counters(self._code_names),
        }
        return Report(
            title=f"CompiledModule({self._name})",
            decisions=tuple(self.decisions()),
            counters=counters,
        )

    @property
    def is_compiled(self) -> bool:
        """Whether any region has been compiled."""
        return any(region.is_compiled for region in self._regions)

    def suspend(self) -> None:
        """Let the model run eagerly until `resume`; what was compiled is kept."""
        self._is_suspended = True
        if self._around is not None:
            self._around.is_in_force = False
        for region in self._regions:
            region.undo()

    def resume(self) -> None:
        """Put what was compiled in force again.

        Raises:
            ClosedError: After `close`.
        """
        self._check_open()
        self.suspend()
        for region in self._regions:
            if region.module is not None:  # or it was replaced meanwhile
                region.install(self)
        self._is_suspended = False
        if self._around is not None:
            self._around.is_in_force = bool(self._regions)

    def keep_nothing(self) -> None:
        """Leave the cache as it is from now on."""
        self._account.keep_nothing()

    def close(self) -> None:
        """Give the eager model back, or what ``model.compile()`` had made of it."""
        if not self._is_closed:
            self._is_closed = True
            self.suspend()
            self._account.close()
            for kind in self._kinds:
                kind.close()
            if self._around is not None:
                self._around.close()

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied and pickled.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "a CompiledModule stands for code of this process and cannot be copied or pickled: "
            "copy or pickle the model, which is the same as without it, and compile the copy"
        )

    def __repr__(self) -> str:
        """Return the model's class and what is compiled of it."""
        state = "closed" if self._is_closed else self._explanation
        return f"CompiledModule({self._name}: {state})"

    def _take(self, found: Compiled | None) -> None:
        """Be what a search has found; None is eager."""
        self._is_undecided = False
        if found is None:
            return
        assert isinstance(found, CompiledModule)
        found.suspend()
        self._account.close()
        self.options, self._account = found.options, found._account
        self._kinds, self._regions = found._kinds, found._regions
        if self._around is not None:  # made when it was not known yet how to compile
            self._around.compile_as(self.options)
        self.resume()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this CompiledModule is closed; make another one to compile again")

    @property
    def _is_applied(self) -> bool:
        states = self.status.values()
        return not states or not all(state.startswith(ASIDE) for state in states)

    @property
    def _code_names(self) -> list[str]:
        names = [kind.code_name for kind in self._kinds]
        return names if self._around is None else [*names, self._around.code_name]

    def _missing(self, region: Region) -> str | None:
        """Return what has become of the place of a region, where that is what runs no more."""
        model = self._model()
        if model is None or self._is_closed:
            return None
        return state_of_place(model, region, is_suspended=self._is_suspended)

    def _of(self, kind: RegionKind) -> list[Region]:
        """Return the regions of a kind that stand where they were put."""
        return [r for r in self._regions if r.kind is kind and self._missing(r) is None]


Compiled: TypeAlias = CompiledCallable | CompiledModule
