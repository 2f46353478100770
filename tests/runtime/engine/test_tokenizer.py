"""The tokenizer of a checkpoint's folder, without transformers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import kvasir_runtime
from kvasir_runtime.engine.detokenizer import Detokenizer, TextOptions
from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import ModelLoadError


def backend() -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Backend(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def save(folder: Path, settings: dict[str, object], tokenizer: Backend | None = None) -> Path:
    (tokenizer or backend()).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_settings_overrule_which_special_tokens_are_added(tmp_path: Path) -> None:
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
    tokenizer = Tokenizer.load(save(tmp_path, settings))
    assert tokenizer.encode("a", add_special_tokens=True) == [256, *tokenizer.encode("a", add_special_tokens=False)]
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.eos_token_id == 257


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        ({}, [256, 64, 257]),
        ({"add_eos_token": False}, [256, 64]),
        ({"add_eos_token": True}, [256, 64, 257]),
        ({"add_bos_token": False}, [64, 257]),
        ({"add_bos_token": None, "add_eos_token": None}, [256, 64, 257]),
        ({"add_bos_token": True, "add_eos_token": False}, [256, 64]),
    ],
)
def test_a_setting_that_is_not_given_leaves_what_tokenizer_json_adds(tmp_path: Path, settings: dict, ids: list) -> None:
    adding = backend()
    adding.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)])
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer.load(save(tmp_path, named | settings, adding))
    assert tokenizer.encode("a", add_special_tokens=True) == ids


def plain(text: str, **flags: bool | str) -> dict[str, Any]:
    return {"content": text, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, **flags}


CONFIG, OLDER = "tokenizer_config.json", "special_tokens_map.json"
MARKS = ("<|start|>", "<|end|>")
"""In tokenizer.json, but not as special ones."""


@pytest.mark.parametrize(
    ("files", "num_tokens", "text"),
    [
        ({}, 10, "a<|start|>b<|end|>c<|x|>"),
        ({CONFIG: {"eos_token": "<|end|>"}}, 10, "a<|start|>bc<|x|>"),
        ({CONFIG: {"eos_token": plain("<|end|>", __type="AddedToken")}}, 10, "a<|start|>bc<|x|>"),
        ({CONFIG: {"extra_special_tokens": ["<|start|>"]}}, 10, "ab<|end|>c<|x|>"),
        ({CONFIG: {"extra_special_tokens": {"image": "<|start|>"}}}, 10, "ab<|end|>c<|x|>"),
        ({CONFIG: {"additional_special_tokens": [plain("<|start|>", __type="AddedToken")]}}, 10, "ab<|end|>c<|x|>"),
        ({CONFIG: {"added_tokens_decoder": {"258": plain("<|start|>", special=True)}}}, 10, "ab<|end|>c<|x|>"),
        ({CONFIG: {"added_tokens_decoder": {"260": plain("<|x|>", special=True)}}}, 6, "a<|start|>b<|end|>c"),
        ({"added_tokens.json": {"<|x|>": 260}}, 6, "a<|start|>b<|end|>c<|x|>"),
        ({"added_tokens.json": {"<|x|>": 260}, OLDER: {"eos_token": "<|x|>"}}, 6, "a<|start|>b<|end|>c"),
        ({CONFIG: {"eos_token": "<|start|>"}, OLDER: {"eos_token": plain("<|end|>")}}, 10, "a<|start|>bc<|x|>"),
        ({OLDER: {"additional_special_tokens": ["<|x|>"], "bos_token": "<s>"}}, 6, "a<|start|>b<|end|>c"),
        ({CONFIG: {"added_tokens_decoder": {}}, OLDER: {"eos_token": "<|end|>"}}, 10, "a<|start|>b<|end|>c<|x|>"),
    ],
)
def test_tokens_are_read_where_transformers_reads_them(tmp_path: Path, files: dict, num_tokens: int, text: str) -> None:
    given = backend()
    given.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    save(tmp_path, {}, given)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer, reference = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    token_ids = tokenizer.encode("a<|start|>b<|end|>c<|x|>", add_special_tokens=True)
    assert (token_ids, len(token_ids)) == (reference.encode("a<|start|>b<|end|>c<|x|>"), num_tokens)
    assert tokenizer.special_tokens == reference.special_tokens_map
    assert Detokenizer(tokenizer, TextOptions()).feed(token_ids).text == text


@pytest.mark.parametrize(
    "settings",
    [
        {"added_tokens_decoder": {"a": plain("<x>")}},
        {"added_tokens_decoder": ["<x>"]},
        {"added_tokens_decoder": {"300": 7}},
        {"extra_special_tokens": "<x>"},
        {"additional_special_tokens": [7]},
        {"bos_token": "\ud800"},
        {"bos_token": "<s>", "add_bos_token": "false"},
        {"eos_token": "</s>", "add_eos_token": 7},
    ],
)
def test_settings_that_name_no_tokens_are_refused(tmp_path: Path, settings: dict) -> None:
    with pytest.raises(ModelLoadError, match="tokenizer"):
        Tokenizer.load(save(tmp_path, settings))


def test_a_sentencepiece_model_alone_becomes_the_tokenizer_that_transformers_makes(tmp_path: Path) -> None:
    text = "größer, the quick brown fox"
    (tmp_path / "text.txt").write_text("\n".join([text] * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=300, minloglevel=2,
        model_type="bpe", byte_fallback=True,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer, reference = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for each in (text, "  日本 fox\n"):
        token_ids = tokenizer.encode(each, add_special_tokens=True)
        assert token_ids == reference.encode(each)
        assert tokenizer.decode(token_ids) == reference.decode(token_ids)
    assert (tokenizer.eos_token_id, tokenizer.special_tokens["bos_token"]) == (reference.eos_token_id, "<s>")


@pytest.mark.parametrize("text", ["<a b>", "<s>:0", "$A"])
def test_a_token_that_is_added_may_be_spelled_like_anything(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, {"bos_token": text, "add_bos_token": True}))
    assert [tokenizer.token(each) for each in tokenizer.encode("a", add_special_tokens=True)] == [text, "a"]


def test_a_token_without_a_text_is_not_added(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, {"bos_token": "", "add_bos_token": True}))
    assert tokenizer.encode("a", add_special_tokens=True) == [64]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
def test_a_link_to_a_file_that_is_gone_is_no_file_that_was_never_there(tmp_path: Path, name: str) -> None:
    backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).symlink_to("blobs/gone")
    with pytest.raises(ModelLoadError, match=rf"{name} is a link to blobs/gone, which is not there"):
        Tokenizer.load(tmp_path)


def test_truncation_and_padding_stored_with_the_tokenizer_are_off(tmp_path: Path) -> None:
    cut = backend()
    cut.enable_truncation(4)
    cut.enable_padding(length=16)
    tokenizer = Tokenizer.load(save(tmp_path, {}, cut))
    assert len(tokenizer.encode("a" * 100, add_special_tokens=True)) == 100
    assert len(tokenizer.encode("a", add_special_tokens=True)) == 1


def test_bytes_of_tokens_are_those_of_the_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, {}))
    token_ids = tokenizer.encode("é\n😀", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids) == "é\n😀".encode()


def test_bound_on_characters_per_token_holds(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, {}))
    text = "größer 日本語 </s>" * 10
    assert tokenizer.max_chars_per_token is not None
    assert len(text) <= len(tokenizer.encode(text, add_special_tokens=False)) * tokenizer.max_chars_per_token


def test_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="holds no tokenizer"):
        Tokenizer.load(tmp_path)


def test_broken_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is no tokenizer"):
        Tokenizer.load(tmp_path)


def test_api_process_imports_neither_torch_nor_transformers() -> None:
    program = "import sys, kvasir_runtime.server.launch; print({'torch', 'transformers'} & sys.modules.keys())"
    environment = {"PYTHONPATH": str(Path(kvasir_runtime.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout == "set()\n", done.stderr
