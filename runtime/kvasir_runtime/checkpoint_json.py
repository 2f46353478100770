"""Reads the JSON files of a checkpoint, which come from anywhere."""

import json
import os
from pathlib import Path
from typing import Any, Final

from kvasir_runtime.errors import ModelLoadError

ADVICE: Final = "correct the file, or download the checkpoint again"


def read_json_object(file: Path) -> dict[str, Any]:
    """Raises ModelLoadError where the file holds anything else; FileNotFoundError where there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not file.is_symlink():
            raise
        raise ModelLoadError(f"{file} is a link to {os.readlink(file)}, which is not there; {ADVICE}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} cannot be read as a JSON object: {error}; {ADVICE}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} holds {shortened(content)}, expected a JSON object; {ADVICE}")
    return content


def read_json_object_if_there(file: Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    return read_json_object(file) if os.path.lexists(file) else {}


def shortened(value: object, most_chars: int = 100) -> str:
    """As an error message shows it."""
    text = repr(value)
    return text if len(text) <= most_chars else f"{text[:most_chars]}..."
