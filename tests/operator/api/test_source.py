"""Addresses of model files, taken apart."""

import pytest

from kvasir_operator.api.source import ModelSource


@pytest.mark.parametrize(
    ("text", "scheme", "address", "path"),
    [
        ("hf://meta-llama/Llama-3.1-8B", "hf", "meta-llama/Llama-3.1-8B", ""),
        ("hf://org/name@refs/pr/1", "hf", "org/name@refs/pr/1", ""),
        ("s3://bucket/some/prefix", "s3", "bucket", "some/prefix"),
        ("pvc://claim", "pvc", "claim", ""),
        ("pvc://claim/a/b/", "pvc", "claim", "a/b"),
        ("oci://registry:5000/a/b:1.0@sha256:0a", "oci", "registry:5000/a/b:1.0@sha256:0a", ""),
        ("file:///models/x", "file", "", "/models/x"),
    ],
)
def test_parts_of_an_address(text: str, scheme: str, address: str, path: str) -> None:
    source = ModelSource(text)

    assert (source.scheme, source.address, source.path) == (scheme, address, path)


@pytest.mark.parametrize("text", ["", "/models/x", "file://relative", "hf://name", "ftp://x/y", "pvc://Upper"])
def test_refuses_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="write hf://"):
        ModelSource(text)
