"""The seam between what is downloaded and where from: a source lists its files and reads each from an offset on."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from kvasir_runtime.model_sources.digest import Digest


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """`path` is below the model's folder, with slashes. `version` changes with the content."""

    path: str
    size_bytes: int
    version: str
    digest: Digest | None
    """None where the source knows none that can be computed: then the size is all that is checked."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one revision. `revision`: None where the source has none."""

    revision: str | None
    files: tuple[RemoteFile, ...]


class Source(Protocol):
    """Its methods raise FetchError; TransientFetchError where the same may work when it is tried again."""

    @property
    def address(self) -> str:
        """As the manifest writes it."""

    def list_files(self) -> Listing:
        """All files that it has. The same ones are read afterwards, whatever is published meanwhile."""

    def read(self, file: RemoteFile, offset: int) -> AbstractContextManager[Iterator[bytes]]:
        """The file's bytes from `offset` on, which lies within it."""
