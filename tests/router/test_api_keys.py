import json
from pathlib import Path

import pytest

from kvasir_router.api_keys import ApiKeys, read_keys
from kvasir_router.errors import ConfigError, InvalidApiKeyError


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


def test_a_known_key_names_its_tenant() -> None:
    assert ApiKeys({"k1": "blue"}).tenant_of(bearer("k1")) == "blue"


@pytest.mark.parametrize("headers", [[], bearer("wrong"), bearer(""), [(b"authorization", b"Basic k1")]])
def test_anything_else_is_refused(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(InvalidApiKeyError):
        ApiKeys({"k1": "blue"}).tenant_of(headers)


def test_a_mounted_secret_is_read_as_a_folder(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "k1").write_text("blue\n")
    assert read_keys(tmp_path) == {"k1": "blue"}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"k": 1}', "{}"])
def test_a_keys_file_that_would_let_nobody_in_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(text)
    with pytest.raises(ConfigError, match="--api-keys-file"):
        read_keys(tmp_path / "keys.json")


def test_changed_keys_are_taken_over_and_broken_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"old": "blue"}))
    keys = ApiKeys.load(path)
    path.write_text(json.dumps({"new": "red"}))
    keys.reload()
    path.write_text("{")
    keys.reload()
    assert keys.tenant_of(bearer("new")) == "red"


def test_a_key_that_is_taken_out_is_no_longer_valid(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"old": "blue", "kept": "blue"}))
    keys = ApiKeys.load(path)
    path.write_text(json.dumps({"kept": "blue"}))
    keys.reload()
    assert keys.tenant_of(bearer("kept")) == "blue"
    with pytest.raises(InvalidApiKeyError):
        keys.tenant_of(bearer("old"))
