"""Checkpoints: atomic, asynchronous, verified, and free of pickle; exact resume.

`CheckpointManager` saves and loads state in a folder; `import_state_dict` reads one plain file of
weights. Read `manager.py` first, then `folder.py` (what makes a save atomic), `tree.py` (how state
becomes JSON and tensors) and `storage.py` (how torch.distributed.checkpoint is used).
"""

from typing import TYPE_CHECKING

from torchfast._core.later import later

if TYPE_CHECKING:
    from torchfast.checkpoint.manager import Checkpoint, CheckpointManager
    from torchfast.checkpoint.state_file import import_state_dict

__all__ = ["Checkpoint", "CheckpointManager", "import_state_dict"]

# Steps by hand need none of it, and neither does a run that saves nothing.
_HOMES = {
    "torchfast.checkpoint.manager": ("Checkpoint", "CheckpointManager"),
    "torchfast.checkpoint.state_file": ("import_state_dict",),
}
__getattr__ = later(globals(), _HOMES)
