"""What services want, rendered once for the passes of a rollout: several look at one spec within seconds.

Of few services, since what is rendered of one takes more memory than all that the informers keep of it.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from kvasir_operator.desired.objects import DesiredService
from kvasir_operator.kube.kinds import KubeObject

MAX_SERVICES: Final = 128


class RecentlyDesired:
    """Of the services that were asked for last."""

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[str, str], tuple[tuple[Any, ...], DesiredService]] = OrderedDict()

    def of(self, obj: KubeObject, inputs: tuple[object, ...], render: Callable[[], DesiredService]) -> DesiredService:
        """`inputs`: whatever `render` goes by besides the manifest in `obj`. What it raises is not kept.

        The manifests that it holds are others' too, and not to be changed.
        """
        metadata = obj["metadata"]
        key = metadata["namespace"], metadata["name"]
        made_of: tuple[Any, ...] = (
            obj.get("spec"),
            *(metadata.get(name) for name in ("uid", "generation", "labels", "annotations")),
            *inputs,
        )
        found = self._found.pop(key, None)
        if found is None or found[0] != made_of:
            found = made_of, render()
        self._found[key] = found
        if len(self._found) > MAX_SERVICES:
            self._found.popitem(last=False)
        return found[1]
