"""The compiled kernels as C functions: called through ctypes, which lets go of the GIL and costs about 2 us a call.

A torch extension would cost the same per call and 30 s more to compile.
"""

import ctypes
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from kvasir_runtime.kernels.build import build_library, find_compiler
from kvasir_runtime.kernels.prebuilt import find_prebuilt

logger = logging.getLogger(__name__)

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The types that are compiled, by their numbers in vec.h."""

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_DOUBLE = ctypes.c_double

_SIGNATURES: dict[str, list[type[Any]]] = {
    "kvasir_rms_norm": [_INT, _INT, _POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER, _POINTER, _LONG, _FLOAT],
    "kvasir_add_rms_norm": [
        _INT, _INT, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG, _FLOAT,
    ],
    "kvasir_silu_and_mul": [_INT, _POINTER, _LONG, _POINTER, _LONG, _LONG],
    "kvasir_gelu_tanh_and_mul": [_INT, _POINTER, _LONG, _POINTER, _LONG, _LONG],
    "kvasir_rotate_and_write": [
        _INT, _INT, _POINTER, _LONG, _LONG, _POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _FLOAT,
        _POINTER, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER, _LONG,
    ],
    "kvasir_argmax": [_INT, _POINTER, _LONG, _POINTER, _LONG, _LONG],
    "kvasir_sample": [_INT, _POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _POINTER],
    "kvasir_prepare_inputs": [
        *(_POINTER, _LONG, _POINTER, _POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG),
        *(_POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _POINTER, _POINTER),
    ],
    "kvasir_verify_drafts": [
        *(_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _LONG, _LONG),
        *(_POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _POINTER),
    ],
    "kvasir_linear_pack": [_POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER],
    "kvasir_linear_rows": [_POINTER, _POINTER, _LONG, _POINTER],
    "kvasir_linear": [_POINTER, _INT, _POINTER, _LONG, _LONG, _POINTER, _LONG],
    "kvasir_grouped_linear": [
        *(_POINTER, _LONG, _POINTER, _POINTER, _LONG, _INT, _INT, _POINTER, _LONG, _POINTER, _LONG),
    ],
    "kvasir_route": [_INT, _POINTER, _LONG, _LONG, _LONG, _LONG, _INT, _POINTER, _POINTER],
    "kvasir_group_by_expert": [_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER],
    "kvasir_combine_experts": [_INT, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _LONG, _LONG, _LONG],
    "kvasir_attention_plan": [
        _INT, _POINTER, _POINTER, _POINTER, _LONG, _POINTER, _INT, _INT, _INT, _INT, _INT, _INT, _INT, _INT,
    ],
    "kvasir_attention_divide": [_POINTER],
    "kvasir_attention_free": [_POINTER],
    "kvasir_attention": [
        _POINTER, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG, _LONG, _FLOAT, _FLOAT,
    ],
    "kvasir_linear_has": [_INT],
    "kvasir_shared_all_reduce": [_POINTER, _INT, _POINTER, _LONG],
    "kvasir_shared_all_gather": [_POINTER, _POINTER, _POINTER, _LONG, _LONG],
    "kvasir_shared_broadcast": [_POINTER, _POINTER, _LONG, _LONG],
    "kvasir_replay": [_POINTER, _LONG],
    "kvasir_team_size_observe": [_POINTER, _LONG, _DOUBLE, _DOUBLE, _DOUBLE, _DOUBLE],
}  # fmt: skip
_RESULTS = {"kvasir_linear_has": _INT, "kvasir_attention_plan": _POINTER}


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The compiled kernels, or None (said once in the log) where none came along and no compiler can make them.

    Raises KernelBuildError when a compiler is there but fails.
    """
    path = _prebuilt_library() or _built_library()
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    for name, argument_types in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = argument_types
        function.restype = _RESULTS.get(name)
        setattr(library, name, NativeFunction(name, function, argument_types))
    return library


class CallObserver(Protocol):
    """Whom a thread's calls of compiled kernels are shown to before they are made."""

    def note_call(self, function: "NativeFunction", arguments: tuple[Any, ...]) -> None: ...

    def keep(self, owner: object) -> None:
        """Calls point into what `owner` holds."""

    def refuse(self, problem: str) -> None:
        """Something happens that is no call of a kernel."""


_observed = threading.local()


@contextmanager
def observed_by(observer: CallObserver) -> Iterator[None]:
    """Show this thread's calls to `observer` meanwhile."""
    _observed.observer = observer
    try:
        yield
    finally:
        _observed.observer = None


def keep_while_recorded(owner: object) -> None:
    """To be said of what kernels are given the address of, and that is no tensor."""
    observer: CallObserver | None = getattr(_observed, "observer", None)
    if observer is not None:
        observer.keep(owner)


def refuse_recording(problem: str) -> None:
    """To be said of what changes tensors and is neither a compiled kernel nor an operator of torch."""
    observer: CallObserver | None = getattr(_observed, "observer", None)
    if observer is not None:
        observer.refuse(problem)


class NativeFunction:
    """A compiled kernel."""

    __slots__ = ("_function", "argument_types", "name")

    def __init__(self, name: str, function: Callable[..., Any], argument_types: Sequence[type[Any]]) -> None:
        self.name = name
        self.argument_types = argument_types
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        observer: CallObserver | None = getattr(_observed, "observer", None)
        if observer is not None:
            observer.note_call(self, arguments)
        return self._function(*arguments)


@functools.cache
def warn_of_twin(kernel: str, reason: str) -> None:
    """Say once that a kernel's plain twin computes what the compiled one cannot."""
    logger.warning("%s runs as plain torch, several times slower than compiled: %s", kernel, reason)


def _prebuilt_library() -> Path | None:
    path = find_prebuilt()
    if path is not None:
        logger.info("the CPU kernels were compiled ahead: %s", path.name)
    return path


def _built_library() -> Path | None:
    compiler = find_compiler()
    if compiler is None:
        logger.warning("no C++ compiler found: the CPU kernels run as plain torch, several times slower; install g++")
        return None
    return build_library(compiler)
