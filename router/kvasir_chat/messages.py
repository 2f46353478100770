"""What a chat template sees of a message in OpenAI's shape.

Templates differ in what they take for "no content" and for a call's arguments, so both are values that answer either
way: to a template that looks, and to one that prints.
"""

from collections.abc import Callable, ItemsView, Mapping, Sequence
from typing import Any

import jinja2
import msgspec

Message = dict[str, Any]
_ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the same, in the order in which transformers looks for it."""


class ConversationRefusedError(Exception):
    """`field`: what is at fault, in the request's own words."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


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


def template_message(
    message: Any, index: int, shaped: Callable[[str, str | list[Message]], str | list[Message]], knows_developer: bool
) -> Message:
    """`shaped`: a role's content as the template takes it. Raises ConversationRefusedError."""
    field = f"messages[{index}]"
    if not isinstance(message, dict) or (role := message.get("role")) not in _ROLES:
        raise ConversationRefusedError(f"{field}: it is no message with one of the roles {', '.join(_ROLES)}", field)
    if role == "developer" and not knows_developer:
        role = "system"  # OpenAI renamed it; most templates know the old name
    content = _content(message.get("content"), f"{field}.content")
    if content is None and role != "assistant":
        raise ConversationRefusedError(
            f"{field}.content: a message of the role {message['role']!r} needs content", f"{field}.content"
        )
    seen: Message = {"role": role, "content": NoContent() if content is None else shaped(role, content)}
    seen |= {key: value for key in ("name", "tool_call_id") if (value := message.get(key)) is not None}
    reasoning = next((value for key in _REASONING if (value := message.get(key)) is not None), None)
    if reasoning is not None:
        seen |= dict.fromkeys(_REASONING, reasoning)
    if calls := message.get("tool_calls"):
        seen["tool_calls"] = [_call(call) for call in calls]
    return seen


def joined_parts(parts: Sequence[Message]) -> str:
    return "\n".join(part["text"] for part in parts)


def _content(content: Any, field: str) -> str | list[Message] | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(map(_is_text, content)):
        return [{"type": "text", "text": part["text"]} for part in content]
    raise ConversationRefusedError(f"{field}: it is neither text nor a list of parts of text", field)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _call(call: Any) -> Any:
    """OpenAI sends a call's arguments as JSON in a string."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {**call, "function": {**function, "arguments": _arguments(text)}}


def _arguments(text: str) -> Arguments | UnreadableArguments:
    try:
        return Arguments(msgspec.json.decode(text, type=dict[str, Any]), text)
    except (msgspec.DecodeError, RecursionError):
        return UnreadableArguments(text)
