"""Records what a computation on a CPU does, to do it again without the interpreter: to a CPU what a CUDA graph is to a
GPU. Compiled kernels are called from C one after the other, on the same addresses; operators of torch in their places.

Whatever the computation reads must stay where it is, and be changed in place from one replay to the next. What it makes
lies in memory of the recording's own. It must neither look at a number on the host, since what it decides by one is
decided once, nor bring any from there (`torch.from_numpy` is not noticed). Nor may it decide by anything else that
changes from one replay to the next: what Python holds in a variable is not noticed either.
"""

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from ctypes import CDLL
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvasir_runtime.kernels.native import NativeFunction, observed_by

_ONCE = ("kvasir_attention_plan", "kvasir_attention_free", "kvasir_linear_has")
"""What they make or say holds for every replay."""
_HOST_READS = ("tolist", "numpy", "item", "__array__", "__bool__", "__int__", "__float__", "__index__", "__dlpack__")
_HOST_WRITES = ("tensor", "as_tensor")
_ALIGNMENT = 64
_CHUNK_BYTES = 4 * 1024 * 1024


class RecordingError(Exception):
    """The computation cannot be done again as recorded; the message says what stands against it."""


@dataclass(frozen=True, slots=True)
class TorchCall:
    """An operator of torch; `results` are the new tensors that it made when it was recorded."""

    operator: Callable[..., Any]
    arguments: Sequence[Any]
    options: Mapping[str, Any]
    results: tuple[Tensor, ...]

    def __call__(self) -> None:
        again = self.operator(*self.arguments, **self.options)
        if self.results:
            for kept, result in zip(self.results, _tensors(again), strict=True):
                kept.copy_(result)


class KernelCalls:
    """Compiled kernels in a row."""

    def __init__(self, library: CDLL) -> None:
        self._library = library
        self._again: list[int] = []
        self._words: list[list[int]] = []

    def add(self, function: NativeFunction, again: int, arguments: Sequence[Any]) -> None:
        self._again.append(again)
        self._words.append([_word(of, value) for of, value in zip(function.argument_types, arguments, strict=True)])

    def packed(self, kept: list[object]) -> Callable[[], object]:
        """One call for all; `kept` gets what it points into."""
        words = [(ctypes.c_int64 * len(of))(*of) for of in self._words]
        pairs = [
            number for again, of in zip(self._again, words, strict=True) for number in (again, ctypes.addressof(of))
        ]
        calls = (ctypes.c_int64 * len(pairs))(*pairs)
        kept += (calls, words)
        return functools.partial(self._library.kvasir_replay, ctypes.addressof(calls), len(pairs) // 2)


class Arena:
    """Memory that recordings share which are replayed one at a time."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._chunk = 0
        self._offset = 0

    @property
    def num_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    def begin(self) -> None:
        """What was taken before may be taken again."""
        self._chunk = self._offset = 0

    def take(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        shape = torch.Size(size)
        num_bytes = -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        while self._chunk < len(self._chunks) and self._offset + num_bytes > self._chunks[self._chunk].nbytes:
            self._chunk, self._offset = self._chunk + 1, 0
        if self._chunk == len(self._chunks):
            self._chunks.append(torch.empty(max(num_bytes, _CHUNK_BYTES), dtype=torch.uint8))
        start, self._offset = self._offset, self._offset + num_bytes
        return self._chunks[self._chunk][start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Recording:
    calls: Sequence[Callable[[], object]]
    """To be made one after the other."""
    kept: Sequence[object]
    """What they point into."""


class Recorder:
    """Within it, this thread's kernels are noted while they run."""

    def __init__(self, library: CDLL, arena: Arena) -> None:
        self._library = library
        self._arena = arena
        self._calls: list[KernelCalls | TorchCall] = []
        self._kept: list[object] = [arena]
        self._problem: str | None = None
        self._modes = ExitStack()

    def __enter__(self) -> "Recorder":
        for mode in (observed_by(self), _HostNumbers(self), _Operators(self)):
            self._modes.enter_context(mode)
        return self

    def __exit__(self, *error: object) -> None:
        self._modes.close()

    def recording(self) -> Recording:
        """Raises RecordingError."""
        if self._problem is not None:
            raise RecordingError(self._problem)
        calls = [call.packed(self._kept) if isinstance(call, KernelCalls) else call for call in self._calls]
        return Recording(calls, self._kept)

    def refuse(self, problem: str) -> None:
        """The computation goes on, as others may be waiting for this rank; there will be no recording of it."""
        self._problem = self._problem or problem

    def keep(self, owner: object) -> None:
        self._kept.append(owner)

    def note_call(self, function: NativeFunction, arguments: tuple[Any, ...]) -> None:
        if function.name in _ONCE:
            return
        again = getattr(self._library, f"{function.name}_again", None)
        if again is None:
            self.refuse(f"{function.name} is not made to be called again")
            return
        last = self._calls[-1] if self._calls else None
        if not isinstance(last, KernelCalls):
            last = KernelCalls(self._library)
            self._calls.append(last)
        last.add(function, ctypes.cast(again, ctypes.c_void_p).value or 0, arguments)

    def run_operator(self, operator: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        if operator is torch.ops.aten.empty.memory_format:
            return self._arena.take(arguments[0], options.get("dtype") or torch.get_default_dtype())
        if operator is torch.ops.aten.new_empty.default:
            return self._arena.take(arguments[1], options.get("dtype") or arguments[0].dtype)
        result = operator(*arguments, **options)
        if operator.is_view:
            return result
        if operator.namespace != "aten" or _depends_on_data(operator, arguments):
            self.refuse(f"{operator} cannot be called again")
        new = () if operator._schema.is_mutable else tuple(_tensors(result))
        self._calls.append(TorchCall(operator, arguments, options, new))
        return result


class _Operators(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's own switch: to skip its compiler, torch would import it, for seconds in the midst of serving."""
        return False

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._recorder.run_operator(operator, args, kwargs or {})


class _HostNumbers(TorchFunctionMode):
    """Refuses a computation that takes a tensor's numbers to Python, or brings some from there."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in _HOST_READS or name in _HOST_WRITES:
            self._recorder.refuse(f"{name} passes numbers between torch and the host")
        return function(*args, **(kwargs or {}))


def _depends_on_data(operator: Any, arguments: Sequence[Any]) -> bool:
    """Whether the numbers decide on the result's shape, or are the result."""
    if operator is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype == torch.bool for index in arguments[1])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(operator.tags))


def _tensors(result: Any) -> list[Tensor]:
    parts = result if isinstance(result, tuple | list) else (result,)
    return [part for part in parts if isinstance(part, Tensor)]


def _word(kind: type[Any], value: Any) -> int:
    """The argument in the front bytes of eight."""
    if kind is ctypes.c_float:
        word: int = struct.unpack("<q", struct.pack("<fi", value, 0))[0]
        return word
    return int(value or 0)
