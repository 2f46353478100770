from dataclasses import replace

import pytest
import torch

from kvasir_runtime.attention.backend import DecodeBounds
from kvasir_runtime.attention.select import check_readable, select_backend
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.kv_cache.spec import KvSpec, Reach


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


SPEC = KvSpec(num_kv_heads=2, key_dim=24, value_dim=24, dtype="bfloat16", itemsize=2)


@pytest.mark.parametrize("backend", ["cpu", "triton", "reference"])
def test_chunks_are_refused_before_anything_is_loaded(backend: str) -> None:
    with pytest.raises(ConfigurationError, match="their own chunk of 8192 tokens"):
        check_readable(backend, [SPEC, replace(SPEC, reach=Reach.chunk(8192))])


def test_keys_and_values_of_two_sizes_are_read_by_the_reference_alone() -> None:
    uneven = replace(SPEC, value_dim=16)
    check_readable("reference", [uneven])
    for backend in ("cpu", "triton"):
        check_readable(backend, [SPEC, replace(SPEC, reach=Reach.window(4))])
        with pytest.raises(ConfigurationError, match=f"{backend}.* keys of 24 numbers and values of 16: add"):
            check_readable(backend, [SPEC, uneven])
