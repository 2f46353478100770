"""Reported log-probabilities equal Hugging Face's log-softmax within 1e-4, of prompts and of outputs."""

from typing import Any

import pytest
import torch

ARCHITECTURES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi3", "Olmo2"]


@pytest.mark.parametrize("features", [("one_step_ahead",), ("chunked", "few_blocks")], indirect=True, ids="+".join)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_output_logprobs_equal_hugging_face(
    architecture: str, features: Any, reference: Any, start_engine: Any
) -> None:
    expected = reference(f"{architecture}ForCausalLM")
    engine = start_engine(expected.folder, features)
    for i, prompt in enumerate(expected.prompts):
        engine.add(str(i), prompt, logprobs=3, max_tokens=32)
    generated = engine.finish(*map(str, range(len(expected.prompts))))
    for i, prompt in enumerate(expected.prompts):
        logprobs = expected.logprobs[i][len(prompt) - 1 :][:32]
        entries = generated.logprobs(str(i))
        assert [entry.token_ids[0] for entry in entries] == expected.outputs[i][:32]
        assert all(entry.rank == 1 for entry in entries)
        best = torch.tensor([entry.logprobs[1:] for entry in entries])
        torch.testing.assert_close(best, logprobs.topk(3).values, atol=1e-4, rtol=0)


@pytest.mark.parametrize("features", [(), ("chunked", "prefix_cache")], indirect=True, ids=["plain", "chunked"])
@pytest.mark.parametrize("architecture", ["Llama", "Gemma3"])
def test_prompt_logprobs_equal_hugging_face(
    architecture: str, features: Any, reference: Any, start_engine: Any
) -> None:
    expected = reference(f"{architecture}ForCausalLM")
    engine = start_engine(expected.folder, features)
    for i, prompt in enumerate(expected.prompts):
        engine.add(str(i), prompt, prompt_logprobs=1, max_tokens=2)
    generated = engine.finish(*map(str, range(len(expected.prompts))))
    for i, prompt in enumerate(expected.prompts):
        first, *entries = generated.outputs[str(i)][0].prompt_logprobs
        assert first is None
        assert [entry.token_ids[0] for entry in entries] == prompt[1:]
        seen = torch.tensor([entry.logprobs[0] for entry in entries])
        wanted = expected.logprobs[i][: len(prompt) - 1].gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(seen, wanted, atol=1e-4, rtol=0)
