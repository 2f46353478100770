"""What the user sees of a local run: its own lines and the pods' logs, each behind an aligned prefix."""

import asyncio
import sys
from collections.abc import Sequence
from typing import TextIO

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # ANSI foregrounds that read on dark and light
_LONGEST_LINE_BYTES = 65536
OWN_NAME = "local"


class Console:
    """Writes whole lines to one stream. Colour only where the stream is a terminal."""

    def __init__(self, names: Sequence[str], stream: TextIO = sys.stdout) -> None:
        self._stream = stream
        all_names = [OWN_NAME, *names]
        width = max(len(name) for name in all_names) + 2
        self._prefixes = {name: self._coloured(f"[{name}]".ljust(width), index) for index, name in enumerate(all_names)}

    def say(self, text: str) -> None:
        """A line of `local` itself."""
        self.write(OWN_NAME, text)

    def write(self, name: str, text: str) -> None:
        self._stream.write(f"{self._prefixes[name]} {text}\n")
        self._stream.flush()

    async def relay(self, name: str, source: asyncio.StreamReader) -> None:
        """Writes a pod's output line by line until it ends; a line without end is cut into pieces."""
        rest = b""
        while chunk := await source.read(_LONGEST_LINE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self.write(name, line.decode(errors="replace").rstrip("\r"))
            if len(rest) >= _LONGEST_LINE_BYTES:
                self.write(name, rest.decode(errors="replace"))
                rest = b""
        if rest:
            self.write(name, rest.decode(errors="replace"))

    def _coloured(self, text: str, index: int) -> str:
        return f"\033[{_COLOURS[index % len(_COLOURS)]}m{text}\033[0m" if self._stream.isatty() else text
