"""Models in a bucket of S3, or of a store that speaks as S3 does: `s3://BUCKET/PREFIX`.

Credentials, region and endpoint are found as boto3 finds them (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL_S3, a web identity,
the machine's role); without any, requests are unsigned, as public buckets want them.
"""

import os
from base64 import b64decode
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, Final

import boto3
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ReadTimeoutError,
)
from urllib3.exceptions import HTTPError as TransportError

from kvasir_runtime.errors import (
    ConfigurationError,
    DownloadStalledError,
    FetchError,
    ModelAccessDeniedError,
    ModelCorruptError,
    ModelNotFoundError,
    SourceUnreachableError,
)
from kvasir_runtime.model_sources.digest import Digest
from kvasir_runtime.model_sources.selection import may_be_served
from kvasir_runtime.model_sources.source import Listing, RemoteFile

_CHUNK_BYTES: Final = 1 << 20
_MISSING: Final = frozenset({"NoSuchBucket", "NoSuchKey", "404", "NotFound"})
_DENIED: Final = frozenset(
    {
        "403",
        "AccessDenied",
        "AllAccessDisabled",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
_CHANGED: Final = frozenset({"412", "PreconditionFailed", "416", "InvalidRange"})


class S3Source:
    """`stall_seconds`: how long to wait for a byte."""

    def __init__(self, address: str, stall_seconds: float) -> None:
        self._address = address
        self._bucket, _, prefix = address.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._stall_seconds = stall_seconds
        try:
            self._client = _client(stall_seconds)
        except (ValueError, BotoCoreError) as error:
            advice = "check AWS_ENDPOINT_URL_S3 (a URL, with http:// or https://), AWS_REGION and AWS_PROFILE"
            raise ConfigurationError(f"{address}: {error}: {advice}") from error

    @property
    def address(self) -> str:
        return self._address

    def list_files(self) -> Listing:
        with self._translated():
            sizes = {key: size for key, size in self._sizes() if not key.endswith("/")}
            files = tuple(self._remote_file(key, size) for key, size in sizes.items())
        if not files:
            raise ModelNotFoundError(f"{self._address}: bucket {self._bucket} has nothing below {self._prefix!r}")
        return Listing(None, files)

    @contextmanager
    def read(self, file: RemoteFile, offset: int) -> Iterator[Iterator[bytes]]:
        with self._translated():
            answer = self._client.get_object(
                Bucket=self._bucket, Key=self._prefix + file.path, Range=f"bytes={offset}-", IfMatch=file.version
            )
            with closing(answer["Body"]) as body:
                yield body.iter_chunks(_CHUNK_BYTES)

    def _sizes(self) -> Iterator[tuple[str, int]]:
        """By key."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
        for page in pages:
            yield from ((entry["Key"], entry["Size"]) for entry in page.get("Contents", ()))

    def _remote_file(self, key: str, size_bytes: int) -> RemoteFile:
        """Of what is never served the listing is enough."""
        path = key.removeprefix(self._prefix)
        if not may_be_served(path):
            return RemoteFile(path, size_bytes, "", None)
        head = self._client.head_object(Bucket=self._bucket, Key=key, ChecksumMode="ENABLED")
        return RemoteFile(path, head["ContentLength"], head["ETag"], self._digest(key, head))

    def _digest(self, key: str, head: dict[str, Any]) -> Digest | None:
        """The best of what the store knows of the whole object."""
        etag, is_whole = head["ETag"].strip('"'), head.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
        if is_whole and "-" not in head.get("ChecksumSHA256", "-"):
            return Digest("sha256", _hexadecimal(head["ChecksumSHA256"]))
        if is_whole and "-" not in head.get("ChecksumCRC32", "-"):
            return Digest("crc32", head["ChecksumCRC32"])
        if head.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in head:
            return None  # then the ETag is of the encrypted bytes
        md5, _, num_parts = etag.partition("-")
        if not _is_md5(md5):
            return None
        return self._digest_of_parts(key, etag, int(num_parts), head) if num_parts else Digest("md5", md5)

    def _digest_of_parts(self, key: str, etag: str, num_parts: int, head: dict[str, Any]) -> Digest | None:
        """None where the parts are not of one size, which nothing but the number of them tells."""
        first = self._client.head_object(Bucket=self._bucket, Key=key, PartNumber=1)["ContentLength"]
        is_even = first > 0 and -(-head["ContentLength"] // first) == num_parts
        return Digest("md5-of-parts", etag, first) if is_even else None

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            raise self._refusal(error) from error
        except (ConnectTimeoutError, ReadTimeoutError) as error:
            raise DownloadStalledError(
                f"{self._address}: no answer, and no byte, for {self._stall_seconds:g} s: {error}"
            ) from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise ModelAccessDeniedError(f"{self._address}: {error}: set AWS_ACCESS_KEY_ID and its secret") from error
        except ParamValidationError as error:
            raise ModelNotFoundError(f"{self._address}: {error}: check bucket and prefix") from error
        except (BotoCoreError, TransportError) as error:
            raise SourceUnreachableError(f"{self._address}: the store cannot be reached: {error}") from error

    def _refusal(self, error: ClientError) -> FetchError:
        details = error.response.get("Error", {})
        code, message = str(details.get("Code", "")), f"{self._address}: the store says {error}"
        if code in _MISSING:
            return ModelNotFoundError(f"{message}: check bucket and prefix, and AWS_ENDPOINT_URL_S3 of another store")
        if code in _DENIED:
            return ModelAccessDeniedError(f"{message}: may these credentials list and read the bucket?")
        if code in _CHANGED:
            return ModelCorruptError(f"{message}: the object was replaced meanwhile")
        return SourceUnreachableError(message)


def _client(stall_seconds: float) -> Any:
    session = boto3.Session()
    is_public = session.get_credentials() is None
    config = Config(
        signature_version=UNSIGNED if is_public else None,
        connect_timeout=stall_seconds,
        read_timeout=stall_seconds,
        retries={"mode": "standard", "max_attempts": 3},
        max_pool_connections=32,
    )
    # boto3 itself reads AWS_DEFAULT_REGION alone, where other SDKs and web identities say AWS_REGION.
    return session.client("s3", config=config, region_name=session.region_name or os.environ.get("AWS_REGION"))


def _hexadecimal(base64_text: str) -> str:
    return b64decode(base64_text).hex()


def _is_md5(text: str) -> bool:
    return len(text) == 32 and set(text) <= set("0123456789abcdef")
