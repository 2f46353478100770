"""Services whose requests several pods compute together: they answer as Hugging Face does, and each rank says that it
loads."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tests.controlplane.processes import wait_until
from tests.local.conftest import ROOT, LocalService
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL_FOLDER = ROOT / "examples" / "models" / "kvasir-python-7m"
PROMPT = (ROOT / "examples" / "quickstart.py").read_text()[:600]
NUM_TOKENS, BLOCK_TOKENS = 32, 16


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    """Longer than what a decode pod computes by itself."""
    token_ids: list[int] = AutoTokenizer.from_pretrained(MODEL_FOLDER).encode(PROMPT)
    return token_ids


@pytest.fixture(scope="module")
def expected(prompt: list[int]) -> list[int]:
    """Hugging Face's greedy continuation in float32, as the examples serve it."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32).eval()
    output = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    token_ids: list[int] = output[0, len(prompt) :].tolist()
    return token_ids


@contextmanager
def served(example: str) -> Iterator[LocalService]:
    """Ready; when the block ends nothing of it may be left."""
    service = LocalService(ROOT / "examples" / example)
    try:
        service.wait_ready()
        yield service
        assert service.stop() == 0, "".join(service.lines)
        assert service.processes() == {}
    finally:
        service.stop()


def completion(service: LocalService, prompt: list[int]) -> list[int]:
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{service.url}/v1/completions", json=body | {"model": "kvasir-python"}, timeout=120)
    assert answer.status_code == 200, answer.text
    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return token_ids


def metric(service: LocalService, pod: str, name: str, **labels: str) -> float:
    """Of the pod's own page; 0 where it has no such series."""
    [url] = re.findall(rf"{pod} starting at (\S+)", "".join(service.lines))
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def loading_lines(service: LocalService) -> list[tuple[str, str]]:
    """The pod that each rank's line came from, and what it loads."""
    line = r"\[(\S+)\] .*: ((?:data-parallel rank \d+, )?rank \d+ of \d+ loads layers \d+ to \d+ of \d+)"
    found = re.findall(line, "".join(service.lines))
    return sorted(found)


def test_prefill_and_decode_pods_answer_together(prompt: list[int], expected: list[int]) -> None:
    with served("prefill-decode.yaml") as service:
        service.wait_found(2)
        assert completion(service, prompt) == expected
        blocks = "kvasir_kv_transfer_blocks_total"
        assert metric(service, "split-decode-0", blocks, direction="received") == len(prompt) // BLOCK_TOKENS
        assert metric(service, "split-decode-0", "kvasir_kv_transfer_failures_total") == 0
    assert loading_lines(service) == [
        ("split-decode-0", "rank 0 of 1 loads layers 0 to 5 of 6"),
        ("split-prefill-0", "rank 0 of 1 loads layers 0 to 5 of 6"),
    ]


def test_the_pods_of_a_pipeline_group_answer_together(prompt: list[int], expected: list[int]) -> None:
    with served("pipeline-group.yaml") as service:
        assert completion(service, prompt) == expected

        def has_computed() -> bool:
            return metric(service, "staged-serve-0-1", "kvasir_rank_steps_total", rank="1") >= NUM_TOKENS

        wait_until(has_computed, 30, "the second pod to count its steps, which it does each second")
    assert loading_lines(service) == [
        ("staged-serve-0-0", "rank 0 of 2 loads layers 0 to 2 of 6"),
        ("staged-serve-0-1", "rank 1 of 2 loads layers 3 to 5 of 6"),
    ]


def test_two_copies_of_a_pipeline_are_one_group_behind_one_endpoint(prompt: list[int], expected: list[int]) -> None:
    other = {"model": "kvasir-python", "prompt": prompt[::-1], "max_tokens": 200, "ignore_eos": True, "stream": True}
    with served("pipeline-copies.yaml") as service:
        with httpx.stream("POST", f"{service.url}/v1/completions", json=other, timeout=120) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert completion(service, prompt) == expected, "of the copy that the stream leaves free"
            assert '"finish_reason":"length"' in "".join(lines)
        steps = "kvasir_data_parallel_engine_steps_total"
        of_copies = [metric(service, "copied-serve-0-0", steps, data_parallel_rank=rank) for rank in "01"]
        assert min(of_copies) >= NUM_TOKENS
    assert loading_lines(service) == [
        (
            f"copied-serve-0-{2 * stage + copy}",
            f"data-parallel rank {copy}, rank {stage} of 2 loads layers {layers} of 6",
        )
        for stage, layers in enumerate(("0 to 2", "3 to 5"))
        for copy in range(2)
    ]
