"""Reads a Hugging Face config.json without transformers: typed look-ups whose errors name key, value and file.

Names of old and new transformers releases are both understood where they differ (dtype, rope parameters).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvasir_runtime.errors import ModelLoadError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HuggingFaceConfig:
    """A key whose value is null counts as absent, except where said."""

    path: Path
    values: Mapping[str, Any]

    def integer(self, name: str, default: int | None = None) -> int:
        """The value of `name`, or the default; without a default the key must be there."""
        value = self.optional_integer(name, default)
        if value is None:
            raise ModelLoadError(f"{self.path}: {name!r} is missing; the model cannot be built without it")
        return value

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        value = self._value(name, int, "a whole number")
        return default if value is None else value

    def number(self, name: str, default: float) -> float:
        value = self._value(name, float, "a number")
        return default if value is None else value

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """Here an explicit null counts, since it switches a feature off (Gemma's soft-caps)."""
        return self._value(name, float, "a number") if name in self.values else default

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, bool, "true or false")
        return default if value is None else value

    def text(self, name: str, default: str) -> str:
        value = self._value(name, str, "a string")
        return default if value is None else value

    def texts(self, name: str) -> list[str] | None:
        return self._value(name, list[str], "a list of strings")

    def integers(self, name: str) -> list[int]:
        """Empty when absent or null."""
        return self._value(name, list[int], "a list of whole numbers") or []

    def mapping(self, name: str) -> Mapping[str, Any]:
        """The object under `name`; empty when absent or null."""
        return self._value(name, dict[str, Any], "an object") or {}

    @property
    def dtype(self) -> str | None:
        """Type in which the checkpoint was saved, if it says so: `dtype`, formerly `torch_dtype`."""
        return self.text("dtype", self.text("torch_dtype", "")) or None

    def _value(self, name: str, kind: type[T], expected: str) -> T | None:
        value = self.values.get(name)
        try:
            return None if value is None else msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise ModelLoadError(f"{self.path}: {name!r} is {value!r}, expected {expected}") from error


def read_config(folder: Path) -> HuggingFaceConfig:
    """Read `folder`/config.json. Raises ModelLoadError when there is none or it is not a JSON object."""
    path = folder / "config.json"
    try:
        return HuggingFaceConfig(path, msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
    except FileNotFoundError as error:
        raise ModelLoadError(
            f"{folder} has no config.json: expected the folder of a Hugging Face checkpoint (config.json, "
            "*.safetensors, tokenizer.json)"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as a JSON object: {error}") from error
