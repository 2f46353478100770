"""Vectors of encoders equal those of Hugging Face's models, whatever texts are computed beside them. In bfloat16, where
no two implementations round alike, they are to the last bit those made alone.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.runtime.exactness.conftest import (
    BLOCK_SIZE,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    PLAIN,
    Features,
    engine_over,
)
from tests.runtime.exactness.test_pooling import PoolingEngine, pooled

from kvasir_runtime.config import (
    CacheConfig,
    ExecutionConfig,
    KvTransferConfig,
    ModelConfig,
    PoolerConfig,
    SchedulerConfig,
)
from kvasir_runtime.errors import ConfigurationError, ModelLoadError
from kvasir_runtime.execution.executor import Executor
from kvasir_runtime.execution.worker import load_worker
from kvasir_runtime.pooling.description import describe_pooling
from kvasir_runtime.requests.add_request import Pooling

SHAPE: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 130, "pad_token_id": 1, "initializer_range": 0.2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {},
    "XLMRoberta": {"type_vocab_size": 1},
    "Roberta": {"type_vocab_size": 1},
    "ModernBert": {
        "local_attention": 16, "norm_bias": True, "cls_token_id": 0, "sep_token_id": 2, "bos_token_id": None,
        "eos_token_id": None,
    },
}  # fmt: skip
PROMPTS = [
    torch.randint(2, 300, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 7, 16, 17, 40, 90, 128)
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a random model of an architecture."""
    folders: dict[tuple[str, str, str], Path] = {}

    def save(family: str, kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
        key = family, kind, f"{dtype}{options}"
        if key not in folders:
            torch.manual_seed(3)
            config = getattr(transformers, f"{family}Config")(**(SHAPE | FAMILIES[family] | options))
            model = getattr(transformers, family + kind)(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 1:  # norms and biases start as constants
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            folders[key] = tmp_path_factory.mktemp("encoders")
            model.to(dtype).save_pretrained(folders[key])
        return folders[key]

    return save


@pytest.fixture
def start_encoder() -> Iterator[Callable[..., PoolingEngine]]:
    executors: list[Executor] = []

    def start(folder: Path, pooling_type: Any = None, features: Features = PLAIN) -> PoolingEngine:
        pooler = None if pooling_type is None else PoolerConfig(pooling_type=pooling_type)
        config = ModelConfig(model=str(folder), device="cpu", pooler_config=pooler)
        worker = load_worker(
            config,
            CacheConfig(block_size=BLOCK_SIZE),
            ExecutionConfig(num_threads=1),
            SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS),
        )
        assert worker.description.computes_whole_prompts
        executors.append(Executor(worker.runner))
        description = describe_pooling(config)
        assert description is not None
        engine = engine_over(executors[-1], worker.description, features, None)
        return PoolingEngine(engine, Pooling(needs_whole_prompt=description.needs_whole_prompt))

    yield start
    for executor in executors:
        executor.close()


@torch.inference_mode()
def hidden_states(folder: Path, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    model = transformers.AutoModel.from_pretrained(folder, dtype=dtype).eval()
    return [model(torch.tensor([prompt])).last_hidden_state[0].float() for prompt in PROMPTS]


@pytest.mark.parametrize("features", [(), ("one_step_ahead",), ("few_blocks",)], indirect=True, ids="+".join)
@pytest.mark.parametrize("pooling_type", ["MEAN", "CLS", "LAST"])
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_equal_hugging_face(
    family: str, pooling_type: str, features: Any, saved: Any, start_encoder: Any
) -> None:
    folder = saved(family, "Model")
    wanted = pooled(hidden_states(folder), pooling_type)
    engine = start_encoder(folder, pooling_type, features)
    torch.testing.assert_close(engine.vectors(PROMPTS), wanted, atol=2e-5, rtol=1e-4)
    assert not engine.num_blocks_used


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_to_the_bit_those_made_alone(family: str, saved: Any, start_encoder: Any) -> None:
    folder = saved(family, "Model", torch.bfloat16)
    engine = start_encoder(folder, "MEAN")
    alone = torch.cat([engine.vectors([prompt]) for prompt in PROMPTS])
    assert torch.equal(engine.vectors(PROMPTS), alone)
    close = pooled(hidden_states(folder, torch.bfloat16), "MEAN")
    assert (torch.cosine_similarity(alone, close) > 0.999).all()


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize(
    ("family", "options"),
    [("Bert", {}), ("XLMRoberta", {}), ("ModernBert", {}), ("ModernBert", {"classifier_pooling": "mean"})],
)
def test_scores_equal_those_of_hugging_faces_classifier(
    family: str, options: dict[str, Any], num_labels: int, saved: Any, start_encoder: Any
) -> None:
    folder = saved(family, "ForSequenceClassification", num_labels=num_labels, **options)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = torch.cat([classifier(torch.tensor([prompt])).logits for prompt in PROMPTS])
    torch.testing.assert_close(start_encoder(folder).vectors(PROMPTS), wanted, atol=2e-5, rtol=1e-4)


def test_a_second_text_is_of_another_type(saved: Any, start_encoder: Any) -> None:
    folder = saved("Bert", "ForSequenceClassification", num_labels=1)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    prompt, types = PROMPTS[4], [0] * 12 + [1] * 28
    with torch.inference_mode():
        wanted = classifier(torch.tensor([prompt]), token_type_ids=torch.tensor([types])).logits
    vector = start_encoder(folder).vectors([prompt], second_text_start=12)
    torch.testing.assert_close(vector, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_that_predicts_masked_words_is_served_without_its_head(
    family: str, saved: Any, start_encoder: Any
) -> None:
    folder = saved(family, "ForMaskedLM")
    wanted = pooled(hidden_states(folder), "CLS")
    torch.testing.assert_close(start_encoder(folder).vectors(PROMPTS), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("pooling_type", ["MEAN", "LAST"])
def test_a_decoders_layers_may_see_ahead(pooling_type: str, reference: Any, tmp_path: Path, start_encoder: Any) -> None:
    """As EmbeddingGemma's do, through windows in some."""
    config = transformers.Gemma3TextConfig.from_pretrained(reference("Gemma3ForCausalLM").folder)
    torch.manual_seed(3)
    config.use_bidirectional_attention = True
    config.sliding_window = 11
    transformers.Gemma3TextModel(config).save_pretrained(tmp_path)
    wanted = pooled(hidden_states(tmp_path), pooling_type)
    vectors = start_encoder(tmp_path, pooling_type).vectors(PROMPTS)
    torch.testing.assert_close(vectors, wanted, atol=2e-5, rtol=1e-4)


def test_so_may_those_whose_configuration_denies_that_they_are_causal(
    reference: Any, tmp_path: Path, start_encoder: Any
) -> None:
    """As gte-Qwen2's does."""
    shutil.copytree(reference("Qwen3ForCausalLM").folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3Model"], "is_causal": False}))
    wanted = pooled(hidden_states(tmp_path), "MEAN")
    vectors = start_encoder(tmp_path, "MEAN").vectors(PROMPTS)
    torch.testing.assert_close(vectors, wanted, atol=2e-5, rtol=1e-4)


def test_windows_that_may_lie_on_either_side_are_refused(reference: Any) -> None:
    folder, overrides = reference("MistralForCausalLM").folder, {"is_causal": False}
    config = ModelConfig(model=str(folder), device="cpu", runner="pooling", hf_overrides=overrides)
    with pytest.raises(ModelLoadError, match="is_causal is false and some layers see a window"):
        load_worker(config, CacheConfig(), ExecutionConfig(), SchedulerConfig())


def test_modernberts_older_configurations_say_the_same(saved: Any, tmp_path: Path, start_encoder: Any) -> None:
    folder = saved("ModernBert", "Model")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    ropes, kinds = config.pop("rope_parameters"), config.pop("layer_types")
    assert kinds == ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    older = {"global_attn_every_n_layers": 3, "global_rope_theta": ropes["full_attention"]["rope_theta"],
             "local_rope_theta": ropes["sliding_attention"]["rope_theta"]}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config | older))
    newer, as_before = (start_encoder(each, "MEAN").vectors(PROMPTS) for each in (folder, tmp_path))
    assert torch.equal(newer, as_before)


def test_an_encoder_exchanges_no_kv(saved: Any) -> None:
    cache = CacheConfig(kv_transfer_config=KvTransferConfig(kv_connector="NixlConnector"))
    with pytest.raises(ConfigurationError, match="this model is an encoder and keeps no KV"):
        load_worker(
            ModelConfig(model=str(saved("Bert", "Model")), device="cpu"), cache, ExecutionConfig(), SchedulerConfig()
        )


def test_a_text_is_no_longer_than_the_positions(saved: Any) -> None:
    """Of RoBERTa's, the first two stand for nothing."""
    config = ModelConfig(model=str(saved("Roberta", "Model")), device="cpu", max_model_len=129)
    with pytest.raises(ConfigurationError, match="expected 1 to 128"):
        load_worker(config, CacheConfig(), ExecutionConfig(), SchedulerConfig())
