import json
from pathlib import Path

import pytest

from kvasir_router.api_keys import ApiKey, ApiKeys, read_keys
from kvasir_router.errors import ConfigError, InvalidApiKeyError


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


def mounted(folder: Path, version: str, **tenants: str) -> Path:
    """A Secret as the kubelet mounts it: links to links into a folder of one version, changed by one rename."""
    data = folder / f"..{version}"
    data.mkdir()
    for tenant, text in tenants.items():
        (data / tenant).write_text(text)
        if not (folder / tenant).is_symlink():
            (folder / tenant).symlink_to(Path("..data") / tenant)
    (folder / "..data_tmp").symlink_to(data.name)
    (folder / "..data_tmp").rename(folder / "..data")
    return folder


def is_let_in(keys: ApiKeys, key: str) -> bool:
    try:
        return bool(keys.tenant_of(bearer(key)))
    except InvalidApiKeyError:
        return False


def test_a_known_key_names_its_tenant() -> None:
    assert ApiKeys([ApiKey(b"k1", "blue")]).tenant_of(bearer("k1")) == "blue"


def test_a_key_may_come_as_anthropics_clients_send_it() -> None:
    assert ApiKeys([ApiKey(b"k1", "blue")]).tenant_of([(b"x-api-key", b"k1")]) == "blue"


@pytest.mark.parametrize(
    "headers", [[], bearer("wrong"), bearer(""), [(b"authorization", b"Basic k1")], [(b"x-api-key", b"k2")]]
)
def test_anything_else_is_refused(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(InvalidApiKeyError):
        ApiKeys([ApiKey(b"k1", "blue")]).tenant_of(headers)


def test_a_mounted_secret_has_a_file_a_tenant_and_a_key_a_line(tmp_path: Path) -> None:
    mounted(tmp_path, "1", blue="k1\nk2\n", red="k3")
    assert read_keys(tmp_path) == (ApiKey(b"k1", "blue"), ApiKey(b"k2", "blue"), ApiKey(b"k3", "red"))


def test_blank_lines_and_space_around_a_key_do_not_count(tmp_path: Path) -> None:
    mounted(tmp_path, "1", blue="\n  k1\t\r\n\n   \nk2\n\n")
    assert [key.value for key in read_keys(tmp_path)] == [b"k1", b"k2"]


def test_kubernetes_own_folders_are_no_tenants(tmp_path: Path) -> None:
    mounted(tmp_path, "2026_11_20", blue="k1")
    assert {key.tenant for key in read_keys(tmp_path)} == {"blue"}


def test_only_the_secrets_current_version_is_read(tmp_path: Path) -> None:
    """File by file through the links, a change of the Secret would be read in part."""
    mounted(tmp_path, "1", blue="k1")
    (tmp_path / "red").write_text("k2")
    assert read_keys(tmp_path) == (ApiKey(b"k1", "blue"),)


def test_a_plain_folder_does_as_well_and_its_subfolders_are_no_tenants(tmp_path: Path) -> None:
    (tmp_path / "..2026_11_20").mkdir()
    (tmp_path / "more").mkdir()
    (tmp_path / ".blue").write_text("k1\n")
    assert read_keys(tmp_path) == (ApiKey(b"k1", ".blue"),)


def test_a_json_file_maps_keys_to_tenants(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(json.dumps({"k1": "blue", "": "red"}))
    assert read_keys(tmp_path / "keys.json") == (ApiKey(b"k1", "blue"),)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"k": 1}', "{}", '{"": "blue"}'])
def test_a_keys_file_that_would_let_nobody_in_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(text)
    with pytest.raises(ConfigError, match="--api-keys-file"):
        ApiKeys.load(tmp_path / "keys.json")


def test_a_secret_that_would_let_nobody_in_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no key"):
        ApiKeys.load(mounted(tmp_path, "1", blue="\n"))


def test_a_key_of_two_tenants_is_refused_by_their_names_and_not_by_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="blue and red") as refused:
        ApiKeys.load(mounted(tmp_path, "1", blue="k1\nk-shared\n", red="k-shared\n"))
    assert "k-shared" not in str(refused.value)


def test_a_key_that_a_tenant_has_twice_is_one_key(tmp_path: Path) -> None:
    assert is_let_in(ApiKeys.load(mounted(tmp_path, "1", blue="k1\nk1\n")), "k1")


def test_a_changed_secret_is_taken_over_whole(tmp_path: Path) -> None:
    keys = ApiKeys.load(mounted(tmp_path, "1", blue="old\nkept\n"))
    mounted(tmp_path, "2", blue="kept\nnew\n", red="k3")
    keys.reload()
    assert [is_let_in(keys, key) for key in ("kept", "new", "k3", "old")] == [True, True, True, False]


def test_a_key_may_move_to_another_tenant(tmp_path: Path) -> None:
    keys = ApiKeys.load(mounted(tmp_path, "1", blue="k1"))
    mounted(tmp_path, "2", red="k1")
    keys.reload()
    assert keys.tenant_of(bearer("k1")) == "red"


def test_the_last_key_can_be_revoked(tmp_path: Path) -> None:
    keys = ApiKeys.load(mounted(tmp_path, "1", blue="k1"))
    mounted(tmp_path, "2", blue="")
    keys.reload()
    assert not is_let_in(keys, "k1")


def test_a_clash_lets_nobody_new_in_and_a_revoked_key_is_refused_all_the_same(tmp_path: Path) -> None:
    keys = ApiKeys.load(mounted(tmp_path, "1", blue="k1\nrevoked", red="k2"))
    mounted(tmp_path, "2", blue="k1\nnew", red="k2\nk1")
    keys.reload()
    assert [is_let_in(keys, key) for key in ("k1", "k2", "new", "revoked")] == [True, True, False, False]
    assert keys.tenant_of(bearer("k1")) == "blue"


def test_files_that_cannot_be_read_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"k1": "blue"}))
    keys = ApiKeys.load(path)
    for broken in (b"{", b'{"k\xff":"a"}', None):
        path.write_bytes(broken) if broken else path.unlink()
        keys.reload()
        assert is_let_in(keys, "k1")


def test_neither_keys_nor_a_digest_that_others_could_make_are_held(tmp_path: Path) -> None:
    """Two processes hold different digests, so nobody outside can tell which keys are looked up how long."""
    folder = mounted(tmp_path, "1", blue="k1")
    one, other = (vars(ApiKeys.load(folder)) for _ in range(2))
    assert one["_tenants"].keys().isdisjoint(other["_tenants"])
    assert b"k1" not in repr(one).encode()
