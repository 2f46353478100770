"""The commands that the documentation tells a reader to type, as whole lines without their comments."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "kvasir"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), CHART / "README.md")
RUNBOOKS = CHART / "RUNBOOKS.md"
"""Its commands stand in sentences, as `kubectl ...`."""
IMAGES = ROOT / "images" / "README.md"
"""Its commands are indented, as is what they print."""
_FENCED = re.compile(r"^```(sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def documented(prefix: str = "") -> list[Command]:
    """Those that begin with `prefix`, each once a page."""
    found = [Command(_name(page), text) for page in PAGES for text in _of_page(page.read_text())]
    found += [
        Command(_name(RUNBOOKS), text) for text in re.findall(r"`((?:kubectl|helm) [^`]+)`", RUNBOOKS.read_text())
    ]
    indented = re.findall(r"^    ((?:git|docker|e2e)\b\S*.*?)(?:\s+#.*)?$", IMAGES.read_text(), re.MULTILINE)
    found += [Command(_name(IMAGES), text) for text in indented]
    return [command for command in dict.fromkeys(found) if command.text.startswith(prefix)]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _of_page(text: str) -> Iterator[str]:
    for kind, block in _FENCED.findall(text):
        lines = block.splitlines()
        if kind == "console":  # with what is printed between
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        yield from _whole(lines)


def _whole(lines: list[str]) -> Iterator[str]:
    """Lines that go on, by a backslash, an open quote or a document until EOF, joined."""
    command = ""
    for line in lines:
        command = f"{command}\n{line}" if command else line
        if line.endswith("\\") or not _is_closed(command):
            continue
        if "<<EOF" in command and line != "EOF":
            continue
        yield re.sub(r"\s+#\s.*$", "", command.replace("\\\n", ""), flags=re.MULTILINE).strip()
        command = ""
    assert not command, f"this does not end: {command}"


def _is_closed(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True
