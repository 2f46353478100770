"""`serve` with several ranks: they answer as one does, and one that fails ends all with the reason."""

import os
import re
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch
from tests.runtime.cli.conftest import children_of
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from kvasir_runtime.heartbeat import BEAT_SECONDS, SILENT_SECONDS
from kvasir_runtime.service_secret import SECRET_VARIABLE

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
TWO_RANKS = ("--tensor-parallel-size", "2", "--dtype", "float32")


def ranks_of(server) -> list[int]:
    """Process ids by rank: grandchildren, in the order in which they were started."""
    return sorted(pid for core in server.children() for pid in children_of(core) if "spawn_main" in command_of(pid))


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


def greedy_text(folder: Path, prompt: str, num_tokens: int) -> str:
    """What Hugging Face makes of it."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    token_ids = torch.tensor([tokenizer.encode(prompt).ids])
    model = LlamaForCausalLM.from_pretrained(folder)
    output = model.generate(
        token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    return tokenizer.decode(output[0, token_ids.shape[1] :].tolist())


def is_gone(pid: int) -> bool:
    """Or waits for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def fail_during_a_stream(server, number: signal.Signals) -> tuple[str, float]:
    """Send a signal to rank 1 in the middle of a stream: what came of it, and how long that took."""
    ranks = ranks_of(server)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=BODY | {"stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        start = time.monotonic()
        os.kill(ranks[1], number)
        rest = "\n".join(lines)
    seconds = time.monotonic() - start
    status, log = server.end()
    assert status == 1
    assert "Traceback" not in log
    assert all(is_gone(rank) for rank in ranks)
    assert rest.count("data: ") < 400
    return rest + log, seconds


def test_two_ranks_answer_as_one_until_one_of_them_is_killed(serve, model_folder):
    server = serve(*TWO_RANKS, "--api-server-count", "2").wait_ready()
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY | {"max_tokens": 40}, timeout=60).json()
    assert answer["choices"][0]["text"] == greedy_text(model_folder, BODY["prompt"], 40)
    assert len(ranks_of(server)) == 2
    series = re.compile(r'kvasir_parallel_collectives_total\{.*group="tensor".*op="all_reduce"\} (\S+)')
    deadline = time.monotonic() + 10
    while not (seen := series.search(httpx.get(f"{server.url}/metrics").text)) or float(seen[1]) < 2 * 2 * 40:
        assert time.monotonic() < deadline, "each rank adds up twice in each layer of each step"
    told, seconds = fail_during_a_stream(server, signal.SIGKILL)
    assert "rank 1 was ended by SIGKILL" in told
    assert seconds < 10


@pytest.mark.slow
def test_two_ranks_sleep_and_others_wake_up_from_level_2(serve, model_folder):
    server = serve(*TWO_RANKS).wait_ready()
    before, text = ranks_of(server), greedy_text(model_folder, BODY["prompt"], 40)
    for level, ranks in ((1, before), (2, [])):
        assert httpx.post(f"{server.url}/sleep", params={"level": level}, timeout=60).status_code == 200
        assert ranks_of(server) == ranks
        assert httpx.post(f"{server.url}/wake_up", timeout=240).status_code == 200
        answer = httpx.post(f"{server.url}/v1/completions", json=BODY | {"max_tokens": 40}, timeout=60).json()
        assert answer["choices"][0]["text"] == text
    assert not {*before} & {*ranks_of(server)}


def test_a_rank_that_hangs_ends_all_with_the_reason(serve):
    told, seconds = fail_during_a_stream(serve(*TWO_RANKS).wait_ready(), signal.SIGSTOP)
    assert "rank 1 has given no sign of life" in told
    # Its last sign of life came before it was stopped.
    assert SILENT_SECONDS - 2 * BEAT_SECONDS <= seconds < SILENT_SECONDS + 15


@pytest.mark.slow
def test_what_a_rank_cannot_start_with_is_one_clear_line(serve):
    status, log = serve(*TWO_RANKS, "--num-gpu-blocks-override", "3").end()
    assert status == 1
    assert "Traceback" not in log
    assert re.search(r"rank \d: the KV cache holds 3 blocks", log)


def test_a_node_told_to_stop_waits_for_node_0_and_one_that_is_lost_ends_it(serve, free_port):
    flags = (*TWO_RANKS, "--nnodes", "2", "--master-port", str(free_port()))
    second = serve(*flags, "--node-rank", "1", "--host", "127.0.0.2")
    first = serve(*flags).wait_ready()
    url = f"http://127.0.0.2:{second.port}"
    assert httpx.get(f"{url}/ready").status_code == 200
    second.process.terminate()
    assert httpx.post(f"{first.url}/v1/completions", json=BODY | {"max_tokens": 3}, timeout=60).is_success
    assert re.search(r'kvasir_rank_steps_total\{data_parallel_rank="0",rank="1"\} \d', httpx.get(f"{url}/metrics").text)
    second.process.kill()
    status, log = first.end()
    assert status == 1
    assert "rank 1 on another node" in log


@pytest.mark.slow
def test_two_stages_on_two_nodes_answer_as_one_rank_and_end_together(serve, free_port, model_folder, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, "s3cret")  # as in a cluster
    flags = (
        "--pipeline-parallel-size", "2", "--dtype", "float32", "--nnodes", "2", "--master-port", str(free_port()),
    )  # fmt: skip
    second = serve(*flags, "--node-rank", "1", "--host", "127.0.0.2")
    first, prompts = serve(*flags).wait_ready(), ["hello", "other words", "more"]
    body = BODY | {"prompt": prompts, "max_tokens": 40}
    choices = httpx.post(f"{first.url}/v1/completions", json=body, timeout=60).json()["choices"]
    assert [choice["text"] for choice in choices] == [greedy_text(model_folder, prompt, 40) for prompt in prompts]
    series = re.compile(r'kvasir_parallel_collectives_total\{.*group="pipeline".*op="send"\} (\S+)')
    deadline = time.monotonic() + 10
    while not (seen := series.search(httpx.get(f"{first.url}/metrics").text)) or float(seen[1]) < 2 * 40:
        assert time.monotonic() < deadline, "the first stage sends in each step, and two steps are under way"
    second.process.kill()
    status, log = first.end()
    assert status == 1
    assert "rank 1 on another node" in log


def test_a_node_ends_in_the_middle_of_a_step_when_node_0_stands_still(serve, free_port):
    """As when a machine is lost: nothing closes its connections."""
    flags = ("--pipeline-parallel-size", "2", "--nnodes", "2", "--master-port", str(free_port()))
    second = serve(*flags, "--node-rank", "1", "--host", "127.0.0.2")
    first = serve(*flags).wait_ready()
    processes = [*ranks_of(first), first.engine_core(), first.process.pid]
    try:
        with httpx.stream("POST", f"{first.url}/v1/completions", json=BODY | {"stream": True}, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(processes[0], signal.SIGSTOP)
            socket = answer.extensions["network_stream"].get_extra_info("socket")
            while select.select([socket], [], [], 1.0)[0]:
                next(lines)  # until the step that rank 1 is in waits for rank 0
            for pid in processes[1:]:
                os.kill(pid, signal.SIGSTOP)
        status, log = second.end()
    finally:
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert status == 1
    assert "ERROR kvasir_runtime.ranks.node: rank 1 ended, as the engine core has gone" in log


@pytest.mark.slow
def test_a_node_without_the_secret_of_node_0_is_refused_and_says_so(serve, free_port, monkeypatch):
    flags = (*TWO_RANKS, "--nnodes", "2", "--master-port", str(free_port()))
    second = serve(*flags, "--node-rank", "1", "--host", "127.0.0.2")
    monkeypatch.setenv(SECRET_VARIABLE, "s3cret")
    serve(*flags)
    status, log = second.end()
    assert status == 1
    assert re.search(r"rank 1 failed: node 0 refuses this rank at .* the same KVASIR_ROUTER_SECRET", log)
    assert "Traceback" not in log
