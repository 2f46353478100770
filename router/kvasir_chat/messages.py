"""Messages in OpenAI's shape, and values in them that a chat template sees.

Templates differ in what they take for "no content" and for a call's arguments, so both are values that answer either
way: to a template that looks, and to one that prints.
"""

from collections.abc import ItemsView, Mapping
from typing import Any

import jinja2

Message = dict[str, Any]


class ConversationRefusedError(Exception):
    """`field`: what is at fault, in the request's own words."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def text_of(item: Mapping[str, Any], key: str, field: str) -> str:
    """Raises ConversationRefusedError."""
    value = item.get(key)
    if not isinstance(value, str):
        raise ConversationRefusedError(f"{field}.{key}: a text is expected", f"{field}.{key}")
    return value


class NoContent(jinja2.ChainableUndefined):
    """`content: null`, or none sent: `is none`, not `is defined`, and no text where it is printed or joined to some."""

    def __add__(self, other: Any) -> Any:
        return other

    __radd__ = __add__

    def __call__(self, *args: Any, **kwargs: Any) -> "NoContent":  # type: ignore[override]
        return self

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, NoContent)

    def __hash__(self) -> int:
        return hash(None)


class Arguments(dict[str, Any]):
    """A call's arguments: the object, and where it is printed or joined to text the JSON that the client sent."""

    def __init__(self, value: Mapping[str, Any], text: str) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


class UnreadableArguments(str):
    """Arguments that are no JSON object, as of a call that was cut: their text, and to a template that lists them none.

    They are the model's own words, so the conversation goes on with them.
    """

    __slots__ = ()

    def items(self) -> ItemsView[str, Any]:
        return {}.items()


Mapping.register(UnreadableArguments)  # Jinja's filter `items` asks for one


def is_none(value: object) -> bool:
    """Jinja's test `none`."""
    return value is None or isinstance(value, NoContent)
