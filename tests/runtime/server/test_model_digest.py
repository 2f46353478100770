"""Replicas of one model agree, other models differ."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvasir_runtime.errors import ModelLoadError
from kvasir_runtime.server.model_digest import model_digest


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    return folder


def change_weights(folder: Path) -> None:
    """As training does: nearly everywhere."""
    (folder / "model.safetensors").write_bytes(bytes(reversed(range(256))) * 4096)


def append_weights(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")


CHANGES: list[Callable[[Path], object]] = [
    change_weights,
    append_weights,
    lambda folder: (folder / "config.json").write_text('{"a": 1}'),
    lambda folder: (folder / "tokenizer.json").write_text('{"a": 1}'),
    lambda folder: (folder / "tokenizer.json").unlink(),
    lambda folder: (folder / "added_tokens.json").write_text('{"<x>": 1}'),
]


def test_copies_agree(tmp_path: Path) -> None:
    one, two = (checkpoint(tmp_path / name) for name in ("one", "two"))
    assert model_digest(one, one) == model_digest(two, two)


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_differs(tmp_path: Path, change: Callable[[Path], object]) -> None:
    one, two = (checkpoint(tmp_path / name) for name in ("one", "two"))
    change(two)
    assert model_digest(one, one) != model_digest(two, two)


def test_what_only_decides_how_prompts_are_written_may_change(tmp_path: Path) -> None:
    one = checkpoint(tmp_path / "one")
    before = model_digest(one, one)
    (one / "chat_template.jinja").write_text("new")
    assert model_digest(one, one) == before


def test_weights_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: Is a directory"):
        model_digest(tmp_path, tmp_path)
