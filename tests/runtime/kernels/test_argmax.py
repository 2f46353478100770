"""The compiled argmax agrees with torch's."""

import pytest
import torch

from kvasir_runtime.kernels.step_ops import cpu_step_ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 5), (3, 32000), (64, 1003)], ids=str)
def test_finds_the_largest(shape: tuple[int, int], dtype: torch.dtype) -> None:
    logits = torch.randn(shape).to(dtype)
    found = cpu_step_ops().argmax(logits)
    assert torch.equal(logits.gather(1, found[:, None])[:, 0], logits.amax(1))


def test_the_first_of_equals_wins() -> None:
    logits = torch.zeros(2, 100)
    logits[0, 41] = logits[0, 17] = 3.0
    assert cpu_step_ops().argmax(logits).tolist() == [17, 0]
