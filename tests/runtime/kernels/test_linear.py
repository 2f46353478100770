"""Every path of a linear layer gives torch's product, and the automatic one is chosen from measurements."""

import pytest
import torch

from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.kernels.linear import VARIANTS, Linear
from kvasir_runtime.kernels.linear_choice import choose_variant, decide, dot_is_faster, least_seconds, make_weight
from kvasir_runtime.kernels.native import load_library

LIBRARY = load_library()
assert LIBRARY is not None
NATIVE = [
    pytest.param(
        name, marks=pytest.mark.skipif(not LIBRARY.kvasir_linear_has(code), reason=f"this processor cannot run {name}")
    )
    for name, code in VARIANTS.items()
]
SHAPES = [(48, 64), (40, 72), (17, 31), (512, 256), (1, 8), (336, 768)]


def make(weight: torch.Tensor, bias: torch.Tensor | None = None, path: str = "auto") -> Linear:
    return make_weight(weight, bias, path)


def weight_and_input(outputs: int, inputs: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(outputs * rows)
    weight, x = (torch.randn(n, inputs, generator=random).to(torch.bfloat16) for n in (outputs, rows))
    return weight, x, x.double() @ weight.double().T


@pytest.mark.parametrize("path", ["torch", "auto", *NATIVE])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_path_gives_the_product_for_every_number_of_rows(shape: tuple[int, int], path: str) -> None:
    for rows in (0, 1, 2, 3, 7, 13, 16, 17, 33, 50, 65, 130):
        weight, x, expected = weight_and_input(*shape, rows)
        product = make(weight.clone(), path=path)(x)
        assert product.dtype == torch.bfloat16
        torch.testing.assert_close(product.double(), expected, atol=0.05, rtol=0.01)


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("rows", [640, 1001])
def test_more_rows_than_a_core_keeps_in_its_cache(path: str, rows: int) -> None:
    weight, x, expected = weight_and_input(80, 2080, rows)
    torch.testing.assert_close(make(weight, path=path)(x).double(), expected, atol=0.5, rtol=0.01)


@pytest.mark.parametrize("path", ["torch", *NATIVE])
def test_adds_a_bias(path: str) -> None:
    weight, x, expected = weight_and_input(40, 64, 20)
    bias = torch.arange(40).to(torch.bfloat16)
    product = make(weight, bias, path)(x)
    torch.testing.assert_close(product.double(), expected + bias.double(), atol=0.1, rtol=0.02)


@pytest.mark.parametrize("path", NATIVE)
def test_reads_rows_that_are_not_adjacent(path: str) -> None:
    weight, x, _ = weight_and_input(48, 64, 40)
    layer = make(weight, path=path)
    wide = torch.cat((x, torch.full((40, 24), torch.nan, dtype=torch.bfloat16)), dim=1)
    assert torch.equal(layer(wide[:, :64]), layer(x))
    assert torch.equal(layer(x.T.contiguous().T), layer(x))


@pytest.mark.parametrize("path", ["torch", "auto"])
@pytest.mark.parametrize("inputs", [64, 31])
def test_rows_of_the_weight_come_back_as_they_were(path: str, inputs: int) -> None:
    weight, _, _ = weight_and_input(50, inputs, 1)
    ids = torch.tensor([49, 0, 17, 17, 3, 31, 32, 5, 40, 41])
    assert torch.equal(make(weight.clone(), path=path).rows(ids), weight[ids])


def test_float32_products_are_torchs_own() -> None:
    weight, x = torch.randn(40, 64), torch.randn(5, 64)
    layer = make(weight)
    assert layer.name == "torch"
    assert torch.equal(layer(x), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("dot_seconds", [1.0, 0.9])
def test_dot_products_serve_other_kernels_where_they_were_faster(dot_seconds: float) -> None:
    times = {"fma": 1.0, "dot": dot_seconds}
    has_dot = bool(LIBRARY.kvasir_linear_has(VARIANTS["dot"]))
    is_faster = dot_is_faster(LIBRARY, lambda ways, x: {name: times[name] for name in ways})
    assert is_faster == (has_dot and dot_seconds < 1.0)


def test_auto_measures_and_names_its_choice() -> None:
    weight, x, expected = weight_and_input(96, 64, 8)
    layer = make(weight)
    assert layer.name in {f"packed:{name}" for name in VARIANTS}
    torch.testing.assert_close(layer(x).double(), expected, atol=0.05, rtol=0.01)


def test_what_loses_least_over_all_numbers_of_rows_serves_them_all() -> None:
    times = {
        1: {"fma": 1.0, "dot": 1.5, "amx": 4.0},
        8: {"fma": 3.0, "dot": 1.0, "amx": 2.0},
        64: {"fma": 3.0, "dot": 2.5, "amx": 1.0},
    }
    assert decide(times) == "dot"
    assert decide({**times, 256: {"fma": 9.0, "dot": 8.0, "amx": 1.0}}) == "amx"


def test_without_a_compiler_torch_multiplies_unless_our_instructions_were_asked_for() -> None:
    weight = torch.zeros(4, 4, dtype=torch.bfloat16)
    assert choose_variant(None, "auto", weight) is None
    with pytest.raises(ConfigurationError, match="'fma' needs compiled kernels but no compiler was found; install g"):
        choose_variant(None, "fma", weight)


def test_a_timing_in_which_the_clock_stood_still_does_not_count() -> None:
    readings = iter([0.0, 0.0, 0.0, 0.002])
    assert least_seconds(lambda x: x, torch.zeros(1), lambda: next(readings)) == 0.002
