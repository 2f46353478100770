"""The Triton linear layer of few rows against its torch twin, and that a row's result is its own."""

import pytest
import torch
from tests.runtime.compilations import Compilations
from tests.runtime.kernels.triton_device import DEVICE, GPU_MARKS, TOLERANCES, randn

from kvasir_runtime.kernels.few_rows_triton import (
    MOST_ROWS,
    NARROW,
    SHORT,
    WIDE,
    FewRowsWeight,
    Tile,
    choose_tile,
    suits,
)
from kvasir_runtime.kernels.linear import PlainWeight
from kvasir_runtime.kernels.linear_choice import make_weight
from kvasir_runtime.kernels.rms_norm_triton import triton_rms_norm

pytestmark = GPU_MARKS

TILES = [SHORT, NARROW, WIDE]
HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 64, 512), (3, 70, 1040), (8, 16, 2048), (16, 33, 528)])
def test_agrees_with_its_twin(
    rows: int, outputs: int, inputs: int, has_bias: bool, tile: Tile, dtype: torch.dtype
) -> None:
    weight, x = randn(outputs, inputs, dtype=dtype) / inputs**0.5, randn(rows, inputs, dtype=dtype)
    bias = randn(outputs, dtype=dtype) if has_bias else None
    ours, twin = FewRowsWeight(weight, bias, tile)(x), PlainWeight(weight, bias)(x)
    torch.testing.assert_close(ours, twin, **TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize("tile", TILES)
def test_a_row_is_multiplied_alike_alone_and_among_others(tile: Tile) -> None:
    weight = FewRowsWeight(randn(70, 2048, dtype=torch.bfloat16), None, tile)
    x = randn(MOST_ROWS, 2048, dtype=torch.bfloat16)
    among_many = weight(x)
    for n in (1, 2, 7):
        assert torch.equal(weight(x[:n]), among_many[:n])
        assert torch.equal(weight(x[-n:]), among_many[-n:])


def test_reads_rows_that_are_not_adjacent_and_of_any_dimensions() -> None:
    plain, wide = randn(40, 48, dtype=torch.bfloat16), randn(2, 3, 96, dtype=torch.bfloat16)
    weight = FewRowsWeight(plain, None)
    assert torch.equal(weight(wide[..., :48]), weight(wide[..., :48].contiguous()))
    assert weight(wide[:0, :, :48]).shape == (0, 3, 40)
    assert torch.equal(weight.rows(torch.tensor([3, 0], device=DEVICE)), plain[[3, 0]])


def test_more_rows_are_its_twins() -> None:
    plain, x = randn(64, 64, dtype=torch.bfloat16), randn(MOST_ROWS + 1, 64, dtype=torch.bfloat16)
    assert torch.equal(FewRowsWeight(plain, None)(x), PlainWeight(plain, None)(x))


def test_nothing_is_compiled_after_it_was_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = FewRowsWeight(randn(32, 512, dtype=torch.bfloat16), None)
    compilations = Compilations(monkeypatch)
    weight.compile()
    compiled = [*compilations.kernels]
    for num_rows in (1, 2, 8, 9, 16):
        weight(randn(num_rows, 512, dtype=torch.bfloat16))
    assert compiled
    assert compilations.kernels == compiled


@pytest.mark.gpu
def test_what_starts_early_waits_for_its_rows() -> None:
    plain, norm, x = (randn(*shape, dtype=torch.bfloat16).cuda() for shape in ((4096, 4096), (4096,), (4, 4096)))

    def twenty_layers(starts_early: bool) -> torch.Tensor:
        weight, hidden = FewRowsWeight(plain, None, starts_early=starts_early), x
        for _ in range(20):
            hidden = weight(triton_rms_norm(weight(hidden), norm, 1e-6))
        return hidden

    wanted = twenty_layers(starts_early=False)
    twenty_layers(starts_early=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = twenty_layers(starts_early=True)
    for _ in range(50):
        graph.replay()
    assert torch.equal(found, wanted)


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_choice_for_half_precision_unless_torch_is_asked_for() -> None:
    weight = torch.zeros(512, 64, dtype=torch.bfloat16, device="cuda")
    assert make_weight(weight).name == "few rows"
    assert make_weight(weight, path="torch").name == "torch"
    assert make_weight(weight.float()).name == "torch"


@pytest.mark.parametrize(
    ("shape", "dtype", "is_suited"),
    [
        ((512, 1024), torch.bfloat16, True),
        ((512, 1024), torch.float16, True),
        ((512, 1024), torch.float32, False),
        ((64, 1024), torch.bfloat16, False),
        ((512, 1020), torch.bfloat16, False),
    ],
)
def test_which_weights_it_is_for(shape: tuple[int, int], dtype: torch.dtype, is_suited: bool) -> None:
    assert suits(torch.empty(shape, dtype=dtype, device="meta")) is is_suited


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "tile"), [(4096, 1024, SHORT), (4096, 4096, NARROW), (151_936, 1024, WIDE)]
)
def test_the_tile_follows_from_the_weight(num_outputs: int, num_inputs: int, tile: Tile) -> None:
    assert choose_tile(num_outputs, num_inputs) == tile


@pytest.mark.parametrize("tile", TILES)
def test_its_buffers_fit_into_shared_memory(tile: Tile) -> None:
    for num_rows in (8, 16):
        buffers = tile.stages(num_rows) - 1
        assert buffers >= 2
        assert buffers * (tile.outputs + num_rows) * tile.inputs * 2 <= 96 * 1024
