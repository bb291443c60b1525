"""Proof that a plan trains the model that the plain loop trains.

`assert_parity` runs a model of your own both ways from one seed and compares them step by step.
The loop it compares with, `plain_step`, imports nothing of torchfast.
"""

from torchfast.testing.parity import ParityResult, Tolerance, assert_parity
from torchfast.testing.plain_loop import plain_step

__all__ = ["ParityResult", "Tolerance", "assert_parity", "plain_step"]
