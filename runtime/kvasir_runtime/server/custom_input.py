"""The text that a custom tool is called with, read out of its only argument as that comes.

A model writes `{"input": "..."}` in pieces that are cut anywhere. What is no such object is the text itself.
"""

import json
import re

from kvasir_chat.open_responses import CUSTOM_INPUT

_HEAD = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_WHOLE = re.compile(rf'(?:[^"\\]|{_HIGH}{_LOW}|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{{4}}|\\["\\/bfnrt])+')
"""Characters and escapes that no following piece changes."""


class CustomInput:
    def __init__(self) -> None:
        self._rest = ""
        self._is_text = False
        """The argument's text has begun."""
        self._has_ended = False

    def feed(self, piece: str) -> str:
        """What is known now of the text."""
        self._rest += piece
        if not self._is_text and (head := _HEAD.match(self._rest)) is not None:
            self._is_text, self._rest = True, self._rest[head.end() :]
        if not self._is_text or self._has_ended or (found := _WHOLE.match(self._rest)) is None:
            self._has_ended = self._has_ended or (self._is_text and self._rest.startswith('"'))
            return ""
        self._rest = self._rest[found.end() :]
        self._has_ended = self._rest.startswith('"')
        return str(json.loads(f'"{found[0]}"', strict=False))

    def finish(self) -> str:
        """What was held back: all of it where it was no such object, and an escape that was cut or is none."""
        return "" if self._has_ended else self._rest
