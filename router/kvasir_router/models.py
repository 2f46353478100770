"""Which models the router answers for: those named by flags, else those the endpoints report."""

from collections.abc import Callable, Set
from typing import Any

from kvasir_router.errors import UnknownModelError


class ModelCatalog:
    """`names`: served name, then aliases; empty means that `learned()` tells. Named models stay listed at zero pods."""

    def __init__(self, names: tuple[str, ...], learned: Callable[[], Set[str]], created: int) -> None:
        self._names = names
        self._learned = learned
        self._created = created

    def names(self) -> tuple[str, ...]:
        return self._names or tuple(sorted(self._learned()))

    def is_known(self, model: str) -> bool:
        return model in self._names or (not self._names and model in self._learned())

    def check(self, model: str | None) -> None:
        """Raises UnknownModelError (404). A missing name is the engine's to judge; nothing known refuses nothing."""
        if model is None or self.is_known(model):
            return
        known = self.names()
        if known:
            raise UnknownModelError(
                f"the model {model!r} is not served here; served are: {', '.join(known)}", param="model"
            )

    def listing(self) -> dict[str, Any]:
        return {"object": "list", "data": [self.card(name) for name in self.names()]}

    def card(self, name: str) -> dict[str, Any]:
        """One entry of /v1/models; an alias names the model it stands for as its root."""
        root = self._names[0] if self._names else name
        return {"id": name, "object": "model", "created": self._created, "owned_by": "kvasir", "root": root}
