"""A rank takes its shards and reads no others."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvasir_runtime.errors import CheckpointError
from kvasir_runtime.models.checkpoint import Checkpoint, Shard

WEIGHT = torch.arange(48.0).view(8, 6)
LARGE = (4096, 1024)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    save_file({"weight": WEIGHT, "scalar": torch.tensor(3)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as opened:
        yield opened


def test_a_shard_is_the_ranks_equal_part_of_a_dimension(checkpoint: Checkpoint) -> None:
    assert torch.equal(checkpoint.take("weight", (8, 6), Shard(0, 3, 4)), WEIGHT[6:8])
    assert torch.equal(checkpoint.take("weight", (8, 6), Shard(1, 0, 2)), WEIGHT[:, :3])
    assert torch.equal(checkpoint.take("weight", (8, 6)), WEIGHT)


def test_a_shard_of_some_rows_divides_those_rows(checkpoint: Checkpoint) -> None:
    assert torch.equal(checkpoint.take("weight", (8, 6), Shard(0, 1, 2), rows=range(4, 8)), WEIGHT[6:8])
    assert torch.equal(checkpoint.take("weight", (8, 6), Shard(1, 1, 2), rows=range(4, 8)), WEIGHT[4:8, 3:])


def test_a_dimension_that_does_not_divide_is_refused_by_name(checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match=r"'weight' cannot be sharded: dimension 1 of size 6 does not divide.* 4"):
        checkpoint.take("weight", (8, 6), Shard(1, 0, 4))


def test_a_scalar_of_any_type_is_taken_as_it_is(checkpoint: Checkpoint) -> None:
    taken = checkpoint.take("scalar", ())
    assert taken.dtype is torch.int64
    assert taken.item() == 3


def test_only_the_shards_pages_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(LARGE)}, path)
    with Checkpoint(tmp_path) as checkpoint:
        mine = checkpoint.take("weight", LARGE, Shard(0, 1, 16))
        before = mapped_bytes_in_memory(path)
        assert mine.clone().sum() == LARGE[0] * LARGE[1] / 16
        assert before < mapped_bytes_in_memory(path) < path.stat().st_size / 4


def mapped_bytes_in_memory(path: Path) -> int:
    """Of this process's mappings of the file, as the kernel counts them."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            is_ours = words[-1] == str(path)
        elif is_ours and words[0] == "Rss:":
            total += int(words[1]) * 1024
    return total
