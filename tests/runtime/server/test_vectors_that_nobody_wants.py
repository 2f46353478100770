"""A request for vectors ends in the core when its client leaves, or when it is named to be aborted."""

import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.runtime.server.conftest import running_server
from tests.runtime.server.test_disconnect import all_aborted

EMBEDDINGS: tuple[str, dict[str, Any]] = ("/v1/embeddings", {"input": ["the quick", "brown fox"]})
SCORES: tuple[str, dict[str, Any]] = ("/v1/score", {"text_1": "the quick", "text_2": ["brown", "fox"]})


@pytest.fixture(scope="module")
def embedding_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("models") / "embedding"
    shutil.copytree(model_folder, folder)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaModel"], "hidden_size": 32}))
    with running_server(folder, tmp_path_factory.mktemp("ipc")) as running:
        yield running


@pytest.fixture
def hanging(embedding_server: Any) -> Any:
    core = embedding_server.core
    core.received, core.aborted, core.is_hanging = [], [], True
    return embedding_server


@pytest.mark.parametrize(("path", "body"), [EMBEDDINGS, SCORES])
def test_a_client_that_leaves_takes_them_with_it(hanging, path: str, body: dict[str, Any]) -> None:
    url, content = httpx.URL(hanging.url), json.dumps(body)
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n{content}".encode()
        )
        hanging.core.wait_until(lambda core: len(core.received) > 1)
        assert hanging.core.aborted == []
    hanging.core.wait_until(all_aborted)
    hanging.wait_idle()


@pytest.mark.parametrize("name", ["over-http", "{prefix}-mine"])
@pytest.mark.parametrize(("path", "body", "prefix"), [(*EMBEDDINGS, "embd"), (*SCORES, "score")])
def test_they_are_aborted_by_either_name(hanging, path: str, body: dict[str, Any], prefix: str, name: str) -> None:
    answers: list[httpx.Response] = []
    headers = {"x-request-id": "over-http"}
    thread = threading.Thread(
        target=lambda: answers.append(hanging.http.post(path, json=body | {"request_id": "mine"}, headers=headers))
    )
    thread.start()
    hanging.core.wait_until(lambda core: len(core.received) > 1)
    hanging.http.post("/abort_requests", json={"request_ids": [name.format(prefix=prefix)]})
    thread.join()
    assert answers[0].status_code == 500
    assert "aborted before its vector was there" in answers[0].json()["error"]["message"]
    hanging.core.wait_until(all_aborted)
