"""The twelve workloads of the yardstick: what is trained, and on which data.

Each is a few dozen lines of plain PyTorch, written as people write them. All train under bf16
autocast on a GPU and in float32 on a CPU, and none reads the device in its forward, so that each
step can be captured. Data is made up, alike in every process, and has something to learn in it.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.workloads import (
    gpt,
    llama,
    perceptron,
    recommender,
    recurrent,
    resnet,
    unet,
    vit,
)
from benchmarks.workloads.definition import Batch, Size, Workload

__all__ = ["NAMES", "Batch", "Size", "Workload", "workload"]

_FAMILIES: dict[str, Callable[[str, Size], Workload]] = {
    "mlp": perceptron.workload,
    "mlp-transfer-bound": perceptron.workload,
    "gpt-small": gpt.workload,
    "gpt2": gpt.workload,
    "moe": gpt.workload,
    "resnet50": resnet.workload,
    "resnet50-input-bound": resnet.workload,
    "vit": vit.workload,
    "dlrm": recommender.workload,
    "lstm": recurrent.workload,
    "unet": unet.workload,
    "llama": llama.workload,
}
NAMES: tuple[str, ...] = tuple(_FAMILIES)


def workload(name: str, size: Size) -> Workload:
    """Return a workload: ``"full"`` for a data-centre GPU, ``"smoke"`` for milliseconds a step.

    Neither the model nor any data is made before it is asked for.
    """
    if name not in _FAMILIES:
        raise ValueError(f"no workload {name!r}; there are: {', '.join(NAMES)}")
    return _FAMILIES[name](name, size)
