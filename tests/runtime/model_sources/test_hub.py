"""Models of a hub: what is taken of one, what is refused and how that is named."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.runtime.model_sources.conftest import IMPATIENT, MODEL, WEIGHTS, files_in
from tests.runtime.model_sources.hub_server import COMMIT, TOKEN, Hub, Repository

from kvasir_runtime.errors import (
    DownloadStalledError,
    FetchError,
    ModelAccessDeniedError,
    ModelCorruptError,
    ModelNotFoundError,
    SourceUnreachableError,
)
from kvasir_runtime.model_sources.cache import ModelCache
from kvasir_runtime.model_sources.fetch import fetch
from kvasir_runtime.model_sources.hub import HubSource
from kvasir_runtime.model_sources.progress import ProgressMeter

Download = Callable[..., ProgressMeter]
STALL_SECONDS = 1.0


def source(address: str = "hf://org/name", stall_seconds: float = 60.0) -> HubSource:
    return HubSource(address, stall_seconds)


def test_takes_what_serving_needs_and_nothing_else(hub: Hub, download: Download, tmp_path: Path) -> None:
    meter = download(source(), tmp_path / "cache" / "model")

    assert files_in(tmp_path / "cache" / "model") == MODEL
    assert meter.sample().state == "complete"


def test_a_draft_head_without_safetensors_comes_as_its_authors_published_it(
    hub: Hub, download: Download, tmp_path: Path
) -> None:
    head = {"config.json": b"{}", "pytorch_model.bin": b"\1" * 3000}
    hub.repositories["org/name"] = Repository({**head, "README.md": b"# A head"})
    download(source(), tmp_path)

    assert files_in(tmp_path) == head


def test_files_are_those_of_the_commit_that_was_listed(hub: Hub, download: Download, tmp_path: Path) -> None:
    listing = source().list_files()

    assert listing.revision == COMMIT
    assert {file.path: file.digest.kind for file in listing.files if file.digest}[WEIGHTS] == "sha256"
    assert {file.path: file.digest.kind for file in listing.files if file.digest}["config.json"] == "git-blob"


def test_a_revision_may_be_named(hub: Hub, download: Download, tmp_path: Path) -> None:
    hub.repositories["org/name"].revisions = ("refs/pr/1", COMMIT)
    download(source("hf://org/name@refs/pr/1"), tmp_path)

    assert files_in(tmp_path) == MODEL


def test_a_complete_folder_is_taken_without_asking(hub: Hub, download: Download, tmp_path: Path) -> None:
    download(source(), tmp_path)
    hub.faults.status = 500
    hub.asked.clear()
    download(source(), tmp_path)

    assert hub.asked == []


def test_a_file_that_was_taken_away_is_fetched_again_alone(hub: Hub, download: Download, tmp_path: Path) -> None:
    download(source(), tmp_path)
    hub.asked.clear()
    (tmp_path / "config.json").unlink()
    download(source(), tmp_path)

    assert files_in(tmp_path) == MODEL
    assert {each.path for each in hub.asked} == {"config.json"}


def test_files_that_are_compared_count_as_progress(hub: Hub, download: Download, tmp_path: Path) -> None:
    download(source(), tmp_path)
    (tmp_path / ".kvasir" / "complete.json").unlink()
    compared: list[int] = []

    class Meter(ProgressMeter):
        def note_compared(self, num_bytes: int) -> None:
            compared.append(num_bytes)

    hub.asked.clear()
    fetch(source(), tmp_path, Meter("hf://org/name", time.monotonic), IMPATIENT)

    assert hub.asked == []
    assert sum(compared) == sum(map(len, MODEL.values()))


def test_what_another_revision_had_besides_goes(hub: Hub, download: Download, tmp_path: Path) -> None:
    extra = {"model-00002.safetensors": b"\1" * 1500}
    hub.repositories["org/name"].files |= extra
    download(source(), tmp_path)
    hub.repositories["org/other"] = Repository(dict(MODEL))
    download(source("hf://org/other"), tmp_path)

    assert files_in(tmp_path) == MODEL


def test_a_private_model_comes_with_its_token(
    hub: Hub, download: Download, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["org/name"].readers = "token"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    download(source(), tmp_path)

    assert files_in(tmp_path) == MODEL


def without_safetensors(hub: Hub) -> None:
    hub.repositories["org/name"].files.pop(WEIGHTS)


def gated(hub: Hub) -> None:
    hub.repositories["org/name"].readers = "nobody"


def private(hub: Hub) -> None:
    hub.repositories["org/name"].readers = "token"


def nothing(hub: Hub) -> None:
    """The hub is as it is."""


def overloaded(hub: Hub) -> None:
    hub.faults.status = 503


def behind_a_portal(hub: Hub) -> None:
    hub.faults.page = b"<html>Sign in</html>"


REFUSALS: list[tuple[str, str, str | None, Callable[[Hub], None], type[FetchError], str]] = [
    ("missing", "hf://org/gone", TOKEN, nothing, ModelNotFoundError, "the hub has no org/gone"),
    ("private", "hf://org/name", None, private, ModelNotFoundError, "or one that is private"),
    ("revision", "hf://org/name@v9", None, nothing, ModelNotFoundError, "no revision v9"),
    ("gated", "hf://org/name", None, gated, ModelAccessDeniedError, "is gated: ask for access"),
    ("wrong token", "hf://org/name", "hf_wrong", nothing, ModelAccessDeniedError, "status 401.*is HF_TOKEN valid"),
    ("no weights", "hf://org/name", None, without_safetensors, ModelNotFoundError, r"no \*.safetensors.*pytorch_model"),
    ("overloaded", "hf://org/name", None, overloaded, SourceUnreachableError, "status 503"),
    ("a page", "hf://org/name", None, behind_a_portal, SourceUnreachableError, "no JSON.*is HF_ENDPOINT a hub"),
]


@pytest.mark.parametrize(("name", "address", "token", "arrange", "kind", "message"), REFUSALS, ids=lambda each: each)
def test_each_refusal_has_its_kind(
    hub: Hub,
    download: Download,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    address: str,
    token: str | None,
    arrange: Callable[[Hub], None],
    kind: type[FetchError],
    message: str,
) -> None:
    arrange(hub)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(kind, match=message) as raised:
        download(source(address), tmp_path)

    assert address in str(raised.value)
    assert token is None or token not in str(raised.value)
    assert not (tmp_path / ".kvasir" / "complete.json").exists()


def test_a_hub_that_is_not_there_is_unreachable(
    download: Download, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SourceUnreachableError, match="cannot be reached"):
        download(source(), tmp_path)


def test_connections_that_break_go_on_where_they_broke(hub: Hub, download: Download, tmp_path: Path) -> None:
    hub.faults.cut[WEIGHTS] = 1_100_000
    download(source(), tmp_path)

    assert files_in(tmp_path) == MODEL
    assert hub.offsets(WEIGHTS) == [0, 1_100_000, 2_200_000]


def test_a_damaged_file_is_fetched_once_more(hub: Hub, download: Download, tmp_path: Path) -> None:
    hub.faults.damaged[WEIGHTS] = 1
    meter = download(source(), tmp_path)

    assert files_in(tmp_path) == MODEL
    assert hub.offsets(WEIGHTS) == [0, 0]
    assert meter.sample().bytes_done == sum(map(len, MODEL.values()))


@pytest.mark.parametrize("path", [WEIGHTS, "config.json"])
def test_a_file_that_stays_damaged_is_never_put_into_its_place(
    hub: Hub, download: Download, tmp_path: Path, path: str
) -> None:
    hub.faults.damaged[path] = 2
    with pytest.raises(ModelCorruptError, match=f"{path} came twice"):
        download(source(), tmp_path)

    assert path not in files_in(tmp_path)


def part_of_weights(folder: Path) -> Path:
    [file] = [file for file in source().list_files().files if file.path == WEIGHTS]
    return ModelCache(folder, source().address).part_of(file)


def test_a_part_that_was_damaged_on_disk_is_noticed(hub: Hub, download: Download, tmp_path: Path) -> None:
    hub.faults.cut[WEIGHTS] = 0
    with pytest.raises(SourceUnreachableError):
        download(source(), tmp_path)
    hub.faults.cut.clear()
    part_of_weights(tmp_path).write_bytes(b"\0" * 1000)
    download(source(), tmp_path)

    assert files_in(tmp_path) == MODEL
    assert hub.offsets(WEIGHTS)[-2:] == [1000, 0]


def test_silence_is_a_stall_and_keeps_what_came(hub: Hub, download: Download, tmp_path: Path) -> None:
    hub.faults.silent_after[WEIGHTS] = 1_000_000
    with pytest.raises(DownloadStalledError, match="no byte, for 1 s"):
        download(source(stall_seconds=STALL_SECONDS), tmp_path, IMPATIENT)
    hub.faults.released.set()
    download(source(), tmp_path)

    assert files_in(tmp_path) == MODEL
    assert hub.offsets(WEIGHTS) == [0, 1_000_000, 1_000_000]


def test_a_mirror_that_tells_no_sizes_is_refused(hub: Hub, download: Download, tmp_path: Path) -> None:
    hub.faults.knows_sizes = False
    with pytest.raises(ModelNotFoundError, match=r"does not say how large config\.json is"):
        download(source(), tmp_path)
    assert not files_in(tmp_path)


def test_a_mirror_without_ranges_sends_all_again(hub: Hub, download: Download, tmp_path: Path) -> None:
    hub.faults.knows_ranges = False
    hub.faults.silent_after[WEIGHTS] = 1_000_000
    with pytest.raises(DownloadStalledError):
        download(source(stall_seconds=STALL_SECONDS), tmp_path)
    hub.faults.released.set()
    meter = download(source(), tmp_path)

    assert files_in(tmp_path) == MODEL
    assert meter.sample().bytes_done == sum(map(len, MODEL.values()))
