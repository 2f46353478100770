"""Which bytes go where when the heads are split among different numbers of ranks, and what is read is checked."""

from dataclasses import replace

import pytest
import torch

from kvasir_runtime.execution.kv_buffer import layer_caches
from kvasir_runtime.kv_cache.spec import KvLayout, KvSpec, Reach, make_layout, stage_layout
from kvasir_runtime.parallel.stage import WHOLE, Stage
from kvasir_runtime.transfer.checksums import page_checksums
from kvasir_runtime.transfer.connector import CHECKSUM_MODULUS, Page, Side
from kvasir_runtime.transfer.messages import Region
from kvasir_runtime.transfer.page_layout import (
    PageParts,
    Segment,
    TensorPlace,
    bytes_on_all_ranks,
    heads_of,
    segments,
    sources,
    whole_specs,
)

BLOCK_SIZE = 8


def specs(num_heads: int) -> list[KvSpec]:
    """The middle one of three layers is quantised."""
    plain = KvSpec(num_kv_heads=num_heads, key_dim=4, value_dim=4, dtype="float32", itemsize=4)
    return [plain, plain.as_cached("int8_per_token_head"), plain]


def parts_of(place: TensorPlace, num_heads: int) -> PageParts:
    num_copies = max(1, place.size // num_heads)
    own = [replace(spec, num_copies=num_copies) for spec in specs(len(heads_of(place, num_heads)))]
    return PageParts(own, make_layout(own, BLOCK_SIZE), place)


def checksum_of(pages: list[torch.Tensor], num_others: int, num_heads: int, side: Side) -> int:
    """Of one block, all ranks together."""
    sums = [
        page_checksums(page[None], parts_of(TensorPlace(rank, len(pages)), num_heads), [Page(0)], num_others, side)[0]
        for rank, page in enumerate(pages)
    ]
    return sum(sums) % CHECKSUM_MODULUS


def layout_of(num_ranks: int, num_heads: int = 4) -> KvLayout:
    return make_layout(specs(max(1, num_heads // num_ranks)), BLOCK_SIZE)


def filled(place: TensorPlace, num_heads: int) -> torch.Tensor:
    """One page of a rank in which every number tells its layer, tensor, token, head and dimension; codes of
    one byte do so as far as they can."""
    own = heads_of(place, num_heads)
    layout, layers = layout_of(place.size, num_heads), specs(len(own))
    page = torch.zeros((1, layout.page_bytes), dtype=torch.uint8)
    for layer, cache in enumerate(layer_caches(layout, layers, page)):
        scales = () if cache.key_scale is None or cache.value_scale is None else (cache.key_scale, cache.value_scale)
        for number, tensor in enumerate((cache.key, cache.value, *scales)):
            for head_index, head in enumerate(own):
                token = torch.arange(BLOCK_SIZE).view(-1, 1)
                values = 10000 * layer + 5000 * number + 100 * token + 10 * head + torch.arange(4)
                if tensor.dtype == torch.int8:
                    values %= 127
                tensor[0, :, head_index] = values[:, 0] if tensor.dim() == 3 else values
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


@pytest.mark.parametrize("num_heads", [4, 2, 1])
@pytest.mark.parametrize(("num_readers", "num_writers"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 1), (2, 2)])
def test_both_sides_come_to_the_same_checksum_until_a_byte_differs(
    num_readers: int, num_writers: int, num_heads: int
) -> None:
    read, written = (
        [filled(TensorPlace(rank, size), num_heads) for rank in range(size)] for size in (num_readers, num_writers)
    )
    expected = checksum_of(written, num_readers, num_heads, "written")
    assert checksum_of(read, num_writers, num_heads, "read") == expected
    read[-1][-1] ^= 1
    assert checksum_of(read, num_writers, num_heads, "read") != expected


def test_heads_that_changed_places_are_noticed() -> None:
    """Parts add up: their order must count all the same."""
    written = [filled(TensorPlace(rank, 2), 2) for rank in range(2)]
    expected = checksum_of(written, 2, 2, "written")
    assert checksum_of(written[::-1], 2, 2, "read") != expected


def test_a_rank_reads_from_the_ranks_that_have_its_heads() -> None:
    parts = parts_of(TensorPlace(1, 2), 4)
    assert parts.sources(4) == [part.rank for part in parts.to_read(0, 4)] == [2, 3]
    assert parts.sources(2) == [1]
    assert [part.rank for part in parts.to_be_read(0, 1)] == [0]


def of_whole_heads(stage: Stage) -> PageParts:
    return PageParts(specs(1), make_layout(specs(1), BLOCK_SIZE), TensorPlace(0, 1), stage)


STAGES = [of_whole_heads(Stage(index, 2)) for index in (0, 1)]


def test_a_rank_has_to_do_with_the_ranks_of_its_own_stage() -> None:
    regions = [Region(b"", rank, 1, 0) for rank in range(4)]
    assert [[region.base_address for region in parts.of_stage(regions)] for parts in STAGES] == [[0, 1], [2, 3]]
    assert of_whole_heads(WHOLE).of_stage(regions) == regions


def test_nothing_is_read_of_a_group_without_layers_on_the_stage() -> None:
    full = specs(2)[0]
    window = replace(full, reach=Reach.window(8))
    layout = stage_layout([window, full, window], BLOCK_SIZE, [range(2), range(2, 3)], 1)
    parts = PageParts([window], layout, TensorPlace(0, 1), Stage(1, 2))
    assert [group.specs for group in layout.groups] == [(0,), (2,), (1,)]
    assert [[part.rank for part in parts.to_read(group, 2)] for group in range(3)] == [[], [0, 1], []]


def test_pages_of_another_stage_are_noticed() -> None:
    pages = [filled(TensorPlace(0, 1), 1), filled(TensorPlace(0, 1), 1) + 1]

    def of_both(pages: list[torch.Tensor], side: Side) -> int:
        sums = [
            page_checksums(page[None], parts, [Page(0)], 1, side)[0] for page, parts in zip(pages, STAGES, strict=True)
        ]
        return sum(sums) % CHECKSUM_MODULUS

    assert of_both(pages, "read") == of_both(pages, "written")
    assert of_both(pages[::-1], "read") != of_both(pages, "written")


def test_heads_that_are_kept_twice_count_once() -> None:
    own = replace(specs(1)[0], num_copies=2)
    assert whole_specs([own], 4) == [specs(2)[0]]


@pytest.mark.parametrize(("num_ranks", "num_counted"), [(1, 1), (2, 2), (4, 4), (8, 4)])
def test_heads_that_several_ranks_keep_are_counted_once(num_ranks: int, num_counted: int) -> None:
    """Of four heads; a rank's page is an equal part of all heads', or one head's."""
    num_own = len(heads_of(TensorPlace(0, num_ranks), 4))
    own = [replace(spec, num_copies=max(1, num_ranks // 4)) for spec in specs(num_own)]
    page_bytes = make_layout(own, BLOCK_SIZE).page_bytes
    assert bytes_on_all_ranks(page_bytes, own, num_ranks) == num_counted * page_bytes


def test_layers_of_other_numbers_of_heads_are_counted_by_their_bytes() -> None:
    """Two ranks; one layer's only head is kept by both."""
    shared, split = (replace(spec, num_copies=copies) for spec, copies in zip(specs(1)[::2], (2, 1), strict=True))
    assert bytes_on_all_ranks(512, [shared, split], 2) == 512 * 3 // 2
