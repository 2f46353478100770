"""One or several API processes on one port, from start to SIGTERM."""

import os
import re
import signal
import socket
import threading

import httpx
import pytest

from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.server.launch import listen


def test_port_in_use_is_told_in_one_line_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError) as caught:
            listen("127.0.0.1", port)
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1:{port}: Address already in use; "
        "stop what uses it or choose another --port or --host"
    )


def test_an_ipv6_address_that_is_taken_is_told_in_brackets() -> None:
    with listen("::1", 0) as taken:
        port = taken.getsockname()[1]
        for host in ("::", "::1"):
            with pytest.raises(
                ConfigurationError, match=re.escape(f"cannot listen on [{host}]:{port}: Address already")
            ):
                listen(host, port)


def test_processes_share_port_counts_and_drain_and_end_when_told(start_processes) -> None:
    """Each connection may reach either process; what they say must not depend on which."""
    with start_processes(2) as shared:
        post_until_both_have_answered(shared)
        num_requests = len(shared.core.received)
        for _ in range(4):
            lines = ask(shared, "GET", "/metrics").text.splitlines()
            values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if "{" in line}
            assert values["kvasir_generation_tokens_total"] == 2 * num_requests
            assert values["kvasir_kv_cache_usage_ratio"] == 0.25
        ask(shared, "POST", "/drain")
        assert [ask(shared, "GET", "/ready").status_code for _ in range(6)] == [503] * 6
        for process in shared.processes:
            os.kill(process.pid, signal.SIGTERM)
            process.join(60)
        assert [process.exitcode for process in shared.processes] == [0, 0]


def ask(shared, method: str, path: str, json: object = None) -> httpx.Response:
    """Over a connection of its own."""
    with httpx.Client(base_url=shared.url, verify=False, timeout=60) as client:
        return client.request(method, path, json=json)


def post_until_both_have_answered(shared) -> None:
    answers: list[int] = []

    def post() -> None:
        answers.append(ask(shared, "POST", "/v1/completions", {"prompt": "the quick", "max_tokens": 2}).status_code)

    while {request.api_index for request in shared.core.received} != {0, 1}:
        threads = [threading.Thread(target=post) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(answers) == {200}
        assert len(answers) < 400, "one process never got a connection"
