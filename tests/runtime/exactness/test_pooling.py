"""Vectors of prompts equal what Hugging Face's hidden states give, whatever is served beside them and however prompts
are cut or cached. In bfloat16, where no two implementations round alike, they are to the last bit those made alone.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.runtime.exactness.conftest import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    PLAIN,
    Engine,
    Features,
    engine_over,
)

from kvasir_runtime.config import CacheConfig, ExecutionConfig, ModelConfig, PoolerConfig, SchedulerConfig
from kvasir_runtime.execution.executor import Executor
from kvasir_runtime.execution.worker import load_worker
from kvasir_runtime.pooling.description import describe_pooling
from kvasir_runtime.requests.pooling import Pooling

POOLING_TYPES = ["LAST", "MEAN", "CLS"]
FEATURES = [
    (),
    ("chunked",),
    ("chunked", "prefix_cache"),
    ("chunked", "prefix_cache", "few_blocks"),
    ("prefix_cache", "one_step_ahead"),
    ("chunked", "three_steps_ahead"),
]


class PoolingEngine:
    def __init__(self, engine: Engine, pooling: Pooling) -> None:
        self._engine = engine
        self._pooling = pooling

    @property
    def num_blocks_used(self) -> int:
        return self._engine.num_blocks_used

    def vectors(self, prompts: Sequence[list[int]]) -> torch.Tensor:
        """Of prompts that are served together; float32 [n, size]."""
        names = [str(self._engine.num_added + number) for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.add(name, prompt, pooling=self._pooling, max_tokens=0)
        self._engine.finish(*names)
        outputs = [self._engine.channel.outputs[name] for name in names]
        assert all(len(each) == 1 and not each[0].new_token_ids for each in outputs)
        return torch.stack([torch.from_numpy(np.frombuffer(output.pooled, "<f4").copy()) for (output,) in outputs])


@pytest.fixture
def start_pooling() -> Iterator[Callable[..., PoolingEngine]]:
    executors: list[Executor] = []

    def start(folder: Path, pooling_type: Any = None, features: Features = PLAIN, **model: Any) -> PoolingEngine:
        pooler = None if pooling_type is None else PoolerConfig(pooling_type=pooling_type)
        config = ModelConfig(
            model=str(folder), max_model_len=MAX_MODEL_LEN, device="cpu", **({"pooler_config": pooler} | model)
        )
        worker = load_worker(
            config,
            CacheConfig(block_size=BLOCK_SIZE),
            ExecutionConfig(num_threads=1),
            SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS),
        )
        executors.append(Executor(worker.runner))
        description = describe_pooling(config)
        assert description is not None
        engine = engine_over(executors[-1], worker.description, features, None)
        return PoolingEngine(engine, Pooling(needs_whole_prompt=description.needs_whole_prompt))

    yield start
    for executor in executors:
        executor.close()


@torch.inference_mode()
def hidden_states(folder: Path, prompts: Sequence[list[int]], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    model = transformers.AutoModel.from_pretrained(folder, dtype=dtype).eval()
    return [model(torch.tensor([prompt])).last_hidden_state[0].float() for prompt in prompts]


def pooled(states: Sequence[torch.Tensor], pooling_type: str) -> torch.Tensor:
    of_prompt = {"LAST": lambda each: each[-1], "CLS": lambda each: each[0], "MEAN": lambda each: each.mean(0)}
    return torch.stack([of_prompt[pooling_type](each) for each in states])


@pytest.mark.parametrize("features", FEATURES, indirect=True, ids="+".join)
@pytest.mark.parametrize("pooling_type", POOLING_TYPES)
def test_vectors_equal_hugging_face(pooling_type: str, features: Any, reference: Any, start_pooling: Any) -> None:
    expected = reference("Qwen3ForCausalLM")
    engine = start_pooling(expected.folder, pooling_type, features, runner="pooling")
    prompts = [*expected.prompts, expected.prompts[-1][:1], expected.prompts[-1][:41]]
    wanted = pooled(hidden_states(expected.folder, prompts), pooling_type)
    for _ in range(2):  # the second time from the prefix cache, where there is one
        torch.testing.assert_close(engine.vectors(prompts), wanted, atol=2e-5, rtol=1e-4)
    assert not engine.num_blocks_used


@pytest.mark.parametrize("features", FEATURES[1:], indirect=True, ids="+".join)
@pytest.mark.parametrize("pooling_type", POOLING_TYPES)
def test_vectors_are_to_the_bit_those_made_alone(
    pooling_type: str, features: Any, reference: Any, start_pooling: Any
) -> None:
    expected = reference("Qwen3ForCausalLM", "bfloat16")
    alone, together = (
        start_pooling(expected.folder, pooling_type, each, runner="pooling") for each in (PLAIN, features)
    )
    wanted = torch.cat([alone.vectors([prompt]) for prompt in expected.prompts])
    for _ in range(2):
        assert torch.equal(together.vectors(expected.prompts), wanted)
    close = pooled(hidden_states(expected.folder, expected.prompts, torch.bfloat16), pooling_type)
    assert (torch.cosine_similarity(wanted, close) > 0.999).all()


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Gemma2", "Gemma3", "Phi3", "Qwen3Moe"])
def test_every_family_makes_vectors(architecture: str, reference: Any, start_pooling: Any) -> None:
    expected = reference(f"{architecture}ForCausalLM")
    engine = start_pooling(expected.folder, "LAST", Features(chunked=True, prefix_cache=True), runner="pooling")
    wanted = pooled(hidden_states(expected.folder, expected.prompts), "LAST")
    torch.testing.assert_close(engine.vectors(expected.prompts), wanted, atol=2e-5, rtol=1e-4)
