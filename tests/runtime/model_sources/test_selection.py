"""Which files of a repository are downloaded."""

import pytest

from kvasir_runtime.errors import ModelNotFoundError
from kvasir_runtime.model_sources.selection import serving_files
from kvasir_runtime.model_sources.source import RemoteFile
from kvasir_runtime.speculative.eagle_heads import EAGLE_FILES
from kvasir_runtime.speculative.medusa import MEDUSA_FILES

SERVED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/tools.jinja",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "modules.json",
    "1_Pooling/config.json",
    "2_Dense/model.safetensors",
)
LEFT = (
    "README.md",
    ".gitattributes",
    "pytorch_model.bin",
    "medusa_lm_head.pt",
    "consolidated.safetensors",
    "consolidated.safetensors.index.json",
    "original/params.json",
    "original/model.safetensors",
    "onnx/model.onnx",
    "2_Dense/pytorch_model.bin",
    "checkpoints/1_Pooling/config.json",
    "../config.json",
    "figure.png",
    "modeling_own.py",
)


def files(*paths: str) -> list[RemoteFile]:
    return [RemoteFile(path, 1000 - len(path), "v", None) for path in paths]


@pytest.mark.parametrize("path", SERVED)
def test_takes(path: str) -> None:
    chosen = serving_files(files("config.json", "model.safetensors", path), "hf://a/b")
    assert path in [file.path for file in chosen]


@pytest.mark.parametrize("path", LEFT)
def test_leaves(path: str) -> None:
    chosen = serving_files(files("config.json", "model.safetensors", path), "hf://a/b")
    assert path not in [file.path for file in chosen]


def test_layers_behind_a_model_are_no_model() -> None:
    with pytest.raises(ModelNotFoundError, match=r"no \*\.safetensors"):
        serving_files(
            files("config.json", "tokenizer.json", "pytorch_model.bin", "2_Dense/model.safetensors"), "hf://a/b"
        )


def test_begins_with_the_smallest() -> None:
    chosen = serving_files(files("config.json", "model.safetensors"), "hf://a/b")
    assert [file.path for file in chosen] == ["model.safetensors", "config.json"]


@pytest.mark.parametrize("name", sorted({*EAGLE_FILES, *MEDUSA_FILES}))
def test_takes_every_file_that_a_draft_head_is_loaded_from(name: str) -> None:
    chosen = serving_files(files("config.json", "README.md", name), "hf://a/b")
    assert {file.path for file in chosen} == {"config.json", name}


def test_a_medusa_head_may_have_its_targets_tokenizer_beside_it() -> None:
    names = {"config.json", "medusa_lm_head.pt", "tokenizer.json"}
    assert {file.path for file in serving_files(files(*names, "pytorch_model.bin"), "hf://a/b")} == names


@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "model-00001-of-00002.safetensors"])
def test_safetensors_of_any_name_stand_for_a_pickle(name: str) -> None:
    chosen = serving_files(files("config.json", "pytorch_model.bin", "medusa_lm_head.pt", name), "hf://a/b")
    assert {file.path for file in chosen} == {"config.json", name}


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("model.safetensors",), "has no config.json among its 1 files"),
        (
            ("config.json", "model.gguf"),
            r"has no \*\.safetensors among its 2 files \(model\.gguf, config\.json, \.\.\.\)",
        ),
        (("config.json", "pytorch_model-00001-of-00002.bin"), r"has no \*\.safetensors among"),
        (("config.json", "checkpoint/pytorch_model.bin"), r"has no \*\.safetensors among"),
        (("config.json", "pytorch_model.bin", "tokenizer.model"), r"heads as .*pytorch_model\.bin without a tokenizer"),
        (("pytorch_model.bin",), r"has no config\.json among"),
        ((), r"no config\.json and no \*\.safetensors among its 0 files:"),
    ],
)
def test_refuses_what_cannot_be_served(paths: tuple[str, ...], message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message):
        serving_files(files(*paths), "hf://a/b")
