"""Two engines of equal weights behind one endpoint."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx

BODY = {"model": "tiny", "max_tokens": 24, "ignore_eos": True}
GREEDY = BODY | {"temperature": 0}
SAMPLED = BODY | {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.3, "n": 2}
BODIES = [GREEDY | {"prompt": f"{number} bottles"} for number in range(4)] + [
    SAMPLED | {"prompt": f"{number} bottles", "seed": number} for number in range(4)
]
NUM_TOKENS = (4 * 1 + 4 * 2) * 24


def ask(url: str, body: dict[str, Any]) -> list[str]:
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    return [choice["text"] for choice in answer.json()["choices"]]


def ask_all(url: str, bodies: list[dict[str, Any]]) -> list[list[str]]:
    """At once."""
    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(partial(ask, url), bodies))


def test_two_ranks_answer_as_one_and_share_the_work_until_one_dies(serve, plain_server):
    expected = [ask(plain_server.url, body) for body in BODIES]
    server = serve("--dtype", "float32", "--data-parallel-size", "2").wait_ready()
    for body, answer in zip(BODIES, expected, strict=True):
        assert ask_all(server.url, [body, body]) == [answer, answer]  # the second goes where the first does not run
    assert ask_all(server.url, BODIES) == expected
    metrics = httpx.get(f"{server.url}/metrics").text
    steps = re.findall(r'kvasir_data_parallel_engine_steps_total\{data_parallel_rank="(\d)".*\} (\S+)', metrics)
    assert [rank for rank, _ in steps] == ["0", "1"]
    assert min(float(number) for _, number in steps) >= 24
    cores = server.engine_cores()
    assert len(cores) == 2
    assert re.search(rf"^kvasir_generation_tokens_total.* {3 * NUM_TOKENS}\.0$", metrics, re.MULTILINE)
    os.kill(cores[1], signal.SIGKILL)
    status, log = server.end()
    assert status == 1
    assert "its process ended with status -9" in log
