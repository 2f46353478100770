"""How operator, router and engine log: to standard error, lines of text for people or an object of JSON a message.

What a message is about goes as `extra={"request_id": ...}`: fields of the object, and `request_id=...` behind the text.
"""

import logging
from typing import Any, Final, Literal

from pythonjsonlogger.core import RESERVED_ATTRS, merge_record_extra
from pythonjsonlogger.json import JsonFormatter

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

# What a record has anyway, and what uvicorn and kopf put on theirs for their own handlers.
_NO_FIELDS: Final = frozenset({*RESERVED_ATTRS, "taskName", "color_message", "k8s_ref", "k8s_skip", "settings"})


def log_to_stderr(level: LogLevel, log_format: LogFormat) -> None:
    """All of the process's log, its libraries' and warnings too, in place of what was set up before."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)


class TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = merge_record_extra(record, {}, reserved=_NO_FIELDS)
        return " ".join([super().formatMessage(record), *(f"{name}={value}" for name, value in fields.items())])


class JsonLines(JsonFormatter):
    def __init__(self) -> None:
        names = {"levelname": "level", "name": "logger", "exc_info": "exception"}
        super().__init__(
            ["levelname", "name", "message"], timestamp="time", rename_fields=names, reserved_attrs=sorted(_NO_FIELDS)
        )

    def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
        return {**log_data, "level": log_data["level"].lower()}
