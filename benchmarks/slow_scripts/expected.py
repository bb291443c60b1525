"""What is wrong with each script: the answers that a profiler should give.

The line is found by its marker, a comment at its end, so that it stays true when a script changes.
A script may have several: where the cost arises and where it is mended are both good answers.

Each has one fault. So those whose fault is a wait are of a size at which the device, and not the
host, is the limit once the wait is gone, also beside a host that needs 40 us for a launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Class = Literal[
    "input-bound",
    "sync-bound",
    "launch-bound",
    "communication-bound",
    "bandwidth-bound",
    "compute-bound",
    "fine",
]
Kind = Literal[
    "slow-data",
    "pageable-copies",
    "host-sync",
    "boolean-mask",
    "tiny-kernels",
    "fp32-matmul",
    "dtype-casts",
    "channels-first-convolution",
    "unfused-optimizer",
    "recompiles",
    "big-log-sync",
    "none",
]

FOLDER: Final = Path(__file__).parent
MARKER: Final = "# <- here"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The right answer for one script.

    Attributes:
        classes: What the step is bound by: the class that is meant, then others that are as true.
        kind: The finding that should come first; ``"none"`` where nothing is wrong.
        needs: The package that the script wants beside torch.
        why: Where the fault is, in a sentence.
        options: Of the profiler: fewer steps, and none after them, where each takes the compiler
            many seconds.
    """

    classes: tuple[Class, ...]
    kind: Kind
    why: str
    needs: str | None = None
    options: tuple[str, ...] = ()


EXPECTED: Final[dict[str, Expected]] = {
    "image_classifier": Expected(
        classes=("input-bound",),
        kind="slow-data",
        why="pictures are decoded and augmented by the process that trains, one after another",
    ),
    "segmentation_unet": Expected(
        classes=("input-bound",),
        kind="pageable-copies",
        why="batches of hundreds of megabytes are copied from memory that is not pinned",
    ),
    "language_model": Expected(
        classes=("sync-bound",),
        kind="host-sync",
        why="norms of each gradient and weight are read by .item(), some 300 times a step",
    ),
    "mixture_of_experts": Expected(
        classes=("sync-bound",),
        kind="boolean-mask",
        why="the tokens of each expert are picked by a boolean mask, whose count the host needs",
    ),
    "heat_equation": Expected(
        classes=("launch-bound",),
        kind="tiny-kernels",
        why="an activation of a dozen element-wise operations on small tensors, 32 times",
    ),
    "vision_transformer": Expected(
        classes=("compute-bound",),
        kind="fp32-matmul",
        why="autocast is around the loss only, so that the model computes in fp32",
    ),
    "recommender": Expected(
        classes=("bandwidth-bound",),
        kind="dtype-casts",
        why="large activations go from bf16 to fp32 and back at each operation",
    ),
    # What is lost goes into transposing kernels around convolutions that use the tensor cores.
    "super_resolution": Expected(
        classes=("compute-bound", "bandwidth-bound"),
        kind="channels-first-convolution",
        why="convolutions under bf16 on a model and pictures that are not channels_last",
    ),
    "text_encoder": Expected(
        classes=("launch-bound",),
        kind="unfused-optimizer",
        why="foreach=False updates some 200 parameters one by one, in thousands of kernels",
    ),
    # The device waits for a host that compiles: no other class comes nearer.
    "sentence_classifier": Expected(
        classes=("launch-bound",),
        kind="recompiles",
        why="dynamic=False compiles anew for each length of a batch",
        options=("--warmup", "2", "--steps", "4", "--stop"),
    ),
    "recurrent_model": Expected(
        classes=("sync-bound",),
        kind="big-log-sync",
        why="all weights and gradients go to the host at each step, for histograms",
    ),
    # A step that is well made is bound by computing; both may be said.
    "diffusion_transformer": Expected(
        classes=("fine", "compute-bound"),
        kind="none",
        why="nothing: compiled, bf16, fused optimizer, data on the device",
    ),
    # From here to the frameworks by people who knew nothing of the profiler's rules. Which lines
    # are marked was settled before it looked.
    "seismic_picker": Expected(
        classes=("input-bound",),
        kind="slow-data",
        why="noise is made by a recursion in Python, by the process that trains",
    ),
    "radar_filter": Expected(
        classes=("sync-bound",),
        kind="host-sync",
        why="three values are read in each of ten steps of a filter, amid the forward",
    ),
    "molecule_energy": Expected(
        classes=("launch-bound",),
        kind="tiny-kernels",
        why="the readout goes over 512 molecules one by one, in thousands of kernels",
    ),
    "collider_latents": Expected(
        classes=("fine", "compute-bound"),
        kind="none",
        why="nothing: bf16, fused optimizer, data on the device, no reads",
    ),
    "particles": Expected(
        classes=("sync-bound",),
        kind="boolean-mask",
        why="fast and reflected particles are picked by masks, whose counts the host needs",
    ),
    "cells": Expected(
        classes=("compute-bound",),
        kind="fp32-matmul",
        why="there is no autocast, so that all products are in fp32",
    ),
    "substations": Expected(
        classes=("launch-bound",),
        kind="unfused-optimizer",
        why="an optimizer of the script's own updates 512 parameters one by one",
    ),
    "lidar": Expected(
        classes=("bandwidth-bound",),
        kind="dtype-casts",
        why="each layer takes and returns fp32, and computes in bf16",
    ),
    "with_transformers": Expected(
        classes=("sync-bound",),
        kind="host-sync",
        why="a callback reads the largest value of each gradient and weight by .item()",
        needs="transformers",
    ),
    "with_accelerate": Expected(
        classes=("sync-bound",),
        kind="host-sync",
        why="norm and largest value of each weight are read by .item() after each step",
        needs="accelerate",
    ),
    "with_lightning": Expected(
        classes=("sync-bound",),
        kind="host-sync",
        why="training_step counts the hits of each class by .item()",
        needs="lightning",
    ),
}


def path_of(script: str) -> Path:
    """Return the file of a script."""
    return FOLDER / f"{script}.py"


def lines_of(script: str) -> list[int]:
    """Return the numbers of the lines at fault; none where nothing is wrong."""
    text = path_of(script).read_text(encoding="utf-8")
    numbered = enumerate(text.splitlines(), start=1)
    return [number for number, line in numbered if line.endswith(MARKER)]
