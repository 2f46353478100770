#!/usr/bin/env python3
"""Writes the table of values in charts/kvasir/README.md from values.yaml; a test compares the two.

A value is documented by the comment above it that begins with `# --` (helm-docs' style); the comment of a group
documents all of it.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "kvasir"
MARK = "<!-- made from values.yaml by charts/values_table.py -->\n"
DOCUMENTED = re.compile(r"^(?P<comment>(?: *#.*\n)*)(?P<indent> *)(?P<key>\w+):", re.MULTILINE)
INDENT = 2


@dataclass(frozen=True)
class Value:
    """`path` as --set takes it; `default` as values.yaml has it."""

    path: str
    default: Any
    description: str


def documented_values(text: str) -> Iterator[Value]:
    """Every value of a values.yaml that has a description, in its order."""
    defaults = yaml.safe_load(text)
    parents: list[str] = []
    for match in DOCUMENTED.finditer(text):
        parents = [*parents[: len(match["indent"]) // INDENT], match["key"]]
        _, is_documented, description = match["comment"].partition("# -- ")
        if is_documented:
            yield Value(".".join(parents), value_at(defaults, parents), as_one_line(description))


def value_at(values: Any, keys: list[str]) -> Any:
    for key in keys:
        values = values[key]
    return values


def as_one_line(comment: str) -> str:
    return " ".join(line.strip().removeprefix("#").strip() for line in comment.splitlines())


def table(values: Iterator[Value]) -> str:
    rows = [f"| `{value.path}` | `{json.dumps(value.default)}` | {value.description} |" for value in values]
    return "\n".join(["| value | default | |", "| --- | --- | --- |", *rows]) + "\n"


def with_table(readme: str, values: str) -> str:
    """The README with the table of these values in place of the one below the mark."""
    return readme.partition(MARK)[0] + MARK + "\n" + table(documented_values(values))


def main() -> None:
    readme = CHART / "README.md"
    readme.write_text(with_table(readme.read_text(), (CHART / "values.yaml").read_text()))


if __name__ == "__main__":
    main()
