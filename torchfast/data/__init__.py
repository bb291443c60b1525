"""How batches get to the step."""

from torchfast.data.loader import DeviceLoader

__all__ = ["DeviceLoader"]
