"""What kubelets, operators and Prometheus are told."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvasir_runtime
from kvasir_runtime.config import ServerConfig
from kvasir_runtime.heartbeat import Heartbeats

LONG = {"prompt": "the quick brown fox", "max_tokens": 400, "ignore_eos": True}


def status(running, path: str) -> int:
    return running.http.get(path).status_code


def first_that_fails(running, path: str) -> httpx.Response:
    deadline = time.monotonic() + 30
    while (response := running.http.get(path)).status_code == 200:
        assert time.monotonic() < deadline, f"{path} went on answering 200"
    return response


def test_loading_server_is_healthy_but_not_ready_and_sends_requests_away(start_server) -> None:
    with start_server(is_ready=False) as running:
        assert (status(running, "/health"), status(running, "/ready")) == (200, 503)
        refused = running.http.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "loading" in refused.json()["error"]["message"]


def test_engine_that_hangs_with_work_pending_is_unhealthy_until_it_steps_again(start_server) -> None:
    with start_server(config=ServerConfig(stall_seconds=0.2)) as running:
        running.core.is_hanging = True
        request = {"json": LONG | {"max_tokens": 4}}
        waiting = threading.Thread(target=running.http.post, args=("/v1/completions",), kwargs=request)
        waiting.start()
        running.core.wait_until(lambda core: core.received)
        health = first_that_fails(running, "/health")
        assert "no step for more than 0.2 seconds" in health.json()["error"]["message"]
        running.core.is_hanging = False
        waiting.join()
        assert status(running, "/health") == 200


def test_engine_whose_core_gives_no_sign_of_life_is_unhealthy_until_it_does(start_server, tmp_path: Path) -> None:
    with start_server() as running:
        now = time.monotonic()
        Heartbeats(tmp_path / "heartbeats", 2, 1, lambda: now - 5.5).beat()
        assert (status(running, "/health"), status(running, "/ready")) == (503, 503)
        assert "no sign of life for" in running.http.get("/health").json()["error"]["message"]
        Heartbeats(tmp_path / "heartbeats", 2, 1).beat()
        assert (status(running, "/health"), status(running, "/ready")) == (200, 200)


def test_stopping_waits_no_longer_than_a_core_that_hangs_is_believed_in(start_server, tmp_path: Path) -> None:
    with start_server(shutdown_timeout=300.0) as running:
        running.core.is_hanging = True
        post = partial(running.http.post, "/v1/completions", json={"prompt": "the quick"}, timeout=60)
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(post)
            running.core.wait_until(lambda core: core.received)
            now = time.monotonic()
            Heartbeats(tmp_path / "heartbeats", 2, 1, lambda: now - 60).beat()
            running.stop()
            assert asked.result().status_code == 503
        running.thread.join(60)
        assert not running.thread.is_alive()


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready"])
def test_probes_may_ask_for_the_head_alone(running, path: str) -> None:
    assert running.http.head(path).status_code == 200


def test_pages_of_allowed_origins_alone_may_use_the_server(start_server) -> None:
    """A preflight is answered although it brings no key."""
    allowed, other = "https://chat.example.com", "https://other.example.com"
    config = ServerConfig(api_key="secret", allowed_origins=(allowed,), allowed_headers=("authorization",))
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with start_server(config=config) as running:
        for origin, seen in ((allowed, allowed), (other, None)):
            asked = running.http.options("/v1/chat/completions", headers={"Origin": origin, **preflight})
            answer = running.http.get("/v1/models", headers={"Origin": origin, "Authorization": "Bearer secret"})
            refused = running.http.get("/v1/models", headers={"Origin": origin})
            assert (asked.status_code, answer.status_code, refused.status_code) == (200 if seen else 400, 200, 401)
            for each in (asked, answer, refused):
                assert each.headers.get("access-control-allow-origin") == seen


def test_idle_engine_is_healthy_however_long_ago_it_stepped(start_server) -> None:
    with start_server(config=ServerConfig(stall_seconds=0.0)) as running:
        assert status(running, "/health") == 200


@pytest.mark.parametrize("last_word", [None, "CUDA error: out of memory"])
def test_engine_that_dies_fails_what_is_in_flight_and_ends_the_process(start_server, last_word: str | None) -> None:
    with start_server() as running:
        running.core.step_seconds = 0.01
        errors: list[openai.APIError] = []

        def read() -> None:
            try:
                list(running.client.completions.create(model="tiny", prompt=[5, 6], max_tokens=400, stream=True))
            except openai.APIError as error:
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        running.core.wait_until(lambda core: core.received)
        running.core.die(last_word)
        reader.join(5)
        running.thread.join(5)
        assert not running.thread.is_alive()
        [error] = errors
        assert (last_word or "ended without a word") in str(error)
        assert running.server.engine.dead is not None


def test_a_defect_in_reading_the_engines_words_fails_what_is_in_flight_and_ends_with_status_1(start_server) -> None:
    with start_server(shutdown_timeout=60.0) as running:
        running.core.is_hanging = True
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(running.http.post, "/v1/completions", json=LONG)
            running.core.wait_until(lambda core: core.received)
            running.core.send_nonsense()
            response = waiting.result(10)
        running.thread.join(10)
    assert (response.status_code, "has a defect" in response.text) == (503, True)
    assert running.exit_codes == [1]


def test_drain_sends_new_requests_away_and_lets_the_old_ones_end(start_server) -> None:
    with start_server() as running:
        running.core.step_seconds = 0.005
        options = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 100}
        stream = iter(running.client.completions.create(stream=True, **options))
        next(stream)
        started = running.http.post("/drain").json()
        assert started == {"draining": True, "in_flight_requests": 1, "leased_blocks": 0}
        messages = [{"role": "user", "content": "a"}]
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": messages})):
            refused = running.http.post(path, json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1"), path
        assert (status(running, "/ready"), status(running, "/health")) == (503, 200)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        running.wait_idle()
        assert running.http.get("/drain").json()["in_flight_requests"] == 0


def test_stopping_waits_for_answers_under_way(start_server) -> None:
    with start_server() as running:
        running.core.step_seconds = 0.005
        options = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 100}
        stream = iter(running.client.completions.create(stream=True, **options))
        next(stream)
        running.stop()
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        running.thread.join(5)
        assert not running.thread.is_alive()
        assert running.exit_codes == [0]


def test_who_still_asks_a_server_that_stops_is_answered_and_its_connection_ends(start_server) -> None:
    """A load balancer sends on for a while, and takes a refused connection for an error."""
    with start_server(config=ServerConfig(shutdown_delay=30.0), shutdown_timeout=120.0) as running:
        running.stop()
        while status(running, "/ready") == 200:
            pass
        for _ in range(3):
            with httpx.Client(base_url=running.url, timeout=30) as newcomer:
                answer = newcomer.post("/v1/completions", json={"prompt": "the quick", "max_tokens": 2})
            assert (answer.status_code, answer.headers.get("connection")) == (200, "close")
        running.stop()  # no longer
        running.thread.join(30)
        assert running.exit_codes == [0]


def test_a_server_that_stops_refuses_new_requests_in_the_second_half_of_its_time(start_server) -> None:
    with start_server(config=ServerConfig(shutdown_delay=30.0), shutdown_timeout=6.0) as running:
        running.core.is_hanging = True
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(running.http.post, "/v1/completions", json=LONG, timeout=60)
            running.core.wait_until(lambda core: core.received)
            running.stop()
            with httpx.Client(base_url=running.url, timeout=0.2) as newcomer:
                refused = answered_at_once(newcomer)
            assert refused.headers["connection"] == "close"
            running.stop()
            assert waiting.result(30).status_code == 503
        running.thread.join(30)
        assert running.exit_codes == [0]


def answered_at_once(http: httpx.Client) -> httpx.Response:
    """The first of these requests that does not wait for the engine, which hangs."""
    while True:
        try:
            return http.post("/v1/completions", json=LONG)
        except httpx.ReadTimeout:
            continue


def test_key_guards_every_route_but_the_probes(start_server) -> None:
    with start_server(config=ServerConfig(api_key="secret")) as running:
        for path in ("/metrics", "/load", "/drain", "/version", "/v1/models", "/openapi.json", "/nowhere"):
            assert status(running, path) == 401, path
        for word in ("Bearer s", "Bearer", "Basic secret", "secret", "Bearer secrets", "Bearer secret secret"):
            wrong = running.http.post("/tokenize", json={"prompt": "a"}, headers={"Authorization": word})
            assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_api_key"), word
        assert [status(running, path) for path in ("/health", "/ping", "/ready")] == [200, 200, 200]
        for path in ("/migrate", "/migrate/request"):
            answer = running.http.post(path, json={"request_id": "x"})
            assert answer.status_code == 409, "the router is known by its own secret"
        client = running.client_with("secret")
        assert client.models.list().data[0].id == "tiny"


def test_models_and_version_are_told(running) -> None:
    [model] = running.client.models.list().data
    assert (model.id, model.max_model_len, model.owned_by) == ("tiny", 512, "kvasir")
    assert running.client.models.retrieve("tiny").root == model.root
    assert Path(model.root).name == "tiny"
    assert running.http.get("/version").json() == {"version": kvasir_runtime.__version__}


def test_openapi_lists_what_is_served_and_nothing_else(start_server) -> None:
    with start_server() as running:
        paths = running.http.get("/openapi.json").json()["paths"]
        answers = {
            (method, path): running.http.request(method, path.replace("{name}", "tiny")).status_code
            for path, methods in paths.items()
            if "{response_id}" not in path  # of responses that there are none of
            for method in methods
        }
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/metrics", "/ping"} <= set(paths)
    assert {status for status in answers.values() if status in (404, 405, 500)} == set(), answers


def test_engine_that_has_made_no_step_shows_zeros(start_server) -> None:
    with start_server() as running:
        lines = running.http.get("/metrics").text.splitlines()
    assert 'vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0' in lines
    assert 'kvasir_engine_steps_total{model_name="tiny"} 0.0' in lines


def test_prometheus_gets_the_names_that_others_gave_as_they_are(start_server) -> None:
    accepted = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    with start_server() as running:
        lines = running.http.get("/metrics", headers={"accept": accepted}).text.splitlines()
    assert 'vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0' in lines


def test_metrics_show_the_engine_and_the_requests_under_the_promised_names(start_server) -> None:
    with start_server() as running:
        running.client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=4)
        text = running.http.get("/metrics").text
    samples = {
        sample.name: (sample.value, sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    own = {name: labels for name, (_, labels) in samples.items() if name.startswith(("vllm:", "kvasir_"))}
    assert {name for name, labels in own.items() if labels.get("model_name") != "tiny"} == {"kvasir_build_info"}
    assert own["kvasir_build_info"]["version"] == kvasir_runtime.__version__
    assert not any(name.endswith("_created") for name in samples)
    values = {name: value for name, (value, _) in samples.items()}
    assert values["kvasir_kv_cache_usage_ratio"] == values["vllm:kv_cache_usage_perc"] == 0.25
    assert values["kvasir_prefix_cache_hits_total"] == values["vllm:prefix_cache_hits_total"] == 30
    assert values["kvasir_num_requests_running"] == values["vllm:num_requests_running"]
    assert (values["kvasir_prompt_tokens_total"], values["kvasir_generation_tokens_total"]) == (3, 4)
    assert values["kvasir_time_to_first_token_seconds_count"] == 1
    assert values["kvasir_inter_token_latency_seconds_count"] == 3
    assert values["kvasir_e2e_request_latency_seconds_count"] == 1
    assert samples["kvasir_num_preemptions_total"][1]["mode"] == "recompute"
    assert samples["vllm:cache_config_info"][1]["num_gpu_blocks"] == "100"


def test_load_figures_follow_an_engine_that_became_idle(start_server) -> None:
    with start_server() as running:
        running.core.tell_stats(num_running=32, num_waiting=4)
        wait_for_load(running, (32, 4))
        running.core.tell_stats(num_running=0, num_waiting=0)
        wait_for_load(running, (0, 0))
        lines = running.http.get("/metrics").text.splitlines()
        assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in lines


def wait_for_load(running, expected: tuple[int, int]) -> None:
    deadline = time.monotonic() + 10
    while True:
        load = running.http.get("/load").json()
        if (load["num_requests_running"], load["num_requests_waiting"]) == expected:
            return
        assert time.monotonic() < deadline, load


def test_load_says_what_a_load_report_says(start_server) -> None:
    with start_server() as running:
        figures = {
            "waiting_uncached_tokens": 7, "running_uncached_tokens": 8, "kv_used_tokens": 400,
            "kv_capacity_tokens": 1600, "steps_per_second": 12.5, "prefill_tokens_per_second": 900.0,
        }  # fmt: skip
        running.core.tell_stats(num_running=3, num_waiting=2, **figures)
        wait_for_load(running, (3, 2))
        load = running.http.get("/load").json()
    assert load == figures | {
        "server_load": 0, "num_requests_running": 3, "num_requests_waiting": 2, "instance": "cafe",
        "max_model_len": 512, "max_model_len_cut_from": 1024,
    }  # fmt: skip


def test_load_of_an_engine_that_is_not_ready_is_nothing(start_server) -> None:
    with start_server(is_ready=False) as running:
        load = running.http.get("/load").json()
    assert (load["num_requests_running"], load["kv_capacity_tokens"], load["instance"]) == (0, 0, None)
    assert (load["max_model_len"], load["max_model_len_cut_from"]) == (None, None)


def test_load_of_an_engine_that_has_made_no_step_knows_its_capacity(start_server) -> None:
    with start_server() as running:
        load = running.http.get("/load").json()
    assert (load["kv_used_tokens"], load["kv_capacity_tokens"], load["instance"]) == (0, 1600, "cafe")
