"""Values without quotes, typed by a tool's schema: each is made JSON as it comes, as far as its beginning tells what it
will be."""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from kvasir_runtime.talk.literals import JSON_OR_PYTHON, escaped, read_value
from kvasir_runtime.talk.scanner import Reading, Scanner, Write

ANY: Final = frozenset({"null", "integer", "number", "boolean", "object", "array", "string"})
TEXT: Final = frozenset({"string"})
MAX_REFS: Final = 32
_BRACKETS: Final = {"{": "object", "[": "array"}
_NUMBER_BEGUN: Final = re.compile(r"-?[0-9]*\.?[0-9]*(?:[eE][+-]?[0-9]*)?\s*")
_WORDS: Final = {
    "null": ("null", "none"),
    "boolean": ("true", "false"),
}


def types_of(schema: Any, root: Any, depth: int = 0) -> frozenset[str]:
    """What values of a schema may be; none: it does not say."""
    if not isinstance(schema, dict) or depth > MAX_REFS:
        return frozenset()
    types = set(_own_types(schema))
    if isinstance(reference := schema.get("$ref"), str):
        types |= types_of(_referred(reference, root), root, depth + 1)
    for keyword in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(keyword)
        for branch in branches if isinstance(branches, list) else ():
            types |= types_of(branch, root, depth + 1)
    return frozenset(types)


def _own_types(schema: dict[str, Any]) -> Iterator[str]:
    declared = schema.get("type")
    yield from [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else ()
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if declared is None and isinstance(values, list):
        yield from (_type_of(value) for value in values)


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _referred(reference: str, root: Any) -> Any:
    found = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        key = step.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return found


class ParameterValue:
    """One that comes in pieces. What is of none of its types is text."""

    def __init__(self, types: frozenset[str], write: Write) -> None:
        self._types = types or TEXT
        self._write = write
        self._held = ""
        self._scanner: Scanner | None = None
        self._reading: Reading[bool] | None = None
        self._is_text = False

    def add(self, text: str) -> None:
        if self._is_text:
            self._write(escaped(text))
        elif self._scanner is not None:
            self._scanner.add(text)
            self._read_on()
        else:
            self._held += text
            self._decide()

    def end(self) -> None:
        if self._is_text:
            self._write('"')
        elif self._scanner is not None:
            self._scanner.end(is_cut=False)
            self._read_on()
        else:
            self._write(as_json(self._held, self._types))

    def cut(self) -> None:
        """What is held is no whole value."""
        self._write(self._held)
        self._held = ""
        if self._scanner is not None:
            self._scanner.end(is_cut=True)
            self._read_on()

    def _decide(self) -> None:
        begun = self._held.lstrip()
        if self._types == TEXT or (begun and "string" in self._types and not _may_be_other(begun, self._types)):
            self._is_text = True
            self._write('"' + escaped(self._held))
            self._held = ""
        elif begun and "string" not in self._types and _BRACKETS.get(begun[0]) in self._types:
            self._scanner = Scanner()
            self._reading = self._read(self._scanner)
            self._scanner.add(begun)
            self._held = ""
            self._read_on()

    def _read(self, scanner: Scanner) -> Reading[bool]:
        yield from read_value(scanner, JSON_OR_PYTHON, self._write)
        while rest := (yield from scanner.char()):
            self._write(scanner.take(len(rest)))
        return True

    def _read_on(self) -> None:
        if self._reading is not None:
            next(self._reading, None)


def _may_be_other(begun: str, types: frozenset[str]) -> bool:
    """Whether what begins so may come to be of a type that is not text."""
    if types & {"integer", "number"} and _NUMBER_BEGUN.fullmatch(begun):
        return True
    word = begun.rstrip().lower()
    if any(each.startswith(word) for name, words in _WORDS.items() if name in types for each in words):
        return True
    if "boolean" in types and word in ("0", "1"):
        return True
    return _BRACKETS.get(begun[0]) in types


def as_json(text: str, types: frozenset[str]) -> str:
    """A whole value as JSON: of the first of its types that it can be, else text."""
    bare = text.strip()
    if "null" in types and bare.lower() in _WORDS["null"]:
        return "null"
    value, spelled = _read_whole(bare)
    if types & {"integer", "number"} and type(value) in (int, float):
        is_whole = isinstance(value, int) or value.is_integer()
        if "number" in types or is_whole:
            return spelled
    if "boolean" in types and bare.lower() in ("true", "false", "0", "1"):
        return "true" if bare.lower() in ("true", "1") else "false"
    if ("object" in types and isinstance(value, dict)) or ("array" in types and isinstance(value, list)):
        return spelled
    return f'"{escaped(text)}"'


def _read_whole(text: str) -> tuple[Any, str]:
    """A value and its JSON; else None."""
    scanner, pieces = Scanner(), list[str]()
    scanner.add(text)
    scanner.end(is_cut=False)
    for _ in read_value(scanner, JSON_OR_PYTHON, pieces.append):
        pass
    spelled = "".join(pieces)
    try:
        return (None, "") if scanner.take(1) else (json.loads(spelled), spelled)
    except ValueError:
        return None, ""
