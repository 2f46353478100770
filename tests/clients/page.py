"""The table of docs/clients.md: what is said to work is what the scripts try."""

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"


@dataclass(frozen=True)
class Row:
    client: str
    version: str
    script: str
    features: tuple[str, ...]


def rows() -> list[Row]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [
        Row(client.strip("`"), version, script.strip("`"), tuple(features.split(", ")))
        for client, version, script, features in cells
    ]
