"""`serve` of a mixture of experts over processes that cut its experts, or share them out: the answers of one."""

import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.runtime.cli.conftest import Server
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

BODY = {"model": "mixture", "prompt": "hello", "max_tokens": 40, "ignore_eos": True}
BODIES = [BODY | {"temperature": 0, "logprobs": 1}, BODY | {"temperature": 0.9, "seed": 3, "n": 2}]
TWO_RANKS = ("--dtype", "float32", "--tensor-parallel-size", "2", "--collective-backend", "gloo")


@pytest.fixture(scope="module")
def mixture_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tiny model's byte tokens."""
    folder = tmp_path_factory.mktemp("models") / "mixture"
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=None, bos_token_id=None, num_experts=5,
        num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40, initializer_range=0.2,
    )  # fmt: skip
    Qwen2MoeForCausalLM(config).save_pretrained(folder)
    shutil.copy(model_folder / "tokenizer.json", folder)
    return folder


def answers_of(server: Server) -> list[Any]:
    posts = [httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json() for body in BODIES]
    return [[choice["text"] for choice in post["choices"]] for post in posts]


EXPERTS = ("--enable-expert-parallel",)
ENGINES = ("--data-parallel-size", "2")
STAGES = ("--pipeline-parallel-size", "2")


@pytest.fixture(scope="module")
def alone(serve_all: Callable[..., Server], mixture_folder: Path) -> list[Any]:
    answers = answers_of(serve_all("--dtype", "float32", folder=mixture_folder).wait_ready())
    assert all(len(text) > 0 for texts in answers for text in texts)
    return answers


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((*EXPERTS, *ENGINES), id="whole experts, two engines"),
        pytest.param((), id="cut experts", marks=pytest.mark.slow),
        pytest.param((*EXPERTS, *ENGINES, *STAGES), id="and two stages", marks=pytest.mark.slow),
    ],
)
def test_ranks_answer_as_one(
    flags: tuple[str, ...], serve: Callable[..., Server], mixture_folder: Path, alone: list[Any]
) -> None:
    server = serve(*TWO_RANKS, *flags, folder=mixture_folder).wait_ready()
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(answers_of, [server] * 4)) == [alone] * 4  # at once, so all engines have some
    metrics = httpx.get(f"{server.url}/metrics").text
    steps = re.findall(r"^kvasir_data_parallel_engine_steps_total\{.*\} (\S+)$", metrics, re.MULTILINE)
    assert len(steps) == 2 or ENGINES[0] not in flags
    assert all(float(number) >= BODY["max_tokens"] for number in steps)
