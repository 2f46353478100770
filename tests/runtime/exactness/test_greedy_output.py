"""Greedy output equals Hugging Face's token for token, for every architecture and with every cross of the features."""

import itertools
from typing import Any

import pytest

ARCHITECTURES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi3", "Olmo2"]
MIXTURES = ["Mixtral", "Qwen2Moe", "Qwen3Moe"]
FEATURES = ["prefix_cache", "chunked", "few_blocks", "one_step_ahead"]
ALL_CROSSES = [cross for number in range(len(FEATURES) + 1) for cross in itertools.combinations(FEATURES, number)]
SOME_CROSSES = [(), ("chunked", "one_step_ahead"), ("prefix_cache", "few_blocks"), tuple(FEATURES)]
WITH_WINDOWS = ("Mistral", "Qwen2", "Gemma2", "Gemma3", "Phi3", "Mixtral")
FULLY_CROSSED = ("Llama", "Gemma3")


def crosses_of(architecture: str) -> list[tuple[str, ...]]:
    if architecture in MIXTURES:  # what they add to the families before them knows nothing of these features
        return [(), tuple(FEATURES)]
    return ALL_CROSSES if architecture in FULLY_CROSSED else SOME_CROSSES


MATRIX = [
    pytest.param(architecture, cross, id=f"{architecture}-{'+'.join(cross) or 'plain'}")
    for architecture in (*ARCHITECTURES, *MIXTURES)
    for cross in crosses_of(architecture)
]


@pytest.mark.parametrize(("architecture", "features"), MATRIX, indirect=["features"])
def test_mixed_batch_equals_hugging_face(architecture: str, features: Any, reference: Any, start_engine: Any) -> None:
    expected = reference(f"{architecture}ForCausalLM")
    engine = start_engine(expected.folder, features)
    names = [f"prompt-{i}" for i in range(len(expected.prompts))]

    engine.add("neighbour", expected.prompts[0][::-1] * 3)
    for index in (0, 2, 4):
        engine.add(names[index], expected.prompts[index])
    engine.step_until(lambda: len(engine.channel.outputs.get(names[4], [])) >= 9)
    engine.abort("neighbour")
    for index in (1, 3, 5):  # these join a running batch
        engine.add(names[index], expected.prompts[index])
    generated = engine.finish(*names)

    assert [generated.token_ids(name) for name in names] == expected.outputs
    assert (generated.stats.num_preemptions > 0) == features.few_blocks
    if not (features.few_blocks and features.prefix_cache and architecture in WITH_WINDOWS):
        # Blocks behind a window are the first to be handed out again where blocks are few.
        assert (generated.stats.num_prefix_hits > 0) == features.prefix_cache


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_attention_backends_give_the_same_tokens(backend: str, reference: Any, start_engine: Any) -> None:
    expected = reference("Gemma2ForCausalLM")
    engine = start_engine(expected.folder, attention_backend=backend)
    for i, prompt in enumerate(expected.prompts):
        engine.add(str(i), prompt)
    generated = engine.finish(*map(str, range(len(expected.prompts))))
    assert [generated.token_ids(str(i)) for i in range(len(expected.prompts))] == expected.outputs
