"""Models of a bucket, from moto's server, which answers as S3 does."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import boto3
import pytest
from botocore.config import Config
from moto.server import ThreadedMotoServer
from tests.runtime.model_sources.conftest import MODEL, WEIGHTS, files_in

from kvasir_runtime.errors import (
    ConfigurationError,
    ModelAccessDeniedError,
    ModelCorruptError,
    ModelNotFoundError,
    SourceUnreachableError,
)
from kvasir_runtime.model_sources.digest import Digest
from kvasir_runtime.model_sources.progress import ProgressMeter
from kvasir_runtime.model_sources.s3 import S3Source

Download = Callable[..., ProgressMeter]
SECRET = "a-secret-access-key"
PART_BYTES = 5 << 20
CONTENT = {**MODEL, "README.md": b"# A model", "nested/config.json": b"{}"}


@pytest.fixture(scope="module")
def moto_url() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The client, with `s3://models/llama`; the loader's environment points to it."""
    for name, value in {
        "AWS_ENDPOINT_URL_S3": moto_url,
        "AWS_ACCESS_KEY_ID": "an-id",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", region_name="us-east-1")
    client.create_bucket(Bucket="models")
    for path, content in CONTENT.items():
        client.put_object(Bucket="models", Key=f"llama/{path}", Body=content)
    yield client
    _post(f"{moto_url}/moto-api/reset")


def _post(url: str, body: bytes = b"") -> None:
    with urlopen(Request(url, body, {"Content-Type": "text/plain"}, method="POST"), timeout=10):
        """Answered."""


def source(address: str = "s3://models/llama") -> S3Source:
    return S3Source(address, stall_seconds=5)


def digests(address: str = "s3://models/llama") -> dict[str, Digest | None]:
    return {file.path: file.digest for file in source(address).list_files().files}


def test_takes_what_serving_needs_below_the_prefix(bucket: Any, download: Download, tmp_path: Path) -> None:
    download(source(), tmp_path)

    assert files_in(tmp_path) == MODEL


def test_goes_on_from_the_bytes_that_are_there(bucket: Any, download: Download, tmp_path: Path) -> None:
    [file] = [file for file in source().list_files().files if file.path == WEIGHTS]
    with source().read(file, 2_999_990) as chunks:
        assert b"".join(chunks) == MODEL[WEIGHTS][-10:]


@pytest.mark.parametrize(
    ("options", "kind"), [({"ChecksumAlgorithm": "SHA256"}, "sha256"), ({"ChecksumAlgorithm": "CRC32"}, "crc32")]
)
def test_the_checksum_that_it_was_stored_with_is_compared(bucket: Any, options: dict[str, str], kind: str) -> None:
    bucket.put_object(Bucket="models", Key="llama/x.json", Body=b"{}", **options)
    found = digests()["x.json"]

    assert found is not None
    assert found.kind == kind


def test_else_the_etag_is(moto_url: str, bucket: Any, tmp_path: Path, download: Download) -> None:
    with_etags_alone(bucket)

    found = digests()
    assert {path: digest.kind for path, digest in found.items() if digest is not None} == dict.fromkeys(MODEL, "md5")
    assert found["README.md"] is None, "of what is not served nothing but the listing is asked for"
    download(source(), tmp_path)
    assert files_in(tmp_path) == MODEL


def with_etags_alone(bucket: Any) -> None:
    """As older clients stored objects, and other stores do."""
    plain = Config(request_checksum_calculation="when_required")
    client = boto3.client("s3", region_name="us-east-1", config=plain)
    for path, content in CONTENT.items():
        client.put_object(Bucket="models", Key=f"llama/{path}", Body=content)


def uploaded_in_parts(bucket: Any, *sizes: int) -> bytes:
    """The content of a new object `llama/big.safetensors`, whose parts have these sizes."""
    parts = [bytes([65 + index]) * size for index, size in enumerate(sizes)]
    upload = bucket.create_multipart_upload(Bucket="models", Key="llama/big.safetensors")["UploadId"]
    where = {"Bucket": "models", "Key": "llama/big.safetensors", "UploadId": upload}
    done = [
        {"PartNumber": number, "ETag": bucket.upload_part(**where, PartNumber=number, Body=part)["ETag"]}
        for number, part in enumerate(parts, start=1)
    ]
    bucket.complete_multipart_upload(**where, MultipartUpload={"Parts": done})
    return b"".join(parts)


def test_of_an_upload_in_parts_the_etag_of_its_parts_is(bucket: Any, download: Download, tmp_path: Path) -> None:
    content = uploaded_in_parts(bucket, PART_BYTES, PART_BYTES, 10)
    found = digests()["big.safetensors"]

    assert found is not None
    assert (found.kind, found.part_bytes) == ("md5-of-parts", PART_BYTES)
    download(source(), tmp_path)
    assert files_in(tmp_path)["big.safetensors"] == content


def test_of_uneven_parts_nothing_but_the_size_is_known(bucket: Any) -> None:
    uploaded_in_parts(bucket, 2 * PART_BYTES, PART_BYTES, PART_BYTES)

    assert digests()["big.safetensors"] is None


def test_an_object_that_is_replaced_meanwhile_is_not_mixed_with_itself(bucket: Any) -> None:
    [file] = [file for file in source().list_files().files if file.path == WEIGHTS]
    bucket.put_object(Bucket="models", Key=f"llama/{WEIGHTS}", Body=b"other" * 700_000)

    with pytest.raises(ModelCorruptError, match="replaced meanwhile"), source().read(file, 1_000_000) as chunks:
        list(chunks)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("s3://nowhere/llama", "NoSuchBucket.*check bucket and prefix"),
        ("s3://models/gone", "has nothing below 'gone/'"),
        ("s3://models/llama/nested", r"no \*\.safetensors"),
    ],
)
def test_what_is_not_there_is_named(
    bucket: Any, download: Download, tmp_path: Path, address: str, message: str
) -> None:
    with pytest.raises(ModelNotFoundError, match=message):
        download(source(address), tmp_path)


def test_a_bucket_of_others_is_denied(bucket: Any, moto_url: str, download: Download, tmp_path: Path) -> None:
    _post(f"{moto_url}/moto-api/reset-auth", b"0")
    try:
        with pytest.raises(ModelAccessDeniedError, match="may these credentials list and read") as raised:
            download(source(), tmp_path)
    finally:
        _post(f"{moto_url}/moto-api/reset-auth", b"inf")

    assert SECRET not in str(raised.value)


def test_a_store_that_is_not_there_is_unreachable(
    bucket: Any, download: Download, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with pytest.raises(SourceUnreachableError, match="cannot be reached"):
        download(source(), tmp_path)


def test_an_endpoint_that_is_no_url_is_named(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "minio:9000")
    with pytest.raises(ConfigurationError, match=r"s3://models/llama: .*minio:9000: .*AWS_ENDPOINT_URL_S3.*http://"):
        source()


def test_without_credentials_a_public_bucket_is_read(
    bucket: Any, download: Download, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in MODEL:
        bucket.put_object_acl(Bucket="models", Key=f"llama/{path}", ACL="public-read")
    for path in CONTENT.keys() - MODEL.keys():
        bucket.delete_object(Bucket="models", Key=f"llama/{path}")
    download(source(), tmp_path / "model")

    assert files_in(tmp_path / "model") == MODEL
