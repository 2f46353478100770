"""The tokenizer of a checkpoint's folder, without transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import kvasir_runtime
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
