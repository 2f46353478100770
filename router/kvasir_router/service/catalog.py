"""Which models a service answers for: its own with its aliases, and what its endpoints list besides."""

from collections.abc import Callable, Set
from typing import Any

from kvasir_router.errors import UnknownModelError


class ModelCatalog:
    """The own model, its aliases and named adapters stay listed at zero pods; `listed()` as long as an endpoint has it.

    Aliases are the router's alone: `resolve` gives the name that engines know.
    """

    def __init__(
        self,
        own: str | None,
        aliases: tuple[str, ...],
        adapters: tuple[str, ...],
        listed: Callable[[], Set[str]],
        created: int,
        max_model_len: Callable[[str], int | None] = lambda model: None,
    ) -> None:
        self._own = own
        self._aliases = dict.fromkeys(aliases, own)
        self._adapters = dict.fromkeys(adapters)
        self._listed = listed
        self._created = created
        self._max_model_len = max_model_len

    def names(self) -> tuple[str, ...]:
        """The own model, its aliases and adapters, then all others."""
        named = dict.fromkeys((*(() if self._own is None else (self._own,)), *self._aliases, *self._adapters))
        return (*named, *sorted(self._listed() - named.keys()))

    def resolve(self, model: str) -> str:
        return self._aliases.get(model) or model

    def is_known(self, model: str) -> bool:
        if model == self._own or model in self._aliases or model in self._adapters:
            return True
        return model in self._listed()

    def check(self, model: str | None) -> None:
        """Raises UnknownModelError (404). A missing name is the engine's to judge; nothing known refuses nothing."""
        if model is None or self.is_known(model):
            return
        known = self.names()
        if known:
            raise UnknownModelError(
                f"the model {model!r} is not served here; served are: {', '.join(known)}", param="model"
            )

    def cards(self) -> list[dict[str, Any]]:
        return [self.card(name) for name in self.names()]

    def card(self, name: str) -> dict[str, Any]:
        """One entry of /v1/models; an alias names the model it stands for as its root."""
        root = self.resolve(name)
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "kvasir", "root": root}
        length = self._max_model_len(root)
        return card if length is None else card | {"max_model_len": length}
