"""Finds what would make the host wait for a GPU, on a CPU: reading a tensor's numbers, or sending some to it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

READS = {"item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "__array__"}
READS |= {"__bool__", "__int__", "__float__", "__index__"}
SENDS = ("from_numpy", "tensor", "as_tensor")


class HostReads(TorchFunctionMode):
    """Collects them between `__enter__` and `__exit__`, but for what runs in `unseen`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[str] = []
        self._is_on = False
        for name in SENDS:
            monkeypatch.setattr(torch, name, self._noting(name, getattr(torch, name)))

    def __enter__(self) -> "HostReads":
        self._is_on = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._is_on = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name in READS or (name in ("__getitem__", "__setitem__") and _has_mask(args[1])):
            self._note(name)
        if name == "__setitem__" and _tensors(args[1]) and not isinstance(args[2], Tensor):
            self._note("number sent")  # by some versions of torch; index_fill_ takes it along with its launch
        if name == "repeat_interleave" and "output_size" not in (kwargs or {}):
            self._note(name)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def unseen(self) -> Iterator[None]:
        was_on, self._is_on = self._is_on, False
        yield
        self._is_on = was_on

    def _note(self, name: str) -> None:
        if self._is_on:
            self.found.append(name)

    def _noting(self, name: str, call: Any) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            self._note(name)
            return call(*args, **kwargs)

        return noting


def unseen_by(reads: HostReads, call: Callable[..., Any]) -> Callable[..., Any]:
    def unseen(*args: Any, **kwargs: Any) -> Any:
        with reads.unseen():
            return call(*args, **kwargs)

    return unseen


def _has_mask(index: Any) -> bool:
    return any(part.dtype == torch.bool for part in _tensors(index))


def _tensors(index: Any) -> list[Tensor]:
    return [part for part in (index if isinstance(index, tuple) else (index,)) if isinstance(part, Tensor)]
