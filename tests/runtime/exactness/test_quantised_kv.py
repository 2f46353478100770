"""With a quantised KV cache log-probabilities stay near Hugging Face's, in chunks as at once; ranks, and engines that
exchange KV, give what one gives."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.exactness.conftest import Engine, Features, Reference, engine_over
from tests.runtime.exactness.rank_threads import start_ranks
from tests.runtime.exactness.test_remote_prefill import Transfers

from kvasir_runtime.transfer.params import KvTransferParams

MOST_OFF = {"int8_per_token_head": 0.1, "fp8_per_token_head": 0.4}
"""The mean of log-probabilities' differences; it is 0.03 to 0.04, and 0.16 to 0.20."""
MOST_OFF_OF_RANKS = 1e-3
"""Ranks add up in another order, which may bring a key to the other side of a rounding."""


def scores(engine: Engine, expected: Reference) -> torch.Tensor:
    """Log-probabilities of all tokens of the reference's texts but their first ones."""
    texts = texts_of(expected)
    for i, text in enumerate(texts):
        engine.add(f"scored-{i}", text, prompt_logprobs=0, max_tokens=8)
    generated = engine.finish(*(f"scored-{i}" for i in range(len(texts))))
    entries = [entry for i in range(len(texts)) for entry in generated.outputs[f"scored-{i}"][0].prompt_logprobs[1:]]
    return torch.tensor([entry.logprobs[0] for entry in entries])


def texts_of(expected: Reference) -> list[list[int]]:
    return [prompt + output for prompt, output in zip(expected.prompts, expected.outputs, strict=True)]


def greedy(engine: Engine, expected: Reference) -> list[list[int]]:
    names = [f"greedy-{i}" for i in range(len(expected.prompts))]
    for name, prompt in zip(names, expected.prompts, strict=True):
        engine.add(name, prompt)
    generated = engine.finish(*names)
    return [generated.token_ids(name) for name in names]


@pytest.mark.parametrize("features", [(), ("chunked", "one_step_ahead")], indirect=True, ids=["plain", "chunked"])
@pytest.mark.parametrize("architecture", ["Llama", "Gemma3"])  # one KV group, and several
@pytest.mark.parametrize("kv_cache_dtype", MOST_OFF)
def test_logprobs_stay_near_hugging_face(
    kv_cache_dtype: str, architecture: str, features: Any, reference: Any, start_engine: Any
) -> None:
    expected = reference(f"{architecture}ForCausalLM")
    engine = start_engine(expected.folder, features, kv_cache_dtype=kv_cache_dtype, attention_backend="reference")
    wanted = [
        logprobs[: len(text) - 1].gather(1, torch.tensor(text[1:]).unsqueeze(1)).squeeze(1)
        for text, logprobs in zip(texts_of(expected), expected.logprobs, strict=True)
    ]
    off = (scores(engine, expected) - torch.cat(wanted)).abs()
    assert 1e-4 < off.mean() < MOST_OFF[kv_cache_dtype]


@pytest.mark.parametrize(
    ("architecture", "tensor_size", "num_stages", "expert_parallel"),
    [
        ("Llama", 2, 1, False),
        ("Llama", 4, 1, False),  # of two KV heads, each kept by two ranks
        ("Gemma3", 1, 2, False),
        ("Qwen2Moe", 2, 1, True),
    ],
)
@pytest.mark.parametrize("kv_cache_dtype", MOST_OFF)
def test_ranks_give_what_one_gives(
    kv_cache_dtype: str, architecture: str, tensor_size: int, num_stages: int, expert_parallel: bool,
    reference: Any, start_engine: Any, tmp_path: Path,
) -> None:  # fmt: skip
    """Stages compute the very same."""
    expected, features = reference(f"{architecture}ForCausalLM"), Features(chunked=True)
    options = {"kv_cache_dtype": kv_cache_dtype, "attention_backend": "reference"}
    alone = start_engine(expected.folder, features, **options)
    ranks = start_ranks(
        expected.folder, tmp_path, tensor_size, num_stages=num_stages, expert_parallel=expert_parallel, **options
    )
    try:
        engine = engine_over(ranks, ranks.workers[-1].description, features, None, num_stages)
        off = (scores(engine, expected) - scores(alone, expected)).abs()
        assert off.mean() < MOST_OFF_OF_RANKS
        if tensor_size == 1:
            assert greedy(engine, expected) == greedy(alone, expected)
    finally:
        ranks.close()


@pytest.fixture
def transfers(tmp_path: Path) -> Iterator[Transfers]:
    with ExitStack() as stack:
        yield Transfers(stack, tmp_path)


@pytest.mark.parametrize("architecture", ["Llama", "Gemma3"])  # one KV group, and several
@pytest.mark.parametrize("kv_cache_dtype", MOST_OFF)
def test_a_prompt_computed_by_another_engine_is_continued_as_by_one(
    kv_cache_dtype: str, architecture: str, reference: Any, start_engine: Any, transfers: Transfers
) -> None:
    """Pages are moved with their scales."""
    expected, features = reference(f"{architecture}ForCausalLM"), Features(prefix_cache=True, chunked=True)
    options = {"kv_cache_dtype": kv_cache_dtype, "attention_backend": "reference"}
    alone = start_engine(expected.folder, features, **options)
    prefill, decode = (start_engine(expected.folder, features, make_transfers=transfers, **options) for _ in range(2))
    for i, prompt in enumerate(expected.prompts):
        prefill.add(f"{i}", prompt, kv_transfer_params=KvTransferParams(do_remote_decode=True), max_tokens=1)
    names = [f"{i}" for i in range(len(expected.prompts))]
    first = prefill.finish(*names)
    for name, prompt in zip(names, expected.prompts, strict=True):
        decode.add(name, prompt, kv_transfer_params=first.outputs[name][-1].kv_transfer_params)
    generated = decode.finish(*names)
    assert [generated.token_ids(name) for name in names] == greedy(alone, expected)
    cached = [generated.outputs[name][0].num_cached_tokens for name in names]
    assert cached == [0] * len(names), "what was pulled was not cached here"
