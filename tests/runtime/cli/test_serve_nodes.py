"""Data-parallel engines whose ranks share two nodes: one endpoint on node 0 that answers as one rank does, balances
requests, and ends as a whole with the reason."""

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
from tests.runtime.cli.conftest import Server, children_of
from tests.runtime.cli.test_serve_ranks import BODY, command_of, greedy_text, is_gone, ranks_of

from kvasir_runtime.service_secret import SECRET_VARIABLE

FLAGS = ("--pipeline-parallel-size", "2", "--data-parallel-size", "2", "--nnodes", "2", "--dtype", "float32")
PROMPTS = [f"{number} bottles" for number in range(4)]
NUM_TOKENS = 40


def ask(server: Server, prompt: str) -> str:
    body = BODY | {"prompt": prompt, "max_tokens": NUM_TOKENS}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.is_success, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_stages_of_two_engines_answer_as_one_rank_until_one_of_them_is_killed(
    serve, free_port, model_folder, monkeypatch
):
    monkeypatch.setenv(SECRET_VARIABLE, "s3cret")  # as in a cluster
    flags = (*FLAGS, "--master-port", str(free_port()))
    second = serve(*flags, "--node-rank", "1", "--host", "127.0.0.2")
    first, expected = serve(*flags), [greedy_text(model_folder, prompt, NUM_TOKENS) for prompt in PROMPTS]
    first.wait_ready()
    with ThreadPoolExecutor(8) as threads:  # each prompt twice at once
        assert list(threads.map(partial(ask, first), PROMPTS * 2)) == expected * 2
    steps = r'^kvasir_data_parallel_engine_steps_total\{.*data_parallel_rank="(\d)".*\} (\S+)$'
    by_engine = dict(re.findall(steps, httpx.get(f"{first.url}/metrics").text, re.MULTILINE))
    assert by_engine.keys() == {"0", "1"}
    assert min(map(float, by_engine.values())) >= NUM_TOKENS
    series = re.compile(r'kvasir_parallel_collectives_total\{.*group="pipeline".*op="send"\} (\S+)')
    deadline = time.monotonic() + 30
    while not (seen := series.search(httpx.get(f"{first.url}/metrics").text)) or float(seen[1]) < NUM_TOKENS:
        assert time.monotonic() < deadline, "a first stage sends in each step"
    url = f"http://127.0.0.2:{second.port}"
    assert httpx.get(f"{url}/ready").status_code == 200
    ranks = r'^kvasir_rank_steps_total\{data_parallel_rank="(\d)",rank="(\d)"\}'
    assert re.findall(ranks, httpx.get(f"{url}/metrics").text, re.MULTILINE) == [("0", "1"), ("1", "1")]

    on_first = ranks_of(first)
    on_second = [pid for pid in children_of(second.process.pid) if "spawn_main" in command_of(pid)]
    assert (len(on_first), len(on_second)) == (2, 2)
    with httpx.stream("POST", f"{first.url}/v1/completions", json=BODY | {"stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        start = time.monotonic()
        os.kill(on_second[1], signal.SIGKILL)
        rest = "\n".join(lines)
    assert time.monotonic() - start < 10
    assert '"finish_reason":"length"' not in rest
    (status, log), (second_status, second_log) = first.end(), second.end()
    assert (status, second_status) == (1, 1)
    assert re.search(r"core of data-parallel rank \d has failed: rank 1 on another node has ended", log)
    assert "data-parallel rank 1, rank 1 was ended by SIGKILL" in second_log
    assert all(map(is_gone, (*on_first, *on_second)))
    assert "Traceback" not in log + second_log
