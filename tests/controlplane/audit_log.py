"""The API server's audit log, of which each look reads only what is new: tests ask it over and over."""

import json
from pathlib import Path
from typing import Any


class AuditLog:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._events: list[dict[str, Any]] = []

    def events(self) -> list[dict[str, Any]]:
        """Every request that was answered so far and that the policy has logged, in order."""
        with self._path.open("rb") as log:
            log.seek(self._offset)
            for line in log:
                if not line.endswith(b"\n"):
                    break  # it is being written
                self._offset += len(line)
                self._events.append(json.loads(line))
        return self._events
