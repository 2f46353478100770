"""Services whose requests several pods compute together: they answer as Hugging Face does, and each rank says that it
loads."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.controlplane.processes import wait_until
from tests.local.conftest import ROOT, LocalService
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLES = ROOT / "examples"
MODEL_FOLDER = EXAMPLES / "models" / "kvasir-python-7m"
PROMPT = (EXAMPLES / "quickstart.py").read_text()[:600]
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
def served(manifest: Path) -> Iterator[LocalService]:
    """Ready; when the block ends nothing of it may be left."""
    service = LocalService(manifest)
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


def split(folder: Path, **parallelism: dict[str, int]) -> Path:
    """A manifest of prefill and decode apart with these degrees, of which each pod computes one rank."""
    manifest = yaml.safe_load((EXAMPLES / "prefill-decode.yaml").read_text())
    for role, degrees in parallelism.items():
        fields = manifest["spec"]["disaggregation"][role]
        fields["parallelism"] = degrees
        fields["resources"]["maxDevices"] = 1
    (folder / "models").symlink_to(EXAMPLES / "models")
    file = folder / "split.yaml"
    file.write_text(yaml.safe_dump(manifest))
    return file


def meet_over_the_network(service: LocalService) -> bool:
    """Ranks of two pods."""
    log = "".join(service.lines)
    return all(f"rank {rank} is ready on cpu, collectives over gloo" in log for rank in (0, 1))


def check_transfer(service: LocalService, decode_pod: str, prompt: list[int]) -> None:
    blocks = partial(metric, service, decode_pod, "kvasir_kv_transfer_blocks_total", direction="received")
    wait_until(lambda: blocks() == len(prompt) // BLOCK_TOKENS, 30, "the decode engine to count what it received")
    assert metric(service, decode_pod, "kvasir_kv_transfer_failures_total") == 0


def test_a_decode_engine_of_two_pods_takes_the_kv_of_a_prefill_pod(
    prompt: list[int], expected: list[int], tmp_path: Path
) -> None:
    with served(split(tmp_path, decode={"tensor": 2})) as service:
        service.wait_found(2)
        assert completion(service, prompt) == expected
        check_transfer(service, "split-decode-0-0", prompt)
        wait_until(lambda: meet_over_the_network(service), 30, "both ranks to say how they met")
    assert loading_lines(service) == [
        ("split-decode-0-0", "rank 0 of 2 loads layers 0 to 5 of 6"),
        ("split-decode-0-1", "rank 1 of 2 loads layers 0 to 5 of 6"),
        ("split-prefill-0", "rank 0 of 1 loads layers 0 to 5 of 6"),
    ]


@pytest.mark.slow  # beside the test above, tests/contract/test_groups.py and tests/runtime/cli/test_disaggregation.py
@pytest.mark.parametrize(
    ("parallelism", "decode_pod"),
    [({}, "split-decode-0"), ({"pipeline": 2}, "split-decode-0-0")],
    ids=["one", "stages"],
)
def test_prefill_and_decode_pods_answer_together(
    parallelism: dict[str, int], decode_pod: str, prompt: list[int], expected: list[int], tmp_path: Path
) -> None:
    roles = {role: parallelism for role in ("prefill", "decode") if parallelism}
    with served(split(tmp_path, **roles)) as service:
        service.wait_found(2)
        assert completion(service, prompt) == expected
        check_transfer(service, decode_pod, prompt)


@pytest.mark.slow  # beside the decode engine of two pods above
def test_two_pods_that_share_every_layer_answer_as_one_rank(prompt: list[int], expected: list[int]) -> None:
    with served(EXAMPLES / "tensor-group.yaml") as service:
        assert completion(service, prompt) == expected
        wait_until(lambda: meet_over_the_network(service), 30, "both ranks to say how they met")


def test_the_pods_of_a_pipeline_group_answer_together(prompt: list[int], expected: list[int]) -> None:
    with served(EXAMPLES / "pipeline-group.yaml") as service:
        assert completion(service, prompt) == expected

        def has_computed() -> bool:
            return metric(service, "staged-serve-0-1", "kvasir_rank_steps_total", rank="1") >= NUM_TOKENS

        wait_until(has_computed, 30, "the second pod to count its steps, which it does each second")
    assert loading_lines(service) == [
        ("staged-serve-0-0", "rank 0 of 2 loads layers 0 to 2 of 6"),
        ("staged-serve-0-1", "rank 1 of 2 loads layers 3 to 5 of 6"),
    ]


@pytest.mark.slow  # beside the test above and tests/runtime/cli/test_serve_nodes.py
def test_two_copies_of_a_pipeline_are_one_group_behind_one_endpoint(prompt: list[int], expected: list[int]) -> None:
    other = {"model": "kvasir-python", "prompt": prompt[::-1], "max_tokens": 200, "ignore_eos": True, "stream": True}
    with served(EXAMPLES / "pipeline-copies.yaml") as service:
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
