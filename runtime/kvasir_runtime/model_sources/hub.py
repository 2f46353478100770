"""Models of a Hugging Face hub, or of a mirror that `HF_ENDPOINT` names: `hf://ORG/NAME[@REVISION]`.

Addresses, credentials (`HF_TOKEN`) and errors are huggingface_hub's. Files come over plain HTTP and not through hf_xet,
so that each byte counts as progress, survives a kill and passes any proxy (docs/decisions/0031).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from typing import Final

import httpx2
from huggingface_hub import HfApi, get_token, hf_hub_url
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from kvasir_runtime.errors import (
    DownloadStalledError,
    FetchError,
    ModelAccessDeniedError,
    ModelNotFoundError,
    SourceUnreachableError,
)
from kvasir_runtime.model_sources.digest import Digest
from kvasir_runtime.model_sources.source import Listing, RemoteFile

_DEFAULT_REVISION: Final = "main"
# Of statuses below 500, those that pass by themselves: a time-out, and too many requests.
_PASSING: Final = frozenset({408, 429})


class HubSource:
    """`stall_seconds`: how long to wait for a byte."""

    def __init__(self, address: str, stall_seconds: float) -> None:
        self._address = address
        self._repository, _, revision = address.removeprefix("hf://").partition("@")
        self._revision = revision or _DEFAULT_REVISION
        self._stall_seconds = stall_seconds
        self._endpoint = os.environ.get("HF_ENDPOINT") or None
        self._commit: str | None = None

    @property
    def address(self) -> str:
        return self._address

    def list_files(self) -> Listing:
        with self._translated():
            info = HfApi(endpoint=self._endpoint).model_info(
                self._repository, revision=self._revision, files_metadata=True, timeout=self._stall_seconds
            )
        siblings = info.siblings or ()
        if unsized := next((each.rfilename for each in siblings if each.size is None), None):
            raise ModelNotFoundError(
                f"{self._address}: the hub does not say how large {unsized} is: HF_ENDPOINT must be a hub, or a mirror "
                "that tells the sizes of files"
            )
        self._commit = info.sha
        return Listing(info.sha, tuple(map(_remote_file, siblings)))

    @contextmanager
    def read(self, file: RemoteFile, offset: int) -> Iterator[Iterator[bytes]]:
        revision = self._commit or self._revision
        url = hf_hub_url(self._repository, file.path, revision=revision, endpoint=self._endpoint)
        # As it is stored: a range of what is compressed on the way would be another one.
        headers = {**build_hf_headers(), "Range": f"bytes={offset}-", "Accept-Encoding": "identity"}
        with (
            self._translated(),
            get_session().stream("GET", url, headers=headers, timeout=self._stall_seconds) as response,
        ):
            hf_raise_for_status(response)
            chunks = response.iter_bytes()
            is_partial = response.status_code == httpx2.codes.PARTIAL_CONTENT
            yield chunks if is_partial else _without_start(chunks, offset)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (HfHubHTTPError, HFValidationError) as error:
            raise self._refusal(error) from error
        except httpx2.TimeoutException as error:
            raise DownloadStalledError(
                f"{self._address}: no answer, and no byte, for {self._stall_seconds:g} s: {error!r}"
            ) from error
        except JSONDecodeError as error:
            raise SourceUnreachableError(
                f"{self._address}: what answers for the hub is none, as it sends no JSON ({error}): is HF_ENDPOINT a "
                "hub, and does no proxy answer in its place?"
            ) from error
        except (httpx2.HTTPError, ConnectionError) as error:
            raise SourceUnreachableError(f"{self._address}: the hub cannot be reached: {error!r}") from error

    def _refusal(self, error: HfHubHTTPError | HFValidationError) -> FetchError:
        """What the hub's own words come to; they never hold the token."""
        address, repository = self._address, self._repository
        if isinstance(error, GatedRepoError):
            return ModelAccessDeniedError(
                f"{address} is gated: ask for access on its page, and give a token of that account as HF_TOKEN"
            )
        if isinstance(error, RepositoryNotFoundError):
            return ModelNotFoundError(
                f"{address}: the hub has no {repository}, or one that is private: check the name; a private one "
                "needs a token that may read it as HF_TOKEN"
            )
        if isinstance(error, RevisionNotFoundError):
            return ModelNotFoundError(f"{address}: {repository} has no revision {self._revision}: check the name")
        if isinstance(error, HFValidationError):
            return ModelNotFoundError(f"{address}: {error}")
        return self._by_status(error)

    def _by_status(self, error: HfHubHTTPError) -> FetchError:
        status = error.response.status_code
        if status == httpx2.codes.UNAUTHORIZED:
            advice = "give a token as HF_TOKEN" if get_token() is None else "is HF_TOKEN valid, and has it not expired?"
            return ModelAccessDeniedError(f"{self._address}: the hub refuses access (status 401): {advice}")
        if status == httpx2.codes.FORBIDDEN or isinstance(error, DisabledRepoError):
            return ModelAccessDeniedError(
                f"{self._address}: the hub forbids it (status {status}): may this token read it?"
            )
        if status >= 500 or status in _PASSING:
            return SourceUnreachableError(f"{self._address}: the hub answers with status {status}")
        return ModelNotFoundError(f"{self._address}: the hub answers with status {status}")


def _remote_file(sibling: RepoSibling) -> RemoteFile:
    """Large files are known by their SHA-256, others by the name that Git gives them."""
    lfs, blob = sibling.lfs, sibling.blob_id or ""
    digest = Digest("sha256", lfs.sha256) if lfs is not None else Digest("git-blob", blob) if blob else None
    version = lfs.sha256 if lfs is not None else blob
    return RemoteFile(sibling.rfilename, sibling.size or 0, version, digest)


def _without_start(chunks: Iterator[bytes], num_bytes: int) -> Iterator[bytes]:
    """For mirrors and proxies that answer a range with the whole file."""
    for chunk in chunks:
        yield chunk[num_bytes:]
        num_bytes = max(0, num_bytes - len(chunk))
