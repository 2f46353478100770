"""System messages where a template takes none: behind another one, or behind the first turn.

Coding assistants send both. A template is first shown whether it prints them; where it does not, those that stand first
become one, and a later one becomes a part of the user's turn at its place, so that conversations still begin alike.
"""

from collections.abc import Sequence
from typing import Any

from kvasir_chat.messages import Message

_SYSTEM = ("system", "developer")


def num_leading(messages: Sequence[Any]) -> int:
    return next((index for index, each in enumerate(messages) if not is_system(each)), len(messages))


def is_system(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in _SYSTEM


def gathered(messages: Sequence[Any], count: int) -> list[Any]:
    """The first `count` as one."""
    parts = [part for message in messages[:count] for part in _parts(message)]
    return [{**messages[0], "content": parts}, *messages[count:]]


def as_users(messages: Sequence[Any], start: int) -> list[Any]:
    """Those from `start` on in the user's turns; turns of the user that follow each other then are one."""
    made = [*messages[:start]]
    for message in messages[start:]:
        said = {**message, "role": "user"} if is_system(message) else message
        if len(made) > start and _is_users(made[-1]) and _is_users(said):
            made[-1] = {**made[-1], "content": [*_parts(made[-1]), *_parts(said)]}
        else:
            made.append(said)
    return made


def _is_users(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "user"


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
