"""Which format a model writes, told by its chat template; where it has none, by its vocabulary."""

from collections.abc import Collection, Iterable
from typing import Protocol

from kvasir_runtime.talk.formats import FORMATS, REASONING


class _Described(Protocol):
    @property
    def shown_by(self) -> tuple[tuple[str, ...], ...]: ...


def detect_calls(template: str, tokens: Collection[str] = ()) -> str | None:
    """The name in FORMATS, the first of those that mean the same. None: nothing shows one."""
    return _detected(FORMATS.items(), template, tokens)


def detect_reasoning(template: str, tokens: Collection[str] = ()) -> str | None:
    """The name in REASONING, the first of those that mean the same. None: nothing shows one."""
    return _detected(REASONING.items(), template, tokens)


def _detected(formats: Iterable[tuple[str, _Described]], template: str, tokens: Collection[str]) -> str | None:
    for name, described in formats:
        for texts in described.shown_by:
            if all(text in template if template else text in tokens for text in texts):
                return name
    return None
