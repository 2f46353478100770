import pytest
import torch

from kvasir_runtime.attention.select import select_backend
from kvasir_runtime.attention.step_lengths import DecodeBounds
from kvasir_runtime.errors import ConfigurationError


@pytest.mark.parametrize(("name", "chosen"), [("auto", "cpu"), ("cpu", "cpu"), ("reference", "reference")])
def test_backend_of_the_cpu(name: str, chosen: str) -> None:
    assert select_backend(name, torch.device("cpu"), DecodeBounds(1, 1)).name == chosen


def test_a_backend_of_another_device_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"'triton' does not run on cpu; expected auto or one of cpu, reference"
    ):
        select_backend("triton", torch.device("cpu"), DecodeBounds(1, 1))


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_a_quantised_cache_is_refused_where_nothing_reads_it(name: str) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"'cpu' cannot read --kv-cache-dtype int8_per_token_head: .*--attention-backend reference",
    ):
        select_backend(name, torch.device("cpu"), DecodeBounds(1, 1), "int8_per_token_head")
    assert (
        select_backend("reference", torch.device("cpu"), DecodeBounds(1, 1), "int8_per_token_head").name == "reference"
    )
