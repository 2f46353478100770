"""API keys and the tenants they belong to, from a mounted Secret's folder or a JSON file; read again on change.

No message here names a key. A new set that is broken lets nobody new in, but what has left it is refused all the same.
"""

import hashlib
import logging
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from kvasir_router.errors import ConfigError, InvalidApiKeyError

logger = logging.getLogger(__name__)

# Kubernetes swaps this link when a Secret changes, so one look at it is one version of all files.
_CURRENT_VERSION = "..data"
KEY_HEADER = b"x-api-key"


@dataclass(frozen=True, slots=True)
class ApiKey:
    value: bytes
    tenant: str


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Raises ConfigError when they cannot be read. Nothing is no key."""
    try:
        keys = _read_folder(path) if path.is_dir() else _read_json(path)
        return tuple(key for key in keys if key.value)
    except (OSError, msgspec.DecodeError, UnicodeError) as error:
        raise ConfigError(
            f"--api-keys-file {path} must be a folder with a file of keys for each tenant, or a JSON object "
            f"key -> tenant: {error}"
        ) from error


def _read_folder(path: Path) -> Iterator[ApiKey]:
    """One file a tenant, one key a line. Kubernetes' own entries, `..data` and what it links to, are folders."""
    current = path / _CURRENT_VERSION
    for file in sorted((current.resolve() if current.is_dir() else path).iterdir()):
        if file.is_file():
            yield from (ApiKey(line.strip(), file.name) for line in file.read_bytes().splitlines())


def _read_json(path: Path) -> Iterator[ApiKey]:
    for value, tenant in msgspec.json.decode(path.read_bytes(), type=dict[str, str]).items():
        yield ApiKey(value.strip().encode(), tenant)


def check_owners(keys: Iterable[ApiKey]) -> None:
    """Raises ConfigError when a key belongs to two tenants: nobody could tell whose request it is."""
    owners: dict[bytes, str] = {}
    for key in keys:
        owner = owners.setdefault(key.value, key.tenant)
        if owner != key.tenant:
            raise ConfigError(
                f"--api-keys-file: the tenants {owner} and {key.tenant} have a key in common; give each its own"
            )


class ApiKeys:
    """Holds digests by a secret of this process: neither a dump nor the time that a look-up takes tells of a key.

    The time depends on the digest, and nobody outside can know or choose any byte of that.
    """

    def __init__(self, keys: Iterable[ApiKey], path: Path | None = None) -> None:
        self._digest_secret = secrets.token_bytes(32)
        self._path = path
        self._tenants = self._by_digest(keys)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises ConfigError when there is no key, or none that can be told apart."""
        keys = read_keys(path)
        if not keys:
            raise ConfigError(f"--api-keys-file {path} holds no key, so nobody could be let in")
        check_owners(keys)
        return cls(keys, path)

    def reload(self) -> None:
        """Takes over what has changed. Files that cannot be read change nothing."""
        if self._path is None:
            return
        try:
            keys = read_keys(self._path)
        except ConfigError as error:
            logger.warning("keeping the former API keys: %s", error)
            return
        digests = self._by_digest(keys)
        try:
            check_owners(keys)
        except ConfigError as error:
            logger.warning("keeping of the former API keys those that are still there: %s", error)
            digests = {digest: tenant for digest, tenant in self._tenants.items() if digest in digests}
        self._tenants = digests

    def tenant_of(self, raw_headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Raises InvalidApiKeyError (401) when the key, in OpenAI's header or in Anthropic's, is missing or unknown."""
        key = _given_key(raw_headers)
        if key is None:
            raise InvalidApiKeyError("no API key given; send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`")
        tenant = self._tenants.get(self._digest(key))
        if tenant is None:
            raise InvalidApiKeyError("the API key given is not known here")
        return tenant

    def _by_digest(self, keys: Iterable[ApiKey]) -> dict[bytes, str]:
        return {self._digest(key.value): key.tenant for key in keys}

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=32, key=self._digest_secret).digest()


def _given_key(raw_headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    named = dict(raw_headers)
    scheme, _, key = named.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else named.get(KEY_HEADER)
