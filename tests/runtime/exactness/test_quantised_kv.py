"""With a quantised KV cache log-probabilities stay near Hugging Face's, in chunks as at once."""

from typing import Any

import pytest
import torch

MOST_OFF = {"int8_per_token_head": 0.1, "fp8_per_token_head": 0.4}
"""The mean of log-probabilities' differences; it is 0.03 to 0.04, and 0.16 to 0.20."""


@pytest.mark.parametrize("features", [(), ("chunked", "one_step_ahead")], indirect=True, ids=["plain", "chunked"])
@pytest.mark.parametrize("architecture", ["Llama", "Gemma3"])  # one KV group, and several
@pytest.mark.parametrize("kv_cache_dtype", MOST_OFF)
def test_logprobs_stay_near_hugging_face(
    kv_cache_dtype: str, architecture: str, features: Any, reference: Any, start_engine: Any
) -> None:
    expected = reference(f"{architecture}ForCausalLM")
    engine = start_engine(expected.folder, features, kv_cache_dtype=kv_cache_dtype, attention_backend="reference")
    texts = [prompt + output for prompt, output in zip(expected.prompts, expected.outputs, strict=True)]
    for i, text in enumerate(texts):
        engine.add(str(i), text, prompt_logprobs=0, max_tokens=8)
    generated = engine.finish(*map(str, range(len(texts))))
    off = []
    for i, text in enumerate(texts):
        entries = generated.outputs[str(i)][0].prompt_logprobs[1:]
        seen = torch.tensor([entry.logprobs[0] for entry in entries])
        wanted = expected.logprobs[i][: len(text) - 1].gather(1, torch.tensor(text[1:]).unsqueeze(1)).squeeze(1)
        off.append((seen - wanted).abs())
    assert 1e-4 < torch.cat(off).mean() < MOST_OFF[kv_cache_dtype]
