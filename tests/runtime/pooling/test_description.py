"""Which vector a checkpoint makes, read from its files and from flags."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from kvasir_runtime.config import ModelConfig, PoolerConfig
from kvasir_runtime.errors import ConfigurationError, ModelLoadError
from kvasir_runtime.pooling.description import Classification, Embedding, PoolingDescription, describe_pooling

EMBEDDER = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 32}
CLASSIFIER = {"architectures": ["Qwen3ForSequenceClassification"], "hidden_size": 32}
ENCODER = {"architectures": ["BertModel"], "hidden_size": 32}
PLAIN_MODULES = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
LAST = {"pooling_mode_lasttoken": True}


def write(folder: Path, **files: Any) -> Path:
    """Keys are names of JSON files, with __ for a folder's end."""
    for name, content in files.items():
        file = folder / f"{name.replace('__', '/')}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))
    return folder


def modules(*listed: tuple[str, str]) -> list[dict[str, str]]:
    return [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in listed]


def described(folder: Path, **model: Any) -> PoolingDescription:
    description = describe_pooling(ModelConfig(model=str(folder), **model))
    assert description is not None
    return description


def embedding(folder: Path, **model: Any) -> Embedding:
    task = described(folder, **model).task
    assert isinstance(task, Embedding)
    return task


def classification(folder: Path, **model: Any) -> Classification:
    task = described(folder, **model).task
    assert isinstance(task, Classification)
    return task


@pytest.mark.parametrize(
    ("config", "model", "is_pooling"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {}, False),
        ({"architectures": ["LlamaForCausalLM"]}, {"convert": "embed"}, True),
        (EMBEDDER, {"runner": "pooling"}, True),
        (CLASSIFIER, {}, True),
        (CLASSIFIER, {"runner": "generate"}, False),
        ({"architectures": ["Qwen3Model"], "hidden_size": 8}, {}, True),
        ({"architectures": ["BertForMaskedLM"], "hidden_size": 8}, {}, True),
        ({"architectures": ["GPT2LMHeadModel"]}, {}, False),
        ({}, {}, False),
    ],
)
def test_the_architecture_or_a_flag_says_whether_it_makes_vectors(
    config: Any, model: Any, is_pooling: bool, tmp_path: Path
) -> None:
    write(tmp_path, config=EMBEDDER | config)
    if not config:
        write(tmp_path, config={})
    assert (describe_pooling(ModelConfig(model=str(tmp_path), **model)) is not None) is is_pooling


def test_modules_say_what_follows_the_model(tmp_path: Path) -> None:
    write(tmp_path, config=EMBEDDER, modules=modules(*PLAIN_MODULES), **{"1_Pooling__config": LAST})
    assert described(tmp_path).pooling_type == "last"
    assert embedding(tmp_path) == Embedding(normalizes=True, dense=(), size=32, shorter_sizes=None)


@pytest.mark.parametrize(
    ("config", "pooling_type"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 32}, "mean"),
        (LAST | {"include_prompt": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_pooling_is_read_in_the_librarys_old_form_and_its_new_one(
    config: Any, pooling_type: str, tmp_path: Path
) -> None:
    write(tmp_path, config=EMBEDDER, modules=modules(*PLAIN_MODULES[:2]), **{"1_Pooling__config": config})
    assert described(tmp_path).pooling_type == pooling_type
    assert not embedding(tmp_path).normalizes


def test_flags_come_before_files(tmp_path: Path) -> None:
    write(tmp_path, config=EMBEDDER, modules=modules(*PLAIN_MODULES), **{"1_Pooling__config": LAST})
    pooler = PoolerConfig(pooling_type="MEAN", use_activation=False)
    assert described(tmp_path, pooler_config=pooler).pooling_type == "mean"
    assert not embedding(tmp_path, pooler_config=pooler).normalizes
    assert embedding(tmp_path, hf_overrides={"is_matryoshka": True}).shorter_sizes == ()
    assert embedding(tmp_path, hf_overrides={"matryoshka_dimensions": [8, 16]}).shorter_sizes == (8, 16)


@pytest.mark.parametrize(("config", "pooling_type"), [(EMBEDDER, "last"), (ENCODER, "cls")])
def test_where_nothing_says_it_the_family_decides(config: Any, pooling_type: str, tmp_path: Path) -> None:
    description = described(write(tmp_path, config=config), runner="pooling")
    assert (description.pooling_type, description.is_encoder) == (pooling_type, config is ENCODER)
    assert description.needs_whole_prompt is (config is ENCODER)


@pytest.mark.parametrize("key", [{"use_bidirectional_attention": True}, {"is_causal": False}])
def test_a_decoder_whose_tokens_see_ahead_is_an_encoder(key: dict[str, bool], tmp_path: Path) -> None:
    write(tmp_path, config={"architectures": ["Gemma3TextModel"], "hidden_size": 32} | key)
    assert described(tmp_path).is_encoder


def test_prompts_and_lengths_are_the_librarys(tmp_path: Path) -> None:
    settings = {"prompts": {"query": "q: "}, "default_prompt_name": "query"}
    write(
        tmp_path, config=ENCODER, config_sentence_transformers=settings,
        sentence_bert_config={"max_seq_length": 128, "do_lower_case": True},
    )  # fmt: skip
    inputs = described(tmp_path).inputs
    assert (inputs.prompts, inputs.default_prompt) == ({"query": "q: "}, "query")
    assert (inputs.max_tokens, inputs.lowercases) == (128, True)


@pytest.mark.parametrize(
    ("length", "is_listed", "read"),
    [(16, True, 16), (16, False, None), (10**30, True, None), (1e30, True, None), ("16", True, None)],
)
def test_a_length_may_be_the_tokenizers(length: Any, is_listed: bool, read: int | None, tmp_path: Path) -> None:
    files = {"modules": [{"type": "sentence_transformers.models.Transformer", "path": ""}]} if is_listed else {}
    write(tmp_path, config=ENCODER, tokenizer_config={"model_max_length": length}, **files)
    assert described(tmp_path).inputs.max_tokens == read


@pytest.mark.parametrize(
    ("config", "labels", "activation"),
    [
        ({"num_labels": 1}, ("LABEL_0",), "sigmoid"),
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"id2label": {"10": "k", "0": "a", "2": "c"}}, ("a", "c", "k"), "softmax"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1", "LABEL_2"), "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, ("LABEL_0",), "identity"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
         ("LABEL_0",), "identity"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
         ("LABEL_0",), "sigmoid"),
    ],
)  # fmt: skip
def test_a_classifiers_labels_and_activation(config: Any, labels: Any, activation: str, tmp_path: Path) -> None:
    task = classification(write(tmp_path, config=CLASSIFIER | config))
    assert (task.labels, task.activation, task.token_ids) == (labels, activation, None)


def test_yes_and_no_are_looked_up_in_the_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, config=EMBEDDER)
    Tokenizer(models.WordLevel({"no": 3, "yes": 5, "false": 7, "true": 9}, "no")).save(str(tmp_path / "tokenizer.json"))
    assert classification(tmp_path, convert="classify").token_ids == (3, 5)
    others = {"classifier_from_token": ["false", "true"], "architectures": ["Qwen3ForSequenceClassification"]}
    assert classification(tmp_path, hf_overrides=others).token_ids == (7, 9)
    with pytest.raises(ConfigurationError, match=r"'maybe', which .* does not have"):
        described(tmp_path, convert="classify", hf_overrides={"classifier_from_token": ["no", "maybe"]})


@pytest.mark.parametrize("kind", ["LogitScore", "CausalScoreHead"])
def test_or_named_by_the_library(kind: str, tmp_path: Path) -> None:
    listed = modules(("", "Transformer"), ("1_LogitScore", kind))
    scores = {"true_token_id": 9, "false_token_id": 4}
    write(tmp_path, config=EMBEDDER, modules=listed, **{"1_LogitScore__config": scores})
    assert classification(tmp_path).token_ids == (4, 9)


DENSE = {"in_features": 32, "out_features": 8, "activation_function": "torch.nn.modules.activation.Tanh"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules": {}}, "modules.json holds {}, expected a list"),
        ({"modules": modules(("0_Transformer", "Transformer"))}, "the model lies in the folder '0_Transformer'"),
        ({"modules": modules(("", "Transformer"), ("1", "WordWeights"))}, "module 'WordWeights' is not computed here"),
        ({"1_Pooling__config": {"pooling_mode_max_tokens": True}}, "pooling is pooling_mode_max_tokens; one of"),
        ({"1_Pooling__config": LAST | {"pooling_mode_cls_token": True}}, "pooling is pooling_mode_lasttoken, pooling"),
        ({"1_Pooling__config": {}}, "pooling is none"),
        ({"1_Pooling__config": LAST | {"include_prompt": False}}, "include_prompt is false"),
        ({"modules": modules(("2_Dense", "Dense")), "2_Dense__config": DENSE | {"out_features": "8"}},
         "expected whole numbers"),
        ({"modules": modules(("2_Dense", "Dense")), "2_Dense__config": DENSE | {"activation_function": "torch.nn.Own"}},
         "activation 'Own' is not computed here"),
        ({"config_sentence_transformers": {"prompts": ["x"]}}, "expected texts by name"),
        ({"config_sentence_transformers": {"default_prompt_name": "x"}}, "'default_prompt_name' is 'x', which is none"),
        ({"sentence_bert_config": {"max_seq_length": -1}}, "'max_seq_length' is -1"),
        ({"config": EMBEDDER | {"hidden_size": "32"}}, "'hidden_size' is '32'"),
        ({"config": EMBEDDER | {"matryoshka_dimensions": 8}}, "'matryoshka_dimensions' is 8"),
        ({"config": CLASSIFIER | {"num_labels": 0}}, "'num_labels' is 0"),
        ({"config": CLASSIFIER | {"classifier_from_token": ["yes"]}}, "expected a list of two tokens"),
        ({"config": CLASSIFIER | {"sbert_ce_default_activation_function": "torch.Own"}}, "expected one of Sigmoid"),
    ],
)  # fmt: skip
def test_what_is_not_computed_here_is_refused_by_name(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    plain = {"config": EMBEDDER, "modules": modules(*PLAIN_MODULES), "1_Pooling__config": LAST}
    write(tmp_path, **(plain | files))
    with pytest.raises(ModelLoadError, match=message):
        described(tmp_path)
