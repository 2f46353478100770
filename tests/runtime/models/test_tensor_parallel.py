"""Each rank reads and keeps its part of a model, and the parts make up the whole."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.kernels.ops import reference_ops
from kvasir_runtime.models.checkpoint import Checkpoint, Shard
from kvasir_runtime.models.decoder import Decoder, Embedding, VocabularyPart
from kvasir_runtime.models.dense_layer import GroupedQueryAttention
from kvasir_runtime.models.families import read_options
from kvasir_runtime.models.hf_config import read_config
from kvasir_runtime.models.loader import load_decoder
from kvasir_runtime.models.options import GroupedQueryOptions
from kvasir_runtime.models.placement import Placement
from kvasir_runtime.models.tensor_parallel import kv_shard, own_heads
from kvasir_runtime.parallel.collectives import SingleRank

Write = Callable[..., Path]
Tensors = dict[str, Tensor]


class Rank(SingleRank):
    """One end of a group whose others are not there: what it hands in comes back."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank = rank
        self.size = size


class CountingCheckpoint(Checkpoint):
    """Counts the bytes that were taken of each tensor."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.num_bytes: Counter[str] = Counter()

    def take(self, name: str, shape: tuple[int, ...], shard: Shard | None = None, rows: range | None = None) -> Tensor:
        tensor = super().take(name, shape, shard, rows)
        self.num_bytes[name] += tensor.nbytes
        return tensor


def load(folder: Path, rank: int, size: int) -> tuple[Decoder, Counter[str]]:
    placement = Placement(device=torch.device("cpu"), dtype=torch.float32, ops=reference_ops(), tensor=Rank(rank, size))
    with CountingCheckpoint(folder) as checkpoint:
        return load_decoder(checkpoint, read_options(read_config(folder)), placement, 16), checkpoint.num_bytes


def test_a_rank_reads_its_slices_only(tensors: Tensors, write_checkpoint: Write) -> None:
    _, num_bytes = load(write_checkpoint(tensors), rank=1, size=2)
    read = {name: num_bytes[name] / tensor.nbytes for name, tensor in tensors.items()}
    assert read == {name: 1 if "norm" in name else 0.5 for name in tensors}


def test_ranks_that_share_a_kv_head_read_it_all_and_keep_it_once(tensors: Tensors, write_checkpoint: Write) -> None:
    folder = write_checkpoint(tensors)
    decoders = [load(folder, rank, 4)[0] for rank in range(4)]
    attentions = [decoder.layers[0].attention for decoder in decoders]
    keys = []
    for attention in attentions:
        assert isinstance(attention, GroupedQueryAttention)
        assert (attention.options.num_heads, attention.options.num_kv_heads) == (1, 1)
        keys.append(attention.qkv(torch.eye(32))[:, 8:16])
    whole = tensors["model.layers.0.self_attn.k_proj.weight"].T
    for rank, key in enumerate(keys):
        torch.testing.assert_close(key, whole[:, rank // 2 * 8 : rank // 2 * 8 + 8])
    assert [spec.num_kv_heads for spec in decoders[0].kv_specs(torch.float32)] == [1, 1]


def attention_options(tensors: Tensors, write_checkpoint: Write, **changes: int) -> GroupedQueryOptions:
    options = read_options(read_config(write_checkpoint(tensors))).layers[0].attention
    return replace(options, **changes)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "message"),
    [
        (4, 2, 3, r"--tensor-parallel-size is 3, but the model has 4 attention heads"),
        (12, 4, 6, r"--tensor-parallel-size is 6, but the model has 4 KV heads"),
    ],
)
def test_heads_that_do_not_share_out_are_refused(
    num_heads: int, num_kv_heads: int, size: int, message: str, tensors: Tensors, write_checkpoint: Write
) -> None:
    options = attention_options(tensors, write_checkpoint, num_heads=num_heads, num_kv_heads=num_kv_heads)
    with pytest.raises(ConfigurationError, match=message):
        own_heads(options, Rank(0, size))


def test_inner_features_that_do_not_share_out_are_refused(tensors: Tensors, write_checkpoint: Write) -> None:
    with pytest.raises(ConfigurationError, match="45 inner features of its MLP"):
        load(write_checkpoint(tensors, intermediate_size=45), 0, 2)


def test_as_many_ranks_as_kv_heads_keep_one_each(tensors: Tensors, write_checkpoint: Write) -> None:
    options = attention_options(tensors, write_checkpoint)
    assert kv_shard(options, Rank(1, 2)) == Shard(0, 1, 2)
    assert kv_shard(options, Rank(0, 1)) is None


class Pieces(Rank):
    """Adds up and joins what other ranks handed in before."""

    def __init__(self, rank: int, size: int, others: list[Tensor]) -> None:
        super().__init__(rank, size)
        self._others = others

    def all_reduce(self, x: Tensor) -> Tensor:
        return x + sum(self._others)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([*self._others, x], dim)


def test_a_vocabulary_that_does_not_divide_leaves_the_last_rank_fewer() -> None:
    parts = [VocabularyPart(Rank(rank, 3), 7) for rank in range(3)]
    assert [part.token_ids for part in parts] == [range(3), range(3, 6), range(6, 7)]
    table, token_ids = torch.arange(14.0).view(7, 2), torch.tensor([6, 0, 3, 5])
    rows = [Embedding(table[p.token_ids.start : p.token_ids.stop], None, p)(token_ids) for p in parts[:2]]
    last = VocabularyPart(Pieces(2, 3, rows), 7)
    assert torch.equal(Embedding(table[6:], None, last)(token_ids), table[token_ids])
    logits = torch.arange(14.0).view(2, 7)
    joined = VocabularyPart(Pieces(2, 3, [logits[:, :3], logits[:, 3:6]]), 7).join(logits[:, 6:])
    assert torch.equal(joined, logits)
