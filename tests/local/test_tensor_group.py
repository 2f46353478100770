"""Ranks of one replica in two pods: the rendered flags start both, and they answer as one rank does."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
import yaml
from tests.controlplane.processes import wait_until
from tests.local.conftest import ROOT, LocalService
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLES = ROOT / "examples"
MODEL_FOLDER = EXAMPLES / "models" / "kvasir-python-7m"
PROMPTS = ["import os\n" * 40, "def flatten(lists):\n" * 40]
NUM_TOKENS = 64


@contextmanager
def running(manifest: Path) -> Iterator[LocalService]:
    service = LocalService(manifest)
    try:
        service.wait_ready()
        yield service
    finally:
        service.stop()


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Hugging Face's greedy answers, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    model = AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32).eval()
    texts = []
    for prompt in PROMPTS:
        encoded = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**encoded, max_new_tokens=NUM_TOKENS, do_sample=False)
        texts.append(tokenizer.decode(output[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


def answers(service: LocalService) -> list[str]:
    client = service.client()
    asked = [
        client.completions.create(model="kvasir-python", prompt=prompt, max_tokens=NUM_TOKENS, temperature=0)
        for prompt in PROMPTS
    ]
    return [answer.choices[0].text for answer in asked]


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
    ready = [f"rank {rank} is ready on cpu, collectives over gloo" for rank in (0, 1)]
    log = "".join(service.lines)
    return all(each in log for each in ready)


def num_bytes_received(service: LocalService) -> float:
    [decode] = {line.split(" at ")[1].strip() for line in service.lines if "split-decode-0-0 starting at" in line}
    lines = httpx.get(f"{decode}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("kvasir_kv_transfer_bytes_total"))


def test_two_pods_that_share_every_layer_answer_as_one_rank(expected: list[str]) -> None:
    with running(EXAMPLES / "tensor-group.yaml") as service:
        assert answers(service) == expected
        wait_until(lambda: meet_over_the_network(service), 30, "both ranks to say how they met")


def test_a_decode_engine_of_two_pods_takes_the_kv_of_one_rank(expected: list[str], tmp_path: Path) -> None:
    with running(split(tmp_path, decode={"tensor": 2})) as service:
        assert answers(service) == expected
        wait_until(lambda: meet_over_the_network(service), 30, "both ranks to say how they met")
        wait_until(lambda: num_bytes_received(service) > 0, 30, "the decode engine to count what it received")


def test_a_decode_engine_of_two_stages_takes_the_kv_of_two(expected: list[str], tmp_path: Path) -> None:
    with running(split(tmp_path, prefill={"pipeline": 2}, decode={"pipeline": 2})) as service:
        assert answers(service) == expected
        pods = {line.split(" starting at ")[0].split()[-1] for line in service.lines if " starting at " in line}
        assert {f"split-{role}-0-{node}" for role in ("prefill", "decode") for node in (0, 1)} <= pods
        wait_until(lambda: num_bytes_received(service) > 0, 30, "the decode engine to count what it received")
