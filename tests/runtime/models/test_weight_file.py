"""Pickled state dicts, which only draft heads may be: read as safetensors are, and nothing of them is run."""

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from kvasir_runtime.errors import CheckpointError
from kvasir_runtime.models.checkpoint import SAFETENSORS, Checkpoint, Shard

WEIGHT = torch.arange(48.0).view(8, 6)
FILES = (SAFETENSORS, "pytorch_model.bin")


def opened(folder: Path) -> Checkpoint:
    return Checkpoint(folder, FILES)


def test_tensors_are_taken_whole_and_in_parts(tmp_path: Path) -> None:
    state = OrderedDict(weight=nn.Parameter(WEIGHT), half=WEIGHT.half(), scalar=torch.tensor(3))
    torch.save(state, tmp_path / "pytorch_model.bin")
    with opened(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.take("weight", (8, 6), Shard(1, 0, 2), rows=range(4, 8)), WEIGHT[4:8, :3])
        assert not checkpoint.take("weight", (8, 6)).requires_grad
        assert checkpoint.take("scalar", ()).item() == 3
        assert checkpoint.shape("half") == (8, 6)
        with pytest.raises(CheckpointError, match="unexpected tensors half"):
            checkpoint.check_all_taken(ignored=())


def test_a_tensor_is_mapped_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"weight": torch.ones(4096, 256)}, path)
    with opened(tmp_path) as checkpoint:
        taken = checkpoint.take("weight", (4096, 256))
        assert str(path) in Path("/proc/self/maps").read_text()
        assert taken.sum() == taken.numel()


def test_safetensors_come_first(tmp_path: Path) -> None:
    torch.save({"weight": WEIGHT}, tmp_path / "pytorch_model.bin")
    save_file({"weight": WEIGHT + 1}, tmp_path / SAFETENSORS)
    with opened(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.take("weight", (8, 6)), WEIGHT + 1)


def test_a_model_may_be_no_pickle(tmp_path: Path) -> None:
    torch.save({"weight": WEIGHT}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only safetensors checkpoints are served"), Checkpoint(tmp_path):
        pass
    (tmp_path / f"{SAFETENSORS}.index.json").write_text('{"weight_map": {"weight": "pytorch_model.bin"}}')
    with pytest.raises(CheckpointError, match=r"names pytorch_model\.bin, expected safetensors"), Checkpoint(tmp_path):
        pass


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"weight": 1}}', "\xff"])
def test_an_index_that_names_no_files_is_refused(index: str, tmp_path: Path) -> None:
    (tmp_path / f"{SAFETENSORS}.index.json").write_text(index, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"index\.json is no index of safetensors files"), Checkpoint(tmp_path):
        pass


class Command:
    """Touches `marker` as it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self._marker}",)


def test_a_pickle_that_runs_a_command_is_refused_by_what_it_would_call(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    torch.save({"weight": WEIGHT, "command": Command(marker)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not loaded.*\(posix\.system\)"), opened(tmp_path):
        pass
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([WEIGHT], "holds a list, expected a state dict"),
        ({"weight": WEIGHT, "epoch": 3}, "holds a int under 'epoch', expected dense tensors"),
        ({0: WEIGHT}, "holds a Tensor under 0, expected dense tensors by name"),
        ({"outer": {"weight": WEIGHT}}, "holds a dict under 'outer'"),
    ],
)
def test_what_is_no_state_dict_is_refused(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message), opened(tmp_path):
        pass


@pytest.mark.parametrize("damage", ["empty", "half", "text"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"weight": WEIGHT}, path)
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "half": whole[: len(whole) // 2], "text": b"version https://git-lfs\n"}[damage])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not a readable file of torch\.save"):
        opened(tmp_path).__enter__()


def test_a_folder_without_any_of_them_says_what_is_expected(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"none of model\.safetensors, .*index\.json, pytorch_model\.bin"),
        opened(tmp_path),
    ):
        pass
