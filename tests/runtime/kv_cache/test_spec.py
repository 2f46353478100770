"""KV groups and the places of layers in their pages."""

import itertools
from dataclasses import replace

import pytest

from kvasir_runtime.kv_cache.spec import (
    ALIGNMENT_BYTES,
    FULL,
    MAX_PADDING,
    KvGroup,
    KvLayout,
    KvSpec,
    Reach,
    make_layout,
    resized_layout,
    stage_layout,
)

BLOCK_SIZE = 16


def spec(*, window: int | None = None, num_kv_heads: int = 2, head_dim: int = 8, itemsize: int = 2) -> KvSpec:
    reach = FULL if window is None else Reach.window(window)
    return KvSpec(
        num_kv_heads=num_kv_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        dtype="bfloat16",
        itemsize=itemsize,
        reach=reach,
    )


LAYER_BYTES = 2 * 2 * 8 * 2 * BLOCK_SIZE
GEMMA_3 = [spec(window=None if layer % 6 == 5 else 512) for layer in range(26)]
"""Every sixth layer sees everything: 4 of 26."""
LAYOUTS = {
    "one reach": [spec()] * 5,
    "gemma 3": GEMMA_3,
    "gemma 2": [spec(window=4096 if layer % 2 == 0 else None) for layer in range(26)],
    "a draft layer of another size": [*[spec()] * 4, spec(num_kv_heads=1)],
    "windows and a draft layer of another size": [*GEMMA_3, spec(num_kv_heads=1, head_dim=24)],
    "three reaches": [spec(window=window) for window in (None, 64, 128, None, 64, 128, 64)],
    "larger window layers": [spec(window=64, num_kv_heads=8), spec(), spec(), spec(window=64, num_kv_heads=8)],
    "quantised, and a draft layer in the model's type": [*[spec().as_cached("int8_per_token_head")] * 3, spec()],
    "quantised windows": [some.as_cached("fp8_per_token_head") for some in GEMMA_3],
    "unaligned": [spec(num_kv_heads=1, head_dim=3, window=window) for window in (None, 32, None, 32)],
}


def layer_bytes(some: KvSpec) -> int:
    """Of one block, aligned."""
    return -(-some.token_bytes * BLOCK_SIZE // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def padding_of(specs: list[KvSpec], layout: KvLayout) -> float:
    return len(layout.groups) * layout.page_bytes / sum(map(layer_bytes, specs)) - 1


def test_a_tokens_bytes_are_keys_values_and_the_scales_of_both():
    assert spec(num_kv_heads=2, head_dim=8, itemsize=2).token_bytes == 64
    quantised = spec(num_kv_heads=2, head_dim=8, itemsize=2).as_cached("int8_per_token_head")
    assert quantised.token_bytes == 2 * 2 * (8 + 4)


def test_a_cache_of_the_models_type_changes_nothing():
    assert spec(window=4).as_cached("auto") == spec(window=4)


def test_a_latent_layer_keeps_one_tensor():
    latent = KvSpec(num_kv_heads=1, key_dim=576, value_dim=0, dtype="bfloat16", itemsize=2)
    assert (latent.num_tensors, latent.token_bytes) == (1, 1152)
    assert latent.as_cached("fp8_per_token_head").token_bytes == 576 + 4
    assert (spec().num_tensors, spec(window=4).num_tensors) == (2, 2)


def test_keys_and_values_may_differ_in_size():
    uneven = KvSpec(num_kv_heads=2, key_dim=24, value_dim=16, dtype="bfloat16", itemsize=2)
    assert uneven.token_bytes == 2 * 2 * (24 + 16)
    assert uneven.as_cached("int8_per_token_head").head_parts == (4, 4, 24, 16)


@pytest.mark.parametrize(
    ("reach", "first_seen"),
    [
        (FULL, [0, 0, 0, 0, 0, 0, 0]),
        (Reach.window(3), [0, 0, 0, 1, 2, 3, 4]),
        (Reach.chunk(3), [0, 0, 0, 3, 3, 3, 6]),
    ],
    ids=str,
)
def test_a_reach_says_where_what_a_token_sees_begins(reach: Reach, first_seen: list[int]):
    assert [reach.first_seen(position) for position in range(7)] == first_seen


def test_chunks_and_windows_of_one_size_are_two_reaches():
    specs = [replace(spec(), reach=reach) for reach in (Reach.chunk(8), Reach.window(8), Reach.chunk(8))]
    assert [group.specs for group in make_layout(specs, BLOCK_SIZE).groups] == [(0,), (2,), (1,)]


def test_layers_of_one_reach_are_one_group_in_order():
    layout = make_layout([spec()] * 5, BLOCK_SIZE)
    assert layout.groups == (KvGroup((0, 1, 2, 3, 4)),)
    assert layout.page_bytes == 5 * LAYER_BYTES
    assert layout.block_size == BLOCK_SIZE
    assert [place.offset_bytes for place in layout.places] == [index * LAYER_BYTES for index in range(5)]


def test_one_window_is_one_reach():
    layout = make_layout([spec(window=32)] * 3, BLOCK_SIZE)
    assert layout.groups == (KvGroup((0, 1, 2), Reach.window(32)),)


def test_full_and_window_layers_become_groups_of_equally_many():
    """4 full and 22 window layers: pages of 4 would leave 2 of 28 places idle (7.7 %), which is within the bound."""
    layout = make_layout(GEMMA_3, BLOCK_SIZE)
    assert layout.page_bytes == 4 * LAYER_BYTES
    assert [(len(group.specs), group.reach.size) for group in layout.groups] == [
        *[(4, 512)] * 5, (2, 512), (4, None)
    ]  # fmt: skip
    assert layout.groups[-1].specs == (5, 11, 17, 23)


def test_the_largest_page_within_the_padding_bound_is_taken():
    """Of 3 full and 10 window layers pages of 2 leave 1 of 14 places idle (7.7 %), pages of 3 would leave 2 of 15."""
    specs = [spec()] * 3 + [spec(window=8)] * 10
    assert make_layout(specs, BLOCK_SIZE).page_bytes == 2 * LAYER_BYTES


def test_where_nothing_is_close_the_least_padding_is_taken():
    """Layers of 2 and 2 units see everything, three of 3 units a window: 15 places of 3 for 13 beat 16 of 4."""
    specs = [*[spec(num_kv_heads=4)] * 2, *[spec(window=8, num_kv_heads=6)] * 3]
    assert make_layout(specs, BLOCK_SIZE).page_bytes == 3 * LAYER_BYTES


def test_a_page_holds_the_largest_layer():
    """One layer as large as all others of its reach, and alone in pages that are as large as itself."""
    layout = make_layout(LAYOUTS["larger window layers"], BLOCK_SIZE)
    assert layout.page_bytes == 4 * LAYER_BYTES
    assert layout.groups == (KvGroup((0,), Reach.window(64)), KvGroup((3,), Reach.window(64)), KvGroup((1, 2)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layer_has_exactly_one_place_in_a_group_of_its_reach(name):
    specs = LAYOUTS[name]
    layout = make_layout(specs, BLOCK_SIZE)
    assert sorted(layer for group in layout.groups for layer in group.specs) == list(range(len(specs)))
    assert len(layout.places) == len(specs)
    for layer, (some, place) in enumerate(zip(specs, layout.places, strict=True)):
        assert layer in layout.groups[place.group].specs
        assert layout.groups[place.group].reach == some.reach


@pytest.mark.parametrize("name", LAYOUTS)
def test_places_are_aligned_and_neither_overlap_nor_leave_the_page(name):
    specs = LAYOUTS[name]
    layout = make_layout(specs, BLOCK_SIZE)
    for group in layout.groups:
        end = 0
        for layer in group.specs:
            offset = layout.places[layer].offset_bytes
            assert offset % ALIGNMENT_BYTES == 0
            assert offset >= end
            end = offset + specs[layer].token_bytes * BLOCK_SIZE
        assert end <= layout.page_bytes
    assert layout.page_bytes % ALIGNMENT_BYTES == 0


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "larger window layers"])
def test_padding_stays_within_the_bound_where_sizes_allow_it(name):
    assert padding_of(LAYOUTS[name], make_layout(LAYOUTS[name], BLOCK_SIZE)) <= MAX_PADDING


def test_a_draft_layer_larger_than_all_others_gets_a_page_it_fits_in():
    specs = [*[spec(window=8)] * 6, spec(), spec(num_kv_heads=16)]
    layout = make_layout(specs, BLOCK_SIZE)
    assert layout.page_bytes >= layer_bytes(specs[-1])


def test_a_page_is_a_multiple_of_the_alignment_even_for_odd_layers():
    odd = KvSpec(num_kv_heads=1, key_dim=3, value_dim=3, dtype="int8", itemsize=1)
    layout = make_layout([odd, odd], 1)
    assert [place.offset_bytes for place in layout.places] == [0, ALIGNMENT_BYTES]
    assert layout.page_bytes == 2 * ALIGNMENT_BYTES


def stages_of(num_layers: int, num_stages: int) -> list[range]:
    ends = [num_layers * index // num_stages for index in range(num_stages + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_stages_have_the_same_groups_and_pages_of_their_own_layers(name, num_stages):
    specs, stages = LAYOUTS[name], stages_of(len(LAYOUTS[name]), num_stages)
    layouts = [stage_layout(specs, BLOCK_SIZE, stages, index) for index in range(num_stages)]
    assert len({layout.groups for layout in layouts}) == 1
    assert sorted(layer for group in layouts[0].groups for layer in group.specs) == list(range(len(specs)))
    for layers, layout in zip(stages, layouts, strict=True):
        ends = [0] * len(layout.groups)
        for layer, place in zip(layers, layout.places, strict=True):
            assert layer in layout.groups[place.group].specs
            assert layout.groups[place.group].reach == specs[layer].reach
            assert place.offset_bytes == ends[place.group]
            ends[place.group] += layer_bytes(specs[layer])
        assert max(ends) == layout.page_bytes


def test_groups_take_layers_from_all_stages_so_that_none_has_idle_pages():
    specs, stages = LAYOUTS["gemma 3"], [range(13), range(13, 26)]
    whole = make_layout(specs, BLOCK_SIZE)
    for index in range(2):
        layout = stage_layout(specs, BLOCK_SIZE, stages, index)
        assert len(layout.groups) == len(whole.groups)
        assert layout.page_bytes == whole.page_bytes / 2


def test_one_reach_is_one_group_on_every_stage():
    first, last = (stage_layout([spec()] * 5, BLOCK_SIZE, [range(3), range(3, 5)], index) for index in range(2))
    assert [group.specs for group in first.groups] == [(0, 3, 1, 4, 2)]
    assert (first.page_bytes, last.page_bytes) == (3 * LAYER_BYTES, 2 * LAYER_BYTES)
    assert [place.offset_bytes for place in last.places] == [0, LAYER_BYTES]


@pytest.mark.parametrize("specs", LAYOUTS.values(), ids=LAYOUTS)
def test_layers_of_twice_the_size_stay_in_their_groups(specs: list[KvSpec]):
    larger = [replace(spec, key_dim=2 * spec.key_dim, value_dim=2 * spec.value_dim) for spec in specs]
    assert resized_layout(make_layout(specs, BLOCK_SIZE), larger) == make_layout(larger, BLOCK_SIZE)
    stages = [range(2), range(2, len(specs))]
    for index, layers in enumerate(stages):
        of_stage = stage_layout(specs, BLOCK_SIZE, stages, index)
        resized = resized_layout(of_stage, [larger[layer] for layer in layers])
        assert resized == stage_layout(larger, BLOCK_SIZE, stages, index)
