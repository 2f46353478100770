"""Loading a rank: limits that cannot be kept are refused, and what is reported is what was made."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvasir_runtime.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig
from kvasir_runtime.engine.messages import SamplingParams
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.execution.worker import Worker, load_worker
from kvasir_runtime.scheduling.batch import NewRequest, ScheduledBatch, ScheduledRequest

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q_proj": (32, 32), "k_proj": (32, 32), "v_proj": (32, 32), "o_proj": (32, 32)}
    tensors = {f"model.layers.0.self_attn.{name}.weight": shape for name, shape in shapes.items()}
    tensors |= {f"model.layers.0.mlp.{name}.weight": (48, 32) for name in ("gate_proj", "up_proj")}
    tensors |= {"model.layers.0.mlp.down_proj.weight": (32, 48), "model.embed_tokens.weight": (64, 32)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in tensors.items()}
    for name in ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"):
        weights[f"{name}.weight"] = torch.ones(32)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def load(folder: Path, scheduler: SchedulerConfig | None = None, **model: Any) -> Worker:
    return load_worker(
        ModelConfig(model=str(folder), device="cpu", **model),
        CacheConfig(),
        ExecutionConfig(num_threads=1),
        scheduler or SchedulerConfig(max_num_seqs=4),
    )


def test_reports_what_was_loaded(folder: Path) -> None:
    worker = load(folder, max_model_len=40)
    assert (worker.max_model_len, worker.vocab_size, worker.num_blocks) == (40, 64, 4 * 3)
    assert worker.attention_backend == "cpu"
    assert set(worker.startup_seconds) == {"load_weights", "measure_linear", "allocate_kv", "warm_up"}


def test_context_beyond_the_models_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--max-model-len 65: expected 1 to 64"):
        load(folder, max_model_len=65)


def test_longrope_beyond_its_exact_length_is_refused(folder: Path) -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    changes = {"rope_scaling": scaling, "original_max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(ConfigurationError, match=r"exact only up to 32 tokens.*--max-model-len 32"):
        load(folder)
    assert load(folder, max_model_len=32).max_model_len == 32


def test_a_budget_too_small_for_a_whole_prompt_is_refused(folder: Path) -> None:
    scheduler = SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=63)
    with pytest.raises(ConfigurationError, match=r"--max-num-batched-tokens 63 is less than max_model_len 64"):
        load(folder, scheduler)


def test_prompt_logprobs_leave_the_sampled_token_alone(folder: Path) -> None:
    """The sampled position comes before the scored ones, even when together they are all of the step's tokens."""
    prompt = [5, 6, 7, 8]
    sampled = []
    for prompt_logprobs in (None, 2):
        sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0, prompt_logprobs=prompt_logprobs)
        share = ScheduledRequest("a", 0, 4, (0,), True)
        output = load(folder).runner.run(ScheduledBatch((), (NewRequest("a", prompt, 4, sampling),), (share,), 4))
        sampled.append(output.token_ids)
    assert sampled[0] == sampled[1]
    assert [entry.token_ids[0] for entry in output.prompt_logprobs["a"]] == prompt[1:]


def test_a_chunk_before_the_last_samples_nothing(folder: Path) -> None:
    runner = load(folder).runner
    new = NewRequest("a", [5, 6, 7, 8], 4, SamplingParams(max_tokens=1, seed=0))
    output = runner.run(ScheduledBatch((), (new,), (ScheduledRequest("a", 0, 2, (0,), False),), 2))
    assert output.token_ids == []
