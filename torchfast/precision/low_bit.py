"""AdamW whose moments take 8 or 4 bits a value in place of 32.

Two fp32 moments are twice the size of the fp32 weights. In 8 bits with a scale for each block of
256 values they take a quarter of that; the update reads them, computes in fp32 and rounds them
back. The codes and the rounding are torchao's (see `low_bit_codes`).

torchao's own classes count steps on the host, compile inside ``step()`` on every device, keep their
learning rate as a tensor and their moments in tensors of their own kind. Here the counter is on the
device, so a graph can hold the update; the learning rate is a Python float, as schedulers and
``group["lr"] = x`` expect it; and all state is plain tensors, so files load without torchao.

When it helps: where optimizer state is what fills the memory. It is not there to be faster: what it
reads and writes less than the fused update it computes more. When it does not help: small models,
convolutions and biases, which stay in fp32 below 4096 values.

``stochastic_rounding`` is for weights that are bf16 themselves: an update smaller than half of the
last digit would round to nothing for ever, so it is rounded up or down by chance.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchfast._core.arguments import check_choice, check_flag, explain_keywords
from torchfast._core.building import optimized
from torchfast._core.decisions import Decision
from torchfast._core.local import local
from torchfast.precision.low_bit_codes import (
    KINDS,
    Codec,
    codecs,
    empty_codes,
    rounder,
)
from torchfast.precision.low_bit_options import check_numbers
from torchfast.precision.low_bit_saved import (
    CODES,
    KIND,
    MOMENTS,
    OF_ADAMW,
    SCALE,
    check_codes,
    check_convertible,
    check_does,
    check_kind,
    check_of_adamw,
    in_full,
    plain_group,
)
from torchfast.precision.low_bit_shards import can_be_coded, spread_as
from torchfast.precision.low_bit_update import compiled_update, make_update

logger = logging.getLogger(__name__)

_OWN = ("kind", "stochastic_rounding", "compiled")
# So many values of betas and weight decay a group are compiled for, and then no more.
_MOST_NUMBERS = 4


@final
class LowBitAdamW(Optimizer):
    """AdamW with moments in 8 bits, 4 bits or float8.

    Args:
        params: Parameters, or groups of them.
        lr: A float, or a 0-d tensor on the parameters' device.
        betas: Of the two moments.
        eps: Added to the root of the second.
        weight_decay: Decoupled.
        state: ``"8bit"``, ``"4bit"``, ``"fp8"``, or ``"full"``: fp32 moments. Those of a tensor
            with fewer than 4096 values, or whose blocks do not come out even, are fp32 always.
        stochastic_rounding: Round bf16 parameters up or down by chance.
        compiled: Compile the update of each shape; None means on CUDA devices. Given up where betas
            or weight decay go on changing, with a warning.

    Raises:
        TypeError: Betas that are not two.
        ValueError: A state that does not exist, or a number out of range.
        ImportError: torchao is missing or too old.

    Numerics: Close to AdamW. Bitwise the same inside a graph as outside, given that both are
        compiled or neither is.
    Synchronizes: Never.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(64, 64))
        >>> optimizer = LowBitAdamW([weight], lr=0.1)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[weight]["exp_avg_codes"].dtype
        torch.uint8
        >>> round(float(weight[0, 0].detach()), 3)
        0.899
    """

    # Its counters are on the device and its rates read from a tensor: a graph can hold it as it is.
    is_capturable: ClassVar[bool] = True

    @explain_keywords
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state: str = "8bit",
        stochastic_rounding: bool = False,
        compiled: bool | None = None,
    ) -> None:
        check_choice("state", state, KINDS)
        check_flag("stochastic_rounding", stochastic_rounding)
        own = {"kind": state, "stochastic_rounding": stochastic_rounding, "compiled": compiled}
        self._prepare(own)
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "capturable": True,
            KIND: state,
        }
        check_numbers(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose numbers are checked as those of the constructor are."""
        check_numbers({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point() or parameter.dtype == torch.float64:
                self.param_groups.pop()
                raise ValueError(
                    "LowBitAdamW computes in fp32, so it updates real floating-point parameters "
                    f"of 32 bits or fewer, got {parameter.dtype}; give others to an AdamW"
                )

    @classmethod
    def like(cls, optimizer: Optimizer, **options: Any) -> LowBitAdamW:
        """Return one with the parameters and hyperparameters of an AdamW that has not stepped yet.

        Args:
            optimizer: A ``torch.optim.AdamW``; or a LowBitAdamW, which is returned.
            **options: ``state``, ``stochastic_rounding``, ``compiled``.

        Raises:
            PlanError: Another kind of optimizer, a variant that is not to be had in low bits, or
                one that has stepped, has hooks or is driven by a scheduler; a LowBitAdamW with
                other options.
        """
        if isinstance(optimizer, cls):
            check_does(optimizer, options)
            return optimizer
        check_convertible(optimizer)
        return cls([plain_group(group) for group in optimizer.param_groups], **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = [
            (index, group, parameter)
            for index, group in enumerate(self.param_groups)
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for _, _, parameter in found:
            if parameter.grad.is_sparse:
                raise RuntimeError(
                    "LowBitAdamW takes no sparse gradients; build the embedding with sparse=False"
                )
            if not self.state[parameter]:
                self.state[parameter].update(self._new_state(parameter))
        steps = [self.state[parameter]["step"] for *_, parameter in found]
        if steps:
            torch._foreach_add_(steps, 1.0)
        self._note_numbers()
        for index, group, parameter in found:
            self._update(parameter, group, self._rate(index, group, parameter.device))
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict()`` returned, or that of an AdamW, whose moments are coded.

        Raises:
            ValueError: It is of an optimizer that computes otherwise, or of other low bits.
        """
        adopted: list[tuple[Tensor, dict[str, Tensor]]] = []

        def adopt(_: Optimizer, given: dict[str, Any]) -> None:
            self.check_state_dict(given)
            adopted[:] = [(p, self._adopted(saved, p)) for p, saved in self._given(given)]

        # The last hook sees what the others have made of it, and raises before anything changes.
        handle = self.register_load_state_dict_pre_hook(adopt)
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            handle.remove()
        # torch casts state to the dtype of its parameter, which codes and scales are not.
        self.state.update(adopted)
        for group in self.param_groups:
            for name in {*OF_ADAMW} - {*self.defaults}:
                group.pop(name, None)
            group |= {"capturable": True, KIND: self.kind}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ValueError if a state is of one that computes otherwise; change nothing."""
        check_of_adamw(state_dict)
        check_kind(state_dict, self.kind)
        for parameter, saved in self._given(state_dict):
            check_codes(saved, self.kind, parameter)

    def dense_state_dict(self) -> dict[str, Any]:
        """Return the state as an AdamW takes it, its moments in fp32."""
        state = self.state_dict()
        dense = {}
        for index, parameter in enumerate(self._parameters()):
            if self.state.get(parameter):  # it may have been read of one that never stepped
                moments = {m: self._moment(parameter, m).clone() for m in MOMENTS}
                dense[index] = {"step": self.state[parameter]["step"].cpu(), **moments}
        groups = [{**group, "capturable": False} for group in state["param_groups"]]
        for group in groups:
            group.pop(KIND)
        return {"state": dense, "param_groups": groups}

    def decision(self) -> Decision:
        """Say what the state takes, beside what it would in fp32."""
        # What is frozen gets no gradient, and so no state.
        trained = [p for p in self._parameters() if p.requires_grad]
        full = sum(8 * local(p).numel() for p in trained)
        coded = sum(self._state_bytes(p) for p in trained)
        how = "compiled" if self._is_compiled(next(self._parameters()).device) else "not compiled"
        detail = (
            f"AdamW with moments in {self.kind}: {coded:,} bytes of state, fp32 takes {full:,}; "
            f"the update is {how}"
        )
        if self.stochastic_rounding:
            rounded = sum(p.dtype == torch.bfloat16 for p in trained)
            detail += f"; {rounded} of {len(trained)} parameters are bf16 and rounded by chance"
        return Decision(lever="optimizer state", outcome="applied", detail=detail)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _OWN}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._prepare(state)
        super().__setstate__({k: v for k, v in state.items() if k not in _OWN})

    # --- the parts of an update ---------------------------------------------------------------

    def _prepare(self, own: Mapping[str, Any]) -> None:
        # torch sets state without its constructor too, where only these three are missing.
        if "kind" not in own:
            return
        self.kind: str = own["kind"]
        self.stochastic_rounding: bool = own["stochastic_rounding"]
        self.compiled: bool | None = own["compiled"]
        self._codecs: tuple[Codec, Codec] | None
        self._codecs = None if self.kind == "full" else codecs(self.kind)
        self._function = make_update(self._codecs, rounder() if self.stochastic_rounding else None)
        self._compiled_function: Callable[..., None] | None = None
        self._numbers: dict[int, set[Any]] = {}
        self._is_steady = True
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._rates: dict[int, tuple[float, Tensor]] = {}

    def _parameters(self) -> Iterator[Any]:
        return optimized(self)

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        for moment in MOMENTS:
            if can_be_coded(self.kind, parameter):
                # A scale of zero: not every table has a code for it.
                codes, scales = empty_codes(self.kind, local(parameter))
                state[moment + CODES] = spread_as(parameter, codes.zero_())
                state[moment + SCALE] = spread_as(parameter, scales.zero_())
            else:
                state[moment] = torch.zeros_like(
                    parameter, dtype=torch.float32, requires_grad=False
                )
        return state

    def _coded(self, moment: str, parameter: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Return what is kept of a moment that is given in full."""
        if self._codecs is None or not can_be_coded(self.kind, parameter):
            return {moment: values.float()}
        own = local(values)
        codes, scales = empty_codes(self.kind, own)
        table = self._table(moment, own.device)
        encode = self._codecs[MOMENTS.index(moment)].encode
        new_codes, new_scales = encode(own.float().reshape(len(scales), -1), table)
        codes.copy_(new_codes.view(codes.shape))
        scales.copy_(new_scales)
        whole = {moment + CODES: codes, moment + SCALE: scales}
        return {name: spread_as(parameter, part) for name, part in whole.items()}

    def _moment(self, parameter: Tensor, moment: str) -> Tensor:
        """Return a moment in full."""
        state = self.state[parameter]
        if moment + SCALE not in state:
            values: Tensor = state[moment]
            return values
        assert self._codecs is not None
        table = self._table(moment, parameter.device)
        codes, scales = local(state[moment + CODES]), local(state[moment + SCALE])
        decode = self._codecs[MOMENTS.index(moment)].decode
        rows = decode(codes.reshape(len(scales), -1), scales, table)
        return spread_as(parameter, rows.view(local(parameter).shape))

    def _given(self, state_dict: Mapping[str, Any]) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
        """Yield each parameter that a state has something of, and that."""
        given = [i for group in state_dict["param_groups"] for i in group["params"]]
        for index, parameter in zip(given, self._parameters(), strict=False):  # torch compares
            if saved := state_dict["state"].get(index):
                yield parameter, saved

    def _adopted(self, saved: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        """Return saved state in the form that this optimizer keeps."""
        check_codes(saved, self.kind, parameter, is_part=True)
        device = parameter.device
        state = {"step": torch.as_tensor(saved["step"]).to(device, torch.float32, copy=True)}
        for moment in MOMENTS:
            if moment + CODES in saved:
                for name in (moment + CODES, moment + SCALE):
                    state[name] = saved[name].to(device, copy=True)
            else:
                full = in_full(saved[moment]).to(device, torch.float32, copy=True)
                state |= self._coded(moment, parameter, full)
        return state

    def _update(self, parameter: Tensor, group: Mapping[str, Any], rate: Tensor) -> None:
        state = self.state[parameter]
        device = parameter.device
        empty = state["step"]  # stands for what there is none of
        is_coded = MOMENTS[0] + SCALE in state
        kept = CODES if is_coded else ""
        function = self._compiled_on(device)
        gradient = parameter.grad
        assert gradient is not None
        function(
            local(parameter.detach()),
            local(gradient),
            state["step"],
            rate,
            tuple(local(state[moment + kept]) for moment in MOMENTS),
            tuple(local(state.get(moment + SCALE, empty)) for moment in MOMENTS),
            tuple(self._table(moment, device) for moment in MOMENTS),
            is_coded=is_coded,
            betas=tuple(float(beta) for beta in group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            is_rounded=self.stochastic_rounding and parameter.dtype == torch.bfloat16,
        )

    def _rate(self, index: int, group: Mapping[str, Any], device: torch.device) -> Tensor:
        """Return the learning rate as a tensor, so that both forms of it give the same bits."""
        rate = group["lr"]
        if isinstance(rate, Tensor):
            return rate
        known, tensor = self._rates.get(index, (None, None))
        if tensor is None or tensor.device != device:
            tensor = torch.zeros((), dtype=torch.float32, device=device)
        if rate != known or self._rates[index][1] is not tensor:
            tensor.fill_(rate)
            self._rates[index] = float(rate), tensor
        return tensor

    def _table(self, moment: str, device: torch.device) -> Tensor:
        if device not in self._tables:
            known = ((), ()) if self._codecs is None else [codec.tables for codec in self._codecs]
            signed, unsigned = (
                torch.tensor(tables, dtype=torch.float32, device=device) for tables in known
            )
            self._tables[device] = signed, unsigned
        return self._tables[device][MOMENTS.index(moment)]

    def _note_numbers(self) -> None:
        """Give up compiling where betas or weight decay go on changing: each is a constant there.

        Without this, OneCycleLR, which moves betas at every step, would have every step compile.
        """
        for index, group in enumerate(self.param_groups):
            known = self._numbers.setdefault(index, set())
            if len(known) <= _MOST_NUMBERS:
                known.add((*map(float, group["betas"]), group["eps"], group["weight_decay"]))
        if not self._is_steady or all(len(n) <= _MOST_NUMBERS for n in self._numbers.values()):
            return
        self._is_steady = False
        if self._compiled_function is not None:
            logger.warning(
                "LowBitAdamW: betas or weight decay have changed %d times, and a compiled update "
                "holds them as constants, so it is not compiled from now on; with OneCycleLR or "
                "CyclicLR cycle_momentum=False keeps it compiled",
                _MOST_NUMBERS,
            )

    def _is_compiled(self, device: torch.device) -> bool:
        wanted = device.type == "cuda" if self.compiled is None else self.compiled
        return wanted and self._is_steady

    def _compiled_on(self, device: torch.device) -> Callable[..., None]:
        if not self._is_compiled(device):
            return self._function
        if self._compiled_function is None:
            self._compiled_function = compiled_update(self._function)
        return self._compiled_function

    def _state_bytes(self, parameter: Tensor) -> int:
        own = local(parameter)
        if not can_be_coded(self.kind, parameter):
            return 8 * own.numel()
        with torch.device("meta"):
            codes = empty_codes(self.kind, torch.empty(own.shape))
        return 2 * sum(t.numel() * t.element_size() for t in codes)
