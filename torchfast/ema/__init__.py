"""An exponential moving average of the weights, as an option of the step."""

from torchfast.ema.average import WeightAverage
from torchfast.ema.options import EMAOptions
from torchfast.ema.pairs import copied

__all__ = ["EMAOptions", "WeightAverage", "copied"]
