"""Vectors of prompts equal what Hugging Face's hidden states give, whatever is served beside them and however prompts
are cut or cached. In bfloat16, where no two implementations round alike, they are to the last bit those made alone.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
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
from tests.runtime.exactness.rank_threads import start_ranks

from kvasir_runtime.config import CacheConfig, ExecutionConfig, ModelConfig, PoolerConfig, SchedulerConfig
from kvasir_runtime.execution.executor import Executor
from kvasir_runtime.execution.worker import load_worker
from kvasir_runtime.pooling.description import describe_pooling
from kvasir_runtime.requests.add_request import Pooling

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

    def vectors(self, prompts: Sequence[list[int]], second_text_start: int | None = None) -> torch.Tensor:
        """Of prompts that are served together; float32 [n, size]."""
        names = [str(self._engine.num_added + number) for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            pooling = msgspec.structs.replace(self._pooling, second_text_start=second_text_start)
            self._engine.add(name, prompt, pooling=pooling, max_tokens=0)
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


def test_a_last_token_may_be_left_for_a_step_of_its_own(reference: Any, start_pooling: Any) -> None:
    """It is no decode, for nothing is drawn after it."""
    expected = reference("Qwen3ForCausalLM")
    prompt = expected.prompts[-1][:25]  # a step has 24
    engine = start_pooling(expected.folder, "LAST", Features(chunked=True), runner="pooling")
    wanted = pooled(hidden_states(expected.folder, [prompt]), "LAST")
    torch.testing.assert_close(engine.vectors([prompt]), wanted, atol=2e-5, rtol=1e-4)


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


@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("pooling_type", ["LAST", "MEAN"])
def test_several_ranks_make_the_same_vectors(
    pooling_type: Any, size: int, num_stages: int, reference: Any, tmp_path: Path
) -> None:
    expected = reference("Qwen3ForCausalLM")
    pooler = PoolerConfig(pooling_type=pooling_type)
    ranks = start_ranks(expected.folder, tmp_path, size, "gloo", num_stages, runner="pooling", pooler_config=pooler)
    engine = engine_over(ranks, ranks.workers[-1].description, Features(chunked=True), None, num_stages)
    pooling = PoolingEngine(engine, Pooling(needs_whole_prompt=pooling_type == "MEAN"))
    try:
        wanted = pooled(hidden_states(expected.folder, expected.prompts), pooling_type)
        torch.testing.assert_close(pooling.vectors(expected.prompts), wanted, atol=2e-5, rtol=1e-4)
    finally:
        ranks.close()


def test_a_checkpoint_without_a_head_is_served(reference: Any, tmp_path: Path, start_pooling: Any) -> None:
    """Its tensors' names begin otherwise."""
    expected = reference("Qwen3ForCausalLM")
    model = transformers.Qwen3Model.from_pretrained(expected.folder, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    wanted = pooled(hidden_states(expected.folder, expected.prompts), "LAST")
    torch.testing.assert_close(start_pooling(tmp_path).vectors(expected.prompts), wanted, atol=2e-5, rtol=1e-4)


def test_dense_layers_follow_the_pooling(reference: Any, tmp_path: Path, start_pooling: Any) -> None:
    expected = reference("Qwen3ForCausalLM")
    folder = with_dense_layers(expected.folder, tmp_path / "model")
    states = pooled(hidden_states(expected.folder, expected.prompts), "MEAN")
    first, second = (load_file(folder / name / "model.safetensors") for name in ("2_Dense", "3_Dense"))
    inner = torch.tanh(states @ first["linear.weight"].T + first["linear.bias"])
    wanted = inner @ second["linear.weight"].T
    vectors = start_pooling(folder, features=Features(chunked=True)).vectors(expected.prompts)
    torch.testing.assert_close(vectors, wanted, atol=2e-5, rtol=1e-4)


def with_dense_layers(model: Path, folder: Path) -> Path:
    """The same model with sentence-transformers' files, which name two."""
    shutil.copytree(model, folder)
    torch.manual_seed(5)
    layers = {"2_Dense": (128, 24, "activation.Tanh", True), "3_Dense": (24, 16, "linear.Identity", False)}
    for name, (inner, outer, activation, has_bias) in layers.items():
        (folder / name).mkdir()
        tensors = {"linear.weight": torch.randn(outer, inner) * 0.1}
        tensors |= {"linear.bias": torch.randn(outer)} if has_bias else {}
        save_file(tensors, folder / name / "model.safetensors")
        config = {"in_features": inner, "out_features": outer, "bias": has_bias,
                  "activation_function": f"torch.nn.modules.{activation}"}  # fmt: skip
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Dense": "Dense"}
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules.items()]
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder


@pytest.mark.parametrize("features", FEATURES[2:4], indirect=True, ids="+".join)
@pytest.mark.parametrize("num_labels", [1, 3])
def test_scores_equal_those_of_hugging_faces_classifier(
    num_labels: int, features: Any, reference: Any, tmp_path: Path, start_pooling: Any
) -> None:
    expected = reference("Qwen3ForCausalLM")
    torch.manual_seed(5)
    classifier = transformers.Qwen3ForSequenceClassification.from_pretrained(
        expected.folder, num_labels=num_labels, dtype=torch.float32
    ).eval()
    classifier.save_pretrained(tmp_path)
    with torch.inference_mode():
        wanted = torch.cat([classifier(torch.tensor([prompt])).logits for prompt in expected.prompts])
    vectors = start_pooling(tmp_path, features=features).vectors(expected.prompts)
    torch.testing.assert_close(vectors, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen2"])
def test_a_generating_model_scores_by_its_logits_of_yes_and_no(
    architecture: str, reference: Any, tmp_path: Path, start_pooling: Any
) -> None:
    """One with a head of its own, one whose head is its embedding."""
    expected = reference(f"{architecture}ForCausalLM")
    folder = tmp_path / "model"
    shutil.copytree(expected.folder, folder)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"no": 7, "yes": 250}, "no")).save(str(folder / "tokenizer.json"))
    wanted = [each[len(prompt) - 1] for each, prompt in zip(expected.logprobs, expected.prompts, strict=True)]
    wanted = torch.stack([each[250] - each[7] for each in wanted]).unsqueeze(1)
    vectors = start_pooling(folder, runner="pooling", convert="classify").vectors(expected.prompts)
    torch.testing.assert_close(vectors, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Gemma2", "Gemma3", "Phi3", "Qwen3Moe"])
def test_every_family_makes_vectors(architecture: str, reference: Any, start_pooling: Any) -> None:
    expected = reference(f"{architecture}ForCausalLM")
    engine = start_pooling(expected.folder, "LAST", Features(chunked=True, prefix_cache=True), runner="pooling")
    wanted = pooled(hidden_states(expected.folder, expected.prompts), "LAST")
    torch.testing.assert_close(engine.vectors(expected.prompts), wanted, atol=2e-5, rtol=1e-4)
