"""Two engines of equal weights behind one endpoint."""

import os
import re
import signal
import threading
from pathlib import Path

import httpx

BODY = {"model": "tiny", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def ask(url: str, prompt: str) -> str:
    answer = httpx.post(f"{url}/v1/completions", json=BODY | {"prompt": prompt}, timeout=60)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def ask_all(url: str, prompts: list[str]) -> list[str]:
    answers = [""] * len(prompts)

    def ask_one(index: int) -> None:
        answers[index] = ask(url, prompts[index])

    threads = [threading.Thread(target=ask_one, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def cores_of(server) -> list[int]:
    return [pid for pid in server.children() if "libtorch" in Path(f"/proc/{pid}/maps").read_text()]


def test_two_ranks_answer_as_one_and_share_the_work_until_one_dies(serve):
    prompts = [f"{number} bottles" for number in range(8)]
    expected = [ask(serve().wait_ready().url, prompts[0])]
    server = serve("--data-parallel-size", "2").wait_ready()
    answers = ask_all(server.url, prompts)
    assert answers[:1] == expected
    assert ask_all(server.url, prompts) == answers  # wherever each of them goes this time
    metrics = httpx.get(f"{server.url}/metrics").text
    steps = re.findall(r'kvasir_data_parallel_engine_steps_total\{data_parallel_rank="(\d)".*\} (\S+)', metrics)
    assert [rank for rank, _ in steps] == ["0", "1"]
    assert min(float(number) for _, number in steps) >= 24
    cores = cores_of(server)
    assert len(cores) == 2
    assert re.search(rf"^kvasir_generation_tokens_total.* {16 * 24}\.0$", metrics, re.MULTILINE)
    os.kill(cores[1], signal.SIGKILL)
    status, log = server.end()
    assert status == 1
    assert "its process ended with status -9" in log
