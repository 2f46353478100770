"""Which bytes go where when the heads are split among different numbers of ranks."""

import pytest
import torch

from kvasir_runtime.execution.kv_buffer import layer_caches
from kvasir_runtime.kv_cache.spec import KvLayout, KvSpec, make_layout
from kvasir_runtime.transfer.page_layout import Segment, TensorPlace, heads_of, segments, sources

BLOCK_SIZE = 8


def specs(num_heads: int) -> list[KvSpec]:
    shape = {"head_dim": 4, "dtype": "float32", "itemsize": 4}
    return [KvSpec(kind="full", num_kv_heads=num_heads, **shape) for _ in range(3)]


def layout_of(num_ranks: int, num_heads: int = 4) -> KvLayout:
    return make_layout(specs(max(1, num_heads // num_ranks)), BLOCK_SIZE)


def filled(place: TensorPlace, num_heads: int) -> torch.Tensor:
    """One page of a rank in which every number tells its layer, tensor, token, head and dimension."""
    own = heads_of(place, num_heads)
    layout, layers = layout_of(place.size, num_heads), specs(len(own))
    page = torch.zeros((1, layout.page_bytes), dtype=torch.uint8)
    for layer, cache in enumerate(layer_caches(layout, layers, page)):
        for number, tensor in enumerate((cache.key, cache.value)):
            for head_index, head in enumerate(own):
                token = torch.arange(BLOCK_SIZE).view(-1, 1)
                values = 10000 * layer + 5000 * number + 100 * token + 10 * head + torch.arange(4)
                tensor[0, :, head_index] = values.float()
    return page[0]


@pytest.mark.parametrize("num_heads", [4, 2, 1])
@pytest.mark.parametrize(("num_ours", "num_theirs"), [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1), (2, 2)])
def test_a_page_is_put_together_from_the_other_sides_ranks(num_ours: int, num_theirs: int, num_heads: int) -> None:
    layouts = layout_of(num_ours, num_heads), layout_of(num_theirs, num_heads)
    for rank in range(num_ours):
        ours = TensorPlace(rank, num_ours)
        page = torch.zeros(layouts[0].page_bytes, dtype=torch.uint8)
        for theirs in (TensorPlace(other, num_theirs) for other in sources(ours, num_theirs, num_heads)):
            source = filled(theirs, num_heads)
            for part in segments(specs(num_heads), layouts, 0, (ours, theirs)):
                page[part.ours : part.ours + part.num_bytes] = source[part.theirs : part.theirs + part.num_bytes]
        assert torch.equal(page, filled(ours, num_heads))


def test_equal_sizes_take_the_page_in_one_piece() -> None:
    layouts = layout_of(2), layout_of(2)
    whole = [Segment(0, 0, layouts[0].page_bytes)]
    assert segments(specs(4), layouts, 0, (TensorPlace(1, 2), TensorPlace(1, 2))) == whole


def test_heads_that_several_ranks_keep_are_read_once() -> None:
    assert sources(TensorPlace(0, 1), 4, 2) == [0, 2]
    layouts = layout_of(1, 2), layout_of(4, 2)
    assert segments(specs(2), layouts, 0, (TensorPlace(0, 1), TensorPlace(1, 4))) == []


def test_a_rank_of_more_takes_only_its_own_heads() -> None:
    assert sources(TensorPlace(3, 4), 2, 4) == [1]
    assert sources(TensorPlace(0, 4), 2, 4) == [0]
