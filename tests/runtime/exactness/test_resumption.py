"""A sequence that another engine began goes on as if it had never moved, greedy or sampled, with every feature."""

from typing import Any

import pytest
import torch
from tests.runtime.crossed import crossed
from tests.runtime.exactness.conftest import DTYPES, TOLERANCES, Dtype, Features

FEATURES = ["prefix_cache", "chunked", "few_blocks", "one_step_ahead"]
CUTS = [1, 2, 15, 30, 46, 47]
"""Tokens there already: around a block's end, at either end, and in the middle."""

SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.9, "seed": 2**64 - 1},
    "top-k-and-p": {"temperature": 1.2, "seed": 11, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        "temperature": 0.7,
        "seed": 5,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.6,
        "repetition_penalty": 1.3,
        "logit_bias": {3: 2.0},
    },
    "min-tokens": {"temperature": 1.5, "seed": 3, "min_tokens": 30, "stop_token_ids": tuple(range(40))},
    "greedy-penalties": {"frequency_penalty": 1.5, "presence_penalty": 0.5},
}


@pytest.mark.parametrize(
    ("architecture", "dtype", *FEATURES), crossed(["Llama", "Gemma3"], DTYPES, *[[True, False]] * len(FEATURES))
)
def test_greedy_output_goes_on_as_it_must(
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
    engine = start_engine(expected.folder, Features(prefix_cache, chunked, few_blocks, one_step_ahead))
    cases = list(zip(expected.prompts, expected.outputs, CUTS, strict=True))
    for number, (prompt, output, cut) in enumerate(cases):
        engine.add(str(number), prompt, output[:cut], logprobs=1 if number % 2 else None)
    generated = engine.finish(*map(str, range(len(cases))))
    for number, cut in enumerate(CUTS):
        expected.check(generated, str(number), number, cut)


@pytest.mark.parametrize("features", [(), ("chunked", "one_step_ahead")], indirect=True, ids=["plain", "chunked"])
@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sampled_output_goes_on_as_in_the_unbroken_run(
    dtype: Dtype, name: str, features: Any, reference: Any, start_engine: Any
) -> None:
    expected = reference("LlamaForCausalLM", dtype)
    prompt, sampling = expected.prompts[2], SAMPLED[name] | {"logprobs": 2}
    engine = start_engine(expected.folder, features)
    engine.add("whole", prompt, **sampling)
    whole = engine.finish("whole")
    tokens = whole.token_ids("whole")
    cuts = [cut for cut in CUTS if cut < len(tokens)]
    for cut in cuts:
        engine.add(str(cut), prompt, tokens[:cut], **sampling)
    resumed = engine.finish(*map(str, cuts))
    assert len(cuts) >= 3
    for cut in cuts:
        assert resumed.token_ids(str(cut)) == tokens[cut:]
        assert resumed.outputs[str(cut)][-1].finish_reason == whole.outputs["whole"][-1].finish_reason
        scores, own = (
            torch.tensor([entry.logprobs for entry in entries])
            for entries in (resumed.logprobs(str(cut)), whole.logprobs("whole")[cut:])
        )
        torch.testing.assert_close(scores, own, atol=TOLERANCES[dtype], rtol=0)


@pytest.mark.parametrize("features", [("prefix_cache",)], indirect=True, ids=["prefix_cache"])
def test_a_prompt_counts_as_cached_where_the_sequence_began(features: Any, reference: Any, start_engine: Any) -> None:
    expected = reference("LlamaForCausalLM")
    prompt, output = expected.prompts[4], expected.outputs[4]
    engine = start_engine(expected.folder, features)
    engine.add("first", prompt)
    engine.finish("first")
    engine.add("again", prompt)
    engine.add("resumed", prompt, output[:20])
    generated = engine.finish("again", "resumed")
    assert generated.outputs["again"][0].num_cached_tokens > 0
    assert generated.outputs["resumed"][0].num_cached_tokens == 0


def test_the_prompts_own_logprobs_are_not_sent_again(reference: Any, start_engine: Any) -> None:
    expected = reference("LlamaForCausalLM")
    engine = start_engine(expected.folder)
    engine.add("resumed", expected.prompts[2], expected.outputs[2][:5], prompt_logprobs=1)
    generated = engine.finish("resumed")
    assert all(output.prompt_logprobs is None for output in generated.outputs["resumed"])
    assert generated.token_ids("resumed") == expected.outputs[2][5:]
