"""What a resumed run needs, gathered from the parts of a step and put back into them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfast._core.building import parameters_of_others
from torchfast._core.rng import get_rng_state, set_rng_state
from torchfast._core.state import FORMAT, check_tensors, check_training_state
from torchfast.checkpoint.sharded import is_sharded, part_of
from torchfast.ema import WeightAverage
from torchfast.precision import UpdateGuard
from torchfast.state_beside import BESIDE, StateBeside
from torchfast.transforms import ModelTransforms

_OTHERS = "parameters_of_others"


@final
class TrainingState:
    """The state of a model in training: see `TrainStep.state_dict`.

    Args:
        model: Trained.
        optimizer: In any form; its state is saved in the one as given.
        scheduler: An lr_scheduler, or None.
        guard: With the loss scale and the counts of skipped updates.
        average: Of the weights.
        transforms: With what was measured of the model.
        device: Whose generator is saved.
        loss_fn: As the user gave it: what it keeps beside the model is saved, too.

    Attributes:
        beside: What the loss function keeps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: Any,
        guard: UpdateGuard,
        average: WeightAverage,
        transforms: ModelTransforms,
        device: torch.device,
        loss_fn: Callable[..., Any],
    ) -> None:
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._guard, self._average, self._device = guard, average, device
        self._transforms = transforms
        self.beside = StateBeside(model, optimizer, loss_fn, average)

    def save(self, **counts: Any) -> dict[str, Any]:
        """Return the state, with ``counts`` in it. Synchronizes: Yes."""
        scheduler_state = getattr(self._scheduler, "state_dict", dict)
        return {
            "format": FORMAT,
            **counts,
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "lr_scheduler": None if self._scheduler is None else scheduler_state(),
            **({_OTHERS: others} if (others := self._others()) else {}),
            **({BESIDE: beside} if (beside := self.beside.save()) else {}),
            **self._guard.state_dict(),
            **self._average.state_dict(),
            **self._transforms.state_dict(),
            "rng": {**get_rng_state(self._device), **self.beside.generators()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Put back what `save` returned, but for the counts; what does not fit changes nothing.

        Raises:
            TypeError: Not a mapping.
            StateMismatchError: A newer format, or keys, shapes or parts that do not fit.
        """
        check_training_state(state, self._model, self._optimizer, self._scheduler)
        others = self._others()
        if others and _OTHERS not in state:
            # As of a version that did not save them.
            warnings.warn(
                f"the state has no values of {len(others)} parameters that the optimizer holds and "
                "the model does not, so they keep those they have; make them part of the model",
                stacklevel=3,
            )
            others = {}
        check_tensors(state.get(_OTHERS, {}), others, "the optimizer's other parameters")
        self._average.check_state_dict(state)
        self.beside.check(state)
        state = self._parted(state)
        self._model.load_state_dict(state["model"])
        for place, value in others.items():
            value.copy_(state[_OTHERS][place])
        # A copy: torch keeps tensors that need no conversion, so two trainers that load one
        # state would share their moments.
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        if hasattr(self._scheduler, "load_state_dict"):
            self._scheduler.load_state_dict(copy.deepcopy(state["lr_scheduler"]))
        self._guard.load_state_dict(state)
        self._average.load_state_dict(state)
        self._transforms.load_state_dict(state)
        self.beside.load(state)
        set_rng_state(state["rng"], self._device)

    def _others(self) -> dict[str, Tensor]:
        """Return the values of parameters that only the optimizer holds, by their places."""
        others = parameters_of_others(self._model, self._optimizer)
        return {str(place): parameter.detach() for place, parameter in others.items()}

    def _parted(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state with what is whole in it sharded as what it is put into.

        Whole are all tensors that are loaded without ``like``, and the moments of an optimizer that
        had none yet when the ``like`` was made.
        """
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        if not any(map(is_sharded, parameters)):
            return state
        given = state["optimizer"]
        moments = {
            number: {key: part_of(value, parameters[number]) for key, value in of_one.items()}
            for number, of_one in given["state"].items()
        }
        found = {**state, "optimizer": {**given, "state": moments}}
        models = {"model": self._model, "ema_model": self._average.current()}
        for name, model in models.items():
            if model is not None and name in state:
                own = model.state_dict()
                found[name] = {key: part_of(v, own.get(key)) for key, v in state[name].items()}
        averages = self._average.state_dict().get("ema")
        if averages is not None and "ema" in state:
            given = state["ema"]["unrounded"]
            unrounded = {n: part_of(v, averages["unrounded"].get(n)) for n, v in given.items()}
            found["ema"] = {**state["ema"], "unrounded": unrounded}
        return found
