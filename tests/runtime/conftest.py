"""One thread for the tests' tiny tensors: a team of them would only wait for each other on cores that others use."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
