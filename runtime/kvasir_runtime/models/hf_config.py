"""Reads a Hugging Face config.json without transformers: look-ups that take no value of another type or out of range,
whose errors name file, key, what was seen, what is expected and what to do.

Names of old and new transformers releases are both understood where they differ (dtype, rope parameters).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec

from kvasir_runtime.checkpoint_json import ADVICE, read_json_object, shortened
from kvasir_runtime.errors import ModelLoadError

T = TypeVar("T")

MOST: Final = 2**31 - 1
"""Sizes and positions are int32 on devices."""
_Natural = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
_Positive = Annotated[float, msgspec.Meta(ge=1e-30, le=1e30)]
"""Far enough from the ends of float32."""


@dataclass(frozen=True, slots=True)
class HuggingFaceConfig:
    """A key whose value is null counts as absent, but for the `optional_` look-ups, where null means: without it."""

    path: Path
    values: Mapping[str, Any]
    section: str = ""
    """Which object of the file this is, as it stands before the names of keys in messages."""

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = MOST) -> int:
        """The value of `name`, or the default; without a default the key must be there."""
        return self._required(name, self._integer(name, least, most), default)

    def optional_integer(self, name: str, default: int | None) -> int | None:
        return self._integer(name, 1, MOST) if name in self.values else default

    def number(self, name: str, default: float | None = None) -> float:
        """Above 0, or the default; without a default the key must be there."""
        return self._required(name, self._number(name), default)

    def optional_number(self, name: str, default: float | None) -> float | None:
        return self._number(name) if name in self.values else default

    def flag(self, name: str, default: bool) -> bool:
        return self._required(name, self._value(name, bool, "true or false"), default)

    def text(self, name: str, default: str) -> str:
        return self._required(name, self._value(name, str, "a string"), default)

    def texts(self, name: str) -> list[str]:
        """Empty when absent or null, as are the other lists and objects."""
        return self._value(name, list[str], "a list of strings") or []

    def integers(self, name: str) -> list[int]:
        return self._value(name, list[_Natural], "a list of whole numbers from 0") or []

    def numbers(self, name: str) -> list[float]:
        return self._value(name, list[_Positive], "a list of numbers above 0") or []

    def object(self, name: str) -> "HuggingFaceConfig":
        values = self._value(name, dict[str, Any], "an object") or {}
        return HuggingFaceConfig(self.path, values, f"{self.section}{name}.")

    @property
    def dtype(self) -> str | None:
        """Type in which the checkpoint was saved, if it says so: `dtype`, formerly `torch_dtype`."""
        return self.text("dtype", self.text("torch_dtype", "")) or None

    def error(self, name: str, expected: str) -> ModelLoadError:
        """That `name` is not what is expected."""
        seen = shortened(self.values.get(name))
        return ModelLoadError(f"{self.path}: {self.section + name!r} is {seen}, expected {expected}; {ADVICE}")

    def _integer(self, name: str, least: int, most: int) -> int | None:
        kind = Annotated[int, msgspec.Meta(ge=least, le=most)]
        value: int | None = self._value(name, kind, f"a whole number from {least} to {most}")
        return value

    def _number(self, name: str) -> float | None:
        value: float | None = self._value(name, _Positive, "a number above 0")
        return value

    def _required(self, name: str, value: T | None, default: T | None) -> T:
        value = default if value is None else value
        if value is None:
            raise ModelLoadError(
                f"{self.path}: {self.section + name!r} is missing; the model cannot be built without it: {ADVICE}"
            )
        return value

    def _value(self, name: str, kind: type[T], expected: str) -> T | None:
        value = self.values.get(name)
        try:
            return None if value is None else msgspec.convert(_whole(value), kind)
        except msgspec.ValidationError as error:
            raise self.error(name, expected) from error


def _whole(value: Any) -> Any:
    """JSON knows one kind of number, and some tools write every one with a point."""
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read_config(folder: Path, overrides: Mapping[str, Any] | None = None) -> HuggingFaceConfig:
    """Read `folder`/config.json, and `overrides` over it. Raises ModelLoadError when there is none or it is not a JSON
    object."""
    path = folder / "config.json"
    try:
        return HuggingFaceConfig(path, read_json_object(path) | dict(overrides or {}))
    except FileNotFoundError as error:
        raise ModelLoadError(
            f"{folder} has no config.json: expected the folder of a Hugging Face checkpoint (config.json, "
            "*.safetensors, tokenizer.json)"
        ) from error
