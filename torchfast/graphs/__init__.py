"""Which form an optimizer's update takes, so that it can live on the device.

A whole-step graph will stand in this room; what it needs first is an optimizer whose update reads
nothing on the host, and that is useful without a graph too.
"""

from torchfast.graphs.optimizer_form import OptimizerForm

__all__ = ["OptimizerForm"]
