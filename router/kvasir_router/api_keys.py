"""API keys and the tenants they belong to, from a JSON file or a mounted Secret's folder; read again on change."""

import hashlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

import msgspec

from kvasir_router.errors import ConfigError, InvalidApiKeyError

logger = logging.getLogger(__name__)


def read_keys(path: Path) -> dict[str, str]:
    """Key -> tenant. Raises ConfigError when there is none or the file is not a JSON object of strings."""
    try:
        keys = _read_folder(path) if path.is_dir() else msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-keys-file {path} must be a JSON object or a folder: {error}") from error
    if not keys:
        raise ConfigError(f"--api-keys-file {path} holds no key, so nobody could be let in")
    return keys


def _read_folder(path: Path) -> dict[str, str]:
    """As Kubernetes mounts a Secret: the file's name is the key; names with a leading dot are its own."""
    return {file.name: file.read_text().strip() for file in path.iterdir() if not file.name.startswith(".")}


class ApiKeys:
    """Holds digests, so that neither a dump nor the time a look-up takes tells a key."""

    def __init__(self, tenants: Mapping[str, str], path: Path | None = None) -> None:
        self._path = path
        self._set(tenants)

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls(read_keys(path), path)

    def reload(self) -> None:
        """Takes over changed keys; keeps the old ones when the new cannot be read."""
        if self._path is None:
            return
        try:
            self._set(read_keys(self._path))
        except ConfigError as error:
            logger.warning("keeping the former API keys: %s", error)

    def tenant_of(self, raw_headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Raises InvalidApiKeyError (401) when the bearer token is missing or unknown."""
        value = next((value for name, value in raw_headers if name == b"authorization"), None)
        if value is None:
            raise InvalidApiKeyError("no API key given; send it as `Authorization: Bearer KEY`")
        scheme, _, key = value.partition(b" ")
        tenant = self._tenants.get(_digest(key.strip())) if scheme.lower() == b"bearer" else None
        if tenant is None:
            raise InvalidApiKeyError("the API key given is not known here")
        return tenant

    def _set(self, tenants: Mapping[str, str]) -> None:
        self._tenants = {_digest(key.encode()): tenant for key, tenant in tenants.items()}


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
