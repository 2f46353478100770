"""Arrays keep their values and shapes on the way to the device and back."""

import numpy as np
import pytest
import torch

from kvasir_runtime.execution.transfers import Transfers, pack, unpack

ARRAYS = (np.arange(5, dtype=np.int32), np.array([[1.5], [2.5]], dtype=np.float32).T, np.array([True]), np.array([-1]))


def test_a_cpu_shares_the_memory() -> None:
    array = np.arange(3)
    (tensor,) = Transfers(torch.device("cpu")).upload(array)
    assert tensor.data_ptr() == array.ctypes.data


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_values_and_shapes_survive(device: str) -> None:
    transfers = Transfers(torch.device(device))
    uploaded = transfers.upload(*ARRAYS)
    assert {tensor.device.type for tensor in uploaded} == {device}
    assert {tensor.data_ptr() % 16 for tensor in uploaded} == {0}
    for array, returned in zip(ARRAYS, transfers.download(uploaded).arrays(), strict=True):
        assert returned.dtype == array.dtype
        np.testing.assert_array_equal(returned, array)


def test_packed_arrays_stay_aligned() -> None:
    parts = unpack(pack(ARRAYS, pin_memory=False), ARRAYS)
    assert {part.data_ptr() % 16 for part in parts} == {0}
    for array, part in zip(ARRAYS, parts, strict=True):
        np.testing.assert_array_equal(part.numpy(), array)
