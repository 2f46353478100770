"""POST /sleep and /wake_up, GET /is_sleeping: what an engine answers while its memory is others'."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvasir_runtime.config import CacheConfig, KvTransferConfig, ModelConfig, ParallelConfig, RuntimeConfig
from kvasir_runtime.server.control import sleep_refusals

BODY = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture
def sleeper(running) -> Iterator[Any]:
    yield running
    assert running.http.post("/wake_up").status_code == 200


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_sleeps_refuses_and_says_so_and_answers_when_it_is_awake(sleeper, level: int) -> None:
    http = sleeper.http
    assert http.get("/is_sleeping").json() == {"is_sleeping": False, "level": None}
    assert http.post("/sleep", params={"level": level}).status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": True, "level": level}
    refused = http.post("/v1/completions", json=BODY)
    assert (refused.status_code, refused.headers["retry-after"], refused.json()["error"]["code"]) == (
        503,
        "1",
        "asleep",
    )
    assert f"sleeps at level {level}" in refused.json()["error"]["message"]
    assert [http.get(path).status_code for path in ("/ready", "/health")] == [503, 200]
    assert http.post("/wake_up").status_code == 200
    assert http.get("/ready").status_code == 200
    assert http.post("/v1/completions", json=BODY | {"max_tokens": 3}).json()["usage"]["completion_tokens"] == 3


def test_level_1_is_meant_where_none_is_named_and_a_second_time_changes_nothing(sleeper) -> None:
    assert [sleeper.http.post("/sleep").status_code for _ in range(2)] == [200, 200]
    assert sleeper.http.get("/is_sleeping").json()["level"] == 1


def test_a_sleeping_engine_falls_into_no_other_sleep(sleeper) -> None:
    sleeper.http.post("/sleep?level=1")
    refused = sleeper.http.post("/sleep?level=2")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "cannot_sleep")
    assert sleeper.http.get("/is_sleeping").json()["level"] == 1


def test_what_is_under_way_ends_in_an_error_and_in_the_core(sleeper) -> None:
    sleeper.core.step_seconds = 0.02
    answers: list[Any] = []
    whole = threading.Thread(target=lambda: answers.append(sleeper.http.post("/v1/completions", json=BODY)))
    whole.start()
    with sleeper.http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        sleeper.core.wait_until(lambda core: len(core.received) == 2)
        sleeper.http.post("/sleep")
        *_, error, done = lines
    whole.join()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "asleep")
    assert (json.loads(error.removeprefix("data: "))["error"]["code"], done) == ("asleep", "data: [DONE]")
    sleeper.core.wait_until(lambda core: len(core.aborted) == 2)


def test_a_stream_that_a_router_can_have_continued_breaks_off(sleeper) -> None:
    sleeper.core.step_seconds = 0.02
    headers = {"x-kvasir-resumable": "1"}
    with sleeper.http.stream("POST", "/v1/completions", json=BODY | {"stream": True}, headers=headers) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        sleeper.http.post("/sleep")
        rest = list(lines)
    assert not [line for line in rest if "[DONE]" in line or "asleep" in line]


@pytest.mark.parametrize(
    ("path", "param"), [("/sleep?level=0", "level"), ("/sleep?level=x", "level"), ("/sleep?mode=keep", "mode"),
                        ("/wake_up?tags=weights", "tags")],
)  # fmt: skip
def test_what_is_not_done_is_refused_by_name(running, path: str, param: str) -> None:
    refused = running.http.post(path)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert running.http.get("/is_sleeping").json()["is_sleeping"] is False


def test_an_engine_whose_memory_others_know_cannot_sleep(start_server) -> None:
    with start_server(cache=CacheConfig(kv_transfer_config=KvTransferConfig(kv_connector="NixlConnector"))) as running:
        refused = running.http.post("/sleep")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "cannot_sleep")
        assert "--kv-transfer-config" in refused.json()["error"]["message"]


def test_ranks_on_other_nodes_keep_their_weights() -> None:
    config = RuntimeConfig(model=ModelConfig(model="m"), parallel=ParallelConfig(nnodes=2))
    assert list(sleep_refusals(config)) == [2]
