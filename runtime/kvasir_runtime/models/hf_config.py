"""Reads a Hugging Face config.json without transformers: typed look-ups whose errors name key, value and file.

Names of old and new transformers releases are both understood where they differ (dtype, rope parameters).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir_runtime.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class HuggingFaceConfig:
    path: Path
    values: Mapping[str, Any]

    def integer(self, name: str, default: int | None = None) -> int:
        """The value of `name`, or the default; without a default the key must be there."""
        value = self.optional_integer(name, default)
        if value is None:
            raise ModelLoadError(f"{self.path}: {name!r} is missing; the model cannot be built without it")
        return value

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        value = self.values.get(name, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._wrong_type(name, value, "a whole number")
        return default if value is None else value

    def number(self, name: str, default: float) -> float:
        value = self.optional_number(name)
        return default if value is None else value

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """Here an explicit null counts, since it switches a feature off (Gemma's soft-caps)."""
        value = self.values.get(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong_type(name, value, "a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._wrong_type(name, value, "true or false")
        return default if value is None else value

    def text(self, name: str, default: str) -> str:
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong_type(name, value, "a string")
        return default if value is None else value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """The object under `name`; empty when absent or null."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self._wrong_type(name, value, "an object")
        return {} if value is None else value

    def texts(self, name: str) -> list[str] | None:
        value = self.values.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise self._wrong_type(name, value, "a list of strings")
        return value

    @property
    def dtype(self) -> str | None:
        """Type in which the checkpoint was saved, if it says so: `dtype`, formerly `torch_dtype`."""
        return self.text("dtype", self.text("torch_dtype", "")) or None

    def _wrong_type(self, name: str, value: object, expected: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {name!r} is {value!r}, expected {expected}")


def read_config(folder: Path) -> HuggingFaceConfig:
    """Read `folder`/config.json. Raises ModelLoadError when there is none or it is not a JSON object."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelLoadError(
            f"{folder} has no config.json: expected the folder of a Hugging Face checkpoint (config.json, "
            "*.safetensors, tokenizer.json)"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} holds a {type(values).__name__}, expected a JSON object")
    return HuggingFaceConfig(path, values)
