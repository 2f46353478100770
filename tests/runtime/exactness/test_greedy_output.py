"""Greedy output is the reference's token for token, for every architecture and with every cross of the features."""

from typing import Any

import pytest
from tests.runtime.crossed import crossed
from tests.runtime.exactness.conftest import DTYPES, Dtype, Features

ARCHITECTURES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi3", "Olmo2"]
MIXTURES = ["Mixtral", "Qwen2Moe", "Qwen3Moe"]
FEATURES = ["prefix_cache", "chunked", "few_blocks", "one_step_ahead"]
SCORED = (0, 3, 4)
"""Prompts of which log-probabilities are asked for: in bfloat16 they show what does not yet change a token."""
WITH_WINDOWS = ("Mistral", "Qwen2", "Gemma2", "Gemma3", "Phi3", "Mixtral")


@pytest.mark.parametrize(
    ("architecture", "dtype", *FEATURES),
    crossed(
        [pytest.param(name, id=name) for name in (*ARCHITECTURES, *MIXTURES)],
        [pytest.param(dtype, id=dtype) for dtype in DTYPES],
        *([pytest.param(True, id=name), pytest.param(False, id=f"no_{name}")] for name in FEATURES),
    ),
)
def test_a_mixed_batch_says_what_each_request_must(
    architecture: str,
    dtype: Dtype,
    prefix_cache: bool,
    chunked: bool,
    few_blocks: bool,
    one_step_ahead: bool,
    reference: Any,
    start_engine: Any,
) -> None:
    expected = reference(f"{architecture}ForCausalLM", dtype)
    features = Features(prefix_cache, chunked, few_blocks, one_step_ahead)
    engine = start_engine(expected.folder, features)
    names = [f"prompt-{i}" for i in range(len(expected.prompts))]

    for index in (0, 1):
        engine.add(f"neighbour-{index}", expected.prompts[index][::-1] * 3)
    for index in (0, 2, 4):
        engine.add(names[index], expected.prompts[index], logprobs=1 if index in SCORED else None)
    engine.step_until(lambda: len(engine.channel.outputs.get(names[4], [])) >= 24)
    for index in (0, 1):
        engine.abort(f"neighbour-{index}")
    for index in (1, 3, 5):  # these join a running batch
        engine.add(names[index], expected.prompts[index], logprobs=1 if index in SCORED else None)
    generated = engine.finish(*names)

    for index, name in enumerate(names):
        expected.check(generated, name, index)
    if architecture != "Mistral":  # all its layers see a window, so that few blocks hold all requests
        assert (generated.stats.num_preemptions > 0) == features.few_blocks
    if not (features.few_blocks and features.prefix_cache and architecture in WITH_WINDOWS):
        # Blocks behind a window are the first to be handed out again where blocks are few.
        assert (generated.stats.num_prefix_hits > 0) == features.prefix_cache


@pytest.mark.parametrize("backend", ["reference", "cpu"])  # in float32: the two round differently
def test_attention_backends_give_the_same_tokens(backend: str, reference: Any, start_engine: Any) -> None:
    expected = reference("Gemma2ForCausalLM")
    engine = start_engine(expected.folder, attention_backend=backend)
    for i, prompt in enumerate(expected.prompts):
        engine.add(str(i), prompt)
    generated = engine.finish(*map(str, range(len(expected.prompts))))
    assert [generated.token_ids(str(i)) for i in range(len(expected.prompts))] == expected.outputs
