"""What a field of the manifest may hold, written in its `Annotated` type; the same words as in the CRD's schema."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """Smallest and largest number, both allowed."""

    minimum: float
    maximum: float


@dataclass(frozen=True)
class Pattern:
    """Regular expression (None: any text) and the longest text."""

    regex: str | None
    max_length: int


@dataclass(frozen=True)
class Items:
    """Longest list or map; `unique` for a list of values, `unique_by` for a list of objects with that field as key."""

    maximum: int
    unique: bool = False
    unique_by: str | None = None


@dataclass(frozen=True)
class Key:
    """The manifest's spelling of a field where camelCase of its Python name is not it."""

    name: str


@dataclass(frozen=True)
class Format:
    """What a text is, in a word of OpenAPI; the API server checks it."""

    name: str
