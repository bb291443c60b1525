"""What an optimizer on the host and the one that stands for it on the device tell each other.

Schedulers, users and checkpoints change the groups and the state of the one that they see. Before
an update the other one takes that over, and behind it shows what it has made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer

from torchfast._core.compare import same_objects


@final
class Mirrored:
    """An optimizer on the host, as another one that has the parameters on the device.

    Args:
        seen: The one that users see.
        inner: The one that updates, of the same groups.
        hosts: Its parameters, by those on the device.
    """

    def __init__(self, seen: Optimizer, inner: Optimizer, hosts: Mapping[Tensor, Tensor]) -> None:
        self._seen, self._inner, self._hosts = seen, inner, hosts
        self._shown: set[Tensor] = set()

    def hand_over(self) -> None:
        """Let the optimizer have what schedulers and the user have changed.

        Raises:
            RuntimeError: Its groups hold other parameters than before.
        """
        groups, own_groups = self._seen.param_groups, self._inner.param_groups
        of_groups = [[self._hosts.get(p) for p in group["params"]] for group in groups]
        known = [group["params"] for group in own_groups]
        if len(known) != len(of_groups) or not all(map(same_objects, of_groups, known)):
            raise RuntimeError(
                "the parameters in the groups of an offloaded optimizer have been replaced or "
                "taken out, and the host goes on with copies of those that it was made of; make a "
                "new one, or add what is new by add_param_group"
            )
        for group, own in zip(groups, own_groups, strict=True):
            _copy_all_but_parameters(group, own)
        # As of any optimizer, whose state begins anew where it is taken away.
        for parameter in [p for p in self._shown if not self._seen.state.get(p)]:
            self._inner.state.pop(self._hosts[parameter], None)
            self._shown.discard(parameter)

    def take_over(self) -> None:
        """Show what the optimizer keeps in its groups; some steer their next step by that."""
        for group, own in zip(self._seen.param_groups, self._inner.param_groups, strict=True):
            _copy_all_but_parameters(own, group)

    def show_state(self) -> None:
        """Show the optimizer's state.

        The tensors themselves, in other dicts: who replaces one there, for the layout that the
        parameter has on the device, does not change what the update works on.
        """
        for parameter, host in self._hosts.items():
            if host in self._inner.state:
                self._seen.state[parameter] = dict(self._inner.state[host])
                self._shown.add(parameter)


def _copy_all_but_parameters(source: dict[str, Any], target: dict[str, Any]) -> None:
    """Let a group be as another, without what that lacks: ``del group[...]`` counts, too."""
    parameters = target["params"]
    target.clear()
    target.update({**source, "params": parameters})
